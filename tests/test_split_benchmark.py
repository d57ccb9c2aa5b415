"""What the split benchmarks measure: one batch over all clients, encrypted messages, and error feedback."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import pytest
import torch

from hf_federated.security.encrypted_link import EncryptedServer
from hf_federated.split import Wire


BENCHMARK = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "split.py"))
MEMORY = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "split_memory.py"))
HIJACK = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "split_hijack.py"))
COMPRESSION = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "split_compression.py"))


@pytest.fixture
def options() -> argparse.Namespace:
    return argparse.Namespace(
        hidden_size=16,
        num_blocks=4,
        num_heads=2,
        vocabulary=50,
        length=8,
        batch_size=2,
        device="cpu",
        dtype="float32",
        wire_dtype="auto",
    )


def test_client_batch_step_has_the_gradient_of_all_examples(options, monkeypatch):
    whole = BENCHMARK["build"](options)
    input_ids = torch.cat([BENCHMARK["batch"](options, seed)["input_ids"] for seed in range(3)])
    whole(input_ids=input_ids, labels=input_ids).loss.backward()
    expected = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    gradients = []
    step = torch.optim.AdamW.step

    def spy(optimizer, *args, **kwargs):
        gradients.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    BENCHMARK["client_batch_stepper"](options, 3)()
    # Blocks 1 and 2 are the body, which has one gradient for all clients. Each client has its own head and tail.
    body = [gradient for name, gradient in expected.items() if ".layers.1." in name or ".layers.2." in name]
    assert len(body) == len(expected) // 2 and len(gradients) == len(body) + 3 * (len(expected) - len(body))
    for expected_gradient in body:
        assert any(
            gradient.shape == expected_gradient.shape and torch.allclose(gradient, expected_gradient, rtol=1e-4)
            for gradient in gradients
        )


def test_encrypted_step_encrypts_its_messages(options, monkeypatch):
    encrypted, plain = [], []
    exchange = EncryptedServer.exchange

    def spy(server, blob):
        answer = server.answer
        server.answer = lambda message: plain.append(message) or answer(message)
        try:
            encrypted.append(blob)
            return exchange(server, blob)
        finally:
            server.answer = answer

    monkeypatch.setattr(EncryptedServer, "exchange", spy)
    BENCHMARK["encrypted_stepper"](options)()
    assert len(encrypted) == len(plain) == 2
    for blob, message in zip(encrypted, plain, strict=True):
        assert message[-64:] not in blob and len(blob) > len(message)


@pytest.mark.parametrize("dtype", ["int4", "topk"])
@pytest.mark.parametrize(
    ("feedback", "examples"), [("next-gradients", [[0, 1], [2, 3], [1, 0]]), ("example", [[4, 7]] * 3)]
)
def test_error_feedback_sends_later_what_a_gradient_loses(dtype, feedback, examples):
    wire = COMPRESSION["FeedbackWire"](dtype, feedback)
    gradients = torch.randn(3, 2, 5, 20, generator=torch.Generator().manual_seed(0))
    sent = []
    for gradient, of_examples in zip(gradients, examples, strict=True):
        wire.begin(of_examples)
        tensors = {"gradient": gradient}
        sent.append(wire.decode(wire.encode(tensors), tensors)["gradient"])
    kept = torch.stack(list(wire.state["kept"].values()))
    assert torch.allclose(sum(sent) + kept, gradients.sum(0), atol=1e-5)
    assert not torch.allclose(sent[0], gradients[0], atol=1e-2)


def test_changes_of_hidden_states_approach_the_hidden_states():
    sender, receiver = (COMPRESSION["FeedbackWire"]("topk", "change") for _ in range(2))
    states = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(0))
    tensors = {"hidden": states}
    for _ in range(4):  # a quarter of the values changes in each epoch
        for side in (sender, receiver):
            side.begin([3, 8])
        received = receiver.decode(sender.encode(tensors), tensors)["hidden"]
    assert torch.allclose(received, states, atol=0.02)
    alone = receiver.decode(Wire("topk").encode(tensors), tensors)["hidden"]
    assert not torch.allclose(alone, states, atol=0.02)


def test_compression_benchmark_reports_the_loss_of_a_run():
    options = argparse.Namespace(
        model=None, num_train=4, num_test=4, length=6, hidden_size=16, batch_size=2, num_epochs=1, learning_rate=1e-3
    )
    options.device = "cpu"
    result = COMPRESSION["run"]("topk", "message", 0, options)
    assert result["bytes"] == (4 * 2 + 2) / 64
    assert 0 < abs(result["loss"] - result["loss without the wire"]) < 1


def test_server_accepts_the_honest_client_and_limits_the_hostile_ones(tmp_path, monkeypatch):
    for name, value in {"HIDDEN": 16, "LENGTH": 8}.items():
        monkeypatch.setitem(MEMORY["honest"].__globals__, name, value)
    for name, messages in MEMORY["CLIENTS"].items():
        server, refusals = MEMORY["build_server"](str(tmp_path)), []
        for message in messages():
            try:
                server.answer("north", message.to_bytes())
            except ValueError as error:
                refusals.append(str(error))
        limited = {"honest": "", "endless generations": "", "large evaluations": "in evaluation and generation"}
        expected = limited.get(name, "in training" if name == "packed rows" else "gradient_accumulation_steps is 2")
        assert (expected in refusals[0]) if expected else not refusals, (name, refusals)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "is_refused"), [(None, False), (0.0, False), (1.0, False), (1e4, True)])
def test_client_refuses_only_large_gradients_of_a_hijacking_server(scale, is_refused):
    options = argparse.Namespace(num_texts=16, learning_rate=1e-3, attack_steps=2)
    known, client = (HIJACK["build_model"](0) for _ in range(2))
    result = HIJACK["attack"](known, client, scale, True, 2, options)
    assert set(result["recall"]) == {"nearest", "decoder", "search"}
    assert result["refusal"].startswith("step 0: `gradient`") == is_refused
