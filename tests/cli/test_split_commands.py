"""`serve` and `join` of a split model: a recipe is trained over gRPC with certificates on both sides."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_federated.cli.main import build_parser, main
from hf_federated.cli.network import serve
from hf_federated.experiments.errors import CommandError
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.network import split_run
from hf_federated.experiments.network.split_run import (
    _load_settings,
    _terms,
    client_model,
    server_body,
    split_client,
    split_server,
)
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.security.certificates import create_certificates
from hf_federated.split.adapters import adapter_state, load_adapter
from hf_federated.split_training.config import run_settings
from hf_federated.split_training.loading import load_client_model, load_server_body
from hf_federated.transport import GrpcServer, TlsCredentials


CLIENTS = ("0", "1")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    create_certificates(folder, ["localhost"], CLIENTS, rsa_bits=2048)
    return folder


@pytest.fixture
def split_recipe(llama_dir, cloze_dir, tmp_path) -> Path:
    recipe = {
        "model": {"name_or_path": str(llama_dir), "lora": {"r": 2}},
        "data": {"path": str(cloze_dir), "test_split": "validation"},
        "task": {"name": "superglue-cloze", "max_length": 200},
        "partition": {"name": "iid", "num_clients": 2},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "num_train_epochs": 4,
            "per_device_train_batch_size": 1,
            "learning_rate": 1e-2,
            "eval_strategy": "epoch",
            "save_strategy": "steps",
            "save_steps": 2,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
            "report_to": "none",
            "use_cpu": True,
        },
        "split": {"strategy": "client_batch", "average_every": 2, "encryption": True},
    }
    path = tmp_path / "split.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def commands_of(recipe: Path, certificates: Path, port: int, *more: str) -> dict[str, list[str]]:
    shared = [str(recipe), "--certificates", str(certificates), "--address", f"localhost:{port}", *more]
    ids = [part for client_id in CLIENTS for part in ("--client", client_id)]
    commands = {"server": ["serve", *shared, *ids]}
    return commands | {client_id: ["join", *shared, "--client", client_id] for client_id in CLIENTS}


def test_recipe_is_trained_over_network_and_merged(split_recipe, certificates, tmp_path, capsys, monkeypatch):
    # Loading of a part changes global state of torch. Normally each party has its own process.
    loading = threading.Lock()
    for name in ("load_client_model", "load_server_body"):
        load = getattr(split_run, name)

        def load_with_lock(*args, load=load, **kwargs):
            with loading:
                return load(*args, **kwargs)

        monkeypatch.setattr(split_run, name, load_with_lock)
    commands = commands_of(split_recipe, certificates, free_port())
    errors: dict[str, Exception] = {}

    def work(party: str) -> None:
        try:
            arguments = build_parser().parse_args(commands[party])
            (split_server if party == "server" else split_client)(arguments)
        except Exception as error:
            errors[party] = error

    threads = [threading.Thread(target=work, args=(party,), daemon=True) for party in commands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors and not any(thread.is_alive() for thread in threads)
    run = tmp_path / "run"
    results = [json.loads((run / client_id / "results.json").read_text()) for client_id in CLIENTS]
    # All clients evaluate the final average.
    assert results[0]["accuracy"] == results[1]["accuracy"]
    cards = [(run / client_id / "README.md").read_text() for client_id in CLIENTS]
    assert all("part of one client only. Each of 2 clients" in card and str(tmp_path) not in card for card in cards)
    # The recipe enables encryption, and the card describes the link.
    assert all("AES-256-GCM between this client and the server" in card for card in cards)
    adapters = [(run / client_id / "adapter_model.safetensors").read_bytes() for client_id in CLIENTS]
    assert adapters[0] == adapters[1]
    assert main(["split-merge", str(run / "0"), str(run / "server"), "--output-dir", str(run / "whole")]) == 0
    name = yaml.safe_load(split_recipe.read_text())["model"]["name_or_path"]
    AutoModelForCausalLM.from_pretrained(name).load_adapter(str(run / "whole"))
    assert AutoTokenizer.from_pretrained(run / "whole").get_vocab() == AutoTokenizer.from_pretrained(name).get_vocab()
    assert "steps. The server's part is in" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["1", "server"])
def test_resume_after_kill_gives_identical_adapters(killed, split_recipe, certificates, tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def start(output: str, *more: str) -> dict[str, subprocess.Popen[str]]:
        commands = commands_of(split_recipe, certificates, free_port(), "--output-dir", str(tmp_path / output))
        processes = {}
        for party, line in commands.items():
            extra = more if party != "server" else ("--heartbeat-timeout", "50")
            processes[party] = subprocess.Popen(
                # The run needs all clients, so it ends when one is killed.
                [sys.executable, "-m", "hf_federated.cli.main", *line, "--set", "split.min_clients=1.0", *extra],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        return processes

    def end(parties: dict[str, subprocess.Popen[str]]) -> dict[str, tuple[int, str]]:
        return {party: (process.wait(300), process.stdout.read()) for party, process in parties.items()}

    whole = end(start("whole"))
    assert all(code == 0 for code, _ in whole.values()), whole

    broken = start("broken")
    checkpoint = tmp_path / "broken" / killed / "checkpoint-2"
    deadline = time.monotonic() + 240
    while not checkpoint.is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    broken[killed].send_signal(signal.SIGKILL)
    ended = end(broken)
    assert not any(ended[client_id][0] == 0 for client_id in CLIENTS), "the run ended too early; add steps"
    if killed == "server":
        for code, output in (ended[client_id] for client_id in CLIENTS):
            # The error names the server that failed.
            assert code > 0 and re.search(r"localhost:\d+", output.splitlines()[-1]), output
    else:
        assert ended["server"][0] == 2 and re.search("client '1' disconnected", ended["server"][1])

    again = end(start("broken", "--resume"))
    assert all(code == 0 for code, _ in again.values()), again
    for party in (*CLIENTS, "server"):
        files = [tmp_path / output / party / "adapter_model.safetensors" for output in ("whole", "broken")]
        assert files[0].read_bytes() == files[1].read_bytes(), party


@pytest.mark.slow
def test_networked_run_with_dropout_equals_run_in_one_process(split_recipe, certificates, tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "hf_federated.cli.main"]
    dropout = "model.lora.lora_dropout=0.3"
    run = tmp_path / "networked"
    lines = commands_of(split_recipe, certificates, free_port(), "--set", dropout, "--output-dir", str(run))
    parties = {party: subprocess.Popen([*program, *line], env=environment) for party, line in lines.items()}
    assert [process.wait(300) for process in parties.values()] == [0, 0, 0]
    assert main(["split-merge", str(run / "0"), str(run / "server"), "--output-dir", str(run / "whole")]) == 0
    networked = load_file(run / "whole" / "adapter_model.safetensors")

    for settings, is_equal in (([dropout], True), ([], False)):
        recipe = load_recipe(split_recipe, [*settings, f"training.output_dir={tmp_path / str(is_equal)}"])
        trainer = build_run(recipe).trainer
        name, adapter = recipe.model.name_or_path, trainer.model.adapter_config
        # Networked parties draw the initial values of their adapters separately.
        client = load_client_model(name, trainer.split, "0", adapter, trainer.args.seed)
        _, body, _ = load_server_body(name, trainer.split, adapter, trainer.args.seed)
        for part, networked_part in zip(
            trainer.model.parts, (client.client_head, body, client.client_tail), strict=True
        ):
            load_adapter([part], adapter_state(networked_part))
        trainer.train()
        trainer.save_model(str(tmp_path / "one"))
        reference = load_file(tmp_path / "one" / "adapter_model.safetensors")
        assert networked.keys() == reference.keys()
        assert all(torch.equal(networked[name], reference[name]) for name in reference) == is_equal


@pytest.mark.parametrize("adapter", ["lora={r: 2, lora_alpha: 4}", "lora=null"], ids=["lora", "whole"])
@pytest.mark.parametrize(
    "kwargs",
    ["{dtype: bfloat16, attn_implementation: eager, attention_dropout: 0.3}", "{dtype: float16}", "null"],
    ids=["bfloat16", "float16", "none"],
)
def test_parties_load_the_parts_of_the_model_that_train_loads(adapter, kwargs, split_recipe, texts_dir, tmp_path):
    changes = [
        f"data={{path: {texts_dir}, test_split: test}}",
        "task={name: summarization, target_column: targets, max_target_length: 5}",
        f"model.kwargs={kwargs}",
        f"model.{adapter}",
        "split.encryption=false",
    ]
    run = build_run(load_recipe(split_recipe, changes))
    line = ["join", str(split_recipe), "--certificates", "tls", "--address", "localhost:1", "--client", "0"]
    sets = [part for change in changes for part in ("--set", change)]
    recipe, split, args, adapter_config = _load_settings(build_parser().parse_args([*line, *sets]), "0")
    client = client_model(recipe, split, "0", adapter_config, args.seed, run.data.task)
    config, body, wire = server_body(recipe, split, adapter_config, args.seed)

    whole = run.trainer.model
    assert client.generation_config.to_dict() == whole.generation_config.to_dict()
    assert client.generation_config.max_new_tokens == 5
    # The trainer disables the cache.
    settings = [
        {**model_config.to_dict(), "use_cache": None} for model_config in (config, client.config, whole.config)
    ]
    assert settings[0] == settings[1] == settings[2]
    assert wire == client.boundary.wire == whole.boundary.wire
    for part, loaded_part in zip(whole.parts, (client.client_head, body, client.client_tail), strict=True):
        expected = {name: (value.dtype, value.requires_grad) for name, value in part.named_parameters()}
        assert {name: (value.dtype, value.requires_grad) for name, value in loaded_part.named_parameters()} == expected
        assert loaded_part.model.config._attn_implementation == part.model.config._attn_implementation
        assert loaded_part.model.config.attention_dropout == part.model.config.attention_dropout


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("{device_map: cpu}", "The arguments device_map are not supported when a part"),
        ("{subfolder: weights}", "The arguments subfolder are not supported when a part"),
        ("{dtype: int8}", "dtype='int8' is not supported. Use 'auto' or a floating-point dtype"),
    ],
)
def test_model_argument_that_parts_do_not_support_is_rejected(kwargs, message, split_recipe, certificates):
    line = commands_of(split_recipe, certificates, free_port())["server"]
    with pytest.raises(CommandError, match=message):
        split_server(build_parser().parse_args([*line, "--set", f"model.kwargs={kwargs}"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--peer", "north"], "does not have the form ID=FINGERPRINT"),
        (["--set", "split.strategy=serial", "--set", "split.steps_per_turn=0"], "at least 1"),
        (["--max-message-bytes", "0"], "--max-message-bytes is 0, but must be more than 0"),
    ],
    ids=["peer", "split", "bytes"],
)
def test_invalid_server_option_is_rejected(change, message, split_recipe, certificates):
    line = commands_of(split_recipe, certificates, free_port())["server"]
    with pytest.raises(CommandError, match=message):
        serve(build_parser().parse_args([*line, *change]))


def test_serial_clients_are_evaluated_at_the_end_only(split_recipe, capsys):
    evaluated = ["--set", "training.eval_strategy=epoch"]
    for strategy, expected in (("serial", "no"), ("client_batch", "epoch")):
        commands = commands_of(split_recipe, Path("tls"), 1, *evaluated, "--set", f"split.strategy={strategy}")
        args = _load_settings(build_parser().parse_args(commands["0"]), "0")[2]
        assert args.eval_strategy == expected
    assert capsys.readouterr().out.count("the clients are evaluated at the end of the run") == 1


def last_error_line(line, capsys) -> str:
    """Last line that a failing command prints."""
    assert main(line) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return printed.splitlines()[-1]


def test_rejection_by_server_is_reported_in_one_line(split_recipe, certificates, tmp_path, capsys):
    other_certificates = tmp_path / "others"
    create_certificates(other_certificates, ["localhost"], CLIENTS, rsa_bits=2048)
    line = commands_of(split_recipe, certificates, free_port())["server"]
    recipe, split, args, adapter = _load_settings(build_parser().parse_args(line), "server")
    _, body, wire = server_body(recipe, split, adapter, args.seed)

    def fail(client_id: str, message: bytes) -> bytes:
        raise RuntimeError("out of memory")

    terms = _terms(recipe, split, args, adapter, body.cut, wire)
    credentials = TlsCredentials.of_server(certificates)
    with GrpcServer(fail, credentials, CLIENTS, terms, address="localhost:0") as server:
        port = int(server.address.rpartition(":")[2])
        error = "hf-federated: error: join: "
        unencrypted_client = [*commands_of(split_recipe, certificates, port)["0"], "--set", "split.encryption=false"]
        unknown_client = [*commands_of(split_recipe, other_certificates, port)["0"], "--connect-timeout", "2"]
        assert last_error_line(unknown_client, capsys).startswith(f"{error}'0' got no connection to localhost:{port}")
        assert "split.encryption: True at the server, False at the client" in last_error_line(
            unencrypted_client, capsys
        )
    terms = dataclasses.replace(terms, more=run_settings(dataclasses.replace(split, encryption=False), args))
    with GrpcServer(fail, credentials, CLIENTS, terms, address="localhost:0") as server:
        unencrypted_client[unencrypted_client.index("--address") + 1] = server.address
        assert last_error_line(unencrypted_client, capsys).startswith(f"{error}The server failed")


def test_unknown_client_id_is_reported(split_recipe, certificates):
    line = commands_of(split_recipe, certificates, free_port())["0"]
    with pytest.raises(CommandError, match="'west' is not in the recipe. There are 2 clients, the first is '0'"):
        split_client(build_parser().parse_args([*line[:-1], "west"]))


@pytest.mark.parametrize("party", ["server", "0"])
@pytest.mark.parametrize("name", ["./lama", "outputs/lama"])
def test_misspelt_model_folder_is_named(split_recipe, certificates, tmp_path, monkeypatch, party, name, capsys):
    monkeypatch.chdir(tmp_path)
    for folder in ("llama", "outputs/llama"):
        (tmp_path / folder).mkdir(parents=True)
    line = commands_of(split_recipe, certificates, free_port())[party]
    assert main([*line, "--set", f"model.name_or_path={name}"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "model.name_or_path: " in error and f"file or folder {name}" in error
    assert f"(did you mean {name.removeprefix('./').replace('lama', 'llama')}?)" in error


@pytest.mark.parametrize(
    ("party", "options", "message"),
    [
        ("server", ["--deadline", "-1"], "--deadline is -1.0, but must be more than 0"),
        ("server", ["--deadline", "nan"], "--deadline is nan, but must be more than 0"),
        ("server", ["--heartbeat-timeout", "0"], "--heartbeat-timeout is 0.0, but must be more than 0"),
        ("server", ["--max-message-bytes", "0"], "--max-message-bytes is 0, but must be more than 0"),
        ("server", ["--certificates", "nowhere"], "--certificates: the folder nowhere does not exist"),
        ("0", ["--connect-timeout", "-3"], "--connect-timeout is -3.0, but must be more than 0"),
        ("0", ["--peer", "1"], "'1' does not have the form ID=FINGERPRINT"),
        ("0", ["--peer", "1=sha256:abc"], "--peer 1=sha256:abc: The fingerprint given for '1'"),
        ("0", ["--server-fingerprint", "abc"], "--server-fingerprint: The fingerprint given for 'server'"),
    ],
)
def test_invalid_options_are_rejected_before_files_are_read(party, options, message, certificates, tmp_path, capsys):
    command = commands_of(tmp_path / "none.yaml", certificates, 1)[party]
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err
