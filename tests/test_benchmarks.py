"""Each script of `benchmarks/` runs with its smallest arguments. `SCRIPTS` names the arguments of all scripts."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from language import masking_tokenizer, tokenizer
from transformers import BertConfig, BertModel


ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@dataclass(frozen=True)
class Script:
    """
    The runs of a script.

    Args:
        runs (`str`): The arguments of each run. `{out}` is a file that the run must write, `{dir}` a folder, and
            `{texts}` a folder with a small encoder and labeled texts.
        is_fast (`bool`): Whether the script runs in this process in less than two seconds.
        needs (`tuple[str, ...]`): Packages that the script needs in addition to the `test` extra.
    """

    runs: tuple[str, ...]
    is_fast: bool = False
    needs: tuple[str, ...] = ()

    @classmethod
    def of(cls, *runs: str, is_fast: bool = False, needs: tuple[str, ...] = ()) -> Script:
        return cls(runs, is_fast, needs)


TINY = "--hidden-size 16 --repetitions 1 --length 8"
TEXTS = "prepare --model {texts} --train {texts}/train.jsonl.gz --test {texts}/test.jsonl.gz --features {dir}/features"
SCRIPTS = {
    "data_checks.py": Script.of("--rows 2000 --output {out}"),
    "distillation.py": Script.of(f"{TINY} --num-clients 2 --num-batches 1 --output {{out}}", is_fast=True),
    "engine.py": Script.of(
        "overhead --sizes mlp lora --rounds 2 --threads 1 --output {out}",
        "scale --registered 3 4 --cohort 2 --rounds 2 --threads 1 --output {out}",
        "memory --memory-clients 1 2 --threads 1 --output {out}",
        "adapter --model tiny --quick --threads 1 --output {out}",
    ),
    "engine.py overhead with pfl": Script.of(
        "overhead --sizes mlp --rounds 2 --threads 1 --pfl-python {python} --output {out}", needs=("pfl",)
    ),
    "engine.py flower": Script.of("flower --model tiny --quick --threads 1 --output {out}", needs=("flwr", "ray")),
    "exchange_codecs.py": Script.of(
        f"{TEXTS} --num-train 200 --num-test 8 --max-length 8",
        "run --features {dir}/features --output {out} --seeds 1 --trained head --directions up --num-rounds 1",
        "report {out}",
    ),
    "feddrs.py": Script.of(
        "--hidden-size 16 --length 8 --num-clients 2 --num-layers 1 --num-samples 2 --sample-length 4 --num-steps 1"
        " --rows 4 --output {out}"
    ),
    "large_messages.py": Script.of("--size-mb 1 --contents zeros --receivers server client --output {out}"),
    "lora_methods.py": Script.of(
        "run --features {dir}/features --output {out} --seeds 1 --settings ranks --num-rounds 1", "report {out}"
    ),
    "network.py": Script.of(
        "exchange transfer memory scale latency --clients 1 --repetitions 1 --calls 2 --transfer-mb 1 --payload-mb 1"
        " --memory-clients 1 --scale-clients 1 2 --real-clients 1 2 --rounds 3 --delay 0.001 --output {out}"
    ),
    "network_flower.py": Script.of(
        "--clients 1 --repetitions 1 --transfer-mb 1 --calls 2 --flower-python {python} --output {out}",
        needs=("flwr",),
    ),
    "network_nvflare.py": Script.of(
        "--clients 1 --repetitions 1 --calls 2 --transfer-mb 1 --output {out}", needs=("nvflare",)
    ),
    "partition.py": Script.of("--rows 1000 --clients 10 --repeats 1 --output {out}"),
    "public_rows.py": Script.of(f"{TINY} --num-clients 2 --num-rows 40 --output {{out}}", is_fast=True),
    "ranks.py": Script.of("--ranks 1 --clients 2 --rounds 2 --repeats 1 --models tiny --output {out}"),
    "robustness.py": Script.of(
        f"{TEXTS} --num-test 8 --num-triggered-test 4 --max-length 8",
        "run --features {dir}/features --output {out} --groups size --seeds 1 --num-rounds 1 --local-steps 1",
        "report {out}",
    ),
    "run_files.py": Script.of("--clients 20 --rounds 5 --trained-rounds 2"),
    "secure_aggregation.py": Script.of(
        "round lost network memory --model tiny --steps 1 --repetitions 1 --values 1000 --lost-clients 4"
        " --lost-shares 0 --rounds 4 --output {out}"
    ),
    "secure_aggregation_scale.py": Script.of("--clients 4 --values 100 --output {out}"),
    "split.py": Script.of(
        f"{TINY} --num-heads 2 --num-blocks 3 --vocabulary 50 --num-clients 2 --output {{out}}", is_fast=True
    ),
    "split_compression.py": Script.of(
        "--wires int8 --seeds 0 --num-train 16 --num-test 8 --num-epochs 1 --length 8 --hidden-size 16 --output {out}"
    ),
    "split_hijack.py": Script.of("--num-steps 2 --num-texts 8 --attack-steps 2 --output {out}"),
    "split_latency.py": Script.of("--delay-ms 1 --micro-batches 2 --in-flight 2 --steps 4 --output {out}"),
    "split_memory.py": Script.of("--output {out}"),
    "split_overlap.py": Script.of("--delay-ms 1 --batch-ms 1 --length 8 --steps 4 --output {out}"),
    "split_parallel.py": Script.of("--client-batch 2 --hierarchical 2 --steps 5 --output {out}"),
    "split_scale.py": Script.of("--strategies serial --clients 1 --steps 5 --output {out}"),
}
# Scripts that another script starts in a process.
STARTED_BY = {
    "flower_simulation.py": "engine.py",
    "measure.py": "engine.py",
    "network_flower_app.py": "network_flower.py",
    "pfl_side.py": "engine.py",
}


def is_script(path: Path) -> bool:
    """Whether a file can be run: it compares `__name__` with `"__main__"`."""
    tests = [node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return any(ast.unparse(test) == "__name__ == '__main__'" for test in tests)


def test_each_script_has_its_smallest_arguments_in_the_table():
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if is_script(path)}
    assert scripts == {name.split()[0] for name in SCRIPTS} | STARTED_BY.keys()
    for name, starter in STARTED_BY.items():
        assert name in (BENCHMARKS / starter).read_text() or name in (BENCHMARKS / "process_tree.py").read_text()


@pytest.fixture
def texts(tmp_path):
    """A folder with a small encoder, its tokenizer, and labeled texts for training and for tests."""
    folder = tmp_path / "texts"
    words = masking_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    words.save_pretrained(folder)
    rng = np.random.default_rng(0)
    vocabulary = [word for word in tokenizer().get_vocab() if word.isalnum()]
    for name, num_rows in (("train", 10_000), ("test", 8)):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            for row in range(num_rows):
                text = " ".join(rng.choice(vocabulary, 4))
                file.write(json.dumps({"subject": "", "text": text, "label": row % 20}) + "\n")
    return folder


@pytest.fixture
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def commands(name, tmp_path, texts_folder=None):
    """The path of a script, and the arguments of each of its runs."""
    script = name.split()[0]
    values = {"out": tmp_path / "numbers.json", "dir": tmp_path, "python": sys.executable, "texts": texts_folder}
    return [[str(BENCHMARKS / script), *run.format(**values).split()] for run in SCRIPTS[name].runs]


def check_split(numbers, output):
    # Hidden states and gradients in float32, up and down, for one example of 8 tokens with hidden size 16.
    assert numbers["formula"] == 4 * 8 * 16 * 4 < numbers["bytes"]
    assert all(len(values) == 2 and min(values) > 0 for values in numbers["seconds"].values())


def check_engine(numbers, output):
    if "overhead" in numbers:
        for case in numbers["overhead"]["cases"]:
            assert {"bare", "library", "plain Trainer"} <= case["seconds"].keys()
            # The first of two rounds is not counted.
            assert all(len(values) == 1 and values[0] > 0 for values in case["seconds"].values())
    if "scale" in numbers:
        assert [case["registered"] for case in numbers["scale"]["cases"]] == [3, 4]


def check_data_checks(numbers, output):
    assert [item["case"] for item in numbers] == ["clean", "faults", "ids", "parquet"]
    assert not any(item["torch"] for item in numbers)


def check_run_files(numbers, output):
    expected = ("open: 20 clients", "compare: 10 runs", "cost: 20 clients")
    assert sum(line.startswith(expected) for line in output.splitlines()) == 3


CHECKS = {
    "data_checks.py": check_data_checks,
    "engine.py": check_engine,
    "run_files.py": check_run_files,
    "split.py": check_split,
}


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if script.is_fast])
def test_fast_script_runs_and_writes_its_numbers(name, tmp_path, monkeypatch, threads, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(BENCHMARKS)
    for path, *arguments in commands(name, tmp_path):
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        numbers = json.loads((tmp_path / "numbers.json").read_text())
        CHECKS.get(name, lambda *_: None)(numbers, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if not script.is_fast])
def test_script_runs_and_writes_its_numbers(name, tmp_path, request):
    missing = [package for package in SCRIPTS[name].needs if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{name} needs {', '.join(missing)}, which is not installed.")
    runs = commands(name, tmp_path, tmp_path / "texts")
    if name == "lora_methods.py":
        runs = commands("exchange_codecs.py", tmp_path, tmp_path / "texts")[:1] + runs
    if "prepare" in runs[0]:
        request.getfixturevalue("texts")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    path = tmp_path / "numbers.json"
    for run in runs:
        finished = subprocess.run(
            [sys.executable, *run], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600
        )
        assert finished.returncode == 0, f"{' '.join(run)}\n{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
        if name in CHECKS:
            CHECKS[name](json.loads(path.read_text()) if str(path) in run else None, finished.stdout)
        assert str(path) not in run or path.read_text().strip()
