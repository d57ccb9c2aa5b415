"""Distillation of tags: clients with other models and other tokenizers agree word for word.

The reference below asks each model for one row at a time, without padding, and finds words by counting letters; the
methods' formulas stand here again, in float64. With a learning rate of 0 and without dropout a run's models are those
it began with, so that what travels and every loss can be compared.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from distilled import Recorder, client_weights, distilled, same_clients
from tagged import LETTERS, PUBLIC, STILL, TAGS, WORDS, bert, distilbert, letters, sentences, tagger, whole_words
from tiny import arguments, same_weights
from torch.func import functional_call
from transformers import DataCollatorForTokenClassification

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer
from hf_federated.distillation import PredictionCodec
from hf_federated.messages import ClientUpdate, Distill, Feedback, Metrics, Predictions
from hf_federated.tasks import QuestionAnswering, SequenceTagging, SuperGlueSeq2Seq


def of(messages, kind, client_id=None):
    return [m for m in messages if isinstance(m, kind) and client_id in (None, m.client_id)]


def words_alone(model, words, limit=99):
    """
    A model's logits of the words of a row, of shape `(words, tags)`: from one row, by whole words or by letters, of
    which `limit` are read. A word whose first letter is not among them has none.
    """
    if model.config.model_type == "distilbert":
        pieces = {letter: 2 + i for i, letter in enumerate(LETTERS)}
        ids = [pieces[letter] + (len(LETTERS) if place else 0) for word in words for place, letter in enumerate(word)]
        first = [sum(map(len, words[:number])) for number in range(len(words))]
    else:
        ids, first = [2 + WORDS.index(word) for word in words], range(len(words))
    kept = [place for place in first if place < limit]
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids[:limit]])).logits[0, kept].double()


def by_hand(model, rows=PUBLIC, limit=99):
    return torch.cat([words_alone(model, words, limit) for words in rows["tokens"]])


def cross_entropy(logits, q):
    return -(q * logits.log_softmax(-1)).sum(-1).mean()


def kl(logits, teacher, temperature=1.0):
    """`T² KL(softmax(teacher / T) ‖ softmax(logits / T))`."""
    q = (teacher / temperature).softmax(-1)
    return temperature**2 * (cross_entropy(logits / temperature, q) + (q * q.log()).sum(-1).mean())


SERVER = bert(**STILL)
CLIENTS = {
    "a": ClientSpec(model=bert(seed=3, num_hidden_layers=2, **STILL)),
    "b": ClientSpec(model=distilbert(dropout=0.0, attention_dropout=0.0), processing_class=letters()),
}
LOGITS = {client_id: by_hand(spec.model) for client_id, spec in CLIENTS.items()}
SERVERS = by_hand(SERVER)
NUM_WORDS = len(SERVERS)
SHARES = {"a": 6 / 15, "b": 9 / 15}


def still(tmp_path, method, kwargs=None, **others):
    """A run in which nothing moves, all public rows in one batch; and its messages."""
    record = Recorder(serialize=True)
    given = {"model": SERVER, **({} if method in ("feddf", "feded") else {"clients": CLIENTS}), **others}
    args = {"learning_rate": 0.0, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 3}
    trainer = tagger(tmp_path, method, kwargs, record=record, args=args, **given)
    trainer.train()
    return trainer, record, next(entry for entry in trainer.state.log_history if "loss" in entry)


def expected(method, log):
    """What server and clients learn of the clients' logits, the server's loss, and a client's as a function."""
    mean = (LOGITS["a"] + LOGITS["b"]) / 2
    probabilities = {client_id: logits.softmax(-1) for client_id, logits in LOGITS.items()}
    plain = (probabilities["a"] + probabilities["b"]) / 2
    by_size = sum(SHARES[client_id] * probabilities[client_id] for client_id in LOGITS)
    if method == "dsfl":
        q = (plain / 0.1).softmax(-1)
        return q, cross_entropy(SERVERS, q), cross_entropy
    if method == "cronus":  # of two clients no robust mean is another one
        return plain, cross_entropy(SERVERS, plain), cross_entropy
    if method == "fedmd":
        return mean, (SERVERS - mean).abs().mean(), lambda logits, target: (logits - target).abs().mean()
    if method == "mhat":
        return SERVERS, cross_entropy(SERVERS, by_size), kl
    if method == "adafd":
        weighted = sum(log[f"federated/weight/{client_id}"] * LOGITS[client_id] for client_id in LOGITS)
        return SERVERS, (SERVERS - weighted).square().mean(), kl
    assert method == "fedid"
    return by_size, cross_entropy(SERVERS, by_size), cross_entropy


