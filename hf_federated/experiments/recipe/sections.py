"""Dataclasses of the recipe sections `model`, `data`, `public`, `client_models`, `network` and `audit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_federated.experiments.recipe.schema import Mistakes, RecipeError, check_at_least_one


# Share of the examples of each client that are test examples, if the data has no test split.
DEFAULT_TEST_EXAMPLES = 0.1
# The attacks of `hf_federated.audits.payloads`. The names are listed here, so that a check imports no torch.
PAYLOAD_ATTACKS = ("token_set", "dager", "loss_threshold", "lira", "canary")
# Fields of a variant of `audit.variants` that are not sections of a recipe.
VARIANT_FIELDS = ("clip", "noise")


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
    test_path: str | None = field(
        default=None, metadata={"help": "File, folder or Hub id with the test examples, if path does not have them."}
    )
    test_split: str | None = field(
        default=None,
        metadata={
            "help": "Split to test on, of test_path or else of path (default: test or validation, if path has it and"
            " neither test_examples nor test_clients is set)."
        },
    )
    further_test_splits: list[str] = field(
        default_factory=list, metadata={"help": "Additional splits to evaluate the trained model on."}
    )
    test_examples: float | None = field(
        default=None,
        metadata={
            "help": "Share of the examples of each client to hold out for testing, with the label shares of the client"
            f" (default without a test split: {DEFAULT_TEST_EXAMPLES}; 0: none)."
        },
    )
    test_clients: int | float | None = field(
        default=None,
        metadata={
            "help": "Randomly chosen clients to hold out for testing: a count (10) or a share (0.2); 0 or null: none."
        },
    )
    max_clients: int | None = field(
        default=None, metadata={"help": "Maximum number of training clients, chosen at random with seed."}
    )
    max_train_rows: int | None = field(
        default=None,
        metadata={"help": "Maximum number of examples of train_split, sampled with seed before any are held out."},
    )
    max_test_rows: int | None = field(
        default=None,
        metadata={"help": "Maximum number of test examples (and of each further test split), sampled with seed."},
    )
    drop_empty: bool = field(default=False, metadata={"help": "Drop examples with an empty text or answer."})
    seed: int = field(
        default=0, metadata={"help": "Seed for sampling examples and clients, and for holding them out."}
    )

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        self._check_test_source(mistakes)
        same_data = self.test_path is None or Path(self.test_path) == Path(self.path)
        if same_data and self.test_split == self.train_split:
            mistakes.found.append(
                f"data.test_split is {self.test_split!r}, which is the training split. Choose another split."
            )
        for split in self.further_test_splits:
            if (
                split in (self.train_split, self.test_split if same_data else None)
                or self.further_test_splits.count(split) > 1
            ):
                mistakes.found.append(
                    f"data.further_test_splits: {split!r} is train_split, test_split or a duplicate. Remove it."
                )
        if self.seed < 0:
            mistakes.found.append(f"data.seed is {self.seed}; it must be at least 0.")
        for name in ("max_clients", "max_train_rows", "max_test_rows"):
            with mistakes.collect():
                check_at_least_one(f"data.{name}", getattr(self, name))
        mistakes.raise_found()

    @property
    def finds_test_split(self) -> bool:
        """Whether the recipe leaves the choice of the test examples to the data: a test split, if the data has one."""
        return not (self.test_path or self.test_split or self.test_examples or self.test_clients)

    def _check_test_source(self, mistakes: Mistakes) -> None:
        """Check the fields that choose the test examples. At most one of them is set; 0 counts as not set."""
        given = [name for name in ("test_path", "test_split", "test_examples", "test_clients") if getattr(self, name)]
        if len(given) > 1 and given != ["test_path", "test_split"]:
            mistakes.found.append(
                f"data: {' and '.join(given)} are set, but a run has one source of test examples. Set one of test_path"
                " (a file or folder), test_split (a split), test_examples (a share of the examples of each client) and"
                " test_clients (clients to hold out)."
            )
        if self.test_split is None and self.test_path is not None and Path(self.test_path) == Path(self.path):
            mistakes.found.append(
                f"data.test_path is {self.test_path}, which is also data.path, so a run would test on its training"
                " examples. Set another file or folder, or set data.test_split to a split of it."
            )
        if self.test_examples is not None and not 0 <= self.test_examples < 1:
            mistakes.found.append(
                f"data.test_examples is {self.test_examples}; it must be a share of the examples of each client, at"
                " least 0 and below 1."
            )
        if self.test_clients is not None:
            is_share = isinstance(self.test_clients, float)
            if self.test_clients < 0 or (is_share and self.test_clients >= 1):
                mistakes.found.append(
                    f"data.test_clients is {self.test_clients}; it must be a count such as 2, a share between 0 and 1,"
                    " or 0 to hold out no client."
                )


@dataclass
class PublicSection:
    """
    The section `public`: examples for distillation, set aside from the training examples or read from files.

    Public examples lose their labels and are available to the server and all clients. The server can also hold labeled
    examples that no client has.
    """

    share: float | None = field(
        default=None,
        metadata={"help": "Share of the training examples that the server and all clients hold."},
    )
    server_share: float = field(
        default=0.0,
        metadata={"help": "Share of the training examples that only the server holds, with labels, also for FLTrust."},
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
    path: str | None = field(
        default=None,
        metadata={"help": "File, folder or Hub id with the public examples, in place of share. Labels are dropped."},
    )
    server_path: str | None = field(
        default=None,
        metadata={"help": "File, folder or Hub id with the examples of the server, in place of server_share."},
    )

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        if (self.share is None) == (self.path is None):
            found = "are both set" if self.path else "are both missing"
            mistakes.found.append(
                f"public: share and path {found}. Set share to set aside training examples, or path to a file with"
                " the public examples."
            )
        if self.path is not None and (self.server_share or self.stratify_by_column is not None):
            mistakes.found.append(
                "public: server_share and stratify_by_column need share, but path is set. Set server_path to the"
                " examples of the server."
            )
        if self.server_path is not None and self.path is None:
            mistakes.found.append("public: server_path is set without path. Set path to the public examples.")
        for name in ("max_rows", "max_server_rows"):
            with mistakes.collect():
                check_at_least_one(f"public.{name}", getattr(self, name))
        mistakes.raise_found()


@dataclass
class NetworkSection:
    """The section `network`: the clients of `hf-federated serve`, and how long the server waits for them."""

    clients: list[str] = field(
        default_factory=list,
        metadata={"help": "Ids of the clients, in the order in which client_models are assigned."},
    )
    address: str | None = field(
        default=None, metadata={"help": "Address of the server, as host:port, for serve and for join."}
    )
    num_to_start: int | None = field(
        default=None,
        metadata={"help": "Number of clients that must have joined before the first round (default: all)."},
    )
    join_timeout: float = field(default=3600.0, metadata={"help": "Seconds that the server waits for these clients."})
    rejoin_timeout: float = field(
        default=60.0, metadata={"help": "Seconds that a round waits for a client that has left or was lost."}
    )
    heartbeat_timeout: float = field(
        default=60.0, metadata={"help": "Seconds without a sign of a client after which the client is lost."}
    )

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        if len(set(self.clients)) != len(self.clients):
            mistakes.found.append(f"network.clients is {self.clients}; each client must be listed once.")
        with mistakes.collect():
            check_at_least_one("network.num_to_start", self.num_to_start)
        if self.clients and self.num_to_start is not None and self.num_to_start > len(self.clients):
            mistakes.found.append(
                f"network.num_to_start is {self.num_to_start}; it must be at most {len(self.clients)}, the number of"
                " clients."
            )
        for name in ("join_timeout", "rejoin_timeout", "heartbeat_timeout"):
            if not getattr(self, name) > 0:
                mistakes.found.append(f"network.{name} is {getattr(self, name)}; it must be more than 0.")
        mistakes.raise_found()


@dataclass
class ClientModelSection:
    """An entry of `client_models`: a client model that differs from the server's model, and its training settings."""

    name_or_path: str = field(metadata={"help": "Hub id or folder of the pretrained model and its tokenizer."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."})
    kwargs: dict[str, Any] | None = field(default=None, metadata={"help": "Additional arguments of from_pretrained."})
    training: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Training arguments that these clients override."}
    )


@dataclass
class AuditSection:
    """The section `audit`: attacks on what a client sends, which run after training."""

    variants: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "Settings to compare, by name: changes of the recipe, and clip (max_norm of ClipUpdate) and noise"
            " (std of GaussianNoise); default: the recipe itself."
        },
    )
    attacks: list[str] = field(
        default_factory=lambda: list(PAYLOAD_ATTACKS),
        metadata={"help": f"Attacks to run: {', '.join(PAYLOAD_ATTACKS)}."},
    )
    num_models: int = field(
        default=8, metadata={"help": "Number of clients that are simulated, each with a random half of the examples."}
    )
    num_examples: int = field(default=64, metadata={"help": "Number of training examples that the clients share."})
    num_canaries: int = field(default=8, metadata={"help": "Number of inserted random texts; 0: none."})
    num_references: int = field(default=63, metadata={"help": "Number of random texts that no client has."})
    num_inversion_examples: int = field(
        default=1, metadata={"help": "Number of examples of the client whose update is inverted by dager."}
    )
    num_rounds: int = field(default=1, metadata={"help": "Number of rounds of a simulated client."})
    seed: int = field(default=0, metadata={"help": "Seed for drawing the examples of the clients."})

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        unknown = [name for name in self.attacks if name not in PAYLOAD_ATTACKS]
        if unknown:
            mistakes.found.append(
                f"audit.attacks has unknown values: {', '.join(unknown)}. Choose from {', '.join(PAYLOAD_ATTACKS)}."
            )
        for name in ("num_examples", "num_references", "num_inversion_examples", "num_rounds"):
            with mistakes.collect():
                check_at_least_one(f"audit.{name}", getattr(self, name))
        if self.num_models < 4:
            mistakes.found.append(f"audit.num_models is {self.num_models}; it must be at least 4.")
        for name in ("num_canaries", "seed"):
            if getattr(self, name) < 0:
                mistakes.found.append(f"audit.{name} is {getattr(self, name)}; it must be at least 0.")
        for name, changes in self.variants.items():
            if changes is not None and not isinstance(changes, dict):
                mistakes.found.append(f"audit.variants.{name} is {changes!r}; it must be a mapping of changes.")
                continue
            for key in VARIANT_FIELDS:
                value = (changes or {}).get(key)
                if value is not None and not (isinstance(value, (int, float)) and value > 0):
                    mistakes.found.append(f"audit.variants.{name}.{key} is {value!r}; it must be a positive number.")
        mistakes.raise_found()
