"""`exchange_dtype`: narrower dtypes of sent tensors, wide dtypes of sums, and bf16 training."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.messages.narrowed_state import NarrowedState
from hf_federated.messages.validation import InvalidUpdateError
from hf_federated.postprocessing import SendChanges, cast_floating
from hf_federated.server import fit_requests


CLIENTS = {"north": rows(8), "south": rows(6, seed=1)}


class SumDtypeRecorder(FederatedCallback):
    """Record the dtypes of the sums."""

    def __init__(self) -> None:
        self.sums: set[torch.dtype] = set()

    def on_aggregate(self, args, state, control, round=None, **kwargs):
        for accumulator in [round.sums]:
            self.sums |= {value.dtype for value in accumulator.mean._sums.values()}


def trained(
    tmp_path,
    recorder: FederatedCallback | None = None,
    model: Any = None,
    public: Any = None,
    client_callbacks: Any = (),
    **federation: Any,
) -> FederatedTrainer:
    trainer = FederatedTrainer(
        model=model or tiny_model(),
        args=arguments(tmp_path, learning_rate=1e-3, **federation.pop("args", {})),
        train_dataset=CLIENTS,
        public_dataset=public,
        callbacks=[recorder] if recorder else [],
        client_callbacks=list(client_callbacks),
        federation=FederatedConfig(num_rounds=2, **federation),
    )
    trainer.train()
    return trainer


def difference(a: FederatedTrainer, b: FederatedTrainer) -> float:
    parameters = [torch.cat([p.detach().flatten() for p in trainer.model.parameters()]) for trainer in (a, b)]
    return float((parameters[0] - parameters[1]).norm() / parameters[0].norm())


@pytest.mark.parametrize("aggregation", ["fedavg", "scaffold", "fedopt"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.sampled(3)
def test_half_precision_halves_the_bytes_in_both_directions(tmp_path, dtype, aggregation) -> None:
    recorder = SumDtypeRecorder()
    options = {"aggregation": aggregation, "args": {"optim": "sgd"}}
    full = trained(tmp_path / "full", **options)
    half = trained(tmp_path / "half", recorder, exchange_dtype=dtype, **options)
    payload = sum(parameter.nbytes for parameter in full.model.parameters()) * (2 if aggregation == "scaffold" else 1)
    for direction in ("bytes_up", "bytes_down"):
        # Four messages. The lengths of the headers do not change.
        saved = getattr(full.ledger, direction) - getattr(half.ledger, direction)
        assert saved == pytest.approx(4 * payload / 2, rel=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in half.model.parameters())
    assert recorder.sums == {torch.float64}
    assert 0 < difference(full, half) < 1e-2


class ExtraRecorder(FederatedCallback):
    """Record the additional tensors of the accepted updates."""

    def __init__(self) -> None:
        self.extra: dict[str, torch.Tensor] = {}

    def on_client_end(self, args, state, control, update=None, **kwargs):
        self.extra |= update.extra


@pytest.mark.parametrize(
    ("federation", "public", "dtypes"),
    [
        ({"aggregation": "fednova"}, None, {"normalizer": torch.float64}),
        ({"distillation": "feddf"}, rows(4, seed=5).remove_columns("labels"), {"public_logits": torch.float32}),
    ],
    ids=["fednova", "feddf"],
)
def test_additional_tensors_are_summed_in_the_dtype_of_the_method(tmp_path, federation, public, dtypes) -> None:
    recorder = ExtraRecorder()
    trained(tmp_path, recorder, args={"optim": "sgd"}, public=public, exchange_dtype="bfloat16", **federation)
    assert {name: value.dtype for name, value in recorder.extra.items()} == dtypes
    for value in recorder.extra.values():
        # A single number is sent as it is.
        assert torch.equal(value, value.bfloat16().to(value)) == (value.ndim > 0)


def test_exchange_dtype_of_the_model_changes_nothing(tmp_path) -> None:
    plain, named = trained(tmp_path / "a"), trained(tmp_path / "b", exchange_dtype="float32")
    assert same_weights(plain.model, named.model)
    assert plain.ledger.to_dict() == named.ledger.to_dict()


def test_small_changes_survive_half_precision() -> None:
    start = {"w": torch.ones(1000)}
    trained_values = start["w"] + torch.linspace(1e-5, 1e-4, 1000)
    step = SendChanges(torch.bfloat16)
    update = ClientUpdate(0, "a", {"w": trained_values}, num_examples=1, num_tokens=0, num_steps=1)
    sent = step.client_send(update, Fit(round=0, client_id="a", seed=0, state=start), {})
    arrived = step.server_receive(sent, start, {}).state["w"]
    torch.testing.assert_close(arrived - 1, trained_values - 1, rtol=1e-2, atol=1e-7)
    # Without changes, all values would be rounded to 1.
    assert torch.equal(trained_values.bfloat16(), start["w"].bfloat16())


@pytest.mark.parametrize("part", ["state", "extra"])
def test_update_in_another_dtype_is_rejected(part) -> None:
    # Otherwise values in the dtype of the model would be treated as changes.
    start = {"w": torch.ones(2)}
    parts = {"state": {"w": torch.zeros(2).bfloat16()}, part: {"w": torch.ones(2)}}
    update = ClientUpdate(3, "north", num_examples=1, num_tokens=0, num_steps=1, **parts)
    with pytest.raises(InvalidUpdateError, match="'north', round 4: 'w' .* torch.float32, expected torch.bf"):
        SendChanges(torch.bfloat16).server_receive(update, start, {})


def test_bf16_training_on_the_cpu(tmp_path) -> None:
    recorder = SumDtypeRecorder()
    trainer = trained(tmp_path / "amp", recorder, args={"bf16": True})
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert recorder.sums == {torch.float64}
    assert 0 < difference(trained(tmp_path / "full"), trainer) < 1e-2


def test_bf16_model_is_summed_in_float32(tmp_path) -> None:
    recorder = SumDtypeRecorder()
    trainer = trained(tmp_path, recorder, model=tiny_model().to(torch.bfloat16))
    assert recorder.sums == {torch.float32}
    assert all(parameter.dtype == torch.bfloat16 for parameter in trainer.model.parameters())


# ---- The state on its way to the clients


class NarrowTensors(FederatedCallback):
    """Record the bytes of the tensors in bfloat16 during local training."""

    def __init__(self) -> None:
        self.num_bytes: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
        self.num_bytes.append(sum(item.nbytes for item in tensors if item.dtype == torch.bfloat16))


def test_no_narrowed_state_is_in_memory_while_clients_train(tmp_path) -> None:
    recorder = NarrowTensors()
    trained(tmp_path, exchange_dtype="bfloat16", client_callbacks=[recorder])
    assert len(recorder.num_bytes) >= 4 and max(recorder.num_bytes) == 0


STATE = {
    "w": torch.randn(3, 5),
    "empty": torch.zeros(0, 2),
    "steps": torch.tensor(3),
    "half": torch.ones(2).bfloat16(),
}


def test_narrowed_state_has_the_bytes_of_a_converted_state() -> None:
    converted, narrowed = cast_floating(STATE, torch.bfloat16), NarrowedState(STATE, torch.bfloat16)
    messages = [Fit(0, "a", 1, state=state, extra=STATE) for state in (converted, narrowed)]
    assert messages[0].to_bytes() == messages[1].to_bytes()
    assert messages[0].num_bytes == messages[1].num_bytes == len(messages[0].to_bytes())
    assert dict(narrowed).keys() == converted.keys() and len(narrowed) == len(converted)
    assert all(torch.equal(narrowed[name], value) for name, value in converted.items())


def test_narrowed_state_is_combined_like_a_dictionary() -> None:
    state = NarrowedState({"w": torch.ones(2)}, torch.bfloat16)
    other = {"v": torch.zeros(1)}
    for combined in (state | other, other | state, {**state.copy(), **other}):
        assert type(combined) is dict and combined["w"].dtype == torch.bfloat16 and set(combined) == {"w", "v"}


@pytest.mark.parametrize("aggregation", ["fedprox", "scaffold"])
def test_narrowed_state_changes_no_byte(tmp_path, monkeypatch, aggregation) -> None:
    options = {"exchange_dtype": "bfloat16", "aggregation": aggregation, "args": {"optim": "sgd"}}
    found = trained(tmp_path / "found", **options)
    monkeypatch.setattr(fit_requests, "narrowed", cast_floating)
    expected = trained(tmp_path / "expected", **options)
    assert same_weights(found.model, expected.model)
    assert found.ledger.rounds() == expected.ledger.rounds()
