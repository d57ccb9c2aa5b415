"""Saving of the global model, of checkpoints and of the model card."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from .._compat import push_from_checkpoint
from ..adapters.residual import joined_adapter
from ..adapters.shards import with_tied_weights
from ..cards import RunRecord, render
from ..cards.curve import CURVE_NAME, learning_curve, save_card
from ..utils.errors import CheckpointError
from ..utils.lora_modules import RESIDUAL
from .base import RoleMixin
from .checkpoint import (
    check_weights,
    clients_directory,
    name_checkpoint,
    publish,
    read_server_state,
    rotate,
    size_of_trained,
    staged_arguments,
    staged_directory,
)
from .manifest import check_manifest, write_manifest


class SavingMixin(RoleMixin):
    """Overrides of the methods that write to the output directory."""

    # Set by the parent class.
    model: Any
    is_fsdp_enabled: bool
    # The results of a run and of its baselines, as in `results.json`, for the model card.
    card_comparison: Mapping[str, Any] | None = None
    # The arguments of the last call of `create_model_card`.
    _card_arguments: Mapping[str, Any] = MappingProxyType({})

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the global model as `Trainer.save_model` does, with `federated_config.json` and the ledger.

        The ledger of a checkpoint is in its file `federated/server.safetensors`, in a compact form.
        PEFT saves a model card with an adapter. The card of the run replaces this card. With a method that changes the
        base weights of LoRA modules, the merged model is saved, because the adapter alone is not the global model. If
        a second adapter has the changes, one adapter with the sum of both is saved.
        """
        if self.federation is None:
            super().save_model(output_dir, _internal_call)
            return
        is_checkpoint = _internal_call and output_dir is not None
        output_dir = self.args.output_dir if output_dir is None else output_dir
        if self.args.should_save:
            config = self.federation
            if isinstance(config.max_examples_per_client, dict):
                # The number of examples of each client is not for the readers of a model.
                config = dataclasses.replace(config, max_examples_per_client=None)
            config.save_pretrained(output_dir)
            if not is_checkpoint:
                self.ledger.save(output_dir)
        is_adapter = isinstance(self.model, PeftModel)
        if self._federation_setup.is_sharded:
            # The whole model, in the main process: `SHARDED_STATE_DICT` writes no file that `from_pretrained` reads.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        with self._whole_model(), self._arguments(self._user_args):
            super().save_model(output_dir, _internal_call)
            if self.args.should_save and is_adapter:
                self._save_card(output_dir)

    @contextmanager
    def _whole_model(self) -> Iterator[None]:
        """
        Let a model be saved as one adapter or as a merged copy, if its base weights are not those of the user.
        """
        setup, model = self._setup, self.model
        if not self.args.should_save or not isinstance(model, PeftModel):
            yield
        elif RESIDUAL in model.peft_config:
            with joined_adapter(model):
                yield
        elif setup is not None and setup.aggregation.changes_base:
            self.model = copy.deepcopy(model).merge_and_unload()
            try:
                yield
            finally:
                self.model = model
        else:
            yield

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the parent's checkpoint and the federation's state to a staging directory, then rename it."""
        if not self._is_federating:
            super()._save_checkpoint(model, trial)
            return
        final = name_checkpoint(self.args.output_dir, self.state)
        best = self.state.best_model_checkpoint
        setup, processes = self._federation_setup, self._federation_setup.processes
        num_bytes = size_of_trained(self.model)
        with staged_directory(self.args.output_dir, create=processes.is_main, num_bytes=num_bytes) as staging:
            processes.wait(f"{final.name}: staging directory")
            if processes.is_main or not setup.spreads_clients:
                with self._arguments(staged_arguments(self.args, staging)):
                    super()._save_checkpoint(model, trial)
            else:
                self.store_flos()
            staged = staging / final.name
            self.state.best_model_checkpoint = best
            if processes.is_main:
                self.state.save_to_json(os.fspath(staged / "trainer_state.json"))
                if not self.args.save_only_model:
                    clients_directory(staged).mkdir(parents=True)
            processes.wait(f"{final.name}: directory of the client states and all other files")
            if setup.is_sharded and not self.args.save_only_model:
                clients_directory(staged, setup.files).mkdir(exist_ok=True)
            known_digests = {} if self.args.save_only_model else self._federation.save(staged)
            if setup.is_sharded:
                processes.wait(f"{final.name}: shards of all processes")
            if processes.is_main:
                write_manifest(staged, known_digests)
                publish(staged, final)
                rotate(self.args.output_dir, self._user_args.save_total_limit, best, self.state.global_step)
            processes.wait(f"{final.name}: finished")  # Any process may load the checkpoint next.
        if self.args.push_to_hub:
            with self._arguments(self._user_args):
                push_from_checkpoint(self, os.fspath(final))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict and self._setup is not None and self._setup.is_sharded:
            state_dict = with_tied_weights(state_dict, self.model)
        super()._save(output_dir, state_dict)

    @contextmanager
    def _as_unsharded(self) -> Iterator[None]:
        """Hide FSDP from the parent class, which would save the model again, and a state of its optimizer."""
        before = self.is_fsdp_enabled
        self.is_fsdp_enabled = before and not self._is_federating
        try:
            yield
        finally:
            self.is_fsdp_enabled = before

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._as_unsharded():
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        with self._as_unsharded():
            super()._load_optimizer_and_scheduler(checkpoint)

    @property
    def _has_saved_parameters(self) -> bool:
        """Whether the state of the server in a checkpoint has the parameters with which training continues."""
        # PEFT saves only the computed prompts of a prompt-learning adapter, and FSDP2 needs shards.
        return isinstance(self.model, PeftModel) or self._federation_setup.is_sharded

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._is_federating and self._has_saved_parameters:
            return
        # Some subclasses of `Trainer` do not accept the second argument.
        arguments = (resume_from_checkpoint,) if model is None else (resume_from_checkpoint, model)
        if self._is_federating:
            check_weights(resume_from_checkpoint)
        super()._load_from_checkpoint(*arguments)

    def _load_best_model(self) -> None:
        if self._is_federating and self.state.best_model_checkpoint is not None:
            self._check_manifest(self.state.best_model_checkpoint)
        if not self._is_federating or not self._has_saved_parameters or self.args.save_only_model:
            super()._load_best_model()
            return
        saved = read_server_state(self.state.best_model_checkpoint, self._federation_setup.files)
        self._federation.exchange.write(saved["weights"])

    def _check_manifest(self, checkpoint: str | None) -> None:
        """
        Check the files of the main process's checkpoint, if there is one. All processes must call this method.

        Raises:
            CheckpointError: In all processes, if a file is missing or damaged. The message names the file.
        """

        def find_damage() -> str | None:
            try:
                if checkpoint is not None:
                    check_manifest(checkpoint)
            except ValueError as error:
                return str(error)
            return None

        damage = self._federation_setup.processes.run_on_main("files of the checkpoint", find_damage)
        if damage is not None:
            raise CheckpointError(damage)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Write the model card of the parent class, or for a federation a card with the logged results of the run.

        `kwargs` are further arguments of the method of the parent class. A federation accepts `dataset_name` of TRL.
        """
        named = {
            "language": language,
            "license": license,
            "tags": tags,
            "model_name": model_name,
            "finetuned_from": finetuned_from,
            "tasks": tasks,
            "dataset_tags": dataset_tags,
            "dataset": dataset,
            "dataset_args": dataset_args,
        }
        # The method of a subclass, such as those of TRL, can have fewer arguments.
        arguments = {name: value for name, value in named.items() if value is not None} | kwargs
        # Other models, such as those of sentence-transformers, have their own model cards.
        if self.federation is None or not isinstance(self.model, (PreTrainedModel, PeftModel)):
            super().create_model_card(**arguments)
            return
        self._card_arguments = arguments
        if self.is_world_process_zero():
            self._save_card(self._user_args.output_dir)

    def _save_card(self, directory: str) -> None:
        record = RunRecord.from_trainer(self, **self._card_arguments)
        curve = learning_curve(record, record.rounds, "round")
        save_card(render(record, curve and CURVE_NAME), curve, directory)
