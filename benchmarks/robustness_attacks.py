"""Attacks of cooperating hostile clients on the parameters of a federation, and the engine that carries them out.

The hostile clients know the updates of all honest clients, the strongest assumption of the papers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from hf_federated.engines import LocalEngine, Plan
from hf_federated.engines.requests import OpenRequest
from hf_federated.messages import ClientUpdate, Message


@dataclass
class Knowledge:
    """
    What the hostile clients know in a round. A change is one vector of all exchanged parameters.

    Args:
        honest (`torch.Tensor` of shape `(num_honest, num_parameters)`): Changes of the honest clients.
        num_hostile (`int`): Number of hostile clients.
        last_global_change (`torch.Tensor` of shape `(num_parameters,)`): Change of the global state by the last round.
    """

    honest: torch.Tensor
    num_hostile: int
    last_global_change: torch.Tensor


# Returns the change that a hostile client sends: `(its own honest change, knowledge) -> change`.
Craft = Callable[[torch.Tensor, Knowledge], torch.Tensor]


@dataclass(frozen=True)
class Attack:
    """
    An attack.

    Args:
        craft (`Callable`, *optional*): Makes the change that a hostile client sends. By default the client trains and
            sends the result.
        trains (`bool`): Whether the hostile clients train. If not, `craft` receives a change of 0.
        data (`str`, *optional*): How the training examples of the hostile clients are changed: `"flip"` or
            `"trigger"`.
    """

    craft: Craft | None = None
    trains: bool = False
    data: str | None = None


def flip_sign(own: torch.Tensor, knowledge: Knowledge) -> torch.Tensor:
    """The opposite of the client's own change."""
    return -own


def flip_and_scale(own: torch.Tensor, knowledge: Knowledge) -> torch.Tensor:
    """Ten times the opposite of the client's own change."""
    return -10 * own


def a_little_is_enough(own: torch.Tensor, knowledge: Knowledge) -> torch.Tensor:
    """
    `μ − z σ` for each parameter: [A Little Is Enough](https://arxiv.org/abs/1902.06156) (Baruch et al., 2019).

    `z` is the largest value for which enough honest clients are farther from the mean to form a majority with the
    hostile ones, for normally distributed changes (algorithm 3).
    """
    num_honest = len(knowledge.honest)
    num_clients = num_honest + knowledge.num_hostile
    num_supporters = num_clients // 2 + 1 - knowledge.num_hostile
    z = NormalDist().inv_cdf(min(max((num_honest - num_supporters) / num_honest, 0.5), 1 - 1e-6))
    return knowledge.honest.mean(0) - z * knowledge.honest.std(0)


def manipulate_inner_product(own: torch.Tensor, knowledge: Knowledge) -> torch.Tensor:
    """
    `−ε μ` with ε = 0.5: [Fall of Empires](https://arxiv.org/abs/1903.03936) (Xie et al., 2019).

    A small ε has a negative inner product with the mean and is still close to the honest changes.
    """
    return -0.5 * knowledge.honest.mean(0)


def min_max(own: torch.Tensor, knowledge: Knowledge) -> torch.Tensor:
    """
    `μ − γ σ / ‖σ‖` with the largest γ for which no honest change is farther away than the two most distant honest
    changes: [Manipulating the Byzantine](https://www.ndss-symposium.org/ndss-paper/manipulating-the-byzantine-optimizing-model-poisoning-attacks-and-defenses-for-federated-learning/)
    (Shejwalkar and Houmansadr, 2021), equation 5 with the inverse standard deviation.
    """
    honest = knowledge.honest
    mean, direction = honest.mean(0), -honest.std(0)
    direction = direction / direction.norm()
    # ‖μ + γ p − g_i‖² = ‖μ − g_i‖² + 2 γ p·(μ − g_i) + γ²
    offsets = mean - honest
    squares, products = offsets.square().sum(1), offsets @ direction
    limit = float(torch.cdist(honest, honest).max()) ** 2
    gammas = -products + (products.square() - squares + limit).clamp(min=0).sqrt()
    return mean + float(gammas.min()) * direction


def free_ride(own: torch.Tensor, knowledge: Knowledge) -> torch.Tensor:
    """
    The last change of the global state, without training: [Free-riders in Federated Learning](https://arxiv.org/abs/1911.12560)
    (Lin et al., 2019), "delta weights".
    """
    return knowledge.last_global_change


