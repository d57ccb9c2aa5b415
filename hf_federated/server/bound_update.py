"""`BoundUpdate`: a bound on the norm of the change of one client, relative to the changes of all clients.

The bound needs the median of the cohort, which is known when the last update has arrived. By then all updates are
summed. The updates are therefore summed in groups of similar norms, and the groups above the bound are dropped at the
end of the round. In a normal round after the first one, all updates are in one group.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..aggregation import Accumulator, Aggregation
from ..messages import ClientUpdate
from ..messages.validation import InvalidUpdateError
from ..utils.shards import ACTIVE, norm_over_shards, sum_over_shards


State = Mapping[str, torch.Tensor]
# The magnitude of an update, by part: `"state"`, and `"extra"` if the algorithm exchanges additional tensors.
Magnitude = dict[str, float]
# A group of updates: the lowest and the highest power of 2 of their magnitudes, by part.
Group = tuple[tuple[str, int, int], ...]

PARTS = {"state": "change", "extra": "additional tensors"}

# Number of rounds whose medians form the reference.
HISTORY_LENGTH = 20
# Largest norm of a change, relative to the norm of the global state. It is checked when the update arrives.
MAX_RATIO_TO_STATE = 1e4
# Typical value of a parameter, for the norm of a state that is zero.
TYPICAL_VALUE = 1e-2
# A change of at most this part of the norm of the global state is harmless, and always accepted in a first round.
HARMLESS_RATIO = 2.0**-20
# Powers of 2 between a harmless change and the largest change.
NUM_OCTAVES = math.ceil(math.log2(MAX_RATIO_TO_STATE / HARMLESS_RATIO))
# Number of sums that a process keeps in a round, if `max_ratio` is at least 16.
MAX_GROUPS = 8
# Power of 2 of a harmless change. If past rounds are known, of all updates below their bound.
LOWEST = -(10**6)
# Number of clients of a first round from which its median is a bound.
MIN_CLIENTS = 3

_REMEDY = "If the client is honest, lower its learning rate, clip its gradients, or raise `max_update_ratio`."


class BoundUpdate:
    """
    Rejects the updates of clients that change the global state much more than other clients do.

    One client with a wrong learning rate would otherwise replace the model of all clients. In the example below, the
    changes have the norms 0.2, 0.4 and 1000. Their median is 0.4, the bound is 30 · 0.4 = 12, and the third update is
    rejected.

    1. The magnitude of an update is `‖x_i − x‖₂ / (η · s_i^0.75)`, where `s_i` is the number of optimizer steps. A
       client with 16 steps may change the state 8 times as much as a client with one step. An algorithm can define
       another divisor than `s_i^0.75` ([`Aggregation.amount_of_training`]). `η` is the learning rate of the round,
       relative to the peak of its schedule, as the server's arguments define it. When the learning rate decreases, the
       bound from past rounds decreases with it.
    2. An update is rejected if its magnitude is above `max_ratio · max(h, min(m, max_ratio · h))`. `m` is the median
       magnitude of the cohort and `h` the median of the last 20 rounds, so that a cohort with a hostile majority
       raises the bound by at most `max_ratio` in a round. In the first round the bound is `max_ratio · m`, and it
       needs three clients.
    3. The bound is rounded up by at most a factor of 2, and in a round with more than eight groups down to at least
       the median. Additional tensors of the algorithm, such as the control variates of Scaffold, have their own bound,
       without the division by the steps.

    A process keeps up to eight sums of updates in the first round (more if `max_ratio` is below 16), and one sum in a
    normal later round. It stores no update.

    Args:
        max_ratio (`float`): Largest ratio to the median, above 1. Infinity rejects no update.
        sends_changes (`bool`, *optional*, defaults to `False`): Whether updates contain changes instead of values.
        amount_of_training (`Callable[[ClientUpdate], float]`, *optional*): The divisor of the norm. Defaults to that
            of [`Aggregation`].
        relative_learning_rate (`Callable[[int], float]`, *optional*): `η` as a function of the round. Defaults to 1.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.messages import ClientUpdate
    >>> from hf_federated.server.bound_update import BoundUpdate

    >>> bound, state = BoundUpdate(max_ratio=30.0), {"w": torch.ones(4)}
    >>> bound.begin_round(state)
    >>> updates = {
    ...     name: ClientUpdate(0, name, {"w": state["w"] + step}, num_examples=1, num_tokens=0, num_steps=1)
    ...     for name, step in {"a": 0.1, "b": 0.2, "c": 500.0}.items()
    ... }
    >>> magnitudes = {name: bound.measure(update) for name, update in updates.items()}
    >>> groups = {name: bound.group_of(magnitude) for name, magnitude in magnitudes.items()}
    >>> list(bound.decide(magnitudes, groups, round=0))
    ['c']
    ```
    """

    def __init__(
        self,
        max_ratio: float,
        sends_changes: bool = False,
        amount_of_training: Callable[[ClientUpdate], float] | None = None,
        relative_learning_rate: Callable[[int], float] = lambda round: 1.0,
    ) -> None:
        self.max_ratio = max_ratio
        # Whether updates are measured at all.
        self.is_active = math.isfinite(max_ratio)
        self.relative_learning_rate = relative_learning_rate
        self._rate = 1.0
        self._sends_changes = sends_changes
        self._amount_of_training = amount_of_training or Aggregation().amount_of_training
        self._history: dict[str, list[float]] = {}
        self._received_by_clients: State = {}
        self._state: State = {}  # The floating tensors that clients receive.
        self._extra: Collection[str] = ()
        self._state_norm = 0.0
        # The medians of past rounds and the bounds of this round, by part.
        self._references: dict[str, float] = {}
        self._limits: dict[str, float] = {}

    def begin_round(self, state: State, extra: Collection[str] = (), round: int = 0) -> None:
        """
        Start a round.

        Args:
            state (`Mapping[str, torch.Tensor]`): The global state that clients receive. Empty if updates contain no
                parameters.
            extra (`Collection[str]`, *optional*): Names of the additional tensors that the algorithm averages.
            round (`int`, *optional*, defaults to `0`): Round number, from 0.
        """
        self._extra = extra
        self._rate = self.relative_learning_rate(round)
        self._received_by_clients, self._state = state, _floating(state)
        self._limits = {}
        self._references = {part: statistics.median(medians) for part, medians in self._history.items()}
        if self.is_active:
            num_values = sum(map(torch.numel, self._state.values()))
            if ACTIVE:
                num_values = int(sum_over_shards(torch.tensor(num_values)))
            typical = TYPICAL_VALUE * math.sqrt(num_values)
            self._state_norm = max(_norm(list(self._state.values())), typical)

    def norm_of(self, values: State, state: State | None = None) -> float | None:
        """
        Return the norm of the change of an update, or `None` if updates are not measured.

        If the norm is finite, all floating values of the update are finite.

        Args:
            values (`Mapping[str, torch.Tensor]`): The state of the update, with the names, shapes and dtypes of the
                state from which the client started.
            state (`Mapping[str, torch.Tensor]`, *optional*): This state. Defaults to the global state.
        """
        if not self.is_active or not self._state:
            return None
        start = self._state if state is None or state is self._received_by_clients else _floating(state)
        changed = [values[name] for name in start]
        return _norm(changed) if self._sends_changes else _norm(changed, list(start.values()))

    def measure(self, update: ClientUpdate, state: State | None = None, norm: float | None = None) -> Magnitude:
        """
        Return the magnitude of an update.

        Args:
            update ([`ClientUpdate`]): An update whose tensors were checked.
            state (`Mapping[str, torch.Tensor]`, *optional*): The state from which the client started. Defaults to the
                global state.
            norm (`float`, *optional*): Return value of [`~BoundUpdate.norm_of`], if it is known.

        Raises:
            InvalidUpdateError: If the change is out of all proportion to the global state.
        """
        if not self.is_active:
            return {}
        magnitude: Magnitude = {}
        norm_of_its = f"Client {update.client_id!r}, round {update.round + 1}: the norm of its"
        if norm is None:
            norm = self.norm_of(update.state, state)
        if norm is not None:
            if norm > MAX_RATIO_TO_STATE * self._state_norm:
                raise InvalidUpdateError(
                    f"{norm_of_its} change is {norm:.3g}, but the norm of the global state is {self._state_norm:.3g}. "
                    f"{_REMEDY}"
                )
            magnitude["state"] = norm / (self._amount_of_training(update) * self._rate)
            if not math.isfinite(magnitude["state"]):
                raise InvalidUpdateError(f"{norm_of_its} change is {norm:.3g}, but it reports hardly any training.")
        extra = [value for name, value in update.extra.items() if name in self._extra and value.is_floating_point()]
        if extra:
            magnitude["extra"] = _norm(extra)
            if not math.isfinite(magnitude["extra"]):
                raise InvalidUpdateError(f"{norm_of_its} additional tensors overflows. {_REMEDY}")
        return magnitude

    def group_of(self, magnitude: Magnitude) -> Group:
        """Return the smallest group of an update. All updates of a group are accepted or rejected together."""
        group = []
        for part, value in magnitude.items():
            octave = self._octave(part, value)
            group.append((part, octave, octave))
        return tuple(group)

    def _octave(self, part: str, value: float) -> int:
        """Return the power `k` of a magnitude between `unit · 2^k` and `unit · 2^(k + 1)`."""
        if value == 0 or (part == "state" and value * self._rate <= HARMLESS_RATIO * self._state_norm):
            return LOWEST
        octave = math.floor(math.log2(value) - math.log2(self._unit(part)))
        # The bound is at least one unit if past rounds are known, so all updates below it can share a group.
        return LOWEST if part in self._references and octave <= 0 else octave

    def _unit(self, part: str) -> float:
        return self.max_ratio * self._references[part] if part in self._references else 1.0

    def decide(self, magnitudes: Mapping[str, Magnitude], groups: Mapping[str, Group], round: int) -> dict[str, str]:
        """
        Decide which updates of a round are rejected, and add the round to the history.

        Args:
            magnitudes (`Mapping[str, dict[str, float]]`): Magnitudes of the updates of all processes, by client id.
            groups (`Mapping[str, Group]`): The groups of these updates, by client id.
            round (`int`): Round number, from 0.

        Returns:
            `dict[str, str]`: Reasons of the rejected updates, by client id.
        """
        # The next round has another global state.
        self._received_by_clients, self._state = {}, {}
        for part in PARTS:
            limit = self._limit(part, [each[part] for each in magnitudes.values() if each.get(part)])
            if limit is not None:
                self._limits[part] = limit
        reasons: dict[str, str] = {}
        for client_id, magnitude in magnitudes.items():
            exceeded = [part for part, _, highest in groups[client_id] if not self._is_within(part, highest)]
            if exceeded:
                part = exceeded[0]
                reasons[client_id] = (
                    f"Client {client_id!r}, round {round + 1}: the magnitude of its {PARTS[part]} is "
                    f"{magnitude[part]:.3g}, but at most {self._limits[part]:.3g} is allowed: {self.max_ratio:g} "
                    f"times the median of the cohort and of past rounds (`max_update_ratio`). {_REMEDY}"
                )
        for part in PARTS:
            accepted = [
                magnitude[part]
                for client_id, magnitude in magnitudes.items()
                if client_id not in reasons and magnitude.get(part)
            ]
            if accepted:
                history = [*self._history.get(part, []), statistics.median(accepted)]
                self._history[part] = history[-HISTORY_LENGTH:]
        return reasons

    def _limit(self, part: str, values: Sequence[float]) -> float | None:
        """Return the largest allowed magnitude. `None` with too few updates."""
        reference = self._references.get(part)
        if reference is None:
            return self.max_ratio * statistics.median(values) if len(values) >= MIN_CLIENTS else None
        median = statistics.median(values) if values else 0.0
        return self.max_ratio * max(reference, min(median, self.max_ratio * reference))

    def _is_within(self, part: str, octave: int) -> bool:
        if part not in self._limits or octave == LOWEST:
            return True
        return math.log2(self._unit(part)) + octave <= math.log2(self._limits[part])

    def is_accepted(self, group: Group) -> bool:
        """Whether the updates of a group are accepted. It is known after [`~BoundUpdate.decide`]."""
        return all(self._is_within(part, highest) for part, _, highest in group)

    def state_dict(self) -> dict[str, Any]:
        """Return the medians of past rounds, by part."""
        return {part: list(medians) for part, medians in self._history.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the medians that `state_dict` returned."""
        self._history = {part: list(medians) for part, medians in state.items()}


class GroupedAccumulator:
    """
    Sums the updates of a round in a limited number of groups. At the end of the round, it keeps the accepted groups.

    Close groups are joined. A joined group spans less than `max_ratio`, so a group that contains the median is always
    accepted. The number of groups is sufficient for all changes of the global state. Additional tensors have no
    largest size. If their sizes are far apart, the group that is highest above the median of the updates so far is
    dropped.

    Args:
        build (`Callable[[], Accumulator]`): Builds an empty accumulator.
        cohort (`Sequence[str]`, *optional*): The clients of the round, in order.
        max_ratio (`float`, *optional*, defaults to infinity): `max_ratio` of [`BoundUpdate`].
    """

    def __init__(
        self, build: Callable[[], Accumulator], cohort: Sequence[str] = (), max_ratio: float = math.inf
    ) -> None:
        self._build_empty = build
        self._order = {client_id: position for position, client_id in enumerate(cohort)}
        self._max_octaves = math.floor(math.log2(min(max_ratio, MAX_RATIO_TO_STATE))) + 1
        # The group of harmless changes, and the groups that cannot be joined.
        self._max_groups = max(MAX_GROUPS, 2 + NUM_OCTAVES // self._max_octaves)
        # The clients of each group, and the sum of their updates.
        self._groups: dict[Group, tuple[list[str], Accumulator]] = {}
        # The powers of 2 of all updates so far, by part.
        self._octaves: dict[str, list[int]] = {}

    def _build(self) -> Accumulator:
        accumulator = self._build_empty()
        accumulator.order = self._order
        return accumulator

    def add(self, client_id: str, smallest: Group) -> Accumulator:
        """
        Add a client, but not yet its update.

        Args:
            client_id (`str`): Id of the client.
            smallest (`Group`): The smallest group of its update.

        Returns:
            [`Accumulator`]: The sum of its group, to which the caller adds the update.
        """
        for part, octave, _ in smallest:
            self._octaves.setdefault(part, []).append(octave)
        found = smallest
        # In a normal round, there is one group.
        if smallest not in self._groups or len(self._groups) > 1:
            found = next((group for group in self._groups if _contains(group, smallest)), smallest)
        if found not in self._groups:
            self._groups[found] = [], self._build()
        clients, sums = self._groups[found]
        clients.append(client_id)
        return sums

    def limit(self) -> list[str]:
        """
        Join the two closest groups, or drop a group, if there are too many groups.

        Returns:
            `list[str]`: The clients of a dropped group.
        """
        if len(self._groups) <= self._max_groups:
            return []
        pairs = itertools.combinations(self._groups, 2)
        # The highest of equally close pairs, so that hostile updates are joined before honest ones.
        first, second = min(pairs, key=lambda pair: (_num_octaves(joined := _joined(*pair)), -_highest(joined)))
        joined = _joined(first, second)
        highest = self._find_out_of_bounds() if _num_octaves(joined) > self._max_octaves else None
        if highest is not None:
            return self._drop(highest)
        joined_clients, joined_sums = self._groups[first]
        clients, sums = self._groups.pop(second)
        joined_clients += clients
        joined_sums.merge(sums)
        # The joined group has the position of the first one, whose updates arrived earlier.
        self._groups = {joined if group == first else group: each for group, each in self._groups.items()}
        return []

    def _drop(self, group: Group) -> list[str]:
        """Drop the updates of a group, and return its clients."""
        clients, sums = self._groups.pop(group)
        sums.clear()
        return clients

    def settle(self, is_accepted: Callable[[Group], bool]) -> Accumulator:
        """Return the sum of the accepted groups."""
        for group in [group for group in self._groups if not is_accepted(group)]:
            self._drop(group)
        total, *others = [sums for _, sums in self._groups.values()] or [self._build()]
        self._groups = {}
        for other in others:
            total.merge(other)
        return total

    def _find_out_of_bounds(self) -> Group | None:
        """Return the highest group, relative to the updates so far, if all of its updates are above the bound."""
        medians = {part: statistics.median_low(octaves) for part, octaves in self._octaves.items()}
        excess = {group: max(low - medians[part] for part, low, _ in group) for group in self._groups}
        highest = max(excess, key=lambda group: excess[group])
        return highest if excess[highest] > self._max_octaves else None

    def by_client(self) -> dict[str, Group]:
        """Return the group of each client."""
        return {client_id: group for group, (clients, _) in self._groups.items() for client_id in clients}


def _contains(group: Group, smallest: Group) -> bool:
    bounds = zip(group, smallest, strict=True)
    return all(low <= octave <= high for (_, low, high), (_, octave, _) in bounds)


def _joined(first: Group, second: Group) -> Group:
    return tuple((part, min(a, c), max(b, d)) for (part, a, b), (_, c, d) in zip(first, second, strict=True))


def _highest(group: Group) -> int:
    return max((high for _, _, high in group), default=LOWEST)


def _num_octaves(group: Group) -> int:
    return max((high - low + 1 for _, low, high in group), default=0)


def _floating(state: State) -> State:
    return {name: value for name, value in state.items() if value.is_floating_point()}


def _norm(values: Sequence[torch.Tensor], references: Sequence[torch.Tensor] | None = None) -> float:
    """Return the norm of tensors, or of their differences to other tensors. Overflow is avoided."""
    if not values:
        return 0.0
    norm, device = math.inf, values[0].device
    for dtype in (torch.float32, torch.float64):
        found: list[Any] = []
        for index, value in enumerate(values):
            wide = value.to(dtype)
            if references is not None:
                wide = wide - references[index].to(dtype)
            each = torch.linalg.vector_norm(wide)
            # On a CPU, small tensors that stay between large temporary ones would fragment the memory.
            found.append(each.item() if device.type == "cpu" else each.to(device))
        norms = torch.tensor(found, dtype=dtype) if device.type == "cpu" else torch.stack(found)
        norm = float(torch.linalg.vector_norm(norms))
        if math.isfinite(norm):
            break
    return norm_over_shards(torch.tensor(norm, dtype=torch.float64)).item() if ACTIVE else norm
