"""Alignment: clients whose classes or tokens differ from those of the server."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from distillation_setup import SIZES, Recorder, client_model, distillation_trainer
from language import SPECIAL, WORDS, language_model, texts, tokenizer
from tiny import arguments, rows, same_weights
from tokenizers.processors import TemplateProcessing

from hf_federated import DSFL, ClientSpec, FederatedConfig, FederatedDataset, FederatedTrainer, FedID
from hf_federated.distillation import Alignment, soft_cross_entropy
from hf_federated.distillation.lazy_rows import LazyRows
from hf_federated.messages import Metrics, Predictions
from hf_federated.tasks import LanguageModeling


REVERSED = "b"


class ReversedForOneClient(Alignment):
    def to_server(self, client_id, logits):
        return logits.flip(-1) if client_id == REVERSED else logits

    def to_client(self, client_id, targets):
        return targets.flip(-1) if client_id == REVERSED else targets


@dataclass(kw_only=True, repr=False, eq=False)
class Aligned(DSFL):
    alignment = ReversedForOneClient()


def reversed_model(client_id):
    """The model of a client. The classes of one client have the reversed order."""
    model = client_model(client_id)
    if client_id == REVERSED:
        with torch.no_grad():
            model.classifier.weight.copy_(model.classifier.weight.flip(0))
            model.classifier.bias.copy_(model.classifier.bias.flip(0))
    return model


def examples(reverse: bool) -> FederatedDataset:
    clients = {name: rows(size, seed=number) for number, (name, size) in enumerate(SIZES.items())}
    if reverse:
        clients[REVERSED] = clients[REVERSED].map(lambda row: {"labels": 1 - row["labels"]})
    return FederatedDataset.from_dict(clients)


@pytest.mark.parametrize("serialize", [False, True])
@pytest.mark.sampled(1)
def test_reversed_classes_of_a_client_give_the_same_server(tmp_path, serialize) -> None:
    """The order of the classes changes the rounding of the client's gradients only."""
    plain = distillation_trainer(tmp_path / "a", DSFL(), train_dataset=examples(False), client_model_init=client_model)
    plain.train()
    aligned = distillation_trainer(
        tmp_path / "b", Aligned(), train_dataset=examples(True), client_model_init=reversed_model
    )
    aligned.engine.serialize = serialize
    aligned.train()
    for name, value in plain.exchange.read().items():
        torch.testing.assert_close(aligned.exchange.read()[name], value, rtol=0, atol=1e-6)
    assert plain.ledger.to_dict() == aligned.ledger.to_dict()
    first, second = (trainer.engine.worker.models.open(REVERSED).trainer.model for trainer in (plain, aligned))
    torch.testing.assert_close(first.classifier.weight, second.classifier.weight.flip(0), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_without_the_alignment_the_server_learns_other_targets(tmp_path) -> None:
    plain = distillation_trainer(tmp_path / "a", DSFL(), train_dataset=examples(False), client_model_init=client_model)
    plain.train()
    other = distillation_trainer(
        tmp_path / "b", DSFL(), train_dataset=examples(True), client_model_init=reversed_model
    )
    other.train()
    assert not same_weights(plain.model, other.model)


def test_identity_encodes_the_targets_once_for_all_clients() -> None:
    targets = torch.tensor([[0.25, 0.75]])
    assert isinstance(DSFL().alignment.encode_targets(targets, DSFL().encoding), dict)
    assert FedID().alignment.is_identity
    encoded = Aligned().alignment.encode_targets(targets, Aligned().encoding)
    assert torch.equal(encoded("a")["values"], targets)
    assert torch.equal(encoded(REVERSED)["values"], targets.flip(-1))
    lazy = Aligned().alignment.encode_targets(LazyRows(1, lambda indices: targets[indices]), Aligned().encoding)
    assert torch.equal(lazy(REVERSED)["values"], targets.flip(-1))


class Faulty(ReversedForOneClient):
    """Maps the predictions of one client with a faulty function."""

    def __init__(self, fault):
        self.fault = fault

    def to_server(self, client_id, logits):
        return self.fault(logits) if client_id == REVERSED else logits


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda logits: logits[:, :1], r"have the shape \(10, 1\); expected \(10, 2\)"),
        (lambda logits: logits[1:], r"have the shape \(9, 2\); expected \(10, 2\)"),
        (lambda logits: (logits - logits).log(), "prediction of requested row 0 contains NaN or infinite values"),
        (lambda logits: logits[:, torch.tensor([5, 6])], "IndexError"),
    ],
)
def test_client_whose_predictions_cannot_be_aligned_is_excluded(tmp_path, caplog, fault, message):
    @dataclass(kw_only=True, repr=False, eq=False)
    class WithFault(DSFL):
        alignment = Faulty(fault)

    record = Recorder()
    trainer = distillation_trainer(tmp_path, WithFault(), federation={"num_rounds": 1}, record=record)
    trainer.train()
    # The two other clients learn.
    assert sorted(reply.client_id for reply in record.received if isinstance(reply, Metrics)) == ["a", "c"]
    (excluded,) = [text for text in caplog.messages if "Excluded from the round" in text]
    assert re.search(rf"Client '{REVERSED}', round 1: .*{message}", excluded)


