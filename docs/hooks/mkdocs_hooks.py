"""Hooks of MkDocs: generated reference pages, parts of the recipes' READMEs, and the check of the public names.

A page contains a comment where generated text belongs:

- `<!-- generated: recipe-fields -->`: the fields of a recipe, from the dataclasses.
- `<!-- generated: commands -->`: the help of each command, from the argument parser.
- `<!-- generated: aggregation -->`, `<!-- generated: distillation -->`, `<!-- generated: secure-aggregation -->`: the
  names of the algorithms.
- `<!-- generated: compatibility -->`: the features that do not work together, from the rules.
- `<!-- include: recipes/fedid/README.md#differences-from-the-paper -->`: a section of a Markdown file.
"""

from __future__ import annotations

import logging
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


sys.path.insert(0, str(Path(__file__).parent))

from docstring_markdown import link_names  # noqa: E402
from generated import algorithms, commands, compatibility, recipe_fields  # noqa: E402


ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/hf-federated/hf-federated/blob/main"
GENERATED = {
    "recipe-fields": recipe_fields,
    "commands": commands,
    "compatibility": compatibility,
    "aggregation": partial(algorithms, "aggregation"),
    "distillation": partial(algorithms, "distillation"),
    "secure-aggregation": partial(algorithms, "secure_aggregation"),
}

log = logging.getLogger("mkdocs.hooks.federated")


def on_files(files: Files, config: MkDocsConfig, **kwargs: Any) -> Files:
    """Add the pictures of the recipes' results to the site, as `results/<recipe>/…`."""
    for picture in sorted((ROOT / "recipes").glob("*/**/*.png")):
        recipe, *rest = picture.relative_to(ROOT / "recipes").parts
        name = "/".join(["results", recipe, *(part for part in rest if part != "results")])
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Insert generated text and link the names of the library."""
    markdown = re.sub(r"<!-- generated: ([\w-]+) -->", lambda match: GENERATED[match[1]](), markdown)
    markdown = re.sub(r"<!-- include: (\S+)#([\w-]+) -->", lambda match: section(match[1], match[2]), markdown)
    return "".join(
        part if part.startswith("```") else link_names(part).replace(" ± ", "\u00a0±\u00a0")
        for part in re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    )


def section(name: str, anchor: str) -> str:
    """
    Return a section of a Markdown file of the repository, with its heading and with links to the repository.

    Args:
        name (`str`): Path of the file, relative to the root of the repository.
        anchor (`str`): Anchor of the section, as GitHub computes it.

    Raises:
        ValueError: If the file has no such section.
    """
    text = (ROOT / name).read_text(encoding="utf-8")
    for match in re.finditer(r"^(#+) (.*?)\n(.*?)(?=^##? |\Z)", text, flags=re.DOTALL | re.MULTILINE):
        if re.sub(r"[^\w -]", "", match[2].lower()).replace(" ", "-") == anchor:
            return f"{match[1]} {match[2]}\n{absolute_links(match[3], Path(name).parent)}"
    raise ValueError(f"{name} has no section #{anchor}.")


def absolute_links(text: str, folder: Path) -> str:
    """Replace relative links of a file in `folder` by links to the repository."""

    def replace(match: re.Match[str]) -> str:
        path, hash_sign, anchor = match[1].partition("#")
        target = (ROOT / folder / path).resolve().relative_to(ROOT)
        return f"]({REPOSITORY}/{target.as_posix()}{hash_sign}{anchor})"

    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", replace, text)


def public_names() -> dict[str, griffe.Object | griffe.Alias]:
    """The public names of the package, from its source code."""
    package = griffe.load("hf_federated", search_paths=[ROOT], resolve_aliases=True)
    assert isinstance(package, griffe.Module) and package.exports is not None
    return {str(name): package[str(name)] for name in package.exports}


def on_env(env: Any, config: MkDocsConfig, files: Files, **kwargs: Any) -> None:
    """Warn about each public name without a docstring or without an entry in the reference."""
    autorefs = config.plugins["autorefs"]
    for name, item in public_names().items():
        if not item.has_docstring:
            log.warning(f"hf_federated.{name} has no docstring.")
        try:
            autorefs.get_item_url(f"hf_federated.{name}")  # type: ignore[attr-defined]
        except KeyError:
            log.warning(f"hf_federated.{name} has no entry in docs/reference. Add a line `::: hf_federated.{name}`.")
