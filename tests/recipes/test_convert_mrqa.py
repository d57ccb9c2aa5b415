"""MRQA's rows as those of `QuestionAnswering`: answers stand where they are said to, and each subset is a client."""

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
    """A row as the Hub has it: of each answer the text and the places, with the last character counted in."""
    spans = [{"start": [a for a, _ in places], "end": [b for _, b in places]} for _, places in answers]
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


def test_the_end_of_a_span_is_its_last_character():
    row = SCRIPT["convert_row"](mrqa(("Carolina", [(55, 62)])))
    assert row["answers"] == {"text": ["Carolina"], "answer_start": [55]}
    assert (row["id"], row["question"], row["context"], row["subset"]) == ("q0", "Who won?", CONTEXT, "SQuAD")


def test_all_places_count_and_annotators_who_agree_count_once():
    row = SCRIPT["convert_row"](mrqa(("Denver", [(33, 38), (65, 70)]), ("Denver", [(65, 70)])))
    assert row["answers"] == {"text": ["Denver", "Denver"], "answer_start": [33, 65]}


def test_answers_take_the_wording_of_the_context():
    row = SCRIPT["convert_row"](mrqa(("the denver broncos", [(28, 47)])))
    assert row["answers"] == {"text": ["the  Denver Broncos"], "answer_start": [28]}


@pytest.mark.parametrize(
    "answer",
    [("Denver", [(34, 39)]), ("Denver", [(400, 405)]), ("Denver", []), ("!", [(75, 75)]), (" ", [(31, 32)])],
    ids=["beside it", "outside", "nowhere", "other punctuation", "nothing but space"],
)
def test_an_answer_that_stands_elsewhere_is_dropped(answer):
    assert SCRIPT["convert_row"](mrqa(answer)) is None
    kept = SCRIPT["convert_row"](mrqa(answer, ("won", [(72, 74)])))
    assert kept["answers"] == {"text": ["won"], "answer_start": [72]}


def written(num_rows: int) -> Dataset:
    """Rows of two subsets; the first answer of every fifth row stands elsewhere."""
    return Dataset.from_list(
        [
            mrqa(("won", [(72 - 2 * (i % 5 == 0), 74)]), qid=f"q{i}", subset=["SQuAD", "TriviaQA-web"][i % 2])
            for i in range(num_rows)
        ]
    )


def test_as_many_rows_are_drawn_as_are_wanted_and_the_bad_ones_are_counted():
    draw = SCRIPT["draw_rows"]
    drawn, dropped = draw(written(40), {"SQuAD": 10, "TriviaQA": 99})
    assert drawn["subset"][:] == ["SQuAD"] * 10 + ["TriviaQA-web"] * 16
    assert dropped["TriviaQA"] == 4 and 0 <= dropped["SQuAD"] <= 4
    assert len(set(drawn["id"])) == 26 and not {f"q{i}" for i in range(0, 40, 5)} & set(drawn["id"])
    assert draw(written(40), {"SQuAD": 10}, seed=0)[0]["id"][:] == drawn["id"][:10]
    assert draw(written(40), {"SQuAD": 10}, seed=1)[0]["id"][:] != drawn["id"][:10]
    with pytest.raises(ValueError, match="no rows of NewsQA; the subsets are"):
        draw(written(4), {"NewsQA": 1})


def test_the_script_writes_clients_that_the_task_can_encode(tmp_path, monkeypatch, capsys, tokenizer):
    for split in ("train", "validation"):
        subsets = list(SCRIPT["NUM_ROWS"])
        rows = [mrqa(("won", [(72, 74)]), qid=f"{split}{i}", subset=subsets[i % 6]) for i in range(12)]
        Dataset.from_list(rows).to_parquet(tmp_path / "hub" / f"{split}.parquet")
    arguments = ["convert_mrqa.py", "--data", str(tmp_path / "hub"), "--output-dir", str(tmp_path / "mrqa")]
    monkeypatch.setattr("sys.argv", arguments)
    SCRIPT["main"]()
    assert "train: 12 rows" in capsys.readouterr().out
    for split in ("train", "test"):
        rows = Dataset.from_parquet(str(tmp_path / "mrqa" / f"{split}.parquet"), cache_dir=str(tmp_path / "cache"))
        clients = FederatedDataset.from_column(rows, "subset")
        assert len(clients) == 6
        task = QuestionAnswering(max_length=64, stride=8)
        for client in clients.values():
            features = task.prepare(client, tokenizer)
            assert all(start > features["null_position"][i] for i, start in enumerate(features["start_positions"]))
        assert rows["answers"][:] == [{"text": ["won"], "answer_start": [72]}] * 12
