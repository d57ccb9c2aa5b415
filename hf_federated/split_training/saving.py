"""What a split trainer saves: the whole model or this client's part, checkpoints of all parties, a card.

Beside the files of `Trainer`, whose weights are the model as it is evaluated, `federated/` of a checkpoint holds

- `split.safetensors`: which run it is, who holds head and tail, rows since the last average, the ledger;
- `parties/<name>/`, one a party: its part under the whole model's names and numbers ([`save_parts`]), and
  `training.safetensors`, its optimizer's state and, of an adapter, what it trains as it is trained.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import nn
from transformers import PretrainedConfig, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from ..cards import render_split_card
from ..data import FederatedDataset
from ..messages.ledger import Ledger
from ..messages.serialization import pack, unpack
from ..split.adapters import load_adapter
from ..split.parts import Part
from ..split.saving import load_saved_parts, save_parts
from ..trainer.checkpoint import (
    FEDERATED_DIR,
    check_weights,
    list_checkpoints,
    name_checkpoint,
    publish,
    rotate,
    staged_arguments,
    staged_directory,
    step_of,
)
from ..trainer.loop_arguments import LoopArgumentsMixin
from ..utils.client_names import escape_client_id
from .config import SplitConfig, run_and_step
from .in_process import SplitFederation
from .optimization import Party


if TYPE_CHECKING:
    from .networked_client import RemoteFederation


RUN_FILE = "split.safetensors"
TRAINING_FILE = "training.safetensors"
PARTIES_DIR = "parties"


def save_parties(
    federation: SplitFederation | RemoteFederation, checkpoint: Path, run_and_step: Mapping[str, Any]
) -> None:
    """
    Write every party's part and state into a checkpoint that is being made.

    Args:
        federation ([`SplitFederation`] or [`RemoteFederation`]): Its parties.
        checkpoint (`Path`): The directory.
        run_and_step (`Mapping[str, Any]`): Of which run and step it is: `config.run_and_step`.
    """
    directory = checkpoint / FEDERATED_DIR
    directory.mkdir(parents=True, exist_ok=True)
    run = {**federation.state(), "ledger": federation.ledger.to_dict()}
    (directory / RUN_FILE).write_bytes(pack(run))
    model = federation.model
    for party in federation.parties.values():
        save_party(party, model.config, party_directory(checkpoint, party.name), model.adapter_config, run_and_step)


def check_checkpoint(checkpoint: str | os.PathLike[str]) -> None:
    """
    Raises:
        ValueError: If it is no checkpoint of a split training run. The message says what is missing.
    """
    if not (Path(checkpoint) / FEDERATED_DIR / RUN_FILE).is_file():
        raise ValueError(
            f"{os.fspath(checkpoint)!r} is no checkpoint of a split training run: {FEDERATED_DIR}/{RUN_FILE} is "
            "missing. It may stem from another trainer or have been saved with `save_only_model=True`."
        )
    check_weights(checkpoint)


def resumable_checkpoints(output_dir: str | os.PathLike[str]) -> dict[int, str]:
    """The checkpoints in a directory that hold parties, by step: not those of `save_only_model=True`."""
    found = [path for path in list_checkpoints(output_dir) if (path / FEDERATED_DIR / RUN_FILE).is_file()]
    return {step_of(path): os.fspath(path) for path in found}


def load_parties(federation: SplitFederation | RemoteFederation, checkpoint: str | os.PathLike[str]) -> Ledger:
    """
    Take back what `save_parties` wrote.

    Returns:
        `Ledger`: The run's until then.

    Raises:
        ValueError: If it is no checkpoint of a split training run, of another one, or damaged.
    """
    run = _read(Path(checkpoint) / FEDERATED_DIR / RUN_FILE)
    ledger = Ledger.from_dict(run.pop("ledger"))
    federation.load_state(run)
    adapter = federation.model.adapter_config is not None
    for party in federation.parties.values():
        load_party(party, party_directory(checkpoint, party.name), adapter)
    return ledger


def party_directory(checkpoint: str | os.PathLike[str], name: str) -> Path:
    """Where a party's files lie in a checkpoint."""
    return Path(checkpoint) / FEDERATED_DIR / PARTIES_DIR / escape_client_id(name)


def save_party(
    party: Party,
    config: PretrainedConfig,
    directory: Path,
    adapter: PeftConfig | None,
    run_and_step: Mapping[str, Any],
    state: dict[str, Any] | None = None,
) -> None:
    """
    Write one party's part and state.

    Args:
        party ([`Party`]): The party.
        config (`PretrainedConfig`): The whole model's.
        directory (`Path`): Where to. It is created.
        adapter (`PeftConfig`, *optional*): What its adapters were made from.
        run_and_step (`Mapping[str, Any]`): Of which run and step they are: `config.run_and_step`.
        state (`dict[str, Any]`, *optional*): What else it keeps.
    """
    save_parts(parts_of(party), config, directory, adapter, run=run_and_step)
    optimizer = None if party.optimizer is None else party.optimizer.state_dict()
    training: dict[str, Any] = {"optimizer": optimizer, "run": state}
    # What is saved of an adapter may be made from what is trained, and cannot be turned back.
    training["trained"] = party.state() if adapter is not None else None
    (directory / TRAINING_FILE).write_bytes(pack(training))


