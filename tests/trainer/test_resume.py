"""A run that is killed at any moment and resumed ends with the same files as an uninterrupted run."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import arguments, rows, same_weights, tiny_model
from transformers import Trainer, TrainerCallback
from workers import without_timings, worker

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.reporting.run_log import CLIENTS_NAME, LOG_NAME, RoundEntry, read_clients, read_log
from hf_federated.trainer.checkpoint import list_checkpoints, read_server_state
from hf_federated.trainer.manifest import MANIFEST_FILE, read_manifest


RUN_DIR = "run"
STAGING_DIR = ".incomplete"
NUM_ROUNDS = 3

SCENARIOS = ["fedopt", "scaffold_disk", "one_client", "balanced", "lora", "p_tuning", "best", "fedid", "adafd"]
SCENARIOS += ["fedaux", "feddrs", "fp16", "streams", "local_head"]
MOMENTS = [
    "first round",
    "client",
    "aggregation",
    "after model file",
    "before trainer_state.json",
    "before client states",
    "before rename",
    "after rename",
    "after last round",
]
QUICK = [
    ("fedopt", "client"),
    ("scaffold_disk", "before trainer_state.json"),
    ("streams", "before client states"),
    ("lora", "aggregation"),
    ("local_head", "client"),
    ("best", "rotation"),
    ("fedid", "exchange"),
    ("adafd", "after rename"),
    ("feddrs", "samples"),
]
THOROUGH = [("adafd", "exchange"), ("feddrs", "last samples")]
THOROUGH += [(name, moment) for name in SCENARIOS for moment in MOMENTS if (name, moment) not in QUICK]
# A run changes fewer files than this. The test skips file events that the run does not reach.
FILE_EVENTS = range(1, 145)


Run = Callable[..., int]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Call `run(directory, scenario, moment=None, resume=False)` to run a process and get its exit code."""
    with worker("kill_worker.py") as ask:
        yield lambda directory, scenario, moment=None, resume=False: ask(
            {"directory": str(directory), "scenario": scenario, "moment": moment, "resume": resume}
        )


