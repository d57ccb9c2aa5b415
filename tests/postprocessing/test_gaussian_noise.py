"""Gaussian noise on updates."""

from __future__ import annotations

import pytest
import torch

from hf_federated import GaussianNoise
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.postprocessing import run_client_send


SENT = Fit(round=0, client_id="a", seed=3, state={"w": torch.zeros(20_000), "count": torch.tensor(4)})
UPDATE = ClientUpdate(
    0, "a", {"w": torch.ones(20_000), "count": torch.tensor(4)}, num_examples=3, num_tokens=5, num_steps=2
)


def noise(**kwargs):
    return run_client_send([GaussianNoise(0.5, **kwargs)], UPDATE, SENT, {}).state["w"] - 1


def test_noise_has_the_given_standard_deviation_and_mean_zero():
    assert float(noise().std()) == pytest.approx(0.5, rel=0.05)
    assert abs(float(noise().mean())) < 5 * 0.5 / 20_000**0.5


def test_noise_cannot_be_computed_from_the_message_by_default():
    assert not torch.equal(noise(), noise())
    assert torch.equal(noise(reproducible=True), noise(reproducible=True))


def test_integers_and_dtypes_do_not_change():
    assert run_client_send([GaussianNoise(0.5)], UPDATE, SENT, {}).state["count"].item() == 4
    half = ClientUpdate(0, "a", {"w": torch.ones(3).half()}, num_examples=1, num_tokens=1, num_steps=1)
    assert run_client_send([GaussianNoise(0.5)], half, SENT, {}).state["w"].dtype == torch.float16


def test_several_processes_need_reproducible_noise(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="different noise in each of the 2 processes"):
        noise()
    assert torch.equal(noise(reproducible=True), noise(reproducible=True))


def test_standard_deviation_must_be_positive():
    with pytest.raises(ValueError, match="`std` is 0; it must be positive"):
        GaussianNoise(0)
