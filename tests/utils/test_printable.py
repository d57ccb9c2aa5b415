"""Text of another party is one printable line."""

from __future__ import annotations

import time

import pytest

from hf_federated.utils.printable import MAX_LENGTH, printable, printable_traceback


@pytest.mark.parametrize(
    ("character", "shown"),
    [
        ("\x1b", r"\x1b"),
        ("\x08", r"\x08"),
        ("\x00", r"\x00"),
        ("\x07", r"\x07"),
        ("\x7f", r"\x7f"),
        ("\x9b", r"\x9b"),
        ("\u202e", r"\u202e"),
        ("\u2066", r"\u2066"),
        ("\ufeff", r"\ufeff"),
        ("\udc80", r"\udc80"),
        ("\U000e0041", r"\U000e0041"),
        ("\n", " "),
        ("\r", " "),
        ("\r\n", " "),
        ("\t", " "),
        ("\x0b", " "),
        ("\x1c", " "),
        ("\x85", " "),
        ("\u2028", " "),
        ("\u2029", " "),
    ],
)
def test_control_characters_are_shown_and_line_breaks_become_spaces(character, shown):
    text = printable(f"a{character}b")
    assert text == f"a{shown}b" and text.isprintable()


def test_every_character_of_unicode_is_printable_afterwards():
    for start in range(0, 0x110000, 4000):
        assert printable("x".join(map(chr, range(start, min(start + 4000, 0x110000)))), 10**6).isprintable()


def test_ordinary_text_does_not_change():
    text = "Größe 7 — 東京, naïve, 🙂: `loss` is 0.5 | 'north'"
    assert printable(text) == text and printable(ValueError(text)) == text


@pytest.mark.parametrize("character", ["x", "\x1b", " ", "\n", "\U000e0041"])
def test_length_and_time_are_bounded(character):
    started = time.perf_counter()
    text = printable("a" + character * 10**7, 100)
    assert len(text) <= 100 and text.endswith("…") and time.perf_counter() - started < 0.5
    assert len(printable(character * 10**5)) <= MAX_LENGTH
    assert printable("a" * 100, 100) == "a" * 100


def test_traceback_keeps_its_lines_and_none_looks_like_another_entry_of_the_log():
    def fail() -> None:
        raise RuntimeError("x\x1b[2J\nWARNING Rejected: client 'north'\r")

    try:
        fail()
    except RuntimeError as error:
        text = printable_traceback(error)
    lines = text.splitlines()
    assert len(lines) >= 4 and all(line.startswith("    ") and line.isprintable() for line in lines)
    assert r"    RuntimeError: x\x1b[2J" in lines and "    WARNING Rejected: client 'north'" in lines
    assert any(line.startswith("      File ") for line in lines)
