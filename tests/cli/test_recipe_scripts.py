"""The scripts of the recipes run with `python`, and with `accelerate launch` on a CPU."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForSequenceClassification


ROOT = Path(__file__).parents[2]
DROP_IN = ROOT / "recipes" / "drop_in"
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes" / "accelerate" / "cpu_smoke.yaml")]


def run(*command: str, code: int = 0) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200
    )
    assert (result.returncode == 0) == (code == 0), result.stdout[-4000:]
    return result.stdout


def drop_in(name: str, model_dir: Path, reviews_dir: Path, output_dir: Path) -> list[str]:
    options = {"model": model_dir, "data": reviews_dir, "output_dir": output_dir, "num_train_epochs": 2}
    script = [str(DROP_IN / name), *(f"--{option}={value}" for option, value in options.items())]
    return [*script, "--use_cpu", "--save_strategy=no", "--report_to=none", "--disable_tqdm=true"]


def changed_lines() -> list[str]:
    texts = [(DROP_IN / name).read_text(encoding="utf-8").splitlines() for name in ("trainer.py", "federated.py")]
    return list(difflib.unified_diff(*texts, lineterm="", n=0))[2:]


def test_script_becomes_federated_with_five_changed_lines() -> None:
    diff = changed_lines()
    changed = 0
    for position in [number for number, line in enumerate(diff) if line.startswith("@@")]:
        block = diff[position + 1 :]
        end = next((number for number, line in enumerate(block) if line.startswith("@@")), len(block))
        signs = [line[0] for line in block[:end]]
        # A replaced line counts as one changed line.
        changed += max(signs.count("-"), signs.count("+"))
    assert 0 < changed <= 5
    readme = (DROP_IN / "README.md").read_text(encoding="utf-8")
    assert all(line in readme for line in diff if not line.startswith("@@"))


@pytest.mark.parametrize("name", [pytest.param("trainer.py", marks=pytest.mark.slow), "federated.py"])
def test_drop_in_script_runs(model_dir, reviews_dir, tmp_path, name) -> None:
    output = run(*drop_in(name, model_dir, reviews_dir, tmp_path))
    assert "eval_accuracy" in output
    AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert (tmp_path / "federated_ledger.json").exists() == (name == "federated.py")


@pytest.mark.slow
def test_federated_script_runs_with_accelerate_launch(model_dir, reviews_dir, tmp_path) -> None:
    output = run(*LAUNCH, *drop_in("federated.py", model_dir, reviews_dir, tmp_path))
    assert output.count("eval_accuracy") >= 2  # each process prints the metrics
    AutoModelForSequenceClassification.from_pretrained(tmp_path)


LAUNCHED = """
import atexit, os, sys
sys.path[:0] = [{tests!r}]
import torch.distributed as dist
atexit.register(lambda: sys.stdout.write(f"at exit {{dist.is_initialized()}}\\n"))
from tiny import arguments, rows, tiny_model
from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer

class FailingCallback(FederatedCallback):
    def on_client_end(self, args, state, control, update=None, **kwargs):
        if {fails} and update.client_id == "b":
            raise ValueError("client b fails")

trainer = FederatedTrainer(
    model=tiny_model(), args=arguments({output!r}), train_dataset={{"a": rows(8), "b": rows(8, seed=1)}},
    callbacks=[FailingCallback()], federation=FederatedConfig(num_rounds=2, parallelism="clients"),
)
trainer.train()
sys.stdout.write(f"rank {{os.environ['RANK']}} engine {{type(trainer.engine).__name__}}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_process_group_is_destroyed_at_exit(tmp_path, fails) -> None:
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(LAUNCHED.format(tests=tests, output=str(tmp_path / "run"), fails=fails))
    output = run(*LAUNCH, str(script), code=int(fails))
    if fails:
        assert "ValueError: client b fails" in output
    else:
        assert all(f"rank {rank} engine RankEngine" in output for rank in range(2))
        assert output.count("at exit False") == 2
    assert "at exit True" not in output


@pytest.mark.slow
def test_divergence_decreases_with_alpha_and_is_plotted(tmp_path: Path) -> None:
    labels = [f"group {number % 20}" for number in range(4000)]
    Dataset.from_dict({"label": labels}).to_parquet(tmp_path / "news" / "train.parquet")
    plot = tmp_path / "divergence.png"
    script = ROOT / "recipes" / "partition" / "divergence.py"
    printed = run(str(script), "--data", str(tmp_path / "news"), "--output", str(plot))
    means = [float(line.split("|")[2]) for line in printed.splitlines() if re.match(r"\| \d", line)]
    assert len(means) == 4 and means == sorted(means, reverse=True) and means[0] > 2 * means[-1]
    assert plot.read_bytes().startswith(b"\x89PNG")
