"""Dataclasses of the recipe sections `model`, `data`, `public` and `client_models`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_federated.experiments.recipe_schema import RecipeError, check_at_least_one


DEFAULT_TEST_CLIENTS = 0.2


@dataclass
class ModelSection:
    """The section `model`: the initial model of every client."""

    name_or_path: str = field(metadata={"help": "Hub id or folder of the pretrained model and its tokenizer."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."})
    decoder_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Pretrained decoder for sequence-to-sequence tasks, connected to the encoder name_or_path by new"
            " cross-attention."
        },
    )
    kwargs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Additional arguments of from_pretrained, such as num_hidden_layers."}
    )
    lora: dict[str, Any] | None = field(
        default=None, metadata={"help": "Fields of peft.LoraConfig; clients train and send only the adapter."}
    )
    prefix: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "Fields of peft.PrefixTuningConfig (P-Tuning v2); clients train only the prefixes."},
    )

    def __post_init__(self) -> None:
        if self.lora is not None and self.prefix is not None:
            raise RecipeError(
                "model: lora and prefix are both set. Set either lora or prefix; a model has one adapter."
            )


@dataclass
class DataSection:
    """The section `data`: the dataset, and the part of it that is held out for testing."""

    path: str = field(metadata={"help": "Hub id, or a local folder or file (Parquet, JSON or CSV)."})
    name: str | None = field(default=None, metadata={"help": "Configuration of the dataset on the Hub."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the dataset on the Hub."})
    train_split: str = field(default="train", metadata={"help": "Split that is distributed over the clients."})
    test_split: str | None = field(
        default=None, metadata={"help": "Split to test on; if not set, some clients are held out for testing."}
    )
    further_test_splits: list[str] = field(
        default_factory=list, metadata={"help": "Additional splits to evaluate the trained model on."}
    )
    test_clients: int | float | None = field(
        default=None,
        metadata={"help": "Randomly chosen clients to hold out for testing: a count (10) or a share (default 0.2)."},
    )
    max_clients: int | None = field(
        default=None, metadata={"help": "Maximum number of training clients, chosen at random with seed."}
    )
    max_train_rows: int | None = field(
        default=None, metadata={"help": "Maximum number of examples of train_split, sampled with seed."}
    )
    max_test_rows: int | None = field(
        default=None, metadata={"help": "Maximum number of examples of each test split, sampled with seed."}
    )
    drop_empty: bool = field(default=False, metadata={"help": "Drop examples with an empty text or answer."})
    seed: int = field(default=0, metadata={"help": "Seed for sampling examples and choosing held-out clients."})

    def __post_init__(self) -> None:
        if self.test_split is not None and self.test_clients is not None:
            raise RecipeError(
                "data: test_split and test_clients are both set. Set either test_split (a split to test on) or"
                " test_clients (clients to hold out)."
            )
        if self.test_split == self.train_split:
            raise RecipeError(
                f"data.test_split is {self.test_split!r}, which is the training split. Choose another split."
            )
        for split in self.further_test_splits:
            if split in (self.train_split, self.test_split) or self.further_test_splits.count(split) > 1:
                raise RecipeError(
                    f"data.further_test_splits: {split!r} is train_split, test_split or a duplicate. Remove it."
                )
        if self.seed < 0:
            raise RecipeError(f"data.seed is {self.seed}; it must be at least 0.")
        if self.max_test_rows is not None and self.test_split is None:
            raise RecipeError(
                "data.max_test_rows is set without test_split. Set test_split; all examples of held-out clients are"
                " used."
            )
        if self.test_clients is not None:
            is_share = isinstance(self.test_clients, float)
            if not (0 < self.test_clients < 1 if is_share else self.test_clients >= 1):
                raise RecipeError(
                    f"data.test_clients is {self.test_clients}; it must be a count of at least 1 or a share between 0"
                    " and 1."
                )
        for name in ("max_clients", "max_train_rows", "max_test_rows"):
            check_at_least_one(f"data.{name}", getattr(self, name))


@dataclass
class PublicSection:
    """
    The section `public`: training examples that are set aside for distillation.

    Public examples lose their labels and are available to the server and all clients. The server can also hold labeled
    examples that no client has.
    """

    share: float = field(metadata={"help": "Share of the training examples that the server and all clients hold."})
    server_share: float = field(
        default=0.0, metadata={"help": "Share of the training examples that only the server holds, with labels."}
    )
    stratify_by_column: str | None = field(
        default=None, metadata={"help": "Take the same share of each value of this column, such as a domain."}
    )
    max_rows: int | None = field(
        default=None, metadata={"help": "Maximum number of public examples, sampled with data.seed."}
    )
    max_server_rows: int | None = field(
        default=None, metadata={"help": "Maximum number of examples of the server, sampled with data.seed."}
    )

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_server_rows"):
            check_at_least_one(f"public.{name}", getattr(self, name))


@dataclass
class ClientModelSection:
    """An entry of `client_models`: a client model that differs from the server's model, and its training settings."""

    name_or_path: str = field(metadata={"help": "Hub id or folder of the pretrained model and its tokenizer."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."})
    kwargs: dict[str, Any] | None = field(default=None, metadata={"help": "Additional arguments of from_pretrained."})
    training: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Training arguments that these clients override."}
    )
