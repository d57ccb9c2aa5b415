"""FedAUX: scores of public examples by their similarity to private examples, and the ensemble that uses the scores."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from distillation_setup import SIZES, Recorder, distillation_trainer
from peft import LoraConfig, get_peft_model
from test_pseudo_samples import tiny_llama
from tiny import VOCAB_SIZE, rows, same_weights, tiny_model
from torch import nn
from transformers import RobertaConfig, RobertaForSequenceClassification, T5Config, T5ForSequenceClassification

from hf_federated import FedAUX, FederatedCallback, Postprocessor, RoundFailedError
from hf_federated.clients.features import base_model_of, pooled_features
from hf_federated.distillation.certainty import certainty, fit_certainty, noise_std, scale_into_unit_ball, sensitivity
from hf_federated.distillation.fedaux import FedAUXPart
from hf_federated.messages import ClientUpdate
from hf_federated.methods import ClientContext


def client_of(algorithm):
    """The client half of the algorithm."""
    return algorithm.client(ClientContext("a", None))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def updates(record):
    return [message for message in record.received if isinstance(message, ClientUpdate)]


def scores_of(record):
    """Each client's scores. A client must send the same scores in every round."""
    scores = {}
    for update in updates(record):
        assert torch.equal(scores.setdefault(update.client_id, update.extra["certainty"]), update.extra["certainty"])
    return scores


# ---- Scores


def test_scale_into_the_unit_ball_does_not_depend_on_private_examples():
    own, public = 3 * normal(40, 5), normal(30, 5, seed=1)
    scaled_own, scaled_public = scale_into_unit_ball(own, public)
    norms = torch.cat([scaled_own, scaled_public]).norm(dim=1)
    assert norms.max() == pytest.approx(1) and bool((scaled_own.norm(dim=1) > 1 - 1e-9).any())
    largest = public.norm(dim=1).max()
    torch.testing.assert_close(scaled_public * largest, public)
    short = own.norm(dim=1) <= largest
    assert short.any() and not short.all()
    torch.testing.assert_close((scaled_own * largest)[short], own[short])
    assert torch.equal(scale_into_unit_ball(100 * own, public)[1], scaled_public)


@pytest.mark.parametrize("regularization", [0.01, 1e-4])
def test_certainty_weights_minimize_the_regularized_log_loss(regularization):
    own, public = scale_into_unit_ball(normal(30, 8) + 0.5, normal(70, 8, seed=1))
    weights = fit_certainty(own, public, regularization).requires_grad_()
    logits = torch.cat([own, public]) @ weights
    labels = torch.cat([torch.ones(30), torch.zeros(70)]).double()
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels) + regularization / 2 * weights.square().sum()
    (gradient,) = torch.autograd.grad(loss, weights)
    assert gradient.norm() < 1e-8 and weights.norm() > 0.1


def test_one_private_example_moves_the_weights_by_at_most_the_sensitivity():
    public = normal(20, 4, seed=1)
    own = normal(10, 4)
    bound, moved = sensitivity(30, 0.01), []
    weights = fit_certainty(*scale_into_unit_ball(own, public), 0.01)
    for seed in range(2, 8):
        other = own.clone()
        other[0] = 100 * normal(4, seed=seed)
        moved.append(float((fit_certainty(*scale_into_unit_ball(other, public), 0.01) - weights).norm()))
    assert bound == 2 / (30 * 0.01)
    assert 0.02 * bound < max(moved) <= bound


def test_noise_has_the_standard_deviation_of_the_formula():
    own, public = normal(30, 2000), normal(70, 2000, seed=1)
    # The noise is so small that no sigmoid is 0 or 1.
    plain, noisy = FedAUX(regularization=1.0), FedAUX(regularization=1.0, dp_epsilon=0.5, dp_delta=1e-5)
    expected = math.sqrt(2 * math.log(1.25 / 1e-5)) * 2 / (100 * 1.0) / 0.5
    assert noise_std(100, 1.0, 0.5, 1e-5) == pytest.approx(expected)
    assert noise_std(100, 0.01, 0.5, 1e-5) == pytest.approx(100 * expected)
    _, scaled = scale_into_unit_ball(own, public)
    differences = []
    # Seeds other than the seeds of the features.
    for seed in range(100, 140):
        logits = [
            (client_of(algorithm).scores(own, public, seed).double() - 1e-8).logit() for algorithm in (plain, noisy)
        ]
        differences.append(logits[1] - logits[0])
    # ⟨noise, h⟩ has the standard deviation σ ‖h‖. The values of 70 rows in 2000 dimensions are nearly independent.
    found = torch.cat([difference / scaled.norm(dim=1) for difference in differences])
    assert float(found.std()) == pytest.approx(expected, rel=0.05)
    assert float(found.mean()) == pytest.approx(0, abs=expected * 0.1)


