"""`hf-federated train`: resume a run, interrupt a run, and replace a run in the same output folder."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import Dataset

from hf_federated.cli.main import main
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.run_folder import RunFolder, find_differences
from hf_federated.trainer.manifest import MANIFEST_FILE


METHODS = '''
import os
import time
from pathlib import Path

from hf_federated import Aggregation


class Interrupted(Aggregation):
    """An average that a user interrupts in a round, as long as a file exists."""

    def __init__(self, file: str = "interrupt", round: int = 2, wait: bool = False) -> None:
        super().__init__()
        self.file, self.round, self.wait = file, round, wait
        self.num_rounds = 0

    def aggregate(self, accumulator, state):
        self.num_rounds += 1
        if self.num_rounds == self.round and Path(self.file).exists():
            Path(self.file).unlink()
            if self.wait:
                time.sleep(60)
            raise KeyboardInterrupt
        return super().aggregate(accumulator, state)

    def state_dict(self):
        return {"num_rounds": self.num_rounds}

    def load_state_dict(self, state):
        self.num_rounds = state["num_rounds"]
'''


@pytest.fixture
def command(recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `hf-federated train` in a folder with a module of a researcher."""
    (tmp_path / "my_methods.py").write_text(METHODS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    overrides = ["training.save_strategy=steps", "federation.num_rounds=3"]

    def run(*argv: str, settings: tuple[str, ...] = ()) -> int:
        words = [word for setting in (*overrides, *settings) for word in ("--set", setting)]
        return main(["train", "recipe.yaml", *words, *argv])

    yield run
    sys.modules.pop("my_methods", None)


INTERRUPTED = ("federation.aggregation=my_methods:Interrupted",)


def interrupt(command, *argv: str, settings: tuple[str, ...] = ()) -> None:
    """Run the command until a user interrupts it in the second round."""
    Path("interrupt").touch()
    assert command(*argv, settings=(*INTERRUPTED, *settings)) == 130


def names(folder: Path | str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


# ---- Interrupting and resuming


def test_interrupted_run_names_its_checkpoint_and_the_command_that_continues(command, capsys):
    interrupt(command, "--output-dir", "my run")
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1] == (
        "hf-federated: interrupted. The last checkpoint is my run/checkpoint-1. Continue with: hf-federated train"
        " recipe.yaml --set training.save_strategy=steps --set federation.num_rounds=3"
        " --set federation.aggregation=my_methods:Interrupted --output-dir 'my run' --resume"
    )
    assert not any("Traceback" in line for line in lines)


def test_resumed_run_equals_an_uninterrupted_run(command, capsys):
    settings = (*INTERRUPTED, "plots=true")
    assert command("--output-dir", "whole", settings=settings) == 0
    interrupt(command, "--output-dir", "cut", settings=("plots=true",))
    assert names("cut") & {"model.safetensors", "results.json"} == set()
    capsys.readouterr()
    assert command("--output-dir", "cut", "--resume", settings=settings) == 0
    assert "The run resumes from cut/checkpoint-1." in capsys.readouterr().out
    for name in ("model.safetensors", "partition.png", "checkpoint-3/federated/server.safetensors"):
        assert Path("cut", name).read_bytes() == Path("whole", name).read_bytes()
    results = [json.loads(Path(name, "results.json").read_text()) for name in ("whole", "cut")]
    for field in ("metrics", "num_epochs", "bytes_up", "bytes_down"):
        assert results[0]["federated"][field] == results[1]["federated"][field]
    assert names("cut") == names("whole")


def test_seconds_of_a_resumed_run_include_the_rounds_before_its_checkpoint_only(command):
    interrupt(command)
    state_path = Path("run/checkpoint-1/trainer_state.json")
    state = json.loads(state_path.read_text())
    before = state["stateful_callbacks"]["Stopwatch"]["args"]["seconds"]
    assert 0 < before < 60
    state["stateful_callbacks"]["Stopwatch"]["args"]["seconds"] = before + 1000
    state_path.write_text(json.dumps(state))
    (state_path.parent / MANIFEST_FILE).unlink()  # the checkpoint is changed on purpose
    start = time.perf_counter()
    assert command("--resume", settings=INTERRUPTED) == 0
    elapsed = time.perf_counter() - start
    federated = json.loads(Path("run/results.json").read_text())["federated"]
    for field in ("train_seconds", "seconds"):
        assert before + 1000 < federated[field] < before + 1000 + elapsed
    logs = json.loads(Path("run/checkpoint-3/trainer_state.json").read_text())
    assert before + 1000 < logs["stateful_callbacks"]["Stopwatch"]["args"]["seconds"] < before + 1000 + elapsed


def test_seconds_are_unknown_if_the_checkpoint_has_no_stopwatch(command, capsys):
    interrupt(command)
    state_path = Path("run/checkpoint-1/trainer_state.json")
    state = json.loads(state_path.read_text())
    del state["stateful_callbacks"]["Stopwatch"]
    state_path.write_text(json.dumps(state))
    (state_path.parent / MANIFEST_FILE).unlink()  # the checkpoint is changed on purpose
    assert command("--resume", settings=INTERRUPTED) == 0
    assert json.loads(Path("run/results.json").read_text())["federated"]["seconds"] is None
    assert re.search(r"^federated .* -$", capsys.readouterr().out, re.MULTILINE)


def test_finished_baselines_are_not_repeated(command, capsys):
    settings = ("compare=[centralized, local]", "local_clients=2")
    interrupt(command, settings=settings)
    assert "Local only (2 clients, each trained alone):" in capsys.readouterr().out
    saved = json.loads(Path("run/_run.json").read_text())["baselines"]
    saved["local"]["metrics"]["accuracy"] = 0.125  # no result of 16 test examples and 2 clients that was computed
    record = json.loads(Path("run/_run.json").read_text())
    Path("run/_run.json").write_text(json.dumps({**record, "baselines": saved}))
    assert command("--resume", settings=(*INTERRUPTED, *settings)) == 0
    printed = capsys.readouterr().out
    assert "Local only (2 clients, each trained alone): finished before the interruption." in printed
    baselines = json.loads(Path("run/results.json").read_text())["baselines"]
    assert baselines["local"]["metrics"]["accuracy"] == 0.125
    assert baselines["centralized"]["seconds"] == saved["centralized"]["seconds"]


def test_finished_run_continues_with_more_rounds(command):
    assert command(settings=("federation.num_rounds=2",)) == 0
    first = json.loads(Path("run/results.json").read_text())["federated"]["bytes_up"]
    assert command("--resume") == 0
    assert json.loads(Path("run/results.json").read_text())["federated"]["bytes_up"] == pytest.approx(
        1.5 * first, 0.01
    )


def test_baseline_is_repeated_if_the_resumed_run_has_more_rounds(command, capsys):
    assert command(settings=("federation.num_rounds=1", "compare=[centralized]")) == 0
    assert "Centralized (0.0556 epochs" in capsys.readouterr().out
    assert command("--resume", settings=("federation.num_rounds=2", "compare=[centralized]")) == 0
    printed = capsys.readouterr().out
    assert "Centralized (0.111 epochs" in printed and "finished before the interruption" not in printed


def test_resumed_finished_run_has_the_same_model(command):
    assert command() == 0
    model = Path("run/model.safetensors").read_bytes()
    metrics = json.loads(Path("run/results.json").read_text())["federated"]["metrics"]
    assert command("--resume") == 0
    assert Path("run/model.safetensors").read_bytes() == model
    assert json.loads(Path("run/results.json").read_text())["federated"]["metrics"] == metrics


def test_split_recipe_resumes(command, recipe_path, llama_dir, cloze_dir):
    settings = (
        f"model.name_or_path={llama_dir}",
        f"data={{path: {cloze_dir}, test_split: validation}}",
        "task={name: superglue-cloze, max_length: 200}",
        "partition={name: iid, num_clients: 2}",
        "federation=null",
        "training.num_train_epochs=2",
        "training.save_strategy=epoch",
        "split={strategy: client_batch, average_every: 1}",
    )
    assert command(settings=settings) == 0
    whole = {name: Path("run", name).read_bytes() for name in ("model.safetensors", "split_config.json")}
    bytes_up = json.loads(Path("run/results.json").read_text())["federated"]["bytes_up"]
    # A run that was killed in its second epoch.
    first, last = sorted(Path("run").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    for path in Path("run").iterdir():
        if path not in (first, Path("run/_run.json")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert command("--resume", settings=settings) == 0
    assert last.is_dir()
    written = {path.name for path in Path("run").iterdir() if path.is_file()} - {"_run.json"}
    assert set(json.loads(Path("run/_run.json").read_text())["files"]) == written
    assert {name: Path("run", name).read_bytes() for name in whole} == whole
    assert json.loads(Path("run/results.json").read_text())["federated"]["bytes_up"] == bytes_up


def test_interruption_without_a_checkpoint_says_how_to_start_anew(command, capsys):
    interrupt(command, settings=("training.save_strategy=no",))
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(
        "hf-federated: interrupted before the first checkpoint. Start anew with: hf-federated train"
    )
    assert line.endswith(" --overwrite")


def test_resuming_a_folder_without_a_checkpoint_is_refused(command, capsys, tmp_path):
    assert command("--resume", "--output-dir", "nowhere") == 2
    assert (
        "--resume: the folder nowhere does not exist. Leave --resume out to start a new run, or pass the --output-dir"
        in capsys.readouterr().err
    )
    assert command(settings=("training.save_strategy=no", "federation.num_rounds=1")) == 0
    assert command("--resume", settings=("training.save_strategy=no", "federation.num_rounds=1")) == 2
    error = capsys.readouterr().err
    assert (
        f"--resume: the folder {tmp_path / 'run'} contains no checkpoint" in error and "save_strategy is 'no'" in error
    )
    assert "Pass --overwrite instead to start a new run" in error


def test_run_that_is_interrupted_before_its_first_checkpoint_keeps_its_baselines(command, capsys):
    settings = (*INTERRUPTED, "training.save_strategy=no", "compare=[centralized]")
    interrupt(command, settings=settings)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "interrupted before the first checkpoint. Continue after the finished baselines (centralized) with:" in line
    assert line.endswith(" --resume")
    assert command(settings=settings) == 2
    assert "(without a checkpoint). Pass --resume to continue the run, --overwrite" in capsys.readouterr().err
    assert command("--resume", settings=settings) == 0
    printed = capsys.readouterr().out
    assert "finished before the interruption" in printed and "The run resumes from" not in printed
    record = json.loads(Path("run/results.json").read_text())
    assert "centralized" in record["baselines"] and record["federated"]["num_epochs"] > 0
    assert command("--resume", settings=settings) == 2  # the run is finished and has no checkpoint


def test_resuming_with_another_recipe_names_the_differing_fields(command, capsys):
    interrupt(command)
    capsys.readouterr()
    changed = (
        *INTERRUPTED,
        "training.learning_rate=0.02",
        "partition.min_size=2",
        "federation.clients_per_round=null",
    )
    assert command("--resume", settings=(*changed[:3],)) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the recipe differs from the recipe of the run" in error
    assert "training.learning_rate is 0.02 and was 0.01; partition.min_size is 2 and was not set. Use" in error
    unchanged = ("training.save_total_limit=5", "training.logging_first_step=true", "card.tags=[x]", "plots=true")
    assert command("--resume", settings=(*INTERRUPTED, *unchanged)) == 0


def test_resuming_with_other_data_or_a_damaged_checkpoint_is_an_error_without_a_traceback(
    command, reviews_dir, tmp_path, capsys
):
    data = shutil.copytree(reviews_dir, tmp_path / "reviews")
    settings = (*INTERRUPTED, f"data.path={data}")
    interrupt(command, settings=settings)
    rows = Dataset.from_parquet(str(data / "train.parquet"))
    rows.select(range(1, len(rows))).to_parquet(data / "train.parquet")
    assert command("--resume", settings=settings) == 2
    assert "belongs to another federation. examples of client 'movie 00': 3" in capsys.readouterr().err
    rows.to_parquet(data / "train.parquet")
    (tmp_path / "run" / "checkpoint-1" / "federated" / "server.safetensors").write_bytes(b"{")
    assert command("--resume", settings=settings) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("hf-federated: error: ")


@pytest.mark.parametrize(
    ("saved", "current", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1.0}}, ["a.b is 1.0 and was 1"]),
        ({"a": {"b": None}}, {}, []),
        ({"task": {}}, {}, []),
        ({"public": {}}, {}, ["public is not set and was {}"]),
        ({"training": {"output_dir": "x", "seed": 1}}, {"training": {"seed": 2}}, ["training.seed is 2 and was 1"]),
        ({"federation": {"num_rounds": 2}}, {"federation": {"num_rounds": 3}}, []),
        ({"compare": ["local"]}, {"benchmark": {"runs": {}}, "card": {"tags": "x"}}, []),
    ],
)
def test_differences_of_recipes_are_the_fields_that_change_the_model(saved, current, expected):
    assert find_differences(saved, current) == expected


