"""LocalOnly: each client trains a model of its own, of which nobody else hears."""

from __future__ import annotations

import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer


def trained(tmp_path, seed_of_b=98, **others):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8, seed=97), "b": rows(12, seed=seed_of_b)},
        eval_dataset=FederatedDataset.from_dict({client_id: rows(6, seed=9) for client_id in "ab"}),
        federation=FederatedConfig(aggregation="local_only", evaluate_clients=True, **{"num_rounds": 2, **others}),
    )
    trainer.train()
    return trainer


def own(trainer, client_id):
    return trainer.engine.worker.models.open(client_id).exchange.read()


def test_a_client_hears_nothing_of_others_and_goes_on_from_where_it_was(tmp_path):
    trainer, other = trained(tmp_path / "a"), trained(tmp_path / "b", seed_of_b=5)
    assert same_weights(trainer.model, tiny_model())  # the server's model stays as it is
    assert all(torch.equal(value, own(other, "a")[name]) for name, value in own(trainer, "a").items())
    weights = [own(trainer, "a"), own(trainer, "b"), own(other, "b"), own(trained(tmp_path / "c", num_rounds=1), "a")]
    assert len({float(values["classifier.weight"][0, 0]) for values in weights}) == len(weights)


def test_each_clients_own_model_is_evaluated(tmp_path):
    trainer = trained(tmp_path)
    trainer.evaluate()
    losses = {client_id: metrics["eval_loss"] for client_id, metrics in trainer.client_metrics.items()}
    for client_id, loss in losses.items():
        model = tiny_model()
        model.load_state_dict(own(trainer, client_id), strict=False)
        inputs = {name: torch.tensor(values) for name, values in rows(6, seed=9).to_dict().items()}
        with torch.no_grad():
            expected = model.eval()(**inputs).loss
        assert loss == pytest.approx(float(expected), rel=1e-5)
    assert losses["a"] != losses["b"]
