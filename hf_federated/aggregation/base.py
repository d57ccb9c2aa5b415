"""Base classes of the averaging algorithms.

An algorithm has a server side, the methods of [`Aggregation`], and an optional client side, a [`LocalHook`] that runs
inside local training. The two sides share only messages. The client side reads its input from the received `Fit`
(`settings`, `extra`) and from the state that this client kept in earlier rounds.

A round on the server has these steps:

```
fit_settings(), fit_extra()      -> fields of the Fit message
accumulator(state)               -> empty means
accumulator.add(update)          for each reply, in any order; no reply is stored
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
from ..methods import Accumulator
from ..postprocessing import Postprocessor
from ..utils.arguments import require_one_of
from ..utils.weighted_mean import State


WEIGHTINGS = ("examples", "tokens", "uniform")
# Exponent of the number of steps in `amount_of_training`.
STEP_EXPONENT = 0.75


class LocalHook:
    """
    Client side of an algorithm, called during local training.

    [`Aggregation.local_hook`] creates one hook for each `Fit`. The hook is discarded after the local training of the
    client.

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

    # Whether the subclass overrides `inputs` or `loss`.
    changes_loss: ClassVar[bool] = False

    def start(self, trainer: Any, exchange: Any, model: Any) -> None:
        """
        Called before local training if the algorithm [trains private models][`Aggregation`].

        Args:
            trainer (`transformers.Trainer`): Trainer of the private model of the client. The model is in its state
                before the first round.
            exchange ([`~hf_federated.adapters.Exchange`]): Reads and writes the parameters of the private model.
            model (`PreTrainedModel`): The shared model.
        """

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of the shared model for a batch of a training step."""
        return dict(inputs)

    def loss(self, loss: torch.Tensor, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """
        Compute the loss of a training step.

        Args:
            loss (`torch.Tensor`): Loss of the trainer, as the mean over this batch.
            outputs (`Any`): Outputs of the shared model, by name.
            inputs (`Mapping[str, Any]`): Inputs of the model, from [`~LocalHook.inputs`].

        Returns:
            `torch.Tensor`: Loss on the same scale as `loss`. With gradient accumulation, it gets the same weight as
            the loss of the trainer.
        """
        return loss

    def on_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """
        Called before each optimizer step and before gradient clipping.

        The gradients of the whole accumulated batch are in `.grad`. With `fp16=True`, they are divided by the loss
        scale, and the method is not called for a step whose gradients overflow, because the optimizer skips this step.

        Args:
            parameters (`Mapping[str, torch.nn.Parameter]`): The exchanged parameters, by name.
        """

    def on_step(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """
        Called before each optimizer step, after [`~LocalHook.on_gradients`] and under the same conditions.

        Args:
            param_groups (`Sequence[Mapping[str, Any]]`): Parameter groups of the optimizer. `"lr"` is the learning
                rate of this step.
        """

    def finish(self) -> tuple[State, dict[str, Any] | None]:
        """
        Called after local training.

        Returns:
            `tuple`: Tensors to send as `extra` of the update, by parameter name, and the state that this client keeps
            for its next round. The state is `None` if the client keeps nothing.
        """
        return {}, None


class Aggregation:
    """
    Base class of the averaging algorithms. It averages the parameters of the clients.

    A subclass stores each constructor argument in an attribute of the same name and overrides the methods of the side
    that it changes.

    Args:
        weighting (`str`, *optional*, defaults to `"examples"`):
            Weight of an update in the mean: `"examples"` (number of training examples of the client), `"tokens"`
            (number of input tokens seen in the round, without padding) or `"uniform"`.

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

    # Name in messages. Defaults to the name of the class.
    name: ClassVar[str] = ""
    # Constructor arguments that are another name of an argument, by alias. `settings` does not contain them.
    aliases: ClassVar[Mapping[str, str]] = {}
    # Whether server and clients exchange parameters. If not, each client keeps its own model.
    exchanges_parameters: ClassVar[bool] = True
    # Content of an update: the trained parameters (`"parameters"`), or their changes by the training (`"changes"`).
    update_content: ClassVar[str] = "parameters"
    # Whether each client also trains a private model, which its hook receives in `start`.
    trains_private_models: ClassVar[bool] = False
    # Whether the server also trains in each round, on `server_dataset` of the trainer.
    trains_on_server: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self, weighting: str = "examples") -> None:
        require_one_of("weighting", weighting, WEIGHTINGS)
        self.weighting = weighting

    # ---- Settings

    def settings(self) -> dict[str, Any]:
        """Return all constructor arguments with their values, without aliases."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names if name not in self.aliases}

    def non_default_settings(self) -> dict[str, Any]:
        """Return the constructor arguments whose values differ from the defaults."""
        parameters = inspect.signature(type(self)).parameters
        return {name: value for name, value in self.settings().items() if value != parameters[name].default}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.non_default_settings().items())
        return f"{type(self).__name__}({arguments})"

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        """Values that a client sends in addition to parameters and the fields of an update."""
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

    def on_server_update(self, update: ClientUpdate) -> None:
        """
        Receive the result of the server's own training of this round, before the clients train.

        It is called if the class sets `trains_on_server`.

        Args:
            update ([`ClientUpdate`]): The update that a client with the examples of the server would send.
        """

    def postprocessors(self) -> list[Postprocessor]:
        """
        Return the postprocessors that belong to the algorithm.

        They process an update between local training and aggregation. On the client they run after all other
        postprocessors.
        """
        return []

    def fit_settings(self) -> dict[str, Any]:
        """Return the `settings` of the `Fit` messages of this round, as JSON scalars."""
        return {}

    def fit_extra(self, state: State) -> State:
        """
        Return the tensors for `extra` of the `Fit` messages of this round.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return {}

    def expected_extra(self, state: State) -> State:
        """
        Return tensors with the names, shapes and dtypes that `extra` of an update must have.

        The server rejects an update with a different `extra`. The values of the returned tensors are not used.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return {}

    def check_extra(self, extra: Mapping[str, torch.Tensor]) -> None:
        """
        Check the values of the additional tensors of an update.

        The names, shapes and dtypes have already been compared with [`~Aggregation.expected_extra`], and all values
        are finite.

        Args:
            extra (`Mapping[str, torch.Tensor]`): Additional tensors of the client.

        Raises:
            ValueError: If the algorithm cannot use the values. The server then rejects the update.
        """

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
        """Return the weight of an update in the mean."""
        if self.weighting == "uniform":
            return 1.0
        weight = update.num_tokens if self.weighting == "tokens" else update.num_examples
        if weight <= 0:
            raise ValueError(
                f"Client {update.client_id!r} reports {weight} {self.weighting}, so its update has no weight. Set "
                f"weighting='uniform' if clients do not count {self.weighting}."
            )
        return float(weight)

    def amount_of_training(self, update: ClientUpdate) -> float:
        """
        Return the divisor that makes the changes of clients comparable, for the bound `max_update_ratio`.

        An algorithm that divides changes returns its own divisor. The default is the number of steps `s` to the power
        of 0.75: a change grows like `√s` (a random walk) up to `s` (a constant direction).

        Args:
            update ([`ClientUpdate`]): Update of a client that passed all checks.
        """
        return float(update.num_steps**STEP_EXPONENT)

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        """
        Create an empty accumulator for one round.

        An override may add means with their references to `means` of [`Accumulator`].

        Args:
            state (`dict[str, torch.Tensor]`): Tensors with the names, shapes and dtypes of the state of an update.
            extra (`dict[str, torch.Tensor]`, *optional*): Tensors with the names, shapes and dtypes of `extra` of an
                update. Defaults to [`~Aggregation.expected_extra`].
        """
        return Accumulator(self, state, self.expected_extra(state) if extra is None else extra)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the server keeps between rounds, as scalars and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    # ---- Client side

    needs_gradients: ClassVar[bool] = False

    def local_hook(self, message: Fit, kept: dict[str, Any] | None) -> LocalHook | None:
        """
        Create the client side for one local training.

        The method runs on the client, on a different instance of this class than the instance of the server. It may
        use only the constructor arguments, `message` and `kept`.

        Args:
            message ([`Fit`]): Message from the server.
            kept (`dict`, *optional*): State that the previous hook of this client returned from
                [`~LocalHook.finish`].

        Returns:
            [`LocalHook`], *optional*: The hook, or `None` if the algorithm has no client side.
        """
        return None
