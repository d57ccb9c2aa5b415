"""The sections of a recipe that name no class of ours: the model, the data, and who trains what beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_federated.experiments.recipe_schema import RecipeError


DEFAULT_TEST_CLIENTS = 0.2


@dataclass
class ModelSection:
    """The model that every client starts from."""

    name_or_path: str = field(metadata={"help": "Hub id or folder of the pretrained model and its tokenizer."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."})
    decoder_name_or_path: str | None = field(
        default=None,
        metadata={"help": "For tasks of seq2seq: a pretrained decoder behind name_or_path, joined by new attention."},
    )
    kwargs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Further arguments of from_pretrained, such as num_hidden_layers."}
    )
    lora: dict[str, Any] | None = field(
        default=None, metadata={"help": "Any fields of peft.LoraConfig; clients then train and send the adapter only."}
    )
    prefix: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Any fields of peft.PrefixTuningConfig (p-tuning v2); the prefixes alone are trained."},
    )

    def __post_init__(self) -> None:
        if self.lora is not None and self.prefix is not None:
            raise RecipeError("model: give either lora or prefix; a model has one adapter.")


@dataclass
class DataSection:
    """The rows, and which of them are held out to test on."""

    path: str = field(metadata={"help": "Hub id, or a local folder or file of parquet, JSON or CSV."})
    name: str | None = field(default=None, metadata={"help": "Configuration of the data set on the Hub."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the data set on the Hub."})
    train_split: str = field(default="train", metadata={"help": "Split that belongs to the clients."})
    test_split: str | None = field(
        default=None, metadata={"help": "Split to test on, instead of clients that are held out."}
    )
    further_test_splits: list[str] = field(
        default_factory=list, metadata={"help": "Splits that the model is tested on too once it is trained."}
    )
    test_clients: int | float | None = field(
        default=None,
        metadata={"help": "Clients held out as the test set (seeded): a count (10) or a share (0.2, if left out)."},
    )
    max_clients: int | None = field(default=None, metadata={"help": "Train on so many clients at most (seeded)."})
    max_train_rows: int | None = field(default=None, metadata={"help": "Draw so many rows of train_split (seeded)."})
    max_test_rows: int | None = field(
        default=None, metadata={"help": "Draw so many rows of each split to test on (seeded)."}
    )
    drop_empty: bool = field(default=False, metadata={"help": "Leave out rows with an empty text or answer."})
    seed: int = field(default=0, metadata={"help": "Seed of taking rows and of holding out clients."})

    def __post_init__(self) -> None:
        if self.test_split is not None and self.test_clients is not None:
            raise RecipeError("data: give either test_split (rows to test on) or test_clients (clients to hold out).")
        if self.test_split == self.train_split:
            raise RecipeError(f"data.test_split is {self.test_split!r}, which trains; test on other rows.")
        for split in self.further_test_splits:
            if split in (self.train_split, self.test_split) or self.further_test_splits.count(split) > 1:
                raise RecipeError(
                    f"data.further_test_splits: {split!r} is the training split, test_split, or there twice."
                )
        if self.seed < 0:
            raise RecipeError(f"data.seed is {self.seed}; it must be at least 0.")
        if self.max_test_rows is not None and self.test_split is None:
            raise RecipeError("data.max_test_rows goes with test_split; of held-out clients all rows are taken.")
        if self.test_clients is not None:
            share = isinstance(self.test_clients, float)
            if not (0 < self.test_clients < 1 if share else self.test_clients >= 1):
                raise RecipeError(
                    f"data.test_clients is {self.test_clients}; give a count of at least 1 or a share between 0 and 1."
                )
        for name in ("max_clients", "max_train_rows", "max_test_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"data.{name} is {value}; it must be at least 1.")


@dataclass
class PublicSection:
    """Rows that are set aside for distillation: public ones, which lose their labels, and the server's own."""

    share: float = field(metadata={"help": "Share of the training rows that server and clients all have."})
    server_share: float = field(
        default=0.0, metadata={"help": "Share of the training rows that are the server's own, with their labels."}
    )
    stratify_by_column: str | None = field(
        default=None, metadata={"help": "Take the same shares of each value of this column, such as a domain."}
    )
    max_rows: int | None = field(default=None, metadata={"help": "Keep so many of the public rows (seeded)."})
    max_server_rows: int | None = field(default=None, metadata={"help": "Keep so many of the server's (seeded)."})

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_server_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RecipeError(f"public.{name} is {value}; it must be at least 1.")


@dataclass
class ClientModelSection:
    """A model that clients have instead of the server's, and how they train it."""

    name_or_path: str = field(metadata={"help": "Hub id or folder of the pretrained model and its tokenizer."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."})
    kwargs: dict[str, Any] | None = field(default=None, metadata={"help": "Further arguments of from_pretrained."})
    training: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Fields of the training arguments that are these clients' own."}
    )