def test_noise_depends_on_the_client_seed_and_not_on_the_global_generator():
    own, public = normal(6, 4), normal(9, 4, seed=1)
    algorithm = FedAUX(dp_epsilon=0.9, dp_delta=1e-3)
    before = torch.random.get_rng_state()
    a, again, b = (client_of(algorithm).scores(own, public, seed) for seed in (1, 1, 2))
    assert torch.equal(a, again) and not torch.equal(a, b)
    assert torch.equal(torch.random.get_rng_state(), before)


def tokens(low, high, num_rows, seed):
    drawn = np.random.default_rng(seed).integers(low, high, size=(num_rows, 6))
    return Dataset.from_dict({"input_ids": drawn.tolist(), "labels": (drawn[:, 0] % 2).tolist()})


def test_public_examples_similar_to_private_examples_have_higher_scores(tmp_path):
    half = VOCAB_SIZE // 2
    low, high = (1, half), (half, VOCAB_SIZE)
    public = [*tokens(*low, 12, seed=5)["input_ids"], *tokens(*high, 12, seed=6)["input_ids"]]
    record = Recorder()
    distillation_trainer(
        tmp_path,
        "fedaux",
        record=record,
        train_dataset={"low": tokens(*low, 20, seed=1), "high": tokens(*high, 20, seed=2)},
        public_dataset=Dataset.from_dict({"input_ids": public}),
        federation={"local_epochs": 1},
    ).train()
    scores = scores_of(record)
    assert all(bool(((0 < found) & (found < 1)).all()) for found in scores.values())
    assert scores["low"][:12].mean() > scores["low"][12:].mean() + 0.05
    assert scores["high"][12:].mean() > scores["high"][:12].mean() + 0.05


# ---- Features


def tiny_roberta():
    config = RobertaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=20,
    )
    return RobertaForSequenceClassification(config)


def tiny_t5_classifier():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForSequenceClassification(T5Config(vocab_size=VOCAB_SIZE, **sizes))


def tiny_lora():
    model = tiny_model()
    return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


