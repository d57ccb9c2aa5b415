"""The code blocks of the documentation, and the options of a block.

A comment in front of a block changes how the tests treat it. The site does not show the comment.

- `<!-- test: skip, REASON -->`: the block does not run, because of the reason.
- `<!-- test: slow -->`: the page runs in the slow tests.
- `<!-- test: raises ValueError -->`: the block raises this error.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("**/*.md"))
# The pages of the site, and the other file with code that is not tested elsewhere.
CODE_PAGES = [*PAGES, "README.md"]
BLOCK = re.compile(
    r"(?:^[ ]*<!-- test: (?P<option>.*?) -->\n\n?)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """
    A fenced block of code.

    Args:
        page (`str`): Path of the page, relative to the root of the repository.
        line (`int`): Line of the code's first line.
        language (`str`): Language of the fence.
        code (`str`): The code.
        option (`str`): Text of the comment in front of the block, or `""`.
    """

    page: str
    line: int
    language: str
    code: str
    option: str

    @property
    def is_skipped(self) -> bool:
        """Whether the block does not run."""
        return self.option.startswith("skip")


def blocks(page: str) -> list[Block]:
    """Read the fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            page,
            text[: match.start("code")].count("\n") + 1,
            match["language"],
            textwrap.dedent(match["code"]),
            match["option"] or "",
        )
        for match in BLOCK.finditer(text)
    ]


def blocks_of(language: str) -> list[Block]:
    """The blocks of all pages in one language."""
    return [block for page in CODE_PAGES for block in blocks(page) if block.language == language]
