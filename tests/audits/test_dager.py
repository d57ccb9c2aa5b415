"""DAGER recovers a known batch exactly from the gradient of a tiny model."""

from __future__ import annotations

import pytest
import torch
from payload_inputs import END, batch, model, sgd_payload
from peft import LoraConfig, get_peft_model

from hf_federated.audits import Dager, Evidence, NoSpanError, Payload
from hf_federated.audits.payloads.dager import score_sequences


TWO = [[5, 9, 7, 11, END], [6, 30, 8, END]]


@pytest.mark.parametrize("sequences", [[[5, 9, 7, 11, END]], TWO])
def test_batch_of_an_encoder_is_recovered_exactly(sequences):
    victim = model()
    found = Dager().recover(victim, sgd_payload(victim, sequences), END, max_length=8)
    assert sorted(found) == sorted(sequences)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_batch_of_a_decoder_is_recovered_exactly(name):
    victim = model(name)
    sequences = [[5, 9, 7, 11], [6, 30, 8]]
    found = Dager(tolerance=1e-4).recover(victim, sgd_payload(victim, sequences), max_length=8)
    # The last token of a causal model is not the input of a prediction, so it has no gradient.
    expected = [sequence[:-1] if name == "llama" else sequence for sequence in sequences]
    assert sorted(found) == sorted(expected)


def test_search_by_exchange_finds_the_same_sequences():
    victim = model()
    payload = sgd_payload(victim, TWO)
    assert sorted(Dager(max_sequences=1).recover(victim, payload, END, max_length=8)) == sorted(TWO)


def test_frozen_embeddings_do_not_protect_sequences():
    victim = model()
    victim.get_input_embeddings().requires_grad_(False)
    payload = sgd_payload(victim, TWO)
    assert not any("word_embeddings" in name for name in payload.after)
    assert sorted(Dager().recover(victim, payload, END, max_length=8)) == sorted(TWO)


@pytest.mark.parametrize(("rank", "is_recovered"), [(8, True), (2, False)])
def test_adapter_reveals_a_batch_of_at_most_as_many_tokens_as_its_rank(rank, is_recovered):
    """The gradient of A has the rank of A: it spans the inputs of five tokens only if the rank is at least five."""
    config = LoraConfig(r=rank, target_modules=["query", "value"], task_type="SEQ_CLS", init_lora_weights=False)
    victim = get_peft_model(model(), config).double().eval()
    found = Dager(tolerance=1e-4).recover(victim, sgd_payload(victim, TWO[:1]), END, max_length=8)
    assert (found == TWO[:1]) == is_recovered


def test_first_round_of_lora_has_no_span():
    config = LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    victim = get_peft_model(model(), config).double().eval()
    with pytest.raises(NoSpanError, match="is zero"):
        Dager().recover(victim, sgd_payload(victim, TWO), END)


def test_batch_with_more_tokens_than_inputs_is_not_recovered():
    victim = model(hidden_size=8)
    (result,) = Dager().run(Evidence(victim, step_payload=sgd_payload(victim, TWO), end_token=END, max_length=8))
    assert result.metrics["examples"] == 0


def test_noise_prevents_the_recovery():
    victim = model()
    payload = sgd_payload(victim, TWO)
    generator = torch.Generator().manual_seed(0)
    noisy = {name: value + torch.randn(value.shape, generator=generator) for name, value in payload.after.items()}
    (result,) = Dager().run(Evidence(victim, step_payload=Payload(payload.before, noisy, TWO), end_token=END))
    assert result.metrics["examples"] == 0


def test_payload_of_predictions_has_no_sequences():
    victim = model()
    (result,) = Dager().run(Evidence(victim, step_payload=Payload({}, {}, TWO)))
    assert result.metrics == {"tokens": 0, "examples": 0} and result.note == "The payload has no parameters."


def test_attack_changes_neither_the_model_nor_its_mode():
    victim = model().train()
    payload = sgd_payload(model(seed=1), TWO)
    before = {name: value.clone() for name, value in victim.state_dict().items()}
    Dager().recover(victim, payload, END, max_length=8)
    assert victim.training and all(torch.equal(before[name], value) for name, value in victim.state_dict().items())


def test_each_recovered_sequence_is_counted_once():
    scores = score_sequences([[1, 2, 3], [1, 2, 3]], [[1, 2, 3], [1, 2, 4]])
    assert scores == {"tokens": 5 / 6, "examples": 0.5}
    assert score_sequences([], [[1]]) == {"tokens": 0, "examples": 0}
    assert batch([[1], [2, 3]])["attention_mask"].tolist() == [[1, 0], [1, 1]]
