"""Sixty mistakes at the command line: each one ends in an error that names the field and the cure, not in a traceback.

Most mistakes are those of a first day: a misspelled field, a wrong path, an option of another tool.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_federated.cli.main import main
from hf_federated.utils.due_steps import warn_once


# Changes of a valid recipe, and words of the error: the field or the option, and the cure.
RECIPE_MISTAKES = [
    ("nosuch.section=1", ["nosuch is not a field of a recipe", "Allowed:"]),
    ("training.lr=0.1", ["training.lr", "did you mean learning_rate?"]),
    ("training.learning_rate=fast", ["training.learning_rate is 'fast'", "must be float"]),
    ("training.learning_rate=5e-4x", ["training.learning_rate", "must be float"]),
    ("training.eval_strategy=sometimes", ["eval_strategy", "steps"]),
    ("training.load_best_model_at_end=true", ["training", "load_best_model_at_end"]),
    ("training.metric_for_best_model=acuracy", ["training.metric_for_best_model", "accuracy, f1_macro", "Set the"]),
    ("training.optim=adamw_anyprecision", ["training: optim=", "torchdistx", "pip install torchdistx"]),
    ("training.optim=adamw8bit", ["training.optim", "adamw_torch"]),
    ("training.max_steps=5", ["max_steps=5 counts optimizer steps", "Set `local_steps`"]),
    ("training.lr_scheduler_type=reduce_lr_on_plateau", ["reduce_lr_on_plateau", "'linear' or 'cosine'"]),
    ("training.auto_find_batch_size=true", ["auto_find_batch_size=True", "per_device_train_batch_size"]),
    ("federation.rounds=3", ["federation.rounds", "did you mean num_rounds?"]),
    ("federation.num_rounds=0", ["`num_rounds` is 0", "at least 1"]),
    ("federation.num_rounds=two", ["federation.num_rounds is 'two'", "must be int"]),
    ("federation.aggregation=fedsum", ["`aggregation` is 'fedsum'", "did you mean"]),
    ("federation.aggregation_kwargs={mu: 1}", ["unexpected keyword argument 'mu'", "Allowed arguments are"]),
    ("federation.clients_per_round=100", ["clients_per_round=100", "36 clients"]),
    ("federation.clients_per_round=0", ["`clients_per_round` is 0", "at least 1"]),
    ("federation.freeze=embeddings+9", ["9 layers", "has 3"]),
    ("federation.distillation=feddf", ["needs `public_dataset`", "split_for_distillation"]),
    ("federation.secure_aggregation=secagg", ["max_weight", "secure_aggregation_kwargs"]),
    ("federation.secure_aggregation=none", ["secure_aggregation", "secagg"]),
    ("federation.exchange=adapter", ["needs a PEFT model", "exchange='trainable'"]),
    ("federation.exchange_codec=zip", ["`exchange_codec` is 'zip'", "allowed are 'int8'"]),
    ("federation.local_epochs=0", ["`local_epochs` is 0", "Use `local_steps` for less"]),
    ("federation.min_clients=9", ["min_clients=9", "Lower `min_clients`"]),
    ("data.path=./nosuch", ["data.path", "./nosuch does not exist"]),
    ("data.path=you/nothing", ["data.path", "no file or folder you/nothing"]),
    ("data.train_split=training", ["data.path", 'Unknown split "training"', "['train']"]),
    ("data.test_split=dev", ["data: test_split and test_clients are set", "Set one of"]),
    ("data.test_clients=40", ["data.test_clients", "40 of 40"]),
    ("data.test_clients=1.5", ["data.test_clients is 1.5", "must be a count such as 2"]),
    ("data.test_path=./test.csv", ["data.test_path", "./test.csv does not exist"]),
    ("data.seed=-1", ["data.seed is -1", "at least 0"]),
    ("data.max_clients=0", ["data.max_clients is 0", "at least 1"]),
    ("task.name=classification", ["task.name is 'classification'", "did you mean text-classification?"]),
    (
        "task.text_column=txt",
        ["task.text_column is 'txt'", "columns are text, label, movie. Did you mean 'text'?"],
    ),
    ("task.label_column=stars", ["task.label_column is 'stars'", "Its columns are text, label, movie"]),
    ("task.text_column=[text, titel]", ["task.text_column is 'titel'", "Set task.text_column to one of them"]),
    ("task.label_names=[fresh]", ["rotten", "fresh"]),
    ("task.max_length=0", ["max_length", "at least 1"]),
    ("partition.column=film", ["partition.column is 'film'", "Its columns are text, label, movie"]),
    ("partition=null", ["partition is missing", "hf-federated partition"]),
    ("partition={name: dirichlet}", ["partition.name is 'dirichlet'", "did you mean label-dirichlet?"]),
    ("partition={name: iid}", ["partition.num_clients is missing"]),
    ("partition={name: iid, num_clients: 0}", ["num_clients", "at least 1"]),
    ("partition.min_size=5", ["at least 5 rows", "Lower the minimum"]),
    ("model.name_or_path=./no/model", ["model.name_or_path", "./no/model does not exist"]),
    ("model.kwargs={num_hidden_layer: 1}", ["model", "num_hidden_layer"]),
    ("model.lora={rank: 2}", ["model.lora", "rank"]),
    ("model.lora={r: 2, target_modules: [qqq]}", ["model.lora", "check your `target_modules`"]),
    ("compare=[central]", ["compare", "centralized | local"]),
    ("network.clients=north", ["network.clients is 'north'", "must be list of str"]),
    ("audit.attacks=[all]", ["audit.attacks has unknown values: all", "Choose from"]),
    ("scale=large", ["scale is 'large'", "must be one of default"]),
    ("training=3", ["training is 3", "must be a mapping"]),
    ("data.path.name=3", ["--set 'data.path.name=3'", "has no fields"]),
    ("training.learning_rate", ["--set 'training.learning_rate' is invalid", "section.field=value"]),
    ("task={", ["is not YAML"]),
    ("task={name: question-answering}", ["task.question_column is 'question'", "text, label, movie"]),
    ("data.train_split=validation", ["data.path", "validation"]),
    ("data.test_clients=null and data.test_split=dev", ["data.path", "dev"]),
    ("task={name: superglue-seq2seq} and federation.evaluate_clients=true", ["evaluate_clients", "Remove the field"]),
]

# Other commands, and words of the error.
COMMAND_MISTAKES = [
    ("train nosuch.yaml", ["cannot read the recipe 'nosuch.yaml'", "No such file"]),
    ("train {folder}", ["cannot read the recipe", "Is a directory"]),
    ("train {binary}", ["cannot read the recipe", "it is not UTF-8"]),
    ("train {listed}", ["holds a list", "must be a mapping of sections"]),
    ("train {recipe} --output-dir {file}", ["The output folder", "is a file", "Choose another output folder"]),
    ("train {recipe} --resume", ["--resume", "Leave --resume out"]),
    ("train {recipe} --resume --overwrite", ["--overwrite: not allowed with argument --resume"]),
    ("train", ["the following arguments are required: RECIPE"]),
    ("trian {recipe}", ["invalid choice: 'trian'"]),
    ("serve {recipe}", ["pass either --certificates DIR, from `hf-federated certificates`, or --insecure"]),
    ("serve {recipe} --insecure --deadline 0", ["--deadline is 0.0", "must be more than 0"]),
    ("serve {recipe} --certificates nosuch", ["--certificates", "nosuch does not exist"]),
    ("serve {recipe} --insecure --test-examples nosuch.csv", ["data.test_path", "nosuch.csv does not exist"]),
    ("join {recipe} --insecure", ["the following arguments are required: --client"]),
    ("join {recipe} --insecure --client a --examples no.csv", ["--examples", "no.csv does not exist"]),
    ("join {recipe} --insecure --client a --examples {csv} --set task.text_column=txt", ["task.text_column", "text,"]),
    ("join {recipe} --insecure --client a --examples {csv} --output-dir {file}", ["is a file", "Choose another"]),
    ("partition {csv} --partitioner iid --num-clients 2", ["either --output DIR or --push-to-hub REPO"]),
    ("partition {csv} --partitioner dirichlet --output o", ["invalid choice: 'dirichlet'"]),
    ("inspect nosuch", ["the folder nosuch does not exist"]),
    ("estimate {recipe} --set model.name_or_path=./no", ["model.name_or_path", "./no does not exist"]),
    ("audit {recipe}", ["the following arguments are required: --output-dir"]),
    ("benchmark {recipe} --only x", ["benchmark: the recipe has no such section", "Add the section"]),
    ("status nosuch", ["nosuch has no status of a server", "hf-federated serve"]),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files that the commands name."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "file").write_text("")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\xfa")
    (folder / "listed.yaml").write_text("- model\n- data\n")
    (folder / "rows.csv").write_text("text,label\na film,good\na plot,bad\n")
    names = {"file": "file", "binary": "binary.yaml", "listed": "listed.yaml", "csv": "rows.csv", "folder": "."}
    return {key: str(folder / name) for key, name in names.items()}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def error_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command, which ends with exit code 2."""
    try:
        code = main(command)
    except SystemExit as exit:  # argparse
        code = exit.code
    error = capsys.readouterr().err
    assert code == 2, error
    assert "Traceback" not in error
    return error


