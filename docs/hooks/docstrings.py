"""The extension of griffe that converts docstrings for mkdocstrings. `docstring_markdown.py` has the conversion."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe


sys.path.insert(0, str(Path(__file__).parent))

from docstring_markdown import to_markdown  # noqa: E402


class HuggingFaceDocstrings(griffe.Extension):
    """The extension that `mkdocs.yml` names."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
