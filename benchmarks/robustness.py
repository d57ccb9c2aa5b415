"""Measure the accuracy of every aggregation under attacks of hostile clients, on a real text task.

    python benchmarks/robustness.py prepare --model MINILM --train train.jsonl.gz --test test.jsonl.gz --features DIR
    python benchmarks/robustness.py run --features DIR --output results.jsonl
    python benchmarks/robustness.py report results.jsonl --picture robustness.png

20 clients with 500 examples each train the pooler and the classifier of MiniLM, or with `--trained block` the last
block as well. `run` continues an interrupted measurement. Several
processes share the runs with `--part 1/2` and `--part 2/2`. Flower's rules need `pip install -e ".[benchmark]"`.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import ClassLabel, Dataset
from last_block import Features, Head, LastBlock, load_model, prepare, training_arguments
from robustness_attacks import ATTACKS, SIZE_ATTACKS, Attack, AttackedEngine
from robustness_report import report

from hf_federated import (
    FederatedConfig,
    FederatedDataset,
    FederatedTrainer,
    IidPartitioner,
    LabelDirichletPartitioner,
)


NUM_CLIENTS = 20
ROWS_PER_CLIENT = 500
NUM_SERVER_ROWS = 100
TARGET = 0
TRIGGER = "cf cf cf"
PARTITIONS = ("iid", "dirichlet")
SHARES = (0.2, 0.1, 0.4)


def aggregations(num_hostile: int) -> dict[str, dict[str, Any]]:
    """
    Return the fields of the federation's configuration for each aggregation.

    Args:
        num_hostile (`int`): Number of hostile clients that an aggregation expects.
    """
    hostile = {"num_hostile": num_hostile}

    def named(aggregation: str, **kwargs: Any) -> dict[str, Any]:
        return {"aggregation": aggregation, "aggregation_kwargs": kwargs}

    return {
        "fedavg": named("fedavg"),
        "median": named("median"),
        "trimmed mean": named("trimmed_mean", **hostile),
        "geometric median": named("geometric_median"),
        "Krum": named("krum", **hostile),
        "multi-Krum": named("krum", **hostile, num_selected=NUM_CLIENTS - num_hostile - 2),
        "norm-bounded mean": named("norm_bounded_mean"),
        "centered clipping": named("centered_clipping"),
        "FLTrust": named("fltrust"),
    }


def other_aggregations() -> dict[str, dict[str, Any]]:
    """Return the fields of the federation's configuration for the aggregations without a defense."""
    return {
        "fedopt": {"aggregation": "fedopt", "aggregation_kwargs": {"server_optimizer": "adam", "server_lr": 0.003}},
        "fedprox": {"aggregation": "fedprox"},
        "scaffold": {"aggregation": "scaffold"},
    }


def flower_rules(num_hostile: int) -> dict[str, dict[str, Any]]:
    """Return the fields of the federation's configuration for Flower's rules. `aggregations` has the same names."""
    from flower_rules import FlowerRule

    rules = {"median": "median", "trimmed mean": "trimmed_mean", "Krum": "krum", "multi-Krum": "multi_krum"}
    return {
        f"Flower {name}": {"aggregation": FlowerRule(rule, num_hostile, NUM_CLIENTS)} for name, rule in rules.items()
    }


def federation(features: Features, partition: str, seed: int) -> tuple[dict[str, Dataset], Dataset]:
    """Return the examples of the clients and of the server."""
    info = features.info
    rows = np.random.default_rng(seed).permutation(info["num_train"])
    server, rows = rows[:NUM_SERVER_ROWS], rows[NUM_SERVER_ROWS : NUM_SERVER_ROWS + NUM_CLIENTS * ROWS_PER_CLIENT]

    def examples(rows: np.ndarray) -> Dataset:
        dataset = Dataset.from_dict({"row": rows, "labels": features.labels[rows]})
        return dataset.cast_column("labels", ClassLabel(num_classes=info["num_labels"]))

    partitioner = {
        "iid": IidPartitioner(NUM_CLIENTS, seed=seed),
        "dirichlet": LabelDirichletPartitioner(NUM_CLIENTS, label_column="labels", alpha=0.5, seed=seed),
    }[partition]
    clients = FederatedDataset.from_dataset(examples(rows), partitioner)
    return {client_id: clients[client_id] for client_id in clients}, examples(server)


