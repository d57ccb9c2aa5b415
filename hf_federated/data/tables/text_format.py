"""The separator, encoding and quotes of a text file, and the options that set them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field


SEPARATORS = (",", ";", "\t", "|")
NO_QUOTES = "none"


def printable_separator(separator: str) -> str:
    """The separator as a person reads it: `tab`, or the character in quotes."""
    return "tab" if separator == "\t" else repr(separator)


@dataclass(frozen=True)
class TextFormat:
    """
    How the text of a file becomes rows.

    Args:
        encoding (`str`): The encoding, under its Python name.
        separator (`str`, *optional*): The character between two values. `None` for files without separators.
        quote (`str`, *optional*, defaults to `'"'`): The character around values that contain separators. `None` if
            the file has none.
        decimal (`str`, *optional*, defaults to `"."`): The decimal separator of numbers.
        header_line (`int`, *optional*, defaults to 1): The line of the column names. It is 2 if the first line is
            `sep=;`, which Excel reads as the separator.
    """

    encoding: str
    separator: str | None = None
    quote: str | None = '"'
    decimal: str = "."
    header_line: int = 1

    def __str__(self) -> str:
        parts = [] if self.separator is None else [f"separator {printable_separator(self.separator)}"]
        return ", ".join([*parts, f"encoding {self.encoding}"])

    def is_expected(self, separator: str = ",", allows_mark: bool = True) -> bool:
        """Whether the file is UTF-8 with the separator. A byte order mark can be allowed."""
        encodings = ("utf-8", "utf-8-sig") if allows_mark else ("utf-8",)
        return self.encoding in encodings and self.separator in (separator, None)


@dataclass(frozen=True)
class TableOptions:
    """
    What is known about CSV files. A field that is `None` is found from the file.

    Args:
        separator (`str`, *optional*): The character between two values, such as `";"`, or `"tab"`.
        encoding (`str`, *optional*): The encoding, such as `"cp1252"`.
        quote (`str`, *optional*): The character around values that contain separators, or `"none"`.
        decimal (`str`, *optional*): The decimal separator, `"."` or `","`. By default, numbers such as `1,5` in a file
            with the separator `;` are read as 1.5.
        text_columns (`list[str]`, *optional*): Columns of text, even if all their values are numbers.
    """

    separator: str | None = None
    encoding: str | None = None
    quote: str | None = None
    decimal: str | None = None
    text_columns: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.separator in ("tab", "\\t"):
            object.__setattr__(self, "separator", "\t")
        for mistake in self.mistakes():
            raise ValueError(mistake)

    def mistakes(self) -> Iterator[str]:
        """Each invalid value, with the allowed values."""
        if self.separator is not None and (len(self.separator) != 1 or self.separator in '\r\n"'):
            yield (
                f"separator is {self.separator!r}. It must be one character, such as ';', or tab. Without a value the"
                " separator is found from the file."
            )
        if self.quote is not None and self.quote != NO_QUOTES and (len(self.quote) != 1 or self.quote in "\r\n"):
            yield f"quote is {self.quote!r}. It must be one character, such as '\"', or {NO_QUOTES}."
        if self.quote is not None and self.quote == self.separator:
            yield f"separator and quote are both {self.quote!r}. They must differ."
        if self.decimal not in (None, ".", ","):
            yield f"decimal is {self.decimal!r}. It must be '.' or ','."
        if self.encoding is not None:
            try:
                # base64 and rot13 are codecs too.
                problem = "" if codecs.lookup(self.encoding)._is_text_encoding else "no encoding of text"
            except LookupError:
                problem = "unknown"
            if problem:
                yield (
                    f"encoding is {self.encoding!r}, which is {problem}. Examples of encodings are utf-8, utf-16,"
                    " cp1252 (Western Europe), cp1250 (Central Europe), cp1251 (Cyrillic) and cp932 (Japanese)."
                )
