"""A split model computes the same function as the full model."""

from __future__ import annotations

import copy
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from datasets import Dataset
from decoders import (
    DECODERS,
    FAMILIES,
    MORE_DECODERS,
    NUM_BLOCKS,
    VOCABULARY,
    WITHOUT_KEYS,
    batch,
    decoder,
    from_config,
    slow,
)
from tiny import checkpoints_activations
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from hf_federated import SplitModel
from hf_federated._compat import CACHE_NAME
from hf_federated.split import LAYOUTS, Cut, Forget, Layout, LocalLink
from hf_federated.split.messages import Forward, read_request


CUTS = [(1, 1), (0, 1), (2, 2), (1, 2)]
# All decoders at all cuts. A decoder of `MORE_DECODERS` is slow, except at one cut.
DECODERS_AND_CUTS = [
    pytest.param(name, cut, marks=[pytest.mark.slow] if name in MORE_DECODERS and cut != (1, 2) else [])
    for name in DECODERS
    for cut in CUTS
    if name not in FAMILIES or (name in ("gpt_oss", "granitemoe", "olmoe") and cut == (1, 2))
]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "cut"), DECODERS_AND_CUTS, ids=str)
@pytest.mark.sampled(32)
def test_logits_loss_and_gradients_match_the_full_model(name, cut):
    full_model = decoder(name)
    split = SplitModel.from_model(full_model, *cut)
    for padding in (None, "left", "right"):
        inputs = batch(padding)
        full_model.zero_grad()
        expected = full_model(**inputs, use_cache=False)
        expected.loss.backward()
        expected_gradients = gradients(full_model)
        full_model.zero_grad()
        output = split(**inputs)
        output.loss.backward()
        tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert (output.logits - expected.logits)[tokens].abs().max() <= 1e-5
        assert (output.loss - expected.loss).abs() <= 1e-6
        # The parts share the parameters of the full model, and so the gradients.
        actual = gradients(full_model)
        assert actual.keys() == expected_gradients.keys()
        for parameter, gradient in actual.items():
            assert (gradient - expected_gradients[parameter]).abs().max() <= 1e-5, parameter


