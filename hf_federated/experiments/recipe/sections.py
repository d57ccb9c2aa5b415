"""Dataclasses of the recipe sections `model`, `data`, `public`, `client_models`, `network` and `audit`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_federated.experiments.recipe.schema import (
    RecipeError,
    Section,
    check_section,
    dataclass_fields,
    documented,
    too_small,
)


if TYPE_CHECKING:
    from hf_federated.data.tables import TableOptions

# The default of `training.output_dir`.
DEFAULT_OUTPUT_DIR = "trainer_output"
# Share of the examples of each client that are test examples, if the data has no test split.
DEFAULT_TEST_EXAMPLES = 0.1
# The value of `model.name_or_path` for TF-IDF weights with a singular value decomposition in place of a model.
TFIDF = "tfidf-svd"
# Hidden units of the head `mlp`.
DEFAULT_HEAD_HIDDEN = 256
# The attacks of `hf_federated.audits.payloads`. The names are listed here, so that a check imports no torch.
PAYLOAD_ATTACKS = ("token_set", "dager", "loss_threshold", "lira", "canary")
# Fields of a variant of `audit.variants` that are not sections of a recipe.
VARIANT_FIELDS = ("clip", "noise", "num_summed")


@dataclass
class ModelSection(Section):
    """The section `model`: the initial model of every client."""

    name_or_path: str = field(
        metadata={
            "help": "Hub id or folder of the pretrained model and its tokenizer, or tfidf-svd (with head) for features"
            " without a model."
        }
    )
    revision: str | None = documented("Branch, tag or commit of the model on the Hub.")
    decoder_name_or_path: str | None = documented(
        "Pretrained decoder for sequence-to-sequence tasks, connected to the encoder name_or_path by new"
        " cross-attention."
    )
    kwargs: dict[str, Any] | None = documented(
        "Additional arguments of from_pretrained, such as num_hidden_layers; for tfidf-svd: num_components, max_words."
    )
    lora: dict[str, Any] | None = documented("Fields of peft.LoraConfig; clients train and send only the adapter.")
    prefix: dict[str, Any] | None = documented(
        "Fields of peft.PrefixTuningConfig (P-Tuning v2); clients train only the prefixes."
    )
    head: Literal["logistic", "mlp", "blocks"] | None = documented(
        "Freeze the model, cache its features, and train only a head: logistic, mlp, or the blocks behind freeze;"
        " default: train the whole model."
    )
    head_hidden: int | None = documented(f"Hidden units of the head mlp (default: {DEFAULT_HEAD_HIDDEN}).")
    pooling: Literal["mean", "cls"] | None = documented(
        "Features of the heads logistic and mlp: the mean over all tokens, or the first token (default: mean)."
    )
    freeze: str | None = documented(
        "Frozen part of the head blocks, such as embeddings+4, whose hidden states are cached."
    )

    def mistakes(self) -> Iterator[str]:
        if self.lora is not None and self.prefix is not None:
            yield "model: lora and prefix are both set. Set either lora or prefix; a model has one adapter."
        yield from self._head_mistakes()

    def _head_mistakes(self) -> Iterator[str]:
        """Check the fields of cached features."""
        heads = {"head_hidden": ("mlp",), "pooling": ("logistic", "mlp"), "freeze": ("blocks",)}
        for name, allowed in heads.items():
            if getattr(self, name) is not None and self.head not in allowed:
                found = "without head" if self.head is None else f"with head: {self.head}"
                yield f"model.{name} is set {found}. Remove it, or set model.head to {' or '.join(allowed)}."
        if self.head == "blocks" and self.freeze is None:
            yield "model.head is blocks without model.freeze. Set freeze to the frozen part, such as embeddings+4."
        yield from too_small(self, "model.", head_hidden=1)
        if self.name_or_path == TFIDF and (self.head not in ("logistic", "mlp") or self.pooling is not None):
            yield f"model.name_or_path is {TFIDF}. Set model.head to logistic or mlp, and remove model.pooling."
        if self.head is None:
            return
        if self.decoder_name_or_path is not None:
            yield "model.head is set with decoder_name_or_path. Cached features need an encoder; remove one of them."
        if self.prefix is not None or (self.lora is not None and self.head != "blocks"):
            adapter = "lora" if self.lora is not None else "prefix"
            yield f"model.{adapter} is set with head: {self.head}. Remove it; only head: blocks accepts lora."


@dataclass
class DataSection(Section):
    """The section `data`: the dataset, and the part of it that is held out for testing."""

    path: str = field(metadata={"help": "Hub id, or a local folder or file (Parquet, JSON, CSV or Excel)."})
    name: str | None = documented("Configuration of the dataset on the Hub.")
    revision: str | None = documented("Branch, tag or commit of the dataset on the Hub.")
    train_split: str = documented("Split that is distributed over the clients.", "train")
    test_path: str | None = documented("File, folder or Hub id with the test examples, if path does not have them.")
    test_split: str | None = documented(
        "Split to test on, of test_path or else of path (default: test or validation, if path has it and"
        " neither test_examples nor test_clients is set)."
    )
    further_test_splits: list[str] = documented("Additional splits to evaluate the trained model on.", list)
    test_examples: float | None = documented(
        "Share of the examples of each client to hold out for testing, with the label shares of the client"
        f" (default without a test split: {DEFAULT_TEST_EXAMPLES}; 0: none)."
    )
    test_clients: int | float | None = documented(
        "Randomly chosen clients to hold out for testing: a count (10) or a share (0.2); 0 or null: none."
    )
    validation_split: str | None = documented("Split to choose settings on, in place of validation_examples.")
    validation_examples: float | None = documented(
        "Share of the training examples of each client to choose settings on, held out after the test examples, with"
        " the label shares of the client. No run trains on them."
    )
    evaluate_on: Literal["test", "validation"] = documented(
        "Examples that a run is evaluated on. With validation, the run does not load a test split.",
        "test",
    )
    max_clients: int | None = documented("Maximum number of training clients, chosen at random with seed.")
    max_train_rows: int | None = documented(
        "Maximum number of examples of train_split, sampled with seed before any are held out."
    )
    max_test_rows: int | None = documented(
        "Maximum number of test examples (and of each further test split, and of validation examples), sampled with"
        " seed."
    )
    csv: dict[str, Any] | None = documented(
        "How CSV files are read, where the files do not show it: separator (such as ';' or tab), encoding (such as"
        " cp1252), quote (a character, or none), decimal (',' or '.') and text_columns (columns whose numbers stay"
        " text)."
    )
    drop_empty: bool = documented("Drop examples with an empty text or answer.", False)
    drop_incomplete: bool = documented(
        "Drop examples without a text, a label or a client, and print their number at each site.", False
    )
    seed: int = documented("Seed for sampling examples and clients, and for holding them out.", 0)

    def mistakes(self) -> Iterator[str]:
        yield from self._test_source_mistakes()
        same_data = self.test_path is None or Path(self.test_path) == Path(self.path)
        if same_data and self.test_split == self.train_split:
            yield f"data.test_split is {self.test_split!r}, which is the training split. Choose another split."
        for split in self.further_test_splits:
            if (
                split in (self.train_split, self.test_split if same_data else None)
                or self.further_test_splits.count(split) > 1
            ):
                yield f"data.further_test_splits: {split!r} is train_split, test_split or a duplicate. Remove it."
        yield from self._validation_mistakes()
        yield from too_small(self, "data.", seed=0, max_clients=1, max_train_rows=1, max_test_rows=1)
        yield from self._csv_mistakes()

    @property
    def table_options(self) -> TableOptions:
        """The options of `csv`."""
        from hf_federated.data.tables import TableOptions

        return TableOptions(**(self.csv or {}))

    def _csv_mistakes(self) -> Iterator[str]:
        if not self.csv:
            return
        # A recipe without the field is checked without an import of `datasets`.
        from hf_federated.data.tables import TableOptions

        try:
            check_section("data.csv", self.csv, dataclass_fields(TableOptions))
        except RecipeError as error:
            yield from error.mistakes
            return
        try:
            TableOptions(**self.csv)
        except ValueError as error:
            yield f"data.csv.{error}"

    @property
    def finds_test_split(self) -> bool:
        """Whether the recipe leaves the choice of the test examples to the data: a test split, if the data has one."""
        return self.evaluate_on == "test" and not self._names_test

    @property
    def _names_test(self) -> bool:
        return bool(self.test_path or self.test_split or self.test_examples or self.test_clients)

    def _validation_mistakes(self) -> Iterator[str]:
        """Check the fields that choose the validation examples."""
        if self.validation_split is None and self.validation_examples is None:
            if self.evaluate_on == "validation":
                yield (
                    "data.evaluate_on is validation, but the recipe has no validation examples. Set"
                    " data.validation_examples to a share such as 0.1, or data.validation_split to a split."
                )
            return
        if self.validation_split is not None and self.validation_examples is not None:
            yield "data: validation_split and validation_examples are both set. Set one of them."
        if not self._names_test:
            given = "validation_split" if self.validation_examples is None else "validation_examples"
            yield (
                f"data.{given} is set, but the recipe does not name its test examples, so a run on validation examples"
                " cannot leave them out. Set data.test_split, test_path, test_examples or test_clients."
            )
        used = {self.train_split, self.test_split, *self.further_test_splits}
        if self.validation_split is not None and self.validation_split in used:
            yield (
                f"data.validation_split is {self.validation_split!r}, which is also a training or test split. Choose"
                " another split."
            )
        if self.validation_examples is not None and not 0 < self.validation_examples < 1:
            yield (
                f"data.validation_examples is {self.validation_examples}; it must be a share of the training examples"
                " of each client, above 0 and below 1."
            )

    def _test_source_mistakes(self) -> Iterator[str]:
        """Check the fields that choose the test examples. At most one of them is set; 0 counts as not set."""
        given = [name for name in ("test_path", "test_split", "test_examples", "test_clients") if getattr(self, name)]
        if len(given) > 1 and given != ["test_path", "test_split"]:
            yield (
                f"data: {' and '.join(given)} are set, but a run has one source of test examples. Set one of test_path"
                " (a file or folder), test_split (a split), test_examples (a share of the examples of each client) and"
                " test_clients (clients to hold out)."
            )
        if self.test_split is None and self.test_path is not None and Path(self.test_path) == Path(self.path):
            yield (
                f"data.test_path is {self.test_path}, which is also data.path, so a run would test on its training"
                " examples. Set another file or folder, or set data.test_split to a split of it."
            )
        if self.test_examples is not None and not 0 <= self.test_examples < 1:
            yield (
                f"data.test_examples is {self.test_examples}; it must be a share of the examples of each client, at"
                " least 0 and below 1."
            )
        if self.test_clients is not None:
            is_share = isinstance(self.test_clients, float)
            if self.test_clients < 0 or (is_share and self.test_clients >= 1):
                yield (
                    f"data.test_clients is {self.test_clients}; it must be a count such as 2, a share between 0 and 1,"
                    " or 0 to hold out no client."
                )


@dataclass
class PublicSection(Section):
    """
    The section `public`: examples for distillation, set aside from the training examples or read from files.

    Public examples lose their labels and are available to the server and all clients. The server can also hold labeled
    examples that no client has.
    """

    share: float | None = documented("Share of the training examples that the server and all clients hold.")
    server_share: float = documented(
        "Share of the training examples that only the server holds, with labels, also for FLTrust.", 0.0
    )
    stratify_by_column: str | None = documented("Take the same share of each value of this column, such as a domain.")
    max_rows: int | None = documented("Maximum number of public examples, sampled with data.seed.")
    max_server_rows: int | None = documented("Maximum number of examples of the server, sampled with data.seed.")
    path: str | None = documented(
        "File, folder or Hub id with the public examples, in place of share. Labels are dropped."
    )
    server_path: str | None = documented(
        "File, folder or Hub id with the examples of the server, in place of server_share."
    )

    def mistakes(self) -> Iterator[str]:
        if (self.share is None) == (self.path is None):
            found = "are both set" if self.path else "are both missing"
            yield (
                f"public: share and path {found}. Set share to set aside training examples, or path to a file with"
                " the public examples."
            )
        if self.path is not None and (self.server_share or self.stratify_by_column is not None):
            yield (
                "public: server_share and stratify_by_column need share, but path is set. Set server_path to the"
                " examples of the server."
            )
        if self.server_path is not None and self.path is None:
            yield "public: server_path is set without path. Set path to the public examples."
        yield from too_small(self, "public.", max_rows=1, max_server_rows=1)


@dataclass
class NetworkSection(Section):
    """The section `network`: the clients of `hf-federated serve`, and how long the server waits for them."""

    clients: list[str] = documented("Ids of the clients, in the order in which client_models are assigned.", list)
    address: str | None = documented("Address of the server, as host:port, for serve and for join.")
    num_to_start: int | None = documented(
        "Number of clients that must have joined before the first round (default: all)."
    )
    join_timeout: float = documented("Seconds that the server waits for these clients.", 3600.0)
    rejoin_timeout: float = documented("Seconds that a round waits for a client that has left or was lost.", 60.0)
    heartbeat_timeout: float = documented("Seconds without a sign of a client after which the client is lost.", 60.0)

    def mistakes(self) -> Iterator[str]:
        if len(set(self.clients)) != len(self.clients):
            yield f"network.clients is {self.clients}; each client must be listed once."
        yield from too_small(self, "network.", num_to_start=1)
        if self.clients and self.num_to_start is not None and self.num_to_start > len(self.clients):
            yield (
                f"network.num_to_start is {self.num_to_start}; it must be at most {len(self.clients)}, the number of"
                " clients."
            )
        for name in ("join_timeout", "rejoin_timeout", "heartbeat_timeout"):
            if not getattr(self, name) > 0:
                yield f"network.{name} is {getattr(self, name)}; it must be more than 0."


@dataclass
class ClientModelSection:
    """An entry of `client_models`: a client model that differs from the server's model, and its training settings."""

    name_or_path: str = field(metadata={"help": "Hub id or folder of the pretrained model and its tokenizer."})
    revision: str | None = documented("Branch, tag or commit of the model on the Hub.")
    kwargs: dict[str, Any] | None = documented("Additional arguments of from_pretrained.")
    head: Literal["logistic", "mlp", "blocks"] | None = documented("As head of the section model.")
    head_hidden: int | None = documented("As head_hidden of the section model.")
    pooling: Literal["mean", "cls"] | None = documented("As pooling of the section model.")
    freeze: str | None = documented("As freeze of the section model.")
    training: dict[str, Any] = documented("Training arguments that these clients override.", dict)

    @property
    def model(self) -> ModelSection:
        """The section `model` of these clients."""
        return ModelSection(
            self.name_or_path,
            self.revision,
            kwargs=self.kwargs,
            head=self.head,
            head_hidden=self.head_hidden,
            pooling=self.pooling,
            freeze=self.freeze,
        )


