"""Networked run on a client: the client trains its head and tail, and exchanges messages with the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

from ..messages.ledger import Ledger
from ..security.encrypted_link import EncryptedLink
from ..security.peer_envelopes import PeerEnvelopes
from ..split.agreement import check_equal, check_norm
from ..split.model import SplitModel
from ..utils.random import isolated_rng
from .answers import check_join_reply
from .checks import check_same_run
from .config import SplitConfig
from .in_process import ClientParty, Federation, SplitFederation, TrainClient
from .link_wrappers import with_byte_counting
from .messages import (
    BeginStep,
    BeginStepReply,
    EndStep,
    EndStepReply,
    Finish,
    Join,
    JoinReply,
    as_bytes,
    as_tensor,
)
from .micro_batches import MicroBatchLink, MicroBatchRunner
from .optimization import JointOptimizer, Party, total_norm
from .part_exchange import PartExchange
from .run_link import LateError, RunLink
from .step_plan import StepPlan


logger = logging.get_logger(__name__)


class NetworkedFederation(Federation):
    """
    A networked run on one client. It has the interface of [`SplitFederation`].

    Args:
        model ([`SplitModel`]): The client's head and tail, with a link to a [`TrainingServer`] and without a body.
        config ([`SplitConfig`]): Configuration, equal to that of the server.
        seed (`int`): Seed of the random numbers that this client draws.
        ledger ([`Ledger`]): Records the transferred bytes, by optimizer step.
        envelopes ([`~hf_federated.security.peer_envelopes.PeerEnvelopes`], *optional*): Encrypts parameters for other
            clients. Not needed in a run with a single client.
        examples_per_step (`int`): Number of examples of a client in an optimizer step, at most.

    Attributes:
        client ([`ClientParty`]): This client.
        link ([`RunLink`]): The link to the server.
        parts ([`PartExchange`]): Exchanges the parts with other clients.
        steps_per_epoch (`dict[str, int]`): Optimizer steps of each client in an epoch. Empty before the client joins.
        num_late (`int`): Number of steps that continued without this client after a deadline.
    """

    def __init__(
        self,
        model: SplitModel,
        config: SplitConfig,
        seed: int,
        ledger: Ledger,
        envelopes: PeerEnvelopes | None,
        examples_per_step: int,
    ) -> None:
        super().__init__(model, config, seed, ledger)
        self.client_id = model.boundary.client_id
        self.num_late = 0
        self._is_sealed = isinstance(model.boundary.link, EncryptedLink)
        link = with_byte_counting(model.boundary.link, self.client_id, self._record_bytes)
        self.link = RunLink(link, self.client_id)
        self._micro_batches = MicroBatchRunner(self.link, model)
        model.boundary.link = MicroBatchLink(self.link, self._micro_batches)
        model.boundary.defers_backward = config.strategy == "client_batch"
        self.client = ClientParty(self.client_id, model)
        self.parts = PartExchange(self.client, config, self.link, envelopes, examples_per_step)
        self.steps_per_epoch: dict[str, int] = {}
        # Losses of the steps in which this client took part: since the last log, and of the whole run.
        self._recent_losses: list[torch.Tensor] = []
        self._all_losses: list[float] = []
        self._is_late = False
        self._has_left = False

    def join(self, digest: str, num_steps: int, checkpoints: Sequence[int]) -> int:
        """
        Join the run, and wait until all clients have joined.

        Args:
            digest (`str`): Digest of the settings that all parties share.
            num_steps (`int`): Optimizer steps of this client in an epoch.
            checkpoints (`Sequence[int]`): Steps of the checkpoints from which this client can resume.

        Returns:
            `int`: The step from which the run resumes; 0 starts from scratch.

        Raises:
            RefusedAnswerError: If the client would take more steps, or resume from a checkpoint that it does not have.
            ValueError: If the server rejects the client, names inconsistent clients, or `envelopes` is missing in a
                run with several clients.
        """
        parts = self.parts
        introduction = b"" if parts.envelopes is None else parts.envelopes.signed_public_key(digest)
        message = Join(self.client_id, digest, num_steps, sorted(checkpoints), as_tensor(introduction))
        logger.warning(f"Client {self.client_id!r} waits for the run to start: all clients must join.")
        reply: JoinReply = self.link.request(message, JoinReply)
        parts.client_ids = list(reply.steps_of)
        check_join_reply(message, reply)
        if len(parts.client_ids) > 1:
            parts.require_envelopes().register_peers(
                digest, {client_id: as_bytes(value) for client_id, value in reply.introductions.items()}
            )
        self.steps_per_epoch = reply.steps_of
        parts.plan = StepPlan(reply.steps_of, self.config.strategy != "serial", self.config.steps_per_turn)
        return reply.resume_step

    def begin_training(self, step: int, max_steps: int) -> None:
        """
        Set the position in the run.

        Args:
            step (`int`): Number of completed optimizer steps.
            max_steps (`int`): Number of optimizer steps of the run.
        """
        self.step, self.parts.max_steps = step, max_steps

    def exchange_first_parts(self, is_resumed: bool) -> None:
        """
        Exchange the parts before the first step.

        Args:
            is_resumed (`bool`): Whether the run resumes from a checkpoint. The parts that were in transfer when the
                run was interrupted are then sent again.
        """
        if is_resumed:
            self.parts.hand_over(self.step)
            if self.step >= self.parts.max_steps:
                self.parts.finish(self.step)
        self.parts.start_period(self.step)

    @property
    def parties(self) -> dict[str, Party]:
        """This client, by name."""
        return {self.client.name: self.client}

    def run_step(
        self,
        step: int,
        batches: Mapping[str, Any],
        num_examples: Mapping[str, int],
        num_targets: Mapping[str, int | None],
        train: TrainClient,
        optimizer: JointOptimizer,
    ) -> torch.Tensor:
        """
        Run the forward and backward passes of an optimizer step, as [`SplitFederation.run_step`].

        Returns a loss of 0 if this client does not take part in the step.
        """
        self.step = step
        optimizer.groups = []
        if self.client_id not in batches:
            return torch.zeros(())
        boundary = self.model.boundary
        try:
            self.parts.receive(step)
            own_batches = batches[self.client_id]
            begin = BeginStep(self.client_id, step, len(own_batches), num_examples[self.client_id])
            self.link.defer(begin, BeginStepReply)
            boundary.begin_step(step, num_targets[self.client_id] if boundary.defers_backward else None)
            with isolated_rng(self.seed):
                loss = train(self.client, own_batches)
        except LateError:
            self._skip_step()
            return torch.zeros(())
        self.client.num_examples += num_examples[self.client_id]
        optimizer.groups = [[self.client.name]]
        self._recent_losses.append(loss.detach())
        return loss

    def replace_logged_losses(self, logs: dict[str, float]) -> None:
        """
        Replace the logged losses by means over the steps in which this client took part.

        Args:
            logs (`dict[str, float]`): The logged values. The losses are removed if the client took part in no step.
        """
        if not logs.keys() & {"loss", "train_loss"}:
            return
        recent, self._recent_losses = [float(loss) for loss in self._recent_losses], []
        self._all_losses += recent
        for name, losses in (("loss", recent), ("train_loss", self._all_losses)):
            if name in logs and losses:
                logs[name] = math.fsum(losses) / len(losses)
            else:
                logs.pop(name, None)

    def _skip_step(self) -> None:
        self.num_late += 1
        self._is_late = True
        self.client.zero_grad()

    def shared_norm(self, squared_norm: float) -> float | None:
        """
        Return the norm of the gradients of all parties that share the step. This client clips its gradients by it.

        Args:
            squared_norm (`float`): Squared norm of the gradients of this client.

        Returns:
            `float`: The norm, or `None` if the step continues without this client and the client must not take the
            step.
        """
        message = EndStep(self.client_id, self.step, squared_norm)
        norm_of_body = self.model.boundary.squared_norm_of_body
        if norm_of_body is not None:
            norm = total_norm([norm_of_body, squared_norm])
            # The server ends the run if the norm is not finite.
            if math.isfinite(norm):
                self.link.defer(message, EndStepReply, lambda reply: self._check_norm(reply, norm))
                return norm
        try:
            reply: EndStepReply = self.link.request(message, EndStepReply)
        except LateError:
            self._skip_step()
            return None
        # The norm of all parties is at least that of this client. The client would clip too little by a smaller one.
        check_norm(reply.kind, "norm", reply.norm, smallest=math.sqrt(squared_norm))
        return reply.norm

    def _check_norm(self, reply: EndStepReply, norm: float) -> None:
        check_equal(reply, "norm", norm, ", which follows from an earlier answer")

    def run_micro_batches(self, functions: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Run the forward and backward passes of the micro-batches of a step, whose messages travel together."""
        return self._micro_batches.run_all(functions, self.config.micro_batches_in_flight)

    def end_step(self, num_steps: int) -> None:
        """Send or average the parts if the turn or the averaging period ends."""
        self.step = num_steps
        parts = self.parts
        if self._is_late or self.client_id not in parts.plan.participants(num_steps - 1):
            # Wait for the step. The client then evaluates and saves the server's body of this step.
            self._is_late = False
            logger.warning_once(f"Client {self.client_id!r} waits for the steps of other clients.")
            parts.request(BeginStep(self.client_id, num_steps, 0, 0), BeginStepReply)
        if num_steps == parts.max_steps or self.client_id not in parts.plan.participants(num_steps):
            # The other clients wait for the end of the step.
            self.link.flush()
        if self.config.ends_period(num_steps):
            parts.average(num_steps)
        parts.hand_over(num_steps)
        if num_steps == parts.max_steps:
            parts.finish(num_steps)

    def leave(self) -> None:
        """Report that this client has finished. Before the last step, the server removes it from the run."""
        if not self._has_left:
            self._has_left = True
            self.link.exchange(Finish(self.client_id, self.step).to_bytes())

    def facts(self) -> dict[str, Any]:
        """Return the values of the run that the model card states."""
        return {
            "num_clients": len(self.parts.client_ids),
            "is_finished": self.parts.is_finished,
            "num_late": self.num_late,
            "is_sealed": self._is_sealed,
        }

    def copy_into_model(self) -> None:
        """Do nothing: the client trains the model in place."""

    def _run_identity(self) -> dict[str, Any]:
        """Return what identifies the run of a checkpoint."""
        clients = self.parts.client_ids
        return {"config": self.config.shared_settings(), "client_id": self.client_id, "clients": clients}

    def state(self) -> dict[str, Any]:
        """Return the state of the run for a checkpoint, in addition to the state of the client."""
        self.link.flush()  # The server saves its checkpoint at the end of the step.
        return {**self._run_identity(), "num_rows": self.client.num_examples}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """
        Load the state of a checkpoint.

        Raises:
            ValueError: If the checkpoint belongs to a run with another configuration, another client or other clients.
        """
        check_same_run(state, self._run_identity())
        self.client.num_examples = state["num_rows"]


# The parties of a run, as a trainer uses them.
AnyFederation = SplitFederation | NetworkedFederation
