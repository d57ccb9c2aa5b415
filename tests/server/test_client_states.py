"""A method can give each client its own state: here the first rows of a matrix, whose overlaps are averaged."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from datasets import Dataset
from federations import build_federation
from torch import nn
from torch.nn.functional import pad

from hf_federated import Aggregation, ClientPart, FedAvg, FederatedCallback, Method, Postprocessor, Round
from hf_federated.adapters import Exchange
from hf_federated.aggregation import WeightedMean
from hf_federated.clients import Agreement, RefusedRequestError
from hf_federated.engines import LocalEngine
from hf_federated.messages import Fit
from hf_federated.server import FitSettings
from hf_federated.server.fit_requests import FitRequests


NUM_ROWS, NUM_COLUMNS = 4, 3
# The number of rows of each client, and a client that sends a row too many.
ROWS = {"north": 1, "south": 2, "west": 4}
TOO_MANY = "east"


class RowsModel(nn.Module):
    """The sum of the rows of a matrix, applied to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(NUM_ROWS * NUM_COLUMNS, dtype=torch.float32)
        self.matrix = nn.Parameter(values.view(NUM_ROWS, NUM_COLUMNS) / 10)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = (inputs @ self.matrix.T).sum(-1)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


class PadRows(Postprocessor):
    """Adds rows of zeros on the client, whose model has all rows."""

    def client_receive(self, message, memory):
        matrix = message.state["matrix"]
        return dataclasses.replace(message, state={"matrix": pad(matrix, (0, 0, 0, NUM_ROWS - len(matrix)))})


class RowsPart(ClientPart):
    def on_gradients(self, parameters):
        parameters["matrix"].grad[self.num_rows :] = 0.0

    def send(self, update):
        num_rows = self.num_rows + (update.client_id == TOO_MANY)
        return dataclasses.replace(update, state={"matrix": update.state["matrix"][:num_rows]})

    @property
    def num_rows(self) -> int:
        return ROWS.get(self.context.client_id, 2)


class FirstRows(Aggregation):
    """`row_r ← Σ_i n_i row_i,r / Σ_i n_i` over the clients that have row `r`."""

    client_part: ClassVar[type[ClientPart]] = RowsPart

    def postprocessors(self):
        return [PadRows()]

    def state_for(self, client_id, state):
        return {"matrix": state["matrix"][: ROWS.get(client_id, 2)]}

    def accumulator(self, state, extra=None):
        accumulator = super().accumulator(state, extra)
        accumulator.means["has_row"] = WeightedMean({"rows": torch.zeros(NUM_ROWS, 1)})
        return accumulator

    def accumulate(self, accumulator, update):
        matrix = update.state["matrix"]
        missing = NUM_ROWS - len(matrix)
        accumulator.mean.add({"matrix": pad(matrix, (0, 0, 0, missing))}, self.weight(update))
        has_row = pad(torch.ones(len(matrix), 1), (0, 0, 0, missing))
        accumulator.means["has_row"].add({"rows": has_row}, self.weight(update))

    def aggregate(self, accumulator, state):
        share = accumulator.means["has_row"].finalize()["rows"]
        mean = accumulator.mean.finalize()["matrix"] / share
        return {"matrix": torch.where(share > 0, mean, state["matrix"])}


class Updates(FederatedCallback):
    """Records the states of the updates, the global states and the rejected clients."""

    def __init__(self) -> None:
        self.updates: list[dict[str, torch.Tensor]] = []
        self.states: list[torch.Tensor] = []
        self.rejected: list[dict[str, str]] = []

    def on_round_begin(self, args, state, control, **kwargs) -> None:
        self.updates.append({})

    def on_client_end(self, args, state, control, update, **kwargs) -> None:
        self.updates[-1][update.client_id] = update.state["matrix"].clone()

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        self.states.append(round.state["matrix"].clone())
        self.rejected.append(dict(round.rejected))


