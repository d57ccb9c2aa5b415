"""Measure the bytes and the accuracy of each `exchange_codec`, on a real text task.

    python benchmarks/exchange_codecs.py prepare --model MINILM --train TRAIN.jsonl.gz --test TEST.jsonl.gz \\
        --features DIR
    python benchmarks/exchange_codecs.py run --features DIR --output results.jsonl
    python benchmarks/exchange_codecs.py report results.jsonl

8 clients with label-Dirichlet(0.3) examples train for 20 rounds: all parameters of the pooler and the classifier of
MiniLM (`head`), or LoRA factors in its last block and the classifier (`lora`). `run` continues an interrupted
measurement. Runs named `error` train without a codec, and measure how much of each change a codec loses.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from last_block import Features, Head, LastBlock, load_model, prepare, training_arguments
from peft import LoraConfig, get_peft_model
from robustness import predict, read_examples
from torch import nn

from hf_federated import (
    FederatedConfig,
    FederatedDataset,
    FederatedTrainer,
    LabelDirichletPartitioner,
    Postprocessor,
)
from hf_federated.codecs import Codec, Int4, Int8, PowerSGD, TopK
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.postprocessing import EncodeUpdate


NUM_CLIENTS, NUM_ROUNDS, LOCAL_STEPS, BATCH_SIZE = 8, 20, 10, 16
LEARNING_RATES = {"head": 2e-3, "lora": 5e-3}
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["query", "dense"], "modules_to_save": ["classifier"]}

# The codecs, by their name in the results.
CODECS: dict[str, Codec] = {
    "int8": Int8(),
    "int4": Int4(),
    "top 10 %": TopK(0.1),
    "top 1 %": TopK(0.01),
    "PowerSGD, rank 2": PowerSGD(2),
}
DIRECTIONS = ("up", "both")
# Codecs whose runs are repeated without error feedback.
WITHOUT_FEEDBACK = ("int4", "top 10 %")


class MeasureErrors(Postprocessor):
    """
    Measure `‖Δ − C(Δ)‖ / ‖Δ‖` of each codec `C` for the change `Δ` of each client, and change nothing.

    Attributes:
        errors (`dict[str, list[float]]`): The errors, by the name of the codec.
    """

    def __init__(self) -> None:
        self.errors: dict[str, list[float]] = defaultdict(list)

    def client_send(self, update: ClientUpdate, message: Fit, memory: dict[str, Any]) -> ClientUpdate:
        change = {name: value.detach() - message.state[name] for name, value in update.state.items()}
        norm = _norm(change)
        for name, codec in CODECS.items():
            decoded = codec.decode(codec.encode(change), change)
            self.errors[name].append(_norm({key: value - decoded[key] for key, value in change.items()}) / norm)
        return update


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([value.flatten() for value in tensors.values()]).norm())


def trained_part(name: str, features: Features) -> nn.Module:
    """Return the model of a run, with the same initial values for all seeds."""
    whole = load_model(features.info["model"], features.info["num_labels"])
    if name == "head":
        return Head(whole)
    block = LastBlock(whole)
    torch.manual_seed(0)
    return get_peft_model(block, LoraConfig(**LORA))


def run(features: Features, model: nn.Module, spec: dict[str, Any], num_rounds: int) -> dict[str, Any]:
    """
    Train one federation.

    Args:
        features ([`Features`]): Cached examples.
        model (`torch.nn.Module`): The initial model.
        spec (`dict[str, Any]`): The run: `trained`, `codec`, `direction`, `feedback`, `seed`.
        num_rounds (`int`): Number of rounds.

    Returns:
        `dict[str, Any]`: Accuracy on the test examples and bytes in both directions, or the errors of the codecs.
    """
    started, info = time.process_time(), features.info
    rows = np.arange(info["num_train"])
    examples = Dataset.from_dict({"row": rows, "labels": features.labels[rows]})
    partitioner = LabelDirichletPartitioner(NUM_CLIENTS, label_column="labels", alpha=0.3, seed=spec["seed"])
    codec = CODECS.get(spec["codec"])
    steps: list[Postprocessor] = [MeasureErrors()] if spec["codec"] == "error" else []
    fields: dict[str, Any] = {}
    if codec is not None and spec["feedback"]:
        fields = {"exchange_codec": codec, "exchange_codec_kwargs": {"direction": spec["direction"]}}
    elif codec is not None:
        steps = [EncodeUpdate(codec, error_feedback=False)]
    with tempfile.TemporaryDirectory() as directory:
        trainer = FederatedTrainer(
            model=copy.deepcopy(model),
            args=training_arguments(directory, LEARNING_RATES[spec["trained"]], BATCH_SIZE, spec["seed"]),
            train_dataset=FederatedDataset.from_dataset(examples, partitioner),
            data_collator=features.collate,
            postprocessors=steps,
            federation=FederatedConfig(num_rounds=num_rounds, local_steps=LOCAL_STEPS, **fields),
        )
        trainer.train()
    test = np.arange(info["num_train"], info["num_train"] + info["num_test"])
    accuracy = float(np.mean(predict(trainer.model.eval(), features, test) == features.labels[test]))
    result = {**spec, "accuracy": accuracy, "seconds": time.process_time() - started}
    result |= {"bytes_down": trainer.ledger.bytes_down, "bytes_up": trainer.ledger.bytes_up}
    if steps and isinstance(steps[0], MeasureErrors):
        result["errors"] = {name: _quartiles(values) for name, values in steps[0].errors.items()}
    return result


def _quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def specs(seeds: int, directions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the runs in these directions, seed by seed."""
    for seed, trained in itertools.product(range(seeds), LEARNING_RATES):
        base = {"trained": trained, "seed": seed, "direction": "", "feedback": True}
        yield {**base, "codec": "none"}
        for direction, codec in itertools.product(directions, CODECS):
            yield {**base, "codec": codec, "direction": direction}
        for codec in WITHOUT_FEEDBACK if "up" in directions else ():
            yield {**base, "codec": codec, "direction": "up", "feedback": False}
        if seed == 0:
            yield {**base, "codec": "error"}


