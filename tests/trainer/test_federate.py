"""`federate()`: any trainer class keeps what is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
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


CLIENTS = {"north": rows(8), "south": rows(4, seed=1), "west": rows(6, seed=2)}


def test_a_users_trainer_keeps_its_own_loss(tmp_path) -> None:
    class Halved(Trainer):
        """Half the loss of its parent."""

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


def test_seq2seq_trainer_generates_in_its_evaluation(tmp_path) -> None:
    sizes = {f"{part}_{name}": 8 for part in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    config = BartConfig(vocab_size=32, d_model=8, max_position_embeddings=32, **sizes, **layers)
    data = {
        name: dataset.remove_columns("labels").add_column("labels", dataset["input_ids"][:])
        for name, dataset in CLIENTS.items()
    }

    def longest(prediction: Any) -> dict[str, float]:
        return {"longest": float((prediction.predictions != config.pad_token_id).sum(-1).max())}

    trainer = federate(Seq2SeqTrainer)(
        model=BartForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(
            **{**arguments(tmp_path).to_dict(), "predict_with_generate": True, "generation_max_length": 5}
        ),
        train_dataset=data,
        eval_dataset=FederatedDataset.from_dict(data),
        compute_metrics=longest,
        federation=FederatedConfig(num_rounds=2, evaluate_clients=True),
    )
    trainer.train()
    assert isinstance(trainer, Seq2SeqTrainer)
    metrics = trainer.evaluate()
    assert metrics["eval_longest"] == metrics["federated/eval_longest_best"] == 5
    assert trainer.evaluate(data["north"], max_length=3)["eval_longest"] == 3


def test_federate_refuses_what_is_no_trainer() -> None:
    assert federate(Trainer) is FederatedTrainer
    with pytest.raises(TypeError, match="subclass of transformers.Trainer"):
        federate(dict)
    with pytest.raises(TypeError, match="FederatedTrainer is federated already"):
        federate(FederatedTrainer)


class PassingOn(Trainer):
    """As most subclasses are written."""

    def __init__(self, *args: Any, temperature: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature = temperature


class PassingOnAfterItsOwn(PassingOn):
    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name


@pytest.mark.parametrize("num_by_position", [0, 2, 4])
def test_a_users_constructor_may_pass_everything_on(tmp_path, num_by_position) -> None:
    given = {"model": tiny_model(), "args": arguments(tmp_path), "data_collator": None, "train_dataset": CLIENTS}
    values = list(given.values())[:num_by_position]
    by_name = dict(list(given.items())[num_by_position:])
    trainer = federate(PassingOn)(*values, **by_name, temperature=2.0)
    assert (trainer.temperature, list(trainer.clients)) == (2.0, list(CLIENTS))
    with_own = federate(PassingOnAfterItsOwn)("mine", *values, **by_name)
    assert (with_own.name, with_own.temperature, list(with_own.clients)) == ("mine", 1.0, list(CLIENTS))


def test_an_argument_given_twice_is_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match="twice"):
        FederatedTrainer(tiny_model(), arguments(tmp_path), None, CLIENTS, train_dataset=CLIENTS)


class LooksAtItsData(Trainer):
    """A constructor that asks what can be answered: whether there is data, of which type, and how much."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        assert train_dataset and isinstance(train_dataset, (Dataset, IterableDataset))
        self.num_rows = len(train_dataset)
        super().__init__(*args, train_dataset=train_dataset, **kwargs)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_users_constructor_may_look_at_its_data(tmp_path, is_stream) -> None:
    clients = {name: data.to_iterable_dataset() if is_stream else data for name, data in CLIENTS.items()}
    trainer = federate(LooksAtItsData)(
        tiny_model(), arguments(tmp_path), train_dataset=clients, federation=FederatedConfig(1, local_steps=1)
    )
    trainer.train()
    assert trainer.num_rows == (0 if is_stream else 18)


class Mutates(Trainer):
    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        if isinstance(train_dataset, Dataset):
            train_dataset = train_dataset.map(lambda row: {"labels": 1 - row["labels"]})
        super().__init__(*args, train_dataset=train_dataset, **kwargs)


class Drops(PassingOn):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.train_dataset is not None:
            self.train_dataset = self.train_dataset.filter(lambda row: row["labels"] == 1)


class Weights(PassingOn):
    """Class weights from the labels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weights = torch.bincount(torch.tensor(self.train_dataset["labels"]))


class Longest(PassingOn):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.longest = max(len(row["input_ids"]) for row in self.train_dataset)


class Replaces(PassingOn):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.train_dataset = rows(3)


class MutatesEvaluation(Trainer):
    def __init__(self, *args: Any, eval_dataset: Any = None, **kwargs: Any) -> None:
        eval_dataset = eval_dataset.map(lambda row: {"labels": 1 - row["labels"]})
        super().__init__(*args, eval_dataset=eval_dataset, **kwargs)


@pytest.mark.parametrize(
    ("base", "how"),
    [
        (Mutates, "asks for 'map'"),
        (Drops, "asks for 'filter'"),
        (Weights, "reads 'labels'"),
        (Longest, "goes over the rows"),
        (Replaces, "`train_dataset` is another one afterwards"),
        (MutatesEvaluation, "`eval_dataset` is another one afterwards"),
    ],
)
def test_a_users_constructor_that_uses_its_data_is_refused(tmp_path, base, how) -> None:
    with pytest.raises(ValueError, match=f"Federated{base.__name__} does something .*{how}.*`FederatedDataset.map`"):
        federate(base)(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset=CLIENTS,
            eval_dataset=FederatedDataset.from_dict(CLIENTS),
        )


class KeepsItsData(PassingOn):
    """Reads later what its constructor got."""

    def __init__(self, *args: Any, train_dataset: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, train_dataset=train_dataset, **kwargs)
        self.raw = train_dataset

    def compute_loss(self, model, inputs, **kwargs):
        self.raw[0]
        return super().compute_loss(model, inputs, **kwargs)


def test_data_that_a_constructor_keeps_ends_the_run_where_it_is_read(tmp_path) -> None:
    trainer = federate(KeepsItsData)(model=tiny_model(), args=arguments(tmp_path), train_dataset=CLIENTS)
    with pytest.raises(ValueError, match="reads 0.*`FederatedDataset.map`"):
        trainer.train()


class Own(Trainer):
    """A trainer with a loss, a loader and a step of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self):
        # The longest rows first, without shuffling.
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


def test_a_users_loss_loader_and_step_train_one_client_as_alone(tmp_path) -> None:
    plain = Own(
        model=lora_model(), args=arguments(tmp_path / "plain", num_train_epochs=2), train_dataset=CLIENTS["north"]
    )
    plain.train()
    federated = federate(Own)(
        model=lora_model(),
        args=arguments(tmp_path / "federated"),
        train_dataset=CLIENTS["north"],
        federation=FederatedConfig(num_rounds=2, client_optimizer_state="carry"),
    )
    federated.train()
    assert same_weights(plain.model, federated.model)


def test_a_users_loss_loader_and_step_over_two_clients(tmp_path) -> None:
    def trained(base: type[Trainer]) -> Any:
        trainer = federate(base)(
            model=lora_model(),
            args=arguments(tmp_path / base.__name__),
            train_dataset={name: CLIENTS[name] for name in ("north", "south")},
            federation=FederatedConfig(num_rounds=2),
        )
        trainer.train()
        return trainer

    own, parents = trained(Own), trained(Trainer)
    assert own.ledger.rounds() == parents.ledger.rounds()
    assert not same_weights(own.model, parents.model)
    assert all("lora_" in name or "modules_to_save" in name for name in own.exchange.names)
