"""Run one measurement of `engine.py` in a separate process: `python measure.py NAME SPEC.json RESULT.json`.

The specification contains the fields of a `Workload` under `"workload"`, and the settings of the measurement. `turns`
waits for each turn and reports it on the standard output, as `turns.py` describes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging
from turns import Turns
from workload import BareLoop, Workload, build_model, build_rows, training_arguments

from hf_federated import FederatedCallback, FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.adapters import Exchange
from hf_federated.utils.gc import frozen_gc


class PlainCalls:
    """
    The plain `Trainer` with one `train()` call for each client, without a federation.

    Its time over the bare loop is the part of a client's cost that the Trainer has by itself.

    Args:
        workload ([`Workload`]): Configuration of the federation.
        rows (`datasets.Dataset`): Examples from [`build_rows`].
        output_dir (`str`): Output directory of the trainer.
    """

    def __init__(self, workload: Workload, rows: Dataset, output_dir: str) -> None:
        size = workload.rows_per_client
        rows = rows.remove_columns("client")
        self._clients = [rows.select(range(i * size, (i + 1) * size)) for i in range(workload.num_clients)]
        args = TrainingArguments(**training_arguments(workload, output_dir) | {"logging_strategy": "no"})
        self._trainer = Trainer(model=build_model(workload), args=args, train_dataset=self._clients[0])
        self._trainer.remove_callback(PrinterCallback)

    def train_client(self, position: int) -> None:
        """Train the client at an index."""
        self._trainer.train_dataset = self._clients[position]
        self._trainer.train()


class RoundTurns(FederatedCallback):
    """
    Make each round a turn, with the work of the trainer between the rounds.

    Args:
        turns ([`Turns`]): The turns of this process.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._turns.next()

    def on_round_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._turns.next()


class RoundSeconds(FederatedCallback):
    """Record the seconds of each round, with the work of the trainer between the rounds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started_at = time.perf_counter()

    def on_round_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._started_at)
        self._started_at = now


def federated_trainer(
    workload: Workload,
    output_dir: str,
    callbacks: list[TrainerCallback],
    num_eval_examples: int = 0,
    **federation: Any,
) -> FederatedTrainer:
    """Create the federated trainer of a workload. It evaluates `num_eval_examples` examples after each round."""
    rows = build_rows(workload)
    clients = FederatedDataset.from_column(rows, "client")
    args = training_arguments(workload, output_dir)
    eval_rows = None
    if num_eval_examples:
        args |= {"eval_strategy": "epoch", "per_device_eval_batch_size": 32}
        eval_rows = rows.remove_columns("client").select([i % len(rows) for i in range(num_eval_examples)])
    return FederatedTrainer(
        model=build_model(workload),
        args=TrainingArguments(**args),
        train_dataset=clients,
        eval_dataset=eval_rows,
        callbacks=callbacks,
        federation=FederatedConfig(num_rounds=workload.num_rounds, **federation),
    )


def take_turns(workload: Workload, spec: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Train one round in each turn: with the library, the bare loop, or the plain Trainer for each client."""
    turns = Turns()
    side = spec["side"]
    if side == "library":
        federated_trainer(workload, output_dir, [RoundTurns(turns)], **spec["federation"]).train()
        return {}
    rows = build_rows(workload)
    trainer = BareLoop(workload, rows) if side == "bare" else PlainCalls(workload, rows, output_dir)
    # The library keeps the objects of the imports out of the garbage collections of each `train()` call, which
    # otherwise take longer than a small client.
    with frozen_gc():
        while True:
            turns.next()
            for position in range(workload.num_clients):
                trainer.train_client(position)
            if isinstance(trainer, BareLoop):
                trainer.end_round()


def prepare(workload: Workload, spec: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Write the model and the examples that all sides of a comparison share."""
    folder = Path(spec["folder"])
    name = Path(workload.model).name
    model_path, rows_path = folder / f"model-{name}", folder / f"rows-{name}"
    build_model(workload).save_pretrained(model_path)
    build_rows(workload).save_to_disk(rows_path)
    return {"name": name, "model": str(model_path), "rows": str(rows_path)}


def measure_memory(workload: Workload, spec: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Measure the peak resident memory of a run, counted after the imports."""
    trainer = federated_trainer(workload, output_dir, [], **spec["federation"])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    with AnonymousPeak() as anonymous:
        trainer.train()
    return {
        "peak_mb": status_mb("VmHWM"),
        "peak_anonymous_mb": anonymous.peak_mb,
        "model_mb": sum(value.nbytes for value in trainer.model.state_dict().values()) / 1e6,
    }


def measure_federation(workload: Workload, spec: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Measure the seconds of each round of the federated trainer alone."""
    callback = RoundSeconds()
    num_eval_examples = spec.get("num_eval_examples", 0)
    trainer = federated_trainer(workload, output_dir, [callback], num_eval_examples, **spec.get("federation", {}))
    trainer.train()
    return {
        "rounds": callback.seconds[1:],
        "bytes_reduced": getattr(trainer.engine, "bytes_reduced", 0),
        "payload_bytes": sum(value.nbytes for value in trainer.exchange.read().values()),
    }


def measure_bare(workload: Workload, spec: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Measure the seconds of each round of the bare loop alone."""
    bare = BareLoop(workload, build_rows(workload))
    rounds = [
        sum(bare.train_client(position) for position in range(workload.num_clients)) + bare.end_round()
        for _ in range(workload.num_rounds)
    ]
    return {"rounds": rounds[1:]}


def measure_adapter(workload: Workload, spec: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Measure the milliseconds to swap in an adapter with `Exchange.write` and with PEFT's function."""
    model = get_peft_model(build_model(workload), LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS"))
    exchange = Exchange(model)
    state = {name: torch.randn_like(value) for name, value in exchange.read().items()}
    peft_state = {name: torch.randn_like(value) for name, value in get_peft_model_state_dict(model).items()}
    exchange_ms: list[float] = []
    peft_ms: list[float] = []
    for _ in range(spec["num_repeats"]):
        exchange_ms.append(_milliseconds(lambda: exchange.write(state)))
        peft_ms.append(_milliseconds(lambda: set_peft_model_state_dict(model, peft_state)))
    return {
        "num_tensors": len(state),
        "num_values": exchange.num_values,
        "write_ms": statistics.median(exchange_ms),
        "set_peft_model_state_dict_ms": statistics.median(peft_ms),
    }


class AnonymousPeak:
    """Sample the anonymous memory of this process, which excludes files of libraries, from a thread."""

    def __init__(self, interval: float = 0.002) -> None:
        self.peak_mb = 0.0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak_mb = max(self.peak_mb, status_mb("RssAnon"))


def status_mb(field: str) -> float:
    """Read a field of `/proc/self/status` in megabytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc/self/status has no {field}. Memory can only be measured on Linux.")


def _milliseconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) * 1000


MEASUREMENTS: dict[str, Callable[[Workload, dict[str, Any], str], dict[str, Any]]] = {
    "adapter": measure_adapter,
    "bare": measure_bare,
    "federation": measure_federation,
    "memory": measure_memory,
    "prepare": prepare,
    "turns": take_turns,
}


def main() -> None:
    name, spec_path, result_path = sys.argv[1:]
    spec = json.loads(Path(spec_path).read_text())
    torch.set_num_threads(spec["threads"])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as output_dir:
        result = MEASUREMENTS[name](Workload(**spec["workload"]), spec, output_dir)
    if os.environ.get("RANK", "0") == "0":
        Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
