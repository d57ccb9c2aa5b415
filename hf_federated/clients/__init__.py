"""Where clients train: the isolated trainer, the worker that answers messages, what clients keep, who is sampled."""

from .local_training import UnsupportedTrainerError, batches_per_round, fresh_collator
from .sampling import ClientSampler, client_seed
from .store import ClientStore, DiskStore, MemoryStore
from .worker import ClientWorker


__all__ = [
    "ClientSampler",
    "ClientStore",
    "ClientWorker",
    "DiskStore",
    "MemoryStore",
    "UnsupportedTrainerError",
    "batches_per_round",
    "client_seed",
    "fresh_collator",
]
