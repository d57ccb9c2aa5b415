"""Payloads of tiny models, computed in float64 or by a federation."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, LlamaConfig
from transformers import GPT2ForSequenceClassification as GPT2
from transformers import LlamaForCausalLM as Llama

from hf_federated.audits import Payload


VOCABULARY = 40
END = 2
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model(name: str = "bert", hidden_size: int = 48, seed: int = 0, **config: Any) -> Any:
    """Create an untrained model with three blocks in float64, without dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if name == "gpt2":
            sizes = {"n_embd": hidden_size, "n_layer": 3, "n_head": 2, "n_inner": 32, "n_positions": 16}
            rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
            built: Any = GPT2(GPT2Config(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **rates, **config))
        else:
            sizes = {"hidden_size": hidden_size, "intermediate_size": 32, "num_hidden_layers": 3}
            sizes |= {"num_attention_heads": 2, "max_position_embeddings": 16, "vocab_size": VOCABULARY}
            if name == "llama":
                built = Llama(LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=0, **config))
            else:
                built = BertForSequenceClassification(BertConfig(**sizes, **_NO_DROPOUT, **config))
    return built.double().eval()


def batch(sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad sequences on the right with token 0."""
    length = max(map(len, sequences))
    ids = torch.stack([pad(torch.tensor(sequence), (0, length - len(sequence))) for sequence in sequences])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def sgd_payload(victim: Any, sequences: list[list[int]], learning_rate: float = 0.1) -> Payload:
    """Return the payload of one SGD step on one batch, computed with autograd."""
    inputs = batch(sequences)
    if type(victim).__name__.endswith("CausalLM"):
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    else:
        labels = torch.arange(len(sequences)) % 2
    names, parameters = zip(
        *((name, value) for name, value in victim.named_parameters() if value.requires_grad), strict=True
    )
    gradients = torch.autograd.grad(victim(**inputs, labels=labels).loss, parameters, allow_unused=True)
    before = {name: value.detach().clone() for name, value in zip(names, parameters, strict=True)}
    after = {
        name: before[name] - (0 if gradient is None else learning_rate * gradient)
        for name, gradient in zip(names, gradients, strict=True)
    }
    return Payload(before, after, sequences)
