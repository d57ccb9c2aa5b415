"""Choose an encoding for a text file that is not UTF-8."""

from __future__ import annotations

from pathlib import Path

from .byte_stream import open_bytes
from .table import TableError


# Text of the first lines with other characters than ASCII, by which the encoding is chosen.
MAX_SAMPLE_BYTES = 1 << 16
# A word with an implausible character is a spelling error or a name. More words mean a wrong encoding.
MAX_IMPLAUSIBLE = 0.1
ALTERNATIVES = {
    "cp1250": "Central Europe",
    "cp1251": "Cyrillic",
    "cp1253": "Greek",
    "cp1254": "Turkish",
    "cp1257": "Baltic",
    "mac_roman": "Excel for Mac",
    "cp850": "MS-DOS",
    "cp932": "Japanese",
    "gb18030": "Chinese",
    "cp949": "Korean",
    "big5": "Traditional Chinese",
    "iso8859_15": "Western Europe with the euro sign",
}
MULTIBYTE = ("cp932", "gb18030", "cp949", "big5")
# The first bytes of the frequent characters of Chinese: the first level of the character set.
FREQUENT_CHARACTERS = {"gb18030": ("gb2312", 0xB0, 0xD7), "big5": ("big5", 0xA4, 0xC6)}
# cp1250 and cp1254 have the letters of Czech, Croatian and Turkish at the places of these letters of cp1252, or share
# them. Few Western European texts have them.
RARE_LETTERS = set("ÐðÞþÝýŠšŽž")
# The place of the euro sign in ISO-8859-15. No text has this sign.
CURRENCY_SIGN = "¤"
# The places of `Ş`, `ş` and `ľ` in cp1250, and of `Œ`, `œ` and `Ÿ` in ISO-8859-15. They follow numbers.
SIGNS_AFTER_NUMBERS = set("ªº¼½¾")


def legacy_encoding(path: Path) -> str:
    """
    Return `"cp1252"` if the text of the file is plausible in this encoding.

    Every sequence of bytes is valid in some of the encodings of Windows, so plausibility decides. A character is
    implausible if it is a symbol within a word (`M„dchen`), a capital letter after a small letter (`MŠdchen`), one of
    three letters without a plain letter (`Ïðèâåò`), a sign such as `º` before a letter (`ºi`), or a letter that
    Western European languages hardly use. A currency sign (`¤`) is the euro sign of ISO-8859-15.

    Raises:
        TableError: If the text is implausible. The message names cp1252 and the encodings that are more plausible.
    """
    line, sample = _sample(path)
    share = _implausible(sample, "cp1252")
    if share is not None and share <= MAX_IMPLAUSIBLE and CURRENCY_SIGN.encode("cp1252") not in sample:
        return "cp1252"
    shares = {name: _implausible(sample, name) for name in ALTERNATIVES}
    limit = 0.5 if share is None else share / 2
    plausible = {name: other for name, other in shares.items() if other is not None and other <= limit}
    better = sorted(plausible, key=plausible.__getitem__)[:3]
    encodings = ("cp1252", *better)
    # The first of the words that differ in most encodings.
    word = max(sample.split(), key=lambda word: len({word.decode(name, errors="replace") for name in encodings}))[:30]
    readings = [
        f"{name} ({ALTERNATIVES.get(name, 'Western Europe')}): {word.decode(name, errors='replace')!r}"
        for name in encodings
    ]
    raise TableError(
        f"{path}, line {line}: the file is not UTF-8, and its encoding is ambiguous. One of its words is, in"
        f" {'; in '.join(readings)}. Set data.csv.encoding in a recipe or --csv-encoding to the encoding in which the"
        " word is right, or save the file as UTF-8."
    )


def _sample(path: Path) -> tuple[int, bytes]:
    """The number of the first line that is not ASCII, and this and further such lines."""
    first, lines, size = 0, [], 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isascii():
                first = first or number
                lines.append(line)
                size += len(line)
                if size >= MAX_SAMPLE_BYTES:
                    break
    return first, b"".join(lines)


def _implausible(sample: bytes, encoding: str) -> float | None:
    """The share of the characters outside ASCII that are implausible, or `None` if the sample is invalid."""
    try:
        text = sample.decode(encoding)
    except UnicodeDecodeError:
        return None
    places = [place for place, character in enumerate(text) if not character.isascii()]
    check = _is_implausible_character if encoding in MULTIBYTE else _is_implausible_letter
    rare = RARE_LETTERS if encoding in ("cp1252", "iso8859_15") else set()
    padded = f"  {text}  "
    return sum(text[place] in rare or check(padded, place + 2, encoding) for place in places) / max(1, len(places))


def _is_implausible_letter(text: str, place: int, encoding: str) -> bool:
    before, character, after = text[place - 1], text[place], text[place + 1]
    if character == CURRENCY_SIGN or (character in SIGNS_AFTER_NUMBERS and after.isalpha()):
        return True
    if not character.isalpha():
        return not character.isprintable() or (before.isalpha() and after.isalpha() and character not in "’‘´·\xad–—")
    if character.isupper() and before.islower():
        return True
    if character == "õ" and after not in "eo":  # Hungarian `ő`. Portuguese has `õe`.
        return encoding == "cp1252"
    if encoding in ("cp1251", "cp1253"):
        return not _has_neighbor(text, place)
    return any(
        all(other.isalpha() and not other.isascii() for other in text[start : start + 3])
        for start in range(place - 2, place + 1)
    )


def _has_neighbor(text: str, place: int) -> bool:
    """Whether a letter of another alphabet has a neighbor of its alphabet, as nearly all letters in words."""
    return any(text[other].isalpha() and not text[other].isascii() for other in (place - 1, place + 1)) or (
        not text[place - 1].isalpha() and not text[place + 1].isalpha()
    )


def _is_implausible_character(text: str, place: int, encoding: str) -> bool:
    """Whether a character is outside the blocks that texts in the language of a multi-byte encoding use."""
    code = ord(text[place])
    if 0x3000 <= code <= 0x303F or 0xFF01 <= code <= 0xFF5E:  # punctuation and wide letters
        return False
    if encoding == "cp932":
        # A text in Japanese has Hiragana or Katakana next to most Chinese characters.
        return not (0x3040 <= code <= 0x30FF or (0x4E00 <= code <= 0x9FFF and _near_kana(text, place)))
    if encoding == "cp949":
        return not 0xAC00 <= code <= 0xD7A3
    charset, first, last = FREQUENT_CHARACTERS[encoding]
    try:
        return not first <= text[place].encode(charset)[0] <= last
    except UnicodeEncodeError:
        return True


def _near_kana(text: str, place: int) -> bool:
    return any("\u3040" <= other <= "\u30ff" for other in text[max(0, place - 6) : place + 7])
