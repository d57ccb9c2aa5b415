"""Adapters in the parts are those of PEFT on the whole model, and become one PEFT adapter again."""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import NUM_BLOCKS, batch, decoder
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, get_peft_model

from hf_federated import SplitModel
from hf_federated.split import adapter_state, add_adapter, load_adapter, merge_adapters, save_adapter, take_adapter


FAMILIES = ["llama-tied", "qwen2-windows", "mistral-window", "glm", "gpt2", "opt"]
ADAPTERS = {
    "prefix": lambda name: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "lora": lambda name: LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=6, init_lora_weights=False, target_modules="all-linear"
    ),
    "lora of two blocks": lambda name: LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        init_lora_weights=False,
        target_modules=["c_attn"] if name == "gpt2" else ["q_proj", "v_proj"],
        layers_to_transform=[1, NUM_BLOCKS - 1],
        layers_pattern="h" if name == "gpt2" else None,
        rank_pattern={} if name == "gpt2" else {"v_proj": 5},
    ),
}


def adapted(name: str, config: PeftConfig) -> tuple[SplitModel, PeftModel]:
    """A split model and the whole one with the same adapter, which does something from the beginning."""
    split = SplitModel.from_model(decoder(name), 2, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        whole = get_peft_model(decoder(name), config)
        if isinstance(config, PrefixTuningConfig):
            torch.nn.init.normal_(whole.prompt_encoder.default.embedding.weight)
    take_adapter(split.parts, whole)
    return split.eval(), whole.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_peft_on_the_whole_model(name, kind):
    split, whole = adapted(name, ADAPTERS[kind](name))
    for padding in (None, "left", "right"):
        inputs = batch(padding)
        for model in (whole, split):
            model.zero_grad()
            model(**inputs).loss.backward()
        tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert (split(**inputs).logits - whole(**inputs).logits)[tokens].abs().max() <= 1e-5
        if kind == "prefix":
            encoders = [part.prefix.encoder for part in split.parts]
            found = {"prefix": torch.cat([encoder.embedding.weight.grad for encoder in encoders], dim=1)}
            expected = {"prefix": whole.prompt_encoder.default.embedding.weight.grad}
        else:
            found = {name: p.grad for part in split.parts for name, p in part.originals() if p.grad is not None}
            trained = [(name, p.grad) for name, p in whole.named_parameters() if p.grad is not None]
            expected = {name.removeprefix("base_model.model."): gradient for name, gradient in trained}
        assert found.keys() == expected.keys()
        for parameter, gradient in found.items():
            assert (gradient - expected[parameter]).abs().max() <= 1e-5, parameter
            assert gradient.abs().max() > 0


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", ["llama-tied", "glm", "gpt2"])
def test_parts_become_one_adapter_that_peft_loads_onto_the_whole_model(name, kind, tmp_path):
    split, whole = adapted(name, ADAPTERS[kind](name))
    save_adapter(split.parts, split.config, whole.active_peft_config, tmp_path)
    loaded = PeftModel.from_pretrained(decoder(name), tmp_path).eval()
    ids = batch(None)["input_ids"]
    assert torch.equal(loaded(ids).logits, whole(ids).logits)
    assert not torch.equal(loaded(ids).logits, decoder(name)(ids).logits)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_only_adapters_train_and_every_block_has_its_own(kind):
    split = SplitModel.from_model(decoder("llama"), 2, 1)
    add_adapter(split.parts, split.config, ADAPTERS[kind]("llama"))
    trained = [name for name, parameter in split.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name or "prefix" in name for name in trained)
    states = [adapter_state(part) for part in split.parts]
    if kind == "prefix":
        assert [sorted(state) for state in states] == [
            [f"prompt_embeddings.{number}" for number in part.blocks] for part in split.parts
        ]
    else:
        numbers = [{int(name.split(".layers.")[1].split(".")[0]) for name in state} for state in states]
        expected = [{0, 1}, {2, 3}, {4}] if kind == "lora" else [{1}, set(), {4}]
        assert numbers == expected


def test_adapters_of_the_parts_come_back_from_what_was_saved():
    split, _ = adapted("llama", ADAPTERS["lora"]("llama"))
    again = SplitModel.from_model(decoder("llama"), 1, 2)
    add_adapter(again.parts, again.config, ADAPTERS["lora"]("llama"))
    ids = batch(None)["input_ids"]
    assert not torch.equal(again(ids).logits, split(ids).logits)
    states = [adapter_state(part) for part in split.parts]
    load_adapter(again.parts, merge_adapters(states, NUM_BLOCKS))
    assert torch.equal(again.eval()(ids).logits, split(ids).logits)


def test_a_prefix_keeps_its_place_in_generation():
    split, whole = adapted("llama", ADAPTERS["prefix"]("llama"))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = batch(None)["input_ids"]
    # Token by token over the whole sequence, without a cache.
    for _ in range(6):
        expected = torch.cat([expected, whole(expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(split.generate(batch(None)["input_ids"], **settings), expected)
    padded = batch("left")
    ids, mask = padded["input_ids"], padded["attention_mask"]
    found = split.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(found, split.generate(ids, attention_mask=mask, use_cache=False, **settings))
    # The padded row goes on as it does alone.
    alone = split.generate(ids[:1, 3:], **settings)
    assert torch.equal(found[:1, 9:], alone[:, 6:])


def test_an_encoder_of_prefixes_is_one_for_each_part():
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=7
    )
    split = SplitModel.from_model(decoder("llama"), 2, 1)
    add_adapter(split.parts, split.config, config)
    split(**batch(None)).loss.backward()
    for part in split.parts:
        assert part.prefix.encoder.transform[2].weight.shape == (len(part.blocks) * 2 * 16, 7)
        assert part.prefix.encoder.transform[0].weight.grad.abs().max() > 0
    # What the encoders made can be merged; it cannot be turned back into encoders.
    merged = merge_adapters([adapter_state(part) for part in split.parts], NUM_BLOCKS)
    assert merged["prompt_embeddings"].shape == (4, NUM_BLOCKS * 2 * 16)
    with pytest.raises(ValueError, match="prefix_projection=True"):
        load_adapter(split.parts, merged)


def test_no_keys_or_values_cross_the_boundary():
    sizes = []
    for config in (None, ADAPTERS["prefix"]("llama")):
        split = SplitModel.from_model(decoder("llama"))
        if config is not None:
            add_adapter(split.parts, split.config, config)
        blobs: list[bytes] = []
        split.boundary.link.watch = lambda *pair, blobs=blobs: blobs.extend(pair)
        split(**batch(None)).loss.backward()
        sizes.append([len(blob) for blob in blobs])
    assert sizes[0] == sizes[1]


def test_what_parts_cannot_have_is_refused():
    split = SplitModel.from_model(decoder("llama"))
    with pytest.raises(ValueError, match="LoRA or prefix tuning"):
        add_adapter(split.parts, split.config, IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="modules_to_save of a PrefixTuningConfig"):
        add_adapter(split.parts, split.config, PrefixTuningConfig(num_virtual_tokens=2, modules_to_save=["lm_head"]))
    for name, value in (
        ("modules_to_save", ["lm_head"]),
        ("alora_invocation_tokens", [3, 4]),
        ("bias", "all"),
        ("use_dora", True),
        ("use_qalora", True),
        ("layer_replication", [(0, 2), (1, 3)]),
        ("megatron_config", {"tensor_model_parallel_size": 1}),
    ):
        with pytest.raises(ValueError, match=f"{name}=.* of a LoraConfig"):
            add_adapter(split.parts, split.config, LoraConfig(**{name: value}))


@pytest.mark.parametrize("init", ["pissa", "olora", "eva", "loftq"])
def test_adapters_that_begin_with_values_of_the_whole_model_are_made_on_it(init):
    whole = decoder("llama")
    before = copy.deepcopy(whole.state_dict())
    split = SplitModel.from_model(whole)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    config.init_lora_weights = init
    with pytest.raises(ValueError, match="get_peft_model, and split that"):
        split.add_adapter(config)
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_have_the_dtype_that_peft_gives_them(dtype, cast):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    whole = get_peft_model(decoder("llama").to(dtype), config, autocast_adapter_dtype=cast)
    expected = {
        name.removeprefix("base_model.model."): own for name, own in whole.named_parameters() if own.requires_grad
    }
    split = SplitModel.from_model(whole)
    found = {name: own for part in split.parts for name, own in part.originals() if own.requires_grad}
    assert found.keys() == expected.keys()
    assert all(torch.equal(own, expected[name]) and own.dtype == expected[name].dtype for name, own in found.items())
    assert next(iter(found.values())).dtype == (torch.float32 if cast else dtype)

    fresh = SplitModel.from_model(decoder("llama").to(dtype))
    fresh.add_adapter(config)
    assert {own.dtype for own in fresh.parameters() if own.requires_grad} == {torch.float32}
    assert fresh.dtype == dtype
    assert fresh(**batch(None)).logits.dtype == dtype


def test_parts_of_different_cuts_do_not_merge():
    states = []
    for cut in ((2, 1), (1, 1)):
        split = SplitModel.from_model(decoder("llama"), *cut)
        add_adapter(split.parts, split.config, ADAPTERS["prefix"]("llama"))
        states.append([adapter_state(part) for part in split.parts])
    with pytest.raises(ValueError, match="not the parts of one cut"):
        merge_adapters([*states[0], states[1][1]], NUM_BLOCKS)
    with pytest.raises(ValueError, match="prefix of block 2 is missing"):
        merge_adapters([states[0][0], states[0][2]], NUM_BLOCKS)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_users_peft_config_is_left_as_it_was(name):
    for make in ADAPTERS.values():
        config = make(name)
        before = copy.deepcopy(config)
        split = SplitModel.from_model(decoder(name))
        add_adapter(split.parts, split.config, config)
        assert config == before


def test_a_peft_model_whose_adapter_the_parts_could_not_have_is_refused():
    def whole(**settings: object) -> PeftModel:
        return get_peft_model(decoder("llama"), LoraConfig(task_type="CAUSAL_LM", r=2, **settings))

    merged, disabled, two = whole(init_lora_weights=False), whole(), whole()
    merged.merge_adapter()
    disabled.base_model.disable_adapter_layers()
    two.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=3))
    two.base_model.set_adapter(["default", "other"])
    for model, text in (
        (merged, "merged or disabled"),
        (disabled, "merged or disabled"),
        (two, "one active adapter"),
        (whole(modules_to_save=["lm_head"]), "modules_to_save"),
        (whole(use_dora=True), "use_dora"),
        (whole(bias="all"), "bias='all'"),
    ):
        with pytest.raises(ValueError, match=text):
            SplitModel.from_model(model)


def test_an_adapter_of_another_name_is_taken_and_the_users_model_is_left_as_it_is():
    config = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights="olora", target_modules=["q_proj"])
    whole = get_peft_model(decoder("llama"), config, adapter_name="mine").eval()
    before = copy.deepcopy(whole.state_dict())
    split = SplitModel.from_model(whole)
    ids = batch(None)["input_ids"]
    assert (split(ids).logits - whole(ids).logits).abs().max() <= 1e-6
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())


def with_prefix(name, cut):
    split = SplitModel.from_model(decoder(name), *cut)
    split.add_adapter(ADAPTERS["prefix"](name))
    return split


@pytest.mark.parametrize("cut", [(0, 1), (1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "glm", "gpt2", "opt"])
def test_prefixes_at_any_cut_are_those_of_peft(name, cut):
    torch.manual_seed(1)
    whole = get_peft_model(decoder(name), ADAPTERS["prefix"](name)).eval()
    torch.nn.init.normal_(whole.prompt_encoder["default"].embedding.weight)
    if cut[0] == 0 and name in ("gpt2", "opt"):
        # Their positions, which lie in the head, begin behind the prefix: they would begin at 0.
        for split_it in (lambda: SplitModel.from_model(whole, *cut), lambda: with_prefix(name, cut)):
            with pytest.raises(ValueError, match="a head without blocks knows nothing: set head_blocks to 1"):
                split_it()
        return
    split = SplitModel.from_model(whole, *cut).eval()
    for padding in (None, "left"):
        inputs = batch(padding)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        difference = (split(**inputs).logits - whole(**inputs).logits)[mask]
        assert difference.abs().max() <= 1e-5
