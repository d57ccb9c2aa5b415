"""The changed example scripts of transformers, TRL and sentence-transformers run, and name files as the originals."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_inputs import SCRIPTS, Script

from hf_federated import Ledger
from hf_federated.trainer.checkpoint import read_server_state


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "scripts"
# The environment variable with the folder of a checkout, by the repository in the first line of a diff.
CHECKOUTS = {
    "huggingface/transformers": "UPSTREAM_TRANSFORMERS",
    "huggingface/trl": "UPSTREAM_TRL",
    "UKPLab/sentence-transformers": "UPSTREAM_SENTENCE_TRANSFORMERS",
}
# A script that maps its dataset before it builds the trainer may change five lines.
MAX_LINES = {"run_clm": 5}


def read_diff(path: Path) -> tuple[str, str, list[str]]:
    """Return the repository of a diff, the path of the script in it, and the added lines."""
    text = path.read_text(encoding="utf-8")
    repository = re.match(r"Upstream: https://github.com/([\w-]+/[\w-]+)", text)
    script = re.search(r"^--- a/(\S+)$", text, re.MULTILINE)
    assert repository is not None and script is not None
    return repository[1], script[1], re.findall(r"^\+(?!\+\+ ).*$", text, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.diff)
def test_script_changes_at_most_four_lines(script: Script) -> None:
    text = (FOLDER / f"{script.diff}.diff").read_text(encoding="utf-8")
    added = read_diff(FOLDER / f"{script.diff}.diff")[2]
    assert 0 < len(added) <= MAX_LINES.get(script.diff, 4)
    assert all(len(line) <= 120 for line in added)  # one character marks the line as added
    assert len(re.findall(r"^-(?!-- )", text, re.MULTILINE)) <= len(added)
    assert not re.search(r"^ ", text, re.MULTILINE), "A diff contains changed lines only."


def test_readme_shows_every_diff_and_its_number_of_lines() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.stem for path in FOLDER.glob("*.diff")} == {script.diff for script in SCRIPTS}
    for script in SCRIPTS:
        text = (FOLDER / f"{script.diff}.diff").read_text(encoding="utf-8")
        _, path, added = read_diff(FOLDER / f"{script.diff}.diff")
        hunks = text[text.index("@@") :]
        assert f"```diff\n{hunks}```" in readme
        assert re.search(rf"\| \[`{Path(path).name}`\]\([^)]+\) \|[^|]*\| {len(added)} \|", readme)


# ---- Runs


def folder_of_checkout(repository: str) -> Path:
    variable = CHECKOUTS[repository]
    if not os.environ.get(variable):
        pytest.skip(f"{variable} is not set. Set it to the folder of a checkout of {repository}.")
    return Path(os.environ[variable])


def apply(diff: Path, folder: Path) -> None:
    # Outside of a repository, `git apply` changes the files of the current directory.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--unidiff-zero", str(diff)]
    subprocess.run(command, cwd=folder, env=environment, check=True)


def copy_script(script: Script, folder: Path, changed: bool) -> Path:
    """Copy a script with the files next to it from its checkout, and apply the diffs."""
    diff = FOLDER / f"{script.diff}.diff"
    repository, path, _ = read_diff(diff)
    target = folder / path
    shutil.copytree((folder_of_checkout(repository) / path).parent, target.parent)
    # Changes for newer versions of libraries, which the unchanged script needs, too.
    versions = FOLDER / "versions" / f"{script.diff}.diff"
    for each in ([versions] if versions.exists() else []) + ([diff] if changed else []):
        apply(each, folder)
    return target


def write_inputs(script: Script, folder: Path) -> None:
    """Write the model, the data, the metrics and an empty Punkt model to the working directory of a script."""
    script.save_model(folder / "model")
    sizes = {"train": 40, "validation": 8, "test": 8}
    # TRL reads a folder, and the script of sentence-transformers the name of a dataset, which can also be a folder.
    data = {"sft": "data", "dpo": "data", "training_stsbenchmark": "sentence-transformers/stsb"}.get(script.diff, ".")
    (folder / data).mkdir(parents=True, exist_ok=True)
    for split, num_rows in sizes.items():
        script.write(folder / data / f"{split}.{script.extension}", script.rows(num_rows))
    shutil.copytree(FOLDER / "metrics", folder, dirs_exist_ok=True)
    punkt = folder / "nltk" / "tokenizers" / "punkt_tab" / "english"
    punkt.mkdir(parents=True)
    (punkt.parent.parent / "punkt").mkdir()
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (punkt / name).touch()


def run(script: Script, path: Path, working_directory: Path) -> Path:
    """Run a script offline. Return its output directory."""
    output = working_directory / "output"
    options = script.options.format(script.extension).split()
    if script.diff != "training_stsbenchmark":
        options += f"--output_dir {output} --num_train_epochs 2 --per_device_train_batch_size 4 --use_cpu".split()
        options += "--report_to none --save_strategy epoch --logging_strategy epoch --seed 1".split()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HOME": str(working_directory / "cache"),
        "HF_HUB_OFFLINE": "1",
        "NLTK_DATA": str(working_directory / "nltk"),
    }
    done = subprocess.run(
        [sys.executable, str(path), *options],
        cwd=working_directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return output


def relative_files(output: Path) -> set[str]:
    """Paths of the files below an output directory, with a letter in place of numbers of steps and times."""
    return {re.sub(r"\d+", "N", str(path.relative_to(output))) for path in output.rglob("*") if path.is_file()}


def last_checkpoint(output: Path) -> Path:
    return max(output.rglob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def logged_names(checkpoint: Path) -> set[str]:
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return {name for entry in state["log_history"] for name in entry}


def results(output: Path) -> dict[str, dict[str, Any]]:
    """The metrics that a script of transformers saves, by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in output.glob("*_results.json")}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.diff)
def test_changed_script_trains_all_clients_and_names_files_and_metrics_as_the_original(
    script: Script, tmp_path
) -> None:
    if script.diff == "training_stsbenchmark":
        pytest.importorskip("sentence_transformers")
    outputs = {}
    for name in ("original", "federated"):
        (tmp_path / name).mkdir()
        path = copy_script(script, tmp_path / name, changed=name == "federated")
        write_inputs(script, tmp_path / name)
        outputs[name] = run(script, path, tmp_path / name)
    original, federated = outputs["original"], outputs["federated"]

    assert relative_files(original) <= relative_files(federated)
    checkpoint = last_checkpoint(federated)
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == script.num_rounds
    rounds = Ledger.from_state_dict(read_server_state(checkpoint)["ledger"]).to_dict()["rounds"]
    assert {number: tuple(clients) for number, clients in rounds.items()} == {
        str(number): script.clients for number in range(script.num_rounds)
    }
    new_names = logged_names(checkpoint) - logged_names(last_checkpoint(original))
    assert logged_names(last_checkpoint(original)) <= logged_names(checkpoint)
    assert all(name.startswith("federated/") for name in new_names)

    expected, actual = results(original), results(federated)
    assert {name: list(values) for name, values in actual.items()} == {
        name: list(values) for name, values in expected.items()
    }
    for name, values in expected.items():
        counts = {key: value for key, value in values.items() if key.endswith("_samples")}
        assert {key: actual[name][key] for key in counts} == counts
