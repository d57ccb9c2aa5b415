"""Check docstrings, comments, messages and Markdown for words and sentence openings that make prose hard to read.

python tests/check_prose.py            # the whole repository, as `make lint` runs it
python tests/check_prose.py --count    # hits per 10 000 words, by pattern
python tests/check_prose.py hf_federated/data README.md
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]

# Each pattern with the wording to use in its place.
BANNED = {
    r"\bbeside\b": "alongside, next to, in addition to",
    r"\bstands?\b(?! for\b)": "is, appears, lies",
    # "cannot be told" is a verdict of the reports of benchmarks.
    r"(?<!\bcannot be )\b(?:told|tells?)\b": "reports, passes, distinguishes",
    r"\bsays\b": "states, defines, names",
    r"\b(?:nobody|everybody)\b": "no client, all clients, name the party",
    r"\b(?:whoever|whatever)\b": "any client that, any value that",
    r"\bso many\b": "that many, name the number",
    r"\b(?:go|goes|going|went) on from\b": "continue from, resume from",
    r"\bof (?:its|their|his|her|your|my|one's) own\b": "own",
    r"\b(?:come|comes|came) to\b": "results in, is",
    r"\b(?:mailbox|gathering|passages?)\b(?![:'])": "queue, batch, exchange",
    # A sentence or a clause that opens with "Of".
    r"(?:(?<=[.;:!?] )|(?<=^))Of\b": "subject first",
    r"(?<=[;:] )of (?:a|an|the|those|these|several|all|one|each|more|two|its|their)\b": "subject first",
}
PATTERNS = {re.compile(pattern, re.MULTILINE): advice for pattern, advice in BANNED.items()}
# Text that is quoted or generated, not written for this project.
SKIPPED = (
    "recipes/*/results/*/*",
    "docs/papers/claims.md",  # quotes the names of runs in these results
    "LICENSE*",
    "CODE_OF_CONDUCT.md",
    "tests/check_prose.py",
    "tests/superglue_paper.py",
    "tests/tasks/test_superglue*.py",
)


def python_prose(source: str) -> Iterator[tuple[int, str]]:
    """Each docstring, each block of comments and each string with a space in it, with its first line number."""
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1][0] + 1:
                yield block[0][0], " ".join(text for _, text in block)
                block = []
            block.append((token.start[0], token.string.lstrip("# ")))
    if block:
        yield block[0][0], " ".join(text for _, text in block)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def markdown_prose(source: str) -> Iterator[tuple[int, str]]:
    """Each paragraph outside fenced code, with its first line number."""
    start, paragraph, fenced = 1, [], False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced, line = not fenced, ""
        if fenced or not line.strip():
            if paragraph:
                yield start, " ".join(paragraph)
            paragraph = []
            continue
        if not paragraph:
            start = number
        paragraph.append(line.strip())


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The prose of a file, without inline code and quotations."""
    source = path.read_text(encoding="utf-8")
    for line, text in (python_prose if path.suffix == ".py" else markdown_prose)(source):
        text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
        text = re.sub(r"`[^`\n]*`", "code", text)
        yield line, re.sub(r"[“\"][^”\"\n]{12,}[”\"]", "quotation", text)


def files(names: list[str]) -> list[Path]:
    """The tracked Python and Markdown files below the given paths."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = [ROOT / name for name in listed.splitlines() if name.endswith((".py", ".md"))]
    return [path for path in paths if path.is_file() and not any(path.match(pattern) for pattern in SKIPPED)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["."])
    parser.add_argument("--count", action="store_true", help="print hits per 10 000 words")
    arguments = parser.parse_args()
    hits: Counter[str] = Counter()
    num_words = 0
    for path in files(arguments.paths):
        for line, text in prose(path):
            num_words += len(text.split())
            for pattern, advice in PATTERNS.items():
                for match in pattern.finditer(text):
                    hits[pattern.pattern] += 1
                    if not arguments.count:
                        around = " ".join(text[max(0, match.start() - 40) : match.end() + 30].split())
                        where = line + text[: match.start()].count("\n")
                        print(f"{path.relative_to(ROOT)}:{where}: {match.group()!r} ({advice}): … {around} …")
    if arguments.count:
        for pattern, number in hits.most_common():
            print(f"{10_000 * number / max(num_words, 1):8.2f}  {number:6d}  {pattern}")
        print(f"{num_words} words")
        return 0
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main())