@pytest.mark.parametrize("build", [tiny_model, tiny_roberta, tiny_llama, tiny_t5_classifier, tiny_lora])
def test_features_are_means_over_the_attended_positions(build):
    model = build().eval()
    short = torch.tensor([[5, 9, 7]])
    padded = {
        "input_ids": torch.tensor([[5, 9, 7, 0, 0], [3, 4, 8, 2, 6]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    }
    with torch.no_grad():
        features = pooled_features(model, padded)
        hidden = base_model_of(model)(input_ids=short).last_hidden_state
        torch.testing.assert_close(pooled_features(model, {"input_ids": short}), hidden.mean(1))
    assert features.shape == (2, 16)
    torch.testing.assert_close(features[0], hidden[0].mean(0), rtol=1e-4, atol=1e-5)


def test_features_are_means_of_the_hidden_states_before_the_head():
    seen = []
    model = tiny_model().eval()
    model.bert.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    batch = {"input_ids": torch.tensor([[5, 9, 7]])}
    with torch.no_grad():
        model(**batch)
        features = pooled_features(model, batch)
    torch.testing.assert_close(features, seen[0].mean(1))


def test_adapter_layers_affect_the_features():
    model = tiny_lora().eval()
    batch = {"input_ids": torch.tensor([[5, 9, 7]])}
    with torch.no_grad():
        before = pooled_features(model, batch)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1.0)
        assert not torch.allclose(before, pooled_features(model, batch), atol=1e-3)


# ---- Rounds


def test_equal_scores_give_the_result_of_feddf(tmp_path, monkeypatch):
    federation = {"num_rounds": 1, "local_epochs": 1}
    feddf = distillation_trainer(tmp_path / "a", "feddf", federation=federation)
    feddf.train()
    compute_scores = FedAUXPart.scores

    def equal(self, own, public, seed):
        return torch.full_like(compute_scores(self, own, public, seed), 0.25)

    monkeypatch.setattr(FedAUXPart, "scores", equal)
    fedaux = distillation_trainer(tmp_path / "b", "fedaux", federation=federation)
    fedaux.train()
    # A product with 0.25 is exact, so the mean is exact too.
    assert same_weights(feddf.model, fedaux.model)
    monkeypatch.undo()
    unequal = distillation_trainer(tmp_path / "c", "fedaux", federation=federation)
    unequal.train()
    assert not same_weights(feddf.model, unequal.model)


def test_server_targets_are_the_mean_of_logits_weighted_by_certainty(tmp_path):
    record = Recorder()
    trainer = distillation_trainer(tmp_path, "fedaux", record=record, federation={"num_rounds": 1})
    server_targets = []
    trainer.distillation.server_loss = lambda logits, targets: server_targets.append(targets) or logits.sum() * 0
    trainer.train()
    weighted = sum(update.extra["weighted_logits"].double() for update in updates(record))
    total = sum(update.extra["certainty"].double() for update in updates(record))
    teacher = weighted / total.unsqueeze(-1)
    assert len(updates(record)) == len(SIZES)
    assert all(any(torch.allclose(row.double(), other) for other in teacher) for row in torch.cat(server_targets))


class ClearClientStates(FederatedCallback):
    """Clear the state that clients keep, after each round."""

    def on_round_end(self, args, state, control, **kwargs):
        self.trainer.engine.worker.models.clear()


def test_scores_use_the_initial_model_also_for_clients_that_join_later(tmp_path):
    all_clients, one_client, cleared = Recorder(), Recorder(), Recorder()
    settings = {"dp_epsilon": 0.5, "dp_delta": 1e-5, "max_score_rows": 5}
    once = {"num_rounds": 1, "local_epochs": 1}
    distillation_trainer(tmp_path / "a", "fedaux", settings, record=all_clients, federation=once).train()
    federation = {"num_rounds": 3, "clients_per_round": 1, "local_epochs": 1}
    distillation_trainer(tmp_path / "b", "fedaux", settings, record=one_client, federation=federation).train()
    trainer = distillation_trainer(tmp_path / "c", "fedaux", settings, record=cleared, federation={"local_epochs": 1})
    callback = ClearClientStates()
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    expected = scores_of(all_clients)
    first_rounds = {update.client_id: update.round for update in reversed(updates(one_client))}
    assert max(first_rounds.values()) > 0
    for record in (one_client, cleared):
        assert all(torch.equal(expected[client_id], found) for client_id, found in scores_of(record).items())


def test_clients_compute_their_scores_once(tmp_path, monkeypatch):
    seen = []
    compute_scores = FedAUXPart.scores

    def recorded(self, own, public, seed):
        seen.append((len(own), len(public)))
        return compute_scores(self, own, public, seed)

    monkeypatch.setattr(FedAUXPart, "scores", recorded)
    distillation_trainer(tmp_path, "fedaux", {"max_score_rows": 6}, federation={"local_epochs": 1}).train()
    assert seen == [(min(size, 6), 10) for size in SIZES.values()]


@pytest.mark.parametrize("build", [tiny_llama, tiny_lora])
def test_llama_and_lora_models_train(tmp_path, build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
    trainer = distillation_trainer(tmp_path, "fedaux", model=model, server_dataset=None, federation={"num_rounds": 1})
    trainer.train()
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_resume_gives_identical_weights(tmp_path):
    federation = {"num_rounds": 2, "clients_per_round": 2, "local_epochs": 1}
    settings = {"dp_epsilon": 0.5, "dp_delta": 1e-5}
    args = {"save_strategy": "steps", "save_steps": 1}
    record = Recorder()
    uninterrupted = distillation_trainer(
        tmp_path / "a", "fedaux", settings, federation=federation, args=args, record=record
    )
    uninterrupted.train()
    cohorts = [{update.client_id for update in updates(record) if update.round == round} for round in range(2)]
    # The second cohort has one client from the first cohort and one new client.
    assert cohorts[0] & cohorts[1] and cohorts[1] - cohorts[0]
    resumed = distillation_trainer(tmp_path / "b", "fedaux", settings, federation=federation, args=args)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert same_weights(uninterrupted.model, resumed.model)
    assert uninterrupted.ledger.to_dict() == resumed.ledger.to_dict()


# ---- Rejected input


class ChangeExtra(Postprocessor):
    """Change the extra tensors in the update of client `b`, on the client's side."""

    def __init__(self, **changes):
        self.changes = changes

    def client_send(self, update, message, memory):
        if update.client_id != "b":
            return update
        extra = {name: self.changes.get(name, lambda value: value)(value) for name, value in update.extra.items()}
        return dataclasses.replace(update, extra=extra)


class RejectionRecorder(FederatedCallback):
    """Record the rejected clients of each round, with the reasons."""

    def __init__(self):
        self.reasons = []

    def on_round_end(self, args, state, control, round, **kwargs):
        self.reasons.append(dict(round.rejected))


def in_row(row, number):
    def change(scores):
        scores = scores.clone()
        scores[row] = number
        return scores

    return change


@pytest.fixture(scope="module")
def without_b(tmp_path_factory):
    """The server's model after a round with clients `a` and `c` only."""
    trainer = one_round_trainer(tmp_path_factory.mktemp("without"), ["a", "c"])
    trainer.train()
    return trainer.model


def one_round_trainer(directory, client_ids=tuple(SIZES), **kwargs):
    """Build a trainer for one round with the given clients."""
    federation = {"num_rounds": 1, "local_epochs": 1}
    clients = {client_id: rows(SIZES[client_id], seed=ord(client_id)) for client_id in client_ids}
    return distillation_trainer(directory, "fedaux", federation=federation, train_dataset=clients, **kwargs)


RANGE = r"a score is positive and at most 1 \(1 \+ `score_offset`\)"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"certainty": in_row(3, math.nan)}, "'certainty' holds NaN or infinite values"),
        ({"certainty": in_row(3, math.inf)}, "'certainty' holds NaN or infinite values"),
        ({"weighted_logits": in_row(3, math.nan)}, "'weighted_logits' holds NaN or infinite values"),
        (
            {"certainty": in_row(3, -0.25)},
            rf"score of public example 3 is -0.25, and 1 of 10 scores are out of range; {RANGE}",
        ),
        (
            {"certainty": torch.zeros_like},
            rf"score of public example 0 is 0, and 10 of 10 scores are out of range; {RANGE}",
        ),
        (
            {"certainty": in_row(7, 0.0)},
            rf"score of public example 7 is 0, and 1 of 10 scores are out of range; {RANGE}",
        ),
        (
            {"certainty": in_row(9, 1.5)},
            rf"score of public example 9 is 1.5, and 1 of 10 scores are out of range; {RANGE}",
        ),
        ({"certainty": lambda scores: scores[1:]}, r"'certainty' has shape \(9,\), expected \(10,\)"),
        ({"certainty": lambda scores: scores[:, None]}, r"'certainty' has shape \(10, 1\), expected \(10,\)"),
        ({"certainty": torch.Tensor.double}, "'certainty' is torch.float64, expected torch.float32"),
    ],
)
@pytest.mark.sampled(4)
def test_client_with_invalid_scores_is_left_out_and_the_round_continues(tmp_path, without_b, changes, words):
    rejected = RejectionRecorder()
    trainer = one_round_trainer(tmp_path, postprocessors=[ChangeExtra(**changes)])
    trainer.add_callback(rejected)
    trainer.train()
    (reasons,) = rejected.reasons
    assert list(reasons) == ["b"]
    assert re.match(f"Client 'b', round 1, additional tensors: .*{words}", reasons["b"])
    assert same_weights(trainer.model, without_b)


