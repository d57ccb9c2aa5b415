"""Repositories of small random ChatGLM models on disk, with the code of model and tokenizer, and their vocabulary."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from chatglm_layouts import ChatGlm, ChatGlm2, ChatGlmConfig
from safetensors.torch import save_file


HERE = Path(__file__).parent
CLASSES = {1: ("ChatGlm", "ChatGlmTokenizer"), 2: ("ChatGlm2", "ChatGlm2Tokenizer")}


def sentencepiece_model(texts: Iterable[str], generation: int = 2, vocab_size: int = 340) -> bytes:
    """Train a vocabulary, which contains special tokens only for the first generation. Rare characters are bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=3,
        control_symbols=["[MASK]", "[gMASK]", "<sop>", "<eop>"] if generation == 1 else [],
        user_defined_symbols=["<n>", "<|blank_2|>"] if generation == 1 else [],
        num_threads=1,
        minloglevel=2,
    )
    return written.getvalue()


def write_repository(folder: Path, generation: int, texts: Iterable[str], num_layers: int = 3) -> Path:
    """
    Write weights, config, vocabulary and code of a model as in its repository on the Hub.

    As in ChatGLM-6B's repository, a model of the first generation has no entry for `AutoModelForCausalLM`.
    """
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = sentencepiece_model(texts, generation)
    (folder / "ice_text.model").write_bytes(vocabulary)
    code = (HERE / "chatglm_layouts.py").read_text(encoding="utf-8")
    # The constructor of ChatGLM-6B does not call `post_init`.
    code = code.replace("        self.post_init()\n", "", 1 if generation == 1 else 0)
    (folder / "modeling_chatglm.py").write_text(code, encoding="utf-8")
    shutil.copy(HERE / "chatglm_tokenizer.py", folder / "tokenization_chatglm.py")
    model_name, tokenizer_name = CLASSES[generation]
    pieces = sentencepiece.SentencePieceProcessor(model_proto=vocabulary)
    names = {"bos": "<sop>", "eos": "<eop>", "pad": "<pad>", "mask": "[MASK]", "gmask": "[gMASK]"}
    ids = {f"{name}_token_id": pieces.piece_to_id(token) for name, token in names.items()}
    if generation == 2:
        ids = {"eos_token_id": 2, "pad_token_id": 0}
    config = {
        "model_type": "chatglm",
        "generation": generation,
        "num_layers": num_layers,
        "vocab_size": pieces.vocab_size() + 8,
        ("max_sequence_length" if generation == 1 else "seq_length"): 256,
        "tie_word_embeddings": False,
        **ids,
    }
    auto_classes = ["AutoModel", "AutoModelForSeq2SeqLM", *(["AutoModelForCausalLM"] if generation == 2 else [])]
    auto_map = {name: f"modeling_chatglm.{model_name}" for name in auto_classes}
    auto_map["AutoConfig"] = "modeling_chatglm.ChatGlmConfig"
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}), encoding="utf-8")
    reference = {"AutoTokenizer": [f"tokenization_chatglm.{tokenizer_name}", None]}
    tokenizer_config = {"tokenizer_class": tokenizer_name, "auto_map": reference, "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (ChatGlm if generation == 1 else ChatGlm2)(ChatGlmConfig(**config))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
