"""Distillation of tagging models: clients with different models and tokenizers exchange one prediction per word.

The reference computes the logits of one example at a time, without padding, and finds words by counting letters. It
repeats the formulas of the methods in float64. With a learning rate of 0 and without dropout, a run does not change
its models, so the tests can compare each message and each loss with the reference.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from distillation_setup import Recorder, client_weights, distillation_trainer, same_clients
from tagging_setup import (
    LETTERS,
    NO_DROPOUT,
    PUBLIC,
    TAGS,
    WORDS,
    bert,
    distilbert,
    letter_tokenizer,
    sentences,
    tagging_trainer,
    word_tokenizer,
)
from tiny import arguments, same_weights
from torch.func import functional_call
from transformers import DataCollatorForTokenClassification

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer
from hf_federated.distillation import PredictionCodec
from hf_federated.messages import ClientUpdate, Distill, Feedback, Metrics, Predictions
from hf_federated.tasks import QuestionAnswering, SequenceTagging, SuperGlueSeq2Seq


def select_messages(messages, kind, client_id=None):
    """Messages of a type, optionally of one client only."""
    return [m for m in messages if isinstance(m, kind) and client_id in (None, m.client_id)]


def word_logits(model, words, limit=99):
    """
    A model's logits of the words of one example, of shape `(words, tags)`.

    A BERT reads one token per word and a DistilBERT one token per letter, at most `limit` tokens. A word whose first
    token is beyond the limit has no logits.
    """
    if model.config.model_type == "distilbert":
        pieces = {letter: 2 + i for i, letter in enumerate(LETTERS)}
        ids = [
            pieces[letter] + (len(LETTERS) if position else 0)
            for word in words
            for position, letter in enumerate(word)
        ]
        first = [sum(map(len, words[:number])) for number in range(len(words))]
    else:
        ids, first = [2 + WORDS.index(word) for word in words], range(len(words))
    kept = [position for position in first if position < limit]
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids[:limit]])).logits[0, kept].double()


def reference_logits(model, rows=PUBLIC, limit=99):
    return torch.cat([word_logits(model, words, limit) for words in rows["tokens"]])


def cross_entropy(logits, q):
    return -(q * logits.log_softmax(-1)).sum(-1).mean()


def kl(logits, teacher, temperature=1.0):
    """`T² KL(softmax(teacher / T) ‖ softmax(logits / T))`."""
    q = (teacher / temperature).softmax(-1)
    return temperature**2 * (cross_entropy(logits / temperature, q) + (q * q.log()).sum(-1).mean())


SERVER = bert(**NO_DROPOUT)
CLIENTS = {
    "a": ClientSpec(model=bert(seed=3, num_hidden_layers=2, **NO_DROPOUT)),
    "b": ClientSpec(model=distilbert(dropout=0.0, attention_dropout=0.0), processing_class=letter_tokenizer()),
}
LOGITS = {client_id: reference_logits(spec.model) for client_id, spec in CLIENTS.items()}
SERVER_LOGITS = reference_logits(SERVER)
NUM_WORDS = len(SERVER_LOGITS)
SHARES = {"a": 6 / 15, "b": 9 / 15}


def frozen_run(tmp_path, method, kwargs=None, **trainer_kwargs):
    """Train with a learning rate of 0 and all public examples in one batch. Returns trainer, messages and log."""
    record = Recorder(serialize=True)
    settings = {"model": SERVER, **({} if method in ("feddf", "feded") else {"clients": CLIENTS}), **trainer_kwargs}
    args = {"learning_rate": 0.0, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 3}
    trainer = tagging_trainer(tmp_path, method, kwargs, record=record, args=args, **settings)
    trainer.train()
    return trainer, record, next(entry for entry in trainer.state.log_history if "loss" in entry)


def reference_targets(method, log):
    """The targets of the clients, the loss of the server and the loss function of the clients."""
    mean = (LOGITS["a"] + LOGITS["b"]) / 2
    probabilities = {client_id: logits.softmax(-1) for client_id, logits in LOGITS.items()}
    plain = (probabilities["a"] + probabilities["b"]) / 2
    by_size = sum(SHARES[client_id] * probabilities[client_id] for client_id in LOGITS)
    if method == "dsfl":
        q = (plain / 0.1).softmax(-1)
        return q, cross_entropy(SERVER_LOGITS, q), cross_entropy
    if method == "cronus":  # The robust mean of two clients is their mean.
        return plain, cross_entropy(SERVER_LOGITS, plain), cross_entropy
    if method == "fedmd":
        return mean, (SERVER_LOGITS - mean).abs().mean(), lambda logits, target: (logits - target).abs().mean()
    if method == "mhat":
        return SERVER_LOGITS, cross_entropy(SERVER_LOGITS, by_size), kl
    if method == "adafd":
        weighted = sum(log[f"federated/weight/{client_id}"] * LOGITS[client_id] for client_id in LOGITS)
        return SERVER_LOGITS, (SERVER_LOGITS - weighted).square().mean(), kl
    assert method == "fedid"
    return by_size, cross_entropy(SERVER_LOGITS, by_size), cross_entropy


@pytest.mark.parametrize("method", ["dsfl", "cronus", "fedmd", "mhat", "adafd"])
def test_messages_and_losses_match_the_formulas(tmp_path, method):
    trainer, record, log = frozen_run(tmp_path, method)
    for reply in select_messages(record.received, Predictions):
        torch.testing.assert_close(reply.values["values"], LOGITS[reply.client_id].float(), atol=1e-5, rtol=1e-4)
    target, server_loss, client_loss = reference_targets(method, log)
    assert log["federated/server_distillation_loss"] == pytest.approx(float(server_loss), rel=1e-4)
    for client_id, logits in LOGITS.items():
        (message,) = select_messages(record.sent, Distill, client_id)
        torch.testing.assert_close(message.targets["values"], target.float(), atol=1e-5, rtol=1e-4)
        loss = select_messages(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert loss == pytest.approx(float(client_loss(logits, target)), rel=1e-4, abs=1e-7)
    assert log["federated/public_positions"] == NUM_WORDS


@pytest.mark.parametrize("method", ["mhat", "adafd"])
def test_client_loss_uses_the_temperature(tmp_path, method):
    _, record, log = frozen_run(tmp_path, method, {"temperature": 2.0})
    target, server_loss, _ = reference_targets(method, log)
    # The temperature does not apply to the servers of these methods.
    assert log["federated/server_distillation_loss"] == pytest.approx(float(server_loss), rel=1e-4)
    for client_id, logits in LOGITS.items():
        loss = select_messages(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert abs(loss / float(kl(logits, target)) - 1) > 0.005
        assert loss == pytest.approx(float(kl(logits, target, 2.0)), rel=1e-4, abs=1e-7)


def test_server_loss_of_fedkd_uses_the_temperature(tmp_path):
    _, _, log = frozen_run(tmp_path, "fedkd", {"temperature": 2.0, "weighting": "size"})
    mean = sum(SHARES[client_id] * logits for client_id, logits in LOGITS.items())
    assert abs(float(kl(SERVER_LOGITS, mean)) / float(kl(SERVER_LOGITS, mean, 2.0)) - 1) > 0.005
    assert log["federated/server_distillation_loss"] == pytest.approx(float(kl(SERVER_LOGITS, mean, 2.0)), rel=1e-4)


def test_adafd_with_center_compares_centred_logits(tmp_path):
    _, _, log = frozen_run(tmp_path, "adafd", {"center": True})
    weighted = sum(log[f"federated/weight/{client_id}"] * LOGITS[client_id] for client_id in LOGITS)
    difference = SERVER_LOGITS - weighted
    centered = (difference - difference.mean(-1, keepdim=True)).square().mean()
    assert abs(float(centered / difference.square().mean()) - 1) > 0.005
    assert log["federated/server_distillation_loss"] == pytest.approx(float(centered), rel=1e-4)


def test_feddf_server_targets_are_the_mean_of_word_logits(tmp_path):
    _, record, log = frozen_run(tmp_path, "feddf", model=CLIENTS["a"].model)
    updates = select_messages(record.received, ClientUpdate)
    assert all(torch.allclose(u.extra["public_logits"].double(), LOGITS["a"], atol=1e-5) for u in updates)
    assert log["federated/server_distillation_loss"] == pytest.approx(0, abs=1e-6)
    record = Recorder()
    trainer = tagging_trainer(tmp_path, "feddf", record=record)
    train_server, server_targets = trainer.distillation.train_server, []
    trainer.distillation.train_server = lambda targets, *args: (
        server_targets.append(targets) or train_server(targets, *args)
    )
    trainer.train()
    sent = [update.extra["public_logits"].double() for update in select_messages(record.received, ClientUpdate)]
    assert not torch.allclose(*sent, atol=1e-3)
    torch.testing.assert_close(server_targets[0], (sum(sent) / 2).float())


def test_feded_server_targets_are_weighted_by_the_number_of_examples(tmp_path):
    record = Recorder()
    trainer = tagging_trainer(tmp_path, "feded", record=record)
    train_server, server_targets = trainer.distillation.train_server, []
    trainer.distillation.train_server = lambda targets, *args: (
        server_targets.append(targets) or train_server(targets, *args)
    )
    trainer.train()
    sent = {
        reply.client_id: reply.values["values"].double() for reply in select_messages(record.received, Predictions)
    }
    assert not torch.allclose(sent["a"], sent["b"], atol=1e-3)
    weighted = sum(SHARES[client_id] * logits for client_id, logits in sent.items())
    torch.testing.assert_close(server_targets[0], weighted.float())


def labeled_loss(parameters, tagged):
    """The mean loss over the labeled words, with one token per word."""
    losses = []
    for words, tags in zip(tagged["tokens"], tagged["ner_tags"], strict=True):
        ids = torch.tensor([[2 + WORDS.index(word) for word in words]])
        logits = functional_call(EAGER, parameters, (), {"input_ids": ids}).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(tags), reduction="none"))
    return torch.cat(losses).mean()


EAGER = bert(attn_implementation="eager", **NO_DROPOUT).double().eval()


@pytest.mark.parametrize("feedback", ["chain_rule", "none"])
def test_fedid_feedback_on_words_matches_the_exact_gradient(tmp_path, feedback):
    step = {"feedback_step_size": 0.5} if feedback == "chain_rule" else {}
    _, record, log = frozen_run(tmp_path, "fedid", {"feedback": feedback, **step})
    # The mini-batch has a random order.
    sent = {
        client_id: select_messages(record.received, Predictions, client_id)[0].values["values"] for client_id in LOGITS
    }
    order = (sent["a"].double().unsqueeze(1) - LOGITS["a"]).abs().amax(-1).argmin(1)
    assert sorted(order.tolist()) == list(range(NUM_WORDS)) and order.tolist() != sorted(order.tolist())
    for client_id, logits in LOGITS.items():
        torch.testing.assert_close(sent[client_id], logits[order].float(), atol=1e-5, rtol=1e-4)
    q, server_loss, client_loss = reference_targets("fedid", log)
    assert log["federated/server_distillation_loss"] == pytest.approx(float(server_loss), rel=1e-4)
    gradient = torch.zeros_like(q)
    if feedback == "chain_rule":
        gradient = exact_gradient(q)
        assert gradient.abs().max() > 1e-4
    for client_id, logits in LOGITS.items():
        (message,) = select_messages(record.sent, Feedback, client_id)
        torch.testing.assert_close(message.targets["values"], q[order].float(), atol=1e-5, rtol=1e-4)
        if feedback == "chain_rule":
            received = message.feedback["values"] * 2.0 ** message.settings["exponent"]
            torch.testing.assert_close(received, gradient[order].float(), atol=1e-6, rtol=1e-3)
        share = SHARES[client_id] * (gradient * logits.softmax(-1)).sum()
        loss = select_messages(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert loss == pytest.approx(float(client_loss(logits, q) + share), rel=1e-4)


def exact_gradient(q):
    """`∂L_val/∂q` through the server's step, by double backward in float64."""
    q = q.clone().requires_grad_()
    parameters = {name: item.detach().requires_grad_() for name, item in EAGER.named_parameters()}
    logits = []
    for words in PUBLIC["tokens"]:
        ids = torch.tensor([[2 + WORDS.index(word) for word in words]])
        logits.append(functional_call(EAGER, parameters, (), {"input_ids": ids}).logits[0])
    loss = cross_entropy(torch.cat(logits), q)
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
    stepped = {
        name: item if gradient is None else item - 0.5 * gradient
        for (name, item), gradient in zip(parameters.items(), gradients, strict=True)
    }
    return torch.autograd.grad(labeled_loss(stepped, sentences(5, seed=6)), q)[0]


