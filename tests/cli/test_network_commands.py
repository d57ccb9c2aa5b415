"""`serve` and `join`: a recipe is trained by processes that have only their own examples."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, load_dataset
from federations import settings_of
from safetensors.torch import load_file
from workers import worker

from hf_federated import NetworkEngine
from hf_federated.cli.main import main
from hf_federated.experiments.network.listed_counts import listed_counts
from hf_federated.experiments.network.run import build_client, build_server
from hf_federated.experiments.recipe.recipe import parse_recipe
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.security.certificates import create_certificates


CLIENTS = ("north", "south")
FIELD = "federation.max_examples_per_client=900"
Run = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Call `run(directory, commands, ...)` to get the exit codes by party."""
    with worker("command_worker.py") as ask:
        yield lambda directory, commands, **options: ask(
            {"directory": str(directory), "commands": commands, **options}
        )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    create_certificates(folder, ["localhost"], CLIENTS, rsa_bits=2048)
    return folder


@pytest.fixture
def examples(texts_dir: Path, tmp_path: Path) -> dict[str, str]:
    """The files of the parties: training examples of each client, and test and public examples."""
    train = load_dataset("parquet", data_files=str(texts_dir / "train.parquet"), split="train")
    paths = {}
    for party, rows in (("north", range(0, 30)), ("south", range(30, 45)), ("public", range(45, 60))):
        paths[party] = str(tmp_path / f"{party}.parquet")
        train.select(rows).to_parquet(paths[party])
    return {**paths, "test": str(texts_dir / "test.parquet")}