# ---- Replacing a run


def test_second_run_in_the_same_folder_is_refused(command, capsys, tmp_path):
    one_round = ("federation.num_rounds=1",)
    assert command(settings=one_round) == 0
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert command(settings=("training.seed=1",)) == 2
    assert capsys.readouterr().err == (
        f"hf-federated: error: {tmp_path / 'run'} already contains a run (results.json and 1 checkpoint). Pass "
        "--resume to continue the run, --overwrite to delete the run and start anew, or --output-dir to use another "
        "folder.\n"
    )
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model
    assert command("--output-dir", "another", settings=one_round) == 0


def test_interrupted_run_is_not_replaced_by_accident(command, capsys):
    interrupt(command)
    assert command() == 2
    assert "already contains a run (its last checkpoint is checkpoint-1)" in capsys.readouterr().err


def test_run_that_failed_before_its_first_result_can_be_repeated(command, tmp_path, capsys):
    interrupt(command, settings=("training.save_strategy=no",))
    assert (tmp_path / "run" / "_run.json").is_file()
    interrupt(command, settings=("training.save_strategy=no", "compare=[centralized]"))
    capsys.readouterr()
    assert command() == 2  # the result of the baseline would be lost
    assert "contains a run (without a checkpoint). Pass --resume to continue the run" in capsys.readouterr().err