def test_only_the_head_applies_the_dropout_of_the_embedding():
    config = DECODERS["starcoder2"]()
    config.embedding_dropout = 0.5
    full_model = from_config(config).train()
    split = SplitModel.from_model(full_model)
    logits = []
    for model in (full_model, split):
        torch.manual_seed(0)
        logits.append(model(batch(None)["input_ids"]).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_trainer_gives_the_same_weights_as_with_the_full_model(name, tmp_path):
    ids = torch.randint(3, VOCABULARY, (40, 8), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    full_model, trained_split = decoder(name), decoder(name)
    losses = []
    for model in (full_model, SplitModel.from_model(trained_split)):
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=10,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            # Adam would turn rounding errors of zero gradients, such as gradients of key biases, into large updates.
            optim="sgd",
            learning_rate=0.5,
            max_grad_norm=0.5,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
        )
        losses.append(Trainer(model=model, args=args, train_dataset=rows).train().training_loss)
    assert losses[0] == losses[1]
    for (parameter, expected), actual in zip(full_model.named_parameters(), trained_split.parameters(), strict=True):
        assert (expected - actual).abs().max() <= 1e-6, parameter
    assert not torch.equal(full_model.get_input_embeddings().weight, decoder(name).get_input_embeddings().weight)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "opt-projected", "qwen2-windows", "glm", *WITHOUT_KEYS, *slow(MORE_DECODERS)]
)
def test_greedy_generation_matches_the_full_model(name):
    full_model = decoder(name)
    split = SplitModel.from_model(full_model, 2, 1)
    for padding in (None, "left"):
        inputs = batch(padding)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        expected = full_model.generate(inputs["input_ids"], **settings)
        assert torch.equal(split.generate(inputs["input_ids"], **settings), expected)
        assert torch.equal(split.generate(inputs["input_ids"], use_cache=False, **settings), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_generation_of_a_head_without_blocks_matches_the_full_model(name):
    """The head of GPT-2 and OPT embeds the positions, which depend on the number of cached tokens."""
    full_model = decoder(name)
    split = SplitModel.from_model(full_model, 0, 1)
    for padding in (None, "left"):
        inputs = batch(padding)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        expected = full_model.generate(inputs["input_ids"], **settings)
        assert torch.equal(split.generate(inputs["input_ids"], **settings), expected)


def test_sampling_matches_the_full_model():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    ids = batch(None)["input_ids"]
    settings = {"max_new_tokens": 8, "do_sample": True, "top_p": 0.9, "eos_token_id": None}
    generated = []
    for model in (full_model, split):
        torch.manual_seed(3)
        generated.append(model.generate(ids, **settings))
    assert torch.equal(*generated)


def test_generation_sends_one_token_per_step_and_server_drops_the_cache_afterwards():
    split = SplitModel.from_model(decoder("llama"))
    sizes: list[int] = []
    server = split.boundary.link.server
    split.boundary.link = LocalLink(server, lambda message, answer: sizes.append(len(message)))
    split.generate(batch(None)["input_ids"], max_new_tokens=5, do_sample=False, eos_token_id=None)
    prompt, *steps = sizes[:5]
    assert prompt > 9 * 3 * 32 * 4 > max(steps) > 3 * 32 * 4
    gc.collect()
    assert not server.caches


class SequentialLink:
    """A link that accepts one message at a time, as a network link does, and collects garbage during each exchange."""

    def __init__(self, server):
        self.server, self.is_busy, self.sent = server, False, []

    def exchange(self, blob):
        assert not self.is_busy
        self.is_busy = True
        gc.collect()
        self.sent.append(read_request(blob))
        answer = self.server.answer(blob)
        self.is_busy = False
        return answer

    def end_step(self):
        pass


def test_cache_that_is_deleted_during_an_exchange_is_dropped_with_the_next_call():
    split = SplitModel.from_model(decoder("llama"))
    ids = batch(None)["input_ids"]
    link = split.boundary.link = SequentialLink(split.boundary.link.server)
    with torch.no_grad():
        cache = split(ids, use_cache=True).past_key_values
        cache.itself = cache  # a reference cycle, so that only the garbage collector deletes the cache
        del cache
        split(ids)
        assert [type(message) for message in link.sent] == [Forward, Forward] and len(link.server.caches) == 1
        split(ids)
    assert [type(message) for message in link.sent[2:]] == [Forget, Forward] and not link.server.caches


def test_server_drops_the_cache_after_generate_unless_the_output_contains_it():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    split.generate(batch(None)["input_ids"], **settings)
    assert not server.caches
    output = split.generate(batch(None)["input_ids"], return_dict_in_generate=True, **settings)
    assert list(server.caches) == [("client", output.past_key_values.cache_id)]


@pytest.mark.parametrize("argument", ["past_key_values", "cache"])
def test_generation_that_continues_with_a_returned_cache_matches_one_generation(argument):
    """`transformers` 5.24 renamed the argument `past_key_values` to `cache`. A split model accepts both names."""
    split = SplitModel.from_model(decoder("llama"))
    lengths = []
    split.client_head.register_forward_pre_hook(lambda head, inputs: lengths.append(inputs[0].shape[1]))
    ids = batch(None)["input_ids"]
    settings = {"do_sample": False, "eos_token_id": None}
    expected = split.generate(ids, max_new_tokens=6, **settings)
    lengths.clear()
    start = split.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **settings)
    cache = {argument: start[CACHE_NAME]}
    assert torch.equal(split.generate(start.sequences, max_new_tokens=3, **cache, **settings), expected)
    assert lengths == [ids.shape[1], 1, 1, 1, 1, 1]
    assert not start[CACHE_NAME].is_croppable
    with torch.no_grad():
        whole = split(torch.cat((expected, ids[:, :1]), dim=1)).logits[:, -1:]
        # The cache has all tokens except the last token.
        actual = split(torch.cat((expected[:, -1:], ids[:, :1]), dim=1), **cache).logits[:, -1:]
    assert (actual - whole).abs().max() <= 1e-6


