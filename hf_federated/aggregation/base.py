"""Base class of the averaging algorithms.

An algorithm is a [`Method`] that averages. Its server half has these steps in a round:

```
fit_settings(), fit_extra()      -> fields of the Fit message
accumulator(state)               -> empty means
accumulate(accumulator, update)  for each reply, in any order; no reply is stored
aggregate(accumulator, state)    -> the new global state
```
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from torch import nn

from ..messages import ClientUpdate
from ..messages.validation import first_non_finite
from ..methods import Accumulator, Method, Round
from ..postprocessing import Postprocessor
from ..utils.arguments import require_one_of
from ..utils.errors import RoundFailedError
from ..utils.selection import Selection
from ..utils.weighted_mean import State, Tensors
from .validation import check_aggregate


WEIGHTINGS = ("examples", "tokens", "uniform")
# Exponent of the number of steps in `amount_of_training`.
STEP_EXPONENT = 0.75


def _bounded(weight: Callable[[Any, ClientUpdate], float]) -> Callable[[Any, ClientUpdate], float]:
    """Limit the return value of a method `weight` to `max_weight`."""

    @functools.wraps(weight)
    def bounded(self: Aggregation, update: ClientUpdate) -> float:
        return min(weight(self, update), self.max_weight)

    return bounded


class Aggregation(Method):
    """
    Base class of the averaging algorithms. It averages the parameters of the clients.

    A subclass stores each constructor argument in an attribute of the same name and overrides the methods of the side
    that it changes.

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update in the mean: `"examples"` (number of training examples of the client), `"tokens"`
            (number of input tokens seen in the round, without padding) or `"uniform"`.

    Attributes:
        max_weight (`float`): Largest weight of an update, by default infinite. [`~Aggregation.weight`] returns at most
            this value, also if a subclass overrides it. A sum of several updates hides their weights, so the server
            cannot limit them, and each client sets this attribute.

    Raises:
        ValueError: If `weighting` is unknown.

    Requirements:
        None.

    Relations:
        - [`FedAvg`] is this class without changes.
        - [`FedOpt`], [`FedNova`] and [`Scaffold`] change the server side. [`FedProx`] changes the client side.
        - [`RobustAggregation`] is the base class of the algorithms that limit the influence of hostile clients.

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

    supports_late_updates: ClassVar[bool] = True
    # Whether server and clients exchange parameters. If not, each client keeps its own model.
    exchanges_parameters: ClassVar[bool] = True
    # Content of an update: the trained parameters (`"parameters"`), or their changes by the training (`"changes"`).
    update_content: ClassVar[str] = "parameters"
    # Whether each client also trains a private model, which its client half opens.
    trains_private_models: ClassVar[bool] = False

    # Whether the method needs a PEFT model with LoRA.
    needs_lora: ClassVar[bool] = False
    # Whether clients may have LoRA configurations with other ranks than the server.
    supports_ranks: ClassVar[bool] = False
    # Whether the server averages both LoRA factors, so that the log has the inexactness of the mean.
    averages_both_factors: ClassVar[bool] = True
    # Whether the server writes LoRA factors in another basis. The state of a client optimizer does not fit to it.
    changes_basis: ClassVar[bool] = False

    # Name of the mean to which `accumulate` adds updates with the weight that `weight` returns.
    weighted_mean: ClassVar[str] = "state"

    # Tensors that clients train and keep, as `keep_local` of `FederatedConfig`. The federation then uses this value.
    keep_local: Selection | None = None
    # Whether the server changes the base weights of LoRA modules, which the global state then contains.
    changes_base: bool = False
    max_weight: float = math.inf

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The class that defines `weight` may be a mixin.
        source = next(each for each in cls.__mro__ if "weight" in vars(each))
        if source is cls or not issubclass(source, Aggregation):
            cls.weight = _bounded(vars(source)["weight"])  # type: ignore[method-assign, assignment]

    def __init__(self, weighting: str = "examples") -> None:
        require_one_of("weighting", weighting, WEIGHTINGS)
        self.weighting = weighting

    @property
    def counts_tokens(self) -> bool:
        return self.weighting == "tokens"

    @property
    def resized_names(self) -> Collection[str]:
        """Names of the tensors of the global state whose shape may change in a round."""
        return ()

    # ---- Server side

    def check_setup(self, args: Any, config: Any) -> None:
        """
        Check that the algorithm supports the training arguments and the federation.

        Args:
            args (`TrainingArguments`): Training arguments of the user.
            config ([`FederatedConfig`]): Configuration of the federation.

        Raises:
            ValueError: If a value is not supported. The message names a supported value.
        """

    def check_model(self, model: nn.Module, peft_configs: Mapping[str, Any]) -> None:
        """
        Read what the server half needs of the model, and check that the algorithm supports the model.

        It is called once, when the trainer is built.

        Args:
            model (`torch.nn.Module`): The server's model.
            peft_configs (`Mapping[str, peft.LoraConfig]`): LoRA configurations of clients, by client id.

        Raises:
            ValueError: If the model or a configuration is not supported. The message names an alternative.
        """

    def check_exchange(self, state: State, num_sampled: int) -> None:
        """
        Check that the algorithm supports the exchanged tensors and the size of the cohort.

        It is called once, when the trainer is built.

        Args:
            state (`dict[str, torch.Tensor]`): The exchanged tensors of the model, by name.
            num_sampled (`int`): Number of clients of a cohort.

        Raises:
            ValueError: If a tensor or the size of the cohort is not supported. The message names an alternative.
        """

    def setup(self, num_rounds: int, num_clients: int) -> None:
        """
        Reset the algorithm for a new run.

        It is called once, before the first round and before the state of a checkpoint is loaded.

        Args:
            num_rounds (`int`): Number of rounds of the run.
            num_clients (`int`): Number of clients of the federation, including clients that are not sampled.
        """

    def postprocessors(self) -> list[Postprocessor]:
        """
        Return the postprocessors that belong to the algorithm.

        They process an update between local training and aggregation. On the client they run after all other
        postprocessors.
        """
        return []

    def expected_extra(self, state: State) -> State:
        """
        Return tensors with the names, shapes and dtypes that `extra` of an update must have.

        The server rejects an update with a different `extra`. The values of the returned tensors are not used.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return {}

    def check_update(self, update: ClientUpdate) -> None:
        """
        Check that the algorithm can aggregate an update.

        The tensors of the update and the numbers that it claims have already been checked.

        Args:
            update ([`ClientUpdate`]): Update of a client.

        Raises:
            ValueError: If the algorithm cannot use the update. The server then rejects the update.
        """
        self.weight(update)

    def weight(self, update: ClientUpdate) -> float:
        """
        Return the weight of an update in the mean, at most `max_weight`.

        An override returns its own weight. The class limits it to `max_weight`.

        Args:
            update ([`ClientUpdate`]): Update of a client.
        """
        if self.weighting == "uniform":
            return min(1.0, self.max_weight)
        weight = update.num_tokens if self.weighting == "tokens" else update.num_examples
        if weight <= 0:
            raise ValueError(
                f"Client {update.client_id!r} reports {weight} {self.weighting}, so its update has no weight. Set "
                f"weighting='uniform' if clients do not count {self.weighting}."
            )
        return min(float(weight), self.max_weight)

    def amount_of_training(self, update: ClientUpdate) -> float:
        """
        Return the divisor that makes the changes of clients comparable, for the bound `max_update_ratio`.

        An algorithm that divides changes returns its own divisor. The default is the number of steps `s` to the power
        of 0.75: a change grows like `√s` (a random walk) up to `s` (a constant direction).

        Args:
            update ([`ClientUpdate`]): Update of a client that passed all checks.
        """
        return float(update.num_steps**STEP_EXPONENT)

    # ---- The conversation of a round

    def update_extra(self, state: State) -> State:
        return self.expected_extra(state)

    def check(self, round: Round, update: ClientUpdate) -> None:
        self.check_update(update)

    def accept(self, round: Round, update: ClientUpdate) -> None:
        round.collected.add(update)

    def finish(self, round: Round) -> State:
        aggregated = self.aggregate(round.collected, round.state)
        check_aggregate(self, aggregated, round.state, self.resized_names)
        if (name := first_non_finite(aggregated)) is not None:
            raise RoundFailedError(
                f"Round {round.number + 1}: {self!r} computed NaN or infinite values for {name!r} from finite "
                "updates. Lower the learning rate of the server."
            )
        return aggregated

    def whole_update(self, update: ClientUpdate, state: Tensors) -> ClientUpdate:
        """
        Return an update with the names and shapes of the global state, if clients send a part of it.

        The server calls it for each update that passed all checks, before it counts or adds the update.

        Args:
            update ([`ClientUpdate`]): The update, with the names and shapes of [`~Method.expected_for`].
            state (`Mapping[str, torch.Tensor]`): The global state.
        """
        return update

    # ---- Sums

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        """
        Add an update to the means of an accumulator. Do not store the update.

        Args:
            accumulator ([`Accumulator`]): Accumulator from [`~Aggregation.accumulator`].
            update ([`ClientUpdate`]): An update that passed all checks.
        """
        accumulator.means["state"].add(update.state, self.weight(update))
        if update.extra:
            accumulator.means["extra"].add(update.extra, 1.0)

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        """
        Compute the new global state.

        Args:
            accumulator ([`Accumulator`]): Means of the updates of this round.
            state (`dict[str, torch.Tensor]`): The global state that the clients received.

        Returns:
            `dict[str, torch.Tensor]`: The new global state, with the names, shapes and dtypes of `state`.
        """
        return accumulator.mean.finalize()
