"""The token set of a client is read from a recorded update of a federation, and is a guess without word embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from federations import build_federation
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from hf_federated import ClipUpdate, GaussianNoise
from hf_federated.audits import Evidence, PayloadRecorder, SumRecorder, TokenSet


IDS = np.random.default_rng(0).integers(1, 100, size=(8, 6)).tolist()
CLIENTS = {"north": Dataset.from_dict({"input_ids": IDS, "labels": [0, 1] * 4})}
# Frequent tokens of the attacker's texts, of which the client has few.
PUBLIC = [list(range(60, 160))]


def attack(folder, federation=None, postprocessors=(), model=None, **arguments):
    model = model or tiny_model(vocab_size=400)
    recorder = PayloadRecorder("north", IDS)
    trainer = build_federation(
        folder,
        CLIENTS,
        federation={"local_epochs": 3, **(federation or {})},
        trainer={"model": model, "callbacks": [recorder], "postprocessors": list(postprocessors)},
        **arguments,
    )
    trainer.train()
    (result,) = TokenSet().run(Evidence(trainer.model, payload=recorder.payload, public_token_ids=PUBLIC))
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.01, "federation": {"exchange_dtype": "bfloat16"}},
        {"federation": {"exchange_dtype": "bfloat16"}},
        {"weight_decay": 0.1, "postprocessors": [ClipUpdate(0.05)]},
        {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.1},
    ],
    ids=["adamw", "decay", "decay in bfloat16", "bfloat16", "decay and clipping", "sgd"],
)
@pytest.mark.sampled(3)
def test_full_fine_tuning_names_the_exact_vocabulary(tmp_path, settings):
    result = attack(tmp_path, **settings)
    assert (result.metrics["precision"], result.metrics["recall"]) == (1.0, 1.0)
    assert result.metrics["chance"] < 0.7


@pytest.mark.parametrize("kind", ["frozen", "lora", "predictions"])
def test_payload_without_word_embeddings_leaves_the_attacker_at_chance(tmp_path, kind):
    kwargs = {"federation": {"freeze": "embeddings"}}
    if kind == "lora":
        config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query"])
        kwargs = {"model": get_peft_model(tiny_model(vocab_size=400), config)}
    elif kind == "predictions":
        kwargs = {"federation": {"aggregation": "local_only"}}
    result = attack(tmp_path, **kwargs)
    assert result.metrics["recall"] == result.metrics["chance"] < 0.7
    assert result.note.startswith("The payload has no word embeddings")


def test_noise_that_is_larger_than_the_change_hides_the_vocabulary(tmp_path):
    result = attack(tmp_path, postprocessors=[ClipUpdate(0.05), GaussianNoise(1.0, reproducible=True)])
    assert result.metrics["recall"] < 0.2


def test_noise_that_is_smaller_than_the_change_hides_little(tmp_path):
    result = attack(tmp_path, postprocessors=[GaussianNoise(1e-4, reproducible=True)])
    assert result.metrics["recall"] > 0.9 and result.metrics["precision"] > 0.9


def test_recorder_keeps_what_the_client_received_and_sent(tmp_path):
    recorder = PayloadRecorder("north", IDS)
    model = tiny_model(vocab_size=400)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trainer = build_federation(tmp_path, CLIENTS, num_rounds=1, trainer={"model": model, "callbacks": [recorder]})
    trainer.train()
    for name, value in trainer.model.named_parameters():
        assert torch.equal(recorder.payload.before[name], before[name])
        assert torch.equal(recorder.payload.after[name], value.detach())
    assert recorder.payload.num_steps == 2


def test_sum_names_the_tokens_of_all_clients_and_assigns_none(tmp_path):
    """The server names the union. The precision for one client is its share of the union."""
    other_ids = np.random.default_rng(1).integers(80, 180, size=(8, 6)).tolist()
    clients = {**CLIENTS, "south": Dataset.from_dict({"input_ids": other_ids, "labels": [0, 1] * 4})}
    recorder = SumRecorder(IDS, other_ids)
    trainer = build_federation(
        tmp_path,
        clients,
        federation={"local_epochs": 3},
        trainer={"model": tiny_model(vocab_size=400), "callbacks": [recorder]},
    )
    trainer.train()
    (result,) = TokenSet().run(Evidence(trainer.model, payload=recorder.payload, public_token_ids=PUBLIC))
    own, union = set(np.unique(IDS).tolist()), set(np.unique([IDS, other_ids]).tolist())
    payload = recorder.payload
    name = "bert.embeddings.word_embeddings.weight"
    assert set(TokenSet.changed_rows(payload.before[name], payload.after[name], payload.num_steps).tolist()) == union
    assert result.metrics["precision"] == len(own) / len(union) < 0.7
    assert result.metrics["recall"] == result.metrics["union_precision"] == result.metrics["union_recall"] == 1.0