def load_party(party: Party, directory: Path, adapter: bool) -> dict[str, Any]:
    """
    Take one party's part and state.

    Returns:
        `dict[str, Any]`: What else it kept.

    Raises:
        ValueError: If a file is missing or damaged, or of another party.
    """
    training = _read(directory / TRAINING_FILE)
    if adapter:
        party.load(training["trained"])
    else:
        load_saved_parts(parts_of(party), directory)
    if (party.optimizer is None) != (training["optimizer"] is None):
        raise ValueError(f"{directory} is of a party that trained otherwise: other parameters are frozen there.")
    if party.optimizer is not None:
        party.optimizer.load_state_dict(training["optimizer"])
    return training["run"] or {}


def parts_of(party: Party) -> list[Part]:
    """A client's head and tail, or a server's body."""
    return [own for own in (party.module, *party.module.children()) if isinstance(own, Part)]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: this is no whole checkpoint of a split training run.")
    try:
        return dict(unpack(path.read_bytes()))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def saves_at(args: TrainingArguments, step: int, max_steps: int, steps_in_epoch: int) -> bool:
    """Whether `Trainer` writes a checkpoint after so many steps."""
    if args.save_strategy == SaveStrategy.STEPS:
        every = args.save_steps if args.save_steps >= 1 else math.ceil(max_steps * args.save_steps)
        return step % int(every) == 0 or step >= max_steps
    return args.save_strategy == SaveStrategy.EPOCH and (step % steps_in_epoch == 0 or step >= max_steps)


def kept_checkpoints(args: TrainingArguments) -> int | None:
    """`save_total_limit` of a networked run: two or more, for a party may break off before it has the newest too."""
    return args.save_total_limit and max(args.save_total_limit, 2)


class SplitSavingMixin(LoopArgumentsMixin):
    """The overrides that write to the output directory, and the model that they write."""

    split: SplitConfig
    clients: FederatedDataset | None
    ledger: Ledger
    _resume_from: str | None
    _federation: SplitFederation | RemoteFederation | None = None
    _remote: RemoteFederation | None = None
    # Whether the model that is evaluated and saved is older than what the parties trained.
    _is_behind = False

    @property
    def _kept_checkpoints(self) -> int | None:
        args = self._user_args
        return args.save_total_limit if self._remote is None else kept_checkpoints(args)

    @property
    def network(self) -> dict[str, Any] | None:
        """Of a networked client, what a card says of the run beside this party; empty before it joined one."""
        if self.model.server_body is not None:
            return None
        return {} if self._remote is None else self._remote.facts()

    def catch_up(self) -> None:
        """Let `model` be what the parties trained: their mean, or what is handed from one to the next."""
        if self._is_behind and self._federation is not None:
            self._federation.copy_into_model()
            self._is_behind = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer.save_model`: the ordinary whole model or adapter; `split_config.json` and the ledger beside it."""
        self.catch_up()
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.args.should_save:
            self.split.save_pretrained(output_dir)
            self.ledger.save(output_dir)
        if self._remote is None:
            with self._arguments(self._user_args):
                super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            model = self.model
            save_parts(
                [model.client_head, model.client_tail],
                model.config,
                output_dir,
                model.adapter_config,
                model.generation_config,
                self.processing_class,
                self._run_and_step(),
            )

    def _run_and_step(self) -> dict[str, object]:
        model, step = self.model, self.state.global_step
        return run_and_step(model.config, self.split, self.run_args, model.adapter_config, step)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """`Trainer.create_model_card`; of a training run, a card that tells what it logged."""
        if self.clients is None:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            card = render_split_card(self, *args, **kwargs)
            card.save(os.path.join(self.run_args.output_dir, "README.md"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The parent's checkpoint and every party's part, written aside and put in place by one rename."""
        if self._federation is None:
            super()._save_checkpoint(model, trial)
            return
        final = name_checkpoint(self.args.output_dir, self.state)
        best = self.state.best_model_checkpoint
        with staged_directory(self.args.output_dir) as staging:
            with self._arguments(staged_arguments(self.args, staging)):
                super()._save_checkpoint(model, trial)
            staged = staging / final.name
            self.state.best_model_checkpoint = best
            self.state.save_to_json(os.fspath(staged / "trainer_state.json"))
            if not self.args.save_only_model:
                save_parties(self._federation, staged, self._run_and_step())
            publish(staged, final)
            rotate(self.args.output_dir, self._kept_checkpoints, best, self.state.global_step)
        if self.args.push_to_hub:
            with self._arguments(self._user_args):
                self._push_from_checkpoint(os.fspath(final))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Adapters come with the parties, as they are trained.
        if self._remote is None and (self._resume_from is None or self.model.adapter_config is None):
            given = (resume_from_checkpoint,) if model is None else (resume_from_checkpoint, model)
            super()._load_from_checkpoint(*given)

    def _load_best_model(self) -> None:
        if self.model.adapter_config is None or self._federation is None:
            super()._load_best_model()
            return
        best = self.state.best_model_checkpoint
        assert best is not None
        if self.args.save_only_model:
            load_adapter(self.model.parts, load_file(Path(best) / SAFETENSORS_WEIGHTS_NAME))
            return
        load_parties(self._federation, best)
        self._federation.copy_into_model()