@dataclass
class AuditSection(Section):
    """The section `audit`: attacks on what a client sends, which run after training."""

    variants: dict[str, Any] = documented(
        "Settings to compare, by name: changes of the recipe, and clip (max_norm of ClipUpdate), noise (std of"
        " GaussianNoise) and num_summed (number of clients whose updates the attacked payload sums); default: the"
        " recipe itself.",
        dict,
    )
    attacks: list[str] = documented(f"Attacks to run: {', '.join(PAYLOAD_ATTACKS)}.", lambda: list(PAYLOAD_ATTACKS))
    num_models: int = documented("Number of clients that are simulated, each with a random half of the examples.", 8)
    num_examples: int = documented("Number of training examples that the clients share.", 64)
    num_canaries: int = documented("Number of inserted random texts; 0: none.", 8)
    num_references: int = documented("Number of random texts that no client has.", 63)
    num_inversion_examples: int = documented("Number of examples of the client whose update is inverted by dager.", 1)
    num_rounds: int = documented("Number of rounds of a simulated client.", 1)
    seed: int = documented("Seed for drawing the examples of the clients.", 0)

    def mistakes(self) -> Iterator[str]:
        unknown = [name for name in self.attacks if name not in PAYLOAD_ATTACKS]
        if unknown:
            yield f"audit.attacks has unknown values: {', '.join(unknown)}. Choose from {', '.join(PAYLOAD_ATTACKS)}."
        yield from too_small(self, "audit.", num_examples=1, num_references=1, num_inversion_examples=1, num_rounds=1)
        yield from too_small(self, "audit.", num_models=4, num_canaries=0, seed=0)
        for name, changes in self.variants.items():
            if changes is not None and not isinstance(changes, dict):
                yield f"audit.variants.{name} is {changes!r}; it must be a mapping of changes."
                continue
            for key in VARIANT_FIELDS:
                value = (changes or {}).get(key)
                if value is not None and not (isinstance(value, (int, float)) and value > 0):
                    yield f"audit.variants.{name}.{key} is {value!r}; it must be a positive number."
                elif key == "num_summed" and isinstance(value, float):
                    yield f"audit.variants.{name}.{key} is {value!r}; it must be a number of clients, such as 3."


@dataclass(kw_only=True)
class TopLevelFields(Section):
    """The fields of a recipe that belong to no section."""

    client_models: list[ClientModelSection] = documented(
        "Models that are assigned to the clients in turn, each {name_or_path, revision, kwargs, head, head_hidden,"
        " pooling, freeze, training}.",
        list,
    )
    compare: list[Literal["centralized", "local"]] = documented("Baselines to train in the same run.", list)
    local_clients: int | None = documented(
        "Number of clients, chosen at random, that train alone for 'local'; default: all."
    )
    plots: bool = documented("Write plots as PNG files (requires the extra plots).", False)
    scale: str = documented("Name of the scale whose changes are merged into the recipe.", "default")
    benchmark: dict[str, Any] | None = documented("The runs that hf-federated benchmark executes.")
