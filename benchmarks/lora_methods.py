"""Measure the accuracy of the methods for LoRA factors, and of clients with different ranks, on a real text task.

    python benchmarks/exchange_codecs.py prepare --model MINILM --train TRAIN.jsonl.gz --test TEST.jsonl.gz \\
        --features DIR
    python benchmarks/lora_methods.py run --features DIR --output results.jsonl
    python benchmarks/lora_methods.py report results.jsonl

8 clients with label-Dirichlet(0.3) examples train LoRA factors in the last block of MiniLM and its pooler, and the
classifier. `run` continues an interrupted measurement. The settings:

- `ranks`: the clients have the ranks 2, 4, 4, 8, 8, 8, 16 and 16 in a seeded order. Zero padding averages the factors,
  filled with zeros, and sends a client its first rows and columns.
- `small drift` and `large drift`: all clients have rank 8, and train 10 or 40 local steps in a round.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from last_block import Features, LastBlock, load_model, training_arguments
from peft import LoraConfig, get_peft_model
from robustness import predict

from hf_federated import (
    Aggregation,
    ClientSpec,
    FederatedConfig,
    FederatedDataset,
    FederatedTrainer,
    FedExLoRA,
    FedIT,
    FFALoRA,
    LabelDirichletPartitioner,
    StackedLora,
)
from hf_federated.aggregation.base_changes import UPDATES
from hf_federated.aggregation.lora_factors import find_pairs
from hf_federated.methods import Accumulator
from hf_federated.utils.weighted_mean import State


RANKS = (2, 4, 4, 8, 8, 8, 16, 16)
BATCH_SIZE, LEARNING_RATE = 16, 5e-3


class ZeroPadding(StackedLora):
    """The mean of factors that are filled with zeros up to the largest rank, as in HetLoRA without its pruning."""

    name: ClassVar[str] = "zero_padding"
    averages_both_factors: ClassVar[bool] = True

    def _truncated(self, state: State, rank: int, scaling: float) -> State:
        factors: State = {}
        for pair in find_pairs(state):
            factors |= pair.resized(state, rank)
        return factors

    def aggregate(self, accumulator: Accumulator, state: State) -> State:
        accumulator.collections[UPDATES].close()
        return accumulator.mean.finalize()


# Rounds, local steps, rank of the server's model and the methods of a setting.
SETTINGS: dict[str, tuple[int, int, int, dict[str, Aggregation]]] = {
    "ranks": (20, 10, 16, {"zero padding": ZeroPadding(), "stacked_lora": StackedLora()}),
    **{
        name: (num_rounds, local_steps, 8, methods)
        for name, num_rounds, local_steps in (("small drift", 20, 10), ("large drift", 8, 40))
        for methods in (
            {
                "fedit": FedIT(),
                "fedex_lora": FedExLoRA(),
                "ffa_lora": FFALoRA(),
                "stacked_lora": StackedLora(),
                "stacked_lora, reset=True": StackedLora(reset=True),
            },
        )
    },
}


def run(features: Features, spec: dict[str, Any], num_rounds: int | None = None) -> dict[str, Any]:
    """
    Train one federation.

    Args:
        features ([`Features`]): Cached examples.
        spec (`dict[str, Any]`): The run: `setting`, `method`, `seed`.
        num_rounds (`int`, *optional*): Number of rounds. Defaults to that of the setting.

    Returns:
        `dict[str, Any]`: Accuracy on the test examples, and the median inexactness of the last round.
    """
    setting_rounds, local_steps, rank, methods = SETTINGS[spec["setting"]]
    info, rng = features.info, np.random.default_rng(spec["seed"])
    rows = np.arange(info["num_train"])
    examples = Dataset.from_dict({"row": rows, "labels": features.labels[rows]})
    partitioner = LabelDirichletPartitioner(len(RANKS), label_column="labels", alpha=0.3, seed=spec["seed"])
    clients = FederatedDataset.from_dataset(examples, partitioner)
    ranks = dict(zip(clients, rng.permutation(RANKS).tolist(), strict=True))
    specs = {name: ClientSpec(peft_config=LoraConfig(r=own, lora_alpha=2 * own)) for name, own in ranks.items()}
    torch.manual_seed(spec["seed"])
    lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["query", "dense"], modules_to_save=["classifier"])
    model = get_peft_model(LastBlock(load_model(info["model"], info["num_labels"])), lora)
    with tempfile.TemporaryDirectory() as directory:
        trainer = FederatedTrainer(
            model=model,
            args=training_arguments(directory, LEARNING_RATE, BATCH_SIZE, spec["seed"]),
            train_dataset=clients,
            data_collator=features.collate,
            clients=specs if spec["setting"] == "ranks" else None,
            federation=FederatedConfig(
                num_rounds=num_rounds or setting_rounds,
                local_steps=local_steps,
                aggregation=copy.deepcopy(methods[spec["method"]]),
            ),
        )
        trainer.train()
    test = np.arange(info["num_train"], info["num_train"] + info["num_test"])
    accuracy = float(np.mean(predict(trainer.model.eval(), features, test) == features.labels[test]))
    return {**spec, "accuracy": accuracy, "bytes_up": trainer.ledger.bytes_up, "bytes_down": trainer.ledger.bytes_down}


def specs(seeds: int, settings: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the runs, seed by seed."""
    for seed in range(seeds):
        for setting in settings:
            for method in SETTINGS[setting][3]:
                yield {"setting": setting, "method": method, "seed": seed}


def run_all(options: argparse.Namespace) -> None:
    """Carry out the runs that the output file does not contain."""
    torch.set_num_threads(options.threads)
    features, output = Features(Path(options.features), LastBlock.inputs), Path(options.output)
    lines = output.read_text().splitlines() if output.exists() else []
    done = [{key: json.loads(line)[key] for key in ("setting", "method", "seed")} for line in lines]
    for spec in specs(options.seeds, options.settings):
        if spec in done:
            continue
        result = run(features, spec, options.num_rounds)
        with output.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(result, flush=True)


def report(path: str) -> None:
    """Print the mean and the standard error of the accuracy, in Markdown."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in Path(path).read_text().splitlines():
        result = json.loads(line)
        runs[result["setting"]][result["method"]].append(result)
    print(
        "| setting | method | seeds | accuracy, mean ± standard error | MB up | MB down |\n|---|---|---|---|---|---|"
    )
    for setting, methods in runs.items():
        for method, results in methods.items():
            values = [result["accuracy"] for result in results]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            megabytes = (statistics.mean(result[f"bytes_{way}"] for result in results) / 1e6 for way in ("up", "down"))
            shown = " | ".join(f"{value:.1f}" for value in megabytes)
            print(
                f"| {setting} | `{method}` | {len(values)} | {statistics.mean(values):.3f} ± {error:.3f} | {shown} |"
            )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="Train the federations.")
    command.add_argument("--features", required=True, help="Folder from `exchange_codecs.py prepare`.")
    command.add_argument("--output", required=True, help="File of results, one JSON object in a line.")
    command.add_argument("--seeds", type=int, default=3)
    command.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    command.add_argument("--num-rounds", type=int, help="default: the rounds of the setting")
    command.add_argument("--threads", type=int, default=1)
    command = commands.add_parser("report", help="Print the table.")
    command.add_argument("results", help="File from `run`.")
    options = parser.parse_args()
    report(options.results) if options.command == "report" else run_all(options)


if __name__ == "__main__":
    main()