def test_there_are_sixty_mistakes() -> None:
    mistakes = [*(change for change, _ in RECIPE_MISTAKES), *(line for line, _ in COMMAND_MISTAKES)]
    assert len(set(mistakes)) >= 60


@pytest.mark.parametrize(("change", "words"), RECIPE_MISTAKES, ids=[change for change, _ in RECIPE_MISTAKES])
def test_mistake_in_a_recipe_names_the_field_and_the_cure(change, words, recipe_path, capsys) -> None:
    settings = [word for item in change.split(" and ") for word in ("--set", item)]
    error = error_of(["train", str(recipe_path), *settings], capsys)
    assert all(word in error for word in words), error
    assert error.strip().splitlines()[-1].startswith(("hf-federated: error: ", "  - "))


@pytest.mark.parametrize(("line", "words"), COMMAND_MISTAKES, ids=[line for line, _ in COMMAND_MISTAKES])
def test_mistake_in_a_command_names_the_option_and_the_cure(line, words, recipe_path, files, capsys) -> None:
    error = error_of(shlex.split(line.format(recipe=recipe_path, **files)), capsys)
    assert all(word in error for word in words), error


TOLD_EARLY = [
    ["--set", "task.text_column=txt"],
    ["--set", "partition.column=film"],
    ["--set", "training.optim=adamw_anyprecision"],
    ["--set", "training.metric_for_best_model=acuracy"],
    ["--set", "model.name_or_path=./nosuch"],
    ["--set", "data.path=./nosuch.csv"],
    ["--output-dir", "file"],
]


