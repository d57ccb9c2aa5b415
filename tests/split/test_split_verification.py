"""The first split of a model compares the parts with the whole model."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decoders import VOCABULARY, batch, decoder, from_config
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from hf_federated import SplitModel
from hf_federated._compat import CACHE_NAME
from hf_federated.split import LAYOUTS, verification


LLAMA = LAYOUTS["llama"]


@pytest.fixture(autouse=True)
def nothing_is_verified(monkeypatch):
    monkeypatch.setattr(verification, "verified", set())


class ScaledStatesModel(LlamaModel):
    """Scales the hidden states before the first block. The config decides in which calls."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        past = kwargs.get(CACHE_NAME)
        calls = {
            "without padding": True,
            "with left padding": kwargs.get("attention_mask") is not None,
            "with a cache": past is not None and past.get_seq_length() > 0,
        }
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if calls[self.config.scales]:
            inputs_embeds = inputs_embeds * self.config.factor
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class ScaledStates(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model = ScaledStatesModel(config)
        self.post_init()


def scaled_states(scales: str, factor: float = 1.5) -> ScaledStates:
    config = decoder("llama").config
    config.scales, config.factor = scales, factor
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ScaledStates(config).eval()


@pytest.mark.parametrize("check", ["without padding", "with left padding", "with a cache"])
def test_layout_that_misses_a_scale_is_refused_with_the_check_and_the_difference(check):
    full_model = scaled_states(check)
    message = f"parts of ScaledStates do not compute what the whole model computes: {check}, the logits differ by "
    with pytest.raises(ValueError, match=message + r"\d\.\de-0[1-3], but rounding explains at most \d\.\de-0[5-6]"):
        SplitModel.from_model(full_model, layout=LLAMA)
    # The cure that the error names.
    split = SplitModel.from_model(full_model, layout=replace(LLAMA, head_settings={"factor": 1.0}))
    ids = batch(None)["input_ids"]
    assert torch.equal(split(ids).logits, full_model(ids, use_cache=False).logits)


class TokensOnly(LlamaForCausalLM):
    """Does not run without token ids."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        if input_ids is None:
            raise KeyError("input_ids")
        return super().forward(input_ids, **kwargs)


def test_model_class_that_does_not_run_as_a_part_is_refused():
    full_model = TokensOnly(decoder("llama").config)
    with pytest.raises(
        ValueError, match="its parts do not .KeyError: 'input_ids'.*docs/how-to/write-a-split-layout.md"
    ):
        SplitModel.from_model(full_model)
    assert not verification.verified


def test_family_with_the_layout_of_llama_is_refused():
    with pytest.raises(ValueError, match="The parts of GraniteForCausalLM"):
        SplitModel.from_model(decoder("granite"), layout=LLAMA)


def test_model_that_was_changed_after_its_creation_is_refused():
    full_model = decoder("llama")
    full_model.model.layers[2].self_attn.scaling *= 4
    with pytest.raises(ValueError, match="Or the model was changed after its creation"):
        SplitModel.from_model(full_model)


def test_checkpoint_is_compared_with_a_whole_model_of_the_same_weights(tmp_path):
    decoder("granite").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="The parts of GraniteForCausalLM"):
        SplitModel.from_model(str(tmp_path), layout=LLAMA)
    SplitModel.from_model(str(tmp_path))
    assert len(verification.verified) == 1


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "opt-projected", "gemma3"])
def test_checkpoint_of_a_supported_family_passes_the_check(name, tmp_path):
    decoder(name).save_pretrained(tmp_path)
    SplitModel.from_model(str(tmp_path))
    assert len(verification.verified) == 1


def count_calls(model: nn.Module) -> list[int]:
    calls = [0]
    forward = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return forward(*args, **kwargs)

    model.forward = counting
    return calls


def test_check_runs_once_for_a_class_config_layout_and_cut():
    calls = []
    for name, cut, layout in (
        ("llama", (1, 1), None),
        ("llama", (1, 1), None),
        ("llama", (1, 2), None),
        ("llama-tied", (1, 1), None),
        ("llama", (1, 1), replace(LLAMA, max_positions="n_positions")),
        ("llama", (1, 1), LLAMA),
    ):
        full_model = decoder(name)
        counted = count_calls(full_model)
        SplitModel.from_model(full_model, *cut, layout=layout)
        calls.append(counted[0] > 0)
    assert calls == [True, False, True, True, True, False]


def trained(is_verified: bool) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Split a model and train it for three steps with dropout, which draws random numbers."""
    if not is_verified:
        verification.verified.clear()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    config.attention_dropout = 0.5
    full_model = from_config(config).train()
    full_model.model.layers[1].eval()  # a frozen block, for example
    modes = {name: module.training for name, module in full_model.named_modules()}
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    split = SplitModel.from_model(full_model)
    assert {name: module.training for name, module in full_model.named_modules()} == modes
    assert split.training and all(module.training for module in split.modules())
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    optimizer = torch.optim.AdamW(split.parameters(), lr=0.1)
    for _ in range(3):
        split(**batch("right")).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert split.boundary.step == 0
    return full_model.state_dict(), states


def test_check_changes_neither_modes_nor_random_numbers_nor_trained_weights():
    weights, states = trained(is_verified=False)
    assert len(verification.verified) == 1
    expected_weights, expected_states = trained(is_verified=True)
    assert states == expected_states
    assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


def test_check_leaves_no_gradients_and_sends_no_messages():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    server = split.boundary.link.server
    assert verification.verified
    assert all(parameter.grad is None for parameter in full_model.parameters())
    assert not server.caches and not server.graphs and split.boundary.micro_step == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_rounding_of_the_dtype_is_accepted_and_a_larger_difference_is_refused(dtype):
    # `.to` rounds the rotary frequencies of the whole model.
    SplitModel.from_model(decoder("llama").to(dtype))
    assert len(verification.verified) == 1
    with pytest.raises(ValueError, match="the logits differ by"):
        SplitModel.from_model(scaled_states("with a cache", 3.0).to(dtype), layout=LLAMA)


@pytest.mark.parametrize("adapter", ["lora", "prefix"])
def test_peft_model_is_compared_with_its_adapter(adapter):
    if adapter == "lora":
        config: Any = LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.5, init_lora_weights=False)
    else:
        config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    full_model = get_peft_model(decoder("llama"), config).train()
    split = SplitModel.from_model(full_model)
    assert len(verification.verified) == 1
    assert (split.client_head.prefix is not None) == (adapter == "prefix")
    assert split.training and full_model.training