def test_overwrite_deletes_what_the_run_wrote_and_nothing_else(command, tmp_path):
    own = ["notes.txt", "checkpoint-notes/best.txt", "figures/a.png", "data/train.csv"]
    folder = tmp_path / "run"
    for name in own[:2]:  # files from before the run
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    lora = "model.lora={r: 2, target_modules: [query, value]}"
    assert command(settings=(lora, "compare=[centralized]", "plots=true")) == 0
    for name in own[2:]:  # files from after the run
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    assert (folder / "checkpoint-3").is_dir() and (folder / "adapter_model.safetensors").is_file()
    one_round = ("federation.num_rounds=1", "training.save_strategy=no")
    assert command("--overwrite", settings=one_round) == 0
    assert command("--output-dir", "fresh", settings=one_round) == 0
    assert names(folder) == names("fresh") | set(own)
    assert {(folder / name).read_text() for name in own} == {"mine"}
    assert (folder / "model.safetensors").read_bytes() == Path("fresh/model.safetensors").read_bytes()


def test_overwrite_keeps_the_old_run_if_the_new_recipe_cannot_be_run(command, tmp_path):
    assert command(settings=("federation.num_rounds=1",)) == 0
    before = names(tmp_path / "run")
    assert command("--overwrite", settings=("data.path=./missing",)) == 2
    assert names(tmp_path / "run") == before