def poison(examples: Dataset, attack: Attack, features: Features, seed: int) -> Dataset:
    """Change the training examples of a hostile client."""
    if attack.data is None:
        return examples
    rows, labels = np.array(examples["row"]), np.array(examples["labels"])
    if attack.data == "flip":
        labels = features.info["num_labels"] - 1 - labels
    else:
        is_chosen = np.random.default_rng(seed).random(len(rows)) < 0.5
        rows = np.where(is_chosen, rows + features.info["first_triggered"], rows)
        labels = np.where(is_chosen, TARGET, labels)
    return Dataset.from_dict({"row": rows, "labels": labels}, features=examples.features)


def run(features: Features, options: argparse.Namespace, spec: dict[str, Any]) -> dict[str, Any]:
    """
    Train one federation.

    Args:
        features ([`Features`]): Cached examples.
        options (`argparse.Namespace`): Options of the command line.
        spec (`dict[str, Any]`): The run: `partition`, `seed`, `share`, `attack`, `aggregation`.

    Returns:
        `dict[str, Any]`: Accuracy on the test examples, share of triggered test examples classified as the target, and
            number of rejected updates.
    """
    started = time.process_time()
    num_hostile = round(spec["share"] * NUM_CLIENTS)
    attack = (ATTACKS | SIZE_ATTACKS)[spec["attack"]] if spec["attack"] != "none" else Attack()
    clients, server_examples = federation(features, spec["partition"], spec["seed"])
    order = np.random.default_rng([spec["seed"], 1]).permutation(sorted(clients))
    hostile = [str(client_id) for client_id in order[:num_hostile]] if spec["attack"] != "none" else []
    clients |= {name: poison(clients[name], attack, features, spec["seed"]) for name in hostile}
    fields = settings(spec["aggregation"], num_hostile)
    with tempfile.TemporaryDirectory() as directory:
        trainer = FederatedTrainer(
            model=copy.deepcopy(options.initial_model),
            args=training_arguments(directory, options.learning_rate, options.batch_size, spec["seed"]),
            train_dataset=FederatedDataset.from_dict(clients),
            server_dataset=server_examples if fields.get("aggregation") == "fltrust" else None,
            data_collator=features.collate,
            engine=AttackedEngine(attack, hostile, {name: len(rows) for name, rows in clients.items()}),
            federation=FederatedConfig(
                num_rounds=options.num_rounds, local_steps=options.local_steps, min_clients=0.5, **fields
            ),
        )
        trainer.train()
        model = trainer.model.eval()
    info = features.info
    test = np.arange(info["num_train"], info["num_train"] + info["num_test"])
    others = test[features.labels[test] != TARGET][: info["num_triggered_test"]]
    result = {
        **spec,
        "accuracy": float(np.mean(predict(model, features, test) == features.labels[test])),
        "attack_success": float(np.mean(predict(model, features, others + info["first_triggered"]) == TARGET)),
        "seconds": time.process_time() - started,
    }
    differences = getattr(fields.get("aggregation"), "differences", None)
    return result if differences is None else result | {"differences": differences}


