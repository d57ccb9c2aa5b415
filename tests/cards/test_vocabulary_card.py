"""The card states whether a client's update names the tokens of its examples."""

from __future__ import annotations

import pytest
import torch
from federations import build_federation
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_federated.adapters import Exchange
from hf_federated.cards import RunRecord, render
from hf_federated.cards.run_record import _vocabulary


def card(folder, **kwargs):
    return render(RunRecord.from_trainer(build_federation(folder, **kwargs)))


def test_card_of_full_fine_tuning_states_the_vocabulary_and_the_remedy(tmp_path):
    text = card(tmp_path)
    assert "| the exact set of tokens in its examples, read from the changed rows of the word embeddings |" in text
    assert 'Frozen embeddings (`freeze="embeddings"`) and adapters (LoRA) send no change' in text


@pytest.mark.parametrize("kind", ["frozen", "all", "lora", "predictions"])
def test_card_without_word_embeddings_in_the_updates_does_not_mention_them(tmp_path, kind):
    kwargs = {"federation": {"freeze": "embeddings"}}
    if kind == "all":  # the frozen embeddings are sent and do not change
        kwargs = {"federation": {"freeze": "embeddings", "exchange": "all"}}
    elif kind == "lora":
        config = LoraConfig(r=2, task_type="SEQ_CLS", target_modules=["query"])
        kwargs = {"trainer": {"model": get_peft_model(tiny_model(), config)}}
    elif kind == "predictions":
        kwargs = {"federation": {"aggregation": "local_only"}}
    assert "word embeddings" not in card(tmp_path, **kwargs)


def test_tied_embeddings_reveal_most_of_the_tokens():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for is_tied in (True, False):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=16, tie_word_embeddings=is_tied, **sizes))
        (disclosure,) = _vocabulary(model, Exchange(model))
        assert disclosure.value.startswith("most of the tokens" if is_tied else "the exact set of tokens")
    assert _vocabulary(torch.nn.Linear(2, 2), Exchange(torch.nn.Linear(2, 2))) == ()
