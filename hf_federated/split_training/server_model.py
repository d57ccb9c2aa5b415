"""The model that the server of a networked run trains: its body or bodies, their optimizers, and their checkpoints.

The module does not handle messages. `server.py` receives the messages and waits for the clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from peft import PeftConfig
from transformers import PretrainedConfig, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .._compat import checkpointing_settings
from ..split.body import BodyServer
from ..split.message_limits import MessageLimits
from ..split.messages import Backward, Forward
from ..split.parts import Part
from ..split.saving import save_parts
from ..split.wire import Wire
from ..trainer.checkpoint import list_checkpoints, publish, rotate, size_of_trained, staged_directory, step_of
from ..trainer.manifest import check_manifest, write_manifest
from .config import SplitConfig, run_and_step
from .in_process import bodies_of_clients
from .optimization import average_parties, create_optimizers, num_training_steps, total_norm
from .saving import is_save_step, load_party, num_kept_checkpoints, parts_of, party_directory, save_party


class ServerModel:
    """
    The server's body, or one replica per client with `"server_hierarchical"`, and the state of its training.

    Args:
        body ([`Part`]): The server's blocks, with their adapters.
        config (`PretrainedConfig`): Config of the full model.
        wire ([`Wire`]): Encoding of hidden states.
        split ([`SplitConfig`]): Configuration, equal to that of the clients.
        args (`TrainingArguments`): Training arguments, equal to those of the clients except for `output_dir`.
        client_ids (`Sequence[str]`): The clients of the run, in their order.
        adapter (`PeftConfig`, *optional*): Config of the body's adapters.

    Attributes:
        parties (`dict[str, Party]`): Each body with its optimizer, by name.
        party_names (`dict[str, str]`): Name of the body of each client, by client id.
        body_servers (`dict[str, BodyServer]`): The server of each client's messages, by client id.
        max_steps (`int`): Number of optimizer steps of the run; 0 before `prepare`.
        num_examples (`dict[str, int]`): Examples of each client since the last average of the bodies.
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
        # `TrainingArguments` replaces `None` by a default directory.
        self._directory = cast(str, args.output_dir)
        enable_checkpointing(body, args)
        self._body_of = bodies_of_clients(body, split, client_ids)
        self.party_names = {client_id: party.name for client_id, party in self._body_of.items()}
        self.parties = {party.name: party for party in self._body_of.values()}
        seed = split.resolve_seed(args)
        limits = MessageLimits(args.train_batch_size, args.eval_batch_size, split.max_length)
        servers = {
            name: BodyServer(cast(Part, party.module), wire, seed, limits=limits)
            for name, party in self.parties.items()
        }
        self.body_servers = {client_id: servers[name] for client_id, name in self.party_names.items()}
        self.num_examples = dict.fromkeys(client_ids, 0)
        # Squared norms of the gradients of the bodies that the clients of the step have received, by body.
        self._squared_norms: dict[str, float] = {}

    def prepare(self, steps_per_epoch: int) -> None:
        """
        Create the optimizers and learning rate schedules of a run.

        Args:
            steps_per_epoch (`int`): Number of optimizer steps in an epoch.
        """
        self._steps_per_epoch = steps_per_epoch
        self.max_steps = num_training_steps(self.args, steps_per_epoch)
        self._schedulers = create_optimizers(self.parties.values(), self.args, self.max_steps)

    def check_batchable(self, message: Forward | Backward) -> None:
        """
        Reject a message that the body cannot process in one batch with messages of other clients.

        Raises:
            ValueError: If a client sends hidden states without dropout or with an autocast dtype that differs from the
                training arguments, or a gradient without its number of target tokens.
        """
        if isinstance(message, Backward):
            if message.num_targets is None:
                raise ValueError(
                    f"Client {message.client_id!r} sent a gradient without its number of target tokens. With "
                    "strategy='client_batch' all clients must send num_targets."
                )
            return
        autocast = "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else None
        if not message.training or message.autocast != autocast:
            raise ValueError(
                f"Client {message.client_id!r} sent training={message.training} and autocast={message.autocast}. With "
                f"strategy='client_batch' all clients must send training=True and autocast={autocast}."
            )

    def discard(self, client_ids: Sequence[str]) -> None:
        """
        Drop what clients sent for a step that they do not take.

        If no other client uses a body, the gradients of the body are dropped. The gradients of a shared body keep the
        contribution of these clients.

        Args:
            client_ids (`Sequence[str]`): The clients.
        """
        used = {name for client_id, name in self.party_names.items() if client_id not in client_ids}
        for client_id in client_ids:
            server, name = self.body_servers[client_id], self.party_names[client_id]
            server.drop_micro_batches([client_id])
            if name not in used:
                self.parties[name].zero_grad()
                server.num_targets = 0

    def squared_norm(self, client_id: str) -> float:
        """
        Squared norm of the gradients of the body that a client uses. `train_step` uses the same number.

        Args:
            client_id (`str`): The client, which has sent all gradients of the step.
        """
        body = self._body_of[client_id]
        self._squared_norms[body.name] = body.squared_norm()
        return self._squared_norms[body.name]

    def train_step(
        self, step: int, squared_norms: Mapping[str, float], num_examples: Mapping[str, int]
    ) -> dict[str, float]:
        """
        Clip and update every body that the clients of the step used.

        A body and the clients that use this body clip their gradients by one norm. At the end of an averaging period
        and of the run, the replicas of the body are averaged.

        Args:
            step (`int`): Number of optimizer steps before this one.
            squared_norms (`Mapping[str, float]`): Squared norm of the gradients of each client that took part.
            num_examples (`Mapping[str, int]`): Number of examples of each client that took part.

        Returns:
            `dict[str, float]`: The norm by which each client clips its gradients.

        Raises:
            ValueError: If the gradients of a body or of its clients are not finite. In this case no body is updated.
        """
        norms: dict[str, float] = {}
        members_of: dict[str, list[str]] = {}
        for client_id in squared_norms:
            members_of.setdefault(self.party_names[client_id], []).append(client_id)
        for name, members in members_of.items():
            self.body_servers[members[0]].average_gradients()
            known = self._squared_norms.get(name)
            of_body = self.parties[name].squared_norm() if known is None else known
            norm = total_norm([of_body, *(squared_norms[client_id] for client_id in members)])
            if not math.isfinite(norm):
                raise ValueError(
                    f"The gradients of {name!r} for {', '.join(members)} are not finite at step {step}. Lower the "
                    "learning rate."
                )
            norms |= dict.fromkeys(members, norm)
        self._squared_norms.clear()
        # Update the bodies after all norms are checked. If the run ends here, all bodies are at the same step.
        for name, members in members_of.items():
            self.parties[name].step(norms[members[0]], self.args.max_grad_norm)
        for scheduler in self._schedulers:
            scheduler.step()
        for client_id in squared_norms:
            self.num_examples[client_id] += num_examples[client_id]
        # After the last step the clients evaluate the average, which is also saved.
        if len(self.parties) > 1 and (step + 1 == self.max_steps or self.split.ends_period(step + 1)):
            mean = average_parties(self._body_of, self.num_examples)
            for party in self.parties.values():
                party.load(mean)
            self.num_examples = dict.fromkeys(self.num_examples, 0)
        return norms

    # ---- Files

    def checkpoints(self) -> dict[int, Path]:
        """Checkpoints from which the server can resume, by step."""
        return {step_of(path): path for path in list_checkpoints(self._directory)}

    def save_checkpoint(self, step: int) -> None:
        """Save a checkpoint if the training arguments request one at this step."""
        if not is_save_step(self.args, step, self.max_steps, self._steps_per_epoch):
            return
        state = {"rows": self.num_examples, "schedulers": [scheduler.state_dict() for scheduler in self._schedulers]}
        run = self._run_and_step(step)
        num_bytes = sum(size_of_trained(part) for party in self.parties.values() for part in parts_of(party))
        with staged_directory(self._directory, num_bytes=num_bytes) as staging:
            for party in self.parties.values():
                save_party(party, self.config, party_directory(staging, party.name), self.adapter, run, state)
            write_manifest(staging)
            publish(staging, Path(self._directory) / f"{PREFIX_CHECKPOINT_DIR}-{step}")
        rotate(self._directory, num_kept_checkpoints(self.args), None, step)

    def load_checkpoint(self, checkpoint: Path) -> None:
        """
        Load a checkpoint.

        Raises:
            ValueError: If the checkpoint is damaged or incomplete, or belongs to another run.
        """
        check_manifest(checkpoint)
        state: Mapping[str, Any] = {}
        for party in self.parties.values():
            state = load_party(party, party_directory(checkpoint, party.name), self.adapter is not None)
        self.num_examples = dict(state["rows"])
        for scheduler, scheduler_state in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(scheduler_state)

    def save(self) -> None:
        """Save the body, or the mean of all replicas."""
        first = next(iter(self.parties.values()))
        if len(self.parties) > 1:
            first.load(average_parties(self._body_of, self.num_examples))
        run = self._run_and_step(self.max_steps)
        save_parts(parts_of(first), self.config, self._directory, self.adapter, run=run)

    def _run_and_step(self, step: int) -> dict[str, object]:
        return run_and_step(self.config, self.split, self.args, self.adapter, step)


def enable_checkpointing(part: Part, args: TrainingArguments) -> None:
    """Enable activation checkpointing as the training arguments request it."""
    if (settings := checkpointing_settings(args)) is not None:
        every_n_layers, offload = settings.pop("every_n_layers", 1), settings.pop("offload", False)
        part.enable_checkpointing(settings or None, every_n_layers=every_n_layers, offload=offload)
