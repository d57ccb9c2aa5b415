"""A small distillation of tagging models with clients whose models and tokenizers differ."""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset
from distillation_setup import Recorder
from tiny import arguments
from tokenizers import Tokenizer
from tokenizers.models import WordLevel, WordPiece
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DistilBertConfig,
    DistilBertForTokenClassification,
    PreTrainedTokenizerFast,
)

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer
from hf_federated.tasks import SequenceTagging


WORDS = ["ab", "abba", "cab", "b", "acc", "bcca", "c"]
TAGS = ["O", "B-X", "I-X"]
LETTERS = "abc"


def word_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word."""
    model = Tokenizer(WordLevel({w: i for i, w in enumerate(["<pad>", "<unk>", *WORDS])}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", **settings)


def letter_tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per letter."""
    pieces = ["<pad>", "<unk>", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    model = Tokenizer(WordPiece({w: i for i, w in enumerate(pieces)}, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", unk_token="<unk>", **settings)


def sentences(num_rows: int, seed: int) -> Dataset:
    """Examples of one to five words. The first letter of a word determines its tag."""
    draw = random.Random(seed)
    rows = [draw.choices(WORDS, k=draw.randint(1, 5)) for _ in range(num_rows)]
    return Dataset.from_dict(
        {"tokens": rows, "ner_tags": [[LETTERS.index(word[0]) for word in words] for words in rows]}
    )


LABELS = {"id2label": dict(enumerate(TAGS)), "label2id": {tag: i for i, tag in enumerate(TAGS)}}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(seed: int = 0, **config: Any) -> BertForTokenClassification:
    values = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    values |= {"intermediate_size": 16, "max_position_embeddings": 32, **LABELS, **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForTokenClassification(BertConfig(**values))


def distilbert(seed: int = 1, **config: Any) -> DistilBertForTokenClassification:
    values = {"vocab_size": 16, "dim": 8, "hidden_dim": 16, "n_layers": 2, "n_heads": 2}
    values |= {"max_position_embeddings": 32, **LABELS, **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return DistilBertForTokenClassification(DistilBertConfig(**values))


PUBLIC = sentences(7, seed=5).remove_columns("ner_tags")
SIZES = {"a": 6, "b": 9}


def tagging_trainer(
    output_dir: Any,
    method: str,
    kwargs: dict[str, Any] | None = None,
    *,
    different_models: bool = True,
    record: Recorder | None = None,
    args: dict[str, Any] | None = None,
    federation: dict[str, Any] | None = None,
    **trainer_kwargs: Any,
) -> FederatedTrainer:
    """
    Build a trainer for tagging, without training it.

    The server has a BERT and the word tokenizer. With `different_models`, client `a` has another BERT, and client `b`
    has a DistilBERT and the letter tokenizer. `trainer_kwargs` override the defaults here.
    """
    defaults: dict[str, Any] = {
        "model": bert(),
        "processing_class": word_tokenizer(),
        "task": SequenceTagging(TAGS),
        "train_dataset": {client_id: sentences(size, ord(client_id)) for client_id, size in SIZES.items()},
        "public_dataset": PUBLIC,
        "server_dataset": sentences(5, seed=6),
        "eval_dataset": None,
    }
    if different_models and method not in ("feddf", "feded"):
        defaults["clients"] = {
            "a": ClientSpec(model=bert(seed=3, num_hidden_layers=2)),
            "b": ClientSpec(model=distilbert(), processing_class=letter_tokenizer()),
        }
    trainer = FederatedTrainer(
        args=arguments(output_dir, **(args or {})),
        federation=FederatedConfig(
            distillation=method, distillation_kwargs=kwargs, **{"num_rounds": 1, **(federation or {})}
        ),
        callbacks=[] if record is None else [record],
        **{**defaults, **trainer_kwargs},
    )
    if record is not None:
        record.trainer = trainer
    return trainer
