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
@pytest.mark.sampled(1)
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
@pytest.mark.slow
def test_scaffold_keeps_one_control_variate_per_client(tmp_path) -> None:
    model_bytes = sum(parameter.nbytes for parameter in tiny_model().parameters())
    with_few, with_many = (peak_bytes(tmp_path, num_clients, Scaffold()) for num_clients in (3, 24))
    assert (with_many - with_few) / model_bytes == pytest.approx(21, rel=0.05)


class GarbageOfRound(FederatedCallback):
    """Collects the tensors of the second round that only a garbage collection frees."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] | None = None

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        if round.number == 0:
            gc.collect()
            gc.disable()
        if round.number == 1:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            gc.enable()
            self.tensors = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
            gc.garbage.clear()


@pytest.mark.usefixtures("nothing_is_frozen")
@pytest.mark.parametrize("local_loop", ["auto", "trainer"])
@pytest.mark.parametrize("aggregation", [FedAvg(), FedProx(), Scaffold()], ids=lambda each: each.name)
@pytest.mark.sampled(3)
def test_round_leaves_no_tensors_to_the_garbage_collection(tmp_path, aggregation, local_loop) -> None:
    garbage = GarbageOfRound()
    build_federation(
        tmp_path,
        {str(i): rows(4, seed=i) for i in range(3)},
        num_rounds=3,
        federation={"aggregation": aggregation, "local_loop": local_loop},
        trainer={"callbacks": [garbage]},
    ).train()
    assert garbage.tensors == []