def test_method_that_sends_gradients_refuses_another_alignment():
    @dataclass(kw_only=True, repr=False, eq=False)
    class AlignedFedID(FedID):
        alignment = ReversedForOneClient()

    with pytest.raises(ValueError, match=r"AlignedFedID sends .* must be Alignment\(\), not ReversedForOneClient"):
        AlignedFedID()


# ---- A client with another vocabulary

PUBLIC = ["snow1 snow2 sand3", "sand1 sand0", "snow4 sand5 sand6 snow7 snow8"]
SERVER_TOKENS = [*SPECIAL, *WORDS["north"], *WORDS["south"]]
CLIENT_TOKENS = [*SPECIAL, "rain", *WORDS["south"], *WORDS["north"]]
# Positions in the texts on the server. The tokenizer of the client adds a token to each text.
COUNTS = [2, 1, 4]
KEPT = [row for row in range(sum(COUNTS) + len(COUNTS)) if row not in (2, 4, 9)]
COLUMNS = [CLIENT_TOKENS.index(token) for token in SERVER_TOKENS]


def client_tokenizer():
    found = tokenizer(CLIENT_TOKENS)
    found.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    return found


class OtherVocabulary(Alignment):
    supports_other_vocabularies = True

    def client_shape(self, client_id, shape):
        return shape if client_id == "north" else (len(KEPT) + len(COUNTS), len(CLIENT_TOKENS))

    def to_server(self, client_id, logits):
        return logits if client_id == "north" else logits[KEPT][:, COLUMNS]

    def to_client(self, client_id, targets):
        if client_id == "north":
            return targets
        rows = torch.full(self.client_shape(client_id, targets.shape), 1 / len(CLIENT_TOKENS))
        rows[KEPT] = torch.zeros(len(KEPT), len(CLIENT_TOKENS)).index_copy(1, torch.tensor(COLUMNS), targets)
        return rows


@dataclass(kw_only=True, repr=False, eq=False)
class AlignedTokens(DSFL):
    alignment = OtherVocabulary()


def logits_of(model, encode):
    with torch.no_grad():
        return torch.cat([model.eval()(torch.tensor([encode(text)["input_ids"]])).logits[0, :-1] for text in PUBLIC])


def test_client_with_another_vocabulary_and_other_positions_learns_the_mapped_targets(tmp_path):
    """With a learning rate of 0, the models do not change."""
    models = {"north": language_model(8), "south": language_model(24, len(CLIENT_TOKENS))}
    record = Recorder(serialize=True)
    trainer = record.trainer = FederatedTrainer(
        model=language_model(),
        processing_class=tokenizer(),
        task=LanguageModeling(),
        args=arguments(tmp_path, learning_rate=0.0),
        train_dataset={client_id: texts(client_id, 4) for client_id in models},
        public_dataset=Dataset.from_dict({"text": PUBLIC}),
        clients={
            "north": ClientSpec(model=models["north"]),
            "south": ClientSpec(model=models["south"], processing_class=client_tokenizer()),
        },
        federation=FederatedConfig(num_rounds=1, distillation=AlignedTokens()),
        callbacks=[record],
    )
    trainer.train()
    sent = {reply.client_id: reply.values["values"] for reply in record.received if isinstance(reply, Predictions)}
    north, south = logits_of(models["north"], tokenizer()), logits_of(models["south"], client_tokenizer())
    torch.testing.assert_close(sent, {"north": north, "south": south}, rtol=0, atol=1e-6)
    alignment, probabilities = OtherVocabulary(), [north.softmax(-1), south[KEPT][:, COLUMNS].softmax(-1)]
    q = (sum(probabilities) / 2 / 0.1).softmax(-1)
    losses = {
        client_id: soft_cross_entropy(logits, alignment.to_client(client_id, q)).item()
        for client_id, logits in (("north", north), ("south", south))
    }
    learned = {
        reply.client_id: reply.metrics["distillation_loss"] for reply in record.received if isinstance(reply, Metrics)
    }
    assert learned == pytest.approx(losses, rel=1e-6)
    server_loss = soft_cross_entropy(logits_of(language_model(), tokenizer()), q).item()
    logged = [entry.get("federated/server_distillation_loss") for entry in trainer.state.log_history]
    assert server_loss == pytest.approx(next(value for value in logged if value is not None), rel=1e-6)
