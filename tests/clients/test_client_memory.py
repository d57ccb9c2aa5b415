"""Memory does not grow with the number of clients, for algorithms that keep no state of a client."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from federations import build_federation
from tiny import rows, tiny_model

from hf_federated import Aggregation, FedAvg, FederatedCallback, FedOpt, FedProx, Scaffold


def live_bytes() -> int:
    """Number of bytes of all live tensors. Tensors that share storage are counted once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def peak_bytes(directory: Path, num_clients: int, aggregation: Aggregation) -> int:
    """Peak number of bytes in live tensors, measured after each client's update."""
    peak = 0

    class Measure(FederatedCallback):
        def on_client_end(self, args, state, control, **kwargs) -> None:
            nonlocal peak
            # `train()` freezes earlier objects, so `gc` does not list them. Their size does not depend on the clients.
            peak = max(peak, live_bytes())

    data = rows(4)
    build_federation(
        directory,
        {str(i): data for i in range(num_clients)},
        federation={"aggregation": aggregation},
        trainer={"callbacks": [Measure()]},
    ).train()
    return peak


@pytest.mark.usefixtures("nothing_is_frozen")
@pytest.mark.parametrize(
    "aggregation",
    [FedAvg(), pytest.param(FedProx(), marks=pytest.mark.slow), FedOpt("adam", server_lr=0.1)],
    ids=lambda a: a.name,
)
def test_memory_does_not_grow_with_the_number_of_clients(tmp_path, aggregation) -> None:
    with_few, with_many = (peak_bytes(tmp_path, num_clients, aggregation) for num_clients in (3, 24))
    model_bytes = sum(parameter.nbytes for parameter in tiny_model().parameters())
    assert with_few > model_bytes
    # The difference is less than one more update.
    assert with_many - with_few < model_bytes / 2


@pytest.mark.usefixtures("nothing_is_frozen")
def test_memory_of_a_client_is_freed_before_the_next_client_trains(tmp_path) -> None:
    measured = []

    class Measure(FederatedCallback):
        def on_client_begin(self, args, state, control, **kwargs) -> None:
            measured.append(live_bytes())

    data = rows(4)
    build_federation(
        tmp_path,
        {str(i): data for i in range(4)},
        federation={"aggregation": FedAvg()},
        trainer={"callbacks": [Measure()]},
    ).train()
    model_bytes = sum(parameter.nbytes for parameter in tiny_model().parameters())
    # The model, the global weights and their float64 sum; no update and no optimizer moments.
    assert max(measured) < 4.5 * model_bytes


@pytest.mark.usefixtures("nothing_is_frozen")
def test_scaffold_keeps_one_control_variate_per_client(tmp_path) -> None:
    model_bytes = sum(parameter.nbytes for parameter in tiny_model().parameters())
    with_few, with_many = (peak_bytes(tmp_path, num_clients, Scaffold()) for num_clients in (3, 24))
    assert (with_many - with_few) / model_bytes == pytest.approx(21, rel=0.05)