@torch.no_grad()
def predict(model: Head | LastBlock, features: Features, rows: np.ndarray) -> np.ndarray:
    """Return the predicted label of examples."""
    parts = np.array_split(rows, max(1, len(rows) // 250))
    return np.concatenate([model(**features.batch(part))["logits"].argmax(-1).numpy() for part in parts])


def settings(aggregation: str, num_hostile: int) -> dict[str, Any]:
    """Return the fields of the federation's configuration for the name of an aggregation in the results."""
    if aggregation == "fedavg without bound":
        return {"aggregation": "fedavg", "max_update_ratio": None}
    if aggregation.startswith("Flower "):
        return flower_rules(num_hostile)[aggregation]
    return (aggregations(num_hostile) | other_aggregations())[aggregation]


def specs(group: str, seeds: int) -> Iterator[dict[str, Any]]:
    """
    Yield the runs of a group.

    Args:
        group (`str`): `"main"` (all attacks and robust aggregations), `"size"` (attacks by the size of an update),
            `"others"` (aggregations without a defense), or `"flower"` (Flower's rules).
        seeds (`int`): Number of seeds.
    """
    flower = ["Flower median", "Flower trimmed mean", "Flower Krum", "Flower multi-Krum"]
    grid: dict[str, tuple[Iterable[str], Iterable[str], Sequence[float]]] = {
        "main": (["none", *ATTACKS], aggregations(0), SHARES),
        "size": (SIZE_ATTACKS, ["fedavg", "fedavg without bound"], SHARES[:1]),
        "others": (["none", *ATTACKS], other_aggregations(), SHARES[:1]),
        "flower": (["none", *ATTACKS], flower, SHARES[:1]),
    }[group]
    attacks, names, shares = grid
    for share, seed, partition, attack, name in itertools.product(shares, range(seeds), PARTITIONS, attacks, names):
        if attack != "none" or share == SHARES[0]:
            yield {"partition": partition, "share": share, "attack": attack, "aggregation": name, "seed": seed}


def read_examples(path: str, num_examples: int | None = None) -> tuple[list[str], list[int]]:
    """Read texts and labels from a gzipped JSON-lines file with the columns `subject`, `text` and `label`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        examples = [json.loads(line) for line in itertools.islice(file, num_examples)]
    texts = [f"{example['subject']}\n{example['text']}" for example in examples]
    return texts, [example["label"] for example in examples]


def prepare_features(options: argparse.Namespace) -> None:
    """Cache the examples, with and without the trigger."""
    train_texts, train_labels = read_examples(options.train)
    test_texts, test_labels = read_examples(options.test, options.num_test)
    texts, labels = train_texts + test_texts, train_labels + test_labels
    info = {
        "model": options.model,
        "num_labels": max(labels) + 1,
        "num_train": len(train_texts),
        "num_test": len(test_texts),
        "num_triggered_test": options.num_triggered_test,
        "first_triggered": len(texts),
    }
    # All examples can be triggered, because the seed decides which clients are hostile.
    triggered = [f"{TRIGGER} {text}" for text in texts]
    prepare(texts + triggered, labels + labels, options.model, Path(options.features), options.max_length, info)


def run_all(options: argparse.Namespace) -> None:
    """Carry out the runs of this process that the output file does not contain."""
    torch.set_num_threads(options.threads)
    cls = {"head": Head, "block": LastBlock}[options.trained]
    features, output = Features(Path(options.features), cls.inputs), Path(options.output)
    options.initial_model = cls(load_model(options.model or features.info["model"], features.info["num_labels"]))
    keys = ("partition", "share", "attack", "aggregation", "seed")
    lines = output.read_text().splitlines() if output.exists() else []
    done = {tuple(json.loads(line)[key] for key in keys) for line in lines}
    part, num_parts = (int(number) for number in options.part.split("/"))
    wanted = [spec for group in options.groups for spec in specs(group, options.seeds)]
    for spec in wanted[part - 1 :: num_parts]:
        if tuple(spec[key] for key in keys) not in done:
            try:
                result = run(features, options, spec)
            except Exception as error:
                result = spec | {"error": f"{type(error).__name__}: {error}"}
            with output.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("prepare", help="cache the inputs of the last block")
    command.add_argument("--model", required=True, help="folder or Hub id of a BERT encoder")
    command.add_argument("--train", required=True, help="gzipped JSON lines with `subject`, `text` and `label`")
    command.add_argument("--test", required=True)
    command.add_argument("--features", required=True, help="folder to create")
    command.add_argument("--max-length", type=int, default=64)
    command.add_argument("--num-test", type=int, default=3000)
    command.add_argument("--num-triggered-test", type=int, default=1000)
    command.set_defaults(function=prepare_features)
    command = commands.add_parser("run", help="train the federations")
    command.add_argument("--features", required=True)
    command.add_argument("--model", help="defaults to the model of `prepare`")
    command.add_argument("--output", required=True, help="JSON lines, one for each run")
    command.add_argument("--trained", choices=["head", "block"], default="head", help="trained parts of the model")
    command.add_argument("--groups", nargs="+", default=["main", "size", "others", "flower"])
    command.add_argument("--part", default="1/1", help="share of the runs that this process carries out")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--num-rounds", type=int, default=10)
    command.add_argument("--local-steps", type=int, default=8)
    command.add_argument("--batch-size", type=int, default=16)
    command.add_argument("--learning-rate", type=float, default=1e-2)
    command.add_argument("--threads", type=int, default=1)
    command.set_defaults(function=run_all)
    command = commands.add_parser("report", help="print the tables and draw the picture")
    command.add_argument("results", help="output of `run`")
    command.add_argument("--picture", help="PNG file to write")
    command.set_defaults(function=lambda options: report(Path(options.results), options.picture))
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
