"""Write a first recipe from five answers: the data, the task, the model, the method and where the clients are."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_federated.experiments.recipe.fields import named_section_fields
from hf_federated.utils.printable import printable


# A small model for each task, with which a first run is fast.
MODELS = {
    "text-classification": "distilbert/distilbert-base-uncased",
    "cloze-classification": "HuggingFaceTB/SmolLM2-135M",
    "sequence-tagging": "distilbert/distilbert-base-cased",
    "question-answering": "distilbert/distilbert-base-cased",
    "seq2seq": "google/flan-t5-small",
    "language-modeling": "HuggingFaceTB/SmolLM2-135M",
    "summarization": "HuggingFaceTB/SmolLM2-135M",
    "superglue-classification": "distilbert/distilbert-base-uncased",
    "superglue-seq2seq": "google/flan-t5-small",
    "superglue-cloze": "HuggingFaceTB/SmolLM2-135M",
}
# Names that columns have in published datasets, by the argument of a task. The first name that the data has is used.
USUAL_COLUMNS = {
    "text_column": ("text", "sentence", "review", "content", "body", "comment", "message", "description", "note"),
    "label_column": ("label", "labels", "category", "class", "sentiment", "rating", "target", "topic", "intent"),
    "tokens_column": ("tokens", "words"),
    "tags_column": ("ner_tags", "tags", "labels", "pos_tags"),
    "source_column": ("source", "document", "article", "dialogue", "text", "input", "prompt"),
    "target_column": ("target", "targets", "summary", "highlights", "output", "response", "completion"),
}


@dataclass(frozen=True)
class Method:
    """
    A method that a first recipe can have.

    Args:
        purpose (`str`): When to choose the method.
        federation (`Sequence[str]`): Lines of the section `federation`.
        model (`Sequence[str]`): Lines of the section `model`.
        needs_public (`bool`): Whether the server and all clients need public examples.
    """

    purpose: str
    federation: Sequence[str] = ("aggregation: fedavg",)
    model: Sequence[str] = ()
    needs_public: bool = False


METHODS = {
    "fedavg": Method("one model, clients with similar data"),
    "fedprox": Method(
        "one model, clients with different labels",
        (
            "aggregation: fedprox",
            "aggregation_kwargs: {proximal_weight: 0.01}  # larger: clients stay closer",
        ),
    ),
    "scaffold": Method(
        "one model, very different clients; twice the traffic",
        ("aggregation: scaffold",),
    ),
    "lora": Method(
        "a large model: clients train and send an adapter",
        ("aggregation: fedavg",),
        ("lora: {r: 8, lora_alpha: 16, target_modules: all-linear}",),
    ),
    "geometric_median": Method(
        "some clients may be wrong or malicious",
        ("aggregation: geometric_median",),
    ),
    "feddf": Method(
        "one model, public texts that all parties may use",
        ("aggregation: fedavg", "distillation: feddf"),
        needs_public=True,
    ),
    "dsfl": Method(
        "clients with different models, public texts; clients send predictions",
        ("distillation: dsfl",),
        needs_public=True,
    ),
}
# Words that YAML reads as other values than texts.
YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")
# Where the clients are.
PLACES = {
    "files": "each file of a folder is a client",
    "column": "a column of the data names the client of each example",
    "simulated": "nowhere yet: the examples are divided at random, to try a method",
    "federated": "the data is a federated dataset of `hf-federated partition`",
    "machines": "on other machines, each with its own examples",
}


@dataclass(frozen=True)
class StarterAnswers:
    """
    The answers from which a first recipe is written.

    Args:
        data (`str`): A file, a folder or a Hub id.
        task (`str`): The name of a task.
        model (`str`): A Hub id or a folder.
        method (`str`): A name of `METHODS`.
        clients (`str`): A name of `PLACES`.
        columns (`Sequence[str]`): The columns of the data, if they are known.
        label_names (`Sequence[str]`): The labels of the data, if the clients are on other machines.
        client_column (`str`): The column that names the client.
        num_clients (`int`): The number of simulated clients.
        client_names (`Sequence[str]`): The names of clients on other machines.
        csv (`Mapping[str, str or list[str]]`): The fields of `data.csv`.
    """

    data: str
    task: str
    model: str
    method: str
    clients: str
    columns: Sequence[str] = ()
    label_names: Sequence[str] = ()
    client_column: str = "site"
    num_clients: int = 10
    client_names: Sequence[str] = ("north", "south")
    csv: Mapping[str, str | list[str]] = field(default_factory=dict)


def guess_columns(task: str, columns: Sequence[str]) -> dict[str, str]:
    """
    Find the columns of a task in the columns of the data.

    Args:
        task (`str`): The name of the task.
        columns (`Sequence[str]`): The columns of the data.

    Returns:
        `dict[str, str]`: The column of each argument of the task whose name ends in `_column`. A column that is not
        found has the default of the task.
    """
    arguments = {name: item for name, item in named_section_fields()["task"][task].items() if name.endswith("_column")}
    by_name = {column.lower(): column for column in reversed(columns)}
    found = {}
    for name, item in arguments.items():
        candidates = (str(item.default), *USUAL_COLUMNS.get(name, ()))
        found[name] = next((by_name[usual] for usual in candidates if usual in by_name), str(item.default))
    return found


def guess_task(columns: Sequence[str]) -> str:
    """The task whose columns the data has, otherwise text classification."""
    order = ("question-answering", "sequence-tagging", "seq2seq", "text-classification", "language-modeling")
    for task in order:
        wanted = guess_columns(task, columns)
        if wanted and set(wanted.values()) - {"id"} <= set(columns):
            return task
    return "text-classification"


def starter_recipe(answers: StarterAnswers, file: str = "recipe.yaml") -> str:
    """
    Write the recipe.

    Args:
        answers ([`StarterAnswers`]): The answers.
        file (`str`, *optional*, defaults to `"recipe.yaml"`): The file of the recipe, for the command in its first
            line.
    """
    train, serve = f"hf-federated train {shlex.quote(file)}", f"hf-federated serve {shlex.quote(file)}"
    command = f"{serve} --certificates tls" if answers.clients == "machines" else train
    method = METHODS[answers.method]
    sections = [
        _section("model", [f"name_or_path: {_yaml(answers.model)}", *method.model]),
        _section("data", _data_lines(answers)),
        _section("task", _task_lines(answers)),
        _section("partition", _partition_lines(answers)),
        _section("public", _public_lines(answers) if method.needs_public else []),
        _section(
            "training",
            [
                "output_dir: outputs/first-run",
                "learning_rate: 5e-5" if not method.model else "learning_rate: 5e-4  # adapters need a larger one",
                "per_device_train_batch_size: 16",
                "logging_steps: 1  # rounds",
                'eval_strategy: "no"  # epoch: test after each round, with data.test_path'
                if answers.clients == "machines"
                else "eval_strategy: epoch  # test after each round",
                "save_total_limit: 2  # checkpoints",
                "seed: 0",
            ],
        ),
        _section(
            "federation",
            [
                "num_rounds: 5",
                "local_epochs: 1  # passes of a client over its examples in a round",
                "clients_per_round: 1.0  # a share, or a number such as 10",
                *method.federation,
            ],
        ),
        _section("network", _network_lines(answers)),
    ]
    if answers.clients != "machines":
        sections.append(
            "# Two baselines, which take as long as the run: all examples together, and each client alone.\n"
            "# compare: [centralized, local]\n"
        )
    head = f"# {command}\n#\n# {answers.method}: {method.purpose}.\n# `hf-federated train --help` lists all fields.\n"
    return "\n".join([head, *filter(None, sections)])


def next_commands(answers: StarterAnswers, recipe: str) -> list[str]:
    """The commands that lead from the recipe to a trained model."""
    if answers.clients == "machines":
        clients = " ".join(f"--client {shlex.quote(name)}" for name in answers.client_names)
        return [
            f"hf-federated certificates tls --server localhost {clients}",
            f"hf-federated serve {shlex.quote(recipe)} --certificates tls",
            *(
                f"hf-federated join {shlex.quote(recipe)} --certificates tls --client {shlex.quote(name)} --examples"
                f" {shlex.quote(answers.data)}"
                for name in answers.client_names
            ),
        ]
    train = f"hf-federated train {shlex.quote(recipe)}"
    if answers.clients == "files":
        options = [
            shlex.join([f"--csv-{name.replace('_', '-')}", *([value] if isinstance(value, str) else value)])
            for name, value in answers.csv.items()
        ]
        words = ["hf-federated partition", shlex.quote(answers.data), "--client-per-file --output clients", *options]
        return [" ".join(words), train]
    return [train]


def _section(name: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{name}:", *(f"  {line}" for line in lines), ""]) if lines else ""


def _data_lines(answers: StarterAnswers) -> list[str]:
    if answers.clients == "files":
        return ["path: clients  # written by `hf-federated partition`"]
    csv = [f"csv: {{{', '.join(f'{name}: {_yaml(value)}' for name, value in answers.csv.items())}}}"]
    if answers.clients == "machines":
        return [
            "path: examples  # each client names its examples with --examples",
            *(csv if answers.csv else []),
            "# test_path: test.csv  # examples of the server, on which it tests the model",
        ]
    lines = [f"path: {_yaml(answers.data)}", *(csv if answers.csv else [])]
    if answers.clients != "federated":
        lines.append("# test_path: test.csv  # default: a split `test`, or a tenth of the examples of each client")
    return lines


def _task_lines(answers: StarterAnswers) -> list[str]:
    lines = [f"name: {answers.task}"]
    fields = named_section_fields()["task"][answers.task]
    columns = guess_columns(answers.task, answers.columns)
    for name, column in columns.items():
        is_missing = answers.columns and column not in answers.columns
        # A column name may have a line break, which would end the comment.
        comment = f"  # not a column of the data: {printable(', '.join(answers.columns), 300)}" if is_missing else ""
        lines.append(f"{name}: {_yaml(column)}{comment}")
    if answers.task == "cloze-classification":
        lines += [
            "label_names: [negative, positive]  # change to the labels of your data",
            "words: [bad, good]  # the word that the model predicts for each label",
        ]
    elif answers.label_names:
        lines.append(f"label_names: {_yaml(list(answers.label_names))}")
    elif "label_names" in fields and answers.clients == "machines":
        lines.append('label_names: ["no", "yes"]  # change to the labels of all clients')
    elif "tag_names" in fields and answers.clients == "machines":
        lines.append("tag_names: [O, B-PER, I-PER]  # change to the tags of all clients")
    if "max_length" in fields and answers.task != "question-answering":
        lines.append("max_length: 256  # tokens; longer texts are cut")
    return lines


def _partition_lines(answers: StarterAnswers) -> list[str]:
    if answers.clients == "column":
        return ["name: natural", f"column: {_yaml(answers.client_column)}"]
    if answers.clients != "simulated":
        return []
    columns = guess_columns(answers.task, answers.columns)
    if answers.task != "text-classification":
        return ["name: iid", f"num_clients: {answers.num_clients}"]
    return [
        "name: label-dirichlet  # clients have different labels; iid: they are alike",
        f"num_clients: {answers.num_clients}",
        "alpha: 0.5  # smaller: the clients differ more",
        f"label_column: {_yaml(columns['label_column'])}",
    ]


def _public_lines(answers: StarterAnswers) -> list[str]:
    if answers.clients in ("column", "simulated"):
        return ["share: 0.2  # of the training examples, without labels, for the server and all clients"]
    return ["path: public.csv  # texts that the server and all clients may use; write this file before you train"]


def _network_lines(answers: StarterAnswers) -> list[str]:
    if answers.clients != "machines":
        return []
    return [
        f"clients: {_yaml(list(answers.client_names))}",
        "address: localhost:50051  # of the server; change it to the name of its machine",
    ]


def _yaml(value: str | list[str]) -> str:
    """A value in YAML. JSON strings are YAML strings."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    is_plain = value.replace("/", "").replace("-", "").replace("_", "").replace(".", "").isalnum()
    starts_plain = value[:1].isalpha() and value.lower() not in YAML_WORDS
    return value if is_plain and starts_plain else json.dumps(value, ensure_ascii=not value.isprintable())
