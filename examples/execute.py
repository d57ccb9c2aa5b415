"""Run example notebooks and store their outputs.

    pip install -e '.[metrics,plots,trl,notebooks]'
    python examples/execute.py examples/text_classification.ipynb
    python examples/execute.py examples/text_classification.ipynb --set MODEL=DIR --set NUM_ROUNDS=1

`--set` replaces a value of the notebook's cell of settings (tag `parameters`) for the run only. The stored cell keeps
its source, so a notebook that was run on local copies still names the model and dataset of the Hub. Warnings and
progress bars on standard error are not stored, because they contain paths of the machine.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode


METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def settings_cell(notebook: NotebookNode) -> NotebookNode:
    """Return the cell of settings of a notebook."""
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"The notebook has {len(tagged)} cells with the tag 'parameters'. Tag exactly one cell.")
    return tagged[0]


def override(source: str, settings: Mapping[str, Any]) -> str:
    """
    Append assignments to the source of a cell of settings.

    Raises:
        ValueError: If the cell does not assign one of the names. The message lists the names of the cell.
    """
    assigned = [node.targets[0] for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    names = [target.id for target in assigned if isinstance(target, ast.Name)]
    unknown = sorted(set(settings) - set(names))
    if unknown:
        raise ValueError(f"The notebook has no settings {unknown}; its settings are {names}.")
    return "\n".join([source, *(f"{name} = {value!r}" for name, value in settings.items())])


def execute(
    notebook: NotebookNode, settings: Mapping[str, Any], directory: Path, timeout: int | None = None
) -> NotebookNode:
    """
    Run a notebook in place, with other settings for this run.

    Args:
        notebook (`NotebookNode`): The notebook. Its outputs are replaced, and its sources stay as they are.
        settings (`Mapping[str, Any]`): Name to value, for names that the cell of settings assigns.
        directory (`Path`): Working directory of the notebook.
        timeout (`int`, *optional*): Maximum number of seconds of a cell. By default a cell can run without limit.

    Raises:
        CellExecutionError: If a cell raises an error.
    """
    cell = settings_cell(notebook)
    source = cell.source
    cell.source = override(source, settings)
    try:
        NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": str(directory)}},
        ).execute()
    finally:
        cell.source = source
    return notebook


def clean(notebook: NotebookNode) -> NotebookNode:
    """Remove from a notebook what depends on the machine: metadata, random cell ids and standard error."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key == "tags"})
        if cell.cell_type == "code":
            cell.outputs = merge_streams([output for output in cell.outputs if output.get("name") != "stderr"])
    return notebook


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join consecutive outputs on standard output. How the kernel divides them depends on the time."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse `NAME=VALUE`. A value that is no Python literal is a string."""
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting; use NAME=VALUE.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description="Run example notebooks and store their outputs.")
    parser.add_argument("notebooks", type=Path, nargs="+")
    parser.add_argument(
        "--set", type=parse_setting, action="append", default=[], metavar="NAME=VALUE", dest="settings"
    )
    parser.add_argument("--directory", type=Path, default=Path(), help="working directory of the notebooks")
    options = parser.parse_args()
    for path in options.notebooks:
        notebook = nbformat.read(path, as_version=4)
        nbformat.write(clean(execute(notebook, dict(options.settings), options.directory)), path)


if __name__ == "__main__":
    main()
