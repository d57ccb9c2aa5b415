"""Parties save their parts, which can be merged to a standard model or adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from causal import pieces_tokenizer
from decoders import FAMILIES, MORE_DECODERS, NUM_BLOCKS, batch, decoder, slow
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_federated import SplitModel
from hf_federated.cli.main import main
from hf_federated.split import add_adapter, load_saved_parts, merge_parts, save_parts


LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)


def create_modified(name: str, peft_config: object = None, cut: tuple[int, int] = (1, 2)) -> SplitModel:
    """Create a split model with other trainable parameters than `decoder(name)`."""
    split = SplitModel.from_model(decoder(name), *cut).eval()
    if peft_config is not None:
        add_adapter(split.parts, split.config, peft_config)
    with torch.no_grad():
        for parameter in split.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    return split


def save(split: SplitModel, folder: Path, peft_config: object = None) -> tuple[Path, Path]:
    """Save the parts of the client and of the server."""
    save_parts([split.client_head, split.client_tail], split.config, folder / "client", peft_config)
    save_parts([split.server_body], split.config, folder / "server", peft_config)
    return folder / "client", folder / "server"


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "gpt2", "opt-projected", "glm", *slow(MORE_DECODERS + FAMILIES)]
)
def test_merged_parts_are_a_standard_model_with_the_same_logits(name, tmp_path):
    split = create_modified(name)
    merge_parts(save(split, tmp_path), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ids = batch(None)["input_ids"]
    # The position of the weights in memory decides the kernel of the experts, which rounds differently.
    tolerance = 1e-6 if "moe" in name or name in FAMILIES else 0
    assert (merged(ids).logits - split(ids).logits).abs().max() <= tolerance
    assert not torch.equal(merged(ids).logits, decoder(name)(ids).logits)


def test_merged_parts_of_mixtral_have_a_matrix_for_each_expert(tmp_path):
    """Checkpoints of Mixtral have these matrices. The model class has one parameter for all experts."""
    merge_parts(save(create_modified("mixtral"), tmp_path), tmp_path / "merged")
    decoder("mixtral").save_pretrained(tmp_path / "full")
    merged, full = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "full"))
    assert merged.keys() == full.keys()


@pytest.mark.parametrize("peft_config", [LORA, PREFIX], ids=["lora", "prefix"])
def test_merged_adapters_are_one_peft_adapter_and_base_weights_are_not_saved(peft_config, tmp_path):
    split = create_modified("llama", peft_config)
    folders = save(split, tmp_path, peft_config)
    for folder in folders:
        assert not (folder / "model.safetensors").exists()
    merge_parts(folders, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(decoder("llama"), tmp_path / "adapter").eval()
    ids = batch(None)["input_ids"]
    assert torch.equal(loaded(ids).logits, split(ids).logits)


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["all", "lora"])
def test_merging_copies_the_clients_tokenizer_and_generation_config(peft_config, tmp_path):
    split = create_modified("llama", peft_config)
    split.generation_config.max_new_tokens = 7
    tokenizer = pieces_tokenizer(["some text", "more of it"])
    tokenizer.chat_template = {"default": "{{ messages }}", "tool": "{{ tools }}"}
    client, server = tmp_path / "client", tmp_path / "server"
    parts = [split.client_head, split.client_tail]
    save_parts(parts, split.config, client, peft_config, split.generation_config, tokenizer)
    save_parts([split.server_body], split.config, server, peft_config)
    merge_parts([server, client], tmp_path / "merged")
    actual = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert actual("some more text").input_ids == tokenizer("some more text").input_ids
    assert actual.chat_template == tokenizer.chat_template
    if peft_config is None:
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").generation_config.max_new_tokens == 7
    else:
        assert not (tmp_path / "merged" / "generation_config.json").exists()


@pytest.mark.parametrize("name", ["none.json", "../secret.json", "/etc/hostname"])
def test_tokenizer_file_outside_of_the_folder_raises_error(name, tmp_path):
    folders = save(create_modified("llama"), tmp_path)
    (tmp_path / "secret.json").write_text("{}")
    path = folders[0] / "split_parts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer": [name]}))
    with pytest.raises(ValueError, match=f"has no tokenizer file {name}"):
        merge_parts(folders, tmp_path / "out")


def test_party_saves_only_its_blocks_with_their_index_in_the_full_model(tmp_path):
    client, server = save(create_modified("llama-tied"), tmp_path)
    numbers = []
    for folder in (client, server):
        names = load_file(folder / "model.safetensors")
        numbers.append({int(name.split(".")[2]) for name in names if ".layers." in name})
    assert numbers == [{0, 3, 4}, {1, 2}]
    assert "lm_head.weight" not in load_file(client / "model.safetensors")
    assert not any("embed" in name for name in load_file(server / "model.safetensors"))


@pytest.mark.parametrize("peft_config", [None, LORA, PREFIX], ids=["all", "lora", "prefix"])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_saved_parts_can_be_loaded(name, peft_config, tmp_path):
    split = create_modified(name, peft_config)
    client, server = save(split, tmp_path, peft_config)
    restored = SplitModel.from_model(decoder(name), 1, 2).eval()
    if peft_config is not None:
        add_adapter(restored.parts, restored.config, peft_config)
    ids = batch(None)["input_ids"]
    assert not torch.equal(restored(ids).logits, split(ids).logits)
    load_saved_parts([restored.client_head, restored.client_tail], client)
    load_saved_parts([restored.server_body], server)
    assert torch.equal(restored(ids).logits, split(ids).logits)


def test_save_pretrained_writes_a_standard_model_or_adapter(tmp_path):
    ids = batch(None)["input_ids"]
    split = create_modified("llama-tied")
    split.save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(merged(ids).logits, split(ids).logits)
    split = SplitModel.from_model(decoder("llama")).eval()
    split.add_adapter(LORA)
    split.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(decoder("llama"), tmp_path / "adapter").eval()
    assert torch.equal(loaded(ids).logits, split(ids).logits)
    with pytest.raises(ValueError, match="this model already has an adapter"):
        split.add_adapter(LORA)
    split.server_body = None
    with pytest.raises(ValueError, match="blocks are not in this process"):
        split.save_pretrained(tmp_path / "half")


@pytest.mark.parametrize("peft_config", [LORA, PREFIX], ids=["lora", "prefix"])
def test_splitting_a_peft_model_copies_its_adapter(peft_config):
    full_model = get_peft_model(decoder("llama-tied"), peft_config).eval()
    split = SplitModel.from_model(full_model, 2, 1)
    ids = batch(None)["input_ids"]
    assert torch.equal(split(ids).logits, full_model(ids).logits)
    assert not torch.equal(split(ids).logits, decoder("llama-tied")(ids).logits)
    assert not split.training
    trained = [name for name, parameter in split.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name or "prefix" in name for name in trained)


def test_merging_parts_of_different_models_or_cuts_raises_error(tmp_path):
    client, server = save(create_modified("llama"), tmp_path / "one")
    other_cut, _ = save(create_modified("llama", cut=(2, 1)), tmp_path / "two")
    other_model, _ = save(create_modified("qwen2"), tmp_path / "three")
    adapter, _ = save(create_modified("llama", LORA), tmp_path / "four", LORA)
    out = tmp_path / "out"
    for folders, message in (
        ([client], "one each of head, body, tail"),
        ([client, client], "one each of head, body, tail"),
        ([client, server, server], "one each of head, body, tail"),
        ([server, other_cut], "has cut=.*, but"),
        ([server, other_model], "config.json files differ"),
        ([server, adapter], "has adapter=True, but"),
        ([server, tmp_path], "does not contain saved parts of a split model"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_parts(folders, out)
    (client / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no file model.safetensors, so the saved parts are incomplete"):
        merge_parts([client, server], out)
    split = create_modified("llama", cut=(2, 1))
    with pytest.raises(ValueError, match="but the model expects the parts"):
        load_saved_parts([split.server_body], server)


def edit_weights(folder: Path, name: str, change) -> None:
    """Change the saved weights in a folder."""
    state = load_file(folder / name)
    change(state)
    save_file(state, folder / name, metadata={"format": "pt"})


@pytest.mark.parametrize("peft_config", [None, LORA, PREFIX], ids=["all", "lora", "prefix"])
def test_merging_incomplete_parts_raises_error_and_writes_nothing(peft_config, tmp_path):
    client, server = save(create_modified("llama-tied", peft_config), tmp_path, peft_config)
    name = "model.safetensors" if peft_config is None else "adapter_model.safetensors"
    merge_parts([client, server], tmp_path / "merged")
    before = (server / name).read_bytes()

    for change in (
        lambda state: state.pop(next(iter(state))),
        lambda state: state.update({next(iter(state)): torch.zeros(3)}),
        lambda state: state.update(another=torch.zeros(3)),
    ):
        edit_weights(server, name, change)
        with pytest.raises(ValueError, match="server do not match its split_parts.json"):
            merge_parts([client, server], tmp_path / "out")
        (server / name).write_bytes(before)
    (server / name).write_bytes(before[:100])
    with pytest.raises(ValueError, match="is damaged, or is not a safetensors file"):
        merge_parts([client, server], tmp_path / "out")
    (server / name).write_bytes(before)
    for folder in (client, server):
        content = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ValueError, match="Choose another directory"):
            merge_parts([client, server], f"{folder}/../{folder.name}")
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == content
    assert not (tmp_path / "out").exists()


def test_merging_parts_of_different_steps_raises_error(tmp_path):
    split = create_modified("llama")
    folders = [tmp_path / "client", tmp_path / "server"]
    for step, merges in ((3, True), (4, False)):
        save_parts([split.client_head, split.client_tail], split.config, folders[0], run={"digest": "a", "step": 3})
        save_parts([split.server_body], split.config, folders[1], run={"digest": "a", "step": step})
        if merges:
            merge_parts(folders, tmp_path / "merged")
            continue
        with pytest.raises(ValueError, match="parts of different runs or steps"):
            merge_parts(folders, tmp_path / "other")


def test_split_merge_command_builds_the_full_model(tmp_path, capsys):
    split = create_modified("llama")
    folders = [str(folder) for folder in save(split, tmp_path)]
    assert main(["split-merge", *folders, "--output-dir", str(tmp_path / "merged")]) == 0
    assert "Saved the model to" in capsys.readouterr().out
    ids = batch(None)["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.num_hidden_layers == NUM_BLOCKS
    assert torch.equal(merged(ids).logits, split(ids).logits)
    assert main(["split-merge", folders[0], "--output-dir", str(tmp_path / "half")]) == 2
    assert "one each of head, body, tail" in capsys.readouterr().err
    description = json.loads((tmp_path / "client" / "split_parts.json").read_text())
    assert description["cut"] == {"num_blocks": NUM_BLOCKS, "head_blocks": 1, "tail_blocks": 2}


def test_merging_parts_with_and_without_a_run_raises_error(tmp_path):
    split = create_modified("llama")
    save_parts([split.client_head, split.client_tail], split.config, tmp_path / "client", run={"digest": "a"})
    save_parts([split.server_body], split.config, tmp_path / "server")
    with pytest.raises(ValueError, match="parts of different runs or steps"):
        merge_parts([tmp_path / "client", tmp_path / "server"], tmp_path / "out")


@pytest.mark.parametrize(
    "changes", [{"lora_alpha": 64}, {"r": 4}, {"use_rslora": True}], ids=["alpha", "rank", "rslora"]
)
def test_merging_parts_of_different_adapters_raises_error(changes, tmp_path):
    given = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    client, _ = save(create_modified("llama", LoraConfig(**given)), tmp_path / "one", LoraConfig(**given))
    other = LoraConfig(**{**given, **changes})
    _, server = save(create_modified("llama", other), tmp_path / "two", other)
    with pytest.raises(ValueError, match="adapter_config.json files differ"):
        merge_parts([client, server], tmp_path / "out")
    path = client / "adapter_config.json"
    # The order of target modules and the path of the base model may differ.
    values = json.loads(path.read_text())
    values["target_modules"].reverse()
    path.write_text(json.dumps({**values, "base_model_name_or_path": "elsewhere"}))
    merge_parts([client, tmp_path / "one" / "server"], tmp_path / "merged")


@pytest.mark.parametrize("peft_config", [None, LORA, PREFIX], ids=["all", "lora", "prefix"])
def test_merging_weights_that_are_not_finite_raises_error(peft_config, tmp_path):
    folders = save(create_modified("llama", peft_config), tmp_path, peft_config)
    name = "model.safetensors" if peft_config is None else "adapter_model.safetensors"
    edit_weights(folders[1], name, lambda state: next(iter(state.values())).view(-1)[:1].fill_(float("nan")))
    with pytest.raises(ValueError, match="server: .* has values that are not finite"):
        merge_parts(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("split_parts.json", '{"adapter": false, "cut": {}}', "split_parts.json is damaged: it has no key 'roles'"),
        ("split_parts.json", "{", "does not contain saved parts of a split model"),
        ("split_parts.json", "[]", "does not contain saved parts of a split model"),
        ("config.json", "{", "config.json is missing or damaged"),
        ("config.json", "[]", "config.json is missing or damaged"),
        ("config.json", None, "config.json is missing or damaged"),
    ],
)
def test_error_names_the_damaged_file(name, text, message, tmp_path):
    folders = save(create_modified("llama"), tmp_path)
    path = folders[1] / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=message):
        merge_parts(folders, tmp_path / "out")


def test_output_directory_that_is_a_file_raises_error(tmp_path):
    folders = save(create_modified("llama"), tmp_path)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out is a file"):
        merge_parts(folders, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
