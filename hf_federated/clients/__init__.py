"""Where clients train: the isolated trainer, the worker that answers messages, what clients keep, who is sampled."""

from .local_training import local_step_counts
from .sampling import ClientSampler, client_seed
from .store import ClientStore, DiskStore, MemoryStore
from .worker import ClientWorker


__all__ = [
    "ClientSampler",
    "ClientStore",
    "ClientWorker",
    "DiskStore",
    "MemoryStore",
    "client_seed",
    "local_step_counts",
]
