"""Settings that the parties of a federation over a network must share. The server compares them with each client."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainingArguments

from ..utils.weighted_mean import State
from .launch_consistency import describe_setup
from .setup import FederationSetup


# Settings of a federation that only the server uses, or that each party chooses for itself.
_OWN_FIELDS = frozenset(
    {
        "clients_per_round",
        "client_store",
        "evaluate_clients",
        "log_clients",
        "max_resident_clients",
        "max_update_ratio",
        "min_clients",
        "parallelism",
        "report_anomalies",
        "round_deadline",
        "server_device",
    }
)
# Training arguments that decide the result. Other arguments may differ, such as batch size, precision and device.
_SHARED_ARGUMENTS = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "data_seed",
        "label_smoothing_factor",
        "learning_rate",
        "lr_scheduler_type",
        "max_grad_norm",
        "max_steps",
        "num_train_epochs",
        "optim",
        "optim_args",
        "seed",
        "warmup_ratio",
        "warmup_steps",
        "weight_decay",
    }
)
_MAX_LENGTH = 500


class NetworkSettings:
    """
    Settings of a party, as text by name.

    Args:
        settings (`Mapping[str, str]`): The settings.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = dict(settings)

    @classmethod
    def of(cls, setup: FederationSetup, args: TrainingArguments) -> NetworkSettings:
        """
        Describe the settings of a trainer.

        Args:
            setup ([`FederationSetup`]): The arguments of the trainer.
            args (`TrainingArguments`): The user's training arguments.
        """
        described = describe_setup(
            args, setup.config, setup.aggregation, setup.distillation, setup.trainer.model, {}, setup.postprocessors
        )
        settings = {"version of hf-federated": importlib.metadata.version("hf-federated")}
        for name, text in described.items():
            prefix, _, field = name.partition(".")
            is_config = prefix == "FederatedConfig" and field.partition(".")[0] not in _OWN_FIELDS
            is_argument = prefix == type(args).__name__ and field.partition(".")[0] in _SHARED_ARGUMENTS
            if is_config or is_argument:
                settings[field if is_argument else name] = text
            elif prefix in ("aggregation", "distillation", "postprocessors"):
                settings[name] = text
        for name, digest in setup.participants.row_hashes.items():
            if name == "public_dataset":
                settings["content of `public_dataset`"] = digest
        model = setup.trainer.model
        settings["labels"] = str(getattr(model.config, "id2label", None)) if hasattr(model, "config") else "None"
        if setup.aggregation.exchanges_parameters:
            settings["model"] = described["model"]
            # A client receives the exchanged parameters from the server. It must already have all others.
            exchanged = set(setup.exchange.tensors)
            values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            frozen = {name: value for name, value in values.items() if name not in exchanged}
            settings["values of the frozen parameters"] = f"SHA-256 {digest_of(frozen)}"
        return cls({name: text[:_MAX_LENGTH] for name, text in settings.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings."""
        return dict(self.settings)

    def differences(self, theirs: Any) -> list[str]:
        """
        List the settings in which a client differs from the server.

        Args:
            theirs (`dict[str, Any]`): `to_dict()` of the client. It is untrusted input.

        Raises:
            ValueError: If `theirs` is not the output of `to_dict()`.
        """
        is_valid = isinstance(theirs, dict) and all(isinstance(text, str) for text in theirs.values())
        if not is_valid or len(theirs) > 10 * len(self.settings):
            raise ValueError("The settings of a client must be texts by name.")
        names = dict.fromkeys([*self.settings, *theirs])
        return [
            f"{name[:_MAX_LENGTH]}: {self.settings.get(name, 'not set')} at the server, "
            f"{theirs.get(name, 'not set')[:_MAX_LENGTH]} at the client"
            for name in names
            if self.settings.get(name) != theirs.get(name)
        ]


def digest_of(state: State) -> str:
    """Return the first digits of the SHA-256 digest of tensors with their names and dtypes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
