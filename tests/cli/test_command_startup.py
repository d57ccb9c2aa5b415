"""The command line answers quickly, because a command imports its libraries only when it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_federated.cli import certificates, network, partition
from hf_federated.cli.main import COMMANDS, build_parser
from hf_federated.data.partitioners import PARTITIONERS
from hf_federated.experiments.benchmark.benchmark import DEFAULT_DIR
from hf_federated.security.keys import DEFAULT_RSA_BITS
from hf_federated.transport.protocol import DEFAULT_MAX_MESSAGE_BYTES


LISTED = "import sys, atexit; atexit.register(lambda: print('LOADED', *sys.modules)); "
HEAVY = {"torch", "transformers", "datasets", "peft", "numpy"}


def loaded_modules(*arguments: str) -> set[str]:
    """Modules that a command loads until it exits."""
    code = f"{LISTED}from hf_federated.cli.main import main; sys.exit(main({list(arguments)}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return set(result.stdout.partition("LOADED")[2].split())


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "nosuch",
        "train",
        "partition --help",
        "inspect --help",
        "train --help",
        "certificates --help",
        "join --help",
    ],
)
def test_help_and_usage_errors_import_no_library(line):
    loaded = loaded_modules(*line.split())
    assert "hf_federated.cli.main" in loaded
    assert not HEAVY & loaded


def test_recipe_mistakes_are_reported_without_the_import_of_a_library(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {name_or_path: m}\ndata: {path: d}\ntraining: {lr: 1}\npartition: {name: none}\n")
    assert loaded_modules("train", str(recipe)).isdisjoint(HEAVY)
    result = subprocess.run(
        [sys.executable, "-m", "hf_federated.cli.main", "train", str(recipe)], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "the recipe has 2 mistakes" in result.stderr
    assert "did you mean learning_rate?" in result.stderr and "partition.name is 'none'" in result.stderr


def cpu_seconds(*arguments: str) -> float:
    """CPU seconds of one Python process."""
    import resource

    def children() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = children()
    subprocess.run([sys.executable, *arguments], capture_output=True)
    return children() - before


@pytest.fixture(scope="module")
def import_of_torch() -> float:
    """CPU seconds of ``import torch``: a measure of the machine."""
    return cpu_seconds("-c", "import torch")


@pytest.mark.skipif(sys.platform == "win32", reason="the CPU time of a child process needs the module resource")
@pytest.mark.parametrize("line", ["--help", "partition --help", "train --help", "train nosuch.yaml"])
def test_command_answers_in_half_the_time_of_an_import_of_torch(line, import_of_torch):
    assert cpu_seconds("-m", "hf_federated.cli.main", *line.split()) < import_of_torch / 2


def test_partition_options_import_no_torch():
    loaded = loaded_modules("partition", "--partitioner", "iid", "--help")
    assert "datasets" in loaded
    assert not {"torch", "peft"} & loaded


def test_light_copies_of_names_and_defaults_match_their_modules():
    assert partition.PARTITIONER_NAMES == tuple(PARTITIONERS)
    assert certificates.RSA_BITS == DEFAULT_RSA_BITS
    assert network.MAX_MESSAGE_BYTES == DEFAULT_MAX_MESSAGE_BYTES
    parser = build_parser().parse_args(["benchmark", "recipe.yaml"])
    assert parser.output_dir is None and DEFAULT_DIR.as_posix() == "outputs/benchmarks"


def test_every_command_has_arguments_and_a_function():
    for name, command in COMMANDS.items():
        assert callable(command.load(name.replace("-", "_"))), name
        with pytest.raises(SystemExit):
            build_parser().parse_args([name, "--help"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hf-federated par", {"partition "}),
        ("hf-federated partition --partitioner ii", {"iid "}),
        ("hf-federated partition news.csv --index", {"--index-only "}),
    ],
)
def test_tab_completion_completes_commands_and_options(tmp_path, line, expected):
    pytest.importorskip("argcomplete")
    output = tmp_path / "completions"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(output),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "0",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    code = f"{LISTED}from hf_federated.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert set(output.read_text().split("\n")) == expected
