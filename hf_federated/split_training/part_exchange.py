"""Exchange of the clients' parts in a networked run: the handover to the next client, and the averages.

The clients encrypt the parts for each other. The server relays them and cannot read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils import logging

from ..messages.serialization import packed_kind
from ..security.peer_envelopes import PeerEnvelopes
from ..split.agreement import RefusedAnswerError, check_equal
from ..utils.printable import printable
from .answers import read_reply
from .averaging import InvalidPartsError, average_parts, change_limit, change_norm, check_handover
from .config import SplitConfig
from .in_process import ClientParty
from .messages import (
    FetchEnvelope,
    FetchEnvelopeReply,
    PartParameters,
    ResendReply,
    SendEnvelope,
    SendEnvelopeReply,
    as_bytes,
    as_tensor,
)
from .run_link import PeerRemovedError, RunLink
from .step_plan import StepPlan


logger = logging.get_logger(__name__)


class PartExchange:
    """
    Sends the parts of a client to other clients, and receives theirs.

    Args:
        client ([`ClientParty`]): This client.
        config ([`SplitConfig`]): Configuration of the run.
        link ([`RunLink`]): The link to the server.
        envelopes ([`~hf_federated.security.peer_envelopes.PeerEnvelopes`], *optional*): Encrypts parameters for other
            clients. Not needed in a run with a single client.
        examples_per_step (`int`): Number of examples of a client in an optimizer step, at most.

    Attributes:
        client_ids (`list[str]`): The clients of the run, in order.
        plan ([`StepPlan`]): The clients of each step. Empty before the run starts.
        max_steps (`int`): Number of optimizer steps of the run.
        is_finished (`bool`): Whether the parts of the last step were exchanged.
    """

    def __init__(
        self,
        client: ClientParty,
        config: SplitConfig,
        link: RunLink,
        envelopes: PeerEnvelopes | None,
        examples_per_step: int,
    ) -> None:
        self.client = client
        self.config = config
        self.link = link
        self.envelopes = envelopes
        self.examples_per_step = examples_per_step
        self.client_ids: list[str] = []
        self.plan = StepPlan({}, simultaneous=False)
        self.max_steps = 0
        self.is_finished = False
        self._averaged_at = -1
        # The other clients to which the server asked this client to send its parts again, and the steps.
        self._resent: set[tuple[str, int]] = set()
        self._period_start: Mapping[str, torch.Tensor] = {}

    def require_envelopes(self) -> PeerEnvelopes:
        """
        Return the envelopes.

        Raises:
            ValueError: If the client has none.
        """
        if self.envelopes is None:
            raise ValueError(
                "The run has several clients, which encrypt their parameters for each other. Pass `envelopes` with "
                "the fingerprints of the other clients."
            )
        return self.envelopes

    # ---- Messages

    def send(self, recipient: str, state: Mapping[str, torch.Tensor], step: int, is_broadcast: bool = False) -> None:
        """
        Send parameters to another client.

        Args:
            recipient (`str`): The other client.
            state (`Mapping[str, torch.Tensor]`): The parameters.
            step (`int`): Number of optimizer steps so far.
            is_broadcast (`bool`, *optional*, defaults to `False`): Whether all other clients get the parameters.

        Raises:
            PeerRemovedError: If the other client was removed from the run.
        """
        payload = PartParameters(self.client.client_id, step, self.client.num_examples, dict(state)).to_bytes()
        encrypted = self.require_envelopes().seal(recipient, f"step {step}", payload)
        message = SendEnvelope(self.client.client_id, step, recipient, as_tensor(encrypted), is_broadcast)
        self.link.request(message, SendEnvelopeReply)

    def fetch(self, sender: str, step: int) -> PartParameters | None:
        """
        Return the parameters of a client, or `None` if no other client has newer parameters than this client.

        Args:
            sender (`str`): The other client.
            step (`int`): Number of optimizer steps so far.

        Raises:
            InvalidPartsError: If the parameters cannot be used.
        """
        hands_over, own_id = self.config.hands_over, self.client.client_id
        reply: FetchEnvelopeReply = self.request(FetchEnvelope(own_id, step, sender), FetchEnvelopeReply)
        if reply.sender == own_id and hands_over:
            return None
        if not hands_over:
            check_equal(reply, "sender", sender)
        try:
            payload = self.require_envelopes().open(reply.sender, f"step {step}", as_bytes(reply.sealed))
            message = PartParameters.from_bytes(payload)
            if message.client_id != reply.sender:
                raise ValueError(
                    f"The envelope of client {reply.sender!r} holds parameters that claim to be from client "
                    f"{message.client_id!r}."
                )
            # A mean would broadcast a parameter with a wrong shape.
            self.client.check(message.state, f"the message of client {reply.sender!r}")
        except ValueError as error:
            raise InvalidPartsError(
                f"The parameters of client {reply.sender!r} were refused: {printable(error)}"
            ) from error
        return message

    def request(self, message: Any, answer: type[Any]) -> Any:
        """
        Send a request that waits for other clients, and send them this client's parts if they need them.

        Args:
            message (`Any`): The request.
            answer (`type`): The class of the answer.
        """
        while True:
            blob = self.link.exchange(message.to_bytes())
            if packed_kind(blob) != ResendReply.kind:
                return read_reply(message, answer, blob)
            request = read_reply(message, ResendReply, blob)
            self._check_resend(request)
            for recipient in request.recipients:
                with contextlib.suppress(PeerRemovedError):
                    self.send(recipient, self.client.state(), request.step)

    def _check_resend(self, request: ResendReply) -> None:
        """Refuse to send parts to strangers, at a later step, or to the same clients again and again."""
        others = set(self.client_ids) - {self.client.client_id}
        keys = {(recipient, request.step) for recipient in request.recipients}
        if not request.recipients or not others.issuperset(request.recipients) or keys & self._resent:
            agreed = f"other clients of {self.client_ids}, each once in a step"
            raise RefusedAnswerError(request.kind, "recipients", f"is {request.recipients}", agreed)
        if not 0 < request.step <= self.max_steps:
            raise RefusedAnswerError(request.kind, "step", f"is {request.step}", f"steps 1 to {self.max_steps}")
        self._resent |= keys

    # ---- Handover

    def receive(self, step: int) -> None:
        """If `hands_over` is set, load the parts of the client of the previous step."""
        if self.config.hands_over and step > 0:
            (previous,) = self.plan.participants(step - 1)
            if previous != self.client.client_id:
                self._load_parts(previous, step)

    def hand_over(self, step: int) -> None:
        """If `hands_over` is set, send the parts to the client that continues."""
        if not self.config.hands_over or step in (0, self.max_steps):
            return
        (previous,), (following,) = self.plan.participants(step - 1), self.plan.participants(step)
        if previous == self.client.client_id != following:
            with contextlib.suppress(PeerRemovedError):
                self.send(following, self.client.state(), step)

    def finish(self, step: int) -> None:
        """Give all clients the parts of the last client, or the mean of all parts, after the last step."""
        if self.is_finished:
            return
        self.is_finished = True
        if not self.config.hands_over:
            if self._averaged_at != step:
                self.average(step)
            return
        (last_client,) = self.plan.participants(self.max_steps - 1)
        if last_client == self.client.client_id:
            self._broadcast(self.client.state(), step)
        else:
            self._load_parts(last_client, step)

    def _broadcast(self, state: Mapping[str, torch.Tensor], step: int) -> None:
        for client_id in self.client_ids:
            if client_id != self.client.client_id:
                with contextlib.suppress(PeerRemovedError):
                    self.send(client_id, state, step, is_broadcast=True)

    def _load_parts(self, sender: str, step: int) -> None:
        """Load the parts of a client, or of the client that trained before it if it was removed from the run."""
        try:
            if (message := self.fetch(sender, step)) is not None:
                check_handover(message, self.client.state())
                self.client.load(message.state)
        except InvalidPartsError as error:
            logger.warning(f"{error} This client continues with its own parts.")

    # ---- Averages

    def average(self, step: int) -> None:
        """
        Replace all clients' parts by their mean, weighted by the number of examples.

        The first client that is still in the run computes the mean. The server must not receive the parts of single
        clients.
        """
        for leader in self.client_ids:
            if leader == self.client.client_id:
                self._average_as_leader(step)
                break
            try:
                self.send(leader, self.client.state(), step)
                if (message := self.fetch(leader, step)) is not None:
                    self._check_mean(message.state, leader, step)
                    self.client.load(message.state)
            except PeerRemovedError:
                continue
            except InvalidPartsError as error:
                logger.warning(f"{error} This client continues with its own parts.")
            break
        self._averaged_at = step
        self.client.num_examples = 0
        self.start_period(step)

    def start_period(self, step: int) -> None:
        """
        Keep the parameters at the start of an averaging period, which are equal for all clients.

        After a resume within a period they are not known, and the changes of the period are not checked.
        """
        is_start = not step or self._averaged_at == step or self.config.ends_period(step)
        if is_start and not self.config.hands_over and len(self.client_ids) > 1:
            self._period_start = {name: value.clone() for name, value in self.client.state().items()}
        else:
            self._period_start = {}

    def _check_mean(self, mean: Mapping[str, torch.Tensor], leader: str, step: int) -> None:
        """Reject a mean that changed much more than the parameters of this client."""
        if not self._period_start:
            return
        change = change_norm(mean, self._period_start)
        limit = change_limit(change_norm(self.client.state(), self._period_start))
        if limit is not None and not change <= limit:
            raise InvalidPartsError(
                f"The average of client {leader!r} changed the parameters by {change:.3g} at step {step}, but at "
                f"most {limit:.3g} is expected from the change on this client."
            )

    def _average_as_leader(self, step: int) -> None:
        own = PartParameters(self.client.client_id, step, self.client.num_examples, self.client.state())
        average_every = self.config.average_every
        num_steps = step if average_every is None else (step - 1) % average_every + 1
        messages: list[PartParameters | None] = []
        for client_id in self.client_ids:
            try:
                messages.append(own if client_id == own.client_id else self.fetch(client_id, step))
            except PeerRemovedError:
                continue
            except InvalidPartsError as error:
                logger.warning(f"{error} The average is computed without this client.")
        received = [message for message in messages if message is not None]
        state = average_parts(received, own, self._period_start, num_steps * self.examples_per_step)
        self._broadcast(state, step)
        self.client.load(state)