@pytest.fixture
def recipe(model_dir: Path, examples: dict[str, str], tmp_path: Path) -> Path:
    content = {
        "model": {"name_or_path": str(model_dir)},
        "data": {"path": "clients", "test_path": examples["test"]},
        "task": {"max_length": 16, "label_names": ["zero", "one", "two"]},
        "training": {
            "output_dir": "run",
            "use_cpu": True,
            "learning_rate": 0.01,
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "save_steps": 1,
            "logging_steps": 1,
            "report_to": "none",
        },
        "federation": {"num_rounds": 3, "clients_per_round": 1.0},
        "network": {"clients": list(CLIENTS), "address": f"localhost:{free_port()}", "heartbeat_timeout": 5},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def commands_of(recipe: Path, certificates: Path, examples: dict[str, str], *more: str) -> dict[str, list[str]]:
    shared = [str(recipe), "--certificates", str(certificates), *more]
    commands = {"server": ["serve", *shared]}
    return commands | {name: ["join", *shared, "--client", name, "--examples", examples[name]] for name in CLIENTS}


def logs(folder: Path) -> str:
    return "\n".join(f"---- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(folder.glob("*.log")))


def train_in_one_process(recipe: Path, examples: dict[str, str], tmp_path: Path, *settings: str) -> Path:
    """Train the recipe with `hf-federated train` on the same examples, and return the output folder."""
    folder, output = tmp_path / "clients", tmp_path / "one"
    folder.mkdir()
    for name in CLIENTS:
        Dataset.from_parquet(examples[name]).to_parquet(folder / f"{name}.parquet")
    federated = tmp_path / "federated"
    assert main(["partition", str(folder), "--client-per-file", "--output", str(federated)]) == 0
    changes = [part for setting in (f"data.path={federated}", *settings) for part in ("--set", setting)]
    assert main(["train", str(recipe), *changes, "--output-dir", str(output)]) == 0
    return output


def test_serve_and_join_give_the_bytes_of_train(run, recipe, certificates, examples, tmp_path):
    codes = run(tmp_path, commands_of(recipe, certificates, examples))
    assert codes == {"server": 0, "north": 0, "south": 0}, logs(tmp_path)
    expected, server = train_in_one_process(recipe, examples, tmp_path), tmp_path / "run" / "server"
    found = load_file(server / "model.safetensors")
    assert all(value.equal(found[name]) for name, value in load_file(expected / "model.safetensors").items())
    results, reference = (json.loads((path / "results.json").read_text()) for path in (server, expected))
    assert results["federated"]["metrics"] == reference["federated"]["metrics"]
    assert results["num_train_rows"] == 45
    assert (server / "federated_ledger.json").read_bytes() == (expected / "federated_ledger.json").read_bytes()
    assert "2 clients" in (server / "README.md").read_text()


@pytest.mark.slow
def test_killed_server_resumes_and_clients_return(run, recipe, certificates, examples, tmp_path):
    commands = commands_of(recipe, certificates, examples, "--log-format", "json")
    killed = {
        "party": "server",
        "file": "run/server/checkpoint-1",
        "number": signal.SIGKILL,
        "again": [*commands["server"], "--resume"],
    }
    codes = run(tmp_path, commands, signal=killed)
    assert codes == {"server": 0, "north": 0, "south": 0}, logs(tmp_path)
    server = tmp_path / "run" / "server"
    expected = load_file(train_in_one_process(recipe, examples, tmp_path) / "model.safetensors")
    found = load_file(server / "model.safetensors")
    assert all(value.equal(found[name]) for name, value in expected.items())
    events = [json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines() if line[:1] == "{"]
    names = [event["event"] for event in events if "event" in event]
    assert {"joined", "request", "reply", "round_begin", "round_end", "checkpoint", "run_end"} <= set(names)
    reply = next(event for event in events if event.get("event") == "reply")
    assert reply["client"] in CLIENTS and reply["bytes"] > 0 and reply["seconds"] >= 0
    assert "PRIVATE KEY" not in logs(tmp_path)


def test_interrupted_server_ends_the_clients(run, recipe, certificates, examples, tmp_path):
    commands = commands_of(recipe, certificates, examples, "--set", "federation.num_rounds=100000")
    interrupt = {"party": "server", "file": "run/server/checkpoint-2", "number": signal.SIGINT}
    codes = run(tmp_path, commands, signal=interrupt)
    assert codes == {"server": 130, "north": 1, "south": 1}, logs(tmp_path)
    assert "The server ended the run: it was interrupted" in (tmp_path / "north.log").read_text()
    assert (tmp_path / "server.log").read_text().splitlines()[-1].startswith("hf-federated: interrupted")


def test_join_prints_what_the_client_agrees_to(recipe, examples, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--insecure", "--client", "north", "--examples", examples["north"], "--dry-run"]
    assert main(["join", str(recipe), *options, "--set", "network.address=null"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "Client 'north' agrees to:",
        "rounds: 3, in ascending order",
        "sent state: the exchanged parameters after local training",
        "examples in a round: all",
        "learning_rate: 0.01",
    ):
        assert f"{line}\n" in printed, printed


def test_serve_and_join_need_certificates_clients_and_an_address(recipe, tmp_path, capsys):
    errors = {
        ("serve",): "pass either --certificates DIR, from `hf-federated certificates`, or --insecure",
        ("serve", "--insecure", "--certificates", str(tmp_path)): "pass either --certificates DIR",
        ("serve", "--insecure", "--set", "network=null"): "the clients are not known. Pass --client ID",
        ("serve", "--insecure", "--address", "0.0.0.0:0"): "insecure",
        ("serve", "--insecure", "--num-to-start", "3"): "it must be at least 1 and at most the number of clients, 2",
        ("join", "--insecure", "--client", "north", "--set", "network=null"): "the address of the server is not known",
        ("join", "--insecure", "--client", "north", "--examples", "none.csv"): "none.csv",
        ("join", "--insecure", "--client", "north", "--set", "split={}"): "--insecure has no use for split models",
        ("serve", "--insecure", "--peer", "north=sha256:" + "0" * 64): "--peer has no use without a section split",
        ("split-client", "--insecure", "--client", "north", "--examples", "none.csv"): "`split-client` is deprecated",
    }
    for (command, *options), message in errors.items():
        assert main([command, str(recipe), *options]) == 2
        assert message in capsys.readouterr().err, (command, options)


def test_partitioned_data_limits_what_clients_announce(recipe, examples, tmp_path, monkeypatch):
    """`partition.json` lists the number of examples of each client, and both parties compare it."""
    monkeypatch.chdir(tmp_path)
    folder, parts = tmp_path / "files", tmp_path / "parts"
    folder.mkdir()
    for name in CLIENTS:
        Dataset.from_parquet(examples[name]).to_parquet(folder / f"{name}.parquet")
    assert main(["partition", str(folder), "--client-per-file", "--output", str(parts)]) == 0
    loaded = parse_recipe(read_values(str(recipe), [f"data.path={parts}"]))
    engine = NetworkEngine(CLIENTS, address="127.0.0.1:0", insecure=True)
    server, client = build_server(loaded, engine).trainer, build_client(loaded, "north").trainer
    expected = {"north": 30, "south": 15}
    assert server.federation.max_examples_per_client == client.federation.max_examples_per_client == expected
    ours, theirs = (settings_of(each) for each in (server, client))
    assert "number of examples of each client" in ours.settings and ours.differences(theirs.to_dict()) == []
    # A client with its own files, another client, and the field of the recipe.
    assert build_client(loaded, "north", examples=examples["north"]).trainer.federation.max_examples_per_client is None
    assert listed_counts(loaded, ["north", "west"]) == {}
    assert listed_counts(parse_recipe(read_values(str(recipe), [f"data.path={parts}", FIELD])), CLIENTS) == {}


def test_share_of_training_examples_cannot_be_public(recipe, examples, capsys):
    public = ["--set", "public={share: 0.2}", "--set", "federation.distillation=dsfl"]
    public += ["--set", "partition={name: iid, num_clients: 2}"]
    assert main(["serve", str(recipe), "--insecure", *public]) == 2
    assert "Set public.path to a file with the public examples" in capsys.readouterr().err


@pytest.mark.slow
def test_distillation_with_client_models_gives_the_bytes_of_train(
    run, recipe, certificates, examples, model_dir, tmp_path
):
    models = f"[{{name_or_path: {model_dir}, kwargs: {{num_hidden_layers: 1}}}}, {{name_or_path: {model_dir}}}]"
    settings = ["federation.distillation=fedid", f"client_models={models}"]
    settings.append(f"public={{path: {examples['public']}, server_path: {examples['test']}}}")
    changes = [part for setting in settings for part in ("--set", setting)]
    codes = run(tmp_path, commands_of(recipe, certificates, examples, *changes))
    assert codes == {"server": 0, "north": 0, "south": 0}, logs(tmp_path)
    expected = load_file(train_in_one_process(recipe, examples, tmp_path, *settings) / "model.safetensors")
    found = load_file(tmp_path / "run" / "server" / "model.safetensors")
    assert all(value.equal(found[name]) for name, value in expected.items())


def test_shipped_recipe_runs(run, certificates, model_dir, tmp_path):
    recipe = Path(__file__).parents[2] / "recipes" / "network" / "network.yaml"
    labels = [["fresh", "rotten"][number % 2] for number in range(12)]
    reviews = {}
    for party in (*CLIENTS, "test"):
        reviews[party] = str(tmp_path / f"{party}.parquet")
        Dataset.from_dict({"text": ["a bright film"] * 12, "label": labels}).to_parquet(reviews[party])
    tiny = [f"model.name_or_path={model_dir}", f"network.address=localhost:{free_port()}", "training.use_cpu=true"]
    tiny += ["federation.num_rounds=1", "federation.freeze=embeddings+1", f"data.test_path={reviews['test']}"]
    changes = [part for setting in [*tiny, "training.report_to=none"] for part in ("--set", setting)]
    # A server that is always started with --resume also starts a new run.
    commands = commands_of(recipe, certificates, reviews, *changes, "--output-dir", "run")
    commands["server"].append("--resume")
    assert run(tmp_path, commands) == {"server": 0, "north": 0, "south": 0}, logs(tmp_path)
    assert json.loads((tmp_path / "run" / "server" / "results.json").read_text())["num_train_rows"] == 24


def test_expelled_clients_are_forgotten_only_if_the_run_is_overwritten(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    expelled = tmp_path / "run" / "server" / "network" / "expelled.json"
    expelled.parent.mkdir(parents=True)
    for option, is_kept in (("--resume", True), ("--overwrite", False)):
        expelled.write_text('["north"]')
        # The command ends before it listens.
        assert main(["serve", str(recipe), "--insecure", option, "--num-to-start", "3"]) == 2
        assert "`num_to_start` is 3" in capsys.readouterr().err and expelled.exists() == is_kept


@pytest.mark.slow
def test_log_in_json_has_only_json_lines(run, recipe, certificates, examples, tmp_path):
    commands = commands_of(recipe, certificates, examples, "--log-format", "json")
    assert run(tmp_path, commands, streams=True) == {"server": 0, "north": 0, "south": 0}, logs(tmp_path)
    for party in commands:
        lines = (tmp_path / f"{party}.err").read_text().splitlines()
        assert lines and all(isinstance(json.loads(line), dict) for line in lines)
