"""Models from configs, tokenizers and data files with which the published example scripts run offline."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from language import SPECIAL, WORDS, language_model, sentences
from language import tokenizer as causal_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedTokenizerFast,
)


SITES = ("north", "south")
VOCABULARY = [*SPECIAL, "<cls>", "<sep>", "<mask>", *WORDS["north"], *WORDS["south"]]


def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word, which encodes pairs of texts as BERT does."""
    ids = {word: number for number, word in enumerate(VOCABULARY)}
    backend = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single="<cls> $A <sep>",
        pair="<cls> $A <sep> $B:1 <sep>:1",
        special_tokens=[(token, ids[token]) for token in ("<cls>", "<sep>")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        cls_token="<cls>",
        sep_token="<sep>",
        mask_token="<mask>",
        model_max_length=32,
    )


def save_bert(model_class: type) -> Callable[[Path], None]:
    """Return a function that saves a two-layer BERT of a class with its tokenizer."""

    def save(folder: Path) -> None:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = BertConfig(vocab_size=len(VOCABULARY), max_position_embeddings=32, **sizes)
            model_class(config).save_pretrained(folder)
        encoder_tokenizer().save_pretrained(folder)

    return save


def save_bart(folder: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3, "decoder_start_token_id": 1}
    config = BartConfig(
        vocab_size=len(VOCABULARY), max_position_embeddings=32, forced_eos_token_id=1, **sizes, **heads, **ids
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BartForConditionalGeneration(config).save_pretrained(folder)
    encoder_tokenizer().save_pretrained(folder)


def save_llama(folder: Path) -> None:
    language_model().save_pretrained(folder)
    causal_tokenizer().save_pretrained(folder)


# ---- Data: rows of both sites, in turn


def by_site(num_rows: int, columns: Callable[[str, int, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with a column `site`. `columns(text, number, site)` returns the other columns."""
    texts = {site: sentences(site, num_rows) for site in SITES}
    sites = [SITES[number % 2] for number in range(num_rows)]
    return [{**columns(texts[site][number], number, site), "site": site} for number, site in enumerate(sites)]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_squad(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"data": rows}), encoding="utf-8")


def without_site(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "site"} for row in rows]


def pair_rows(num_rows: int) -> list[dict[str, Any]]:
    rows = by_site(num_rows, lambda text, i, site: {"sentence1": text, "sentence2": text, "label": int(site < "o")})
    return without_site(rows)


def tagged_rows(num_rows: int) -> list[dict[str, Any]]:
    def columns(text: str, number: int, site: str) -> dict[str, Any]:
        words = text.split()
        return {"tokens": words, "ner_tags": ["B-PLACE", *["O"] * (len(words) - 1)]}

    return by_site(num_rows, columns)


def question_rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows as in SQuAD. The title names the article, which becomes the client."""

    def columns(text: str, number: int, site: str) -> dict[str, Any]:
        answer = text.split()[1]
        answers = {"text": [answer], "answer_start": [text.index(answer)]}
        question = text.split()[0]
        return {"id": f"{number}", "title": site, "context": text, "question": question, "answers": answers}

    return without_site(by_site(num_rows, columns))


def summary_rows(num_rows: int) -> list[dict[str, Any]]:
    return by_site(num_rows, lambda text, number, site: {"text": text, "summary": text.split()[0]})


def text_rows(num_rows: int) -> list[dict[str, Any]]:
    return by_site(num_rows, lambda text, number, site: {"text": text})


def source_rows(num_rows: int) -> list[dict[str, Any]]:
    return without_site(by_site(num_rows, lambda text, number, site: {"text": text, "source": site}))


def preference_rows(num_rows: int) -> list[dict[str, Any]]:
    def columns(text: str, number: int, site: str) -> dict[str, Any]:
        return {"prompt": text, "chosen": f" {WORDS[site][0]}", "rejected": f" {WORDS[site][5]}"}

    return without_site(by_site(num_rows, columns))


def scored_rows(num_rows: int) -> list[dict[str, Any]]:
    def columns(text: str, number: int, site: str) -> dict[str, Any]:
        return {"sentence1": text, "sentence2": text.split()[0], "score": (number % 5) / 4}

    return without_site(by_site(num_rows, columns))


@dataclass(frozen=True)
class Script:
    """
    A published script with its inputs.

    Args:
        diff (`str`): Name of the diff in `examples/scripts`.
        save_model (`Callable[[Path], None]`): Saves a model and its tokenizer.
        rows (`Callable[[int], list[dict]]`): Creates rows of data.
        write (`Callable[[Path, list[dict]], None]`): Writes rows to a file.
        extension (`str`): Extension of the files.
        options (`str`): Further command line options.
        clients (`tuple[str, ...]`): Ids of the clients that the changed script trains.
        num_rounds (`int`): Number of rounds that the changed script trains.
    """

    diff: str
    save_model: Callable[[Path], None]
    rows: Callable[[int], list[dict[str, Any]]]
    write: Callable[[Path, list[dict[str, Any]]], None]
    extension: str
    options: str
    clients: tuple[str, ...] = SITES
    num_rounds: int = 2


NUMBERED = tuple(str(number) for number in range(10))
FILES = "--train_file train.{0} --validation_file validation.{0} --do_train --do_eval --model_name_or_path model"
TRL = (
    "--dataset_name data --model_name_or_path model --eval_strategy epoch --max_length 16 --bf16 false --dtype float32"
)
LORA = "--use_peft --lora_r 2 --lora_target_modules q_proj v_proj"

SCRIPTS = [
    Script(
        "run_glue",
        save_bert(BertForSequenceClassification),
        pair_rows,
        write_csv,
        "csv",
        f"{FILES} --max_seq_length 16",
        NUMBERED,
    ),
    Script(
        "run_ner",
        save_bert(BertForTokenClassification),
        tagged_rows,
        write_json_lines,
        "json",
        f"{FILES} --test_file test.json --do_predict",
    ),
    Script(
        "run_qa",
        save_bert(BertForQuestionAnswering),
        question_rows,
        write_squad,
        "json",
        f"{FILES} --max_seq_length 8 --doc_stride 2",
    ),
    Script(
        "run_summarization",
        save_bart,
        summary_rows,
        write_csv,
        "csv",
        f"{FILES} --predict_with_generate --max_source_length 16 --max_target_length 4",
    ),
    Script("run_clm", save_llama, text_rows, write_csv, "csv", f"{FILES} --block_size 8"),
    Script("run_mlm", save_bert(BertForMaskedLM), text_rows, write_csv, "csv", f"{FILES} --line_by_line"),
    Script("sft", save_llama, source_rows, write_json_lines, "jsonl", f"{TRL} {LORA}"),
    Script("dpo", save_llama, preference_rows, write_json_lines, "jsonl", f"{TRL} {LORA}", NUMBERED),
    Script("training_stsbenchmark", save_bert(BertModel), scored_rows, write_csv, "csv", "model", NUMBERED, 4),
]
