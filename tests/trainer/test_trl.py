"""`federate()` with TRL trainers, whose constructors prepare the dataset. Each client's dataset is prepared once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from language import SPECIAL, WORDS, language_model, preferences, texts, tokenizer
from peft import LoraConfig, PeftModel
from tiny import same_weights

from hf_federated import FederatedConfig, FederatedDataset, federate


trl = pytest.importorskip("trl")

LORA = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def arguments(config_class: type, output_dir: Path, **kwargs: Any) -> Any:
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_length": 16,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "epoch",
        **kwargs,
    }
    return config_class(**values)


def base_weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_parameters() if "lora_" not in name}


class CountingSFTTrainer(trl.SFTTrainer):
    """Records the name and the number of examples of each raw dataset, and the prepared training datasets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.prepared: list[tuple[str, int]] = []
        self.loaded: list[Dataset] = []
        super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset, *args, **kwargs):
        if "input_ids" not in dataset.column_names:  # `evaluate` also passes prepared datasets, which TRL leaves alone
            self.prepared.append((args[-1], len(dataset)))
        return super()._prepare_dataset(dataset, *args, **kwargs)

    def get_train_dataloader(self):
        self.loaded.append(self.train_dataset)
        return super().get_train_dataloader()


CLIENTS = {"north": texts("north", 10), "south": texts("south", 6)}


def sft(
    output_dir: Path, clients: Any = CLIENTS, eval_dataset: Any = None, federation: Any = None, **kwargs: Any
) -> Any:
    options = {"peft_config": LORA} | {name: kwargs.pop(name) for name in ("peft_config",) if name in kwargs}
    return federate(CountingSFTTrainer)(
        model=language_model(),
        args=arguments(trl.SFTConfig, output_dir, **kwargs),
        train_dataset=clients,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        federation=FederatedConfig(num_rounds=2, **(federation or {})),
        **options,
    )