ATTACKS: dict[str, Attack] = {
    "sign flip": Attack(flip_sign, trains=True),
    "scaled flip": Attack(flip_and_scale, trains=True),
    "ALIE": Attack(a_little_is_enough),
    "inner product": Attack(manipulate_inner_product),
    "min-max": Attack(min_max),
    "label flip": Attack(trains=True, data="flip"),
    "backdoor": Attack(trains=True, data="trigger"),
    "free rider": Attack(free_ride),
}
# Attacks against the size of an update.
SIZE_ATTACKS: dict[str, Attack] = {
    "1e30": Attack(lambda own, knowledge: torch.full_like(own, 1e30)),
    "NaN": Attack(lambda own, knowledge: torch.full_like(own, math.nan)),
    "x100": Attack(lambda own, knowledge: 100 * own, trains=True),
    "x-100": Attack(lambda own, knowledge: -100 * own, trains=True),
}


class AttackedEngine(LocalEngine):
    """
    Runs all clients in this process. The hostile clients cooperate.

    Args:
        attack ([`Attack`], *optional*): The attack. By default all clients are honest.
        hostile (`Sequence[str]`, *optional*): Ids of the hostile clients.
        num_examples (`Mapping[str, int]`, *optional*): Number of examples that each client reports.
    """

    def __init__(
        self, attack: Attack | None = None, hostile: Sequence[str] = (), num_examples: Mapping[str, int] | None = None
    ) -> None:
        super().__init__()
        self._attack = attack
        self._hostile = tuple(hostile)
        self._num_examples = num_examples or {}
        self._last_state: torch.Tensor | None = None
        self._phase = ""
        # The messages of the round, and the replies that the server has not read.
        self._messages: dict[str, Any] = {}
        self._replies: list[tuple[str, Message]] = []

    def run(self, plan: Plan, on_dispatch: Callable[[str], None] | None = None) -> Generator[Message, None, None]:
        self._phase, self._messages, self._replies = plan.phase, {}, []
        return super().run(plan, on_dispatch)

    def _dispatch(self, client_id: str, request: OpenRequest) -> Message:
        self._messages[client_id] = message = super()._dispatch(client_id, request)
        return message

    def _receive(self, clients: Set[str] | None, until: float | None) -> tuple[str, Message] | None:
        attack = self._attack
        if self._phase != "training" or attack is None or attack.craft is None:
            return super()._receive(clients, until)
        if not self._replies:
            self._replies = list(self._attacked(list(self._waiting(clients)), attack))
        return self._replies.pop(0)

    def _attacked(self, cohort: Sequence[str], attack: Attack) -> Iterator[tuple[str, Message]]:
        """Train the clients of a cohort, and replace the replies of the hostile clients."""
        trained = [client_id for client_id in cohort if attack.trains or client_id not in self._hostile]
        receive = super()._receive
        replies: dict[str, Any] = dict(receive({client_id}, None) for client_id in trained)
        hostile = [client_id for client_id in cohort if client_id in self._hostile]
        honest = [client_id for client_id in cohort if client_id not in self._hostile]
        requests = self._messages
        state = flatten(requests[honest[0]].state)
        changes = {client_id: flatten(reply.state) - state for client_id, reply in replies.items()}
        last_change = torch.zeros_like(state) if self._last_state is None else state - self._last_state
        self._last_state = state
        knowledge = Knowledge(torch.stack([changes[client_id] for client_id in honest]), len(hostile), last_change)
        nothing = torch.zeros_like(state)
        for client_id in cohort:
            if client_id in honest:
                yield client_id, replies[client_id]
                continue
            request = requests.get(client_id) or self._dispatch(client_id, self._requests[client_id])
            crafted = state + attack.craft(changes.get(client_id, nothing), knowledge)
            reply = replies.get(client_id) or self._untrained(request, replies[honest[0]])
            yield client_id, dataclasses.replace(reply, state=unflatten(crafted, request.state))

    def _untrained(self, request: Any, like: ClientUpdate) -> ClientUpdate:
        """Return the reply of a client that has not trained and reports what a trained client would report."""
        return dataclasses.replace(
            like, client_id=request.client_id, nonce=request.nonce, num_examples=self._num_examples[request.client_id]
        )


def flatten(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return all tensors as one vector."""
    return torch.cat([value.detach().reshape(-1) for value in state.values()])


def unflatten(vector: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a vector with names and shapes as in `like`."""
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view(value.shape).clone() for part, (name, value) in zip(parts, like.items(), strict=True)}