@pytest.mark.parametrize("method", ["dsfl", "cronus", "fedmd", "mhat", "adafd"])
def test_words_are_learned_as_the_formula_says(tmp_path, method):
    trainer, record, log = still(tmp_path, method)
    for reply in of(record.received, Predictions):
        torch.testing.assert_close(reply.values["values"], LOGITS[reply.client_id].float(), atol=1e-5, rtol=1e-4)
    target, server_loss, client_loss = expected(method, log)
    assert log["federated/server_distillation_loss"] == pytest.approx(float(server_loss), rel=1e-4)
    for client_id, logits in LOGITS.items():
        (message,) = of(record.sent, Distill, client_id)
        torch.testing.assert_close(message.targets["values"], target.float(), atol=1e-5, rtol=1e-4)
        loss = of(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert loss == pytest.approx(float(client_loss(logits, target)), rel=1e-4, abs=1e-7)
    assert log["federated/public_positions"] == NUM_WORDS


@pytest.mark.parametrize("method", ["mhat", "adafd"])
def test_clients_learn_at_the_temperature(tmp_path, method):
    _, record, log = still(tmp_path, method, {"temperature": 2.0})
    target, server_loss, _ = expected(method, log)
    # The servers of these methods have no temperature.
    assert log["federated/server_distillation_loss"] == pytest.approx(float(server_loss), rel=1e-4)
    for client_id, logits in LOGITS.items():
        loss = of(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert abs(loss / float(kl(logits, target)) - 1) > 0.005
        assert loss == pytest.approx(float(kl(logits, target, 2.0)), rel=1e-4, abs=1e-7)


def test_a_server_learns_at_the_temperature(tmp_path):
    _, _, log = still(tmp_path, "fedkd", {"temperature": 2.0, "weighting": "size"})
    mean = sum(SHARES[client_id] * logits for client_id, logits in LOGITS.items())
    assert abs(float(kl(SERVERS, mean)) / float(kl(SERVERS, mean, 2.0)) - 1) > 0.005
    assert log["federated/server_distillation_loss"] == pytest.approx(float(kl(SERVERS, mean, 2.0)), rel=1e-4)


def test_adafds_server_may_learn_logits_but_for_their_mean(tmp_path):
    _, _, log = still(tmp_path, "adafd", {"center": True})
    weighted = sum(log[f"federated/weight/{client_id}"] * LOGITS[client_id] for client_id in LOGITS)
    away = SERVERS - weighted
    centred = (away - away.mean(-1, keepdim=True)).square().mean()
    assert abs(float(centred / away.square().mean()) - 1) > 0.005
    assert log["federated/server_distillation_loss"] == pytest.approx(float(centred), rel=1e-4)


def test_feddf_learns_the_mean_of_the_words(tmp_path):
    _, record, log = still(tmp_path, "feddf", model=CLIENTS["a"].model)
    updates = of(record.received, ClientUpdate)
    assert all(torch.allclose(u.extra["public_logits"].double(), LOGITS["a"], atol=1e-5) for u in updates)
    assert log["federated/server_distillation_loss"] == pytest.approx(0, abs=1e-6)
    record = Recorder()
    trainer = tagger(tmp_path, "feddf", record=record)
    before, taught = trainer.distillation.train_server, []
    trainer.distillation.train_server = lambda targets, *args: taught.append(targets) or before(targets, *args)
    trainer.train()
    sent = [update.extra["public_logits"].double() for update in of(record.received, ClientUpdate)]
    assert not torch.allclose(*sent, atol=1e-3)
    torch.testing.assert_close(taught[0], (sum(sent) / 2).float())


def test_feded_learns_words_by_rows(tmp_path):
    record = Recorder()
    trainer = tagger(tmp_path, "feded", record=record)
    before, taught = trainer.distillation.train_server, []
    trainer.distillation.train_server = lambda targets, *args: taught.append(targets) or before(targets, *args)
    trainer.train()
    sent = {reply.client_id: reply.values["values"].double() for reply in of(record.received, Predictions)}
    assert not torch.allclose(sent["a"], sent["b"], atol=1e-3)
    weighted = sum(SHARES[client_id] * logits for client_id, logits in sent.items())
    torch.testing.assert_close(taught[0], weighted.float())


def labelled_loss(parameters, tagged):
    """The mean over the labelled words, by whole words."""
    losses = []
    for words, tags in zip(tagged["tokens"], tagged["ner_tags"], strict=True):
        ids = torch.tensor([[2 + WORDS.index(word) for word in words]])
        logits = functional_call(EAGER, parameters, (), {"input_ids": ids}).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(tags), reduction="none"))
    return torch.cat(losses).mean()


