"""Objects that the code of a page uses and does not create, for example `model`, by page."""

from __future__ import annotations

from typing import Any

from datasets import ClassLabel, load_dataset
from offline_world import DECODER, ENCODERS
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
)

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer


def objects(page: str) -> dict[str, Any]:
    """The objects of a page. The working directory is the folder of `offline_world`."""
    tokenizer = AutoTokenizer.from_pretrained(ENCODERS[0])
    raw = load_dataset("outputs/quickstart-inputs/reviews", split="train")
    raw = raw.cast_column("label", ClassLabel(names=["rotten", "fresh"]))
    train = raw.map(lambda rows: tokenizer(rows["text"]), batched=True)
    found: dict[str, Any] = {
        "TrainingArguments": TrainingArguments,
        "args": TrainingArguments("out", report_to=[], save_strategy="no"),
        "dev": train.select(range(8)),
        "metrics": lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())},
        "model": AutoModelForSequenceClassification.from_pretrained(ENCODERS[0], num_labels=2),
        "tokenizer": tokenizer,
        "raw": raw,
        "train": train,
    }
    if page in WITH_TRAINER:
        found["trainer"] = trained(found)
    if page in WITH_RAW_EXAMPLES:
        found |= {"train": raw, "dev": raw.select(range(8))}
    if page in WITH_DECODER:
        found |= {
            "model": AutoModelForCausalLM.from_pretrained(DECODER),
            "tokenizer": AutoTokenizer.from_pretrained(DECODER),
        }
    return found


WITH_TRAINER = (
    "docs/how-to/ledger.md",
    "docs/how-to/estimate.md",
    "docs/how-to/cards.md",
    "docs/how-to/compare.md",
    "docs/how-to/what-leaves-a-client.md",
    "docs/how-to/resuming.md",
)
WITH_RAW_EXAMPLES = ("docs/how-to/write-a-distillation-method.md", "docs/how-to/write-a-partitioner.md")
WITH_DECODER = ("docs/concepts/split-models.md", "docs/how-to/write-a-split-layout.md")


def trained(found: dict[str, Any]) -> FederatedTrainer:
    """A trainer after two rounds, with a checkpoint of each round."""
    trainer = FederatedTrainer(
        model=found["model"],
        args=TrainingArguments("out", report_to=[], eval_strategy="epoch"),
        train_dataset=FederatedDataset.from_column(found["train"], "movie"),
        eval_dataset=found["dev"],
        processing_class=found["tokenizer"],
        compute_metrics=found["metrics"],
        federation=FederatedConfig(num_rounds=2, clients_per_round=3),
    )
    trainer.train()
    return trainer
