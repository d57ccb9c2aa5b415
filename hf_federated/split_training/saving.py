"""What a split trainer saves: the whole model or this client's part, checkpoints of all parties, a card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import nn

from ..cards import render_split_card
from ..data import FederatedDataset
from ..messages.ledger import Ledger
from ..split.adapters import load_adapter
from ..split.saving import save_parts
from ..trainer.base import LoopArgumentsMixin
from ..trainer.checkpoint import name_checkpoint, publish, rotate, staged_arguments, staged_directory
from .checkpoint import load_parties, save_parties
from .config import SplitConfig
from .digest import run_and_step
from .federation import SplitFederation
from .remote import RemoteFederation
from .schedule import kept_checkpoints


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