EAGER = bert(attn_implementation="eager", **STILL).double().eval()


@pytest.mark.parametrize("feedback", ["chain_rule", "none"])
def test_fedid_feeds_back_on_words(tmp_path, feedback):
    step = {"feedback_step_size": 0.5} if feedback == "chain_rule" else {}
    _, record, log = still(tmp_path, "fedid", {"feedback": feedback, **step})
    # The mini-batch has an order of its own.
    sent = {client_id: of(record.received, Predictions, client_id)[0].values["values"] for client_id in LOGITS}
    order = (sent["a"].double().unsqueeze(1) - LOGITS["a"]).abs().amax(-1).argmin(1)
    assert sorted(order.tolist()) == list(range(NUM_WORDS)) and order.tolist() != sorted(order.tolist())
    for client_id, logits in LOGITS.items():
        torch.testing.assert_close(sent[client_id], logits[order].float(), atol=1e-5, rtol=1e-4)
    q, server_loss, client_loss = expected("fedid", log)
    assert log["federated/server_distillation_loss"] == pytest.approx(float(server_loss), rel=1e-4)
    gradient = torch.zeros_like(q)
    if feedback == "chain_rule":
        gradient = true_gradient(q)
        assert gradient.abs().max() > 1e-4
    for client_id, logits in LOGITS.items():
        (message,) = of(record.sent, Feedback, client_id)
        torch.testing.assert_close(message.targets["values"], q[order].float(), atol=1e-5, rtol=1e-4)
        if feedback == "chain_rule":
            given = message.feedback["values"] * 2.0 ** message.settings["exponent"]
            torch.testing.assert_close(given, gradient[order].float(), atol=1e-6, rtol=1e-3)
        share = SHARES[client_id] * (gradient * logits.softmax(-1)).sum()
        loss = of(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert loss == pytest.approx(float(client_loss(logits, q) + share), rel=1e-4)


def true_gradient(q):
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
    return torch.autograd.grad(labelled_loss(stepped, sentences(5, seed=6)), q)[0]


# ---- Words of which a tokenizer keeps nothing


def kept_of(limits):
    """Which words have a place where so many tokens of a row are kept, whole words and letters."""
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
def test_only_words_that_all_tokenizers_keep_are_learned(tmp_path, method, kwargs, limits):
    by_words, by_letters = kept_of(limits)
    both = by_words & by_letters
    assert 0 < both.sum() < NUM_WORDS
    clients = {
        "a": CLIENTS["a"],
        "b": ClientSpec(model=CLIENTS["b"].model, processing_class=letters(model_max_length=limits["letters"])),
    }
    servers = whole_words(model_max_length=limits["words"])
    clients["a"] = ClientSpec(model=CLIENTS["a"].model, processing_class=whole_words())
    _, record, log = still(tmp_path, method, kwargs, clients=clients, processing_class=servers)
    assert log["federated/public_positions"] == int(both.sum())
    everywhere = torch.ones_like(both)
    learned = {}
    for client_id, seen, limit in (("a", everywhere, 99), ("b", by_letters, limits["letters"])):
        logits = by_hand(clients[client_id].model, limit=limit)
        learned[client_id] = logits[both[seen]]
        (reply,) = of(record.received, Predictions, client_id)
        (message,) = of(record.sent, (Distill, Feedback), client_id)
        num_absent = int((~seen).sum())
        # The tensors of the words that are there, and four bytes for each that is not.
        tensors = sum(tensor.numel() * tensor.element_size() for tensor in reply.values.values())
        assert tensors == int(seen.sum()) * PredictionCodec().num_bytes_per_row(len(TAGS)) + 4 * num_absent
        assert len(message.targets["values"]) == int(both.sum())
        assert len(message.targets["absent"]) == int((~both).sum())
        if method == "dsfl":
            torch.testing.assert_close(reply.values["values"], logits.float(), atol=1e-5, rtol=1e-4)
            assert reply.values.get("absent", torch.empty(0)).tolist() == (~seen).nonzero().flatten().tolist()
            assert message.targets["absent"].tolist() == (~both).nonzero().flatten().tolist()
    teacher = by_hand(SERVER, limit=limits["words"])[both[by_words]]
    q = sum(SHARES[client_id] * logits.softmax(-1) for client_id, logits in learned.items())
    if method == "dsfl":
        q = (sum(logits.softmax(-1) for logits in learned.values()) / 2 / 0.1).softmax(-1)
    assert log["federated/server_distillation_loss"] == pytest.approx(float(cross_entropy(teacher, q)), rel=1e-4)
    for client_id, logits in learned.items():
        loss = of(record.received, Metrics, client_id)[-1].metrics["distillation_loss"]
        assert loss == pytest.approx(float(cross_entropy(logits, q)), rel=1e-4)


def test_a_blank_word_is_a_word_of_nobody(tmp_path):
    public = Dataset.from_dict({"tokens": [["ab", " ", "cab"], ["b"], ["acc", "c"]]})
    _, record, log = still(tmp_path, "dsfl", public_dataset=public)
    bare = Dataset.from_dict({"tokens": [["ab", "cab"], ["b"], ["acc", "c"]]})
    for client_id, spec in CLIENTS.items():
        (reply,) = of(record.received, Predictions, client_id)
        assert reply.values["absent"].tolist() == [1]
        torch.testing.assert_close(reply.values["values"], by_hand(spec.model, bare).float(), atol=1e-5, rtol=1e-4)
    mean = sum(by_hand(spec.model, bare).softmax(-1) for spec in CLIENTS.values()) / 2
    q = (mean / 0.1).softmax(-1)
    assert log["federated/server_distillation_loss"] == pytest.approx(
        float(cross_entropy(by_hand(SERVER, bare), q)), rel=1e-4
    )


# ---- What holds of all methods


@pytest.mark.parametrize("method", ["dsfl", "fedid"])
def test_padding_never_contributes(tmp_path, method):
    kwargs = {"feedback": "none"} if method == "fedid" else {}
    tokenizer = whole_words()
    runs = []
    for name, multiple in (("a", None), ("b", 16)):
        collator = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=multiple)
        # Plain gradient descent: Adam's first step is the sign of what rounding left of a gradient.
        args = {"optim": "sgd", "learning_rate": 0.5}
        given = {"model": SERVER, "clients": {}, "processing_class": tokenizer, "data_collator": collator}
        trainer = tagger(tmp_path / name, method, kwargs, args=args, **{**given, "model": bert(**STILL)})
        trainer.train()
        runs.append(trainer)
    ours, theirs = (dict(trainer.model.named_parameters()) for trainer in runs)
    assert not same_weights(runs[0].model, SERVER)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-4)


