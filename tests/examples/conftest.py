"""Fixtures with the inputs of the example notebooks on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from causal import bytes_tokenizer, llama
from datasets import Dataset
from recipe_data_fixtures import reviews_dir
from recipe_model_fixtures import model_dir
from transformers import AutoTokenizer, BertConfig, BertModel


__all__ = ["model_dir", "reviews_dir"]


def save_encoder(model_dir: Path, folder: Path, **config: int) -> Path:
    """Save an encoder with the tokenizer of `model_dir` and weights that are the same in every run."""
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        BertModel(BertConfig.from_pretrained(model_dir, initializer_range=0.2, **config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_encoder_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with three layers."""
    return save_encoder(model_dir, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def large_encoder_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with four layers and a larger hidden size."""
    return save_encoder(model_dir, tmp_path_factory.mktemp("large"), num_hidden_layers=4, hidden_size=24)


@pytest.fixture(scope="session")
def chat_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model with two layers, and a byte-level tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = bytes_tokenizer(["What is the sum?", "It is 3."], vocab_size=300)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    llama(len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def questions_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with answers of four categories, 12 per category."""
    rows = [
        {"instruction": f"What is the sum of {number} and {kind}?", "response": "It is 3.", "category": f"kind {kind}"}
        for number in range(12)
        for kind in range(4)
    ]
    folder = tmp_path_factory.mktemp("questions")
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    return folder
