"""Fixtures for tests that run recipes: tiny models with tokenizers, and SuperGLUE datasets on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from causal import bytes_tokenizer, llama
from datasets import Dataset
from superglue_raw import benchmark, files
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from hf_federated.tasks import superglue_cloze_rows
from hf_federated.tasks.superglue import LABEL_NAMES


WORDS = ["a", "dull", "bright", "film", "plot", "warm", "cold", "and", "##s", "not"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with three layers, and a WordPiece tokenizer with a few words and the label names of SuperGLUE."""
    folder = tmp_path_factory.mktemp("tiny")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, *LABEL_NAMES])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)  # else the weights depend on the tests that ran before
        BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def superglue_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples of the eight SuperGLUE tasks. The splits `train` and `validation` are equal."""
    folder = tmp_path_factory.mktemp("superglue")
    for split in ("train", "validation"):
        benchmark().to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model with three layers and a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = bytes_tokenizer(["a dull film", "a bright plot"], vocab_size=270)
    tokenizer.save_pretrained(folder)
    llama(len(tokenizer), num_layers=3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cloze_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """COPA as cloze questions with owner columns. The splits `train` and `validation` are equal."""
    folder = tmp_path_factory.mktemp("cloze")
    rows = superglue_cloze_rows("copa", files("copa"))
    for column in ("iid_owner", "skewed_owner"):
        rows = rows.add_column(column, ["first" if number % 2 else "second" for number in range(len(rows))])
    for split in ("train", "validation"):
        rows.to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="session")
def phrases_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phrases with a sentiment and owner columns. The splits `train` and `validation` are equal."""
    folder = tmp_path_factory.mktemp("phrases")
    texts = ["a dull film", "a bright plot", "dull", "a bright film"] * 5
    rows = Dataset.from_dict({"sentence": texts, "label": ["negative", "positive"] * 10})
    for column in ("iid_owner", "skewed_owner"):
        rows = rows.add_column(column, ["first", "second"] * 10)
    for split in ("train", "validation"):
        rows.to_parquet(folder / f"{split}.parquet")
    return folder