def test_a_tokenizer_may_pad_on_the_left(tmp_path):
    clients = {**CLIENTS, "b": ClientSpec(model=CLIENTS["b"].model, processing_class=letters(padding_side="left"))}
    _, record, _ = still(tmp_path, "dsfl", clients=clients)
    (reply,) = of(record.received, Predictions, "b")
    # DistilBERT counts places from the left, and so with its padding.
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
def test_models_that_are_put_away_come_back_as_they_were(tmp_path, method):
    clients = {
        "a": ClientSpec(model=bert(seed=3)),
        "b": ClientSpec(model=distilbert(), processing_class=letters(model_max_length=6)),
    }
    resident = tagger(tmp_path / "a", method, clients=clients, federation={"num_rounds": 2})
    resident.train()
    put_away = tagger(tmp_path / "b", method, clients=clients, federation={"num_rounds": 2, "max_resident_clients": 1})
    put_away.train()
    assert same_weights(resident.model, put_away.model) and same_clients(resident, put_away)
    assert client_weights(resident)["b"].keys() != client_weights(resident)["a"].keys()


@pytest.mark.parametrize("method", ["fedid", "dsfl"])
def test_a_resumed_run_ends_in_the_same_bytes(tmp_path, method):
    federation = {"num_rounds": 2}
    whole = tagger(tmp_path / "a", method, args={"save_strategy": "epoch"}, federation=federation)
    whole.train()
    resumed = tagger(tmp_path / "b", method, args={"save_strategy": "epoch"}, federation=federation)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert same_weights(whole.model, resumed.model) and same_clients(whole, resumed)
    assert whole.ledger.to_dict() == resumed.ledger.to_dict()


