"""The steps that `benchmarks/split.py` measures: one batch over all clients, and encrypted messages."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import pytest
import torch

from hf_federated.security.encrypted_link import EncryptedServer


BENCHMARK = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "split.py"))


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
