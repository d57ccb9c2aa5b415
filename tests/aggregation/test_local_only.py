"""LocalOnly: each client trains its own model and shares nothing."""

from __future__ import annotations

import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer


def trained(tmp_path, client_b_seed=98, **options):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8, seed=97), "b": rows(12, seed=client_b_seed)},
        eval_dataset=FederatedDataset.from_dict({client_id: rows(6, seed=9) for client_id in "ab"}),
        federation=FederatedConfig(aggregation="local_only", evaluate_clients=True, **{"num_rounds": 2, **options}),
    )
    trainer.train()
    return trainer


def client_state(trainer, client_id):
    return trainer.engine.worker.models.open(client_id).exchange.read()


def test_client_training_is_independent_of_other_clients_and_continues_across_rounds(tmp_path):
    trainer, other = trained(tmp_path / "a"), trained(tmp_path / "b", client_b_seed=5)
    assert same_weights(trainer.model, tiny_model())  # the model of the server does not change
    assert all(
        torch.equal(value, client_state(other, "a")[name]) for name, value in client_state(trainer, "a").items()
    )
    weights = [
        client_state(trainer, "a"),
        client_state(trainer, "b"),
        client_state(other, "b"),
        client_state(trained(tmp_path / "c", num_rounds=1), "a"),
    ]
    assert len({float(values["classifier.weight"][0, 0]) for values in weights}) == len(weights)


def test_evaluation_uses_the_model_of_each_client(tmp_path):
    trainer = trained(tmp_path)
    trainer.evaluate()
    losses = {client_id: metrics["eval_loss"] for client_id, metrics in trainer.client_metrics.items()}
    for client_id, loss in losses.items():
        model = tiny_model()
        model.load_state_dict(client_state(trainer, client_id), strict=False)
        inputs = {name: torch.tensor(values) for name, values in rows(6, seed=9).to_dict().items()}
        with torch.no_grad():
            expected = model.eval()(**inputs).loss
        assert loss == pytest.approx(float(expected), rel=1e-5)
    assert losses["a"] != losses["b"]
