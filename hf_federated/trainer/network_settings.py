"""Settings that the parties of a federation over a network must share. The server compares them with each client."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..utils.lora_modules import find_lora_modules, scaling_of
from ..utils.weighted_mean import State
from .checks.resume import CHANGEABLE_FIELDS
from .launch_consistency import describe_setup, shortened
from .setup import FederationSetup


# Settings of a federation that only the server uses, or that each party chooses for itself. The fields that a resumed
# run may change are among them, except those that a client holds the requests or its announcement against.
_OWN_FIELDS = {*CHANGEABLE_FIELDS, "clients_per_round", "round_deadline", "server_device"} - {
    "num_rounds",
    "max_examples_per_client",
}
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
# Arguments of subclasses of `TrainingArguments` that a party chooses for itself: how it loads its model, reads its
# examples, saves memory and generates texts for metrics.
_LOCAL_ARGUMENTS = re.compile(
    r"model_init_kwargs|trust_remote_code|dataset_\w+|shuffle_dataset|eval_packing|sortish_sampler|precompute_\w+_size"
    r"|padding_free|pad_to_multiple_of|activation_offloading|predict_with_generate|generation_\w+"
)
# Settings that are compared only if both parties have them. A party with encoded examples needs neither task nor
# tokenizer, and a client with its own files has no `partition.json`.
_COUNTS = "number of examples of each client"
_OPTIONAL = frozenset({"task", "tokenizer", _COUNTS})
_MAX_LENGTH = 500
# A longer list of labels ends with a digest.
_MAX_LABELS_LENGTH = 400


class NetworkSettings:
    """
    Settings of a party, as text by name.

    Args:
        settings (`Mapping[str, str]`): The settings.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.settings = dict(settings)

    @classmethod
    def of(
        cls,
        setup: FederationSetup,
        args: TrainingArguments,
        client_id: str | None = None,
        initial: State | None = None,
    ) -> NetworkSettings:
        """
        Describe the settings of a trainer.

        Args:
            setup ([`FederationSetup`]): The arguments of the trainer.
            args (`TrainingArguments`): The user's training arguments.
            client_id (`str`, *optional*): Id of the client. `None` for the server.
            initial (`dict[str, torch.Tensor]`, *optional*): The exchanged parameters before the first round. Defaults
                to the current parameters.
        """
        described = describe_setup(setup, args, datasets={})
        general = {item.name for item in dataclasses.fields(TrainingArguments)}
        settings = {"version of hf-federated": importlib.metadata.version("hf-federated")}
        limits = setup.config.max_examples_per_client
        # One number is compared as a field of the configuration.
        own_fields = _OWN_FIELDS if isinstance(limits, int) else {*_OWN_FIELDS, "max_examples_per_client"}
        for name, text in described.items():
            prefix, _, path = name.partition(".")
            field = path.partition(".")[0]
            is_argument = prefix == type(args).__name__
            if is_argument and field in _SHARED_ARGUMENTS:
                settings[path] = text
            elif (
                # An argument of the trainer's class, such as `packing` of `SFTConfig`.
                (is_argument and field not in general and not _LOCAL_ARGUMENTS.fullmatch(field))
                or (prefix == "FederatedConfig" and field not in own_fields)
                or prefix in ("aggregation", "distillation", "postprocessors")
            ):
                settings[name] = text
        if isinstance(limits, dict):
            content = json.dumps(sorted(limits.items())).encode()
            settings[_COUNTS] = f"{len(limits)} clients (SHA-256 {_digest(content)})"
        settings |= _data_settings(setup, client_id) | _model_settings(setup, described["model"], initial)
        return cls({name: text[:_MAX_LENGTH] for name, text in settings.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings."""
        return dict(self.settings)

    def differences(self, theirs: Any, is_client: bool = False) -> list[str]:
        """
        List the settings in which a client differs from the server.

        Args:
            theirs (`dict[str, Any]`): `to_dict()` of the other party. It is untrusted input.
            is_client (`bool`, *optional*, defaults to `False`): Whether this party is the client.

        Raises:
            ValueError: If `theirs` is not the output of `to_dict()`.
        """
        is_valid = isinstance(theirs, dict) and all(isinstance(text, str) for text in theirs.values())
        if not is_valid or len(theirs) > 10 * len(self.settings):
            raise ValueError("The settings of a party must be texts by name.")
        server, client = (theirs, self.settings) if is_client else (self.settings, theirs)
        return [
            f"{name[:_MAX_LENGTH]}: {server.get(name, 'not set')[:_MAX_LENGTH]} at the server, "
            f"{client.get(name, 'not set')[:_MAX_LENGTH]} at the client"
            for name in dict.fromkeys([*self.settings, *theirs])
            if self.settings.get(name) != theirs.get(name)
            and not (_is_optional(name) and (name not in self.settings or name not in theirs))
        ]


def _is_optional(name: str) -> bool:
    """Whether a setting is compared only if both parties have it, such as the arguments of a trainer's own class."""
    return name in _OPTIONAL or (name[:1].isupper() and not name.startswith("FederatedConfig."))


def _data_settings(setup: FederationSetup, client_id: str | None) -> dict[str, str]:
    """Describe the public examples, the task and the tokenizer."""
    settings = {}
    participants, distillation = setup.participants, setup.distillation
    if participants.public_dataset is not None:
        settings["content of `public_dataset`"] = participants.row_hashes["public_dataset"]
    if (task := participants.task) is not None:
        labels = task.model_kwargs.get("id2label", task.model_kwargs)
        settings["task"] = shortened(f"{type(task).__name__} with {labels}", _MAX_LABELS_LENGTH)
    tokenizer = setup.trainer.processing_class
    if client_id is not None:
        tokenizer = participants.tokenizer_of(client_id, tokenizer)
    # Parameters, and predictions of tokens, refer to the ids of tokens. Clients that predict labels or tags may have
    # other tokenizers.
    predicts_tokens = (
        distillation is not None
        and participants.prediction_unit == "token"
        and not distillation.alignment.supports_other_vocabularies
    )
    if isinstance(tokenizer, PreTrainedTokenizerBase) and (setup.sends_parameters or predicts_tokens):
        tokens = sorted(tokenizer.get_vocab().items())
        settings["tokenizer"] = f"{len(tokens)} tokens (SHA-256 {_digest(json.dumps(tokens).encode())})"
    return settings


def _model_settings(setup: FederationSetup, layout: str, initial: State | None) -> dict[str, str]:
    """Describe the labels, the layout and the initial values of the model, as far as the method needs them."""
    model: Any = setup.trainer.model
    labels = getattr(model.config, "id2label", None) if hasattr(model, "config") else None
    settings = {"labels": shortened(str(labels and dict(sorted(labels.items()))), _MAX_LABELS_LENGTH)}
    if not setup.sends_parameters:
        return settings
    settings["model"] = layout
    modules = find_lora_modules(model).values()
    if kinds := sorted({(module.rank, module.scaling) for module in modules}):
        scales = ", ".join(f"rank {rank} with scale {scaling:g}" for rank, scaling in kinds)
        settings["ranks and scales of the LoRA modules"] = scales
    for client_id, config in setup.participants.peft_configs.items():
        # A client knows its own configuration only.
        settings[f"LoRA of client {client_id!r}"] = f"rank {config.r} with scale {scaling_of(config):g}"
    # A client receives the exchanged parameters from the server. It must already have all others, except for its local
    # tensors, whose values may differ between clients.
    if local := setup.exchange.local_names:
        digest = _digest(json.dumps(local).encode())
        settings["names of the tensors that clients keep"] = f"{len(local)} (SHA-256 {digest})"
    received = {*setup.exchange.names, *local} - setup.exchange.base_parameters.keys()
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: value for name, value in values.items() if name not in received}
    settings["values of the parameters that are not exchanged"] = f"SHA-256 {digest_of(kept)}"
    if setup.distillation is not None and setup.distillation.requirements.initial_model:
        # Clients compute features with the model as it was before the first round.
        initial = setup.exchange.read() if initial is None else initial
        settings["initial values of the exchanged parameters"] = f"SHA-256 {digest_of(initial)}"
    return settings


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of(state: State) -> str:
    """Return the first digits of the SHA-256 digest of tensors with their names and dtypes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