def test_overwrite_deletes_the_working_files_of_a_killed_run(tmp_path):
    RunFolder(tmp_path, {}).begin()
    working = ["client_store/a.safetensors", "client_store-1/b.safetensors", "teachers/c.safetensors"]
    working += [".incomplete/run/model.safetensors", "runs/today/events.out.tfevents.1.host"]
    own = ["runs/notes.txt", "client_store-notes/a.txt", "teachers.txt"]
    for name in [*working, *own]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    (tmp_path / "baselines" / "centralized").mkdir(parents=True)
    RunFolder(tmp_path, {}, overwrite=True).begin()
    assert names(tmp_path) == {"_run.json", *own}
    assert not (tmp_path / "runs" / "today").exists() and not (tmp_path / "baselines").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_first_run_deletes_no_file_of_a_folder(tmp_path, overwrite):
    own = ["runs/other/events.out.tfevents.1", "client_store/a.txt", "model.safetensors"]
    for name in own:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    RunFolder(tmp_path, {}, overwrite=overwrite).begin()
    assert names(tmp_path) == {"_run.json", *own}


def test_overwrite_refuses_the_checkpoints_of_another_trainer(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(
        CommandError, match="--overwrite: .* contains checkpoint-5, which no run of a recipe has saved"
    ):
        RunFolder(tmp_path, {}, overwrite=True)
    (tmp_path / "checkpoint-5" / "federated").mkdir()
    RunFolder(tmp_path, {}, overwrite=True).begin()
    assert not (tmp_path / "checkpoint-5").exists()


def test_overwrite_deletes_no_file_outside_of_the_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "precious.txt").write_text("mine")
    record = {"recipe": {}, "baselines": {}, "files": ["../precious.txt", str(tmp_path / "precious.txt"), "a.txt"]}
    (folder / "a.txt").write_text("written by the run")
    (folder / "_run.json").write_text(json.dumps(record))
    RunFolder(folder, {}, overwrite=True).begin()
    assert (tmp_path / "precious.txt").is_file() and not (folder / "a.txt").exists()


def test_overwrite_and_resume_exclude_each_other(command, capsys):
    with pytest.raises(SystemExit) as ended:
        command("--resume", "--overwrite")
    assert ended.value.code == 2 and "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[]", "{", '{"recipe": 3}'])
def test_damaged_record_is_refused(tmp_path, content):
    (tmp_path / "_run.json").write_text(content)
    with pytest.raises(CommandError, match=r"_run.json.*Choose another --output-dir, or delete the file\."):
        RunFolder(tmp_path, {})


# ---- Signals


@pytest.mark.slow
def test_ctrl_c_ends_the_process_without_a_traceback(command, tmp_path):
    """A signal reaches a process in another place than an exception in a callback."""
    Path("interrupt").touch()
    settings = ["training.save_strategy=steps", *INTERRUPTED, "federation.aggregation_kwargs={wait: true}"]
    settings.append("federation.num_rounds=3")
    argv = [word for setting in settings for word in ("--set", setting)]
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_federated.cli.main", "train", "recipe.yaml", *argv],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 120
    while Path("interrupt").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert "interrupted. The last checkpoint is" in error.strip().splitlines()[-1]
    assert error.strip().endswith("--resume")
