"""FedPer: the body is averaged, and each client keeps its own head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from federations import build_federation
from peft import LoraConfig, get_peft_model
from tiny import rows, same_weights, tiny_model
from torch import nn

from hf_federated import FedAvg, FederatedCallback, FederatedDataset, FederatedTrainer, FedPer


HEAD = ["classifier.weight", "classifier.bias"]
TOKENS = [[3] * 6, [20] * 6] * 8
# The clients give equal examples opposite labels.
OPPOSITE = {
    "north": Dataset.from_dict({"input_ids": TOKENS, "labels": [0, 1] * 8}),
    "south": Dataset.from_dict({"input_ids": TOKENS, "labels": [1, 0] * 8}),
}


def lora() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(
    directory: Path, aggregation: Any, num_rounds: int = 5, learning_rate: float = 1e-2, **trainer: Any
) -> FederatedTrainer:
    found = build_federation(
        directory,
        OPPOSITE,
        num_rounds=num_rounds,
        federation={"aggregation": aggregation, "evaluate_clients": True},
        trainer={
            "eval_dataset": FederatedDataset.from_dict(OPPOSITE),
            "compute_metrics": accuracy,
            **trainer,
        },
        learning_rate=learning_rate,
    )
    found.train()
    return found


@pytest.mark.parametrize(("model", "learning_rate"), [(tiny_model, 1e-2), (lora, 0.1)])
def test_clients_with_opposite_labels_need_their_own_heads(tmp_path, model, learning_rate):
    """A model that all clients share is right for one client exactly where it is wrong for the other client."""
    results = {}
    for name in ("fedavg", "fedper"):
        trainer = train(tmp_path / name, name, learning_rate=learning_rate, model=model())
        results[name] = trainer.evaluate()["federated/eval_accuracy_mean"]
    assert results["fedavg"] == 0.5 and results["fedper"] == 1.0


def test_all_tensors_without_the_head_are_exchanged(tmp_path):
    trainer = build_federation(tmp_path, federation={"aggregation": "fedper"})
    assert trainer.exchange.local_names == HEAD and trainer.federation.keep_local == "head"
    assert {*trainer.exchange.names, *HEAD} == {name for name, _ in trainer.model.named_parameters()}


def test_patterns_select_other_local_tensors(tmp_path):
    kwargs = {"local": ["classifier*", "bert.pooler*"]}
    trainer = build_federation(tmp_path, federation={"aggregation": "fedper", "aggregation_kwargs": kwargs})
    assert len(trainer.exchange.local_names) == 4
    assert FedPer(**kwargs).settings() == {**kwargs, "weighting": "examples"}


class States(FederatedCallback):
    """Records the updates and the global states of each round."""

    def __init__(self) -> None:
        self.updates: list[dict[str, dict[str, torch.Tensor]]] = []
        self.states: list[dict[str, torch.Tensor]] = []

    def on_round_begin(self, args, state, control, **kwargs) -> None:
        self.updates.append({})

    def on_client_end(self, args, state, control, update, **kwargs) -> None:
        self.updates[-1][update.client_id] = {name: value.clone() for name, value in update.state.items()}

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        self.states.append({name: value.clone() for name, value in round.state.items()})


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_server_averages_the_body(tmp_path, weighting):
    clients, found = {"north": rows(8), "south": rows(4, seed=1)}, States()
    federation = {"aggregation": FedPer(weighting=weighting)}
    build_federation(tmp_path, clients, federation=federation, trainer={"callbacks": [found]}).train()
    weights = {name: len(data) if weighting == "examples" else 1 for name, data in clients.items()}
    for updates, state in zip(found.updates, found.states, strict=True):
        assert not set(state) & set(HEAD)
        for name, value in state.items():
            total = sum(weights[client_id] * update[name].double() for client_id, update in updates.items())
            assert torch.allclose(value.double(), total / sum(weights.values()), rtol=0, atol=1e-7)


def test_fedper_equals_fedavg_with_a_local_head(tmp_path):
    fedper = build_federation(tmp_path, federation={"aggregation": FedPer()})
    fedavg = build_federation(tmp_path, federation={"aggregation": FedAvg(), "keep_local": "head"})
    for trainer in (fedper, fedavg):
        trainer.train()
    assert same_weights(fedper.model, fedavg.model)
    assert fedper.ledger.to_dict() == fedavg.ledger.to_dict()


def test_saved_configuration_builds_the_same_federation(tmp_path):
    trainer = build_federation(tmp_path, federation={"aggregation": FedPer("classifier*")})
    trainer.save_model(tmp_path / "saved")
    config = type(trainer.federation).from_pretrained(tmp_path / "saved")
    assert config.aggregation == "fedper" and config.aggregation_kwargs == {"local": "classifier*"}
    again = build_federation(tmp_path, federation={**vars(config)})
    assert again.exchange.local_names == HEAD


def test_card_names_the_values_that_clients_keep(tmp_path):
    trainer = train(tmp_path, "fedper", num_rounds=1)
    trainer.create_model_card()
    card = " ".join((tmp_path / "README.md").read_text(encoding="utf-8").split())
    number = sum(parameter.numel() for parameter in trainer.model.classifier.parameters())
    assert f"Each client trained {number} further values (`keep_local`), which it kept and did not send." in card


@pytest.mark.parametrize("local", ["", [], 3, [3]])
def test_invalid_patterns_are_refused(local):
    with pytest.raises(ValueError, match="`local` is .*; set a pattern"):
        FedPer(local=local)
