"""Networked run on a client: the client trains its head and tail, and exchanges messages with the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

from ..messages.ledger import Ledger
from ..messages.serialization import packed_kind
from ..security.encrypted_link import EncryptedLink
from ..security.peer_envelopes import PeerEnvelopes
from ..split.model import SplitModel
from ..utils.random import isolated_rng, seed_generators
from .averaging import InvalidPartsError, PartAverage, change_limit, change_norm, check_handover
from .checks import check_same_run
from .config import SplitConfig
from .in_process import ClientParty, TrainClient, seed_of_micro_batch
from .link_wrappers import with_byte_counting
from .messages import (
    BeginStep,
    BeginStepReply,
    EndStep,
    EndStepReply,
    FetchEnvelope,
    FetchEnvelopeReply,
    Finish,
    Join,
    JoinReply,
    PartParameters,
    ResendReply,
    SendEnvelope,
    SendEnvelopeReply,
    as_bytes,
    as_tensor,
)
from .micro_batches import MicroBatchLink, MicroBatchRunner
from .optimization import JointOptimizer, Party, total_norm
from .run_link import LateError, PeerRemovedError, RunLink
from .step_plan import StepPlan


logger = logging.get_logger(__name__)


class NetworkedFederation:
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
        self.model = model
        self.config = config
        self.seed = seed
        self.ledger = ledger
        self.envelopes = envelopes
        self.examples_per_step = examples_per_step
        self.client_id = model.boundary.client_id
        self.step = 0
        self.max_steps = 0
        self.client_ids: list[str] = []
        self.num_late = 0
        self._is_sealed = isinstance(model.boundary.link, EncryptedLink)
        self._link = RunLink(
            with_byte_counting(model.boundary.link, self.client_id, self._record_bytes), self.client_id
        )
        self._micro_batches = MicroBatchRunner(self._link, model)
        model.boundary.link = MicroBatchLink(self._link, self._micro_batches)
        model.boundary.defers_backward = config.strategy == "client_batch"
        self.client = ClientParty(self.client_id, model)
        # Optimizer steps of each client in an epoch.
        self.steps_per_epoch: dict[str, int] = {}
        self.plan = StepPlan({}, simultaneous=False)
        # Losses of the steps in which this client took part: since the last log, and of the whole run.
        self._recent_losses: list[torch.Tensor] = []
        self._all_losses: list[float] = []
        self._averaged_at = -1
        self._is_late = False
        self._period_start: Mapping[str, torch.Tensor] = {}
        self._is_finished = False
        self._has_left = False

    def _record_bytes(self, client_id: str, bytes_up: int, bytes_down: int) -> None:
        self.ledger.record(self.step, client_id, bytes_down=bytes_down, bytes_up=bytes_up)

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
            ValueError: If the server rejects the client, names inconsistent clients, or `envelopes` is missing in a
                run with several clients.
        """
        introduction = b"" if self.envelopes is None else self.envelopes.signed_public_key(digest)
        message = Join(self.client_id, digest, num_steps, sorted(checkpoints), as_tensor(introduction))
        reply: JoinReply = self._link.request(message, JoinReply)
        self.client_ids = list(reply.steps_of)
        if self.client_id not in reply.steps_of or reply.introductions.keys() != reply.steps_of.keys():
            raise ValueError(
                f"The server names the clients {self.client_ids} with introductions of {list(reply.introductions)}, "
                f"but both lists must be equal and contain this client, {self.client_id!r}. Start the server with the "
                "ids of all clients."
            )
        if len(self.client_ids) > 1:
            self._require_envelopes().register_peers(
                digest, {client_id: as_bytes(value) for client_id, value in reply.introductions.items()}
            )
        self.steps_per_epoch = reply.steps_of
        self.plan = StepPlan(reply.steps_of, self.config.strategy != "serial", self.config.steps_per_turn)
        return reply.resume_step

    @property
    def parties(self) -> dict[str, Party]:
        """This client, by name."""
        return {self.client.name: self.client}

    def _participants(self, step: int) -> list[str]:
        return list(self.plan[step % len(self.plan)])

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
            self._receive_parts()
            own_batches = batches[self.client_id]
            begin = BeginStep(self.client_id, step, len(own_batches), num_examples[self.client_id])
            self._link.defer(begin, BeginStepReply)
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

    def seed_micro_batch(self, client_id: str, micro_batch: int) -> None:
        """Seed the random numbers of a micro-batch, as [`SplitFederation.seed_micro_batch`]."""
        seed_generators(seed_of_micro_batch(self.seed, client_id, self.step, micro_batch))

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
                self._link.defer(message, EndStepReply, lambda reply: self._check_norm(reply, norm))
                return norm
        try:
            reply: EndStepReply = self._link.request(message, EndStepReply)
        except LateError:
            self._skip_step()
            return None
        return reply.norm

    def _check_norm(self, reply: EndStepReply, norm: float) -> None:
        if reply.norm != norm:
            raise ValueError(
                f"The server clipped the gradients of step {reply.step} by the norm {reply.norm!r}, but client "
                f"{self.client_id!r} by {norm!r}. Use the same version of the library on the server and the clients."
            )

    def run_micro_batches(self, functions: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Run the forward and backward passes of the micro-batches of a step, whose messages travel together."""
        return self._micro_batches.run_all(functions, self.config.micro_batches_in_flight)

    def _request_or_send_parts(self, message: Any, answer: type[Any]) -> Any:
        """Send a request that waits for other clients, and send them this client's parts if they need them."""
        while True:
            blob = self._link.exchange(message.to_bytes())
            if packed_kind(blob) != ResendReply.kind:
                return answer.from_bytes(blob)
            request = ResendReply.from_bytes(blob)
            for recipient in request.recipients:
                self._send_parameters(recipient, self.client.state(), request.step)

    def _receive_parts(self) -> None:
        """If `hands_over` is set, load the parts of the previous client."""
        if self.config.hands_over and self.step > 0:
            (previous,) = self._participants(self.step - 1)
            if previous != self.client_id:
                self._load_parts(previous)

    def _load_parts(self, sender: str) -> None:
        """Load the parts of a client, or of the client that trained before it if it was removed from the run."""
        try:
            message = self._fetch_parameters(sender)
            if message is None:
                return
            check_handover(message, self.client.state())
        except InvalidPartsError as error:
            logger.warning(f"{error} This client continues with its own parts.")
            return
        self.client.load(message.state)

    def send_parts(self) -> None:
        """If `hands_over` is set, send the parts to the client that continues."""
        if not self.config.hands_over or self.step in (0, self.max_steps):
            return
        (previous,), (following,) = self._participants(self.step - 1), self._participants(self.step)
        if previous == self.client_id != following:
            self._send_parameters(following, self.client.state())

    def end_step(self, num_steps: int) -> None:
        """Send or average the parts if the turn or the averaging period ends."""
        self.step = num_steps
        if self._is_late or self.client_id not in self._participants(num_steps - 1):
            # Wait for the step. The client then evaluates and saves the server's body of this step.
            self._is_late = False
            self._request_or_send_parts(BeginStep(self.client_id, num_steps, 0, 0), BeginStepReply)
        if num_steps == self.max_steps or self.client_id not in self._participants(num_steps):
            # The other clients wait for the end of the step.
            self._link.flush()
        average_every = self.config.average_every
        if average_every is not None and num_steps % average_every == 0:
            self.average()
        self.send_parts()
        if num_steps == self.max_steps:
            self.finish()

    def average(self) -> None:
        """
        Replace all clients' parts by their mean, weighted by the number of examples.

        The first client that is still in the run computes the mean. The server must not receive the parts of single
        clients.
        """
        for leader in self.client_ids:
            if leader == self.client_id:
                self._average_as_leader()
                break
            try:
                self._send_parameters(leader, self.client.state(), raise_if_removed=True)
                message = self._fetch_parameters(leader)
                if message is not None:
                    self._check_mean(message.state, leader)
                    self.client.load(message.state)
            except PeerRemovedError:
                continue
            except InvalidPartsError as error:
                logger.warning(f"{error} This client continues with its own parts.")
            break
        self._averaged_at = self.step
        self.client.num_examples = 0
        self.start_period()

    def start_period(self) -> None:
        """
        Keep the parameters at the start of an averaging period, which are equal for all clients.

        After a resume within a period they are not known, and the changes of the period are not checked.
        """
        average_every = self.config.average_every
        is_start = (
            not self.step or self._averaged_at == self.step or bool(average_every and not self.step % average_every)
        )
        if is_start and not self.config.hands_over and len(self.client_ids) > 1:
            self._period_start = {name: value.clone() for name, value in self.client.state().items()}
        else:
            self._period_start = {}

    def _check_mean(self, mean: Mapping[str, torch.Tensor], leader: str) -> None:
        """Reject a mean that changed much more than the parameters of this client."""
        if not self._period_start:
            return
        change = change_norm(mean, self._period_start)
        limit = change_limit(change_norm(self.client.state(), self._period_start))
        if limit is not None and not change <= limit:
            raise InvalidPartsError(
                f"The average of client {leader!r} changed the parameters by {change:.3g} at step {self.step}, but at "
                f"most {limit:.3g} is expected from the change on this client."
            )

    def _max_examples(self) -> int:
        """Number of examples that a client can have trained in the averaging period."""
        average_every = self.config.average_every
        num_steps = self.step if average_every is None else (self.step - 1) % average_every + 1
        return num_steps * self.examples_per_step

    def _average_as_leader(self) -> None:
        own = PartParameters(self.client_id, self.step, self.client.num_examples, self.client.state())
        average = PartAverage(self._period_start, self._max_examples(), own)
        for client_id in self.client_ids:
            if client_id != self.client_id:
                try:
                    message = self._fetch_parameters(client_id)
                except PeerRemovedError:
                    continue
                except InvalidPartsError as error:
                    logger.warning(f"{error} The average is computed without this client.")
                    continue
                if message is not None:
                    average.add(message)
        state = average.finalize(self.client_ids)
        for client_id in self.client_ids:
            if client_id != self.client_id:
                self._send_parameters(client_id, state, is_broadcast=True)
        self.client.load(state)

    def finish(self) -> None:
        """Give all clients the parts of the last client, or the mean of all parts, after the last step."""
        if self._is_finished:
            return
        self._is_finished = True
        if not self.config.hands_over:
            if self._averaged_at != self.step:
                self.average()
        else:
            (last_client,) = self._participants(self.max_steps - 1)
            if last_client == self.client_id:
                for client_id in self.client_ids:
                    if client_id != last_client:
                        self._send_parameters(client_id, self.client.state(), is_broadcast=True)
            else:
                self._load_parts(last_client)

    def leave(self) -> None:
        """Report that this client has finished. Before the last step, the server removes it from the run."""
        if not self._has_left:
            self._has_left = True
            self._link.exchange(Finish(self.client_id, self.step).to_bytes())

    def _require_envelopes(self) -> PeerEnvelopes:
        if self.envelopes is None:
            raise ValueError(
                "The run has several clients, which encrypt their parameters for each other. Pass `envelopes` with "
                "the fingerprints of the other clients."
            )
        return self.envelopes

    def _send_parameters(
        self,
        recipient: str,
        state: Mapping[str, torch.Tensor],
        step: int | None = None,
        is_broadcast: bool = False,
        raise_if_removed: bool = False,
    ) -> None:
        step = self.step if step is None else step
        payload = PartParameters(self.client_id, step, self.client.num_examples, dict(state)).to_bytes()
        encrypted = self._require_envelopes().seal(recipient, f"step {step}", payload)
        message = SendEnvelope(self.client_id, step, recipient, as_tensor(encrypted), is_broadcast)
        try:
            self._link.request(message, SendEnvelopeReply)
        except PeerRemovedError:
            if raise_if_removed:
                raise

    def _fetch_parameters(self, sender: str) -> PartParameters | None:
        """Return the parameters of a client, or `None` if no other client has newer parameters than this client."""
        reply: FetchEnvelopeReply = self._request_or_send_parts(
            FetchEnvelope(self.client_id, self.step, sender), FetchEnvelopeReply
        )
        if reply.sender == self.client_id and self.config.hands_over:
            return None
        if reply.sender != sender and not self.config.hands_over:
            raise ValueError(f"The server sent the parameters of {reply.sender!r} instead of {sender!r}.")
        try:
            payload = self._require_envelopes().open(reply.sender, f"step {self.step}", as_bytes(reply.sealed))
            message = PartParameters.from_bytes(payload)
            if message.client_id != reply.sender:
                raise ValueError(
                    f"The envelope of client {reply.sender!r} holds parameters that claim to be from client "
                    f"{message.client_id!r}."
                )
            # A mean would broadcast a parameter with a wrong shape.
            self.client.check(message.state, f"the message of client {reply.sender!r}")
        except ValueError as error:
            raise InvalidPartsError(f"The parameters of client {reply.sender!r} were refused: {error}") from error
        return message

    def facts(self) -> dict[str, Any]:
        """Return the values of the run that the model card states."""
        return {
            "num_clients": len(self.client_ids),
            "is_finished": self._is_finished,
            "num_late": self.num_late,
            "is_sealed": self._is_sealed,
        }

    def copy_into_model(self) -> None:
        """Do nothing: the client trains the model in place."""

    def state(self) -> dict[str, Any]:
        """Return the state of the run for a checkpoint, in addition to the state of the client."""
        self._link.flush()  # The server saves its checkpoint at the end of the step.
        return {
            "config": self.config.shared_settings(),
            "client_id": self.client_id,
            "clients": self.client_ids,
            "num_rows": self.client.num_examples,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """
        Load the state of a checkpoint.

        Raises:
            ValueError: If the checkpoint belongs to a run with another configuration, another client or other clients.
        """
        expected = {"config": self.config.shared_settings(), "client_id": self.client_id, "clients": self.client_ids}
        check_same_run(state, expected)
        self.client.num_examples = state["num_rows"]
