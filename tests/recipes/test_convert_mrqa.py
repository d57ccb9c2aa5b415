"""Tests of `convert_mrqa.py` of the FedNLP recipes: answer spans, the draw, and the written clients."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from hf_federated import FederatedDataset
from hf_federated.tasks import QuestionAnswering


SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "recipes" / "fednlp" / "convert_mrqa.py"))
CONTEXT = "The 50th game was played by the  Denver Broncos and by Carolina. Denver won."


def mrqa(*answers: tuple[str, list[tuple[int, int]]], **changed: Any) -> dict[str, Any]:
    """Build an example in the Hub's format: the text and the spans of each answer, with an inclusive end."""
    spans = [{"start": [a for a, _ in ranges], "end": [b for _, b in ranges]} for _, ranges in answers]
    detected = {"text": [text for text, _ in answers], "char_spans": spans, "token_spans": spans}
    row = {"subset": "SQuAD", "context": CONTEXT, "qid": "q0", "question": "Who won?", "detected_answers": detected}
    return {**row, "answers": [text for text, _ in answers], **changed}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def test_end_of_a_span_is_inclusive():
    row = SCRIPT["convert_row"](mrqa(("Carolina", [(55, 62)])))
    assert row["answers"] == {"text": ["Carolina"], "answer_start": [55]}
    assert (row["id"], row["question"], row["context"], row["subset"]) == ("q0", "Who won?", CONTEXT, "SQuAD")


def test_all_spans_are_kept_without_duplicates():
    row = SCRIPT["convert_row"](mrqa(("Denver", [(33, 38), (65, 70)]), ("Denver", [(65, 70)])))
    assert row["answers"] == {"text": ["Denver", "Denver"], "answer_start": [33, 65]}


def test_answers_use_the_wording_of_the_context():
    row = SCRIPT["convert_row"](mrqa(("the denver broncos", [(28, 47)])))
    assert row["answers"] == {"text": ["the  Denver Broncos"], "answer_start": [28]}


@pytest.mark.parametrize(
    "answer",
    [("Denver", [(34, 39)]), ("Denver", [(400, 405)]), ("Denver", []), ("!", [(75, 75)]), (" ", [(31, 32)])],
    ids=["shifted", "out of range", "no span", "punctuation only", "whitespace only"],
)
def test_answers_that_do_not_match_their_span_are_dropped(answer):
    assert SCRIPT["convert_row"](mrqa(answer)) is None
    kept = SCRIPT["convert_row"](mrqa(answer, ("won", [(72, 74)])))
    assert kept["answers"] == {"text": ["won"], "answer_start": [72]}


def build_examples(num_rows: int) -> Dataset:
    """Build examples of two subsets, in which the answer of every fifth example does not match its span."""
    return Dataset.from_list(
        [
            mrqa(("won", [(72 - 2 * (i % 5 == 0), 74)]), qid=f"q{i}", subset=["SQuAD", "TriviaQA-web"][i % 2])
            for i in range(num_rows)
        ]
    )


def test_draw_returns_the_requested_number_and_counts_skipped_examples():
    draw = SCRIPT["draw_rows"]
    drawn, dropped = draw(build_examples(40), {"SQuAD": 10, "TriviaQA": 99})
    assert drawn["subset"][:] == ["SQuAD"] * 10 + ["TriviaQA-web"] * 16
    assert dropped["TriviaQA"] == 4 and 0 <= dropped["SQuAD"] <= 4
    assert len(set(drawn["id"])) == 26 and not {f"q{i}" for i in range(0, 40, 5)} & set(drawn["id"])
    assert draw(build_examples(40), {"SQuAD": 10}, seed=0)[0]["id"][:] == drawn["id"][:10]
    assert draw(build_examples(40), {"SQuAD": 10}, seed=1)[0]["id"][:] != drawn["id"][:10]
    with pytest.raises(ValueError, match="no examples of NewsQA. The subsets are"):
        draw(build_examples(4), {"NewsQA": 1})


def test_script_writes_clients_that_the_task_encodes(tmp_path, monkeypatch, capsys, tokenizer):
    for split in ("train", "validation"):
        subsets = list(SCRIPT["NUM_ROWS"])
        rows = [mrqa(("won", [(72, 74)]), qid=f"{split}{i}", subset=subsets[i % 6]) for i in range(12)]
        Dataset.from_list(rows).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    arguments = ["convert_mrqa.py", "--data", str(tmp_path / "hub"), "--output-dir", str(tmp_path / "mrqa")]
    monkeypatch.setattr("sys.argv", arguments)
    SCRIPT["main"]()
    assert "train: 12 examples" in capsys.readouterr().out
    for split in ("train", "test"):
        rows = Dataset.from_parquet(str(tmp_path / "mrqa" / f"{split}.parquet"), cache_dir=str(tmp_path / "cache"))
        clients = FederatedDataset.from_column(rows, "subset")
        assert len(clients) == 6
        task = QuestionAnswering(max_length=64, stride=8)
        for client in clients.values():
            features = task.prepare(client, tokenizer)
            assert all(start > features["null_position"][i] for i, start in enumerate(features["start_positions"]))
        assert rows["answers"][:] == [{"text": ["won"], "answer_start": [72]}] * 12
