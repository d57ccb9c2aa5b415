"""What every averaging algorithm is made of.

An algorithm has a server side, the methods of [`Aggregation`], and optionally a client side, a [`LocalHook`] that runs
inside local training. The two sides share nothing but messages: whatever the client side needs is in the `Fit` it
received (`settings`, `extra`) and in the state that this client kept from its earlier rounds.

A round on the server is

```
fit_settings(), fit_extra()      -> into the Fit message
accumulator(state)               -> empty means
accumulator.add(update)          for each reply, in any order, none kept
aggregate(accumulator, state)    -> the new global state
```
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..messages import ClientUpdate, Disclosure, Fit
from ..postprocessing import Postprocessor
from ..utils.weighted_mean import State, WeightedMean


WEIGHTINGS = ("examples", "tokens", "uniform")


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

    # Whether `inputs` and `loss` do anything.
    changes_loss: ClassVar[bool] = False

    def start(self, trainer: Any, exchange: Any, model: Any) -> None:
        """
        Called before local training, of an algorithm that [trains private models][`Aggregation`].

        Args:
            trainer (`transformers.Trainer`): Around the client's private model, as it is before the first round.
            exchange ([`~hf_federated.adapters.Exchange`]): Reads and writes that model.
            model (`PreTrainedModel`): The shared one.
        """

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """What the shared model is called with in a training step, from a batch."""
        return dict(inputs)

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """
        The loss of a training step.

        Args:
            loss (`torch.Tensor`): The trainer's, as the mean over this batch.
            outputs (`Any`): The shared model's, by name.
            inputs (`Mapping[str, Any]`): From [`~LocalHook.inputs`].

        Returns:
            `torch.Tensor`: Of the same scale. Where batches are accumulated, it is weighed as the trainer's is.
        """
        return loss

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """
        Called before each optimizer step, when the gradients of the whole (accumulated) batch are in `.grad`, and
        before they are clipped.

        Args:
            parameters (`Mapping[str, torch.nn.Parameter]`): The exchanged parameters by name.
        """

    def on_step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """
        Called before each optimizer step, after [`~LocalHook.on_gradients`].

        Args:
            param_groups (`Sequence[Mapping[str, Any]]`): The optimizer's parameter groups, with the learning rate of
                this step under `"lr"`.
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
    # Whether parameters go to the clients and come back. Without, each client has a model of its own.
    exchanges_parameters: ClassVar[bool] = True
    # What an update holds: trained parameters (`"parameters"`) or how training changed them (`"changes"`).
    update_content: ClassVar[str] = "parameters"
    # Whether a client has a model beside the shared one, which its hook is given by `start` and trains.
    trains_private_models: ClassVar[bool] = False

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

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        """The values that leave a client in addition to parameters and the fields of an update."""
        return ()

    # ---- Server side

    def check_setup(self, args: Any, config: Any) -> None:
        """
        Refuse training arguments or a federation that the algorithm does not support.

        Args:
            args (`TrainingArguments`): The user's training arguments.
            config ([`FederatedConfig`]): The configuration of the federation.

        Raises:
            ValueError: If a value is not supported. The message names the alternative.
        """

    def setup(self, num_rounds: int, num_clients: int) -> None:
        """
        Called once, before the first round or before the state of a checkpoint is loaded. Forgets an earlier run.

        Args:
            num_rounds (`int`): Rounds of the run.
            num_clients (`int`): Clients of the federation, sampled or not.
        """

    def postprocessors(self) -> list[Postprocessor]:
        """Steps between a client's training and the aggregate that belong to the algorithm; the last to leave."""
        return []

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

    def check_extra(self, extra: Mapping[str, torch.Tensor]) -> None:
        """
        Refuse the values that a client sends in addition to its state. Names, shapes and dtypes are those of
        [`~Aggregation.expected_extra`], and all values are finite.

        Args:
            extra (`Mapping[str, torch.Tensor]`): The client's tensors.

        Raises:
            ValueError: If the algorithm cannot use them. The client's update is then refused.
        """

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

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        """
        An empty accumulator for one round. An override may add means to `means`, each with its reference.

        Args:
            state (`dict[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of an update's state.
            extra (`dict[str, torch.Tensor]`, *optional*): The same for an update's `extra`. Defaults to
                [`~Aggregation.expected_extra`].
        """
        return Accumulator(self, state, self.expected_extra(state) if extra is None else extra)

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        """
        Add an update to the means of an accumulator. The update must not be kept.

        Args:
            accumulator ([`Accumulator`]): From [`~Aggregation.accumulator`].
            update ([`ClientUpdate`]): An accepted update.
        """
        accumulator.means["state"].add(update.state, self.weight(update))
        if update.extra:
            accumulator.means["extra"].add(update.extra, 1.0)

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
    The named means of one round, which updates stream into. No update is kept.

    Each process of a launch accumulates the updates of its own clients. The engine reduces every mean in `means`
    before it calls [`Aggregation.aggregate`], so an algorithm that needs another mean adds it in
    [`Aggregation.accumulator`] and streams into it in [`Aggregation.accumulate`].

    Args:
        algorithm ([`Aggregation`]): The algorithm that accumulates.
        state (`Mapping[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of an update's state.
        extra (`Mapping[str, torch.Tensor]`): The same for an update's `extra`.

    Attributes:
        means (`dict[str, WeightedMean]`): The means by name. `"state"` is the mean of the updates' states, `"extra"`
            the uniform mean of their `extra`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.aggregation import FedAvg
    >>> from hf_federated.messages import ClientUpdate

    >>> accumulator = FedAvg().accumulator({"w": torch.zeros(1)})
    >>> accumulator.add(ClientUpdate(0, "a", {"w": torch.ones(1)}, num_examples=3, num_tokens=0, num_steps=1))
    >>> accumulator.add(ClientUpdate(0, "b", {"w": torch.zeros(1)}, num_examples=1, num_tokens=0, num_steps=1))
    >>> accumulator.mean.finalize()
    {'w': tensor([0.7500])}
    ```
    """

    def __init__(self, algorithm: Aggregation, state: State, extra: State) -> None:
        self._algorithm = algorithm
        self.means = {"state": WeightedMean(state), "extra": WeightedMean(extra)}
        self.first_client: str | None = None

    @property
    def mean(self) -> WeightedMean:
        """The mean of the updates' states."""
        return self.means["state"]

    @property
    def extra(self) -> WeightedMean:
        """The uniform mean of the updates' `extra`."""
        return self.means["extra"]

    @property
    def num_updates(self) -> int:
        """Number of updates added."""
        return self.mean.num_updates

    def add(self, update: ClientUpdate) -> None:
        """Add one client's update."""
        if self.first_client is None:
            self.first_client = update.client_id
        self._algorithm.accumulate(self, update)
