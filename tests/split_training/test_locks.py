"""The server answers control messages while a body computes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from networked import DirectLink, Run
from split_runs import LORA, clients_of, rows_of, whole_model

from hf_federated import SplitConfig, SplitModel
from hf_federated.split_training.in_process import replica_of
from hf_federated.split_training.messages import Finish, Join, SendEnvelope, as_tensor


def test_control_messages_do_not_wait_for_a_computation(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="server_hierarchical", average_every=1), LORA)
    server = run.server
    computing, release = threading.Event(), threading.Event()

    def compute_slowly() -> None:
        with server.state.condition, server.state.computing():
            computing.set()
            release.wait(30)

    thread = threading.Thread(target=compute_slowly)
    thread.start()
    assert computing.wait(10)
    started_at = time.monotonic()
    server.answer("client 0", SendEnvelope("client 0", 0, "client 1", as_tensor(b"x")).to_bytes())
    with pytest.raises(ValueError, match="settings of client and server differ"):
        server.answer("client 0", Join("client 0", "other", 1, [], as_tensor(b"")).to_bytes())
    with pytest.raises(ValueError, match="the current step is 0"):
        server.answer("client 0", Finish("client 0", 1).to_bytes())
    server.client_lost("client 1")
    assert server.state.removed and time.monotonic() - started_at < 5 and thread.is_alive()
    release.set()
    thread.join()


@pytest.mark.parametrize("strategy", ["serial", "client_batch", "server_hierarchical"])
def test_run_continues_if_a_client_is_lost_during_a_computation(strategy, tmp_path):
    """A client that disconnects while the body processes its message does not change what the others receive."""
    lost = threading.Event()

    class LosingLink(DirectLink):
        def exchange(self, blob: bytes) -> bytes:
            if lost.is_set() and self.client_id == "client 1":
                raise ConnectionError("gone")
            return super().exchange(blob)

    split = SplitConfig(strategy=strategy, steps_per_turn=1 if strategy == "serial" else None)
    run = Run(tmp_path, clients_of(6, 6, 6), split, LORA, links=LosingLink)
    body = run.server.server_model.body_servers["client 1"]
    backward_batch = body.backward_batch

    def lose_client(messages):
        if not lost.is_set() and any(message.client_id == "client 1" for message in messages):
            lost.set()
            run.server.client_lost("client 1")
        return backward_batch(messages)

    body.backward_batch = lose_client
    run.train()
    assert set(run.errors) == {"client 1"} and run.server.finished.is_set()
    values = run.values()
    for name, value in values["client 0"].items():
        assert value.equal(values["client 2"][name]), name


def test_evaluation_of_a_client_waits_for_no_client(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA, eval_dataset=rows_of(5))
    assert run.trainers["client 0"].evaluate()["eval_loss"] > 0


def test_bodies_of_different_clients_compute_at_the_same_time(tmp_path):
    """Each body waits inside its first forward pass until the other body computes too."""
    split = SplitConfig(strategy="server_hierarchical", average_every=2)
    run = Run(tmp_path, clients_of(4, 4), split, LORA)
    barrier = threading.Barrier(2)
    for server in run.server.server_model.body_servers.values():
        forward_batch, passes = server.forward_batch, []

        def forward_at_the_same_time(messages, forward_batch=forward_batch, passes=passes):
            passes.append(1)
            # The first pass holds the generators of the process, because the body may draw random numbers.
            if len(passes) == 2:
                barrier.wait(20)
            return forward_batch(messages)

        server.forward_batch = forward_at_the_same_time
    run.train()
    assert not run.errors


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_only_a_body_that_draws_random_numbers_holds_the_generators(dropout):
    model = SplitModel.from_model(whole_model(attention_dropout=dropout)).train()
    server = model.boundary.link.server
    server.seed = 0
    tokens = torch.tensor([[3, 4, 5]])
    model(tokens, labels=tokens).loss.backward()
    assert server.draws_random_numbers is (dropout > 0)


def test_parallel_bodies_give_the_weights_of_bodies_in_turn(tmp_path):
    split = SplitConfig(strategy="server_hierarchical", average_every=2)
    values = []
    for is_parallel in (True, False):
        run = Run(tmp_path / str(is_parallel), clients_of(6, 5, 4), split, model=whole_model())
        if not is_parallel:
            run.server.state.share_bodies(dict.fromkeys(run.server.client_ids, "one"))
        run.train()
        assert not run.errors
        values.append(run.values())
    assert all(value.equal(values[1][party][name]) for party in values[0] for name, value in values[0][party].items())


@pytest.mark.parametrize(
    ("strategy", "devices", "error"),
    [
        ("serial", ["cpu"], "applies to strategy='server_hierarchical' only"),
        ("server_hierarchical", [], "must be a list"),
        ("server_hierarchical", "cpu", "must be a list"),
        ("server_hierarchical", ["cpu", "gpu:0"], "contains 'gpu:0', which is not a device"),
    ],
)
def test_devices_of_the_bodies_are_checked(strategy, devices, error):
    with pytest.raises(ValueError, match=error):
        SplitConfig(strategy=strategy, body_devices=devices)


def test_bodies_are_distributed_over_devices_and_parties_may_choose_different_devices():
    split = SplitConfig(strategy="server_hierarchical", body_devices=["cuda:0", "cuda:1"])
    assert [str(split.device_of_body(number)) for number in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert split.shared_settings() == SplitConfig(strategy="server_hierarchical").shared_settings()
    body = SplitModel.from_model(whole_model()).server_body
    assert {parameter.device.type for parameter in replica_of(body, torch.device("meta")).parameters()} == {"meta"}
    assert {parameter.device.type for parameter in body.parameters()} == {"cpu"}


@pytest.mark.gpu
def test_bodies_on_several_devices_give_the_weights_of_bodies_on_one_device(tmp_path):
    values = []
    for devices in (None, ["cuda:0", "cpu"]):
        split = SplitConfig(strategy="server_hierarchical", average_every=2, body_devices=devices)
        run = Run(tmp_path / str(devices), clients_of(6, 5), split, model=whole_model())
        run.train()
        assert not run.errors
        values.append(run.values()["client 0"])
    for name, value in values[0].items():
        assert torch.allclose(value, values[1][name].cpu(), atol=1e-5), name
