"""Each party reads only the weights of its parts from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decoders import FAMILIES, MORE_DECODERS, NUM_BLOCKS, batch, decoder, slow
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from hf_federated import SplitConfig, SplitModel
from hf_federated.split import Cut, load_parts
from hf_federated.split_training.loading import load_client_model, load_server_body


NAMES = ["llama", "llama-tied", "gpt2", "opt-projected", "qwen2-windows"]
# Checkpoints of these families contain other weights than the model class, such as a matrix for each expert, or one
# matrix for queries, keys and values. Older versions of transformers lack Sarvam.
CONVERTED = ["gpt_neox", "mixtral", "qwen2_moe", *(name for name in FAMILIES if name == "sarvam_moe")]


def saved(name: str, folder: Path, shards: bool) -> Path:
    """Save a checkpoint in one file, or with each weight in a separate file."""
    decoder(name).save_pretrained(folder, max_shard_size=1 if shards else "1GB")
    return folder


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", [*NAMES, *CONVERTED, *slow(sorted({*MORE_DECODERS, *FAMILIES} - set(CONVERTED)))])
def test_split_checkpoint_matches_the_full_model(name, shards, tmp_path):
    split = SplitModel.from_model(str(saved(name, tmp_path, shards)), 1, 2)
    assert split.dtype == torch.float32 and not split.training
    ids = batch(None)["input_ids"]
    # The position of the weights in memory decides the kernel of the experts, which rounds differently.
    tolerance = 1e-6 if "moe" in name or name in FAMILIES else 0
    assert (split(ids).logits - decoder(name)(ids).logits).abs().max() <= tolerance


@pytest.mark.parametrize("name", CONVERTED)
def test_saved_split_model_has_the_weights_of_a_checkpoint_and_can_be_loaded(name, tmp_path):
    split = SplitModel.from_model(decoder(name))
    with torch.no_grad():
        for parameter in split.parameters():
            parameter.add_(0.01)
    split.save_pretrained(tmp_path / "split")
    saved(name, tmp_path / "full", False)
    state, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("split", "full"))
    assert state.keys() == expected.keys()
    loaded = SplitModel.from_model(decoder(name), 2, 1)
    loaded.load_state_dict(state)
    ids = batch(None)["input_ids"]
    assert (loaded(ids).logits - split(ids).logits).abs().max() <= 1e-6


def test_generation_config_is_loaded_from_a_checkpoint(tmp_path):
    full_model = decoder("llama")
    full_model.generation_config.max_new_tokens = 7
    full_model.save_pretrained(tmp_path)
    assert SplitModel.from_model(str(tmp_path)).generation_config.max_new_tokens == 7


def body_files(folder: Path, cut: Cut) -> set[str]:
    """Return the files that contain only weights of the server's blocks."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    body = {name for name in index if any(f".layers.{number}." in name for number in cut.blocks("body"))}
    return {index[name] for name in body} - {index[name] for name in index.keys() - body}


def test_attention_of_a_checkpoint_is_the_attention_of_the_full_model(tmp_path):
    """Gemma 2 does not use SDPA by default, because SDPA has no soft cap of the attention scores."""
    full_model = decoder("gemma2")
    full_model.save_pretrained(tmp_path)
    split = SplitModel.from_model(str(tmp_path))
    for part in split.parts:
        assert part.model.config._attn_implementation == full_model.config._attn_implementation
    split.add_adapter(LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    ids = batch(None)["input_ids"]
    assert torch.equal(split(ids).logits, full_model(ids).logits)


def test_party_reads_only_the_experts_of_its_blocks(tmp_path):
    folder = saved("mixtral", tmp_path, shards=True)
    cut = Cut(NUM_BLOCKS, 1, 2)
    for file in body_files(folder, cut):
        (folder / file).unlink()
    config = decoder("mixtral").config
    client = load_parts(str(folder), config, cut, ("head", "tail"))
    experts = decoder("mixtral").model.layers[4].mlp.experts.gate_up_proj
    assert torch.equal(client["tail"].model.model.layers[1].mlp.experts.gate_up_proj, experts)
    with pytest.raises(FileNotFoundError):
        load_parts(str(folder), config, cut, ("body",))


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_party_opens_no_files_of_other_parts(name, tmp_path):
    folder = saved(name, tmp_path, shards=True)
    full_model = decoder(name)
    cut = Cut(NUM_BLOCKS, 1, 2)
    server_files = body_files(folder, cut)
    assert len(server_files) == 2 * 9
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for file in server_files:
        (folder / file).rename(hidden / file)
    client = load_parts(str(folder), full_model.config, cut, ("head", "tail"))
    tied = client["tail"].model.lm_head.weight is client["head"].model.model.embed_tokens.weight
    assert tied == full_model.config.tie_word_embeddings
    with pytest.raises(FileNotFoundError):
        load_parts(str(folder), full_model.config, cut, ("body",))
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    for file in server_files:
        (hidden / file).rename(folder / file)
    body = load_parts(str(folder), full_model.config, cut, ("body",))["body"]
    expected = {
        name: value for name, value in full_model.named_parameters() if ".layers.1." in name or ".layers.2." in name
    }
    actual = dict(body.named_original_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


def test_client_and_server_commands_open_no_files_of_other_parts(tmp_path):
    folder = saved("llama", tmp_path, shards=True)
    split = SplitConfig(head_blocks=1, tail_blocks=2)
    server_files = body_files(folder, Cut(NUM_BLOCKS, 1, 2))
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for file in server_files:
        (folder / file).rename(hidden / file)
    assert load_client_model(str(folder), split, "north").server_body is None
    with pytest.raises(FileNotFoundError):
        load_server_body(str(folder), split)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    for file in server_files:
        (hidden / file).rename(folder / file)
    assert len(load_server_body(str(folder), split)[1].blocks) == NUM_BLOCKS - 3
    with pytest.raises(FileNotFoundError):
        load_client_model(str(folder), split, "north")


def test_weights_are_loaded_in_the_requested_dtype(tmp_path):
    split = SplitModel.from_model(str(saved("llama", tmp_path, False)), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in split.parameters()} == {torch.bfloat16}
    assert split.boundary.wire.dtype == "bfloat16"
    # The rotary frequencies are not weights and stay in float32.
    exact = decoder("llama").model.rotary_emb.inv_freq
    assert all(torch.equal(part.model.model.rotary_emb.inv_freq, exact) for part in split.parts)


def test_checkpoint_of_the_base_model_without_head_can_be_split(tmp_path):
    full_model = decoder("gpt2")
    full_model.transformer.save_pretrained(tmp_path)
    assert "h.0.ln_1.weight" in load_file(tmp_path / "model.safetensors")
    ids = batch(None)["input_ids"]
    assert torch.equal(SplitModel.from_model(str(tmp_path)).eval()(ids).logits, full_model(ids).logits)


def test_checkpoint_with_wrong_or_missing_weights_raises_error(tmp_path):
    folder = saved("llama", tmp_path, False)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    save_file({**weights, name: weights[name][1:].clone()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="layers.3.mlp.up_proj.weight has shape \\(47, 32\\)"):
        SplitModel.from_model(str(folder))
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="no weights named \\['model.layers.3.mlp.up_proj.weight'\\]"):
        SplitModel.from_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="read from safetensors"):
        SplitModel.from_model(str(folder))


def test_checkpoint_arguments_with_a_model_raise_error():
    with pytest.raises(TypeError, match="are only for a checkpoint"):
        SplitModel.from_model(decoder("llama"), revision="main")
