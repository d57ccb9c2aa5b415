"""The benchmark's federation as a Flower app, with the layout of Flower's Hugging Face examples.

For each message the client app loads the client's examples, loads the model with `from_pretrained`, loads the arrays
into it, builds `TrainingArguments` and a `transformers.Trainer`, trains, and replies with the whole state dictionary.
In Flower's favor, examples are tokenized beforehand and nothing is evaluated.

Ray's workers import this module, so each worker opens the dataset once. `FLOWER_BENCHMARK_SPEC` names the JSON file
that `flower_simulation.py` received.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_from_disk
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import logging
from workload import Workload, training_arguments


SPEC: dict[str, Any] = json.loads(Path(os.environ["FLOWER_BENCHMARK_SPEC"]).read_text())
WORKLOAD = Workload(**SPEC["workload"])

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(SPEC["threads"])

_rows: Dataset | None = None


def load_rows(partition_id: int) -> Dataset:
    """Load a client's examples from a dataset that each process opens once."""
    global _rows
    if _rows is None:
        _rows = load_from_disk(SPEC["rows"]).remove_columns("client")
    first = partition_id * WORKLOAD.rows_per_client
    return _rows.select(range(first, first + WORKLOAD.rows_per_client))


def load_model() -> nn.Module:
    """Load the model that all sides start from."""
    return AutoModelForSequenceClassification.from_pretrained(SPEC["model"])


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for one round."""
    rows = load_rows(int(context.node_config["partition-id"]))
    model = load_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    args = TrainingArguments(**training_arguments(WORKLOAD, SPEC["output_dir"]))
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    output = trainer.train()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"train_loss": output.training_loss, "num-examples": len(rows)}),
        }
    )
    return Message(content=content, reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run FedAvg over all clients and record the end time of each round."""
    ends: list[float] = []

    def record_end(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        ends.append(time.perf_counter())
        return None

    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=WORKLOAD.num_clients)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(load_model().state_dict()),
        num_rounds=WORKLOAD.num_rounds,
        evaluate_fn=record_end,
    )
    # The first round includes the start of the workers.
    seconds = [end - start for start, end in zip(ends[:-1], ends[1:], strict=True)]
    Path(SPEC["result"]).write_text(json.dumps({"first_round": seconds[0], "rounds": seconds[1:]}))