def test_model_on_the_meta_device_is_split_without_a_check():
    with torch.device("meta"):
        full_model = LlamaForCausalLM(decoder("llama").config)
    split = SplitModel.from_model(full_model, layout=LLAMA)
    assert not verification.verified and split.client_head.model.device.type == "meta"


def test_small_sliding_windows_are_exceeded_by_the_batch():
    """A model type with a window in other blocks than the parts must not pass."""
    full_model = decoder("gemma3")
    split = SplitModel.from_model(full_model)
    ids, _ = verification.check_batch(split.client_head)
    assert ids.shape[1] > full_model.config.sliding_window
    verification.verified.clear()
    split.server_body.model.config.layer_types.reverse()
    parts = {part.role: part for part in split.parts}
    with pytest.raises(ValueError, match="The parts of Gemma3ForCausalLM"):
        verification.verify_parts(parts, full_model.config, full_model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_rotary_frequencies_of_the_whole_model_are_no_difference(dtype, monkeypatch):
    """`.to(dtype)` rounds them, and a random adapter magnifies the rounding. The whole model does not change."""
    monkeypatch.setattr(verification, "TOLERANCES", {dtype: 0})
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(decoder("llama").to(dtype), lora)
    rotary = model.base_model.model.model.rotary_emb
    rounded = rotary.inv_freq
    assert rounded.dtype == dtype
    SplitModel.from_model(model)
    assert rotary.inv_freq is rounded


def test_rotary_frequencies_of_another_model_are_a_difference(monkeypatch):
    monkeypatch.setattr(verification, "TOLERANCES", {torch.bfloat16: 0})
    model = decoder("llama").to(torch.bfloat16)
    model.model.rotary_emb.inv_freq *= 3
    with pytest.raises(ValueError, match="do not compute what the whole model computes"):
        SplitModel.from_model(model)


@pytest.mark.parametrize("replacement", [None, torch.ones(2)])
def test_model_without_an_unused_buffer_is_verified(replacement):
    model = decoder("llama").to(torch.bfloat16)
    del model.model.rotary_emb.original_inv_freq
    if replacement is not None:
        model.model.rotary_emb.original_inv_freq = replacement
    SplitModel.from_model(model)
