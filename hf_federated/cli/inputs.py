"""What a recipe's `model` and `data` sections name, loaded: tokenizer, model, training and held-out clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, set_seed

from hf_federated.cli.files import is_absent, load_file
from hf_federated.cli.recipe import DataSection, ModelSection, RecipeError, build, recipe_errors
from hf_federated.data import FederatedDataset, IidPartitioner


@dataclass(frozen=True)
class Clients:
    """
    The clients of a recipe, tokenized.

    Args:
        train ([`FederatedDataset`]): Clients that train. Columns: the tokenizer's and `labels`.
        test ([`FederatedDataset`]): Clients held out whole; no row of theirs is trained on.
        label_names (`list[str]`): The labels' names by number.
    """

    train: FederatedDataset
    test: FederatedDataset
    label_names: list[str]


def load_rows(data: DataSection) -> Dataset:
    """
    Loads the split that is dealt out to clients, from a local file or folder or from the Hub.

    Raises:
        RecipeError: If the path or the split does not exist or cannot be read.
    """
    path = Path(data.path)
    with recipe_errors("data.path"):
        if is_absent(data.path):
            raise RecipeError(f"data.path: there is no file or folder {data.path}.")
        if path.is_file():
            return load_file(path, data.train_split)[data.train_split]
        return load_dataset(data.path, data.name, revision=data.revision, split=data.train_split)


def load_clients(data: DataSection, tokenizer: Any) -> Clients:
    """
    Deals the rows out to clients, holds some clients out, and tokenizes.

    The held-out clients and, with `max_clients`, the training clients are the first of one permutation of all clients
    that `data.seed` decides.

    Raises:
        RecipeError: If a column does not exist or too few clients are left.
    """
    rows = load_rows(data)
    texts = [data.text_column] if isinstance(data.text_column, str) else data.text_column
    for name, column in [*(("text_column", text) for text in texts), ("label_column", data.label_column)]:
        if column not in rows.column_names:
            raise RecipeError(f"data.{name} is {column!r}; the columns are {', '.join(rows.column_names)}.")
    if not isinstance(rows.features[data.label_column], ClassLabel):
        rows = build("data.label_column", rows.class_encode_column, {"column": data.label_column})
    label_names = rows.features[data.label_column].names
    with recipe_errors("data"):
        if data.client_column is not None:
            clients = FederatedDataset.from_column(rows, data.client_column, min_rows=data.min_rows_per_client)
        else:
            assert data.num_clients is not None  # DataSection has checked
            clients = FederatedDataset.from_dataset(rows, IidPartitioner(data.num_clients, seed=data.seed))
    train, test = _hold_out(clients, data)

    def tokenize(batch: dict[str, list[Any]]) -> dict[str, Any]:
        tokens = tokenizer(*(batch[text] for text in texts), truncation=True, max_length=data.max_length)
        return {**tokens, "labels": batch[data.label_column]}

    columns = rows.column_names
    with recipe_errors("data"):
        train, test = (part.map(tokenize, batched=True, remove_columns=columns) for part in (train, test))
    return Clients(train, test, label_names)


def _hold_out(clients: FederatedDataset, data: DataSection) -> tuple[FederatedDataset, FederatedDataset]:
    share = isinstance(data.test_clients, float)
    num_test = max(1, round(data.test_clients * len(clients))) if share else int(data.test_clients)
    if num_test >= len(clients):
        raise RecipeError(f"data.test_clients holds out {num_test} of {len(clients)} clients; none is left to train.")
    ids = list(clients)
    order = [ids[position] for position in np.random.default_rng(data.seed).permutation(len(ids))]
    train = order[num_test:][: data.max_clients]
    # In the order of the data set, so that results do not hang on how the permutation was used.
    return clients.select_clients([i for i in ids if i in set(train)]), clients.select_clients(
        [i for i in ids if i in set(order[:num_test])]
    )


def load_tokenizer(model: ModelSection) -> Any:
    """The tokenizer that lies with the model."""
    with recipe_errors("model.name_or_path"):
        return AutoTokenizer.from_pretrained(model.name_or_path, revision=model.revision)


def load_model(model: ModelSection, label_names: list[str], seed: int) -> PreTrainedModel:
    """
    The model with a head for these labels, and with an adapter if the recipe asks for one.

    Args:
        model ([`ModelSection`]): The recipe's section.
        label_names (`list[str]`): The labels' names by number; they become the model's `id2label`.
        seed (`int`): Seed of what the checkpoint does not hold (the head, the adapter).
    """
    set_seed(seed)
    with recipe_errors("model.name_or_path"):
        loaded = AutoModelForSequenceClassification.from_pretrained(
            model.name_or_path,
            revision=model.revision,
            num_labels=len(label_names),
            id2label=dict(enumerate(label_names)),
            label2id={name: number for number, name in enumerate(label_names)},
        )
    if model.lora is None:
        return loaded
    config = build("model.lora", LoraConfig, {"task_type": TaskType.SEQ_CLS, **model.lora})
    with recipe_errors("model.lora"):
        return get_peft_model(loaded, config)


def pooled_by_length(clients: FederatedDataset) -> Dataset:
    """All rows of the clients, short ones first: batches of one length hardly need padding."""
    pooled = clients.to_dataset()
    return pooled.select(np.argsort([len(ids) for ids in pooled["input_ids"]], kind="stable"))
