"""The card of a distillation names the method, the public rows and what clients revealed."""

from __future__ import annotations

import pytest
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.cards import RunRecord, render
from hf_federated.cards.tables import size


def trained(folder, method, **kwargs):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(folder),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        eval_dataset=rows(6, seed=2),
        public_dataset=rows(11, seed=3).remove_columns("labels"),
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
