"""`federate()` keeps the behavior of custom trainer classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from federations import CLIENTS
from peft import LoraConfig, get_peft_model
from tiny import arguments, rows, same_weights, tiny_model
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer, federate


def test_custom_evaluate_gets_its_own_arguments(tmp_path) -> None:
    class WithExamples(Trainer):
        """Takes further arguments between those of `Trainer.evaluate`, as the trainer of `run_qa.py`."""

        def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            return {**metrics, f"{metric_key_prefix}_examples": eval_examples}

    trainer = federate(WithExamples)(
        model=tiny_model(), args=arguments(tmp_path), train_dataset=CLIENTS, eval_dataset=rows(4)
    )
    assert trainer.evaluate()["eval_examples"] is None
    assert trainer.evaluate(rows(4), ["first"], metric_key_prefix="test")["test_examples"] == ["first"]


def test_custom_loss_is_used(tmp_path) -> None:
    class Halved(Trainer):
        """Halves the loss of the parent class."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return (loss[0] / 2, loss[1]) if return_outputs else loss / 2

    options = {"learning_rate": 1e-9, "logging_strategy": "steps"}
    losses = []
    for base in (Trainer, Halved):
        trainer = federate(base)(
            model=tiny_model(), args=arguments(tmp_path, **options), train_dataset=CLIENTS,
            federation=FederatedConfig(num_rounds=1),
        )  # fmt: skip
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert federate(Halved).__name__ == "FederatedHalved"
    assert federate(Halved) is federate(Halved)
    assert losses[1] == pytest.approx(losses[0] / 2, rel=1e-4)


def test_seq2seq_trainer_generates_in_evaluation(tmp_path) -> None:
    sizes = {f"{part}_{name}": 8 for part in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    config = BartConfig(vocab_size=32, d_model=8, max_position_embeddings=32, **sizes, **layers)
    data = {
        name: dataset.remove_columns("labels").add_column("labels", dataset["input_ids"][:])
        for name, dataset in CLIENTS.items()
    }

    def longest_generation(prediction: Any) -> dict[str, float]:
        return {"longest": float((prediction.predictions != config.pad_token_id).sum(-1).max())}

    trainer = federate(Seq2SeqTrainer)(
        model=BartForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(
            **{**arguments(tmp_path).to_dict(), "predict_with_generate": True, "generation_max_length": 5}
        ),
        train_dataset=data,
        eval_dataset=FederatedDataset.from_dict(data),
        compute_metrics=longest_generation,
        federation=FederatedConfig(num_rounds=2, evaluate_clients=True),
    )
    trainer.train()
    assert isinstance(trainer, Seq2SeqTrainer)
    metrics = trainer.evaluate()
    assert metrics["eval_longest"] == metrics["federated/eval_longest_best"] == 5
    assert trainer.evaluate(data["north"], max_length=3)["eval_longest"] == 3


def test_federate_refuses_other_classes() -> None:
    assert federate(Trainer) is FederatedTrainer
    with pytest.raises(TypeError, match="subclass of transformers.Trainer"):
        federate(dict)
    with pytest.raises(TypeError, match="FederatedTrainer is already federated"):
        federate(FederatedTrainer)


class WithKeyword(Trainer):
    """A trainer with an additional keyword argument, as most subclasses have."""

    def __init__(self, *args: Any, temperature: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature


class WithPositional(WithKeyword):
    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name


@pytest.mark.parametrize("num_by_position", [0, 2, 4])
def test_custom_constructor_may_pass_all_arguments_on(tmp_path, num_by_position) -> None:
    parent_arguments = {
        "model": tiny_model(),
        "args": arguments(tmp_path),
        "data_collator": None,
        "train_dataset": CLIENTS,
    }
    values = list(parent_arguments.values())[:num_by_position]
    by_name = dict(list(parent_arguments.items())[num_by_position:])
    trainer = federate(WithKeyword)(*values, **by_name, temperature=2.0)
    assert (trainer.temperature, list(trainer.clients)) == (2.0, list(CLIENTS))
    with_positional = federate(WithPositional)("mine", *values, **by_name)
    assert (with_positional.name, with_positional.temperature, list(with_positional.clients)) == (
        "mine",
        1.0,
        list(CLIENTS),
    )


def test_argument_that_is_passed_twice_is_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match="twice"):
        FederatedTrainer(tiny_model(), arguments(tmp_path), None, CLIENTS, train_dataset=CLIENTS)


class InspectsDataset(Trainer):
    """A constructor that reads whether there is a dataset, its type and its number of examples."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        assert train_dataset and isinstance(train_dataset, (Dataset, IterableDataset))
        self.dataset_size = len(train_dataset)
        super().__init__(*args, train_dataset=train_dataset, **kwargs)


@pytest.mark.parametrize("is_stream", [False, True])
def test_custom_constructor_may_read_type_and_size_of_its_dataset(tmp_path, is_stream) -> None:
    clients = {name: data.to_iterable_dataset() if is_stream else data for name, data in CLIENTS.items()}
    trainer = federate(InspectsDataset)(
        tiny_model(), arguments(tmp_path), train_dataset=clients, federation=FederatedConfig(1, local_steps=1)
    )
    trainer.train()
    assert trainer.dataset_size == (0 if is_stream else 18)


def flipped(row: dict[str, Any]) -> dict[str, Any]:
    return {"labels": 1 - row["labels"]}


def is_positive(row: dict[str, Any]) -> bool:
    return row["labels"] == 1


class MapsAndFiltersDataset(Trainer):
    """Transforms the training and the evaluation examples before and after the constructor of the parent class."""

    def __init__(self, *args: Any, train_dataset: Any = None, eval_dataset: Any = None, **kwargs: Any) -> None:
        assert train_dataset.column_names == ["input_ids", "labels"] and not train_dataset.cache_files
        train_dataset = train_dataset.map(flipped)
        if eval_dataset is not None:
            eval_dataset = eval_dataset.map(flipped).filter(is_positive)
        super().__init__(*args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self.train_dataset = self.train_dataset.filter(is_positive)


def test_constructor_may_map_and_filter_its_dataset(tmp_path) -> None:
    settings = {"federation": FederatedConfig(num_rounds=2, evaluate_clients=True)}
    mapped = {name: data.map(flipped).filter(is_positive) for name, data in CLIENTS.items()}
    in_constructor, before = (
        factory(
            tiny_model(),
            arguments(tmp_path),
            train_dataset=clients,
            eval_dataset=FederatedDataset.from_dict({name: data.flatten_indices() for name, data in clients.items()}),
            **settings,
        )
        for factory, clients in ((federate(MapsAndFiltersDataset), CLIENTS), (FederatedTrainer, mapped))
    )
    for trainer in (in_constructor, before):
        trainer.train()
        trainer.evaluate()
    assert same_weights(in_constructor.model, before.model)
    losses = [{name: each["eval_loss"] for name, each in t.client_metrics.items()} for t in (in_constructor, before)]
    assert losses[0] == losses[1] and losses[0].keys() == CLIENTS.keys()


class TakesExamples(WithKeyword):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_dataset = self.train_dataset.select([0])


class ComputesWeights(WithKeyword):
    """Computes class weights from the labels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = torch.bincount(torch.tensor(self.train_dataset["labels"]))


class IteratesOverDataset(WithKeyword):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.longest = max(len(row["input_ids"]) for row in self.train_dataset)


class ReplacesDataset(WithKeyword):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_dataset = rows(3)


class MapsEvaluationDataset(Trainer):
    def __init__(self, *args: Any, eval_dataset: Any = None, **kwargs: Any) -> None:
        eval_dataset = eval_dataset.map(lambda row: {"labels": 1 - row["labels"]})
        super().__init__(*args, eval_dataset=eval_dataset, **kwargs)


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (TakesExamples, "accesses 'select'"),
        (ComputesWeights, "reads 'labels'"),
        (IteratesOverDataset, "iterates over the examples"),
        (ReplacesDataset, "the constructor replaced `train_dataset`"),
        (MapsEvaluationDataset, "the constructor replaced `eval_dataset`"),
    ],
)
def test_custom_constructor_that_uses_its_dataset_is_refused(tmp_path, base, reason) -> None:
    with pytest.raises(
        ValueError, match=f"Federated{base.__name__} uses its dataset .*{reason}.*`FederatedDataset.map`"
    ):
        federate(base)(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset=CLIENTS,
            eval_dataset=FederatedDataset.from_dict(CLIENTS),
        )


