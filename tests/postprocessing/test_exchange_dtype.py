"""`exchange_dtype`: what travels is narrower, what is added up is not; and bf16 training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.validation import InvalidUpdateError
from hf_federated.postprocessing import SendChanges


CLIENTS = {"north": rows(8), "south": rows(6, seed=1)}


class Note(FederatedCallback):
    """The dtypes of the sums."""

    def __init__(self) -> None:
        self.sums: set[torch.dtype] = set()

    def on_aggregate(self, args, state, control, server=None, **kwargs):
        for accumulator in server.accumulators:
            self.sums |= {value.dtype for value in accumulator.mean._sums.values()}


def trained(tmp_path, note: Note | None = None, model: Any = None, **federation: Any) -> FederatedTrainer:
    trainer = FederatedTrainer(
        model=model or tiny_model(),
        args=arguments(tmp_path, learning_rate=1e-3, **federation.pop("args", {})),
        train_dataset=CLIENTS,
        callbacks=[note] if note else [],
        federation=FederatedConfig(num_rounds=2, **federation),
    )
    trainer.train()
    return trainer


def difference(a: FederatedTrainer, b: FederatedTrainer) -> float:
    parameters = [torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) for trainer in (a, b)]
    return float((parameters[0] - parameters[1]).norm() / parameters[0].norm())


@pytest.mark.parametrize("aggregation", ["fedavg", "scaffold", "fedopt"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_halves_the_bytes_in_both_directions(tmp_path, dtype, aggregation) -> None:
    note = Note()
    options = {"aggregation": aggregation, "args": {"optim": "sgd"}}
    full = trained(tmp_path / "full", **options)
    half = trained(tmp_path / "half", note, exchange_dtype=dtype, **options)
    payload = sum(parameter.nbytes for parameter in full.model.parameters()) * (2 if aggregation == "scaffold" else 1)
    for direction in ("bytes_up", "bytes_down"):
        # Four messages; the headers are as long as before.
        saved = getattr(full.ledger, direction) - getattr(half.ledger, direction)
        assert saved == pytest.approx(4 * payload / 2, rel=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in half.model.parameters())
    assert note.sums == {torch.float64}
    assert 0 < difference(full, half) < 1e-2


def test_its_own_dtype_changes_nothing(tmp_path) -> None:
    plain, named = trained(tmp_path / "a"), trained(tmp_path / "b", exchange_dtype="float32")
    assert same_weights(plain.model, named.model)
    assert plain.ledger.to_dict() == named.ledger.to_dict()


def test_small_changes_survive_half_precision() -> None:
    start = {"w": torch.ones(1000)}
    trained_values = start["w"] + torch.linspace(1e-5, 1e-4, 1000)
    step = SendChanges(torch.bfloat16)
    update = ClientUpdate(0, "a", {"w": trained_values}, num_examples=1, num_tokens=0, num_steps=1)
    sent = step.client_side(update, Fit(round=0, client_id="a", seed=0, state=start))
    arrived = step.server_side(sent, start).state["w"]
    torch.testing.assert_close(arrived - 1, trained_values - 1, rtol=1e-2, atol=1e-7)
    # The values themselves would all have been rounded to 1.
    assert torch.equal(trained_values.bfloat16(), start["w"].bfloat16())


@pytest.mark.parametrize("place", ["state", "extra"])
def test_another_dtype_than_agreed_on_is_refused(place) -> None:
    # Whole values in the model's own dtype would otherwise pass for a change.
    start = {"w": torch.ones(2)}
    parts = {"state": {"w": torch.zeros(2).bfloat16()}, place: {"w": torch.ones(2)}}
    update = ClientUpdate(3, "north", num_examples=1, num_tokens=0, num_steps=1, **parts)
    with pytest.raises(InvalidUpdateError, match="'north', round 3: 'w' .* torch.float32, expected torch.bf"):
        SendChanges(torch.bfloat16).server_side(update, start)


def test_bf16_training_on_the_cpu(tmp_path) -> None:
    note = Note()
    trainer = trained(tmp_path / "amp", note, args={"bf16": True})
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert note.sums == {torch.float64}
    assert 0 < difference(trained(tmp_path / "full"), trainer) < 1e-2


def test_a_bf16_model_is_added_up_in_float32(tmp_path) -> None:
    note = Note()
    trainer = trained(tmp_path, note, model=tiny_model().to(torch.bfloat16))
    assert note.sums == {torch.float32}
    assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters())
