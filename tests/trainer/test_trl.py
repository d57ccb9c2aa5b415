"""`federate()` with TRL trainers, whose constructors prepare the dataset. Each client's dataset is prepared once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from federations import setup_of
from huggingface_hub import ModelCard
from language import SPECIAL, WORDS, language_model, preferences, texts, tokenizer
from peft import LoraConfig, PeftModel
from tiny import same_weights

from hf_federated import FederatedConfig, FederatedDataset, NetworkEngine, RoundFailedError, federate
from hf_federated.cards import RunRecord, render
from hf_federated.messages import Announcement
from hf_federated.trainer.join import JoinedClient, announcement_of
from hf_federated.trainer.setup import FederationSetup


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
    own = ("peft_config", "engine")
    options = {"peft_config": LORA} | {name: kwargs.pop(name) for name in own if name in kwargs}
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


def questions(client_id: str, lengths: list[int]) -> Dataset:
    """Examples whose prompts have the given numbers of words."""
    words = WORDS[client_id]
    prompts = [" ".join(words[i % 12] for i in range(length)) for length in lengths]
    return Dataset.from_dict({"prompt": prompts, "completion": [f" {words[0]}" for _ in lengths]})


def test_examples_that_the_trainer_drops_are_named_for_each_client(tmp_path, caplog) -> None:
    clients = {"north": questions("north", [2, 9, 3]), "south": questions("south", [2, 2])}
    trainer = sft(tmp_path, clients, max_length=6)
    trainer.train()
    (dropped,) = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert dropped.startswith(
        "Client 'north': 1 of 3 examples were dropped, because they are too long for max_length=6."
    )


@pytest.mark.parametrize("is_hidden", [False, True])
def test_clients_on_other_machines_announce_their_dropped_examples_for_the_card(
    tmp_path, monkeypatch, is_hidden
) -> None:
    monkeypatch.setattr(FederationSetup, "hides_counts", is_hidden)
    announced = {}
    for name, lengths in {"north": [2, 9, 3], "south": [9, 2, 9], "east": [2]}.items():
        trainer = sft(tmp_path / name, {name: questions(name if name in WORDS else "north", lengths)}, max_length=6)
        setup = JoinedClient(setup_of(trainer), trainer.args, name, None).setup
        announced[name] = Announcement.from_bytes(announcement_of(setup, trainer.args, name).to_bytes())
    numbers = [announcement.num_dropped_examples for announcement in announced.values()]
    assert numbers == [None] * 3 if is_hidden else [1, 2, None]
    assert announced["south"].describe(announced["south"]) == (
        "hidden numbers of examples" if is_hidden else "3 examples, of which it dropped 2"
    )
    engine = NetworkEngine(list(announced), address="127.0.0.1:0", insecure=True)
    server = sft(tmp_path, None, eval_dataset=questions("north", [2]), engine=engine, max_length=6)
    for name, announcement in announced.items():
        engine._announce(name, announcement)
    assert server.num_dropped_examples == (None if is_hidden else 3)
    assert ("| Examples that the trainer dropped | 3 |" in render(RunRecord.from_trainer(server))) != is_hidden


def test_client_whose_examples_are_all_dropped_is_refused_with_max_length(tmp_path) -> None:
    too_long = questions("north", [9, 9])
    with pytest.raises(ValueError, match="'north': all 2 examples were dropped.*max_length=6. Set a larger"):
        sft(tmp_path, {"north": too_long, "south": questions("south", [2])}, max_length=6)
    # The examples of the other clients are prepared when they train.
    trainer = sft(
        tmp_path, {"east": questions("south", [2]), "north": too_long}, max_length=6, federation={"min_clients": 2}
    )
    with pytest.raises(RoundFailedError) as raised:
        trainer.train()
    assert "'north': all 2 examples were dropped" in str(raised.value.__cause__)


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


def token_counts(trainer: Any) -> dict[str, list[float]]:
    """The logged numbers of training tokens, in the order of the log."""
    log_history = trainer.state.log_history
    return {name: [e[name] for e in log_history if name in e] for name in ("num_tokens", "eval_num_tokens")}


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "rows_of"),
    [(trl.SFTTrainer, trl.SFTConfig, texts), (trl.DPOTrainer, trl.DPOConfig, preferences)],
    ids=["sft", "dpo"],
)
def test_token_counts_of_one_client_equal_those_of_the_plain_trainer(
    tmp_path, trainer_class, config_class, rows_of
) -> None:
    settings = {"train_dataset": rows_of("north", 10), "eval_dataset": rows_of("south", 3), "peft_config": LORA}
    plain, federated = (
        factory(
            model=language_model(),
            args=arguments(config_class, tmp_path, num_train_epochs=2, eval_strategy="epoch"),
            processing_class=tokenizer(),
            **settings,
            **options,
        )
        for factory, options in (
            (trainer_class, {}),
            (federate(trainer_class), {"federation": FederatedConfig(client_optimizer_state="carry")}),
        )
    )
    plain.train()
    federated.train()
    counts = token_counts(plain)
    assert counts["num_tokens"] == counts["eval_num_tokens"] and 0 < counts["num_tokens"][0] < counts["num_tokens"][1]
    assert token_counts(federated) == counts


def test_training_tokens_of_all_clients_are_counted_across_a_resume(tmp_path) -> None:
    eval_clients = FederatedDataset.from_dict({"north": texts("north", 3), "south": texts("south", 2)})
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "federation": {"evaluate_clients": True}}
    trainer = sft(tmp_path, eval_dataset=eval_clients, **options)
    trainer.train()
    in_a_round = sum(len(tokens) for dataset in trainer.loaded[:2] for tokens in dataset["input_ids"])
    expected = {name: [in_a_round, 2 * in_a_round] for name in ("num_tokens", "eval_num_tokens")}
    assert token_counts(trainer) == expected
    # A client does not know the number of the other clients' tokens.
    assert all("eval_num_tokens" not in metrics for metrics in trainer.client_metrics.values())
    resumed = sft(tmp_path, eval_dataset=eval_clients, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert token_counts(resumed) == expected
    finished = sft(tmp_path, eval_dataset=eval_clients, **options)
    finished.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert finished.evaluate()["eval_num_tokens"] == 2 * in_a_round


def test_card_of_an_sft_run_shows_the_training_tokens_and_its_dataset(tmp_path) -> None:
    trainer = sft(tmp_path / "chat", eval_dataset=texts("south", 3), eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    trainer.create_model_card(model_name="chat", dataset_name="trl-lib/Capybara")  # as `push_to_hub` of TRL's scripts
    card = ModelCard.load(tmp_path / "chat" / "README.md")
    assert f"| Training tokens | {token_counts(trainer)['num_tokens'][-1]:,.0f} |" in card.text
    assert card.data.datasets == ["trl-lib/Capybara"]
    assert {"federated-learning", "hf_federated", "fedavg", "lora", "trl", "sft"} <= set(card.data.tags)
    assert "num_tokens" not in card.data.metrics


def test_trl_trainer_without_a_federation_writes_the_card_of_trl(tmp_path) -> None:
    trainer = federate(trl.SFTTrainer)(
        model=language_model(),
        args=arguments(trl.SFTConfig, tmp_path, save_strategy="epoch", num_train_epochs=1),
        train_dataset=texts("north", 4),
        processing_class=tokenizer(),
    )
    trainer.train()
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.tags and "federated-learning" not in card.data.tags and "with SFT" in card.text


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
