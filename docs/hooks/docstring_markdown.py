"""Convert docstrings in the grammar of Hugging Face to Markdown.

```
Args:
    alpha (`float`, *optional*, defaults to `1.0`):
        Concentration.
```

becomes a list under the title *Args*, and a reference such as ``[`FedAvg`]`` becomes a link to the reference page that
documents the name. A reference to a name without a page becomes inline code.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path


REFERENCE = Path(__file__).parents[1] / "reference"
ENTRIES = ("Args", "Attributes", "Raises")
SECTIONS = (*ENTRIES, "Returns", "Yields", "Requirements", "Relations", "Example", "Examples")
TITLE = re.compile(rf"^({'|'.join(SECTIONS)}):[ \t]*$", re.MULTILINE)
CROSS_REFERENCE = re.compile(r"\[`(~?)([\w.]+)`\](?![(\[])")


@cache
def documented_names() -> dict[str, str]:
    """The names that a reference page documents: the last part of each name -> the full name in `::: name`."""
    found: dict[str, str] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            found.setdefault(path.rpartition(".")[2], path)
    return found


def link_names(text: str) -> str:
    """Replace references in the grammar of Hugging Face by links of mkdocs-autorefs."""

    def link(match: re.Match[str]) -> str:
        parts = match[2].split(".")
        shown = parts[-1] if match[1] else match[2]
        for position, part in enumerate(parts):
            if part in documented_names():
                return f"[`{shown}`][{'.'.join([documented_names()[part], *parts[position + 1 :]])}]"
        return f"`{shown}`"

    return CROSS_REFERENCE.sub(link, text)


def dedent(body: str) -> str:
    """Remove four leading spaces from each line, which is the indentation of a section."""
    return re.sub(r"^ {4}", "", body, flags=re.MULTILINE)


def entry_list(body: str) -> str:
    """Convert the entries of `Args`, `Attributes` or `Raises` to a Markdown list."""
    entry = re.compile(r"^(\*{0,2}[\w.`]+)(?: (\(.*?\)))?: ?", re.MULTILINE)
    return entry.sub(lambda match: f"- **{match[1].strip('`')}**{f' {match[2]}' if match[2] else ''}: ", dedent(body))


def to_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown."""
    docstring = re.sub(r"```python\n(?=>>> )", "```pycon\n", docstring)
    pieces = TITLE.split(docstring)
    text = pieces[0]
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        body = body.strip("\n")
        if title in ENTRIES:
            body = entry_list(body)
        elif not title.startswith("Example"):
            body = dedent(body)
        text += f"**{title}**\n\n{body}\n\n"
    return link_names(text)
