"""Fixtures with the inputs of the example notebooks on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from causal import bytes_tokenizer, llama
from datasets import Dataset
from recipe_data_fixtures import reviews_dir
from recipe_model_fixtures import model_dir


__all__ = ["model_dir", "reviews_dir"]


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
