"""The card of a distillation names the method, the public rows and what clients revealed."""

from __future__ import annotations

import pytest
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.cards import RunRecord, render
from hf_federated.cards.tables import size


def trained(folder, method, public=True, **kwargs):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(folder),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        eval_dataset=rows(6, seed=2),
        public_dataset=rows(11, seed=3).remove_columns("labels") if public else None,
        federation=FederatedConfig(num_rounds=2, distillation=method, distillation_kwargs=kwargs),
    )
    trainer.train()
    return trainer


def test_the_card_says_what_travelled_and_what_stayed(tmp_path):
    trainer = trained(tmp_path, "dsfl", sharpening_temperature=0.5)
    record = RunRecord.from_trainer(trainer)
    text = render(record)
    assert "trained federatedly with `hf_federated` (DSFL)" in text
    assert "DSFL(sharpening_temperature=0.5)" in text
    assert "predictions of 11 public rows" in text and "stayed with the clients" in text
    assert f"together sent {size(trainer.ledger.bytes_up)} and received {size(trainer.ledger.bytes_down)}" in text
    assert "dsfl" in text.split("---")[1]
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == text


@pytest.mark.parametrize(("method", "said"), [("feddf", "also sent the parameters"), ("feded", "They received those")])
def test_the_card_says_where_parameters_travelled_too(tmp_path, method, said):
    assert said in render(RunRecord.from_trainer(trained(tmp_path, method)))


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({}, "(without noise)"),
        ({"dp_epsilon": 0.5, "dp_delta": 1e-5}, "with noise for ε=0.5 and δ=1e-05, which hold"),
    ],
)
def test_the_card_says_that_scores_of_public_rows_travelled(tmp_path, privacy, said):
    record = RunRecord.from_trainer(trained(tmp_path, "fedaux", **privacy))
    text = render(record)
    assert "predictions of 11 public rows" in text and "also sent the parameters" in text
    assert "Beside these it sent a score of each public row" in text and said in text
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == text


def test_the_card_of_a_method_without_public_rows_says_what_travelled(tmp_path):
    small = {"num_samples": 3, "sample_length": 4, "num_steps": 1}
    text = render(RunRecord.from_trainer(trained(tmp_path, "feddrs", public=False, **small)))
    assert "a sampled client received and sent back the trainable parameters" in text
    assert "how many rows of each label it has" in text and "public row" not in text
