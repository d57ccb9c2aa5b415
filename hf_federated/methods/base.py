"""`Method`: base class of federated methods, and their server half.

The round loop calls the server half in this order:

```
begin(round)               may ask the clients (round.ask)
fit_settings(), fit_extra(state), state_for(client_id, state)
                           -> fields of the Fit messages; the clients train
check(round, update)       for each reply: raises ValueError if the method cannot use the update
accept(round, update)      for each reply, in any order: add the update to round.sums
finish(round)              -> the new global state, from round.sums; may ask the clients
after(round)               distillation
```

The two halves share only messages. [`ClientPart`] is the client half.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..messages import ClientUpdate, Disclosure, Message
from ..utils.constructor_settings import ConstructorSettings
from ..utils.weighted_mean import State, Tensors
from .accumulator import Accumulator
from .client_part import ClientContext, ClientPart
from .previous_release import adapt_method
from .round import Round


class Method(ConstructorSettings):
    """
    Base class of federated methods. [`Aggregation`] and [`Distillation`] are the two families.

    Subclass a family if clients send parameters or predictions. Subclass this class for any other exchange, such as
    one round in which clients only count their examples.

    The base class ignores the updates of the clients: they train, and the global state does not change.

    Example:

    ```python
    >>> from hf_federated import Method

    >>> class CountClients(Method):
    ...     def after(self, round):
    ...         round.logs["num_left"] = float(len(round.clients))
    ```
    """

    # Name in recipes and messages. Defaults to the name of the class.
    name: ClassVar[str] = ""
    # Message classes of this method: the requests that its client half answers, and the replies.
    messages: ClassVar[tuple[type[Message], ...]] = ()
    # Class of the client half.
    client_part: ClassVar[type[ClientPart]] = ClientPart
    # Whether the client half reads gradients. The trainer then refuses optimizers that do not keep them.
    needs_gradients: ClassVar[bool] = False
    # Whether the method can use an update that a client started from the global state of an earlier round.
    supports_late_updates: ClassVar[bool] = False
    # Engines on which the method does not run: the reason and an alternative, by class name.
    refused_engines: ClassVar[Mapping[str, str]] = {}
    # Whether the server also trains in each round, on `server_dataset` of the trainer.
    trains_on_server: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        adapt_method(cls)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        """Values that a client sends in addition to parameters, predictions and the fields of an update."""
        return ()

    @property
    def counts_tokens(self) -> bool:
        """Whether the method needs the number of input tokens in an update."""
        return False

    def check_engine(self, engine: str) -> None:
        """
        Check that the method runs on an engine. The constructor of the trainer calls this method.

        Args:
            engine (`str`): Class name of the engine.

        Raises:
            ValueError: If the engine is in `refused_engines`.
        """
        if reason := self.refused_engines.get(engine):
            raise ValueError(f"{self!r} does not run on {engine}: {reason}")

    # ---- Server half

    def on_server_update(self, update: ClientUpdate) -> None:
        """
        Called before `begin` if `trains_on_server` is set, with the result of the server's training.

        Args:
            update ([`ClientUpdate`]): The update that a client with the server's examples would send.
        """

    def begin(self, round: Round) -> None:
        """
        Called at the start of a round, before the clients train.

        Args:
            round ([`Round`]): The round. `round.ask` sends messages; `round.exclude` leaves a client out.
        """

    def fit_settings(self) -> dict[str, Any]:
        """Return the `settings` of the `Fit` messages of this round, as JSON scalars."""
        return {}

    def setting_ranges(self) -> dict[str, tuple[float, float]]:
        """
        Return the smallest and the largest value of settings of the `Fit` messages, by name.

        A client refuses other values. The values of other settings must have the type that `fit_settings` gives them.
        """
        return {}

    def fit_extra(self, state: State) -> State:
        """
        Return the tensors for `extra` of the `Fit` messages of this round.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return {}

    def state_for(self, client_id: str, state: State) -> State:
        """
        Return the state for the `Fit` message of a client. Defaults to the global state.

        Names and shapes may differ from those of the global state. The client half then writes the tensors into the
        client's model. Messages of other kinds contain the global state.

        Args:
            client_id (`str`): Id of the client.
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return state

    def expected_for(self, client_id: str, state: State) -> State:
        """
        Return the tensors that the server expects in an update of a client. Defaults to [`~Method.state_for`].

        The values are those from which the client starts. The server rejects an update with other names, shapes or
        dtypes. It uses the values to measure the change of the client, and to restore a state from a change that a
        postprocessor sends. The sums of the updates ([`~Method.accumulator`]) have the names and shapes of the global
        state.

        Args:
            client_id (`str`): Id of the client.
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return self.state_for(client_id, state)

    def update_extra(self, state: State) -> State:
        """
        Return tensors with the names, shapes and dtypes that the server expects in `extra` of an update.

        Args:
            state (`dict[str, torch.Tensor]`): The global state.
        """
        return {}

    def check_extra(self, extra: Tensors) -> None:
        """
        Check the values of the additional tensors of an update.

        The names, shapes and dtypes are those of [`~Method.update_extra`], and all values are finite.

        Args:
            extra (`Mapping[str, torch.Tensor]`): Additional tensors of the client.

        Raises:
            ValueError: If the method cannot use the values. The server then rejects the whole update.
        """

    def check(self, round: Round, update: ClientUpdate) -> None:
        """
        Check that the method can use an update.

        The server has already checked the tensors, and the numbers of examples, tokens and steps.

        Args:
            round ([`Round`]): The round. `round.state` is the state that the client received.
            update ([`ClientUpdate`]): Update of a client.

        Raises:
            ValueError: If the method cannot use the update. The server then rejects the update.
        """

    def accumulator(self, state: State, extra: State | None = None) -> Accumulator:
        """
        Create an empty accumulator for one round.

        An override may add entries to `means` of the [`Accumulator`].

        Args:
            state (`dict[str, torch.Tensor]`): The global state that the clients received. Empty if updates contain no
                state.
            extra (`dict[str, torch.Tensor]`, *optional*): Tensors with the names, shapes and dtypes of `extra` of an
                update. Defaults to [`~Method.update_extra`].
        """
        return Accumulator(self, state, self.update_extra(state) if extra is None else extra)

    def accumulate(self, accumulator: Accumulator, update: ClientUpdate) -> None:
        """
        Add an update to the means of an accumulator. Do not store the update.

        Args:
            accumulator ([`Accumulator`]): Accumulator from [`~Method.accumulator`].
            update ([`ClientUpdate`]): An update that passed all checks.
        """

    def accept(self, round: Round, update: ClientUpdate) -> None:
        """
        Called for each update that passed all checks. Do not store the update.

        In a launch of several processes, each process calls it for the updates of its clients.

        Args:
            round ([`Round`]): The round. Add the update to `round.sums`.
            update ([`ClientUpdate`]): The update.
        """

    def finish(self, round: Round) -> State:
        """
        Return the new global state, from the sums of the updates.

        Args:
            round ([`Round`]): The round. `round.sums` contains the accepted updates of all processes.

        Returns:
            `dict[str, torch.Tensor]`: A state with the names, shapes and dtypes of `round.state`.
        """
        return round.state

    def after(self, round: Round) -> None:
        """
        Called when the model has the new global state. A method that trains the model sets `round.state`.

        Args:
            round ([`Round`]): The round.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the server half keeps between rounds, as scalars and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    # ---- Client half

    def on_client(self) -> Method:
        """Return the instance for the clients: it has the same constructor arguments, and no state of the server."""
        return type(self)(**self.settings())

    def client(self, context: ClientContext) -> ClientPart:
        """
        Create the client half for one message. The client calls it on the instance from [`~Method.on_client`].

        Args:
            context ([`ClientContext`]): The client, and the memory of the client half.
        """
        return self.client_part(context, self)
