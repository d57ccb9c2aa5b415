"""`LoraAggregation`: base class of the methods for LoRA factors, and the client half that trains one factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ..messages import ClientUpdate, Fit
from ..methods import ClientPart, Round
from ..utils.weighted_mean import State, Tensors
from .base import Aggregation
from .lora_factors import FactorPair, find_pairs


class LoraAggregation(Aggregation):
    """
    Base class of the methods for LoRA factors. They need LoRA modules of which both factors are exchanged.

    A module computes `W x + s B A x` with the scale `s` (`lora_alpha / r`, or `lora_alpha / √r` with rsLoRA).

    Relations:
        - [`FedIT`], [`FFALoRA`], [`RoLoRA`] and [`FedSVD`] are the methods.
    """

    needs_lora: ClassVar[bool] = True

    def check_exchange(self, state: State, num_sampled: int) -> None:
        if not find_pairs(state):
            raise ValueError(
                f"aggregation={self.name!r} needs LoRA modules of which both factors are exchanged, but there are "
                "none. Train both factors and select them with `exchange`, or use aggregation='fedavg'."
            )


class OneFactorPart(ClientPart):
    """Client half of [`OneFactorAggregation`]: train and send one factor of each LoRA module."""

    _frozen: Sequence[str] = ()

    def receive(self, message: Fit) -> None:
        trained = self.context.model.exchange.trainable
        self._frozen = self.method.frozen_factors(message.round, find_pairs(trained))
        self.frozen = [trained[name] for name in self._frozen]

    def send(self, update: ClientUpdate) -> ClientUpdate:
        state = {name: value for name, value in update.state.items() if name not in self._frozen}
        return dataclasses.replace(update, state=state)


class OneFactorAggregation(LoraAggregation):
    """
    Base class of the methods in which clients train and send one factor of each LoRA module in a round.

    The other factor is the same for all clients, so the mean of the sent factors is exact: `Σ_i w_i B_i A = B̄ A`. All
    other exchanged tensors are averaged as in [`FedAvg`].
    """

    client_part: ClassVar[type[ClientPart]] = OneFactorPart
    averages_both_factors: ClassVar[bool] = False
    # Number of the current round, from 0.
    _round = 0

    def frozen_factors(self, round: int, pairs: Sequence[FactorPair]) -> list[str]:
        """
        Return the names of the factors that clients do not train in a round.

        Args:
            round (`int`): Round number, from 0.
            pairs (`Sequence[FactorPair]`): The LoRA modules.
        """
        raise NotImplementedError

    def begin(self, round: Round) -> None:
        self._round = round.number

    def expected_for(self, client_id: str, state: State) -> State:
        frozen = self.frozen_factors(self._round, find_pairs(state))
        return {name: value for name, value in state.items() if name not in frozen}

    def whole_update(self, update: ClientUpdate, state: Tensors) -> ClientUpdate:
        frozen = {name: value for name, value in state.items() if name not in update.state}
        return dataclasses.replace(update, state={**frozen, **update.state})
