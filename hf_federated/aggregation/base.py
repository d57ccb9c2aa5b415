"""What every averaging algorithm is made of.

An algorithm has a server side, the methods of [`Aggregation`], and optionally a client side, a [`LocalHook`] that runs
inside local training. The two sides share nothing but messages: whatever the client side needs is in the `Fit` it
received (`settings`, `extra`) and in the state that this client kept from its earlier rounds.

A round on the server is

```
fit_settings(), fit_extra()      -> into the Fit message
accumulator()                    -> empty means
accumulator.add(update)          for each reply, in any order, none kept
aggregate(accumulator, state)    -> the new global state
```
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Fit


State = dict[str, torch.Tensor]

# Numbers that are converted at a time.
PIECE = 2**18
WEIGHTINGS = ("examples", "tokens", "uniform")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what a server keeps of a tensor: float32, or the tensor's own where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def _accumulation_dtype(value: torch.Tensor) -> torch.dtype:
    """
    The dtype to add a tensor up in, so much wider than its own that the order of additions is rounded away: a mean is
    then the same however clients are spread over processes. Apple's GPUs have no float64.
    """
    wider = torch.float64 if value.dtype.itemsize >= 4 and value.device.type != "mps" else torch.float32
    return torch.promote_types(value.dtype, wider)


def _add(total: torch.Tensor, value: torch.Tensor, weight: float) -> None:
    """`total += weight · value` of a narrower dtype."""
    if total.device.type != "cpu" or total.dtype == value.dtype or total.numel() <= PIECE:
        total.add_(value, alpha=weight)
        return
    # On a CPU the conversion is a tensor of its own. Pieces of it stay in the cache, and in memory at hand.
    length = max(1, PIECE // (total.numel() // total.shape[0]))
    for part, addend in zip(total.split(length), value.split(length), strict=True):
        part.add_(addend, alpha=weight)


class WeightedMean:
    """
    A streaming weighted mean of states: `Σ_i w_i x_i / Σ_i w_i`, summed in float64 (float32 for half precision).

    It holds one sum however many are added. With weights that are whole numbers the products and, as long as a value
    differs between clients by less than five orders of magnitude, the sums are exact: the mean does not depend on the
    order of additions nor on how clients are spread over processes. One state, and any number of equal states of less
    than float64, come out bit for bit. Integer and boolean tensors are not averaged: the first state's are kept.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import WeightedMean

    >>> mean = WeightedMean()
    >>> mean.add({"w": torch.tensor([1.0])}, weight=1)
    >>> mean.add({"w": torch.tensor([4.0])}, weight=2)
    >>> mean.finalize()
    {'w': tensor([3.])}
    ```
    """

    def __init__(self) -> None:
        self.total_weight = 0.0
        self.num_updates = 0
        # Of a single state the state itself, of more their weighted sum.
        self._sums: State = {}
        self._others: State = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(self, state: Mapping[str, torch.Tensor], weight: float) -> None:
        """
        Add a state.

        Args:
            state (`Mapping[str, torch.Tensor]`): The same names and shapes every time.
            weight (`float`): Positive.

        Raises:
            ValueError: If the weight is not positive and finite.
        """
        if not 0 < weight < float("inf"):
            raise ValueError(f"A weight must be positive and finite, got {weight}.")
        if self.num_updates == 0:
            self._start(state, copy=True)
        else:
            self._make_sum()
            for name, total in self._sums.items():
                _add(total, state[name].to(total.device), weight)
        self.total_weight += weight
        self.num_updates += 1

    def _start(self, state: Mapping[str, torch.Tensor], copy: bool) -> None:
        for name, value in state.items():
            self._dtypes[name] = value.dtype
            if not value.is_floating_point():
                self._others[name] = value.clone()
            elif copy:
                self._sums[name] = value.to(_accumulation_dtype(value), copy=True)
            else:
                self._sums[name] = torch.zeros_like(value, dtype=_accumulation_dtype(value))

    def _make_sum(self) -> None:
        if self.num_updates == 1 and self._sums:
            torch._foreach_mul_(list(self._sums.values()), self.total_weight)

    def merge(self, other: WeightedMean) -> None:
        """
        Add what another accumulator has gathered.

        Args:
            other ([`WeightedMean`]): Left as it is.
        """
        if other.num_updates == 0:
            return
        if self.num_updates == 0:
            self._sums = {name: value.clone() for name, value in other._sums.items()}
            self._others = {name: value.clone() for name, value in other._others.items()}
            self._dtypes = dict(other._dtypes)
        else:
            self._make_sum()
            factor = other.total_weight if other.num_updates == 1 else 1.0
            for name, total in self._sums.items():
                total.add_(other._sums[name], alpha=factor)
        self.total_weight += other.total_weight
        self.num_updates += other.num_updates

    def as_part_of(
        self, total_weight: float, num_updates: int, reference: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """
        Become this process's part of a mean over several: after the first list was replaced, in place, by its sum over
        all of them, and the second by those of the process that saw the first update, this is the mean of all.

        Args:
            total_weight (`float`): Of all processes.
            num_updates (`int`): Of all processes.
            reference (`Mapping[str, torch.Tensor]`): What the states look like, for a process that saw none.

        Returns:
            `tuple`: The tensors that are averaged, and the others, in the order of `reference`.
        """
        if self.num_updates == 0:
            self._start(reference, copy=False)
        elif num_updates > 1:
            self._make_sum()
        self.total_weight, self.num_updates = total_weight, num_updates
        sums = [self._sums[name] for name in reference if name in self._sums]
        return sums, [self._others[name] for name in reference if name in self._others]

    def finalize(self, wide: bool = False) -> State:
        """
        The mean.

        Args:
            wide (`bool`, *optional*, defaults to `False`): Leave it in the accumulator's dtype instead of casting it
                back to that of the states.

        Returns:
            `dict[str, torch.Tensor]`: The mean of the floating tensors, the first state's other tensors.

        Raises:
            ValueError: If nothing was added.
        """
        if self.num_updates == 0:
            raise ValueError("The mean of no updates is undefined.")
        return {name: self.mean_of(name, wide) for name in self._dtypes}

    def mean_of(self, name: str, wide: bool = False) -> torch.Tensor:
        """
        The mean of one tensor, as [`~WeightedMean.finalize`] returns it. Wide means of all tensors together are twice
        as large as the states; one by one they are not in memory together.

        Args:
            name (`str`): Its name.
            wide (`bool`, *optional*, defaults to `False`): Leave it in the accumulator's dtype.

        Raises:
            ValueError: If nothing was added.
        """
        if self.num_updates == 0:
            raise ValueError("The mean of no updates is undefined.")
        if name in self._others:
            return self._others[name]
        mean = self._sums[name] if self.num_updates == 1 else self._sums[name] / self.total_weight
        return mean if wide else mean.to(self._dtypes[name])


class LocalHook:
    """
    The client side of an algorithm: what it does inside local training.

    One is made for each `Fit` by [`Aggregation.local_hook`], used for that client's local training, and dropped.

    Example:

    ```python
    >>> from hf_federated import LocalHook

    >>> class WithoutBiases(LocalHook):
    ...     def on_gradients(self, parameters):
    ...         for name, parameter in parameters.items():
    ...             if name.endswith("bias"):
    ...                 parameter.grad = None
    ```
    """

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """
        Called before each optimizer step, when the gradients of the whole (accumulated) batch are in `.grad`, and
        before they are clipped.

        Args:
            parameters (`Mapping[str, torch.nn.Parameter]`): The exchanged parameters by name.
        """

    def finish(self) -> tuple[State, dict[str, Any] | None]:
        """
        Called after local training.

        Returns:
            `tuple`: What to send beside the update, by parameter name, and what this client keeps for its next round
            (`None`: nothing).
        """
        return {}, None


class Aggregation:
    """
    Base of the averaging algorithms; it averages parameters and nothing else.

    A subclass stores each constructor argument under its own name, and overrides the methods of the side it changes.

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            What an update weighs: `"examples"` (rows of the client's data), `"tokens"` (input tokens seen in the
            round, without padding) or `"uniform"`.

    Raises:
        ValueError: If `weighting` is unknown.

    Example:

    ```python
    >>> from hf_federated import Aggregation

    >>> class BySteps(Aggregation):
    ...     name = "by_steps"
    ...
    ...     def weight(self, update):
    ...         return float(update.num_steps)

    >>> BySteps()
    BySteps()
    ```
    """

    name: ClassVar[str] = ""

    def __init__(self, weighting: str = "examples") -> None:
        if weighting not in WEIGHTINGS:
            raise ValueError(f"`weighting` is {weighting!r}; allowed are {', '.join(map(repr, WEIGHTINGS))}.")
        self.weighting = weighting

    # ---- What it is

    def settings(self) -> dict[str, Any]:
        """All constructor arguments and their values."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def non_default_settings(self) -> dict[str, Any]:
        """The constructor arguments whose values are not the defaults."""
        parameters = inspect.signature(type(self)).parameters
        return {name: value for name, value in self.settings().items() if value != parameters[name].default}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.non_default_settings().items())
        return f"{type(self).__name__}({arguments})"

    # ---- Server side

    def setup(self, num_rounds: int, num_clients: int) -> None:
        """
        Called once, before the first round or before the state of a checkpoint is loaded. Forgets an earlier run.

        Args:
            num_rounds (`int`): Rounds of the run.
            num_clients (`int`): Clients of the federation, sampled or not.
        """

    def fit_settings(self) -> dict[str, Any]:
        """JSON scalars for the `settings` of this round's `Fit`."""
        return {}

    def fit_extra(self, state: State) -> State:
        """
        Tensors for the `extra` of this round's `Fit`.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return {}

    def expected_extra(self, state: State) -> State:
        """
        What an update's `extra` must look like: tensors of the names, shapes and dtypes that clients send beside the
        state. Others are refused.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return {}

    def weight(self, update: ClientUpdate) -> float:
        """What an update weighs in the mean."""
        if self.weighting == "uniform":
            return 1.0
        weight = update.num_tokens if self.weighting == "tokens" else update.num_examples
        if weight <= 0:
            raise ValueError(
                f"Client {update.client_id!r} reports {weight} {self.weighting}, so its update has no weight; use "
                "weighting='uniform' for clients that do not count them."
            )
        return float(weight)

    def accumulator(self) -> Accumulator:
        """An empty accumulator for one round."""
        return Accumulator(self)

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        """
        The new global state.

        Args:
            accumulator ([`Accumulator`]): What this round's updates came to.
            state (`dict[str, torch.Tensor]`): The global state that the clients started from.

        Returns:
            `dict[str, torch.Tensor]`: The same names, shapes and dtypes as `state`.
        """
        return accumulator.mean.finalize()

    def state_dict(self) -> dict[str, Any]:
        """What the server keeps between rounds, as scalars and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    # ---- Client side

    needs_gradients: ClassVar[bool] = False

    def local_hook(self, message: Fit, kept: dict[str, Any] | None) -> LocalHook | None:
        """
        The client side for one local training.

        It runs where the client is, on another instance of this class than the server's: it may use the constructor's
        arguments, `message` and `kept`, nothing else.

        Args:
            message ([`Fit`]): What the server sent.
            kept (`dict`, *optional*): What this client's last hook returned to keep.
        """
        return None


class Accumulator:
    """
    One round's updates, added up as they come: their mean, and the mean of what they carried beside it.

    Under several processes each gathers the updates of its own clients; the engine brings them together before
    [`Aggregation.aggregate`].

    Args:
        algorithm ([`Aggregation`]): Says what an update weighs.
    """

    def __init__(self, algorithm: Aggregation) -> None:
        self._algorithm = algorithm
        self.mean = WeightedMean()
        self.extra = WeightedMean()
        self.first_client: str | None = None

    @property
    def num_updates(self) -> int:
        """How many updates were added."""
        return self.mean.num_updates

    def add(self, update: ClientUpdate) -> None:
        """Add one client's update, which is not kept."""
        if self.first_client is None:
            self.first_client = update.client_id
        self.mean.add(update.state, self._algorithm.weight(update))
        if update.extra:
            self.extra.add(update.extra, 1.0)

    def merge(self, other: Accumulator) -> None:
        """Add what another accumulator of the same round has gathered."""
        self.mean.merge(other.mean)
        self.extra.merge(other.extra)
