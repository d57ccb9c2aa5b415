"""A party reads its own weights of a checkpoint and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from decoders import NUM_BLOCKS, batch, decoder
from safetensors.torch import load_file, save_file

from hf_federated import SplitConfig, SplitModel
from hf_federated.split import Cut, load_parts
from hf_federated.split_training.loading import load_client_model, load_server_body


NAMES = ["llama", "llama-tied", "gpt2", "opt-projected", "qwen2-windows"]


def saved(name: str, folder: Path, shards: bool) -> Path:
    """A checkpoint, in one file or with every weight in one of its own."""
    decoder(name).save_pretrained(folder, max_shard_size=1 if shards else "1GB")
    return folder


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_makes_the_model_that_it_holds(name, shards, tmp_path):
    split = SplitModel.from_model(str(saved(name, tmp_path, shards)), 1, 2)
    assert split.dtype == torch.float32 and not split.training
    ids = batch(None)["input_ids"]
    assert torch.equal(split(ids).logits, decoder(name)(ids).logits)


def test_settings_of_generation_come_with_a_checkpoint(tmp_path):
    whole = decoder("llama")
    whole.generation_config.max_new_tokens = 7
    whole.save_pretrained(tmp_path)
    assert SplitModel.from_model(str(tmp_path)).generation_config.max_new_tokens == 7


def of_body(folder: Path, cut: Cut) -> set[str]:
    """The files that hold nothing but the server's blocks."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    body = {name for name in index if any(f".layers.{number}." in name for number in cut.blocks("body"))}
    return {index[name] for name in body} - {index[name] for name in index.keys() - body}


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_no_party_opens_the_others_files(name, tmp_path):
    folder = saved(name, tmp_path, shards=True)
    whole = decoder(name)
    cut = Cut(NUM_BLOCKS, 1, 2)
    servers = of_body(folder, cut)
    assert len(servers) == 2 * 9
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for file in servers:
        (folder / file).rename(hidden / file)
    client = load_parts(str(folder), whole.config, cut, ("head", "tail"))
    tied = client["tail"].model.lm_head.weight is client["head"].model.model.embed_tokens.weight
    assert tied == whole.config.tie_word_embeddings
    with pytest.raises(FileNotFoundError):
        load_parts(str(folder), whole.config, cut, ("body",))
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    for file in servers:
        (hidden / file).rename(folder / file)
    body = load_parts(str(folder), whole.config, cut, ("body",))["body"]
    expected = {
        name: value for name, value in whole.named_parameters() if ".layers.1." in name or ".layers.2." in name
    }
    found = dict(body.originals())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_the_commands_parties_open_no_others_files(tmp_path):
    folder = saved("llama", tmp_path, shards=True)
    split = SplitConfig(head_blocks=1, tail_blocks=2)
    servers = of_body(folder, Cut(NUM_BLOCKS, 1, 2))
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for file in servers:
        (folder / file).rename(hidden / file)
    assert load_client_model(str(folder), split, "north").server_body is None
    with pytest.raises(FileNotFoundError):
        load_server_body(str(folder), split)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    for file in servers:
        (hidden / file).rename(folder / file)
    assert len(load_server_body(str(folder), split)[1].blocks) == NUM_BLOCKS - 3
    with pytest.raises(FileNotFoundError):
        load_client_model(str(folder), split, "north")


def test_weights_are_read_in_the_dtype_that_is_asked_for(tmp_path):
    split = SplitModel.from_model(str(saved("llama", tmp_path, False)), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in split.parameters()} == {torch.bfloat16}
    assert split.boundary.wire.dtype == "bfloat16"
    # The frequencies of the rotary embedding are not weights, and stay exact.
    exact = decoder("llama").model.rotary_emb.inv_freq
    assert all(torch.equal(part.model.model.rotary_emb.inv_freq, exact) for part in split.parts)


def test_a_checkpoint_of_the_base_model_is_understood(tmp_path):
    whole = decoder("gpt2")
    whole.transformer.save_pretrained(tmp_path)
    assert "h.0.ln_1.weight" in load_file(tmp_path / "model.safetensors")
    ids = batch(None)["input_ids"]
    assert torch.equal(SplitModel.from_model(str(tmp_path)).eval()(ids).logits, whole(ids).logits)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
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


def test_a_model_takes_no_options_of_a_checkpoint():
    with pytest.raises(TypeError, match="are for a checkpoint"):
        SplitModel.from_model(decoder("llama"), revision="main")
