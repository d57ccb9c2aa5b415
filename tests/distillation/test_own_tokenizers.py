"""Clients with own tokenizers: row `i` of the predictions of every client belongs to text `i`.

In the strictest test, each client has the server's model, with the rows of the embedding reordered for the client's
tokenizer. Both models are then the same function of a text, and their predictions must be bit-identical.
"""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from datasets import Dataset
from distillation_setup import Recorder, client_weights
from tiny import arguments, same_weights, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from hf_federated import ClientSpec, FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.distillation import Cohort, reports
from hf_federated.messages import ClientUpdate, Metrics, Predict, Predictions, public_order
from hf_federated.tasks import TextClassification
from hf_federated.utils.errors import RoundFailedError


WORDS = [f"w{number}" for number in range(29)]
TASK = TextClassification(label_names=["low", "high"])
CLIENTS = ("a", "b", "c")


def word_tokenizer(seed: int | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word. `seed` shuffles the ids of the words, and padding keeps the id 0."""
    words = ["<unk>", *WORDS]
    if seed is not None:
        random.Random(seed).shuffle(words)
    numbers = {word: number for number, word in enumerate(["<pad>", *words])}
    model = Tokenizer(WordLevel(numbers, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", unk_token="<unk>")


def texts(num_rows: int, seed: int) -> Dataset:
    """Texts of one to six words, labeled by whether the first word is in the second half of `WORDS`."""
    generator = random.Random(seed)
    drawn = [generator.choices(range(len(WORDS)), k=generator.randint(1, 6)) for _ in range(num_rows)]
    return Dataset.from_dict(
        {
            "text": [" ".join(WORDS[number] for number in numbers) for numbers in drawn],
            "label": [int(numbers[0] >= len(WORDS) // 2) for numbers in drawn],
        }
    )


def labeled_model(seed: int = 0, **config):
    return tiny_model(seed, id2label={0: "low", 1: "high"}, label2id={"low": 0, "high": 1}, **config)


def renumbered(model, tokenizer: PreTrainedTokenizerFast):
    """A copy of the server's model for a tokenizer with other token ids."""
    server_vocab = word_tokenizer().get_vocab()
    model = copy.deepcopy(model)
    embedding = model.get_input_embeddings().weight.data
    before = embedding.clone()
    for word, number in tokenizer.get_vocab().items():
        embedding[number] = before[server_vocab[word]]
    return model


PUBLIC = texts(10, seed=5)


def own_tokenizer_trainer(tmp_path, method, clients, record=None, **trainer_kwargs) -> FederatedTrainer:
    """Build a trainer with the given clients. `trainer_kwargs` override the defaults here."""
    trainer = FederatedTrainer(
        **{
            "model": labeled_model(),
            "args": arguments(tmp_path),
            "processing_class": word_tokenizer(),
            "train_dataset": {
                name: texts(size, seed=ord(name)) for name, size in zip(CLIENTS, (8, 12, 4), strict=True)
            },
            "public_dataset": PUBLIC,
            "server_dataset": texts(6, seed=6),
            "eval_dataset": texts(8, seed=7),
            "task": TASK,
            "clients": clients,
            "federation": FederatedConfig(num_rounds=2, distillation=method),
            "callbacks": [] if record is None else [record],
            **trainer_kwargs,
        }
    )
    if record is not None:
        record.trainer = trainer
    return trainer


def own_tokenizers(**model):
    """Each client with its own tokenizer and a copy of the server's model for this tokenizer."""
    specs = {}
    for number, name in enumerate(CLIENTS):
        tokenizer = word_tokenizer(seed=number + 1)
        specs[name] = ClientSpec(model=renumbered(labeled_model(**model), tokenizer), processing_class=tokenizer)
    return specs


def sent_predictions(record):
    return {
        (message.round, message.client_id, message.start): (message, reply.values["values"])
        for message, reply in zip(record.sent, record.received, strict=True)
        if isinstance(message, Predict)
    }


@pytest.mark.parametrize("method", ["mhat", "fedid"])
def test_clients_with_other_token_ids_predict_and_learn_the_same(tmp_path, method):
    """Functions, private texts and random draws are the same, so all predictions of the run are bit-identical."""
    same, different = Recorder(), Recorder()
    plain = {name: ClientSpec(model=labeled_model()) for name in CLIENTS}
    trainers = [
        own_tokenizer_trainer(tmp_path / "a", method, plain, same),
        own_tokenizer_trainer(tmp_path / "b", method, own_tokenizers(), different),
    ]
    for trainer in trainers:
        trainer.train()
    a, b = sent_predictions(same), sent_predictions(different)
    assert a.keys() == b.keys() and len(a) >= 6
    for key in a:
        assert torch.equal(a[key][1], b[key][1])
    first, second = (client_weights(trainer) for trainer in trainers)
    name = "bert.embeddings.word_embeddings.weight"
    for client_id in CLIENTS:
        assert not torch.equal(first[client_id][name], second[client_id][name])
        assert torch.equal(first[client_id]["classifier.weight"], second[client_id]["classifier.weight"])
    assert trainers[0].evaluate()["eval_loss"] == trainers[1].evaluate()["eval_loss"]


@pytest.mark.parametrize("method", ["dsfl", "fedid"])
def test_each_prediction_belongs_to_the_text_at_its_index(tmp_path, method):
    record = Recorder()
    clients = own_tokenizers(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    trainer = own_tokenizer_trainer(
        tmp_path,
        method,
        clients,
        record,
        args=arguments(tmp_path, learning_rate=0.0),
        federation=FederatedConfig(num_rounds=1, distillation=method),
    )
    trainer.train()
    orders = set()
    for message, values in sent_predictions(record).values():
        spec = clients[message.client_id]
        rows = public_order(len(PUBLIC), message.order)[message.start : message.stop].tolist()
        orders.add(tuple(rows))
        for value, row in zip(values, rows, strict=True):
            inputs = spec.processing_class([PUBLIC[row]["text"]], return_tensors="pt")
            with torch.no_grad():
                expected = spec.model.eval()(inputs["input_ids"]).logits[0]
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)
    if method == "fedid":
        assert sorted(sum(map(list, orders), [])) == list(range(len(PUBLIC))) and (0, 1, 2, 3) not in orders


def test_public_attributes_keep_raw_datasets(tmp_path):
    trainer = own_tokenizer_trainer(tmp_path, "dsfl", own_tokenizers())
    trainer.train()
    assert trainer.train_dataset["a"].column_names == ["text", "label"]
    assert trainer.clients["b"].column_names == ["text", "label"]
    assert PUBLIC.column_names == ["text", "label"]


def test_public_dataset_needs_no_label_column(tmp_path):
    with_labels, without = (
        own_tokenizer_trainer(tmp_path / name, "dsfl", own_tokenizers(), public_dataset=public)
        for name, public in (("a", PUBLIC), ("b", PUBLIC.remove_columns("label")))
    )
    with_labels.train()
    without.train()
    weights, expected = client_weights(without), client_weights(with_labels)
    assert all(torch.equal(weights["a"][name], expected["a"][name]) for name in expected["a"])


def test_client_may_have_its_own_training_arguments(tmp_path):
    record = Recorder()
    clients = own_tokenizers()
    clients["b"].args = arguments(tmp_path, per_device_train_batch_size=2, learning_rate=1e-3, max_steps=7)
    trainer = own_tokenizer_trainer(tmp_path, "dsfl", clients, record)
    trainer.train()
    updates = {reply.client_id: reply for reply in record.received if isinstance(reply, ClientUpdate)}
    assert {client_id: update.num_steps for client_id, update in updates.items()} == {"a": 2, "b": 6, "c": 1}
    models = trainer.engine.worker.models
    for client_id, size in (("a", 4), ("b", 2)):
        student = models.open(client_id).student
        steps = 2 * -(-len(PUBLIC) // size)
        scheduler = student._trainer.lr_scheduler
        assert scheduler.last_epoch == steps
        # The linear schedule ends with the run, and not before.
        assert scheduler.lr_lambdas[0](steps) == 0 and scheduler.lr_lambdas[0](steps - 1) == pytest.approx(1 / steps)


def test_clients_evaluate_with_their_own_tokenizers_and_the_metrics_of_the_task(tmp_path):
    eval_rows = {name: texts(6, seed=30 + number) for number, name in enumerate(CLIENTS)}
    trainer = own_tokenizer_trainer(
        tmp_path,
        "dsfl",
        own_tokenizers(),
        args=arguments(tmp_path, eval_strategy="epoch"),
        eval_dataset=FederatedDataset.from_dict(eval_rows),
        federation=FederatedConfig(num_rounds=1, distillation="dsfl", evaluate_clients=True),
    )
    trainer.train()
    models = trainer.engine.worker.models
    for client_id in CLIENTS:
        model, tokenizer = models.open(client_id).trainer.model, models.open(client_id).trainer.processing_class
        rows = eval_rows[client_id]
        with torch.no_grad():
            guesses = [
                int(model.eval()(**tokenizer([text], return_tensors="pt")).logits.argmax()) for text in rows["text"]
            ]
        right = sum(guess == label for guess, label in zip(guesses, rows["label"], strict=True))
        assert trainer.client_metrics[client_id]["eval_accuracy"] == pytest.approx(right / len(rows))
    assert "federated/eval_accuracy_mean" in trainer.evaluate()


def classifier(model_class, config_class, tokenizer, seed=1, **config):
    """A client with another architecture, with the server's labels and its own tokenizer."""
    labels = {"id2label": {0: "low", 1: "high"}, "label2id": {"low": 0, "high": 1}}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(vocab_size=32, **labels, **config))
    return ClientSpec(model=model, processing_class=tokenizer)


def llama_classifier(tokenizer, seed=1):
    """A decoder without a pad token in its config. Only its tokenizer defines the pad token."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return classifier(LlamaForSequenceClassification, LlamaConfig, tokenizer, seed, **small)


def test_decoders_without_a_pad_token_participate_in_every_round(tmp_path):
    models = []
    for name, resident in (("a", None), ("b", 1)):
        record = Recorder()
        clients = {client: llama_classifier(word_tokenizer(seed=7), number) for number, client in enumerate(CLIENTS)}
        assert all(spec.model.config.pad_token_id is None for spec in clients.values())
        config = FederatedConfig(num_rounds=2, distillation="fedid", max_resident_clients=resident)
        trainer = own_tokenizer_trainer(tmp_path / name, "fedid", clients, record, federation=config)
        trainer.train()
        assert [entry["federated/num_failed"] for entry in trainer.state.log_history if "loss" in entry] == [0, 0]
        # The 10 public examples are 3 mini-batches per round.
        assert sum(isinstance(reply, Predictions) for reply in record.received) == 2 * 3 * len(CLIENTS)
        models.append(trainer.model)
    assert same_weights(*models)


def test_bert_roberta_and_xlnet_participate_in_a_round_of_fedid(tmp_path):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    # RoBERTa's position ids start after its pad token id.
    roberta = {**small, "pad_token_id": 0, "max_position_embeddings": 16}
    xlnet = {"d_model": 16, "d_inner": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
    clients = {
        "a": ClientSpec(model=labeled_model(seed=3), processing_class=word_tokenizer(seed=1)),
        "b": classifier(RobertaForSequenceClassification, RobertaConfig, word_tokenizer(seed=2), **roberta),
        "c": classifier(XLNetForSequenceClassification, XLNetConfig, word_tokenizer(seed=3), **xlnet),
    }
    record = Recorder()
    trainer = own_tokenizer_trainer(
        tmp_path, "fedid", clients, record, federation=FederatedConfig(num_rounds=1, distillation="fedid")
    )
    trainer.train()
    assert trainer.state.log_history[0]["federated/num_failed"] == 0
    num_rows = dict.fromkeys(CLIENTS, 0)
    for reply in record.received:
        if isinstance(reply, Predictions):
            num_rows[reply.client_id] += len(reply.values["values"])
    assert num_rows == dict.fromkeys(CLIENTS, len(PUBLIC))
    for client_id, weights in client_weights(trainer).items():
        model = trainer.engine.worker.models.open(client_id).trainer.model
        assert type(model) is type(clients[client_id].model)
        before = dict(clients[client_id].model.named_parameters())
        assert any(not torch.equal(value, before[name]) for name, value in weights.items())


def test_adafd_prompt_contains_the_f1_of_the_task(tmp_path):
    prompts = []
    settings = {"weighting": "llm", "generate": lambda prompt: prompts.append(prompt) or "1, 1, 1"}
    record = Recorder()
    eval_rows = {name: texts(6, seed=30 + number) for number, name in enumerate(CLIENTS)}
    trainer = own_tokenizer_trainer(
        tmp_path,
        "adafd",
        own_tokenizers(),
        record,
        eval_dataset=FederatedDataset.from_dict(eval_rows),
        federation=FederatedConfig(
            num_rounds=1, distillation="adafd", distillation_kwargs={**settings, "clients_evaluate": True}
        ),
    )
    trainer.train()
    evaluations = [
        reply.metrics for reply in record.received if isinstance(reply, Metrics) and "eval_loss" in reply.metrics
    ]
    assert len(evaluations) == len(CLIENTS)
    for number, metrics in enumerate(evaluations, start=1):
        (line,) = [line for line in prompts[0].splitlines() if line.startswith(f"Client {number}:")]
        assert f" F1={metrics['eval_f1_weighted']:.4g}," in line


@pytest.mark.parametrize(
    ("metrics", "f1"),
    [
        ({"eval_f1": 0.1, "eval_f1_weighted": 0.2}, 0.1),
        ({"eval_f1_macro": 0.3, "eval_f1_weighted": 0.2}, 0.2),
        ({"eval_f1_macro": 0.3}, 0.3),
        ({"eval_span_f1": 0.4, "eval_token_accuracy": 0.9}, 0.4),
        ({"eval_accuracy": 0.9}, None),
    ],
)
def test_report_contains_the_available_f1(metrics, f1):
    cohort = Cohort(0, {"a": {"num_examples": 4}}, ask=None, decode=None, seed=0)
    assert reports(cohort, evaluations={"a": metrics})[0].f1 == f1


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"0": 3.0, "1": 1}, (3, 1)),
        ({"0": 3.0, "1": math.nan}, None),
        ({"0": 3.0, "2": 1.0}, None),
        ({"0": 3.0, "x": 1.0}, None),
        ({"0": None}, None),
        ({}, None),
    ],
)
def test_report_ignores_class_counts_that_are_no_histogram(counts, expected):
    """A method that does not use class counts does not check them, so a client may send any names and numbers."""
    metrics = {f"class_count_{name}": value for name, value in counts.items()}
    cohort = Cohort(0, {"a": {"num_examples": 4, **metrics}}, ask=None, decode=None, seed=0)
    assert reports(cohort)[0].class_counts == expected


def test_example_without_text_raises_an_error_that_names_the_row(tmp_path):
    bad = texts(8, seed=1).add_item({"text": " ", "label": 0})
    trainer = own_tokenizer_trainer(
        tmp_path,
        "dsfl",
        {},
        train_dataset={"a": bad, "b": texts(4, 2)},
        federation=FederatedConfig(num_rounds=1, distillation="dsfl", min_clients=2),
    )
    with pytest.raises(RoundFailedError, match="'a'.*Row 8 has an empty text in the column 'text'. Drop such rows"):
        trainer.train()


def test_every_client_sends_predictions(tmp_path):
    record = Recorder()
    own_tokenizer_trainer(tmp_path, "adafd", own_tokenizers(), record).train()
    assert sum(isinstance(reply, Predictions) for reply in record.received) == 2 * len(CLIENTS)


def test_task_with_another_label_column_trains(tmp_path):
    clients = {name: texts(6, seed=number).rename_column("label", "mood") for number, name in enumerate(CLIENTS)}
    trainer = FederatedTrainer(
        model=tiny_model(vocab_size=64),
        args=arguments(tmp_path),
        train_dataset=clients,
        task=TextClassification(label_names=["low", "high"], label_column="mood"),
        processing_class=word_tokenizer(),
        federation=FederatedConfig(num_rounds=1),
    )
    trainer.train()
    assert trainer.state.log_history[0]["federated/num_clients"] == len(CLIENTS)