def test_round_fails_when_all_scores_are_invalid(tmp_path):
    trainer = one_round_trainer(tmp_path, ["b"], postprocessors=[ChangeExtra(certainty=torch.zeros_like)])
    with pytest.raises(RoundFailedError, match="1 of 1 clients.*'b', round 1, .*score of public example 0 is 0"):
        trainer.train()


@pytest.mark.parametrize(("offset", "dtype"), [(0.0045, torch.bfloat16), (1e-8, torch.float32)])
def test_largest_possible_score_is_accepted_after_the_cast(offset, dtype):
    public = torch.tensor([[1.0]], dtype=torch.float64)
    score = certainty(torch.tensor([1e3], dtype=torch.float64), public, offset).to(dtype).to(torch.float32)
    FedAUX(score_offset=offset).check_extra({"certainty": score, "weighted_logits": 1e6 * score[:, None]})


def test_huge_logits_are_refused():
    """The mean of the logits would be infinite if the scores are small."""
    extra = {"certainty": torch.full((2,), 1e-3), "weighted_logits": torch.zeros(2, 3)}
    FedAUX().check_extra(extra)
    extra["weighted_logits"][1, 2] = -1e4
    with pytest.raises(ValueError, match=r"a logit of magnitude 1e\+07; at most 1e\+06 is allowed"):
        FedAUX().check_extra(extra)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dp_epsilon": 0.5}, "dp_epsilon=0.5 and dp_delta=None: differential privacy needs both"),
        ({"dp_delta": 1e-5}, "dp_epsilon=None and dp_delta=1e-05: differential privacy needs both"),
        ({"dp_epsilon": 1.0, "dp_delta": 1e-5}, "`dp_epsilon` is 1.0; .* between 0 and 1"),
        ({"dp_epsilon": 0.5, "dp_delta": 0.0}, "`dp_delta` is 0.0; .* between 0 and 1"),
        ({"score_offset": 0.0}, "`score_offset` is 0.0; it must be positive"),
        ({"score_offset": -1e-8}, "`score_offset` is -1e-08; it must be positive"),
        ({"regularization": 0.0}, "`regularization` is 0.0; it must be positive"),
        ({"regularization": math.nan}, "`regularization` is nan; it must be positive"),
        ({"max_score_rows": 0}, "`max_score_rows` is 0; it must be at least 1"),
        ({"top_k": 1}, "`top_k` would have no effect on FedAUX"),
        ({"client_epochs": 2}, "`client_epochs` would have no effect on FedAUX"),
    ],
)
def test_invalid_settings_are_rejected(settings, words):
    with pytest.raises(ValueError, match=words):
        FedAUX(**settings)


