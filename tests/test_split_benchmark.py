"""What `benchmarks/split.py` times is what it says: clients that meet take one step over all rows, sealed messages."""

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


def test_clients_that_meet_take_a_step_with_the_gradient_of_all_rows(options, monkeypatch):
    whole = BENCHMARK["build"](options)
    rows = torch.cat([BENCHMARK["batch"](options, seed)["input_ids"] for seed in range(3)])
    whole(input_ids=rows, labels=rows).loss.backward()
    wanted = {name: value.grad for name, value in whole.named_parameters() if value.grad is not None}
    found = []
    step = torch.optim.AdamW.step

    def spy(optimizer, *args, **kwargs):
        found.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    BENCHMARK["meeting_stepper"](options, 3)()
    # Blocks one and two, the body, are trained once by all; heads and tails are each client's own.
    body = [gradient for name, gradient in wanted.items() if ".layers.1." in name or ".layers.2." in name]
    assert len(body) == len(wanted) // 2 and len(found) == len(body) + 3 * (len(wanted) - len(body))
    for theirs in body:
        assert any(ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4) for ours in found)


def test_messages_of_a_sealed_step_are_sealed(options, monkeypatch):
    sealed, plain = [], []
    exchange = EncryptedServer.exchange

    def spy(server, blob):
        answer = server.answer
        server.answer = lambda message: plain.append(message) or answer(message)
        try:
            sealed.append(blob)
            return exchange(server, blob)
        finally:
            server.answer = answer

    monkeypatch.setattr(EncryptedServer, "exchange", spy)
    BENCHMARK["sealed_stepper"](options)()
    assert len(sealed) == len(plain) == 2
    for blob, message in zip(sealed, plain, strict=True):
        assert message[-64:] not in blob and len(blob) > len(message)