@pytest.mark.skipif(sys.platform == "win32", reason="the CPU time of a process needs the module resource")
def test_mistakes_that_need_no_model_are_reported_without_torch_and_soon(recipe_path, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    code = (
        "import json, sys, time\n"
        "from hf_federated.cli.main import main\n"
        "results, before = [], 0.0\n"
        f"for options in {TOLD_EARLY!r}:\n"
        f"    code = main(['train', {str(recipe_path)!r}, *options])\n"
        "    now = time.process_time()\n"
        "    results.append([code, now - before, 'torch' in sys.modules])\n"
        "    before = now\n"
        "import torch\n"
        "print(json.dumps([results, time.process_time() - before]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    commands, import_of_torch = json.loads(result.stdout)
    for exit_code, seconds, has_torch in commands:
        # The time of the first command includes the imports. The import of torch measures the machine.
        assert exit_code == 2 and seconds < 2 * import_of_torch and not has_torch, result.stderr
    assert len(result.stderr.strip().splitlines()) == len(TOLD_EARLY)


def test_steps_that_are_never_due_are_reported_before_the_run_and_not_again(recipe_path, caplog, capsys) -> None:
    steps = ("training.logging_steps=50", "training.eval_steps=50", "federation.num_rounds=3")
    settings = [word for setting in steps for word in ("--set", setting)]
    for command in (["train", str(recipe_path)], ["serve", str(recipe_path), "--insecure"]):
        warn_once.cache_clear()
        caplog.clear()
        main([*command, *settings])
        text = "\n".join(record.message for record in caplog.records)
        assert text.count("logging_steps=50 and eval_steps=50 count rounds, and the run has 3: ") == 1
