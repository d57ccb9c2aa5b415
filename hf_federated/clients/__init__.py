"""The client side of a federation: local training, the client worker, client state and the sampling of clients."""

from ..messages.validation import RefusedRequestError
from .agreement import Agreement
from .failures import UnsupportedTrainerError
from .local_training import client_arguments, fresh_collator
from .models import ClientModels, OwnModels, SharedModel
from .sampling import ClientSampler, RowLimit, batches_per_round, client_seed
from .spec import ClientSpec
from .store import ClientStore, DiskStore, MemoryStore
from .student import Student
from .worker import ClientWorker


__all__ = [
    "Agreement",
    "ClientModels",
    "ClientSampler",
    "ClientSpec",
    "ClientStore",
    "ClientWorker",
    "DiskStore",
    "MemoryStore",
    "OwnModels",
    "RefusedRequestError",
    "RowLimit",
    "SharedModel",
    "Student",
    "UnsupportedTrainerError",
    "batches_per_round",
    "client_arguments",
    "client_seed",
    "fresh_collator",
]
