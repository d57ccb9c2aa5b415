"""The code blocks of the documentation run on tiny models, and its commands and recipes are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import offline_world
import page_objects
import pytest
from doc_blocks import CODE_PAGES, ROOT, Block, blocks, blocks_of

from hf_federated.cli.main import build_parser
from hf_federated.experiments.benchmark.recipe_grid import read_grid
from hf_federated.experiments.recipe.recipe import load_recipe, parse_recipe, partitioner_has_seed
from hf_federated.experiments.recipe.yaml_file import parse_yaml


def python_pages() -> list[Any]:
    """The pages with Python blocks that run, with the marker `slow` where a block has the option."""
    pages = []
    for page in CODE_PAGES:
        found = [block for block in blocks(page) if block.language == "python" and not block.is_skipped]
        if found:
            marks = [pytest.mark.slow] if any(block.option == "slow" for block in found) else []
            pages.append(pytest.param(page, marks=marks, id=page.removeprefix("docs/")))
    return pages


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    offline_world.build(folder)
    return folder


@pytest.fixture
def in_world(world, tmp_path, monkeypatch) -> Path:
    """A working directory in which the names of `offline_world` are links."""
    for path in world.iterdir():
        if path.name == "outputs":  # pages write to this folder
            (tmp_path / "outputs").mkdir()
            for inner in path.iterdir():
                (tmp_path / "outputs" / inner.name).symlink_to(inner)
        else:
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", python_pages())
def test_python_blocks_of_a_page_run_in_order(page, in_world) -> None:
    # `dataclass` looks up the types of fields in the module named `__name__`.
    namespace = {"__name__": __name__, **page_objects.objects(page)}
    for block in blocks(page):
        if block.language == "python" and not block.is_skipped:
            run(block, namespace)


def run(block: Block, namespace: dict[str, Any]) -> None:
    # Leading line breaks give the lines of the page in a traceback.
    code = compile("\n" * (block.line - 1) + block.code, block.page, "exec", dont_inherit=True)
    if block.option.startswith("raises "):
        with pytest.raises(Exception) as error:
            exec(code, namespace)
        assert type(error.value).__name__ == block.option.removeprefix("raises ")
    else:
        exec(code, namespace)


def commands(block: Block) -> list[str]:
    """The commands of a shell block, with continued lines joined."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


SHELL = [block for block in blocks_of("bash") if not block.is_skipped]


@pytest.mark.parametrize("block", SHELL, ids=lambda block: f"{block.page.removeprefix('docs/')}:{block.line}")
def test_commands_are_accepted(block) -> None:
    for line in commands(block):
        words = shlex.split(line, comments=True)
        if words[0] == "hf-federated":
            check_hf_federated(words[1:])
        elif words[0] == "make":
            target = rf"^{words[1]}:"
            assert re.search(target, (ROOT / "Makefile").read_text(), flags=re.MULTILINE), line
        elif words[0] in ("python", "accelerate"):
            named = [word for word in words if word.startswith(("recipes/", "benchmarks/"))]
            assert all((ROOT / name).is_file() for name in named), line
        else:
            known = ("pip", "git", "cd", "eval")
            assert words[0] in known, f"{block.page}:{block.line} has an unknown command: {line}"


def check_hf_federated(words: list[str]) -> None:
    """Parse a command. Recipes of the repository are validated together with their overrides."""
    if words == ["--help"] or words[1:] == ["--help"]:
        return
    arguments = build_parser().parse_args(words)
    recipe = getattr(arguments, "recipe", None)
    for name in [recipe] if isinstance(recipe, str) else recipe or []:
        if name.startswith("recipes/"):
            for path in sorted(ROOT.glob(name)):
                load_recipe(path, arguments.overrides)
            assert list(ROOT.glob(name)), f"{name} does not exist"


YAML = [block for block in blocks_of("yaml") if not block.is_skipped]


@pytest.mark.parametrize("block", YAML, ids=lambda block: f"{block.page.removeprefix('docs/')}:{block.line}")
def test_recipes_are_valid(block) -> None:
    """A fragment of a recipe is completed with a model and a dataset."""
    values = parse_yaml(block.code, block.page)
    values = {"model": {"name_or_path": "model"}, "data": {"path": "data"}, **values}
    parse_recipe(values)
    if "benchmark" in values:
        grid = read_grid(block.page, values, None, Path("out"), partitioner_has_seed)
        for planned in [*grid.runs, *(grid.trials.runs if grid.trials else [])]:
            parse_recipe(planned.values)


def test_skipped_blocks_name_a_reason() -> None:
    for page in CODE_PAGES:
        for block in blocks(page):
            if block.is_skipped:
                assert re.fullmatch(r"skip, \w.{8,}", block.option), f"{block.page}:{block.line}: {block.option}"


def test_all_blocks_have_a_language() -> None:
    languages = {"python", "bash", "yaml", "text", "json", "diff", "pycon"}
    for page in CODE_PAGES:
        assert {block.language for block in blocks(page)} <= languages, page


@pytest.mark.parametrize("code", ["1 / 0", "assert trainer is None"])
def test_failing_block_fails(code) -> None:
    with pytest.raises((ZeroDivisionError, AssertionError)):
        run(Block("page.md", 3, "python", code, ""), {"trainer": 1})