class OldCacheName(LlamaForCausalLM):
    """A class of a model repository whose `forward` has the name of the cache before `transformers` 5.24."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: Any = None,
        labels: Any = None,
        logits_to_keep: int = 0,
    ) -> Any:
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            labels,
            use_cache,
            logits_to_keep=logits_to_keep,
        )


def test_generation_with_a_class_of_a_repository_that_keeps_the_old_name_of_the_cache():
    full_model = decoder("llama")
    model = OldCacheName(full_model.config).eval()
    model.load_state_dict(full_model.state_dict())
    split = SplitModel.from_model(model)
    assert type(split.client_tail.model) is OldCacheName
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    ids = batch(None)["input_ids"]
    assert torch.equal(split.generate(ids, **settings), full_model.generate(ids, **settings))


def test_failure_to_drop_a_cache_does_not_discard_the_generated_text():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    ids = batch(None)["input_ids"]
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = split.generate(ids, **settings)

    def fail_at_forget(blob):
        if isinstance(read_request(blob), Forget):
            raise ConnectionError("the link is closed")
        return server.answer(blob)

    split.boundary.link = type("Link", (), {"exchange": staticmethod(fail_at_forget)})()
    assert torch.equal(split.generate(ids, **settings), expected)


def test_unsupported_generation_modes_raise_error():
    split = SplitModel.from_model(decoder("llama"))
    ids = batch(None)["input_ids"]
    with pytest.raises(ValueError, match="group_beam_search, but .* Set num_beam_groups=1"):
        split.generate(ids, num_beams=2, num_beam_groups=2, diversity_penalty=0.5, max_new_tokens=2)
    with pytest.raises(ValueError, match="supports only a dynamic cache"):
        split.generate(ids, cache_implementation="static", max_new_tokens=2)


def test_frozen_head_does_not_change_the_server_gradients():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    inputs = batch("right")
    full_model(**inputs).loss.backward()
    expected = gradients(split.server_body)
    full_model.zero_grad()
    split.client_head.requires_grad_(False)
    split(**inputs).loss.backward()
    actual = gradients(split.server_body)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.parametrize("name", ["llama", *slow(MORE_DECODERS)])
def test_activation_checkpointing_does_not_change_gradients(name):
    full_model = decoder(name).train()
    split = SplitModel.from_model(full_model, 2, 2)
    inputs = batch("right")
    full_model(**inputs).loss.backward()
    expected = gradients(full_model)
    full_model.zero_grad()
    split.activation_checkpointing_enable()
    assert all(checkpoints_activations(part.model) for part in split.parts)
    split(**inputs).loss.backward()
    assert all((gradient - expected[name]).abs().max() <= 1e-6 for name, gradient in gradients(full_model).items())


def test_server_uses_the_clients_autocast_dtype():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model, wire_dtype="float32")
    answer = split.boundary.link.exchange

    class ThreadLink(LocalLink):
        """Answers in another thread, which does not inherit the autocast state, as with a network server."""

        def exchange(self, blob):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(answer, blob).result()

    split.boundary.link = ThreadLink(split.boundary.link.server)
    inputs = batch("right")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = full_model(**inputs).logits
        actual = split(**inputs).logits
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, full_model(**inputs).logits)


# Measured errors. A deviation by a factor of two indicates another encoding.
@pytest.mark.parametrize(("dtype", "error"), [("float16", 2.7e-4), ("bfloat16", 2.3e-3), ("int8", 6.6e-3)])
def test_error_of_narrow_wire_dtypes_has_the_measured_size(dtype, error):
    full_model = decoder("llama")
    inputs = batch("right")
    exact = full_model(**inputs).logits
    actual = SplitModel.from_model(full_model, wire_dtype=dtype)(**inputs).logits
    relative = (actual - exact).norm() / exact.norm()
    assert error / 2 < relative < 2 * error


def test_bfloat16_model_is_sent_in_bfloat16_without_error():
    full_model = decoder("llama").to(torch.bfloat16)
    # `.to` also rounds the rotary frequencies, but parts are built with float32 frequencies.
    full_model.model.rotary_emb.inv_freq = decoder("llama").model.rotary_emb.inv_freq
    split = SplitModel.from_model(full_model)
    assert split.boundary.wire.dtype == "bfloat16"
    inputs = batch("right")
    assert torch.equal(split(**inputs).logits, full_model(**inputs).logits)


def test_every_parameter_is_counted_for_one_part():
    full_model = decoder("llama-tied")
    split = SplitModel.from_model(full_model, 1, 2)
    sizes = split.part_bytes()
    assert sum(sizes.values()) == sum(parameter.nbytes for parameter in full_model.parameters())
    assert split.get_output_embeddings().weight is split.get_input_embeddings().weight
    block = sum(parameter.nbytes for parameter in full_model.model.layers[0].parameters())
    assert sizes["body"] == (NUM_BLOCKS - 3) * block


def test_invalid_cut_raises_error():
    for cut, message in (
        ((3, 2), "head_blocks=3 and tail_blocks=2 leave no block"),
        ((-1, 1), "head_blocks=-1, but it must be at least 0"),
        ((1, 0), "tail_blocks=0, but it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            SplitModel.from_model(decoder("llama"), *cut)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": "model.h"}, "has no module 'model.h'.* The modules of model are embed_tokens, layers, norm"),
        ({"blocks": "model.norm"}, "must be a ModuleList of 5 blocks .config.num_hidden_layers., but is LlamaRMSNorm"),
        ({"num_blocks": "num_attention_heads"}, "must be a ModuleList of 4 blocks .*, but is 5"),
        ({"num_blocks": "n_layer"}, "no setting 'n_layer'"),
        ({"embedding": "wte"}, "has no module 'wte'.* The modules of the model are model, lm_head"),
        ({"tail_modules": {"transformer.ln_f": "identity"}}, "has no module 'transformer'"),
    ],
    ids=str,
)
def test_layout_that_does_not_fit_the_model_raises_error_with_the_path(changes, message):
    with pytest.raises(ValueError, match=f"{message}.*docs/how-to/write-a-split-layout.md"):
        SplitModel.from_model(decoder("llama"), layout=replace(LAYOUTS["llama"], **changes))


def test_unknown_model_type_raises_error_and_works_with_a_given_layout():
    full_model = decoder("llama")
    full_model.config.model_type = "another"
    with pytest.raises(ValueError, match="Model type 'another' has no layout.*docs/how-to/write-a-split-layout.md"):
        SplitModel.from_model(full_model)
    layout = Layout(
        blocks="model.layers",
        embedding="model.embed_tokens",
        output="lm_head",
        head_modules={"model.embed_tokens": "identity"},
        tail_modules={"model.norm": "identity", "lm_head": "identity"},
    )
    split = SplitModel.from_model(full_model, layout=layout)
    ids = batch(None)["input_ids"]
    assert torch.equal(split(ids).logits, full_model(ids).logits)


def test_blocks_keep_their_numbers_and_the_entries_of_lists_for_each_block():
    full_model = decoder("gemma3")
    split = SplitModel.from_model(full_model, 1, 2)
    numbers = [[block.self_attn.layer_idx for block in part.model.model.layers] for part in split.parts]
    assert numbers == [[0], [1, 2], [3, 4]]
    types = full_model.config.layer_types
    assert [part.model.config.layer_types for part in split.parts] == [types[:1], types[1:3], types[3:]]


def test_part_can_be_called_without_a_cache():
    split = SplitModel.from_model(decoder("llama"))
    states = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    output = split.client_tail(states)
    assert torch.equal(output.logits, split.client_tail(states, use_cache=True).logits)


def test_router_losses_raise_error():
    """The client has only the routers of its blocks, so a part of the loss would be missing."""
    full_model = decoder("mixtral")
    split = SplitModel.from_model(full_model)
    with pytest.raises(ValueError, match="output_router_logits=True is not supported in a split model"):
        split(batch(None)["input_ids"], output_router_logits=True)
    full_model.config.output_router_logits = True
    with pytest.raises(ValueError, match="Set output_router_logits=False in the config"):
        SplitModel.from_model(full_model)


def test_attention_implementation_of_a_split_model_can_be_set():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    split.set_attn_implementation("eager")
    full_model.set_attn_implementation("eager")
    inputs = batch("left")
    tokens = inputs["attention_mask"].bool()
    assert (split(**inputs).logits - full_model(**inputs, use_cache=False).logits)[tokens].abs().max() <= 1e-6


def test_sequence_longer_than_the_maximum_raises_error():
    split = SplitModel.from_model(decoder("gpt2"))
    with pytest.raises(ValueError, match="65 positions, but the model supports at most 64"):
        split(torch.full((1, 65), 3))


def test_unsupported_arguments_raise_error():
    split = SplitModel.from_model(decoder("llama"))
    ids = batch(None)["input_ids"]
    with pytest.raises(TypeError, match="does not support the arguments \\['speaker'\\]"):
        split(ids, speaker=ids)
    with pytest.raises(TypeError, match="does not support the arguments \\['token_type_ids'\\]"):
        SplitModel.from_model(decoder("gpt2"))(ids, token_type_ids=ids)
    # As in the full model: Llama has no embedding for token type ids.
    assert torch.equal(split(ids, token_type_ids=ids).logits, decoder("llama")(ids, token_type_ids=ids).logits)
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        split(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        split()


def test_custom_positions_are_sent_to_the_server():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    ids = batch(None)["input_ids"]
    # Two sequences are packed into one row. Their positions separate them.
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, -1)
    actual = split(ids, position_ids=positions).logits
    assert (actual - full_model(ids, position_ids=positions, use_cache=False).logits).abs().max() <= 1e-5
    assert (actual - full_model(ids).logits).abs().max() > 1e-2


def test_frozen_parameters_stay_frozen():
    full_model = decoder("llama")
    full_model.model.layers[2].requires_grad_(False)
    before = copy.deepcopy({name: p.requires_grad for name, p in full_model.named_parameters()})
    SplitModel.from_model(full_model)
    assert {name: p.requires_grad for name, p in full_model.named_parameters()} == before


def test_blocks_of_a_cut_cover_the_full_model_in_order():
    cut = Cut(num_blocks=6, head_blocks=2, tail_blocks=1)
    assert [*cut.blocks("head"), *cut.blocks("body"), *cut.blocks("tail")] == list(range(6))


def test_resume_from_a_trainer_checkpoint_gives_identical_weights(tmp_path):
    ids = torch.randint(3, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    models = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        split = SplitModel.from_model(decoder("llama-tied"))
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model=split, args=args, train_dataset=rows).train(resume_from_checkpoint=resume)
        models.append(dict(split.named_parameters()))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_cache_that_the_server_dropped_raises_error():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    ids = batch(None)["input_ids"]
    with torch.no_grad():
        cache = split(ids, use_cache=True).past_key_values
        expected = split(ids[:, :1], past_key_values=cache).logits
        # The server keeps at most 16 caches per client.
        newer = [split(ids, use_cache=True).past_key_values for _ in range(16)]
        assert len(newer) == len(server.caches) == 16
        with pytest.raises(ValueError, match="no cache of 10 positions"):
            split(ids[:, :1], past_key_values=cache)
        cache = split(ids, use_cache=True).past_key_values
        assert torch.equal(split(ids[:, :1], past_key_values=cache).logits, expected)
        for unsupported in (lambda: copy.deepcopy(cache), lambda: cache.crop(2), lambda: cache.reset()):
            with pytest.raises(ValueError, match="cannot be copied or cut"):
                unsupported()


def test_copy_of_a_model_has_no_open_graphs():
    split = SplitModel.from_model(decoder("llama-tied"))
    inputs = batch(None)
    split(**inputs)
    copied = copy.deepcopy(split)
    assert not copied.boundary.link.server.graphs and len(split.boundary.link.server.graphs) == 1
    assert copied.boundary.link.server.body is copied.server_body
    with torch.no_grad():
        copied.client_head.model.model.embed_tokens.weight.add_(1)
        assert not torch.equal(copied(**inputs).logits, split(**inputs).logits)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


def test_unsupported_methods_raise_error_with_the_alternative():
    split = SplitModel.from_model(decoder("llama"))
    with pytest.raises(ValueError, match="split the saved model"):
        split.resize_token_embeddings(60)
    with pytest.raises(TypeError, match="from_model"):
        SplitModel.from_pretrained("somewhere")
    with pytest.raises(ValueError, match="attention_mask has shape .* must be \\(batch, sequence\\)"):
        split(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize("fails_at", ["server", "tail"])
def test_cache_cannot_be_used_after_a_failed_call(fails_at, monkeypatch):
    split = SplitModel.from_model(decoder("llama")).eval()
    ids = batch(None)["input_ids"]
    link = split.boundary.link

    def fail(*args, **kwargs):
        raise ConnectionError("lost")

    with torch.no_grad():
        cache = split(ids[:, :3], use_cache=True).past_key_values
        with monkeypatch.context() as patch, pytest.raises(ConnectionError):
            owner, name = (link, "exchange") if fails_at == "server" else (split.client_tail.model, "forward")
            patch.setattr(owner, name, fail)
            split(ids[:, 3:4], past_key_values=cache)
        with pytest.raises(ValueError, match="generate from the beginning"):
            split(ids[:, 3:4], past_key_values=cache)


def test_cache_with_gradients_or_other_batch_size_raises_error_before_it_changes():
    split = SplitModel.from_model(decoder("llama")).eval()
    ids = batch(None)["input_ids"]
    cache = split.new_cache()
    with pytest.raises(ValueError, match="Call the model under torch.no_grad"):
        split(ids[:, :3], past_key_values=cache)
    with torch.no_grad():
        split(ids[:, :3], past_key_values=cache)
        with pytest.raises(ValueError, match=f"1 sequences, but the cache has {len(ids)} sequences"):
            split(ids[:1, 3:], past_key_values=cache)
        actual = split(ids[:, 3:], past_key_values=cache).logits
        assert (actual - split(ids).logits[:, 3:]).abs().max() <= 1e-5


def test_deleting_a_cache_after_the_link_closed_raises_no_error(monkeypatch):
    errors: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    monkeypatch.setattr(sys, "excepthook", lambda *error: errors.append(error))
    split = SplitModel.from_model(decoder("llama"))

    class ClosedLink:
        def exchange(self, blob: bytes) -> bytes:
            raise ConnectionError("closed")

    cache = split.new_cache()
    split.boundary.link = ClosedLink()
    del cache
    gc.collect()
    assert not errors
