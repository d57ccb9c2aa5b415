"""What the server of a networked run trains: the body, or one for each client, its optimizers and checkpoints.

It knows nothing of messages and waiting, which are `server.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft import PeftConfig
from transformers import PretrainedConfig, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..adapters.copying import copy_model
from ..aggregation import WeightedMean
from ..split.body import BodyServer
from ..split.messages import Backward, Forward
from ..split.parts import Part
from ..split.saving import save_parts
from ..split.wire import Wire
from ..trainer.checkpoint import list_checkpoints, publish, rotate, staged_directory, step_of
from .config import SplitConfig, run_and_step
from .in_process import SERVER
from .optimization import Party, create_optimizers, number_of_steps, total_norm
from .saving import kept_checkpoints, load_party, party_directory, save_party, saves_at


class ServerBodies:
    """
    The server's body, or with `"server_hierarchical"` a replica for each client, and what training them needs.

    Args:
        body ([`Part`]): The server's blocks, with the adapters that they have.
        config (`PretrainedConfig`): The whole model's.
        wire ([`Wire`]): How states travel.
        split ([`SplitConfig`]): As the clients have it.
        args (`TrainingArguments`): As the clients have them; `output_dir` is the server's own.
        client_ids (`Sequence[str]`): Who takes part, in their order.
        adapter (`PeftConfig`, *optional*): What the body's adapters were made from.
    """

    def __init__(
        self,
        body: Part,
        config: PretrainedConfig,
        wire: Wire,
        split: SplitConfig,
        args: TrainingArguments,
        client_ids: Sequence[str],
        adapter: PeftConfig | None = None,
    ) -> None:
        self.config = config
        self.split = split
        self.args = args
        self.adapter = adapter
        self.max_steps = 0
        enable_checkpointing(body, args)
        replicas = split.strategy == "server_hierarchical"
        self._server_of = {own: f"{SERVER}/{own}" if replicas else SERVER for own in client_ids}
        parts = {name: copy_model(body) if replicas else body for name in self._server_of.values()}
        bodies = {name: BodyServer(own, wire, split.seed_of(args)) for name, own in parts.items()}
        self.parties = {name: Party(name, own, None) for name, own in parts.items()}
        self.of_client = {own: bodies[name] for own, name in self._server_of.items()}
        # Rows trained since the bodies were averaged last.
        self._rows = dict.fromkeys(client_ids, 0)

    def prepare(self, steps_per_epoch: int) -> None:
        """Make the optimizers and schedules of a run."""
        self._steps_per_epoch = steps_per_epoch
        self.max_steps = number_of_steps(self.args, steps_per_epoch)
        self._schedulers = create_optimizers(self.parties.values(), self.args, self.max_steps)

    def check_alike(self, message: Forward | Backward) -> None:
        """
        Refuse what cannot go through a body beside what other clients send.

        Raises:
            ValueError: If hidden states come without dropout or with another autocast than the arguments say, or a
                gradient without the number of its targets.
        """
        if isinstance(message, Backward):
            if message.num_targets is None:
                raise ValueError(f"Client {message.client_id!r} does not say of how many targets its gradient is.")
            return
        autocast = "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else None
        if not message.training or message.autocast != autocast:
            raise ValueError(
                f"Client {message.client_id!r} sends training={message.training} and autocast={message.autocast}; all "
                f"that meet have training=True and autocast={autocast}."
            )

    def train_step(
        self, step: int, squared_norms: Mapping[str, float], num_rows: Mapping[str, int]
    ) -> dict[str, float]:
        """
        Clip and step every body that was used, by one norm with its clients' parts; average where it is time.

        Args:
            step (`int`): Optimizer steps before this one.
            squared_norms (`Mapping[str, float]`): Of the gradients of each client that took part.
            num_rows (`Mapping[str, int]`): Rows of each.

        Returns:
            `dict[str, float]`: For each client the norm by which it clips too.

        Raises:
            ValueError: If the gradients of a body, or of the clients that it answers, are not finite. No body has
                stepped then.
        """
        norms: dict[str, float] = {}
        names = list(dict.fromkeys(self._server_of[own] for own in squared_norms))
        for name in names:
            party = self.parties[name]
            members = [own for own in squared_norms if self._server_of[own] == name]
            self.of_client[members[0]].average_gradients()
            norm = total_norm([party.squared_norm(), *(squared_norms[own] for own in members)])
            if not math.isfinite(norm):
                raise ValueError(
                    f"The gradients of {name!r} for {', '.join(members)} are not finite at step {step}: lower the "
                    "learning rate."
                )
            norms |= dict.fromkeys(members, norm)
        # After all norms: of replicas none is a step ahead of the others where a run ends here.
        for name in names:
            member = next(own for own in squared_norms if self._server_of[own] == name)
            self.parties[name].step(norms[member], self.args.max_grad_norm)
        for scheduler in self._schedulers:
            scheduler.step()
        for own in squared_norms:
            self._rows[own] += num_rows[own]
        ended, every = step + 1, self.split.average_every
        # Clients evaluate in the end what is saved.
        if len(self.parties) > 1 and (ended == self.max_steps or (every is not None and ended % every == 0)):
            mean = self._mean()
            for party in self.parties.values():
                party.load(mean)
            self._rows = dict.fromkeys(self._rows, 0)
        return norms

    def _mean(self) -> dict[str, Any]:
        """The mean of all bodies, weighted by the rows of their clients since the last time."""
        weights = {own: rows for own, rows in self._rows.items() if rows} or dict.fromkeys(self._rows, 1)
        mean = WeightedMean()
        for own, rows in weights.items():
            mean.add(self.parties[self._server_of[own]].state(), rows)
        return mean.finalize()

    # ---- Files

    @property
    def _directory(self) -> str:
        assert self.args.output_dir is not None
        return self.args.output_dir

    def checkpoints(self) -> dict[int, Path]:
        """What there is to go on from, by step."""
        return {step_of(path): path for path in list_checkpoints(self._directory)}

    def save_checkpoint(self, step: int) -> None:
        """Write a checkpoint, where one of these many steps is due."""
        if not saves_at(self.args, step, self.max_steps, self._steps_per_epoch):
            return
        state = {"rows": self._rows, "schedulers": [own.state_dict() for own in self._schedulers]}
        run = self._run_and_step(step)
        with staged_directory(self._directory) as staging:
            for party in self.parties.values():
                save_party(party, self.config, party_directory(staging, party.name), self.adapter, run, state)
            publish(staging, Path(self._directory) / f"{PREFIX_CHECKPOINT_DIR}-{step}")
        rotate(self._directory, kept_checkpoints(self.args), None, step)

    def load_checkpoint(self, checkpoint: Path) -> None:
        """
        Go back to a checkpoint.

        Raises:
            ValueError: If it is not whole, or not one of this run's.
        """
        state: Mapping[str, Any] = {}
        for party in self.parties.values():
            state = load_party(party, party_directory(checkpoint, party.name), self.adapter is not None)
        self._rows = dict(state["rows"])
        for scheduler, own in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(own)

    def save(self) -> None:
        """Write the body: the only one, or the mean of all."""
        first = next(iter(self.parties.values()))
        if len(self.parties) > 1:
            first.load(self._mean())
        assert isinstance(first.module, Part)
        run = self._run_and_step(self.max_steps)
        save_parts([first.module], self.config, self._directory, self.adapter, run=run)

    def _run_and_step(self, step: int) -> dict[str, object]:
        return run_and_step(self.config, self.split, self.args, self.adapter, step)


def enable_checkpointing(part: Part, args: TrainingArguments) -> None:
    """Activation checkpointing as `Trainer` reads it from the arguments."""
    if args.activation_checkpointing:
        settings = dict(args.activation_checkpointing_kwargs or {})
        every, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
        part.enable_checkpointing(settings or None, every_n_layers=every, offload=offload)
