"""Audits of pseudo-samples, and their results in the model card."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import arguments, rows, tiny_model

from hf_federated import FedDRS, FederatedConfig, FederatedTrainer
from hf_federated.audits import PseudoSampleAudit, nearest_tokens, plot_pseudo_samples
from hf_federated.cards import RunRecord, render
from hf_federated.distillation.pseudo_samples import word_embeddings


def test_nearest_token_of_a_word_embedding_is_its_token():
    weight = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(40, (3, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(nearest_tokens(weight[tokens] + 1e-3, weight, batch_size=4), tokens)


def test_nearest_token_uses_euclidean_distance():
    weight = torch.tensor([[1.0, 0.0], [10.0, 0.0], [0.0, 1.0]])
    # The second embedding has the largest inner product with the query, and the largest distance.
    assert nearest_tokens(torch.tensor([[1.2, 0.1]]), weight).tolist() == [0]


def samples(starts, ends, weight):
    return {"starts": weight[torch.tensor(starts)], "embeddings": weight[torch.tensor(ends)] + 1e-4}


def test_overlaps_are_fractions_of_the_positions_of_moved_samples():
    weight = torch.eye(8)
    clients = {"a": {"input_ids": [[1, 2], [3]]}, "b": {"input_ids": [[4, 5]]}}
    pseudo_samples = {
        "a": samples([[0, 0, 1, 7]], [[1, 2, 3, 7]], weight),
        "b": samples([[4, 0, 0, 0]], [[4, 1, 6, 6]], weight),
    }
    # A random sample is not moved and is not counted.
    for name in ("starts", "embeddings"):
        pseudo_samples["b"][name] = torch.cat([pseudo_samples["b"][name], weight[torch.tensor([[1, 1, 1, 1]])]])
    overlaps = PseudoSampleAudit(FedDRS(), clients).measure(pseudo_samples, weight)
    assert (overlaps["a"].own, overlaps["a"].others, overlaps["a"].start) == (3 / 4, 1 / 4, 1 / 4)
    assert (overlaps["b"].own, overlaps["b"].others, overlaps["b"].start) == (1 / 4, 0.0, 1 / 4)
    assert (overlaps["a"].moved, overlaps["b"].moved) == (3 / 4, 3 / 4)


def test_overlap_with_other_clients_is_nan_for_a_single_client():
    weight = torch.eye(4)
    audit = PseudoSampleAudit(FedDRS(), {"a": {"input_ids": [[1]]}})
    assert math.isnan(audit.measure({"a": samples([[0]], [[1]], weight)}, weight)["a"].others)


@pytest.fixture
def audited(tmp_path):
    algorithm = FedDRS(num_samples=4, sample_length=5, num_steps=20, step_size=5.0)
    clients = {"a": rows(8), "b": rows(8, seed=1)}
    audit = PseudoSampleAudit(algorithm, clients)
    trainer = FederatedTrainer(
        model=tiny_model(initializer_range=0.3),
        args=arguments(tmp_path),
        train_dataset=clients,
        callbacks=[audit],
        federation=FederatedConfig(num_rounds=2, distillation=algorithm),
    )
    trainer.train()
    return trainer, audit


def test_audit_after_the_last_round_and_its_results_in_the_card(audited, tmp_path):
    trainer, audit = audited
    assert set(audit.results) == {"a", "b"}
    assert all(0 <= overlap.own <= 1 and overlap.moved > 0 for overlap in audit.results.values())
    starts = audit.algorithm.samples["a"]["starts"]
    tokens = nearest_tokens(starts, word_embeddings(trainer.model))
    assert torch.equal(word_embeddings(trainer.model)[tokens], starts)
    record = RunRecord.from_trainer(trainer)
    text = render(record)
    assert "trained with federated learning (`hf_federated`, FedDRS)" in text
    assert "| number of examples | class | server | none |" in text and "sent back the trainable parameters" in text
    assert (
        "higher than both, the pseudo-samples reveal information about the client's text" in text
        and f"{audit.results['a'].own:.4g}"[:5] in text
    )
    above = sum(overlap.own > max(overlap.others, overlap.start) for overlap in audit.results.values())
    assert f"This is the case for {above or 'none'} of 2 clients." in text
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == text


def test_run_without_audit_keeps_no_samples_and_has_no_section(tmp_path):
    algorithm = FedDRS(num_samples=2, sample_length=3, num_steps=1)
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        federation=FederatedConfig(num_rounds=1, distillation=algorithm),
    )
    trainer.train()
    assert algorithm.samples == {}
    assert "gradients of the clients' models" not in render(RunRecord.from_trainer(trainer))


def test_plot_is_written_without_random_draws(tmp_path):
    pytest.importorskip("matplotlib")
    generator = torch.Generator().manual_seed(0)
    groups = {name: torch.randn(6, 5, 4, generator=generator) for name in ("start", "target", "adversarial")}
    before = torch.get_rng_state()
    plot_pseudo_samples(torch.randn(5000, 4, generator=generator), groups, tmp_path / "samples.png", "client a")
    assert torch.equal(torch.get_rng_state(), before)
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")
