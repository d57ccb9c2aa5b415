"""`Agreement`: what a client's own settings allow the requests of a server to contain.

The server of a federation may be dishonest. Each client therefore compares the fields of a request with its own
trainer and configuration, before it computes anything. `RULES` contains the rule of each field.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch

from ..adapters import Exchange
from ..messages import KINDS, Distill, Evaluate, Feedback, Fit, Message, Predict
from ..messages.distillation import PublicRowsMessage
from ..messages.narrowed_state import NarrowedState
from ..messages.secure_aggregation import (
    SECURE_REQUESTS,
    ConfirmSurvivors,
    OpenFit,
    SecureFit,
    ShareKeys,
    SubmitMasked,
    Unmask,
)
from ..messages.validation import RefusedRequestError, first_non_finite
from ..methods import Method
from ..secure_aggregation import SecureAggregation
from ..utils.fields import describe
from .request_record import RequestRecord
from .sampling import client_seed


# Largest number of values in a tensor field of a request to a client that exchanges fewer parameters.
MIN_VALUES = 2**24
# Largest number of clients of a sum under secure aggregation.
MAX_CLIENTS = 2**16
# A state is evaluated in its round and at the end of the run, and a user can evaluate another state.
MAX_EVALUATIONS = 3


class Agreement:
    """
    What the requests of a server may contain.

    Args:
        methods (`Sequence[Method]`): The client's instances of the methods.
        num_rounds (`int`): Number of rounds of the run.
        sends_state (`bool`, *optional*, defaults to `True`): Whether the client receives the global state.
        returns_state (`bool`, *optional*, defaults to `True`): Whether the client sends its trained state.
        smallest_limit (`int`, *optional*): Smallest limit of the examples of a round. By default, a client uses all of
            its examples.
        num_public_rows (`int`, *optional*, defaults to `0`): Number of public examples.
        seed (`int`, *optional*): Seed of the federation, from which the seeds of local training are derived. By
            default, any seed is allowed.
        client_ids (`Collection[str]`, *optional*): Ids of the clients. By default, any id is allowed.
        secure ([`SecureAggregation`], *optional*): The protocol of secure aggregation. The client then sends no
            update without a mask, and no metrics.

    Attributes:
        record ([`~hf_federated.clients.request_record.RequestRecord`], *optional*): The requests of the run. Without a
            record, only requests for predictions are counted, because a server in the same process may train again.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated import FedAvg
    >>> from hf_federated.clients import Agreement
    >>> from hf_federated.messages import Fit

    >>> agreement = Agreement([FedAvg()], num_rounds=3)
    >>> agreement.check(Fit(0, "a", seed=0, state={"w": torch.zeros(1)}))
    >>> agreement.check(Fit(3, "a", seed=0, state={"w": torch.zeros(1)}))
    Traceback (most recent call last):
    ...
    hf_federated.messages.validation.RefusedRequestError: `round` of a request of kind 'fit' is 3. ...
    ```
    """

    def __init__(
        self,
        methods: Sequence[Method],
        num_rounds: int,
        *,
        sends_state: bool = True,
        returns_state: bool = True,
        smallest_limit: int | None = None,
        num_public_rows: int = 0,
        seed: int | None = None,
        client_ids: Collection[str] | None = None,
        secure: SecureAggregation | None = None,
    ) -> None:
        self.methods = methods
        self.num_rounds = num_rounds
        self.sends_state, self.returns_state = sends_state, returns_state
        self.smallest_limit = smallest_limit
        self.num_public_rows = num_public_rows
        self.seed, self.client_ids = seed, client_ids
        # The settings of a `Fit` that do not depend on the state of the server. Their types are agreed.
        self.settings: dict[str, Any] = {}
        self.setting_ranges: dict[str, tuple[float, float]] = {}
        for method in methods:
            self.setting_ranges |= method.setting_ranges()
            with suppress(Exception):  # a user's method may need the state of the server for its settings
                self.settings |= method.fit_settings()
        self._has_individual_states = any(type(method).state_for is not Method.state_for for method in methods)
        own: list[type[Message]] = [kind for method in methods for kind in method.messages]
        # The methods also declare the kinds of the replies.
        replies = {kind for kind in KINDS.values() if not kind.answered_by}
        requests: list[type[Message]] = [Fit, Evaluate, *own]
        self.secure = secure
        if secure is not None:
            requests = [SecureFit, *SECURE_REQUESTS] if secure.masks else [OpenFit]
        self._kinds = tuple(kind for kind in dict.fromkeys(requests) if kind not in replies)
        self.record: RequestRecord | None = None
        self._predictions = RequestRecord()
        # Number of requests of a method of the user, by kind, client and round.
        self._num_own: Counter[tuple[str, str, int]] = Counter()

    def describe(self) -> dict[str, str]:
        """Return what the client agreed to, as text by topic."""
        own = [kind for kind in self._kinds if kind not in RULES]
        requests = [f"{kind.kind!r} at most {kind.max_per_round}" for kind in own]
        passes = max((getattr(method, "passes_per_round", 0) for method in self.methods), default=0)
        sent = "the exchanged parameters after local training" if self.returns_state else "none"
        if self.secure is not None and self.secure.masks:
            sent = f"none: the server learns sums of at least {self.secure.min_survivors} clients"
        return {
            "rounds": f"{self.num_rounds}, in ascending order",
            "received state": "the exchanged parameters" if self.sends_state else "none",
            "sent state": sent,
            "local training": "once in a round, with the seed that follows from `federation_seed`",
            "examples in a round": "all" if self.smallest_limit is None else f"all, or at least {self.smallest_limit}",
            "evaluations": f"at most {MAX_EVALUATIONS} in a round" if Evaluate in self._kinds else "none",
            "predictions of public examples": f"at most {passes} of each of {self.num_public_rows} in a round",
            "other requests in a round": ", ".join(requests) or "none",
            **self._describe_secure(),
        }

    def _describe_secure(self) -> dict[str, str]:
        """Return what the client agreed to under secure aggregation."""
        if self.secure is None or not self.secure.masks:
            return {}
        smallest, kinds = self.secure.min_survivors, ", ".join(repr(kind.kind) for kind in self._kinds)
        largest = SecureFit.max_per_round
        return {
            "secure aggregation": ", ".join(f"{name}={value!r}" for name, value in self.secure.agreed().items()),
            "sums of updates": f"one in a round, of at least {smallest} clients that have signed their keys",
            "sessions of secure aggregation": f"at most {largest} in a round, of {kinds} in this order",
        }

    def check(self, request: Message) -> None:
        """
        Check the fields of a request.

        Args:
            request ([`Message`]): A request of the server.

        Raises:
            RefusedRequestError: If the client did not agree to the value of a field.
        """
        cls: Any = type(request)
        # Under secure aggregation, a subclass is another request.
        if not (issubclass(cls, self._kinds) if self.secure is None else cls in self._kinds):
            kinds = ", ".join(repr(kind.kind) for kind in self._kinds)
            raise RefusedRequestError(request, "kind", "is no request of the methods", f"the kinds {kinds}")
        for name, rule in rules_of(cls).items():
            value = getattr(request, name)
            if (agreed := rule(self, value, request)) is not None:
                raise RefusedRequestError(request, name, f"is {describe(value)}", agreed)
        if self.record is not None:
            self._add(request, self.record)
        elif isinstance(request, Predict):
            self._add(request, self._predictions)
        elif cls not in RULES:
            key = cls.kind, request.client_id, request.round
            self._num_own[key] += 1
            if self._num_own[key] > cls.max_per_round:
                raise RefusedRequestError(request, "round", f"is {request.round}", self._limit(request)[2])

    def _add(self, request: Message, record: RequestRecord) -> None:
        amount, largest, agreed = self._limit(request)
        # The secrets of a session exist in memory only, so no client can answer its requests after a power failure.
        is_durable = not isinstance(request, SECURE_REQUESTS)
        if (found := record.add(request, amount, largest, is_durable)) is not None:
            raise RefusedRequestError(request, "round", found, agreed)

    def check_tensors(self, request: Message, exchange: Exchange) -> None:
        """
        Check the tensors of a request, after the postprocessors have decoded them.

        Args:
            request ([`Message`]): A request of the server.
            exchange ([`Exchange`]): The tensors that the client exchanges.

        Raises:
            RefusedRequestError: If a name, a shape or a value is not allowed.
        """
        # A server in the same process has the tensors of the client anyway.
        if self.record is not None:
            _check_values(request, max(exchange.max_values, MIN_VALUES))
        if not isinstance(request, (Fit, Evaluate)):
            return
        # Without a conversion of the values.
        state: Mapping[str, Any] = request.state.unread if isinstance(request.state, NarrowedState) else request.state
        extra = getattr(request, "extra", {})
        if not extra and exchange.residual is None and exchange.has_layout(state):
            return
        own = exchange.tensors
        if exchange.residual is not None:
            # The client half of the method checks the factors, whose rank grows.
            own = {name: value for name, value in own.items() if name not in exchange.base_parameters}
        if state and self._has_individual_states:
            # The method can send a part of a tensor, such as an adapter of a smaller rank, and further tensors.
            _check_shapes(request, "state", state, own, allows_parts=True)
        elif state:
            if unknown := state.keys() ^ own.keys():
                name = min(unknown)
                found = f"{'lacks' if name in own else 'contains'} {name!r}"
                raise RefusedRequestError(request, "state", found, f"the names of {len(own)} tensors")
            _check_shapes(request, "state", state, own)
        # The client half of a method reads the names that it knows. Those of parameters have their shapes.
        _check_shapes(request, "extra", extra, own)

    def _limit(self, request: Message) -> tuple[int, int, str]:
        """Return what a request asks for, how much is allowed in a round, and the limit in words."""
        if isinstance(request, PublicRowsMessage):
            passes = max(getattr(method, "passes_per_round", 0) for method in self.methods)
            largest = passes * self.num_public_rows
            agreed = f"{passes} passes over {self.num_public_rows} public examples in a round (`passes_per_round`)"
            if isinstance(request, Feedback) and self.record is not None:
                largest = self.record.amount(Predict.kind, request.client_id, request.round)
                agreed = "feedback on predictions that the client has sent in this round"
            return request.stop - request.start, largest, agreed
        if isinstance(request, Evaluate):
            return 1, MAX_EVALUATIONS, f"{MAX_EVALUATIONS} evaluations in a round, in ascending rounds"
        largest = request.max_per_round
        limit = f"at most {largest} of these requests in a round (`max_per_round` of the message), in ascending rounds"
        return 1, largest, limit


def _check_shapes(
    request: Message,
    field: str,
    values: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    allows_parts: bool = False,
) -> None:
    """Check the shapes of the tensors with known names, and which of them are floating. The precision may differ."""
    for name in values.keys() & own.keys():
        value, expected = values[name], own[name]
        is_part = value.ndim == expected.ndim and all(map(operator.le, value.shape, expected.shape))
        has_shape = is_part if allows_parts else value.shape == expected.shape
        if not has_shape or value.is_floating_point() != expected.is_floating_point():
            agreed = f"{expected.dtype}, shape {'at most ' * allows_parts}{tuple(expected.shape)}"
            raise RefusedRequestError(request, field, f"has {name!r} as {describe(value)}", agreed)


def _check_values(request: Message, largest: int) -> None:
    """Check that the tensors of a request are finite and not larger than the tensors that the client exchanges."""
    for field in fields(request):
        value = getattr(request, field.name)
        tensors = {"": value} if isinstance(value, torch.Tensor) else value
        if not isinstance(tensors, Mapping):
            continue
        tensors = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        number = sum(each.numel() for each in tensors.values())
        # The number of public examples limits the targets.
        if number > largest and not isinstance(request, PublicRowsMessage):
            raise RefusedRequestError(request, field.name, f"has {number} values", f"at most {largest} values")
        if (name := first_non_finite(tensors)) is not None:
            raise RefusedRequestError(request, field.name, f"is not finite: {name!r}", "finite values")


# Returns what was agreed if a value of a field is not allowed, otherwise `None`.
Rule = Callable[[Agreement, Any, Any], "str | None"]


def _any(agreement: Agreement, value: Any, request: Any) -> str | None:
    """Allow each value that the annotation of the field allows."""
    return None


def _round(agreement: Agreement, value: int, request: Message) -> str | None:
    return None if value < agreement.num_rounds else f"{agreement.num_rounds} rounds"


def _client_id(agreement: Agreement, value: str, request: Message) -> str | None:
    ids = agreement.client_ids
    return None if ids is None or value in ids else f"requests to {', '.join(map(repr, sorted(ids)[:3]))}"


def _seed(agreement: Agreement, value: int, request: Fit) -> str | None:
    # A server in the same process has the examples.
    if agreement.record is None or agreement.seed is None:
        return None
    if value == client_seed(agreement.seed, request.client_id, request.round):
        return None
    return "the seed that follows from `federation_seed`, the client and the round"


def _state(agreement: Agreement, value: Mapping[str, torch.Tensor], request: Message) -> str | None:
    if bool(value) == agreement.sends_state:
        return None
    return "the global state" if agreement.sends_state else "no state"


def _settings(agreement: Agreement, value: Mapping[str, Any], request: Fit) -> str | None:
    if not value and not agreement.settings:
        return None
    # A step between training and aggregation can add settings.
    is_finite = all(math.isfinite(item) for item in value.values() if isinstance(item, float))
    own, ranges = agreement.settings, agreement.setting_ranges
    if not is_finite or not all(name in value and _kind(value[name]) is _kind(own[name]) for name in own):
        return f"finite numbers, and values of the types in {own}"
    outside = [name for name in ranges if name in value and not ranges[name][0] <= value[name] <= ranges[name][1]]
    return f"{outside[0]!r} from {ranges[outside[0]][0]:g} to {ranges[outside[0]][1]:g}" if outside else None


def _kind(value: Any) -> type:
    """Return the type of a value. Integers are valid numbers."""
    return float if type(value) is int else type(value)


def _returns_state(agreement: Agreement, value: bool, request: Fit) -> str | None:
    return None if value == agreement.returns_state else f"returns_state={agreement.returns_state}"


def _max_rows(agreement: Agreement, value: int | None, request: Fit) -> str | None:
    smallest = agreement.smallest_limit
    if value is None or (smallest is not None and value >= smallest):
        return None
    if smallest is None:
        return "no limit, because neither `balance` nor `max_rows_per_round` is set"
    return f"a limit of at least {smallest}"


def _accepted_round(agreement: Agreement, value: int | None, request: Fit) -> str | None:
    return None if value is None or value < request.round else "a round before the round of the request"


def _num_clients(agreement: Agreement, value: int, request: SecureFit) -> str | None:
    smallest = 1 if agreement.secure is None else agreement.secure.min_survivors
    return None if smallest <= value <= MAX_CLIENTS else f"{smallest} to {MAX_CLIENTS} clients"


def _stop(agreement: Agreement, value: int, request: PublicRowsMessage) -> str | None:
    allowed = request.start < value <= agreement.num_public_rows
    return None if allowed else f"positions of {agreement.num_public_rows} public examples"


def _evaluated_state(agreement: Agreement, value: Mapping[str, torch.Tensor], request: Evaluate) -> str | None:
    # A client evaluates its own model if it does not return its state.
    if bool(value) == agreement.returns_state:
        return None
    return "the global state" if agreement.returns_state else "no state"


# The rule of each field of the requests of this library. A class also has the rules of its base classes.
RULES: dict[type[Message], dict[str, Rule]] = {
    Message: {"round": _round, "client_id": _client_id, "nonce": _any},
    Fit: {
        "seed": _seed,
        "state": _state,
        "extra": _any,  # Agreement.check_tensors
        "settings": _settings,
        "returns_state": _returns_state,
        "max_rows": _max_rows,
        "accepted_round": _accepted_round,
    },
    Evaluate: {"state": _evaluated_state},
    # The session of the client checks the content of the fields.
    SecureFit: {"session": _any, "num_clients": _num_clients},
    OpenFit: {},
    ShareKeys: dict.fromkeys(("session", "keys", "identities", "signatures"), _any),
    SubmitMasked: dict.fromkeys(("session", "envelopes"), _any),
    ConfirmSurvivors: dict.fromkeys(("session", "survivors"), _any),
    Unmask: dict.fromkeys(("session", "signatures"), _any),
    PublicRowsMessage: {"order": _any, "start": _any, "stop": _stop, "seed": _any},
    # The client half of a distillation checks these fields.
    Predict: {"keeps_graph": _any},
    Distill: dict.fromkeys(("targets", "num_epochs", "num_training_epochs", "settings"), _any),
    Feedback: dict.fromkeys(("targets", "feedback", "step", "num_training_steps", "settings"), _any),
}


@functools.cache
def rules_of(cls: Any) -> dict[str, Rule]:
    """Return the rule of each field of a request. The other fields of a method's own messages are free."""
    known = {name: rule for base in reversed(cls.__mro__) for name, rule in RULES.get(base, {}).items()}
    return {field.name: known.get(field.name, _any) for field in fields(cls)}
