"""Steps that users wrote for hf_federated 0.1 keep working with a warning."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer, Postprocessor
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.postprocessing import run_client_send


@pytest.fixture
def steps(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    sys.modules.pop("postprocessor_0_1", None)
    with pytest.warns(FutureWarning) as warned:
        module = importlib.import_module("postprocessor_0_1")
    assert [str(warning.message).partition(" is")[0] for warning in warned] == [
        "HalveOnServer.client_side",
        "HalveOnServer.server_side",
        "ClipAndCount.client_side",
    ]
    assert "Rename it to `server_receive` and add `memory`" in str(warned[1].message)
    assert all(warning.filename == module.__file__ for warning in warned)
    return module


def trained_state(tmp_path, *postprocessors: Postprocessor) -> dict[str, torch.Tensor]:
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(4), "b": rows(4, seed=1)},
        postprocessors=postprocessors,
        federation=FederatedConfig(num_rounds=1),
    )
    trainer.train()
    return trainer.model.state_dict()


def test_step_with_the_old_methods_trains_to_the_same_weights(tmp_path, steps):
    plain = trained_state(tmp_path / "plain")
    halved = trained_state(tmp_path / "halved", steps.HalveOnServer())
    for name, value in plain.items():
        # Powers of two are exact.
        assert torch.equal(halved[name], value / 2 if value.is_floating_point() else value), name


def test_old_method_calls_the_method_of_its_base_class(steps):
    sent = Fit(0, "a", 0, {"w": torch.zeros(2)})
    update = ClientUpdate(0, "a", {"w": torch.tensor([3.0, 4.0])}, num_examples=1, num_tokens=0, num_steps=1)
    step = steps.ClipAndCount(max_norm=1.0)
    with pytest.warns(FutureWarning, match="`client_side` is a method of hf_federated 0.1. Call `client_send`."):
        clipped = run_client_send([step], update, sent, {})
    torch.testing.assert_close(clipped.state["w"], torch.tensor([0.6, 0.8]))
    assert step.count == 1


def test_old_method_of_a_mixin_is_used():
    class Mixin:
        def server_side(self, update, state):
            return "mixin"

    with pytest.warns(FutureWarning, match="Both.server_side"):

        class Both(Mixin, Postprocessor):
            pass

    class Derived(Both):
        pass

    assert Derived().server_receive(None, {}, {}) == "mixin"
