"""Adapters of the parts are equivalent to a PEFT adapter of the full model, and can be merged to it."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from decoders import MORE_DECODERS, NUM_BLOCKS, batch, decoder, slow
from packaging.version import Version
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, get_peft_model

from hf_federated import SplitModel
from hf_federated.split import adapter_state, add_adapter, copy_adapter, load_adapter, merge_adapters, save_adapter


FAMILIES = ["llama-tied", "qwen2-windows", "mistral-window", "glm", "gpt2", "opt"]
# Modules of the attention, for the families that do not call them `q_proj` and `v_proj`.
ATTENTION = {
    "falcon": ["query_key_value"],
    "falcon-alibi": ["query_key_value"],
    "gpt2": ["c_attn"],
    "gpt2-scaled": ["c_attn"],
    "gpt_neox": ["query_key_value"],
    "phi3": ["qkv_proj"],
}
# PEFT adapts the experts of these families as parameters, which a split model does not support, or cannot adapt their
# router (Phi-3.5-MoE).
EXPERTS = (
    "afmoe beam cohere2_moe deepseek_v2 deepseek_v2-groups deepseek_v3 deepseek_v3-without-query-rank dots1 "
    "ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite hunyuan_v1_moe mellum minimax_m2 mixtral olmoe phimoe "
    "qwen3_moe qwen3_next sarvam_mla solar_open"
).split()
# PEFT creates prefixes for all query heads, but the blocks of this family have one key/value head.
NO_PREFIX = ["falcon"]
# PEFT 0.19 raises an IndexError for prefixes of these families.
NO_PREFIX_IN_OLD_PEFT = ["gemma2", "gemma3"]
if Version(peft.__version__) < Version("0.21"):
    NO_PREFIX += NO_PREFIX_IN_OLD_PEFT
ADAPTERS = {
    "prefix": lambda name: PrefixTuningConfig(
        # PEFT does not find the number of heads in the config of MPT.
        task_type="CAUSAL_LM",
        num_virtual_tokens=4,
        num_attention_heads=4 if name == "mpt" else None,
    ),
    "lora": lambda name: LoraConfig(
        task_type="CAUSAL_LM",
        r=3,
        lora_alpha=6,
        init_lora_weights=False,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "kv_b_proj"] if name in EXPERTS else "all-linear",
    ),
    "lora on two blocks": lambda name: LoraConfig(
        task_type="CAUSAL_LM",
        r=2,
        init_lora_weights=False,
        target_modules=ATTENTION.get(name, ["q_proj", "v_proj"]),
        layers_to_transform=[1, NUM_BLOCKS - 1],
        layers_pattern="h" if name.startswith(("falcon", "gpt2")) else None,
        rank_pattern={} if name in ATTENTION else {"v_proj": 5},
    ),
}


def create_adapted(name: str, config: PeftConfig) -> tuple[SplitModel, PeftModel]:
    """Create a split model and a full model with the same adapter, which changes the output from the start."""
    split = SplitModel.from_model(decoder(name), 2, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        full_model = get_peft_model(decoder(name), config)
        if isinstance(config, PrefixTuningConfig):
            torch.nn.init.normal_(full_model.prompt_encoder.default.embedding.weight)
    copy_adapter(split.parts, full_model)
    return split.eval(), full_model.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", [*FAMILIES, *slow(MORE_DECODERS)])
@pytest.mark.sampled(9)
def test_logits_and_gradients_match_peft_on_the_full_model(name, kind):
    if kind == "prefix" and name in NO_PREFIX:
        pytest.skip("PEFT does not support prefixes of this model.")
    split, full_model = create_adapted(name, ADAPTERS[kind](name))
    for padding in (None, "left", "right"):
        inputs = batch(padding)
        for model in (full_model, split):
            model.zero_grad()
            model(**inputs).loss.backward()
        tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert (split(**inputs).logits - full_model(**inputs).logits)[tokens].abs().max() <= 1e-5
        if kind == "prefix":
            encoders = [part.prefix.encoder for part in split.parts]
            actual = {"prefix": torch.cat([encoder.embedding.weight.grad for encoder in encoders], dim=1)}
            expected = {"prefix": full_model.prompt_encoder.default.embedding.weight.grad}
        else:
            actual = {
                name: p.grad
                for part in split.parts
                for name, p in part.named_original_parameters()
                if p.grad is not None
            }
            trained = [(name, p.grad) for name, p in full_model.named_parameters() if p.grad is not None]
            expected = {name.removeprefix("base_model.model."): gradient for name, gradient in trained}
        assert actual.keys() == expected.keys()
        for parameter, gradient in actual.items():
            assert (gradient - expected[parameter]).abs().max() <= 1e-5, parameter
            assert gradient.abs().max() > 0


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("name", ["llama-tied", "glm", "gpt2"])
def test_saved_adapter_can_be_loaded_with_peft(name, kind, tmp_path):
    split, full_model = create_adapted(name, ADAPTERS[kind](name))
    save_adapter(split.parts, split.config, full_model.active_peft_config, tmp_path)
    loaded = PeftModel.from_pretrained(decoder(name), tmp_path).eval()
    ids = batch(None)["input_ids"]
    assert torch.equal(loaded(ids).logits, full_model(ids).logits)
    assert not torch.equal(loaded(ids).logits, decoder(name)(ids).logits)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_only_adapters_are_trained_and_each_part_has_the_adapters_of_its_blocks(kind):
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


def test_merged_adapter_can_be_loaded_into_another_cut():
    split, _ = create_adapted("llama", ADAPTERS["lora"]("llama"))
    restored = SplitModel.from_model(decoder("llama"), 1, 2)
    add_adapter(restored.parts, restored.config, ADAPTERS["lora"]("llama"))
    ids = batch(None)["input_ids"]
    assert not torch.equal(restored(ids).logits, split(ids).logits)
    states = [adapter_state(part) for part in split.parts]
    load_adapter(restored.parts, merge_adapters(states, NUM_BLOCKS))
    assert torch.equal(restored.eval()(ids).logits, split(ids).logits)


@pytest.mark.parametrize("name", ["llama", *slow(name for name in MORE_DECODERS if name not in NO_PREFIX)])
def test_generation_with_prefix_matches_generation_without_cache(name):
    split, full_model = create_adapted(name, ADAPTERS["prefix"](name))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = batch(None)["input_ids"]
    # Recompute the full sequence for each token, without a cache.
    for _ in range(6):
        expected = torch.cat([expected, full_model(expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(split.generate(batch(None)["input_ids"], **settings), expected)
    padded = batch("left")
    ids, mask = padded["input_ids"], padded["attention_mask"]
    generated = split.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(generated, split.generate(ids, attention_mask=mask, use_cache=False, **settings))
    if getattr(split.config, "sliding_window", None) is not None:
        return  # padding moves the prefix out of the window, as in PEFT
    # The padded sequence gets the same continuation as without padding.
    unpadded = split.generate(ids[:1, 3:], **settings)
    assert torch.equal(generated[:1, 9:], unpadded[:, 6:])


def test_adapters_that_peft_or_a_split_model_does_not_support_raise_error():
    split = SplitModel.from_model(decoder("falcon"))
    with pytest.raises(ValueError, match="share one key/value head"):
        split.add_adapter(ADAPTERS["prefix"]("falcon"))
    split = SplitModel.from_model(decoder("deepseek_v3"))
    with pytest.raises(ValueError, match="Prefix tuning is not supported for deepseek_v3: .* Use LoRA"):
        split.add_adapter(ADAPTERS["prefix"]("deepseek_v3"))
    split = SplitModel.from_model(decoder("phimoe"))
    with pytest.raises(ValueError, match="PEFT adapts model.layers.0.mlp.router, but the output of this router"):
        split.add_adapter(ADAPTERS["lora"]("llama"))
    split = SplitModel.from_model(decoder("mixtral"))
    # Older versions of PEFT do not find "all-linear" modules in a model with experts.
    with pytest.raises(ValueError, match="adapts the experts|not found in the base model"):
        split.add_adapter(ADAPTERS["lora"]("llama"))


def test_each_part_has_a_prefix_encoder_with_prefix_projection():
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=7
    )
    split = SplitModel.from_model(decoder("llama"), 2, 1)
    add_adapter(split.parts, split.config, config)
    split(**batch(None)).loss.backward()
    for part in split.parts:
        assert part.prefix.encoder.transform[2].weight.shape == (len(part.blocks) * 2 * 16, 7)
        assert part.prefix.encoder.transform[0].weight.grad.abs().max() > 0
    # The computed prefixes can be merged, but they cannot be loaded into encoders.
    merged = merge_adapters([adapter_state(part) for part in split.parts], NUM_BLOCKS)
    assert merged["prompt_embeddings"].shape == (4, NUM_BLOCKS * 2 * 16)
    with pytest.raises(ValueError, match="prefix_projection=True"):
        load_adapter(split.parts, merged)


def test_prefixes_are_not_sent_to_the_server():
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


def test_unsupported_adapter_configs_raise_error():
    split = SplitModel.from_model(decoder("llama"))
    with pytest.raises(ValueError, match="IA3Config is not supported .* Use LoRA or prefix tuning"):
        add_adapter(split.parts, split.config, IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="modules_to_save=.* of a PrefixTuningConfig"):
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
def test_initialization_from_base_weights_raises_error_and_leaves_the_model_unchanged(init):
    full_model = decoder("llama")
    before = copy.deepcopy(full_model.state_dict())
    split = SplitModel.from_model(full_model)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    config.init_lora_weights = init
    with pytest.raises(ValueError, match="get_peft_model, and split the PEFT model"):
        split.add_adapter(config)
    assert all(torch.equal(value, before[name]) for name, value in full_model.state_dict().items())


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_have_the_same_dtype_as_in_peft(dtype, cast):
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    full_model = get_peft_model(decoder("llama").to(dtype), config, autocast_adapter_dtype=cast)
    expected = {
        name.removeprefix("base_model.model."): parameter
        for name, parameter in full_model.named_parameters()
        if parameter.requires_grad
    }
    split = SplitModel.from_model(full_model)
    actual = {
        name: parameter
        for part in split.parts
        for name, parameter in part.named_original_parameters()
        if parameter.requires_grad
    }
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert torch.equal(parameter, expected[name]) and parameter.dtype == expected[name].dtype
    assert next(iter(actual.values())).dtype == (torch.float32 if cast else dtype)

    fresh = SplitModel.from_model(decoder("llama").to(dtype))
    fresh.add_adapter(config)
    assert {parameter.dtype for parameter in fresh.parameters() if parameter.requires_grad} == {torch.float32}
    assert fresh.dtype == dtype
    assert fresh(**batch(None)).logits.dtype == dtype


def test_merging_adapters_of_different_cuts_raises_error():
    states = []
    for cut in ((2, 1), (1, 1)):
        split = SplitModel.from_model(decoder("llama"), *cut)
        add_adapter(split.parts, split.config, ADAPTERS["prefix"]("llama"))
        states.append([adapter_state(part) for part in split.parts])
    with pytest.raises(ValueError, match="Merge only parts of the same cut"):
        merge_adapters([*states[0], states[1][1]], NUM_BLOCKS)
    with pytest.raises(ValueError, match="prefix of block 2 is missing"):
        merge_adapters([states[0][0], states[0][2]], NUM_BLOCKS)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_add_adapter_does_not_modify_the_peft_config(name):
    for make in ADAPTERS.values():
        config = make(name)
        before = copy.deepcopy(config)
        split = SplitModel.from_model(decoder(name))
        add_adapter(split.parts, split.config, config)
        assert config == before


def test_splitting_a_peft_model_with_unsupported_adapter_raises_error():
    def full_model(**settings: object) -> PeftModel:
        return get_peft_model(decoder("llama"), LoraConfig(task_type="CAUSAL_LM", r=2, **settings))

    merged, disabled, two = full_model(init_lora_weights=False), full_model(), full_model()
    merged.merge_adapter()
    disabled.base_model.disable_adapter_layers()
    two.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=3))
    two.base_model.set_adapter(["default", "other"])
    for model, message in (
        (merged, "merged or disabled"),
        (disabled, "merged or disabled"),
        (two, "exactly one active adapter"),
        (full_model(modules_to_save=["lm_head"]), "modules_to_save"),
        (full_model(use_dora=True), "use_dora"),
        (full_model(bias="all"), "bias='all'"),
    ):
        with pytest.raises(ValueError, match=message):
            SplitModel.from_model(model)


def test_adapter_with_custom_name_is_copied_and_the_peft_model_is_unchanged():
    config = LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights="olora", target_modules=["q_proj"])
    full_model = get_peft_model(decoder("llama"), config, adapter_name="mine").eval()
    before = copy.deepcopy(full_model.state_dict())
    split = SplitModel.from_model(full_model)
    ids = batch(None)["input_ids"]
    assert (split(ids).logits - full_model(ids).logits).abs().max() <= 1e-6
    assert all(torch.equal(value, before[name]) for name, value in full_model.state_dict().items())


def with_prefix(name, cut):
    split = SplitModel.from_model(decoder(name), *cut)
    split.add_adapter(ADAPTERS["prefix"](name))
    return split


@pytest.mark.parametrize("cut", [(0, 1), (1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["llama", "glm", "gpt2", "opt"])
def test_prefix_tuning_matches_peft_at_every_cut(name, cut):
    torch.manual_seed(1)
    full_model = get_peft_model(decoder(name), ADAPTERS["prefix"](name)).eval()
    torch.nn.init.normal_(full_model.prompt_encoder["default"].embedding.weight)
    if cut[0] == 0 and name in ("gpt2", "opt"):
        # The head embeds the positions. They must start after the prefix, but a head without blocks has no prefix.
        for create in (lambda: SplitModel.from_model(full_model, *cut), lambda: with_prefix(name, cut)):
            with pytest.raises(ValueError, match="a head without blocks has no prefix. Set head_blocks to at least 1"):
                create()
        return
    split = SplitModel.from_model(full_model, *cut).eval()
    for padding in (None, "left"):
        inputs = batch(padding)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        difference = (split(**inputs).logits - full_model(**inputs).logits)[mask]
        assert difference.abs().max() <= 1e-5
