"""The site documents every public name, field and option, and its links and its navigation are complete."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from doc_blocks import DOCS, PAGES, ROOT

import hf_federated
from hf_federated.cli.main import build_parsers
from hf_federated.compatibility import RULES
from hf_federated.data.partitioners import PARTITIONERS
from hf_federated.experiments.benchmark.grid import BenchmarkSection
from hf_federated.experiments.recipe.fields import named_section_fields, section_fields
from hf_federated.experiments.recipe.schema import dataclass_fields
from hf_federated.experiments.recipe.yaml_file import parse_yaml


REPOSITORY = "https://github.com/hf-federated/hf-federated/"
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
PAPERS = {"fednlp": "fednlp", "fedid": "fedid", "adafd": "adafd", "feddrs": "feddrs", "fl-glm": "fl_glm"}


def hook(name: str) -> ModuleType:
    """A module of `docs/hooks` that does not need MkDocs."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "hooks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def entries_of_the_reference() -> list[str]:
    pages = "".join(text(page) for page in PAGES if page.startswith("docs/reference/"))
    return re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE)


@pytest.mark.parametrize("name", sorted(hf_federated.__all__))
def test_public_name_is_in_the_reference(name) -> None:
    assert entries_of_the_reference().count(f"hf_federated.{name}") == 1


def test_page_of_compatibility_lists_each_rule_under_the_groups_of_both_features() -> None:
    sections = hook("generated").compatibility().split("## ")
    for rule in RULES:
        groups = {rule.first.group, rule.second.group}
        row = f"| {rule.reason} | {rule.alternative} |"
        assert groups <= {section.splitlines()[0] for section in sections if row in section}, row


@pytest.mark.parametrize("module", ["methods", "server.collectors", "testing"])
def test_names_for_authors_of_methods_are_in_the_reference(module) -> None:
    documented = {entry.rpartition(".")[2] for entry in entries_of_the_reference()}
    assert set(importlib.import_module(f"hf_federated.{module}").__all__) <= documented