def test_the_server_learns_its_labelled_words(tmp_path):
    trainer = tagger(tmp_path, "mhat", {"train_on_labelled": True})
    trainer.train()
    assert any("federated/server_labelled_loss" in entry for entry in trainer.state.log_history)


# ---- Refused


@pytest.mark.parametrize(
    ("method", "kwargs", "words"),
    [
        ("fedaux", {}, "'fedaux' scores public rows as a whole.*every word of a row.*Take distillation='feddf'"),
        ("fedkd", {}, "weighting='class_counts' of FedKD needs one class per row.*take weighting='size'"),
    ],
)
def test_methods_that_speak_of_whole_rows_are_refused(tmp_path, method, kwargs, words):
    with pytest.raises(ValueError, match=words):
        tagger(tmp_path, method, kwargs, clients=None)


@pytest.mark.parametrize("task", [QuestionAnswering(), SuperGlueSeq2Seq()])
def test_tasks_without_classes_that_all_share_are_refused(tmp_path, task):
    with pytest.raises(ValueError, match="'dsfl' learns distributions over classes, and .*Parameters can be averaged"):
        tagger(tmp_path, "dsfl", task=task, clients=None)


def test_rows_that_are_encoded_already_are_refused_with_what_is_missing(tmp_path):
    encoded = SequenceTagging(TAGS).prepare(sentences(6, seed=1), whole_words())
    trainer = FederatedTrainer(
        model=bert(),
        args=arguments(tmp_path),
        processing_class=whole_words(),
        data_collator=DataCollatorForTokenClassification(whole_words()),
        train_dataset={"a": encoded, "b": encoded},
        public_dataset=encoded.remove_columns("labels"),
        federation=FederatedConfig(num_rounds=1, distillation="dsfl"),
    )
    with pytest.raises(ValueError, match="give the trainer raw rows and a `task`, such as SequenceTagging"):
        trainer.train()


def test_a_collator_that_moves_labels_is_refused(tmp_path):
    class DropsLabels(DataCollatorForTokenClassification):
        def torch_call(self, features):
            batch = super().torch_call(features)
            return {**batch, "labels": batch["labels"].clamp(max=-100)}

    trainer = tagger(tmp_path, "dsfl", clients=None, data_collator=DropsLabels(whole_words()))
    with pytest.raises(ValueError, match=r"DropsLabels makes 0 labels of \d+ in 1 public rows.*Leave yours out"):
        trainer.train()


def test_other_tags_are_refused_by_client(tmp_path):
    other = bert(id2label=dict(enumerate(reversed(TAGS))), label2id={tag: 2 - i for i, tag in enumerate(TAGS)})
    with pytest.raises(ValueError, match="client 'b' has the labels"):
        tagger(tmp_path, "dsfl", clients={"b": ClientSpec(model=other)})


def test_classification_has_no_positions(tmp_path):
    record = Recorder()
    trainer = distilled(tmp_path, "dsfl", record=record, federation={"num_rounds": 1})
    trainer.train()
    assert all(set(reply.values) == {"values"} for reply in of(record.received, Predictions))
    assert trainer._setup.distillation_callback.server.student.positions is None
    assert not any("federated/public_positions" in entry for entry in trainer.state.log_history)
