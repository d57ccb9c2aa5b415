"""`check_datasets` finds planted faults at their rows, and nothing in clean examples."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hf_federated import FederatedDataset, IidPartitioner
from hf_federated.data import Finding, check_datasets
from hf_federated.data.checks import examine
from hf_federated.data.checks.site_table import Columns, SiteTable


SITES = ("north", "south", "east", "west")


def clean(site: str, num_rows: int = 40) -> dict[str, list]:
    """Texts that occur once, and two labels."""
    return {
        "text": [f"the pump {number} of {site} leaks" for number in range(num_rows)],
        "label": ["defect" if number % 2 else "fine" for number in range(num_rows)],
    }


def sites(**changes) -> dict[str, Dataset]:
    """Clean examples of four sites, some of them changed."""
    columns = {site: clean(site) for site in SITES} | changes
    return {site: Dataset.from_dict(rows) for site, rows in columns.items()}


def found(findings: list[Finding]) -> list[tuple]:
    return [(item.kind, item.site, tuple(item.lines), item.count) for item in findings]


def changed(site: str, column: str, values: dict[int, object]) -> dict[str, list]:
    """The clean examples of a site with other values in some rows, which have numbers from 1."""
    rows = clean(site)
    for row, value in values.items():
        rows[column][row - 1] = value
    return rows


def test_clean_examples_have_no_findings():
    assert check_datasets(sites(), test=Dataset.from_dict(clean("test"))) == []
    assert check_datasets(FederatedDataset.from_dict(sites())) == []


@pytest.mark.parametrize(("column", "kind"), [("text", "missing text"), ("label", "missing label")])
def test_missing_values_have_their_rows_and_their_number(column, kind):
    values = {4: None, 7: "", 9: " \u00a0", 11: None, 12: None, 15: None, 40: "\t"}
    findings = check_datasets(sites(west=changed("west", column, values)))
    assert found(findings) == [(kind, "west", (4, 7, 9, 11, 12), 7)]
    assert findings[0].severity == "error"
    assert "rows 4, 7, 9, 11, 12 and 2 more" in str(findings[0]) and repr(column) in str(findings[0])


def test_missing_class_label_and_missing_number():
    labels = {"text": ["a", "b", "c"], "label": [0, -1, 1]}
    features = Features({"text": Value("string"), "label": ClassLabel(names=["bad", "good"])})
    assert found(check_datasets({"a": Dataset.from_dict(labels, features)})) == [("missing label", "a", (2,), 1)]
    scores = Dataset.from_dict({"text": ["a", "b"], "label": [float("nan"), 0.0]})
    assert ("missing label", "a", (1,), 1) in found(check_datasets({"a": scores}))


def test_duplicates_within_a_site_between_sites_and_in_the_test_examples():
    rows = clean("south")
    rows["text"][9] = rows["text"][2]  # row 10 repeats row 3
    rows["text"][19] = " the pump 0 of north leaks "
    rows["label"][19] = "defect"  # the original is fine
    test = clean("test", 5)
    test["text"][1] = "the pump 7 of west leaks"
    findings = check_datasets(sites(south=rows), test={"south": Dataset.from_dict(test)})
    assert sorted(found(findings)) == [
        ("duplicate", "south", (10,), 1),
        ("duplicate between sites", "south", (20,), 1),
        ("duplicate in training and test", "south", (2,), 1),
    ]
    messages = {finding.kind: finding.message for finding in findings}
    assert "row 3 of site 'south'" in messages["duplicate"]
    assert "row 1 of site 'north'" in messages["duplicate between sites"]
    assert "another label than the original: 1." in messages["duplicate between sites"]
    assert "row 8 of site 'west'" in messages["duplicate in training and test"]


def test_repeated_test_row_is_in_training_and_test_only_if_a_training_row_has_the_text():
    test = {"text": ["new", "new ", "the pump 1 of north leaks"], "label": ["fine", "fine", "defect"]}
    findings = check_datasets(sites(), test=Dataset.from_dict(test))
    assert sorted(found(findings)) == [("duplicate", None, (2,), 1), ("duplicate in training and test", None, (3,), 1)]


def test_repeated_row_of_a_site_counts_within_the_site_only():
    rows = clean("south")
    rows["text"][4] = rows["text"][8] = "the pump 0 of north leaks"
    assert sorted(found(check_datasets(sites(south=rows)))) == [
        ("duplicate", "south", (9,), 1),
        ("duplicate between sites", "south", (5,), 1),
    ]


def test_few_duplicates_are_a_note():
    texts = [f"text {number}" for number in range(999)]
    rows = {"text": [*texts, "text 3"], "label": ["a", "b"] * 500}
    (finding,) = check_datasets(Dataset.from_dict(rows))
    assert finding.severity == "note" and finding.site is None


def test_duplicates_agree_with_a_count_of_python():
    """The hashes of texts and of lists of words distinguish what differs, and join what is equal."""
    generator = random.Random(0)
    texts = [" ".join(generator.choices(["a", "b", ""], k=generator.randint(1, 4))) for _ in range(300)]
    kept = [text for text in texts if text.strip()]
    labels = ["x", "y"] * 150
    (finding,) = [
        item
        for item in check_datasets(Dataset.from_dict({"text": texts, "label": labels}))
        if item.kind == "duplicate"
    ]
    assert finding.count == len(kept) - len({text.strip() for text in kept})
    words = [text.split(" ") for text in kept]
    tags = [["O"] * len(row) for row in words]
    (finding,) = [
        item for item in check_datasets(Dataset.from_dict({"tokens": words, "tags": tags})) if item.kind == "duplicate"
    ]
    assert finding.count == len(words) - len(set(map(tuple, words)))


def test_site_names_that_look_alike():
    column = ["north"] * 20 + ["north "] + [" north"] * 2 + ["North"] * 3 + ["nort\u200bh"] + ["south"] * 20
    labels = ["a", "b", "c"] * 16
    rows = {"text": [f"text {n}" for n in range(47)], "label": labels[:47], "site": column}
    findings = check_datasets(Dataset.from_dict(rows), site_column="site")
    assert found(findings) == [
        ("look-alike site", "north ", (21,), 1),
        ("look-alike site", " north", (22,), 2),
        ("look-alike site", "North", (24,), 3),
        ("look-alike site", "nort\u200bh", (27,), 1),
    ]
    assert all("'north'" in finding.cure for finding in findings)


def test_row_without_a_site():
    rows = clean("north") | {"site": ["north"] * 20 + [None] + ["south"] * 19}
    assert found(check_datasets(Dataset.from_dict(rows), site_column="site")) == [("missing site", None, (21,), 1)]


def test_label_of_one_site_and_label_of_the_test_examples_only():
    test = clean("test", 10)
    test["label"][3] = "broken"
    findings = check_datasets(
        sites(east=changed("east", "label", {6: "unknown", 8: "unknown"})), test={"east": Dataset.from_dict(test)}
    )
    assert found(findings) == [
        ("label of one site", "east", (6,), 2),
        ("label of the test only", "east", (4,), 1),
    ]
    assert [finding.value for finding in findings] == ["unknown", "broken"]


def test_first_row_of_a_label_is_found_after_rows_without_a_label():
    findings = check_datasets(sites(east=changed("east", "label", {1: None, 2: None, 9: "lost"})))
    assert found(findings) == [("missing label", "east", (1, 2), 2), ("label of one site", "east", (9,), 1)]


def test_labels_that_differ_in_case_or_whitespace():
    findings = check_datasets(sites(east=changed("east", "label", {5: "Defect", 6: "fine "})))
    assert found(findings) == [("look-alike label", "east", (5,), 1), ("look-alike label", "east", (6,), 1)]
    assert "'defect'" in findings[0].cure


def test_label_column_of_ids_texts_or_quantities():
    rows = clean("north") | {"id": list(range(40)), "score": [number / 7 for number in range(40)]}
    data = {"north": Dataset.from_dict(rows)}
    for column, severity in {"id": "error", "score": "error", "text": "error"}.items():
        findings = [item for item in check_datasets(data, label_column=column, text_column="text")]
        assert [(item.kind, item.severity) for item in findings] == [("many labels", severity)]
        assert "40 different labels in 40 rows" in findings[0].message
    few = Dataset.from_dict({"text": list("abcd"), "label": [1, 2, 3, 4]})
    assert check_datasets(few) == []


def test_constant_label_of_all_sites_and_of_one_site():
    constant = {site: clean(site) | {"label": ["fine"] * 40} for site in SITES}
    findings = check_datasets(sites(**constant))
    assert [(item.kind, item.severity, item.value) for item in findings] == [("constant label", "error", "fine")]
    findings = check_datasets(sites(west=constant["west"]))
    assert found(findings) == [("constant label", "west", (1,), 40)] and findings[0].severity == "warning"


def test_sites_with_other_columns_or_types():
    south = clean("south") | {"label": [number % 2 for number in range(40)]}
    west = {"text": clean("west")["text"]}
    east = clean("east") | {"comment": ["-"] * 40}
    findings = [item for item in check_datasets(sites(south=south, west=west, east=east)) if item.severity == "error"]
    assert [(item.kind, item.site, item.value) for item in findings] == [
        ("different type", "south", "label"),
        ("missing column", "east", "comment"),
        ("missing column", "west", "label"),
    ]


def test_site_without_rows():
    empty = {"text": [], "label": []}
    assert found(check_datasets(sites(west=empty))) == [("empty site", "west", (), 0)]


TAGGED = {
    "tokens": [["in", "Paris"], ["at", "home"]] * 20,
    "ner_tags": [["O", "B-LOC"], ["O", "O"]] * 20,
}


def tagged(site: str, **changes) -> dict[str, list]:
    return (
        {"tokens": [[*words, f"{site}{number}"] for number, words in enumerate(TAGGED["tokens"])]}
        | {"ner_tags": [[*tags, "O"] for tags in TAGGED["ner_tags"]]}
        | changes
    )


@pytest.mark.parametrize("has_names", [False, True])
def test_site_without_entities(has_names):
    names = ["O", "B-LOC", "I-LOC"]
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=names))})
    columns = {site: tagged(site) for site in SITES}
    columns["east"]["ner_tags"] = [["O"] * 3] * 40
    if has_names:
        for rows in columns.values():
            rows["ner_tags"] = [[names.index(tag) for tag in tags] for tags in rows["ner_tags"]]
    data = {site: Dataset.from_dict(rows, features if has_names else None) for site, rows in columns.items()}
    assert [(item.kind, item.site, item.severity) for item in check_datasets(data)] == [
        ("no entities", "east", "warning")
    ]


def test_rows_with_another_number_of_tags_and_without_words():
    rows = tagged("east")
    rows["ner_tags"][3] = ["O"]
    rows["tokens"][6], rows["ner_tags"][6] = [], []
    rows["ner_tags"][8] = ["O", None, "O"]
    data = {site: Dataset.from_dict(tagged(site) if site != "east" else rows) for site in SITES}
    assert sorted(found(check_datasets(data))) == [
        ("missing label", "east", (7, 9), 2),
        ("missing text", "east", (7,), 1),
        ("number of tags", "east", (4,), 1),
    ]


def test_numbers_that_are_stored_as_text():
    scores = changed("west", "label", {number: f"{number % 4},5" for number in range(1, 41)})
    data = {"west": Dataset.from_dict(scores)}
    assert found(check_datasets(data)) == [("numbers as text", "west", (1,), 10)]
    data = {"west": Dataset.from_dict(changed("west", "text", {number: f" {number}.25" for number in range(1, 41)}))}
    assert found(check_datasets(data)) == [("numbers as text", "west", (1,), 40)]
    codes = {"west": Dataset.from_dict(changed("west", "label", {n: f"00{n % 2}" for n in range(1, 41)}))}
    assert check_datasets(codes) == []


def test_texts_that_the_model_cuts():
    vocabulary = {"[UNK]": 0, **{word: number for number, word in enumerate("the pump leaks of north".split(), 1)}}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=8)
    rows = changed("north", "text", {3: "the pump " * 4, 5: "the pump " * 5, 8: "leaks " * 9})
    findings = check_datasets({"north": Dataset.from_dict(rows)}, tokenizer=tokenizer)
    assert found(findings) == [("cut text", "north", (5, 8), 2)]
    assert "More than 8 tokens (up to 10) in 2 of 40 rows" in findings[0].message
    tokens = {"north": Dataset.from_dict(tagged("north"))}
    assert check_datasets(tokens, tokenizer=tokenizer) == []
    (finding,) = check_datasets(tokens, tokenizer=tokenizer, max_length=2)
    assert finding.count == 40 and finding.severity == "warning"


@pytest.mark.parametrize("rows", [[5, 3, 9, 0, 2], [1, 1, 4, 0], [3, 4, 5]])
def test_selected_and_shuffled_rows_have_the_numbers_of_the_selection(rows):
    texts = [None if number in (0, 3) else f"text {number}" for number in range(10)]
    dataset = Dataset.from_dict({"text": texts, "label": ["a", "b"] * 5})
    findings = check_datasets(dataset.select(rows))
    expected = [position for position, row in enumerate(rows, start=1) if texts[row] is None]
    assert sorted(next(item.lines for item in findings if item.kind == "missing text")) == expected
    assert [item.count for item in findings if item.kind == "duplicate"] == [1] * (len(set(rows)) < len(rows))
    clients = FederatedDataset.from_dataset(dataset.shuffle(seed=1), IidPartitioner(2, seed=0))
    for finding in check_datasets(clients):
        for line in finding.lines:
            assert clients[finding.site]["text"][line - 1] is None


def test_categories_of_pandas_are_labels():
    rows = changed("north", "label", {3: None, 4: "Fine"})
    table = pa.table({"text": rows["text"], "label": pa.array(rows["label"]).dictionary_encode()})
    batches = [(np.arange(1, 41), table)]
    findings = examine(
        [SiteTable("", "north", table.column_names, lambda: iter(batches))], Columns(("text",), "label")
    )
    assert found(findings.findings) == [("missing label", "north", (3,), 1), ("look-alike label", "north", (4,), 1)]


def test_columns_are_found_by_name_and_a_wrong_name_is_an_error():
    rows = clean("north")
    data = Dataset.from_dict({"Review": [*rows["text"][:-1], None], "Sentiment": rows["label"]})
    assert found(check_datasets(data)) == [("missing text", None, (40,), 1)]
    with pytest.raises(ValueError, match="no column 'review'. The columns are: Review, Sentiment"):
        check_datasets(data, text_column="review")
    with pytest.raises(TypeError, match="got a list"):
        check_datasets([data])