def documented_variables(source: str) -> set[str]:
    """Names of the variables of a module that a docstring follows."""
    body = ast.parse(source).body
    return {
        before.target.id
        for before, after in zip(body, body[1:], strict=False)
        if isinstance(before, ast.AnnAssign)
        and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


@pytest.mark.parametrize("name", sorted(hf_federated.__all__))
def test_public_name_has_a_docstring(name) -> None:
    item = getattr(hf_federated, name)
    if inspect.isclass(item) or inspect.isroutine(item):
        assert inspect.getdoc(item)
    else:
        package = name.lower().removesuffix("s")
        assert name in documented_variables(text(f"hf_federated/{package}/__init__.py"))


def nav_pages(entries: Any) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield f"docs/{value}"
            else:
                yield from nav_pages(value)


def test_no_two_pages_have_the_same_title() -> None:
    titles = [title[1] for page in PAGES if (title := re.search(r"^# (.+)$", text(page), flags=re.MULTILINE))]
    assert len(set(titles)) == len(titles) >= len(PAGES) - 1  # the home page has no title


HOW_TO = [page for page in PAGES if page.startswith("docs/how-to/")]


@pytest.mark.parametrize("page", HOW_TO)
def test_a_how_to_page_begins_with_its_purpose(page) -> None:
    """A reader who does not know the feature learns in the first lines when to use it."""
    introduction = re.split(r"^(?:## |```|\|)", text(page), maxsplit=1, flags=re.MULTILINE)[0]
    assert re.search(r"\b(if|when|before|to find|to simulate)\b", introduction), introduction


RECORDED = re.compile(
    r"\| *([\de.-]+) \| ([\d–]+)(?: (epochs?|steps))? \| (\d+)[ \w]* \| \[.*?\]\(\S+/main/(\S+)\) \|"
)


def test_first_values_to_try_are_those_of_recorded_runs() -> None:
    page = text("docs/get-started/choosing-a-method.md")
    rows = RECORDED.findall(page.partition("## First values to try")[2].partition("\n## ")[0])
    assert len(rows) == 11
    for learning_rate, work, unit, rounds, path in rows:
        if path.endswith(".py"):
            defaults = dict(re.findall(r'"--([\w-]+)", type=\w+, default=([\de.-]+)', text(path)))
            found = [defaults[name] for name in ("learning-rate", "local-steps", "num-rounds")]
        else:
            values = parse_yaml(text(path), path)
            training = values.get("training", values)
            federation = {**values, **values.get("federation", {})}
            runs = values.get("benchmark", {}).get("runs", {})
            if work == "8":  # one exchange only
                federation |= runs["FedKD"]["federation"]
            local = federation.get("local_epochs", federation.get("local_steps"))
            found = [training["learning_rate"], local, federation.get("num_rounds", training.get("num_train_epochs"))]
            assert ("local_epochs" in federation) == unit.startswith("epoch")
        assert [float(value) for value in found if value is not None] == [
            float(value) for value in (learning_rate, work, rounds) if value != "–"
        ], path


def test_navigation_holds_every_page_once() -> None:
    assert sorted(nav_pages(yaml.safe_load(text("mkdocs.yml"))["nav"])) == PAGES


def anchors(markdown: str) -> set[str]:
    """The anchors of the headings of a page, as GitHub and MkDocs compute them."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    headings = [heading.strip("# ").lower() for heading in re.findall(r"^#+ .*", prose, flags=re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}


def target_of(page: str, link: str) -> tuple[Path, str] | None:
    """The file and the anchor of an internal link, or `None` for an external link."""
    link = re.sub(rf"^{REPOSITORY}(?:blob|tree)/main/", f"{ROOT}/", link)
    if re.match(r"\w+:", link):
        return None
    path, _, anchor = link.partition("#")
    folder = (ROOT / page).parent
    file = folder / path if path else ROOT / page
    # The site has the pictures of the recipes' results under `results`.
    match = re.search(r"\.\./results/(\w+)/(.*)", path)
    return (ROOT / "recipes" / match[1] / "results" / match[2] if match else file), anchor


@pytest.mark.parametrize("page", [*PAGES, "README.md", "CONTRIBUTING.md"])
def test_internal_links_resolve(page) -> None:
    markdown = re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)
    links = [*LINK.findall(markdown), *re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", markdown)]
    for link in links:
        target = target_of(page, link)
        if target is None:
            continue
        file, anchor = target
        assert file.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page}: {link}"


def test_broken_links_are_found(tmp_path) -> None:
    target = target_of("docs/index.md", "get-started/missing.md")
    assert target is not None and not target[0].exists()
    assert target_of("docs/index.md", f"{REPOSITORY}blob/main/README.md#x") == (ROOT / "README.md", "x")
    assert target_of("docs/index.md", "https://example.org") is None


def test_recipe_page_has_every_field() -> None:
    page = hook("generated").recipe_fields()
    sections = {**section_fields(), "benchmark": dataclass_fields(BenchmarkSection)}
    for classes in named_section_fields().values():
        sections |= classes
    for section, fields in sections.items():
        for name in fields:
            assert f"| `{name}` |" in page, f"{section}.{name}"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)


@pytest.mark.parametrize("package", ["aggregation", "distillation"])
def test_reference_lists_the_names_of_all_algorithms(package) -> None:
    classes = {"aggregation": hf_federated.AGGREGATIONS, "distillation": hf_federated.DISTILLATIONS}[package]
    table = hook("generated").algorithms(package)
    assert all(f"| `{name}` | [`{cls.__name__}`] |" in table for name, cls in classes.items())


def test_command_page_has_every_option() -> None:
    page = hook("generated").commands()
    for partitioner in PARTITIONERS:
        for command, parser in build_parsers()[1].items():
            parser.add_command_arguments(["--partitioner", partitioner])
            assert f"## `hf-federated {command}`" in page
            for action in parser._actions:
                names = action.option_strings or [action.metavar or action.dest]
                assert all(name in page for name in names), f"{command} {names}"


def test_docstring_becomes_markdown() -> None:
    module = hook("docstring_markdown")
    docstring = (
        "A mean.\n\nArgs:\n    alpha (`float`, *optional*, defaults to `(0.5, 1.0)`):\n        See [`FedAvg`].\n"
        "    kwargs (*optional*): As in [`~hf_federated.nowhere.Unknown`].\n\nRaises:\n    `ValueError`: If not.\n\n"
        "Example:\n\n```python\n>>> 1\n1\n```\n"
    )
    assert module.to_markdown(docstring) == (
        "A mean.\n\n**Args**\n\n- **alpha** (`float`, *optional*, defaults to `(0.5, 1.0)`): \n    See"
        " [`FedAvg`][hf_federated.FedAvg].\n- **kwargs** (*optional*): As in `Unknown`.\n\n**Raises**\n\n"
        "- **ValueError**: If not.\n\n**Example**\n\n```pycon\n>>> 1\n1\n```\n\n"
    )


def test_reference_to_a_method_links_the_method() -> None:
    module = hook("docstring_markdown")
    assert module.link_names("[`~Ledger.save`]") == "[`save`][hf_federated.Ledger.save]"
    assert module.link_names("[`Ledger`](page.md)") == "[`Ledger`](page.md)"


@pytest.mark.parametrize("page", PAPERS)
def test_paper_page_has_no_means_of_its_own_and_links_the_claims(page) -> None:
    """The README and the page of the claims have the measured numbers, which tests compare with the records."""
    content = text(f"docs/papers/{page}.md")
    assert "±" not in content
    anchor = re.search(r"\(claims\.md#([a-z-]+)\)", content)[1]
    headings = re.findall(r"^## (.+)$", text("docs/papers/claims.md"), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings]


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-4000:]
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").glob("**/index.html")}
    assert {"index.html", "reference/recipes/index.html", "papers/fedid/index.html"} <= pages
    html = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").glob("**/*.html"))
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=\"https?://(?!hf-federated\.github\.io)", html)