class ReadsDatasetLater(WithKeyword):
    """Keeps the dataset of the constructor and reads it during training."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=train_dataset, **kwargs)
        self.raw = train_dataset

    def compute_loss(self, model, inputs, **kwargs):
        self.raw[0]
        return super().compute_loss(model, inputs, **kwargs)


def test_reading_the_dataset_of_the_constructor_during_training_is_refused(tmp_path) -> None:
    trainer = federate(ReadsDatasetLater)(model=tiny_model(), args=arguments(tmp_path), train_dataset=CLIENTS)
    with pytest.raises(ValueError, match="reads 0.*`FederatedDataset.map`"):
        trainer.train()


class CustomTrainer(Trainer):
    """A trainer with a custom loss, data loader and training step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self):
        # The examples in a fixed order, without shuffling.
        order = sorted(range(len(self.train_dataset)), key=lambda i: -sum(self.train_dataset[i]["input_ids"]))
        loader = DataLoader(
            self.train_dataset.select(order), batch_size=self.args.train_batch_size, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, {**inputs, "attention_mask": inputs["input_ids"].ne(0).long()})


def lora_model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(
            tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=["query", "value"])
        )


def test_custom_trainer_with_one_client_equals_plain_training(tmp_path) -> None:
    plain = CustomTrainer(
        model=lora_model(), args=arguments(tmp_path / "plain", num_train_epochs=2), train_dataset=CLIENTS["north"]
    )
    plain.train()
    federated = federate(CustomTrainer)(
        model=lora_model(),
        args=arguments(tmp_path / "federated"),
        train_dataset=CLIENTS["north"],
        federation=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
    )
    federated.train()
    assert same_weights(plain.model, federated.model)


def test_custom_trainer_trains_two_clients(tmp_path) -> None:
    def trained(base: type[Trainer]) -> Any:
        trainer = federate(base)(
            model=lora_model(),
            args=arguments(tmp_path / base.__name__),
            train_dataset={name: CLIENTS[name] for name in ("north", "south")},
            federation=FederatedConfig(num_rounds=2),
        )
        trainer.train()
        return trainer

    custom, default = trained(CustomTrainer), trained(Trainer)
    assert custom.ledger.rounds() == default.ledger.rounds()
    assert not same_weights(custom.model, default.model)
    assert all("lora_" in name or "modules_to_save" in name for name in custom.exchange.names)
