"""`Agreement`: what a client's own settings allow the requests of a server to contain.

The server of a federation may be dishonest. Each client therefore compares the fields of a request with its own
trainer and configuration, before it computes anything. `RULES` contains the rule of each field.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch

from ..adapters import Exchange
from ..messages import Distill, Evaluate, Feedback, Fit, Message, Predict
from ..messages.distillation import PublicRowsMessage
from ..methods import Method
from ..utils.fields import describe
from ..utils.printable import printable


# Largest number of characters of a value in an error.
MAX_SHOWN = 300


class RefusedRequestError(ValueError):
    """
    The client refuses a request, because a value differs from what its own settings allow.

    Args:
        request ([`Message`]): The request.
        field (`str`): The field with the value.
        found (`str`): The value, as the predicate of a sentence.
        agreed (`str`): What the client agreed to.
    """

    def __init__(self, request: Message, field: str, found: str, agreed: str) -> None:
        # A value of the server can be long, and a message to the server must be short.
        found, agreed = (printable(text, MAX_SHOWN) for text in (found, agreed))
        super().__init__(f"`{field}` of a request of kind {request.kind!r} {found}. The client agreed to {agreed}.")


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
    hf_federated.clients.agreement.RefusedRequestError: `round` of a request of kind 'fit' is 3. ...
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
    ) -> None:
        self.methods = methods
        self.num_rounds = num_rounds
        self.sends_state, self.returns_state = sends_state, returns_state
        self.smallest_limit = smallest_limit
        self.num_public_rows = num_public_rows
        # The settings of a `Fit` that do not depend on the state of the server. Their types are agreed.
        self.settings: dict[str, Any] = {}
        for method in methods:
            with suppress(Exception):  # a user's method may need the state of the server for its settings
                self.settings |= method.fit_settings()
        self._has_individual_states = any(type(method).state_for is not Method.state_for for method in methods)
        # The requests for predictions, and the number of public examples in them, by client and round. A server that
        # resumes repeats its requests.
        self._predictions: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._num_predicted: Counter[tuple[str, int]] = Counter()

    def check(self, request: Message) -> None:
        """
        Check the fields of a request.

        Args:
            request ([`Message`]): A request of the server.

        Raises:
            RefusedRequestError: If the client did not agree to the value of a field.
        """
        cls: Any = type(request)
        for name, rule in rules_of(cls).items():
            value = getattr(request, name)
            if (agreed := rule(self, value, request)) is not None:
                raise RefusedRequestError(request, name, f"is {describe(value)}", agreed)
        if isinstance(request, Predict):
            self._count_predictions(request)

    def check_tensors(self, request: Fit | Evaluate, exchange: Exchange) -> None:
        """
        Check the names and shapes of the tensors of a request, after the postprocessors have decoded them.

        Args:
            request ([`Fit`] or [`Evaluate`]): A request of the server.
            exchange ([`Exchange`]): The tensors that the client exchanges.

        Raises:
            RefusedRequestError: If a name or a shape differs from that of the client.
        """
        own = exchange.tensors
        # A method with another state for each client writes the tensors into the model itself.
        if request.state and not self._has_individual_states:
            if unknown := request.state.keys() ^ own.keys():
                name = min(unknown)
                found = f"{'lacks' if name in own else 'contains'} {name!r}"
                raise RefusedRequestError(request, "state", found, f"the names of {len(own)} tensors")
            _check_shapes(request, "state", request.state, own)
        # The client half of a method reads the names that it knows. Those of parameters have their shapes.
        _check_shapes(request, "extra", getattr(request, "extra", {}), own)

    def _count_predictions(self, request: Predict) -> None:
        """Check how often a client predicts the public examples in a round. A repeated request counts once."""
        key, repeated = (request.client_id, request.round), hash(replace(request, nonce=""))
        if repeated in self._predictions[key]:
            return
        passes = max(getattr(method, "passes_per_round", 0) for method in self.methods)
        num_rows = self._num_predicted[key] + request.stop - request.start
        if num_rows > passes * self.num_public_rows:
            agreed = f"{passes} predictions of each of {self.num_public_rows} public examples (`passes_per_round`)"
            raise RefusedRequestError(request, "stop", f"makes {num_rows} predictions in this round", agreed)
        self._predictions[key].add(repeated)
        self._num_predicted[key] = num_rows


def _check_shapes(
    request: Message, field: str, values: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
) -> None:
    """Check the shapes of the tensors with known names, and which of them are floating. The precision may differ."""
    for name in values.keys() & own.keys():
        value, expected = values[name], own[name]
        if value.shape != expected.shape or value.is_floating_point() != expected.is_floating_point():
            agreed = f"{expected.dtype}, shape {tuple(expected.shape)}"
            raise RefusedRequestError(request, field, f"has {name!r} as {describe(value)}", agreed)


# Returns what was agreed if a value of a field is not allowed, otherwise `None`.
Rule = Callable[[Agreement, Any, Any], "str | None"]


def _any(agreement: Agreement, value: Any, request: Any) -> str | None:
    """Allow each value that the annotation of the field allows."""
    return None


def _round(agreement: Agreement, value: int, request: Message) -> str | None:
    return None if value < agreement.num_rounds else f"{agreement.num_rounds} rounds"


def _state(agreement: Agreement, value: Mapping[str, torch.Tensor], request: Message) -> str | None:
    if bool(value) == agreement.sends_state:
        return None
    return "the global state" if agreement.sends_state else "no state"


def _settings(agreement: Agreement, value: Mapping[str, Any], request: Fit) -> str | None:
    # A step between training and aggregation can add settings.
    is_finite = all(math.isfinite(item) for item in value.values() if isinstance(item, float))
    own = agreement.settings
    if is_finite and all(_kind(value[name]) is _kind(own[name]) for name in value.keys() & own):
        return None
    return f"finite numbers, and values of the types in {own}"


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
    Message: {"round": _round, "client_id": _any, "nonce": _any},
    Fit: {
        "seed": _any,
        "state": _state,
        "extra": _any,  # Agreement.check_tensors
        "settings": _settings,
        "returns_state": _returns_state,
        "max_rows": _max_rows,
        "accepted_round": _accepted_round,
    },
    Evaluate: {"state": _evaluated_state},
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
