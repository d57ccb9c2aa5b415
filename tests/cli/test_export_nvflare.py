"""`export-nvflare`: a recipe as an NVFlare job."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, load_dataset
from safetensors.torch import load_file

from hf_federated.cli.main import main
from hf_federated.engines.nvflare import NVFlareClient


CLIENTS = ("north", "south")
needs_nvflare = pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs the extra nvflare")


@pytest.fixture
def recipe(model_dir: Path, texts_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose clients have the files `north.parquet` and `south.parquet`."""
    monkeypatch.chdir(tmp_path)
    train = load_dataset("parquet", data_files=str(texts_dir / "train.parquet"), split="train")
    for name, rows in zip(CLIENTS, (range(0, 30), range(30, 45)), strict=True):
        train.select(rows).to_parquet(tmp_path / f"{name}.parquet")
    train.to_parquet(tmp_path / "tests.parquet")
    content = {
        "model": {"name_or_path": str(model_dir)},
        "data": {"path": "unused", "test_path": "tests.parquet"},
        "task": {"max_length": 16, "label_names": ["zero", "one", "two"]},
        "training": {
            "output_dir": "run",
            "use_cpu": True,
            "learning_rate": 0.01,
            "eval_strategy": "steps",
            "save_strategy": "steps",
            "logging_steps": 1,
            "report_to": "none",
        },
        "federation": {"num_rounds": 2, "clients_per_round": 1.0},
        "network": {"clients": list(CLIENTS), "join_timeout": 90, "rejoin_timeout": 7, "heartbeat_timeout": 9},
    }
    path = tmp_path / "news.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture
def export(recipe: Path, tmp_path: Path) -> Callable[..., Path]:
    """Export the recipe, and return the folder of the job."""

    def run(*options: str) -> Path:
        assert main(["export-nvflare", str(recipe), "--output", str(tmp_path / "job"), *options]) == 0
        return tmp_path / "job"

    return run


def component(folder: Path, app: str, party: str) -> dict:
    config = json.loads((folder / app / "config" / f"config_fed_{party}.json").read_text())
    return config["components"][0]


@needs_nvflare
def test_job_has_the_recipe_and_the_parties(export, tmp_path):
    folder = export("--examples", "/data/{client}.csv", "--set", "federation.num_rounds=5")
    assert sorted(path.name for path in folder.iterdir()) == ["app_north", "app_server", "app_south", "meta.json"]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["name"] == "news" and meta["min_clients"] == 2
    assert meta["deploy_map"] == {"app_server": ["server"], "app_north": ["north"], "app_south": ["south"]}
    for app in ("app_server", "app_north", "app_south"):
        files = sorted(path.name for path in (folder / app / "custom").iterdir())
        assert files == ["hf_federated_job.py", "recipe.txt"]
        written = yaml.safe_load((folder / app / "custom" / "recipe.txt").read_text())
        assert written["federation"]["num_rounds"] == 5
        # The path exists on this machine. A job runs in another folder.
        assert written["data"] == {"path": "unused", "test_path": str(tmp_path / "tests.parquet")}
    assert component(folder, "app_north", "client") == {
        "id": "_client",
        "path": "hf_federated_job.Client",
        "args": {"examples": "/data/{client}.csv"},
    }


@needs_nvflare
def test_timeouts_and_clients_come_from_the_recipe(export):
    folder = export("--num-to-start", "1", "--resume", "--output-dir", "/results")
    assert component(folder, "app_server", "server") == {
        "id": "_server",
        "path": "hf_federated_job.Server",
        "args": {
            "clients": ["north", "south"],
            "num_to_start": 1,
            "join_timeout": 90,
            "rejoin_timeout": 7,
            "call_timeout": 9,
            "resume": True,
            "output_dir": "/results",
        },
    }
    assert json.loads((folder / "meta.json").read_text())["min_clients"] == 1


