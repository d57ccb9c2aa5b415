"""What an attacker receives in a round, and what the audit knows in addition to score the attacker.

The attacker is an honest-but-curious server. It knows the model, the tokenizer, the state that it sent and the payload
that it received. The audit runs in a simulation, so it also has the client's examples, to which it compares the
attacker's findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from ...messages import ClientUpdate
from ...methods import Round
from ...server.callbacks import FederatedCallback


@dataclass(frozen=True)
class Payload:
    """
    The parameters that a client received and sent in one round, and the client's true examples.

    With secure aggregation, the server receives a sum in place of the update of the client. The payload then contains
    the weighted mean of the updates in the sum.

    Args:
        before (`dict[str, torch.Tensor]`):
            The state that the server sent.
        after (`dict[str, torch.Tensor]`):
            The state that the server received, after the server sides of all postprocessors. Empty if the client sent
            predictions and no parameters.
        token_ids (`list[list[int]]`):
            The token ids of the client's examples, without padding. The attacker does not know them.
        num_steps (`int`, *optional*, defaults to `1`):
            Number of optimizer steps of the client in the round. In a sum, the largest known number.
        other_token_ids (`list[list[int]]`, *optional*):
            The token ids of the examples of the other clients in the sum. Empty if the payload is one update.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.audits import Payload

    >>> payload = Payload({"w": torch.zeros(2)}, {"w": torch.ones(2)}, token_ids=[[3, 5]])
    >>> payload.change("w")
    tensor([1., 1.], dtype=torch.float64)
    ```
    """

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    token_ids: list[list[int]]
    num_steps: int = 1
    other_token_ids: list[list[int]] = field(default_factory=list)

    @property
    def num_examples(self) -> int:
        """Number of examples of all clients whose updates are in the payload."""
        return len(self.token_ids) + len(self.other_token_ids)

    def change(self, name: str) -> torch.Tensor:
        """Return how the client, or the mean of the clients, changed a parameter, as float64."""
        return self.after[name].double() - self.before[name].double()


@dataclass(frozen=True)
class ShadowLosses:
    """
    Losses of models that were trained on random halves of the same examples.

    Each model is what one client's payload teaches the server: the client's parameters, or the model that the server
    distilled from the client's predictions.

    Args:
        losses (`torch.Tensor`):
            Mean loss of each example under each model, of shape `(num_models, num_examples)`.
        members (`torch.Tensor`):
            Boolean tensor of the same shape, `True` if the client of the model trained on the example.
        canaries (`torch.Tensor`, *optional*):
            Losses of the canaries, of shape `(num_models, num_canaries)`.
        canary_members (`torch.Tensor`, *optional*):
            Boolean tensor of the same shape, `True` if the client of the model trained on the canary.
        references (`torch.Tensor`, *optional*):
            Losses of random texts in the format of the canaries that no client has, of shape
            `(num_models, num_references)`.
    """

    losses: torch.Tensor
    members: torch.Tensor
    canaries: torch.Tensor | None = None
    canary_members: torch.Tensor | None = None
    references: torch.Tensor | None = None


@dataclass(frozen=True)
class Evidence:
    """
    The data of one setting that an attacker has: what a client sent, the shadow models, and public texts.

    An attack without its data returns no result. For example, `token_set` needs `payload`, and `lira` needs `shadows`.

    Args:
        model (`torch.nn.Module`):
            The model that the server knows, with any weights. The attack writes the sent state into a copy.
        payload ([`Payload`], *optional*):
            A payload of the recipe's local training.
        small_payload ([`Payload`], *optional*):
            The same for a client with few examples, for gradient inversion.
        step_payload ([`Payload`], *optional*):
            A payload of one SGD step without dropout on the same few examples.
        shadows ([`ShadowLosses`], *optional*):
            Losses of the shadow models.
        public_token_ids (`list[list[int]]`, *optional*):
            Token ids of texts that the attacker has.
        end_token (`int`, *optional*):
            Token that ends each example, if the tokenizer adds one.
        max_length (`int`, *optional*, defaults to `64`):
            Maximum number of tokens of an example.
    """

    model: Any
    payload: Payload | None = None
    small_payload: Payload | None = None
    step_payload: Payload | None = None
    shadows: ShadowLosses | None = None
    public_token_ids: list[list[int]] = field(default_factory=list)
    end_token: int | None = None
    max_length: int = 64


@dataclass(frozen=True)
class AttackResult:
    """
    Result of one attack.

    Args:
        attack (`str`):
            Name of the attack.
        metrics (`dict[str, float]`):
            Scores by name. A score that cannot be computed is missing.
        intervals (`dict[str, list[float]]`, *optional*):
            95 % confidence intervals of scores.
        note (`str`, *optional*):
            Why the attack could not be run, or what limits it.

    Example:

    ```python
    >>> from hf_federated.audits import AttackResult

    >>> AttackResult("token_set", {"precision": 1.0, "recall": 1.0}).metrics["recall"]
    1.0
    ```
    """

    attack: str
    metrics: dict[str, float]
    intervals: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""


class PayloadRecorder(FederatedCallback):
    """
    Callback that keeps the last payload of one client, as the server receives it.

    Args:
        client_id (`str`):
            The client.
        token_ids (`list[list[int]]`):
            The token ids of the client's examples.

    Example:

    ```python
    >>> from hf_federated.audits import PayloadRecorder

    >>> recorder = PayloadRecorder("north", token_ids=[[3, 5]])
    >>> recorder.payload is None
    True
    ```
    """

    def __init__(self, client_id: str, token_ids: Sequence[Sequence[int]]) -> None:
        self.client_id = client_id
        self.payload: Payload | None = None
        self._token_ids = [list(ids) for ids in token_ids]

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        *,
        round: Round,
        **kwargs: Any,
    ) -> None:
        if update.client_id == self.client_id:
            before, after = _copy(round.state), _copy(update.state)
            self.payload = Payload(before, after, self._token_ids, update.num_steps)


class SumRecorder(FederatedCallback):
    """
    Callback that keeps the last sum of the updates of a round, as the server receives it with secure aggregation.

    The payload contains the weighted mean of the states of all clients, before a server optimizer changes it.

    Args:
        token_ids (`list[list[int]]`):
            The token ids of the examples of one client.
        other_token_ids (`list[list[int]]`):
            The token ids of the examples of all other clients.

    Raises:
        ValueError: During the training, if the method does not sum the parameters of the clients.

    Example:

    ```python
    >>> from hf_federated.audits import SumRecorder

    >>> recorder = SumRecorder(token_ids=[[3, 5]], other_token_ids=[[7, 5]])
    >>> recorder.payload is None
    True
    ```
    """

    def __init__(self, token_ids: Sequence[Sequence[int]], other_token_ids: Sequence[Sequence[int]]) -> None:
        self.payload: Payload | None = None
        self._token_ids = [list(ids) for ids in token_ids]
        self._other_token_ids = [list(ids) for ids in other_token_ids]

    def on_aggregate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, round: Round, **kwargs: Any
    ) -> None:
        sums = round.collected
        if not sums.is_linear or not sums.mean.num_updates:
            raise ValueError(
                "The method does not sum the parameters of the clients, so the server cannot receive a sum in place "
                "of the updates. Use an averaging method such as fedavg, or audit single updates."
            )
        # With secure aggregation, the server knows no number of one client.
        num_steps = max((int(metrics["num_steps"]) for metrics in round.metrics.values()), default=1)
        before, after = _copy(round.state), sums.mean.finalize()
        self.payload = Payload(before, _copy(after), self._token_ids, num_steps, self._other_token_ids)


def _copy(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}