def test_sft_with_lora_trains_adapters_over_two_clients(tmp_path) -> None:
    eval_clients = FederatedDataset.from_dict({"north": texts("north", 3), "south": texts("south", 2)})
    trainer = sft(tmp_path, eval_dataset=eval_clients, eval_strategy="epoch", federation={"evaluate_clients": True})
    assert isinstance(trainer.model, PeftModel)
    before = base_weights(trainer.model)
    output = trainer.train()
    assert output.global_step == 2
    # The constructor prepares the first client's examples. The other client's examples are prepared on first access.
    assert [entry for entry in trainer.prepared if entry[0] == "train"] == [("train", 10), ("train", 6)]
    after = base_weights(trainer.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all("lora_" in name for name in trainer.exchange.names)
    assert any(value.abs().sum() > 0 for name, value in trainer.model.named_parameters() if "lora_B" in name)
    rounds = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(0 <= entry["mean_token_accuracy"] <= 1 for entry in rounds)
    assert set(trainer.client_metrics) == {"north", "south"}
    assert "federated/eval_loss_mean" in trainer.evaluate()


def test_evaluation_examples_of_each_client_are_prepared_once(tmp_path) -> None:
    eval_clients = FederatedDataset.from_dict({"north": texts("north", 3), "south": texts("south", 2)})
    trainer = sft(tmp_path, eval_dataset=eval_clients, eval_strategy="epoch", federation={"evaluate_clients": True})
    trainer.train()
    assert len([entry for entry in trainer.state.log_history if "federated/eval_loss_mean" in entry]) == 2
    # The constructor prepares the examples of all clients together for the evaluation of the server.
    assert [entry for entry in trainer.prepared if entry[0] == "eval"] == [("eval", 5), ("eval", 3), ("eval", 2)]


class MapsDataset(trl.SFTTrainer):
    """Changes the dataset before TRL prepares it."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        train_dataset = train_dataset.map(lambda row: {"text": row["text"] + " snow0"})
        super().__init__(*args, train_dataset=train_dataset, **kwargs)


def test_dataset_change_that_cannot_be_repeated_for_other_clients_is_refused(tmp_path) -> None:
    with pytest.raises(
        ValueError, match="FederatedMapsDataset uses its dataset .*the constructor replaced `train_dataset`"
    ):
        federate(MapsDataset)(
            model=language_model(),
            args=arguments(trl.SFTConfig, tmp_path),
            train_dataset=CLIENTS,
            processing_class=tokenizer(),
        )


def test_packing_does_not_mix_examples_of_clients(tmp_path) -> None:
    trainer = sft(tmp_path, packing=True, max_length=12, peft_config=None)
    trainer.train()
    words = [*SPECIAL, *WORDS["north"], *WORDS["south"]]
    tokens = {client_id: {words.index(word) for word in WORDS[client_id]} for client_id in CLIENTS}
    trained = []
    for dataset in trainer.loaded:
        packed = [token for row in dataset["input_ids"] for token in row]
        (client_id,) = [name for name in CLIENTS if not tokens[name].isdisjoint(packed)]
        assert len(dataset) < len(CLIENTS[client_id])
        trained.append(client_id)
    assert sorted(trained) == sorted([*CLIENTS] * 2)  # in two rounds


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "lora"])
def test_sft_with_one_client_equals_the_plain_trainer(tmp_path, peft_config) -> None:
    examples = texts("north", 10)
    plain = trl.SFTTrainer(
        model=language_model(),
        args=arguments(trl.SFTConfig, tmp_path / "plain", num_train_epochs=2),
        train_dataset=examples,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    plain.train()
    settings = {"client_optimizer_state": "carry"}
    federated = sft(tmp_path / "federated", clients=examples, federation=settings, peft_config=peft_config)
    federated.train()
    assert same_weights(plain.model, federated.model)


class ScoringDPOTrainer(trl.DPOTrainer):
    """Records the number of examples of each scored dataset, and the datasets of the data loaders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.scored: list[int] = []
        self.loaded: list[Dataset] = []
        super().__init__(*args, **kwargs)

    def _precompute_ref_logps(self, dataset, *args, **kwargs):
        self.scored.append(len(dataset))
        return super()._precompute_ref_logps(dataset, *args, **kwargs)

    def get_train_dataloader(self):
        self.loaded.append(self.train_dataset)
        return super().get_train_dataloader()


def dpo(output_dir: Path, **kwargs: Any) -> Any:
    return federate(ScoringDPOTrainer)(
        model=language_model(),
        args=arguments(trl.DPOConfig, output_dir, **kwargs),
        train_dataset={"north": preferences("north", 9), "south": preferences("south", 6)},
        processing_class=tokenizer(),
        peft_config=LORA,
        federation=FederatedConfig(num_rounds=2),
    )


def test_dpo_with_lora_trains_adapters_over_two_clients(tmp_path) -> None:
    trainer = dpo(tmp_path)
    adapters = list(trainer.model.peft_config)
    before = base_weights(trainer.model)
    trainer.train()
    assert list(trainer.model.peft_config) == adapters
    after = base_weights(trainer.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    rounds = [entry for entry in trainer.state.log_history if "loss" in entry]
    # Policy and reference are equal before the first step. The margin of the chosen answers then grows.
    assert rounds[0]["rewards/margins"] < rounds[1]["rewards/margins"]


def test_dpo_reference_scores_use_the_model_before_training(tmp_path) -> None:
    on_demand, precomputed = dpo(tmp_path / "a"), dpo(tmp_path / "b", precompute_ref_log_probs=True)
    assert (on_demand.scored, precomputed.scored) == ([], [9, 6])
    on_demand.train()
    precomputed.train()
    assert precomputed.scored == [9, 6]
    rounds = [
        {len(data): (data["ref_chosen_logps"][:], data["ref_rejected_logps"][:]) for data in datasets}
        for datasets in (precomputed.loaded[:2], precomputed.loaded[2:])
    ]
    assert rounds[0].keys() == {9, 6} and rounds[0] == rounds[1]
    for actual, expected in zip(on_demand.model.parameters(), precomputed.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_moving_reference_model_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="sync_ref_model"):
        federate(trl.DPOTrainer)(
            model=language_model(),
            ref_model=language_model(),
            args=arguments(trl.DPOConfig, tmp_path, sync_ref_model=True),
            train_dataset={"north": preferences("north", 9)},
            processing_class=tokenizer(),
            federation=FederatedConfig(num_rounds=2),
        )