@needs_nvflare
def test_clients_of_the_command_replace_those_of_the_recipe(export):
    folder = export("--client", "east", "--client", "west")
    assert component(folder, "app_server", "server")["args"]["clients"] == ["east", "west"]
    assert yaml.safe_load((folder / "app_east/custom/recipe.txt").read_text())["network"]["clients"] == [
        "east",
        "west",
    ]


@needs_nvflare
def test_job_of_partitioned_data_has_the_number_of_examples_of_each_client(export, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for name in CLIENTS:
        (tmp_path / f"{name}.parquet").rename(folder / f"{name}.parquet")
    assert main(["partition", str(folder), "--client-per-file", "--output", str(tmp_path / "parts")]) == 0
    job = export("--set", f"data.path={tmp_path / 'parts'}")
    written = yaml.safe_load((job / "app_server" / "custom" / "recipe.txt").read_text())
    assert written["federation"]["max_examples_per_client"] == {"north": 30, "south": 15}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--client", "client 1"], "client 'client 1' cannot be the name of an NVFlare site. Use letters, digits"),
        (["--client", "server"], "client 'server' cannot be the name"),
        (["--client", "a", "--client", "a"], "client 'a' is listed twice"),
        (["--set", "network.clients=[]"], "the clients are not known. Pass --client ID"),
        (["--num-to-start", "3"], "--num-to-start is 3, but the job has 2 clients"),
        (["--examples", "data/{client}.csv"], "--examples data/{client}.csv is a relative path"),
        (["--test-examples", "tests.parquet"], "Pass an absolute path, such as"),
        (["--set", "split.head_blocks=1", "--set", "federation=null"], "section split"),
    ],
)
def test_recipe_that_cannot_be_a_job_is_refused(recipe, tmp_path, capsys, options, message):
    assert main(["export-nvflare", str(recipe), "--output", str(tmp_path / "job"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


def test_existing_folder_is_refused(recipe, tmp_path, capsys):
    (tmp_path / "job").mkdir()
    assert main(["export-nvflare", str(recipe), "--output", str(tmp_path / "job")]) == 2
    assert "job exists. Choose another folder, or delete it." in capsys.readouterr().err


def test_missing_nvflare_is_named_with_its_extra(recipe, tmp_path, capsys, monkeypatch):
    class Client(NVFlareClient):
        def build_trainer(self, client_id):
            return None

    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "nvflare" else find_spec(name))
    assert main(["export-nvflare", str(recipe), "--output", str(tmp_path / "job")]) == 2
    assert "export-nvflare needs nvflare 2.9 or later, which runs on Linux" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"Client needs nvflare .* pip install 'hf-federated\[nvflare\]'"):
        Client()


def run_simulator(job: Path, workspace: Path) -> None:
    command = ["-m", "nvflare.cli", "simulator", str(job), "-w", str(workspace), "-c", "north,south", "-t", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@needs_nvflare
@pytest.mark.slow
def test_exported_job_gives_the_bytes_of_train(export, recipe, tmp_path):
    """The output folder is outside the job, so a second job can resume the run."""
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in CLIENTS:
        Dataset.from_parquet(str(tmp_path / f"{name}.parquet")).to_parquet(parts / f"{name}.parquet")
    federated, one = tmp_path / "federated", tmp_path / "one"
    assert main(["partition", str(parts), "--client-per-file", "--output", str(federated)]) == 0
    changes = ["--set", f"data.path={federated}", "--output-dir", str(one)]
    assert main(["train", str(recipe), *changes]) == 0

    job = export("--examples", f"{tmp_path}/{{client}}.parquet", "--output-dir", str(tmp_path / "results"))
    run_simulator(job, tmp_path / "simulation")
    server = tmp_path / "results" / "server"
    expected, found = (load_file(folder / "model.safetensors") for folder in (one, server))
    assert expected.keys() == found.keys() and all(value.equal(found[name]) for name, value in expected.items())
    assert (server / "federated_ledger.json").read_bytes() == (one / "federated_ledger.json").read_bytes()
    results, reference = (json.loads((folder / "results.json").read_text()) for folder in (server, one))
    assert results["federated"]["metrics"] == reference["federated"]["metrics"]
