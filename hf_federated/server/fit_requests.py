"""`FitRequests`: the requests of local training of a round, and the checks of their replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..clients import client_seed
from ..messages import ClientFailure, ClientUpdate, Fit, Message
from ..messages.validation import InvalidUpdateError, UpdateLimits, check_claims, check_update, first_non_finite
from ..methods import Method, Round
from ..postprocessing import cast_floating, narrowed
from ..utils.weighted_mean import State, Tensors
from .step_memories import StepMemories


@dataclass(frozen=True)
class FitSettings:
    """
    Settings of the requests in all rounds.

    Args:
        methods (`Sequence[Method]`): The methods of the federation.
        seed (`int`): Seed of the federation.
        steps ([`StepMemories`], *optional*): Runs the server sides of the postprocessors.
        dtype (`torch.dtype`, *optional*): Dtype in which floating values are sent.
        sends_state (`bool`, *optional*, defaults to `True`): Whether clients receive the global state.
        returns_state (`bool`, *optional*, defaults to `True`): Whether clients send the trained state.
        row_limit (`Callable`, *optional*): `row_limit(cohort)` returns the largest number of examples of a client.
        limits (`Callable[[str, int | None], UpdateLimits]`, *optional*): `limits(client_id, max_rows)` returns what an
            update of a client may claim. By default, there are no limits.
        device (`torch.device`, *optional*): Device of the sums of updates.
        norm_of (`Callable`, *optional*): `norm_of(values, state)` returns the norm of the change of an update, as
            [`BoundUpdate.norm_of`]. By default, no norm is known.
    """

    methods: Sequence[Method]
    seed: int
    steps: StepMemories = field(default_factory=StepMemories)
    dtype: torch.dtype | None = None
    sends_state: bool = True
    returns_state: bool = True
    row_limit: Callable[[Sequence[str]], int | None] = field(default_factory=lambda: lambda cohort: None)
    limits: Callable[[str, int | None], UpdateLimits] = field(
        default_factory=lambda: lambda client_id, max_rows: UpdateLimits()
    )
    device: torch.device | None = None
    norm_of: Callable[[State, State], float | None] = field(default_factory=lambda: lambda values, state: None)


@dataclass
class FitRequests:
    """
    The requests of local training of one round.

    Args:
        settings ([`FitSettings`]): Settings of the requests.
        round ([`Round`]): The round. The messages of all clients share the tensors of its state, unless a method
            overrides [`Method.state_for`].

    Attributes:
        expected_state (`dict[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of an update's state, if
            no method gives clients different states.
        expected_extra (`dict[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of an update's `extra`.
        individual (`list[Method]`): The methods that give clients different states.
        averaged_extra (`dict[str, torch.Tensor]`): Those of the first method, which averages.
    """

    settings: FitSettings
    round: Round

    def __post_init__(self) -> None:
        # A reply can arrive when the round has another state.
        self.round = replace(self.round)
        settings, state = self.settings, self.round.state
        self.expected_state = state if settings.returns_state else {}
        self.averaged_extra = settings.methods[0].update_extra(state) if settings.methods else {}
        self.expected_extra = dict(self.averaged_extra)
        self._state = dict(state) if settings.sends_state else {}
        self._extra: State = {}
        self._settings: dict[str, Any] = {}
        for method in settings.methods[1:]:
            self.expected_extra.update(method.update_extra(state))
        for method in settings.methods:
            self._extra.update(method.fit_extra(state))
            self._settings.update(method.fit_settings())
        if settings.dtype is not None:
            self._state = narrowed(self._state, settings.dtype)
            self._extra = cast_floating(self._extra, settings.dtype)
        self._max_rows = settings.row_limit(self.round.cohort)
        # One after the other, the hashes take a fraction of the time that they take between trainings.
        self._seeds = {name: client_seed(settings.seed, name, self.round.number) for name in self.round.cohort}
        self._extra_checks = [
            method.check_extra for method in settings.methods if type(method).check_extra is not Method.check_extra
        ]
        self.individual = [
            method
            for method in settings.methods
            if type(method).state_for is not Method.state_for or type(method).expected_for is not Method.expected_for
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to send the requests again, as scalars and tensors."""
        round = self.round
        saved = {"number": round.number, "cohort": list(round.cohort), "state": round.state, "extra": self._extra}
        return {**saved, "settings": self._settings, "max_rows": self._max_rows}

    @classmethod
    def load(cls, settings: FitSettings, saved: dict[str, Any]) -> FitRequests:
        """Restore the requests that `state_dict` returned."""
        requests = cls(settings, Round(saved["number"], tuple(saved["cohort"]), saved["state"]))
        requests._extra, requests._settings = saved["extra"], saved["settings"]
        requests._max_rows = saved["max_rows"]
        return requests

    def message_for(self, client_id: str, is_sent: bool = True) -> Fit:
        """
        Return the message of a client.

        Args:
            client_id (`str`): Id of the client.
            is_sent (`bool`, *optional*, defaults to `True`): Whether the postprocessors change the message, and note
                what they send.
        """
        steps = self.settings.steps
        message = Fit(
            self.round.number,
            client_id,
            self._seeds.get(client_id) or client_seed(self.settings.seed, client_id, self.round.number),
            self._state_for(client_id) if self.individual else self._state,
            self._extra,
            self._settings,
            self.settings.returns_state,
            self._max_rows,
        )
        if not is_sent or not steps.changes_requests:
            return message
        # A postprocessor may keep the state.
        return steps.send(replace(message, state=dict(message.state)))

    def _state_for(self, client_id: str) -> State:
        """Return the state that a client receives, if it may differ between clients."""
        if not self.settings.sends_state:
            return {}
        state = self.round.state
        for method in self.individual:
            state = method.state_for(client_id, state)
        return narrowed(state, self.settings.dtype)

    def expected_for(self, client_id: str, state: State | None = None) -> State:
        """
        Return tensors with the names, shapes and dtypes of a client's state, and the values from which it starts.

        Args:
            client_id (`str`): Id of the client.
            state (`dict[str, torch.Tensor]`, *optional*): The global state. Defaults to the state of the round.
        """
        if not self.settings.returns_state:
            return {}
        state = self.round.state if state is None else state
        for method in self.individual:
            state = method.expected_for(client_id, state)
        return state

    def receive(self, reply: Message) -> tuple[ClientUpdate, float | None]:
        """
        Check a reply.

        Args:
            reply ([`Message`]): Reply of a client to its message.

        Returns:
            `tuple`: The update after `server_receive` of all postprocessors, and the norm of its change if it is
                known.

        Raises:
            InvalidUpdateError: If the client failed, or a value of the update is not allowed.
        """
        settings = self.settings
        where = f"Client {reply.client_id!r}, round {self.round.number + 1}"
        if isinstance(reply, ClientFailure):
            raise InvalidUpdateError(f"{where}: {reply.error}")
        if not isinstance(reply, ClientUpdate):  # The engine refuses another reply to a `Fit`.
            raise TypeError(f"{where}: the reply is a {type(reply).__name__}, expected a ClientUpdate.")
        check_claims(reply, settings.limits(reply.client_id, self._max_rows))
        expected = self.expected_for(reply.client_id) if self.individual else self.expected_state
        update = reply if settings.device is None else reply.to(settings.device)
        try:
            if settings.steps.steps:
                seed = client_seed(settings.seed, reply.client_id, self.round.number)
                update = settings.steps.receive(update, expected, seed)
        except InvalidUpdateError:
            raise
        except Exception as error:
            raise InvalidUpdateError(f"{where}, postprocessing: {type(error).__name__}: {error}") from error
        if update.extra and self.expected_extra:
            update = replace(update, extra=self._widened(update.extra))
        norm: float | None = None

        def find_non_finite(state: Tensors) -> str | None:
            # A finite norm needs no second pass over the values.
            nonlocal norm
            norm = settings.norm_of(update.state, expected)
            return None if norm is not None and math.isfinite(norm) else first_non_finite(state)

        check_update(update, expected, self.expected_extra, self._extra_checks, find_non_finite)
        for method in settings.methods:
            try:
                method.check(self.round, update)
            except ValueError as error:
                raise InvalidUpdateError(f"{where}: {error}") from error
        return update, norm

    def _widened(self, extra: State) -> State:
        """Restore the dtypes of additional tensors that were sent in the dtype of the requests."""
        widened = dict(extra)
        for name, expected in self.expected_extra.items():
            if name in extra and extra[name].dtype == self.settings.dtype and expected.is_floating_point():
                widened[name] = extra[name].to(expected.dtype)
        return widened

    def receive_in(self, round: Round, scale: float, reply: Message) -> tuple[ClientUpdate, float | None]:
        """
        Check a reply that arrives in a later round.

        Args:
            round ([`Round`]): The round in which the reply arrives.
            scale (`float`): Factor of the change.
            reply ([`Message`]): Reply of a client to its message.

        Returns:
            `tuple`: The update `x + scale · (y − x^v)` with the state `x` of the later round, in which `x^v` is the
            state that the client received and `y` the state that it trained, and the norm of its change if it is
            known.
        """
        update, norm = self.receive(reply)
        if round.number == self.round.number:
            return update, norm
        state = dict(update.state)
        start = self.expected_for(update.client_id)
        for name, value in self.expected_for(update.client_id, round.state).items():
            if value.is_floating_point():
                change = update.state[name].double() - start[name].double()
                state[name] = (value.double() + scale * change).to(value.dtype)
        return replace(update, state=state), None