@pytest.fixture(scope="module")
def uninterrupted(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of the uninterrupted run of a scenario."""
    directories: dict[str, Path] = {}

    def directory(scenario: str) -> Path:
        if scenario not in directories:
            directories[scenario] = tmp_path_factory.mktemp(scenario)
            assert run(directories[scenario], scenario) == 0
        return directories[scenario]

    return directory


def contents(directory: Path) -> dict[str, Any]:
    """Read every file below a directory, by path. Logs and cards are parsed, and times are removed."""
    files: dict[str, Any] = {}
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        value: Any = path.read_bytes()
        if path.name == "trainer_state.json":
            value = json.loads(value)
            value["log_history"] = without_timings(value["log_history"], "train_loss")
        elif path.name == "manifest.json":  # lists the digest of `trainer_state.json`, which contains timings
            value = list(read_manifest(path))
        elif path.name == "log_history.json":
            value = without_timings(json.loads(value), "train_loss")
        elif path.name == LOG_NAME:
            value = [
                (entry.number, entry.logs, entry.num_done, entry.failed, entry.bytes_down, entry.bytes_up)
                for entry in read_log(path.parent)
                if isinstance(entry, RoundEntry) and entry.is_over
            ]
        elif path.name == CLIENTS_NAME:
            value = [
                (name, client.num_rounds, client.num_failures, client.bytes_down, client.bytes_up)
                for name, client in read_clients(path.parent).clients.items()
            ]
        elif path.name == "README.md":  # the card of an adapter
            value = [line for line in value.splitlines() if not line.startswith(b"| Training time in seconds |")]
        files[str(path.relative_to(directory))] = value
    return files


def final_contents(directory: Path) -> dict[str, Any]:
    """Read the files of a finished run: the last checkpoint, the final model and the log."""
    last = list_checkpoints(directory / RUN_DIR)[-1].name
    skipped = tuple(f"{RUN_DIR}/{path.name}/" for path in list_checkpoints(directory / RUN_DIR)[:-1])
    files = {path: value for path, value in contents(directory).items() if not path.startswith(skipped)}
    assert f"{RUN_DIR}/{last}/federated/server.safetensors" in files
    return files


def assert_same_contents(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(actual) == sorted(expected)
    assert [path for path in expected if actual[path] != expected[path]] == []


def assert_complete(checkpoint: Path, complete: Path) -> None:
    """Assert that a checkpoint has all files of a complete checkpoint and that its state can be read."""
    # A card has a curve after the second round.
    client_file = re.compile(r"^federated/clients/|^learning_curve\.svg$")
    names, expected = (
        {path for path in contents(directory) if not client_file.match(path)} for directory in (checkpoint, complete)
    )
    assert names == expected
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert f"checkpoint-{state['global_step']}" == checkpoint.name
    read_server_state(checkpoint)


def check_killed_run(
    run: Run, uninterrupted: Callable[[str], Path], directory: Path, scenario: str, moment: str
) -> None:
    reference = uninterrupted(scenario)
    assert run(directory, scenario, moment=moment) == -signal.SIGKILL
    found = list_checkpoints(directory / RUN_DIR)
    for checkpoint in found:
        assert_complete(checkpoint, list_checkpoints(reference / RUN_DIR)[-1])
    assert run(directory, scenario, resume=bool(found)) == 0
    assert_same_contents(final_contents(directory), final_contents(reference))


@pytest.mark.parametrize(("scenario", "moment"), QUICK)
@pytest.mark.sampled(3)
def test_resume_after_kill_gives_identical_files(run, uninterrupted, tmp_path, scenario, moment) -> None:
    check_killed_run(run, uninterrupted, tmp_path, scenario, moment)


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "moment"), THOROUGH)
def test_resume_after_kill_at_any_moment_gives_identical_files(run, uninterrupted, tmp_path, scenario, moment) -> None:
    check_killed_run(run, uninterrupted, tmp_path, scenario, moment)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["best", "scaffold_disk"])
@pytest.mark.parametrize("number", FILE_EVENTS)
def test_resume_after_kill_before_any_file_change_gives_identical_files(
    run, uninterrupted, tmp_path, scenario, number
) -> None:
    reference = uninterrupted(scenario)
    code = run(tmp_path, scenario, moment=f"file event {number}")
    if code == 0:
        pytest.skip(f"The run changes fewer than {number} files.")
    assert code == -signal.SIGKILL
    found = list_checkpoints(tmp_path / RUN_DIR)
    for checkpoint in found:
        assert_complete(checkpoint, list_checkpoints(reference / RUN_DIR)[-1])
    assert run(tmp_path, scenario, resume=bool(found)) == 0
    assert_same_contents(final_contents(tmp_path), final_contents(reference))


def test_resume_from_an_explicit_path_after_two_kills(run, uninterrupted, tmp_path) -> None:
    assert run(tmp_path, "fedopt", moment="before rename") == -signal.SIGKILL
    assert run(tmp_path, "fedopt", moment="aggregation", resume=f"{RUN_DIR}/checkpoint-1") == -signal.SIGKILL
    assert run(tmp_path, "fedopt", resume=f"{RUN_DIR}/checkpoint-2") == 0
    assert_same_contents(final_contents(tmp_path), final_contents(uninterrupted("fedopt")))


def test_finished_run_leaves_no_staging_directory(uninterrupted) -> None:
    assert not list((uninterrupted("best") / RUN_DIR).glob(f"{STAGING_DIR}*"))


# ---- Refused checkpoints


def trainer(directory: Path, **kwargs: Any) -> FederatedTrainer:
    return FederatedTrainer(
        model=tiny_model(),
        args=arguments(directory, **{"save_strategy": "steps", **kwargs}),
        train_dataset={"a": rows(4), "b": rows(4, seed=1)},
        federation=FederatedConfig(num_rounds=2),
    )


def test_resume_without_checkpoint_names_the_searched_directory(tmp_path) -> None:
    with pytest.raises(ValueError, match=f"No checkpoint found in .*{tmp_path.name}"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_checkpoint_of_a_plain_trainer_is_refused(tmp_path) -> None:
    plain = Trainer(
        tiny_model(), arguments(tmp_path, save_strategy="epoch", num_train_epochs=1), train_dataset=rows(4)
    )
    plain.train()
    with pytest.raises(
        ValueError, match="is not a checkpoint of a federation.*may have been saved by a plain Trainer"
    ):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_checkpoint_without_server_state_is_refused(tmp_path) -> None:
    trainer(tmp_path, save_only_model=True).train()
    saved = contents(tmp_path / "checkpoint-2")
    assert "model.safetensors" in saved and "federated/server.safetensors" not in saved
    with pytest.raises(ValueError, match="federated/server.safetensors is missing.*save_only_model"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A checkpoint with client states after the first of two rounds."""
    federation(tmp_path, callbacks=[StopAfterFirst()]).train()
    return tmp_path / "checkpoint-1"


class StopAfterFirst(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = True


def federation(
    directory: Path, clients: str = "ab", num_rows: int = 4, callbacks: Any = (), **settings: Any
) -> FederatedTrainer:
    return FederatedTrainer(
        model=tiny_model(),
        args=arguments(directory, save_strategy="steps"),
        train_dataset={name: rows(num_rows, seed=number) for number, name in enumerate(clients)},
        callbacks=list(callbacks),
        federation=FederatedConfig(**{"num_rounds": 2, "client_optimizer_state": "carry", **settings}),
    )


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_checkpoint_without_a_client_state_names_the_client(stopped, store) -> None:
    before = federation(stopped.parent / "whole", client_store=store)
    before.train(resume_from_checkpoint=str(stopped))
    for file in (stopped / "federated" / "clients").iterdir():
        file.unlink()
    (stopped / MANIFEST_FILE).unlink()  # a checkpoint of hf_federated 0.1.0
    after = federation(stopped.parent, client_store=store)
    with pytest.raises(ValueError, match="The state of client 'a', .* is missing"):
        after.train(resume_from_checkpoint=str(stopped))


def test_checkpoint_with_truncated_weights_names_the_file(stopped) -> None:
    file = stopped / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for manifest, damage in ((True, "has [0-9]+ bytes, but"), (False, "is damaged")):
        if not manifest:
            (stopped / MANIFEST_FILE).unlink()  # a checkpoint of hf_federated 0.1.0
        with pytest.raises(ValueError, match=f"checkpoint-1/model.safetensors' {damage}"):
            federation(stopped.parent).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"federation_seed": 7}, "federation_seed: 7 in this run, 42 in the checkpoint"),
        ({"aggregation": "fedopt"}, r"aggregation: 'FedOpt\(\)' in this run, 'FedAvg\(\)' in the checkpoint"),
        ({"aggregation_kwargs": {"weighting": "uniform"}}, r"\"FedAvg\(weighting='uniform'\)\" in this run, 'FedAvg"),
        (
            {"client_optimizer_state": "reset"},
            "client_optimizer_state: 'reset' in this run, 'carry' in the checkpoint",
        ),
        ({"clients": "a"}, r"1 clients are only in the checkpoint, for example \['b'\]"),
        ({"clients": "abc"}, r"1 clients are only in this run, for example \['c'\]"),
        ({"num_rows": 5}, "examples of client 'a': 5 in this run, 4 in the checkpoint; examples of client 'b'"),
    ],
)
def test_checkpoint_of_another_federation_is_refused(stopped, changes, words) -> None:
    with pytest.raises(ValueError, match=f"{words}.*A resumed run may change these fields: num_rounds, "):
        federation(stopped.parent, **changes).train(resume_from_checkpoint=True)


def test_resume_may_change_length_storage_and_parallelism(stopped) -> None:
    trainer = federation(
        stopped.parent, num_rounds=3, min_clients=2, log_clients=True, client_store="disk", parallelism="clients"
    )
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_refused_checkpoint_does_not_change_the_model(tmp_path) -> None:
    refused = trainer(tmp_path)
    with pytest.raises(ValueError):
        refused.train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    assert same_weights(refused.model, tiny_model())


def test_second_run_in_the_same_directory_replaces_the_checkpoints(tmp_path) -> None:
    trainer(tmp_path).train()
    trainer(tmp_path, learning_rate=1e-3).train()
    fresh = trainer(tmp_path / "fresh", learning_rate=1e-3)
    fresh.train()
    for number in (1, 2):
        again, expected = (contents(path / f"checkpoint-{number}") for path in (tmp_path, tmp_path / "fresh"))
        del again["training_args.bin"], expected["training_args.bin"]
        assert_same_contents(again, expected)
