"""Checks of combinations of arguments when a trainer is built. Each config class checks its own fields."""

from .arguments import check_arguments, check_not_averaged, resolve_federation, resolve_keep_local
from .data import (
    as_federated_dataset,
    check_clients,
    check_labeled,
    check_without_examples,
    example_of_the_format,
    sample_clients,
)
from .participants import check_participants, check_predictions, check_server_dataset
from .resume import check_resumed, federation_identity


__all__ = [
    "as_federated_dataset",
    "check_arguments",
    "check_clients",
    "check_labeled",
    "check_not_averaged",
    "check_participants",
    "check_predictions",
    "check_resumed",
    "check_server_dataset",
    "check_without_examples",
    "example_of_the_format",
    "federation_identity",
    "resolve_federation",
    "resolve_keep_local",
    "sample_clients",
]
