"""Files that a split trainer saves: the model or a client's parts, checkpoints of all parties, and the model card.

A checkpoint contains the files of `Trainer`. Their weights are the weights of the evaluated model. The folder
`federated/` of a checkpoint contains:

- `split.safetensors`: the configuration and the clients of the run, the client that trained last, the number of
  examples since the last average, and the ledger.
- `manifest.json`: the sizes and digests of all other files of the checkpoint.
- `parties/<name>/`: the parts of a party under the names and block numbers of the full model ([`save_parts`]), and
  `training.safetensors` with the state of the party's optimizer. With an adapter, `training.safetensors` also contains
  the trained parameters.
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

from .._compat import push_from_checkpoint
from ..cards import SplitRecord, render_split
from ..cards.curve import CURVE_NAME, learning_curve, save_card
from ..data import FederatedDataset
from ..messages.ledger import Ledger
from ..messages.serialization import MAX_FILE_TENSORS, pack, unpack
from ..split.adapters import load_adapter
from ..split.parts import Part
from ..split.saving import load_saved_parts, save_parts
from ..trainer.base import LoopArgumentsMixin
from ..trainer.checkpoint import (
    FEDERATED_DIR,
    check_weights,
    list_checkpoints,
    name_checkpoint,
    publish,
    rotate,
    size_of_trained,
    staged_arguments,
    staged_directory,
    step_of,
)
from ..trainer.manifest import check_manifest, write_manifest
from ..utils.client_names import escape_client_id
from .config import SplitConfig, run_and_step
from .optimization import Party


if TYPE_CHECKING:
    from .networked_client import AnyFederation, NetworkedFederation


RUN_FILE = "split.safetensors"
TRAINING_FILE = "training.safetensors"
PARTIES_DIR = "parties"


def save_parties(federation: AnyFederation, checkpoint: Path, run_and_step: Mapping[str, Any]) -> None:
    """
    Write the part and the state of every party into a checkpoint.

    Args:
        federation ([`SplitFederation`] or [`NetworkedFederation`]): The parties.
        checkpoint (`Path`): The directory of the checkpoint.
        run_and_step (`Mapping[str, Any]`): Run and step of the parts, see `config.run_and_step`.
    """
    directory = checkpoint / FEDERATED_DIR
    directory.mkdir(parents=True, exist_ok=True)
    run = {**federation.state(), "ledger": federation.ledger.state_dict()}
    (directory / RUN_FILE).write_bytes(pack(run))
    model = federation.model
    for party in federation.parties.values():
        save_party(party, model.config, party_directory(checkpoint, party.name), model.adapter_config, run_and_step)


def check_checkpoint(checkpoint: str | os.PathLike[str]) -> None:
    """
    Check that a directory is a checkpoint of a split training run.

    Raises:
        ValueError: If the directory is not such a checkpoint. The message names the missing file.
    """
    if not (Path(checkpoint) / FEDERATED_DIR / RUN_FILE).is_file():
        raise ValueError(
            f"{os.fspath(checkpoint)!r} is not a checkpoint of a split training run: {FEDERATED_DIR}/{RUN_FILE} is "
            "missing. The checkpoint may belong to another trainer, or may be saved with `save_only_model=True`."
        )
    check_manifest(checkpoint)
    check_weights(checkpoint)


def resumable_checkpoints(output_dir: str | os.PathLike[str]) -> dict[int, str]:
    """
    Find the checkpoints in a directory that contain the state of the parties, by step.

    Checkpoints saved with `save_only_model=True` are not included.
    """
    checkpoints = [path for path in list_checkpoints(output_dir) if (path / FEDERATED_DIR / RUN_FILE).is_file()]
    return {step_of(path): os.fspath(path) for path in checkpoints}


def load_parties(federation: AnyFederation, checkpoint: str | os.PathLike[str]) -> Ledger:
    """
    Load the parts and states that `save_parties` wrote.

    Returns:
        `Ledger`: The ledger of the run up to the checkpoint.

    Raises:
        ValueError: If the directory is not a checkpoint of a split training run, belongs to another run, or is
            damaged.
    """
    run = _read_file(Path(checkpoint) / FEDERATED_DIR / RUN_FILE)
    ledger = Ledger.from_state_dict(run.pop("ledger"))
    federation.load_state(run)
    adapter = federation.model.adapter_config is not None
    for party in federation.parties.values():
        load_party(party, party_directory(checkpoint, party.name), adapter)
    return ledger


def party_directory(checkpoint: str | os.PathLike[str], name: str) -> Path:
    """Directory of a party's files in a checkpoint."""
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
    Write the part and the state of one party.

    Args:
        party ([`Party`]): The party.
        config (`PretrainedConfig`): Config of the full model.
        directory (`Path`): The directory of the party, which is created.
        adapter (`PeftConfig`, *optional*): Config of the party's adapters.
        run_and_step (`Mapping[str, Any]`): Run and step of the part, see `config.run_and_step`.
        state (`dict[str, Any]`, *optional*): Additional state of the party.
    """
    save_parts(parts_of(party), config, directory, adapter, run=run_and_step)
    optimizer = None if party.optimizer is None else party.optimizer.state_dict()
    # The saved adapter may be computed from the trained parameters, which cannot be recovered from the adapter.
    trained = None if adapter is None else party.state()
    (directory / TRAINING_FILE).write_bytes(pack({"optimizer": optimizer, "run": state, "trained": trained}))


def load_party(party: Party, directory: Path, adapter: bool) -> dict[str, Any]:
    """
    Load the part and the state of one party.

    Returns:
        `dict[str, Any]`: The additional state of the party.

    Raises:
        ValueError: If a file is missing or damaged, or belongs to a different party.
    """
    training = _read_file(directory / TRAINING_FILE)
    if adapter:
        party.load(training["trained"])
    else:
        load_saved_parts(parts_of(party), directory)
    if (party.optimizer is None) != (training["optimizer"] is None):
        raise ValueError(
            f"{directory} belongs to a party with different frozen parameters. Freeze the same parameters as in the "
            "checkpoint."
        )
    if party.optimizer is not None:
        party.optimizer.load_state_dict(training["optimizer"])
    return training["run"] or {}


def parts_of(party: Party) -> list[Part]:
    """Parts of a party: the head and tail of a client, or the body of a server."""
    return [module for module in (party.module, *party.module.children()) if isinstance(module, Part)]


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, so the checkpoint of the split training run is not complete. Resume from another "
            "checkpoint."
        )
    try:
        return dict(unpack(path.read_bytes(), MAX_FILE_TENSORS))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def is_save_step(args: TrainingArguments, step: int, max_steps: int, steps_per_epoch: int) -> bool:
    """Whether `Trainer` saves a checkpoint after a step."""
    if args.save_strategy == SaveStrategy.STEPS:
        save_steps = args.save_steps if args.save_steps >= 1 else math.ceil(max_steps * args.save_steps)
        return step % int(save_steps) == 0 or step >= max_steps
    return args.save_strategy == SaveStrategy.EPOCH and (step % steps_per_epoch == 0 or step >= max_steps)


def num_kept_checkpoints(args: TrainingArguments) -> int | None:
    """
    Number of checkpoints that a party of a networked run keeps: `save_total_limit`, but at least 2.

    Another party may stop before it writes the newest checkpoint. The run then resumes from the previous checkpoint.
    """
    return args.save_total_limit and max(args.save_total_limit, 2)


class SplitSavingMixin(LoopArgumentsMixin):
    """Overrides of `Trainer` methods that write to the output directory, and the model that is written."""

    split: SplitConfig
    clients: FederatedDataset | None
    ledger: Ledger
    _resume_from: str | None
    active_run: AnyFederation | None = None
    networked_run: NetworkedFederation | None = None
    # The results of a run and of its baselines, as in `results.json`, for the model card.
    card_comparison: Mapping[str, Any] | None = None
    # Whether the parties trained since the last update of the evaluated and saved model.
    _model_is_stale = False

    @property
    def _num_kept_checkpoints(self) -> int | None:
        args = self._user_args
        return args.save_total_limit if self.networked_run is None else num_kept_checkpoints(args)

    @property
    def network(self) -> dict[str, Any] | None:
        """
        Values of a networked run that the model card states. `None` if all parties are in this process, and empty
        before the client joins a run.
        """
        if self.model.server_body is not None:
            return None
        return {} if self.networked_run is None else self.networked_run.facts()

    def sync_model(self) -> None:
        """
        Copy the trained parameters into `model`.

        `model` then has the mean of all parts, or the parts of the client that trained last.
        """
        if self._model_is_stale and self.active_run is not None:
            self.active_run.copy_into_model()
            self._model_is_stale = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        `Trainer.save_model`. Saves the full model or adapter in the standard format, `split_config.json` and the
        ledger. The ledger of a checkpoint is in its file `federated/split.safetensors`.

        A client of a networked run saves its head and tail instead of the full model.
        """
        self.sync_model()
        is_checkpoint = _internal_call and output_dir is not None
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.args.should_save:
            self.split.save_pretrained(output_dir)
            if not is_checkpoint:
                self.ledger.save(output_dir)
        if self.networked_run is None:
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
        """`Trainer.create_model_card`. After a training run, the model card describes the run."""
        if self.clients is None:
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            record = SplitRecord.from_trainer(self, *args, **kwargs)
            curve = learning_curve(record, record.steps, "optimizer step")
            save_card(render_split(record, curve and CURVE_NAME), curve, str(self.run_args.output_dir))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """
        Save the checkpoint of the parent class and the part of every party.

        The files are written to a staging directory, which a single rename publishes.
        """
        if self.active_run is None:
            super()._save_checkpoint(model, trial)
            return
        final = name_checkpoint(self.args.output_dir, self.state)
        best = self.state.best_model_checkpoint
        with staged_directory(self.args.output_dir, num_bytes=size_of_trained(self.model)) as staging:
            with self._arguments(staged_arguments(self.args, staging)):
                super()._save_checkpoint(model, trial)
            staged = staging / final.name
            self.state.best_model_checkpoint = best
            self.state.save_to_json(os.fspath(staged / "trainer_state.json"))
            if not self.args.save_only_model:
                save_parties(self.active_run, staged, self._run_and_step())
            write_manifest(staged)
            publish(staged, final)
            rotate(self.args.output_dir, self._num_kept_checkpoints, best, self.state.global_step)
        if self.args.push_to_hub:
            with self._arguments(self._user_args):
                push_from_checkpoint(self, os.fspath(final))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # `load_parties` loads adapters from the trained parameters of the parties.
        if self.networked_run is None and (self._resume_from is None or self.model.adapter_config is None):
            positional = (resume_from_checkpoint,) if model is None else (resume_from_checkpoint, model)
            super()._load_from_checkpoint(*positional)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and self.active_run is not None:
            check_manifest(best)
        if best is None or self.model.adapter_config is None or self.active_run is None:
            super()._load_best_model()
            return
        if self.args.save_only_model:
            load_adapter(self.model.parts, load_file(Path(best) / SAFETENSORS_WEIGHTS_NAME))
            return
        load_parties(self.active_run, best)
        self.active_run.copy_into_model()