def run_all(options: argparse.Namespace) -> None:
    """Carry out the runs that the output file does not contain."""
    torch.set_num_threads(options.threads)
    features = {
        name: Features(Path(options.features), cls.inputs) for name, cls in {"head": Head, "lora": LastBlock}.items()
    }
    models = {name: trained_part(name, found) for name, found in features.items()}
    output, keys = Path(options.output), ("trained", "codec", "direction", "feedback", "seed")
    lines = output.read_text().splitlines() if output.exists() else []
    done = {tuple(json.loads(line)[key] for key in keys) for line in lines}
    for spec in specs(options.seeds, options.directions):
        if tuple(spec[key] for key in keys) in done or spec["trained"] not in options.trained:
            continue
        result = run(features[spec["trained"]], models[spec["trained"]], spec, options.num_rounds)
        with output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(result, flush=True)


def prepare_features(options: argparse.Namespace) -> None:
    """Cache the inputs of the trained parts."""
    texts, labels = read_examples(options.train, options.num_train)
    test_texts, test_labels = read_examples(options.test, options.num_test)
    info = {
        "model": options.model,
        "num_labels": max(labels) + 1,
        "num_train": len(texts),
        "num_test": len(test_texts),
    }
    prepare(texts + test_texts, labels + test_labels, options.model, Path(options.features), options.max_length, info)


def report(path: str) -> None:
    """Print the tables of the results, in Markdown."""
    results = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for trained in LEARNING_RATES:
        runs: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
        for result in results:
            if result["trained"] == trained and result["codec"] != "error":
                runs[result["codec"], result["direction"], result["feedback"]].append(result)
        plain = runs["none", "", True]
        print(f"\n{trained}: mean and standard deviation of the accuracy over {len(plain)} seeds\n")
        print("| codec | bytes up ÷ | accuracy, up | accuracy, up and down | bytes down ÷ | without feedback, up |")
        print("|---|---|---|---|---|---|")
        print(f"| none | 1 | {_accuracy(plain)} | {_accuracy(plain)} | 1 | |")
        for codec in CODECS:
            up, both, without = (runs[(codec, *key)] for key in (("up", True), ("both", True), ("up", False)))
            ratios = [
                f"{plain[0][key] / found[0][key]:.2f}" if found else ""
                for key, found in (("bytes_up", up), ("bytes_down", both))
            ]
            print(
                f"| {codec} | {ratios[0]} | {_accuracy(up)} | {_accuracy(both)} | {ratios[1]} | {_accuracy(without)} |"
            )
        for result in results:
            if result["trained"] == trained and result["codec"] == "error":
                print(f"\nLower quartile, median and upper quartile of the lost share: {result['errors']}")


def _accuracy(runs: list[dict[str, Any]]) -> str:
    values = [run["accuracy"] for run in runs]
    if len(values) < 2:
        return "".join(f"{value:.3f}" for value in values)
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="Cache the inputs of the trained parts.")
    command.add_argument("--model", required=True, help="Folder or Hub id of a BERT encoder.")
    command.add_argument("--train", required=True, help="Gzipped JSON lines with subject, text and label.")
    command.add_argument("--test", required=True, help="Gzipped JSON lines with subject, text and label.")
    command.add_argument("--features", required=True, help="Folder to create.")
    command.add_argument("--num-train", type=int, default=4000)
    command.add_argument("--num-test", type=int, default=2000)
    command.add_argument("--max-length", type=int, default=64)
    command = commands.add_parser("run", help="Train the federations.")
    command.add_argument("--features", required=True, help="Folder from `prepare`.")
    command.add_argument("--output", required=True, help="File of results, one JSON object in a line.")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--trained", nargs="+", choices=list(LEARNING_RATES), default=list(LEARNING_RATES))
    command.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    command.add_argument("--num-rounds", type=int, default=NUM_ROUNDS)
    command.add_argument("--threads", type=int, default=1)
    command = commands.add_parser("report", help="Print the tables.")
    command.add_argument("results", help="File from `run`.")
    options = parser.parse_args()
    if options.command == "report":
        report(options.results)
    else:
        {"prepare": prepare_features, "run": run_all}[options.command](options)


if __name__ == "__main__":
    main()