# ---- Words that a tokenizer truncates


def kept_words(limits):
    """Masks of the words within the token limits, for one token per word and one token per letter."""
    rows = PUBLIC["tokens"]
    by_words = torch.tensor([number < limits["words"] for words in rows for number in range(len(words))])
    by_letters = torch.tensor(
        [len("".join(words[:number])) < limits["letters"] for words in rows for number in range(len(words))]
    )
    return by_words, by_letters


@pytest.mark.parametrize(
    "limits", [{"words": 16, "letters": 7}, {"words": 3, "letters": 16}, {"words": 3, "letters": 5}]
)
@pytest.mark.parametrize(("method", "kwargs"), [("dsfl", {}), ("fedid", {"feedback": "none"})])
@pytest.mark.sampled(3)
def test_only_words_that_all_tokenizers_keep_are_distilled(tmp_path, method, kwargs, limits):
    by_words, by_letters = kept_words(limits)
    both = by_words & by_letters
    assert 0 < both.sum() < NUM_WORDS
    clients = {
        "a": CLIENTS["a"],
        "b": ClientSpec(
            model=CLIENTS["b"].model, processing_class=letter_tokenizer(model_max_length=limits["letters"])
        ),
    }
    server_tokenizer = word_tokenizer(model_max_length=limits["words"])
    clients["a"] = ClientSpec(model=CLIENTS["a"].model, processing_class=word_tokenizer())
    _, record, log = frozen_run(tmp_path, method, kwargs, clients=clients, processing_class=server_tokenizer)
    assert log["federated/public_positions"] == int(both.sum())
    everywhere = torch.ones_like(both)
    learned = {}
    for client_id, seen, limit in (("a", everywhere, 99), ("b", by_letters, limits["letters"])):
        logits = reference_logits(clients[client_id].model, limit=limit)
        learned[client_id] = logits[both[seen]]
        (reply,) = select_messages(record.received, Predictions, client_id)
        (message,) = select_messages(record.sent, (Distill, Feedback), client_id)
        num_absent = int((~seen).sum())
        # The message has the predictions of the words that are kept, and four bytes for each absent word.
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in reply.values.values())
        assert tensors == int(seen.sum()) * PredictionCodec().num_bytes({"logits": (1, len(TAGS))}) + 4 * num_absent
        assert len(message.targets["values"]) == int(both.sum())
        assert len(message.targets["absent"]) == int((~both).sum())
        if method == "dsfl":
            torch.testing.assert_close(reply.values["values"], logits.float(), atol=1e-5, rtol=1e-4)
            assert reply.values.get("absent", torch.empty(0)).tolist() == (~seen).nonzero().flatten().tolist()
            assert message.targets["absent"].tolist() == (~both).nonzero().flatten().tolist()
    teacher = reference_logits(SERVER, limit=limits["words"])[both[by_words]]
    q = sum(SHARES[client_id] * logits.softmax(-1) for client_id, logits in learned.items())
    if method == "dsfl":
        q = (sum(logits.softmax(-1) for logits in learned.values()) / 2 / 0.1).softmax(-1)
    assert log["federated/server_distillation_loss"] == pytest.approx(float(cross_entropy(teacher, q)), rel=1e-4)
    for client_id, logits in learned.items():
        loss = select_messages(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert loss == pytest.approx(float(cross_entropy(logits, q)), rel=1e-4)


def test_blank_word_is_left_out_for_all_clients(tmp_path):
    public = Dataset.from_dict({"tokens": [["ab", " ", "cab"], ["b"], ["acc", "c"]]})
    _, record, log = frozen_run(tmp_path, "dsfl", public_dataset=public)
    bare = Dataset.from_dict({"tokens": [["ab", "cab"], ["b"], ["acc", "c"]]})
    for client_id, spec in CLIENTS.items():
        (reply,) = select_messages(record.received, Predictions, client_id)
        assert reply.values["absent"].tolist() == [1]
        torch.testing.assert_close(
            reply.values["values"], reference_logits(spec.model, bare).float(), atol=1e-5, rtol=1e-4
        )
    mean = sum(reference_logits(spec.model, bare).softmax(-1) for spec in CLIENTS.values()) / 2
    q = (mean / 0.1).softmax(-1)
    assert log["federated/server_distillation_loss"] == pytest.approx(
        float(cross_entropy(reference_logits(SERVER, bare), q)), rel=1e-4
    )


# ---- Properties of all methods


@pytest.mark.parametrize("method", ["dsfl", "fedid"])
def test_padding_does_not_change_the_result(tmp_path, method):
    kwargs = {"feedback": "none"} if method == "fedid" else {}
    tokenizer = word_tokenizer()
    runs = []
    for name, multiple in (("a", None), ("b", 16)):
        collator = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=multiple)
        # Plain gradient descent, because Adam's first step would follow the sign of rounding errors.
        args = {"optim": "sgd", "learning_rate": 0.5}
        settings = {"model": SERVER, "clients": {}, "processing_class": tokenizer, "data_collator": collator}
        trainer = tagging_trainer(
            tmp_path / name, method, kwargs, args=args, **{**settings, "model": bert(**NO_DROPOUT)}
        )
        trainer.train()
        runs.append(trainer)
    first, second = (dict(trainer.model.named_parameters()) for trainer in runs)
    assert not same_weights(runs[0].model, SERVER)
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-5, rtol=1e-4)