def test_streaming_train_dataset_is_rejected(tmp_path):
    stream = rows(8).to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    with pytest.raises(
        ValueError, match=r"the stream \(IterableDataset\) of client 'b' .*'fedaux': the method compares"
    ):
        distillation_trainer(
            tmp_path,
            "fedaux",
            train_dataset={"a": rows(8), "b": stream},
            federation={"local_steps": 2},
        )


class Bare(nn.Module):
    """A classifier that is no `PreTrainedModel`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, 2)

    def forward(self, input_ids, labels=None):
        return {"logits": self.embedding(input_ids).mean(1)}


def test_model_without_a_base_model_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="model is a Bare, but features require a PreTrainedModel"):
        distillation_trainer(tmp_path, "fedaux", model=Bare())


def test_hidden_states_without_positions_are_rejected():
    class Odd(nn.Module):
        def forward(self, input_ids, attention_mask):
            return (torch.zeros(len(input_ids), 16),)

    model = tiny_model()
    model.bert = Odd()
    with pytest.raises(
        ValueError, match=r"Odd returned hidden states of shape \(2, 16\) for an attention mask of shape \(2, 3\)"
    ):
        pooled_features(model, {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(2, 3).long()})


def test_missing_scikit_learn_is_reported_when_the_trainer_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"FedAUX needs scikit-learn.*hf-federated\[metrics\]"):
        FedAUX().check_model(tiny_model())


def test_resume_with_other_score_settings_is_rejected(tmp_path):
    args = {"save_strategy": "steps", "save_steps": 1}
    distillation_trainer(tmp_path, "fedaux", federation={"num_rounds": 1}, args=args).train()
    other = distillation_trainer(tmp_path, "fedaux", {"regularization": 0.1}, federation={"num_rounds": 2}, args=args)
    with pytest.raises(
        ValueError, match=r"distillation: 'FedAUX\(regularization=0.1\)' in this run, 'FedAUX\(\)' in the checkpoint"
    ):
        other.train(resume_from_checkpoint=True)
