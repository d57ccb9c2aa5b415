"""Networked run on a client: the client trains its head and tail, and exchanges messages with the server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.utils import logging

from ..aggregation import WeightedMean
from ..messages.ledger import Ledger
from ..security.encrypted_link import EncryptedLink
from ..security.peer_envelopes import PeerEnvelopes
from ..split.model import SplitModel
from ..utils.random import derived_seed, isolated_rng, seed_generators
from .checks import check_networked_evaluation, check_same_run
from .config import SplitConfig, run_digest
from .in_process import ClientParty, TrainClient
from .link_wrappers import LateError, RunLink, with_byte_counting
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
    SendEnvelope,
    SendEnvelopeReply,
    as_bytes,
    as_tensor,
)
from .optimization import JointOptimizer, Party, averaging_weights
from .saving import SplitSavingMixin, check_checkpoint, resumable_checkpoints
from .step_plan import StepPlan, count_steps


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
    ) -> None:
        self.model = model
        self.config = config
        self.seed = seed
        self.ledger = ledger
        self.envelopes = envelopes
        self.client_id = model.boundary.client_id
        self.step = 0
        self.max_steps = 0
        self.client_ids: list[str] = []
        self.num_late = 0
        self._is_sealed = isinstance(model.boundary.link, EncryptedLink)
        self._link = RunLink(with_byte_counting(model.boundary.link, self.client_id, self._record_bytes))
        model.boundary.link = self._link
        model.boundary.defers_backward = config.strategy == "client_batch"
        self.client = ClientParty(self.client_id, model)
        # Optimizer steps of each client in an epoch.
        self.steps_per_epoch: dict[str, int] = {}
        self.plan = StepPlan({}, simultaneous=False)
        # Losses of the steps in which this client took part: since the last log, and of the whole run.
        self._recent_losses: list[torch.Tensor] = []
        self._all_losses: list[float] = []
        self._averaged_at = -1
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
            self._link.request(
                BeginStep(self.client_id, step, len(own_batches), num_examples[self.client_id]), BeginStepReply
            )
            boundary.begin_step(step, num_targets[self.client_id] if boundary.defers_backward else None)
            with isolated_rng(self.seed):
                seed_generators(derived_seed(self.seed, "client", self.client_id, step))
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
        try:
            reply: EndStepReply = self._link.request(EndStep(self.client_id, self.step, squared_norm), EndStepReply)
        except LateError:
            self._skip_step()
            return None
        return reply.norm

    def _receive_parts(self) -> None:
        """If `hands_over` is set, load the parts of the previous client."""
        if self.config.hands_over and self.step > 0:
            (previous,) = self._participants(self.step - 1)
            if previous != self.client_id:
                self.client.load(self._fetch_parameters(previous).state)

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
        if self.client_id not in self._participants(num_steps - 1):
            # Wait for the step. The client then evaluates and saves the server's body of this step.
            self._link.request(BeginStep(self.client_id, num_steps, 0, 0), BeginStepReply)
        average_every = self.config.average_every
        if average_every is not None and num_steps % average_every == 0:
            self.average()
        self.send_parts()
        if num_steps == self.max_steps:
            self.finish()

    def average(self) -> None:
        """
        Replace all clients' parts by their mean, weighted by the number of examples.

        The first client computes the mean. The server must not receive the parts of single clients.
        """
        self._averaged_at = self.step
        first = self.client_ids[0]
        if self.client_id != first:
            self._send_parameters(first, self.client.state())
            self.client.load(self._fetch_parameters(first).state)
        else:
            messages = [PartParameters(first, self.step, self.client.num_examples, self.client.state())]
            messages += [self._fetch_parameters(client_id) for client_id in self.client_ids[1:]]
            states = {message.client_id: message.state for message in messages}
            weights = averaging_weights({message.client_id: message.num_rows for message in messages})
            mean = WeightedMean()
            for client_id, weight in weights.items():
                mean.add(states[client_id], weight)
            state = mean.finalize()
            for client_id in self.client_ids[1:]:
                self._send_parameters(client_id, state)
            self.client.load(state)
        self.client.num_examples = 0

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
                        self._send_parameters(client_id, self.client.state())
            else:
                self.client.load(self._fetch_parameters(last_client).state)

    def leave(self) -> None:
        """Report to the server that this client has finished. A report before the last step ends the run for all."""
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

    def _send_parameters(self, recipient: str, state: Mapping[str, torch.Tensor]) -> None:
        payload = PartParameters(self.client_id, self.step, self.client.num_examples, dict(state)).to_bytes()
        encrypted = self._require_envelopes().seal(recipient, f"step {self.step}", payload)
        self._link.request(SendEnvelope(self.client_id, self.step, recipient, as_tensor(encrypted)), SendEnvelopeReply)

    def _fetch_parameters(self, sender: str) -> PartParameters:
        reply: FetchEnvelopeReply = self._link.request(
            FetchEnvelope(self.client_id, self.step, sender), FetchEnvelopeReply
        )
        payload = self._require_envelopes().open(sender, f"step {self.step}", as_bytes(reply.sealed))
        message = PartParameters.from_bytes(payload)
        if message.client_id != sender:
            raise ValueError(
                f"The envelope of client {sender!r} holds parameters that claim to be from client "
                f"{message.client_id!r}. Restart the run without client {sender!r}."
            )
        # A mean would broadcast a parameter with a wrong shape.
        self.client.check(message.state, f"the message of client {sender!r}")
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
        return {
            "config": self.config.to_dict(),
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
        expected = {"config": self.config.to_dict(), "client_id": self.client_id, "clients": self.client_ids}
        check_same_run(state, expected)
        self.client.num_examples = state["num_rows"]


class NetworkedClientMixin(SplitSavingMixin):
    """Networked run of a split trainer on a client."""

    # The prepared training dataset of each client.
    _client_datasets: Mapping[str, Any]
    _envelopes: PeerEnvelopes | None

    def _join(self, resume_from_checkpoint: str | bool | None) -> str | None:
        """
        Join a networked run.

        Returns:
            `str`: The checkpoint to resume from, or `None` if the parties have no checkpoint of a common step.

        Raises:
            ValueError: If the client cannot join, or a file of the checkpoint is missing or damaged.
        """
        if self._networked is not None:
            raise ValueError("This trainer has joined a networked run before. Create a new trainer with a new link.")
        check_networked_evaluation(self.args, self.split)
        if not isinstance(resume_from_checkpoint, (bool, type(None))):
            raise ValueError(
                "In a networked run all parties resume from the same step. Set resume_from_checkpoint to True or "
                "leave it out."
            )
        paths = resumable_checkpoints(self.args.output_dir) if resume_from_checkpoint else {}
        args, num_examples = self.args, len(self._client_datasets[self.model.boundary.client_id])
        num_steps = count_steps(
            num_examples, args.train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last
        )
        self._networked = NetworkedFederation(
            self.model, self.split, self.split.resolve_seed(args), self.ledger, self._envelopes
        )
        digest = run_digest(self.model.config, self.split, args, self.model.adapter_config)
        step = self._networked.join(digest, num_steps, list(paths))
        try:
            check_networked_evaluation(args, self.split, self._networked.steps_per_epoch)
            if step:
                check_checkpoint(paths[step])
        except ValueError:
            self._networked.leave()
            raise
        if paths and not step:
            logger.warning(
                f"No checkpoint of the steps {sorted(paths)} exists on all parties. The run starts from scratch."
            )
        return paths[step] if step else None

    def leave(self) -> None:
        """
        Report to the server of a networked run that this client sends no further requests, including evaluations.
        """
        if self._networked is not None:
            self._networked.leave()
