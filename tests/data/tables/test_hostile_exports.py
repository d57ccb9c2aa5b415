"""Files as office programs and scripts export them: each is read as what was written, or refused with the cure."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hf_federated.data.tables import TableError, TableOptions, read_table
from hf_federated.data.tables.delimited import column_names


GERMAN = [("Die Pumpe läuft über, schon wieder", "Mängel"), ("Größe paßt – „schön“ für 5 €", "gut")]
GERMAN_LETTERS = [("Die Pumpe läuft über", "Mängel")]
FRENCH = [("l’été à Noël, ça va très bien", "réglé"), ("où êtes-vous ? « créée » œuvre", "ouvert")]
ITALIAN = [("perché la città è così, più o meno", "sì"), ("però l'acqua è già lì", "no")]
JAPANESE = [("このポンプは漏れます。", "不良"), ("すぐに届きました、良い", "良品")]
SIGNS = [("el 2º piso, nº 5, Mª José", "sí"), ("1½ tazas, ¼ de café", "más")]
POLISH = [("pompa jest bardzo głośna, działa źle", "zły"), ("dobrze działa, polecam każdemu", "dobry")]
CZECH = [("čerpadlo je příliš hlučné", "špatný"), ("všechno běží dobře, děkuji", "dobrý")]
RUSSIAN = [("насос течёт каждый день", "плохо"), ("всё работает, спасибо", "хорошо")]
GREEK = [("η αντλία χάνει νερό", "κακό"), ("όλα λειτουργούν καλά", "καλό")]
TURKISH = [("pompa çok gürültülü değil mi", "kötü"), ("ısıtıcı iyi çalışıyor, teşekkürler", "iyi")]
ROMANIAN = [("pompa este zgomotoasă şi curge, aşa că nu", "rău")]
LITHUANIAN = [("siurblys labai triukšmingas, ąžuolas čia", "blogas")]
PLAIN = [("the pump leaks", "defect"), ("works", "fine")]


def csv_text(rows: list[tuple[str, ...]], separator: str = ";", end: str = "\r\n", header: str = "text;label") -> str:
    """The text of a file of values without separators, quotes and line breaks."""
    lines = [header.replace(";", separator), *(separator.join(row) for row in rows)]
    return "".join(f"{line}{end}" for line in lines)


def zipped(content: bytes, *names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return stream.getvalue()


# Name of the export: its bytes, and the rows that were written.
READ: dict[str, tuple[bytes, list[tuple[Any, ...]]]] = {
    "Excel, Germany, CSV UTF-8": (csv_text(GERMAN).encode("utf-8-sig"), GERMAN),
    "Excel, Germany, CSV": (csv_text(GERMAN).encode("cp1252"), GERMAN),
    "Excel, France, CSV": (csv_text(FRENCH).encode("cp1252"), FRENCH),
    "Excel, Italy, CSV": (csv_text(ITALIAN).encode("cp1252"), ITALIAN),
    "Excel, Japan, CSV UTF-8": (csv_text(JAPANESE, ",").encode("utf-8-sig"), JAPANESE),
    "Excel, Unicode text": (csv_text(GERMAN, "\t").encode("utf-16"), GERMAN),
    "PowerShell, UTF-16 without mark": (csv_text(JAPANESE).encode("utf-16-le"), JAPANESE),
    "UTF-16, big-endian without mark": (csv_text(GERMAN).encode("utf-16-be"), GERMAN),
    "UTF-32": (csv_text(GERMAN).encode("utf-32"), GERMAN),
    "commas, UTF-8, LF": (csv_text(PLAIN, ",", "\n").encode(), PLAIN),
    "UTF-8, old Mac line ends": (csv_text(PLAIN, ";", "\r").encode(), PLAIN),
    "pipes": (csv_text(GERMAN, "|").encode(), GERMAN),
    "tabs in .csv": (csv_text(GERMAN, "\t").encode(), GERMAN),
    "all values quoted": (b'"text";"label"\n"a; b";"x"\n"c, d";"y"\n', [("a; b", "x"), ("c, d", "y")]),
    "doubled quotes": (b'text,label\n"a 5"" pipe",x\n"""hi""",y\n', [('a 5" pipe', "x"), ('"hi"', "y")]),
    "line breaks within values": (
        b'text;label\r\n"a\r\n\r\nb";x\r\n"c\nd";y\r\n',
        [("a\r\n\r\nb", "x"), ("c\nd", "y")],
    ),
    "blank lines": (b"text;label\n\na;x\n  \nb;y\n\n\n", [("a", "x"), ("b", "y")]),
    "no line end after the last row": (b"text;label\na;x\nb;y", [("a", "x"), ("b", "y")]),
    "separator line of Excel": (b"sep=;\r\ntext;label\r\na, b;x\r\n", [("a, b", "x")]),
    "missing values": (b"text,label\na,NA\nb,\nNULL,x\n", [("a", None), ("b", None), (None, "x")]),
    "rows without their last values": (b"text,label,note\na,x\nb,y,n\n", [("a", "x", None), ("b", "y", "n")]),
    "empty rows at the end": (b"text;label\na;x\n;\n;\n", [("a", "x"), (None, None), (None, None)]),
    "one column": (b"text\nhello\nyou there; friend\n", [("hello",), ("you there; friend",)]),
    "index column of pandas": (b",text\n0,a\n1,b\n", [("0", "a"), ("1", "b")]),
    "signs after numbers": (csv_text(SIGNS).encode("cp1252"), SIGNS),
    "colors of a terminal": (b"text,label\n\x1b[31mred,x\n", [("\x1b[31mred", "x")]),
    "emoji": ("text,label\n🙂 ok,x\n".encode(), [("🙂 ok", "x")]),
    "a comma in one column name": (b"text;label, final\na;x\nb;y\n", [("a", "x"), ("b", "y")]),
    "decimal commas": (b"text;score\na;1,5\nb;2\n", [("a", "1,5"), ("b", "2")]),
    "leading zeros": (b"text,label\na,007\nb,012\n", [("a", "007"), ("b", "012")]),
    "a value of 200,000 characters": (b"text,label\n" + b"x" * 200_000 + b",y\n", [("x" * 200_000, "y")]),
    "gzip": (gzip.compress(csv_text(GERMAN).encode("cp1252")), GERMAN),
    "bzip2": (bz2.compress(csv_text(GERMAN).encode()), GERMAN),
    "xz": (lzma.compress(csv_text(GERMAN).encode()), GERMAN),
    "ZIP from macOS": (zipped(csv_text(PLAIN).encode(), "a/north.csv", "__MACOSX/a/._north.csv"), PLAIN),
}

# Name of the export: its bytes, and parts of the error: the line or the column, the value, and the cure.
REFUSED: dict[str, tuple[bytes, list[str]]] = {
    "Excel, Japan, CSV": (
        csv_text(JAPANESE, ",").encode("cp932"),
        ["line 2", "cp1252", "cp932", "'この", "--csv"],
    ),
    "Excel, Poland, CSV": (csv_text(POLISH).encode("cp1250"), ["line 2", "cp1252", "cp1250", "'głośna", "encoding"]),
    "Excel, Czechia, CSV": (csv_text(CZECH).encode("cp1250"), ["line 2", "cp1252", "cp1250", "'čerpadlo'"]),
    "Excel, Russia, CSV": (csv_text(RUSSIAN).encode("cp1251"), ["line 2", "cp1252", "cp1251", "'насос'"]),
    "Excel, Greece, CSV": (csv_text(GREEK).encode("cp1253"), ["line 2", "cp1252", "cp1253", "'η'"]),
    "Excel, Turkey, CSV": (csv_text(TURKISH).encode("cp1254"), ["line 2", "cp1252", "cp1254", "'değil'"]),
    "Excel, Romania, CSV": (csv_text(ROMANIAN).encode("cp1250"), ["line 2", "cp1252", "cp1250", "'zgomotoasă'"]),
    "Excel, Lithuania, CSV": (csv_text(LITHUANIAN).encode("cp1257"), ["line 2", "cp1257", "'triukšmingas,'"]),
    "ISO-8859-15 with one euro sign": (
        csv_text([*GERMAN_LETTERS * 20, ("für 5 €", "gut")]).encode("iso8859_15"),
        ["line 2", "iso8859_15", "--csv-encoding"],
    ),
    "ISO-8859-15 with a ligature": (
        csv_text([("un cœur, une sœur", "bon")]).encode("iso8859_15"),
        ["line 2", "iso8859_15", "'cœur,'"],
    ),
    "ISO-2022-JP": (csv_text(JAPANESE, ",").encode("iso2022_jp"), ["line 2", "iso2022_jp", "--csv-encoding"]),
    "Excel for Mac, CSV": (csv_text(GERMAN).encode("mac_roman"), ["line 2", "cp1252", "mac_roman", "'über,'"]),
    "Excel, CSV (MS-DOS)": (
        csv_text([("Die Pumpe läuft über", "Mängel")]).encode("cp850"),
        ["line 2", "cp1252", "cp850", "'läuft'"],
    ),
    "damaged UTF-8 with a mark": (b"\xef\xbb\xbftext;label\na;x\nb\xff;y\n", ["line 3", "ff", "'b'", "utf-8-sig"]),
    "UTF-16 that ends within a character": (csv_text(PLAIN).encode("utf-16")[:-1], ["utf-16", "data.csv.encoding"]),
    "UTF-32 without a mark": (csv_text(GERMAN).encode("utf-32-le"), ["zero bytes", "utf-32-le or utf-32-be"]),
    "empty": (b"", ["is empty", "names of the columns"]),
    "only blank lines": (b"\n\n", ["is empty"]),
    "only a mark": (b"\xef\xbb\xbf", ["is empty"]),
    "only a header": (b"text;label\n", ["line 1", "text, label", "no rows", "Add rows"]),
    "a row with too many values": (b"text,label\na,x\nb, c,y\n", ["line 3", "3 values", "2 columns", "'y'", "quotes"]),
    "separators within values": (
        b"text;label\na;x\nleaks; again; often;x\n",
        ["separator cannot be found", "';'", "2 columns", "line 3 has 4 values", "double quotes"],
    ),
    "a separator in the header only": (
        b"review (good|bad)\nhello\nyou\n",
        ["line 1", "'|'", "0 of 2 rows", "--csv-separator to ','"],
    ),
    "two separators that both fit": (
        b"a;b,c\nx;y,z\n",
        ["',' makes 2 and ';' makes 2 columns", "data.csv.separator"],
    ),
    "lists of values with their own separator": (b"id,a|b|c\n1,2|3|4\n", ["',' makes 2 and '|' makes 3"]),
    "an unclosed quote": (b'text,label\na,x\n"b,y\nc,z\n', ["line 3", 'quote (")', "line 4", "--csv-quote", "none"]),
    "text after a quote": (b'text,label\na,x\n"b" c,y\n', ["line 3", "followed by text", '""', "none"]),
    "a zero byte": (b"text,label\na,x\nb\0,y\n", ["line 3", "zero byte", "Export it again"]),
    "a column name twice": (b"text,label,text\na,x,b\n", ["line 1", "columns 1 and 3", "'text'", "Rename"]),
    "a gzip file that was copied in part": (gzip.compress(b"text,label\na,x\n")[:-9], ["damaged archive", "again"]),
    "an archive with two files": (zipped(b"text\na\n", "a.csv", "b.csv"), ["2 files", "Unpack"]),
}


def rows_of(path: Path, options: TableOptions | None = None) -> list[tuple[Any, ...]]:
    batches = read_table(path, options).batches(as_text=True)
    return [tuple(row.values()) for _, batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("name", READ)
def test_export_is_read_as_written(tmp_path, name):
    content, expected = READ[name]
    path = tmp_path / "north.csv"
    path.write_bytes(content)
    assert rows_of(path) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_export_is_refused_with_its_line_and_cure(tmp_path, name):
    content, words = REFUSED[name]
    path = tmp_path / "north.csv"
    path.write_bytes(content)
    with pytest.raises(TableError) as caught:
        rows_of(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (csv_text(JAPANESE, ",").encode("cp932"), {"encoding": "cp932"}, JAPANESE),
        (csv_text(JAPANESE, ",").encode("iso2022_jp"), {"encoding": "iso2022_jp"}, JAPANESE),
        (csv_text(POLISH).encode("cp1250"), {"encoding": "windows-1250"}, POLISH),
        (b"a;b,c\nx;y,z\n", {"separator": ";"}, [("x", "y,z")]),
        (b"review (good|bad)\nhello\n", {"separator": ","}, [("hello",)]),
        (b'text,label\na 5" pipe,x\n"b,y\n', {"quote": "none"}, [('a 5" pipe', "x"), ('"b', "y")]),
        (b"text\tlabel\n'a\tb'\tx\n", {"separator": "tab", "quote": "'"}, [("a\tb", "x")]),
        (b"text:label\na:x\n", {"separator": ":"}, [("a", "x")]),
    ],
)
def test_option_overrides_what_the_file_shows(tmp_path, content, options, expected):
    path = tmp_path / "north.csv"
    path.write_bytes(content)
    assert rows_of(path, TableOptions(**options)) == expected


def test_header_of_20000_columns_is_read_in_linear_time():
    """A comparison of all pairs of names takes 10 seconds or more."""
    header = [f"column {number}" for number in range(20_000)]
    start = time.process_time()
    assert column_names(Path("a.csv"), 1, header) == header
    with pytest.raises(TableError, match="columns 8 and 20001 both have the name 'column 7'"):
        column_names(Path("a.csv"), 1, [*header, "column 7"])
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"separator": ";;"}, ["separator is ';;'", "one character"]),
        ({"separator": '"'}, ["separator is"]),
        ({"quote": "no"}, ["quote is 'no'", "none"]),
        ({"separator": "'", "quote": "'"}, ["must differ"]),
        ({"decimal": ";"}, ["decimal is ';'"]),
        ({"encoding": "cp12522"}, ["'cp12522', which is unknown", "cp1252 (Western"]),
    ],
)
def test_invalid_option_is_an_error_with_the_allowed_values(options, words):
    with pytest.raises(ValueError) as caught:
        TableOptions(**options)
    assert all(word in str(caught.value) for word in words)