def test_left_padding_of_a_client_is_accepted(tmp_path):
    clients = {
        **CLIENTS,
        "b": ClientSpec(model=CLIENTS["b"].model, processing_class=letter_tokenizer(padding_side="left")),
    }
    _, record, _ = frozen_run(tmp_path, "dsfl", clients=clients)
    (reply,) = select_messages(record.received, Predictions, "b")
    # DistilBERT counts positions from the left, including padding, so only the longest text of a batch is unchanged.
    assert reply.values["values"].shape == LOGITS["b"].shape
    longest = max(PUBLIC["tokens"][:3], key=lambda words: len("".join(words)))
    start = sum(len(words) for words in PUBLIC["tokens"][: PUBLIC["tokens"][:].index(longest)])
    torch.testing.assert_close(
        reply.values["values"][start : start + len(longest)],
        LOGITS["b"][start : start + len(longest)].float(),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("method", ["fedid", "adafd"])
def test_limit_on_resident_clients_does_not_change_the_result(tmp_path, method):
    clients = {
        "a": ClientSpec(model=bert(seed=3)),
        "b": ClientSpec(model=distilbert(), processing_class=letter_tokenizer(model_max_length=6)),
    }
    resident = tagging_trainer(tmp_path / "a", method, clients=clients, federation={"num_rounds": 2})
    resident.train()
    limited = tagging_trainer(
        tmp_path / "b", method, clients=clients, federation={"num_rounds": 2, "max_resident_clients": 1}
    )
    limited.train()
    assert same_weights(resident.model, limited.model) and same_clients(resident, limited)
    assert client_weights(resident)["b"].keys() != client_weights(resident)["a"].keys()


@pytest.mark.parametrize("method", ["fedid", "dsfl"])
def test_resume_gives_identical_weights(tmp_path, method):
    federation = {"num_rounds": 2}
    uninterrupted = tagging_trainer(tmp_path / "a", method, args={"save_strategy": "epoch"}, federation=federation)
    uninterrupted.train()
    resumed = tagging_trainer(tmp_path / "b", method, args={"save_strategy": "epoch"}, federation=federation)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert same_weights(uninterrupted.model, resumed.model) and same_clients(uninterrupted, resumed)
    assert uninterrupted.ledger.to_dict() == resumed.ledger.to_dict()


def test_train_on_labeled_logs_the_loss_on_labeled_words(tmp_path):
    trainer = tagging_trainer(tmp_path, "mhat", {"train_on_labeled": True})
    trainer.train()
    assert any("federated/server_labelled_loss" in entry for entry in trainer.state.log_history)


# ---- Rejected input


@pytest.mark.parametrize(
    ("method", "kwargs", "words"),
    [
        ("fedaux", {}, "'fedaux' scores each public example as a whole.*word of an example.*Set distillation='feddf'"),
        ("fedkd", {}, "weighting='class_counts' of FedKD needs one class per example.*Set weighting='size'"),
    ],
)
def test_methods_for_whole_examples_are_rejected(tmp_path, method, kwargs, words):
    with pytest.raises(ValueError, match=words):
        tagging_trainer(tmp_path, method, kwargs, clients=None)


@pytest.mark.parametrize("task", [QuestionAnswering(), SuperGlueSeq2Seq()])
def test_tasks_without_shared_classes_are_rejected(tmp_path, task):
    with pytest.raises(ValueError, match="'dsfl' learns distributions over classes, but .*To average parameters"):
        tagging_trainer(tmp_path, "dsfl", task=task, clients=None)


def test_encoded_datasets_without_a_task_are_rejected(tmp_path):
    encoded = SequenceTagging(TAGS).prepare(sentences(6, seed=1), word_tokenizer())
    trainer = FederatedTrainer(
        model=bert(),
        args=arguments(tmp_path),
        processing_class=word_tokenizer(),
        data_collator=DataCollatorForTokenClassification(word_tokenizer()),
        train_dataset={"a": encoded, "b": encoded},
        public_dataset=encoded.remove_columns("labels"),
        federation=FederatedConfig(num_rounds=1, distillation="dsfl"),
    )
    with pytest.raises(ValueError, match="pass raw examples and a `task` such as SequenceTagging"):
        trainer.train()


def test_collator_that_changes_labels_is_rejected(tmp_path):
    class DropsLabels(DataCollatorForTokenClassification):
        def torch_call(self, features):
            batch = super().torch_call(features)
            return {**batch, "labels": batch["labels"].clamp(max=-100)}

    trainer = tagging_trainer(tmp_path, "dsfl", clients=None, data_collator=DropsLabels(word_tokenizer()))
    with pytest.raises(
        ValueError,
        match=r"DropsLabels returned 0 labels for 1 public examples with \d+ labels.*Leave out `data_collator`",
    ):
        trainer.train()


def test_different_tags_of_a_client_are_rejected(tmp_path):
    other = bert(id2label=dict(enumerate(reversed(TAGS))), label2id={tag: 2 - i for i, tag in enumerate(TAGS)})
    with pytest.raises(ValueError, match="client 'b' has the labels"):
        tagging_trainer(tmp_path, "dsfl", clients={"b": ClientSpec(model=other)})


def test_classification_messages_have_no_positions(tmp_path):
    record = Recorder()
    trainer = distillation_trainer(tmp_path, "dsfl", record=record, federation={"num_rounds": 1})
    trainer.train()
    assert all(set(reply.values) == {"values"} for reply in select_messages(record.received, Predictions))
    assert trainer.distillation.server.student.positions is None
    assert not any("federated/public_positions" in entry for entry in trainer.state.log_history)
