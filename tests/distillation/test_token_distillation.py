"""Distillation of language models: clients share a vocabulary and send the `top_k` most likely tokens.

Reference losses are in float64, from each model's logits of one text at a time. With a learning rate of 0, a run does
not change its models.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from datasets import Dataset
from distillation_setup import Recorder, same_clients
from language import WORDS, language_model, texts, tokenizer
from tiny import arguments, same_weights
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer
from hf_federated.clients.positions import Positions
from hf_federated.distillation import Cohort, PredictionCodec, PublicRows, lazy_rows
from hf_federated.distillation.codec import rows_of
from hf_federated.messages import Distill, Feedback, Metrics, Predictions
from hf_federated.tasks import LanguageModeling, Seq2Seq
from hf_federated.utils.errors import RoundFailedError


VOCABULARY, TOP_K = 27, 8
# The texts have 2, 1, 4, 1 and 0 predicted tokens: the first token of a text is not predicted.
PUBLIC = Dataset.from_dict(
    {"text": ["snow1 snow2 sand3", "sand1 sand0", "snow4 sand5 sand6 snow7 snow8", "snow9 snow3", "sand2"]}
)
NUM_POSITIONS = 2 + 1 + 4 + 1
SIZES = {"north": 3, "south": 6}


def models():
    return {"north": language_model(8), "south": language_model(24)}


def language_model_trainer(tmp_path, method, kwargs=None, record=None, args=None, rounds=1, **trainer_kwargs):
    """Build a trainer for language models with a learning rate of 0. `trainer_kwargs` override the defaults here."""
    settings = {"learning_rate": 0.0, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 2}
    defaults = {
        "model": language_model(),
        "processing_class": tokenizer(),
        "task": LanguageModeling(),
        "train_dataset": {client_id: texts(client_id, size) for client_id, size in SIZES.items()},
        "public_dataset": PUBLIC,
        "server_dataset": texts("north", 4),
        "clients": {client_id: ClientSpec(model=model) for client_id, model in models().items()},
        **trainer_kwargs,
    }
    if method in ("feddf", "feded"):
        del defaults["clients"]
    trainer = FederatedTrainer(
        args=arguments(tmp_path, **{**settings, **(args or {})}),
        federation=FederatedConfig(num_rounds=rounds, distillation=method, distillation_kwargs=kwargs),
        callbacks=[] if record is None else [record],
        **defaults,
    )
    if record is not None:
        record.trainer = trainer
    return trainer


def reference_logits(model):
    """Logits of every next token of the public texts, of shape `(positions, vocabulary)`."""
    numbers = tokenizer().get_vocab()
    found = []
    for text in PUBLIC["text"]:
        ids = torch.tensor([[numbers[word] for word in text.split()]])
        with torch.no_grad():
            found.append(model.eval()(input_ids=ids).logits[0, :-1].double())
    return torch.cat(found)


def as_received(logits):
    """Logits as received: the eight most likely tokens, and the log of the mean exponential for all other tokens."""
    rows = []
    for row in logits.tolist():
        kept = sorted(range(VOCABULARY), key=lambda number: -row[number])[:TOP_K]
        other_logits = [row[number] for number in range(VOCABULARY) if number not in kept]
        rest = math.log(sum(map(math.exp, other_logits)) / len(other_logits))
        rows.append([row[number] if number in kept else rest for number in range(VOCABULARY)])
    return torch.tensor(rows, dtype=torch.float64)


def cross_entropy(logits, q):
    return -(q * logits.log_softmax(-1)).sum(-1).mean()


def kl(logits, teacher):
    q = teacher.softmax(-1)
    return cross_entropy(logits, q) + (q * q.log()).sum(-1).mean()


def select_messages(messages, kind, client_id=None):
    """Messages of a type, optionally of one client only."""
    return [m for m in messages if isinstance(m, kind) and client_id in (None, m.client_id)]


def tensor_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def logged(trainer, name):
    return next(entry[f"federated/{name}"] for entry in trainer.state.log_history if f"federated/{name}" in entry)


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [
        ("mhat", {}),
        ("dsfl", {}),
        ("fedmd", {}),
        ("adafd", {"weighting": "size"}),
        ("fedid", {"feedback": "none"}),
    ],
)
@pytest.mark.sampled(3)
def test_predictions_are_sent_as_the_top_k_tokens(tmp_path, monkeypatch, method, kwargs):
    monkeypatch.setattr(lazy_rows, "BLOCK_SIZE", 3)
    record = Recorder(serialize=True)
    trainer = language_model_trainer(tmp_path, method, {**kwargs, "top_k": TOP_K}, record)
    trainer.train()
    codec = PredictionCodec(top_k=TOP_K)
    # Eight logits, eight token ids of one byte, and one value for all other tokens.
    assert codec.num_bytes({"logits": (1, VOCABULARY)}) == 8 * 4 + 8 * 1 + 4
    client_logits = {client_id: reference_logits(model) for client_id, model in models().items()}
    received = {client_id: as_received(logits) for client_id, logits in client_logits.items()}
    server_logits = reference_logits(language_model())
    by_size = sum(SIZES[client_id] / 9 * received[client_id].softmax(-1) for client_id in SIZES)
    if method == "mhat":
        server_loss, client_loss = cross_entropy(server_logits, by_size), lambda z: kl(z, as_received(server_logits))
    elif method == "dsfl":
        q = (sum(logits.softmax(-1) for logits in received.values()) / 2 / 0.1).softmax(-1)
        server_loss, client_loss = (
            cross_entropy(server_logits, q),
            lambda z: cross_entropy(z, as_received(q.log()).softmax(-1)),
        )
    elif method == "fedmd":
        mean = sum(received.values()) / 2
        server_loss, client_loss = (server_logits - mean).abs().mean(), lambda z: (z - as_received(mean)).abs().mean()
    elif method == "adafd":
        mean = sum(SIZES[client_id] / 9 * received[client_id] for client_id in SIZES)
        server_loss, client_loss = (server_logits - mean).square().mean(), lambda z: kl(z, as_received(server_logits))
    else:
        q = as_received(by_size.log()).softmax(-1)
        server_loss, client_loss = cross_entropy(server_logits, q), lambda z: cross_entropy(z, q)
    assert logged(trainer, "server_distillation_loss") == pytest.approx(float(server_loss), rel=1e-4)
    assert logged(trainer, "public_positions") == NUM_POSITIONS
    for client_id in SIZES:
        (reply,) = select_messages(record.received, Predictions, client_id)
        (message,) = select_messages(record.sent, (Distill, Feedback), client_id)
        for tensors in (reply.values, message.targets):
            assert tensor_bytes(tensors) == NUM_POSITIONS * codec.num_bytes({"logits": (1, VOCABULARY)})
            assert set(tensors) == {"values", "indices", "rest"}
        loss = select_messages(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert loss == pytest.approx(float(client_loss(client_logits[client_id])), rel=1e-4, abs=1e-6)
        if method != "fedid":
            decoded = codec.decode(reply.values, rows_of(VOCABULARY))["rows"].double()
            torch.testing.assert_close(decoded, received[client_id], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["mhat", "fedid"])
def test_top_k_of_a_large_vocabulary_takes_a_thousandth_of_the_bytes(tmp_path, method):
    def large(hidden_size=16):
        model = language_model(hidden_size)
        model.resize_token_embeddings(50_000)
        return model

    record = Recorder(serialize=True)
    kwargs = {"top_k": 16, "prediction_dtype": "float16"}
    trainer = language_model_trainer(
        tmp_path,
        method,
        kwargs | ({"feedback": "none"} if method == "fedid" else {}),
        record,
        args={"learning_rate": 1e-2},
        rounds=2,
        model=large(),
        clients={"north": ClientSpec(model=large(8)), "south": ClientSpec(model=large(24))},
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    replies = select_messages(record.received, Predictions)
    # Sixteen logits and sixteen token ids of two bytes each, and one value for the other 49 984 tokens.
    num_bytes = 16 * 2 + 16 * 2 + 4
    assert sum(tensor_bytes(reply.values) for reply in replies) == 2 * 2 * NUM_POSITIONS * num_bytes
    assert num_bytes < 50_000 * 2 / 1000
    assert {str(reply.values["indices"].dtype) for reply in replies} == {"torch.uint16"}
    losses = [
        entry["federated/server_distillation_loss"]
        for entry in trainer.state.log_history
        if "federated/server_distillation_loss" in entry
    ]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert any(not torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_mini_batch_without_predicted_tokens_is_skipped(tmp_path):
    record = Recorder()
    public = Dataset.from_dict({"text": ["sand2", "snow1 snow2", "snow3"]})
    trainer = language_model_trainer(
        tmp_path,
        "fedid",
        {"feedback": "per_example", "top_k": TOP_K},
        record,
        args={"per_device_train_batch_size": 1, "learning_rate": 1e-2},
        public_dataset=public,
        rounds=2,
    )
    trainer.train()
    assert len(select_messages(record.sent, Feedback)) == 2 * 2
    for message in select_messages(record.sent, Feedback):
        assert message.feedback["rewards"].shape == (1,)
        assert tensor_bytes(message.targets) == PredictionCodec(top_k=TOP_K).num_bytes({"logits": (1, VOCABULARY)})
    assert all(
        math.isfinite(entry.get("federated/server_distillation_loss", 0)) for entry in trainer.state.log_history
    )
    assert not same_weights(trainer.model, language_model())


@pytest.mark.parametrize("method", ["mhat", "feddf", "feded"])
def test_batch_without_predicted_tokens_makes_no_optimizer_step(tmp_path, method):
    public = Dataset.from_dict({"text": ["sand2", "snow1 snow2", "snow3"]})
    args = {"per_device_train_batch_size": 1, "learning_rate": 1e-2}
    trainer = language_model_trainer(tmp_path, method, args=args, public_dataset=public)
    trainer.train()
    state = trainer.distillation.server.student.state_dict()["optimizer"]["state"]
    assert {int(entry["step"]) for entry in state.values()} == {1}


def test_blocks_of_joined_texts_are_examples(tmp_path):
    trainer = language_model_trainer(tmp_path, "mhat", {"top_k": 3}, task=LanguageModeling(block_size=4))
    trainer.train()
    # 13 words and the end tokens of five texts are 18 tokens: four blocks of 4 tokens and one block of 2 tokens.
    assert logged(trainer, "public_positions") == 4 * 3 + 1


def test_left_padding_does_not_change_predictions(tmp_path):
    record = Recorder()
    left = tokenizer()
    left.padding_side = "left"
    language_model_trainer(tmp_path, "mhat", record=record, processing_class=left).train()
    (reply,) = select_messages(record.received, Predictions, "north")
    # Rotary position embeddings are relative, so padding before a text does not change the logits.
    expected = reference_logits(models()["north"]).float()
    torch.testing.assert_close(reply.values["values"], expected, atol=1e-5, rtol=1e-4)


def test_resume_gives_identical_weights(tmp_path):
    args = {"save_strategy": "epoch", "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    uninterrupted = language_model_trainer(tmp_path / "a", "fedid", {"top_k": TOP_K}, args=args, rounds=2)
    uninterrupted.train()
    resumed = language_model_trainer(tmp_path / "b", "fedid", {"top_k": TOP_K}, args=args, rounds=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert same_weights(uninterrupted.model, resumed.model) and same_clients(uninterrupted, resumed)
    assert uninterrupted.ledger.to_dict() == resumed.ledger.to_dict()


# ---- Encoder–decoders


def tiny_t5(seed=0, **config):
    values = {"vocab_size": VOCABULARY, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    values |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "dropout_rate": 0.0, **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return T5ForConditionalGeneration(T5Config(**values))


def test_encoder_decoder_predicts_each_target_token(tmp_path):
    record = Recorder()
    pairs = Dataset.from_dict(
        {"source": PUBLIC["text"], "target": ["sand1", "snow1 snow2 snow3", "sand4 sand5", "sand7", "snow1 sand8"]}
    )
    specs = {"north": ClientSpec(model=tiny_t5(1)), "south": ClientSpec(model=tiny_t5(2, d_model=12))}
    trainer = language_model_trainer(
        tmp_path,
        "mhat",
        {"top_k": TOP_K},
        record,
        model=tiny_t5(),
        task=Seq2Seq(),
        train_dataset={client_id: pairs.select(range(size)) for client_id, size in (("north", 2), ("south", 4))},
        public_dataset=pairs,
        server_dataset=pairs,
        clients=specs,
    )
    trainer.train()
    numbers = tokenizer().get_vocab()

    def logits(model):
        found = []
        for source, target in zip(pairs["source"], pairs["target"], strict=True):
            ids, wanted = ([numbers[word] for word in text.split()] for text in (source, target))
            before = torch.tensor([[0, *wanted[:-1]]])
            with torch.no_grad():
                outputs = model.eval()(input_ids=torch.tensor([ids]), decoder_input_ids=before)
            found.append(outputs.logits[0].double())
        return torch.cat(found)

    received = {client_id: as_received(logits(spec.model)) for client_id, spec in specs.items()}
    q = received["north"].softmax(-1) / 3 + received["south"].softmax(-1) * 2 / 3
    expected = cross_entropy(logits(tiny_t5()), q)
    assert len(q) == 9 == logged(trainer, "public_positions")
    assert logged(trainer, "server_distillation_loss") == pytest.approx(float(expected), rel=1e-4)
    for client_id, spec in specs.items():
        loss = select_messages(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        target = as_received(logits(tiny_t5()))
        assert loss == pytest.approx(float(kl(logits(spec.model), target)), rel=1e-4, abs=1e-6)


# ---- Rejected input


def renumbered_tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *WORDS["south"], *WORDS["north"]]
    other = tokenizer()
    other.backend_tokenizer.model = type(other.backend_tokenizer.model)(
        {word: number for number, word in enumerate(words)}, unk_token="<unk>"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=other.backend_tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def test_different_vocabulary_of_a_client_is_rejected(tmp_path):
    clients = {"south": ClientSpec(model=language_model(24), processing_class=renumbered_tokenizer())}
    with pytest.raises(
        ValueError, match=r"client 'south' has another vocabulary.*'s\w+' has the id \d+ for the client"
    ):
        language_model_trainer(tmp_path, "mhat", clients=clients)


def test_different_tokenization_of_a_client_is_rejected(tmp_path):
    other = tokenizer()
    other.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    clients = {"south": ClientSpec(model=language_model(24), processing_class=other)}
    trainer = language_model_trainer(tmp_path, "mhat", clients=clients)
    with pytest.raises(
        ValueError,
        match="tokenizer of client 'south' encodes public example 0 as .*, but the server's tokenizer encodes",
    ):
        trainer.train()


def test_different_vocabulary_size_of_a_client_model_is_rejected(tmp_path):
    larger = language_model(24)
    larger.resize_token_embeddings(VOCABULARY + 5)
    trainer = language_model_trainer(tmp_path, "mhat", clients={"south": ClientSpec(model=larger)})
    with pytest.raises(
        ValueError, match="client 'south' has a vocabulary of 32 tokens, but the server's model has 27"
    ):
        trainer.train()


def test_equal_tokenizer_of_a_client_is_accepted(tmp_path):
    clients = {"south": ClientSpec(model=language_model(24), processing_class=tokenizer())}
    language_model_trainer(tmp_path, "mhat", clients=clients).train()


@pytest.mark.parametrize(
    ("method", "kwargs", "words"),
    [
        ("dsfl", {"sharpening_temperature": 0.5}, "flattens over 27 tokens: .* at most 1 / log.*, here 0.307"),
        ("adafd", {"weighting": "llm", "generate": str}, "the 27 tokens of a vocabulary. Set weighting='enwc'"),
        ("fedaux", {}, "every token of an example.*Set distillation='feddf'"),
        ("fedkd", {}, "one for every token of an example. Set weighting='size'"),
    ],
)
def test_settings_without_a_meaning_for_vocabularies_are_rejected(tmp_path, method, kwargs, words):
    with pytest.raises(ValueError, match=words):
        language_model_trainer(tmp_path, method, kwargs, clients=None)


def test_masked_language_models_are_rejected(tmp_path):
    with_mask = tokenizer()
    with_mask.add_special_tokens({"mask_token": "<mask>"})
    task = LanguageModeling(objective="masked")
    with pytest.raises(ValueError, match="objective='masked'.*Supported are .*causal LanguageModeling"):
        language_model_trainer(tmp_path, "mhat", task=task, processing_class=with_mask, clients=None)


# ---- Clients with invalid predictions


NUM_CLASSES = 2


def cohort_with_replies(replies):
    positions = Positions(torch.tensor([2, 1]))
    return Cohort(
        round=0,
        metrics={client_id: {"num_examples": 1.0} for client_id in replies},
        ask=lambda phase, client_ids, message: {
            client_id: Predictions(0, client_id, replies[client_id]) for client_id in client_ids
        },
        decode=lambda values, num_classes: PredictionCodec().decode(values, rows_of(num_classes))["rows"],
        seed=0,
        positions=positions,
    )


@pytest.mark.parametrize("is_packed", [False, True])
def test_clients_with_invalid_predictions_are_left_out_and_named(is_packed):
    good = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    cohort = cohort_with_replies(
        {
            "good": {"values": good},
            "blind": {"values": good[:0], "absent": torch.arange(3, dtype=torch.int32)},
            "few": {"values": good[:2]},
            "many": {"values": good, "absent": torch.tensor([1], dtype=torch.int32)},
            "beyond": {"values": good[:2], "absent": torch.tensor([3], dtype=torch.int32)},
            "nan": {"values": good * torch.nan},
            "some": {"values": good[[0, 2]] + 10, "absent": torch.tensor([1], dtype=torch.int32)},
        }
    )
    if is_packed:
        kept = cohort.predict_lazily(PublicRows(0, 2), (3, NUM_CLASSES))
        found = {client_id: torch.cat(list(rows.blocks())) for client_id, rows in kept.items()}
    else:
        found = cohort.predict(PublicRows(0, 2), (3, NUM_CLASSES))
    assert list(found) == ["good", "some"]
    assert found["good"].tolist() == [[1, 2], [5, 6]] and found["some"].tolist() == [[11, 12], [15, 16]]
    assert cohort.positions.agreed_of([0, 1]).tolist() == [0, 2]
    reasons = {
        "blind": "keeps none of the 3 words",
        "few": r"shape \(2, 2\); expected \(3, 2\)",
        "many": r"shape \(3, 2\); expected \(2, 2\)",
        "beyond": "int32 tensor of unique ascending indices below 3",
        "nan": "NaN",
    }
    assert set(cohort.rejected) == set(reasons)
    for client_id, words in reasons.items():
        assert re.search(f"{client_id!r}, round 1.*{words}", cohort.rejected[client_id])


def test_client_without_a_distillation_loss_is_left_out_and_named():
    cohort = cohort_with_replies({"a": {}, "b": {}})
    metrics = {"a": {"distillation_loss": 0.5}, "b": {}}
    cohort.ask = lambda phase, client_ids, message: {
        client_id: Metrics(0, client_id, num_examples=2, metrics=metrics[client_id]) for client_id in client_ids
    }
    assert cohort.distill(PublicRows(0, 2), {}, num_epochs=1, num_training_epochs=1) == {"a": 0.5}
    assert "Client 'b', round 1, distillation: the reply has no number `distillation_loss`" in cohort.rejected["b"]


def test_round_fails_when_no_word_is_kept_by_all_clients():
    one = torch.tensor([[1.0, 2.0]])
    cohort = cohort_with_replies(
        {
            "a": {"values": one, "absent": torch.tensor([1, 2], dtype=torch.int32)},
            "b": {"values": one, "absent": torch.tensor([0, 2], dtype=torch.int32)},
        }
    )
    cohort.predict(PublicRows(0, 2), (3, NUM_CLASSES))
    with pytest.raises(RoundFailedError, match="all 2 clients keep no word of the public examples in common"):
        cohort.check_num_positions(len(cohort.positions.agreed_of([0, 1])))