def examples(seed: int, number: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(number, NUM_COLUMNS, generator=generator)
    return Dataset.from_dict({"inputs": inputs.tolist(), "labels": inputs.sum(-1).tolist()})


CLIENTS = {name: examples(number, 4 * (number + 1)) for number, name in enumerate(ROWS)}


def train(directory: Any, clients: dict[str, Dataset], *, serialize: bool = False) -> Updates:
    updates = Updates()
    trainer = {"model": RowsModel(), "engine": LocalEngine(serialize=serialize), "callbacks": [updates]}
    build_federation(directory, clients, federation={"aggregation": FirstRows()}, trainer=trainer).train()
    return updates


@pytest.mark.parametrize("serialize", [False, True])
def test_overlapping_rows_of_clients_are_averaged(tmp_path, serialize):
    found = train(tmp_path, CLIENTS, serialize=serialize)
    before = RowsModel().matrix.detach()
    for updates, after in zip(found.updates, found.states, strict=True):
        assert {name: len(rows) for name, rows in updates.items()} == ROWS
        for row in range(NUM_ROWS):
            owners = [name for name, number in ROWS.items() if number > row]
            weights = [len(CLIENTS[name]) for name in owners]
            total = sum(weight * updates[name][row].double() for name, weight in zip(owners, weights, strict=True))
            assert torch.allclose(after[row].double(), total / sum(weights), atol=1e-6)
            assert not torch.equal(after[row], before[row])
        before = after


def test_clients_start_from_their_rows_of_the_global_state(tmp_path):
    """A client with one row computes the update of a federation whose matrix has only this row."""
    found = train(tmp_path, CLIENTS)
    weight = RowsModel().matrix.detach()[:1].clone().requires_grad_(True)
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.0)
    data = CLIENTS["north"].with_format("torch")[:]
    ((data["inputs"] @ weight.T).sum(-1) - data["labels"]).square().mean().backward()
    optimizer.step()
    assert torch.allclose(found.updates[0]["north"], weight.detach(), atol=1e-6)


@pytest.mark.parametrize("serialize", [False, True])
def test_update_with_the_rows_of_another_client_is_rejected_by_name(tmp_path, serialize):
    clients = {**CLIENTS, TOO_MANY: examples(9, 4)}
    found = train(tmp_path, clients, serialize=serialize)
    reason = f"Client '{TOO_MANY}', round 1: 'matrix' has shape (3, 3), expected (2, 3)."
    assert found.rejected[0] == {TOO_MANY: reason}
    without = train(tmp_path, CLIENTS)
    assert all(torch.equal(*states) for states in zip(found.states, without.states, strict=True))


def test_messages_of_a_method_without_states_of_clients_share_one_state():
    round = Round(0, ("north", "south"), {"w": torch.zeros(2)})
    requests = FitRequests(FitSettings([FedAvg()], seed=0), round)
    first, second = (requests.message_for(client_id) for client_id in round.cohort)
    assert requests.individual == [] and first.state is second.state and first.state["w"] is round.state["w"]


def test_clients_receive_the_global_state_by_default():
    state = {"w": torch.zeros(2)}
    assert Method().state_for("north", state) is state and Method().expected_for("north", state) is state


@pytest.mark.parametrize(
    ("matrix", "is_agreed"),
    [
        (torch.zeros(1, NUM_COLUMNS), True),
        (torch.zeros(NUM_ROWS, NUM_COLUMNS), True),
        (torch.zeros(NUM_ROWS + 1, NUM_COLUMNS), False),
        (torch.zeros(NUM_COLUMNS), False),
        (torch.zeros(1, NUM_COLUMNS).long(), False),
    ],
)
def test_client_accepts_a_part_of_its_tensor_and_no_larger_one(matrix, is_agreed):
    agreement = Agreement([FirstRows()], num_rounds=1)
    request = Fit(0, "north", seed=0, state={"matrix": matrix})
    if is_agreed:
        agreement.check_tensors(request, Exchange(RowsModel()))
        return
    with pytest.raises(RefusedRequestError, match=r"'matrix'.*shape at most \(4, 3\)"):
        agreement.check_tensors(request, Exchange(RowsModel()))
