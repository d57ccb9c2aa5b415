"""Models with ChatGLM's own layouts are split through a runner of their blocks."""

from __future__ import annotations

import pytest
import torch
from chatglm_layouts import Block2, ChatGlm, ChatGlm2, ChatGlmConfig, Embedding2, chatglm
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig

from hf_federated import SplitModel
from hf_federated.messages.serialization import unpack
from hf_federated.split import merge_parts, save_parts
from hf_federated.split.adapters import load_adapter
from hf_federated.split.chatglm import ChatGlmRunner
from hf_federated.split.layouts import Places


def first_generation() -> torch.Tensor:
    """Rows with contexts of different lengths; 37 and 36 are mask tokens, 38 begins the answer."""
    return torch.tensor([[5, 6, 7, 37, 38, 8, 9, 4], [5, 36, 4, 4, 6, 7, 38, 8]])


def padded(padding: str | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Those rows with labels, the first one padded on a side; and which positions are tokens."""
    ids, mask = first_generation(), torch.ones(2, 8, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if padding in ("left", "right"):
        mask[0, slice(0, 3) if padding == "left" else slice(5, 8)] = 0
        inputs["attention_mask"] = mask
        inputs["labels"][mask == 0] = -100
        if padding == "left":
            inputs["labels"][0, 3] = -100
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return inputs, mask.bool()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("padding", ["first generation", None, "left", "right"])
def test_logits_and_gradients_are_those_of_the_whole_model(padding, cut):
    whole = chatglm(1 if padding == "first generation" else 2)
    inputs, tokens = padded(padding)
    split = SplitModel.from_model(whole, *cut)
    expected = whole(**inputs)
    expected.loss.backward()
    expected_gradients = gradients(whole)
    whole.zero_grad()
    output = split(**inputs)
    output.loss.backward()
    assert (output.logits - expected.logits)[tokens].abs().max() <= 1e-5
    found = gradients(whole)
    assert found.keys() == expected_gradients.keys()
    assert all((found[name] - expected_gradients[name]).abs().max() <= 1e-5 for name in found)


def test_context_lengths_and_positions_cross_and_token_ids_do_not():
    split = SplitModel.from_model(chatglm(1))
    blobs: list[bytes] = []
    split.boundary.link.watch = lambda *pair: blobs.extend(pair)
    split(first_generation())
    fields = unpack(blobs[0])["fields"]
    assert fields["context_lengths"].tolist() == [4, 6]
    assert fields["position_ids"].tolist() == [
        [[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 0, 0, 1, 2, 3, 4]],
        [[0, 1, 2, 3, 4, 5, 1, 1], [0, 0, 0, 0, 0, 0, 1, 2]],
    ]
    assert first_generation().int().numpy().tobytes() not in blobs[0]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_checkpoint_is_read_part_by_part(generation, tmp_path):
    AutoConfig.register("chatglm", ChatGlmConfig, exist_ok=True)
    whole = chatglm(generation)
    whole.save_pretrained(tmp_path)
    split = SplitModel.from_model(str(tmp_path), 2, 1, model_class=ChatGlm if generation == 1 else ChatGlm2).eval()
    assert torch.equal(split(first_generation()).logits, whole(first_generation()).logits)
    # Frequencies that are saved with the weights are no parameters.
    assert len(list(split.parameters())) == len(list(whole.parameters()))


@pytest.mark.parametrize("num_virtual_tokens", [0, 3])
@pytest.mark.parametrize("generation", [1, 2])
def test_generation_with_a_cache_writes_what_the_whole_model_does(generation, num_virtual_tokens):
    whole = chatglm(generation)
    split = SplitModel.from_model(whole, 2, 1)
    prefix = None
    if num_virtual_tokens:
        prefix = with_prefixes(split, num_virtual_tokens)
    ids = first_generation()
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, whole(expected, prefix=prefix).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    lengths: list[int] = []
    split.boundary.link.watch = lambda asked, _: lengths.append(sent_length(asked))
    assert torch.equal(split.generate(ids, **settings), expected)
    assert lengths[:6] == [8, 1, 1, 1, 1, 1]
    assert torch.equal(split.generate(ids, use_cache=False, **settings), expected)


def test_a_cache_goes_on_behind_left_padding():
    split = SplitModel.from_model(chatglm(2))
    ids, mask = first_generation(), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    found = split.generate(ids, **settings)
    assert torch.equal(found, split.generate(ids, use_cache=False, **settings))
    alone = split.generate(ids[:1, 3:], max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(found[0, 3:], alone[0])


def test_rows_that_this_model_cannot_read_are_refused():
    split = SplitModel.from_model(chatglm(1))
    with pytest.raises(ValueError, match="Row 1 has no start token \\(id 38\\)"):
        split(torch.tensor([[5, 37, 38, 6], [5, 37, 6, 7]]))
    with pytest.raises(ValueError, match="masks no padding"):
        split(first_generation(), attention_mask=torch.tensor([[0] + [1] * 7, [1] * 8]))
    with pytest.raises(ValueError, match="give input_ids"):
        split(inputs_embeds=torch.zeros(1, 4, 16))


def test_a_class_with_states_batch_first_is_refused(monkeypatch, tmp_path):
    AutoConfig.register("chatglm", ChatGlmConfig, exist_ok=True)
    whole = chatglm(2)
    whole.save_pretrained(tmp_path)
    monkeypatch.setattr(Embedding2, "forward", lambda self, input_ids: self.word_embeddings(input_ids))
    message = r"ChatGlm2 makes states of shape \(1, 2, .* sequence first"
    with pytest.raises(ValueError, match=message):
        SplitModel.from_model(whole, 1, 1)
    with pytest.raises(ValueError, match=message):
        SplitModel.from_model(str(tmp_path), 1, 1, model_class=ChatGlm2)


@pytest.mark.parametrize("generation", [1, 2])
def test_more_tokens_than_the_model_has_positions_are_refused_on_both_sides(generation):
    split = SplitModel.from_model(chatglm(generation))
    blobs: list[bytes] = []
    split.boundary.link.watch = lambda *pair: blobs.extend(pair)
    ids = torch.tensor([[5, 37, 38, *[6] * 30]])
    with pytest.raises(ValueError, match="A sequence of 33 positions came to a model of 32: shorten it"):
        split(ids)
    assert not blobs
    places = Places()
    if generation == 1:
        places = ChatGlmRunner().places(split.config, ids, places)
    arguments = {"position_ids": places.position_ids, "context_lengths": places.context_lengths}
    with pytest.raises(ValueError, match="33 positions came to a model of 32"):
        split.boundary.cross(torch.zeros(1, 33, 16), None, training=False, **arguments)
    assert split(ids[:, :32]).logits.shape == (1, 32, 40)


@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("generation", [1, 2])
def test_lora_computes_and_learns_as_pefts_on_the_whole_model(generation, cut):
    ids = first_generation()
    without = chatglm(generation)(ids).logits
    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["query_key_value", "mlp"], init_lora_weights=False)
    whole = get_peft_model(chatglm(generation), lora).eval()
    split = SplitModel.from_model(whole, *cut)
    expected = whole(input_ids=ids, labels=ids)
    expected.loss.backward()
    output = split(ids, labels=ids)
    output.loss.backward()
    assert (output.logits - expected.logits).abs().max() <= 1e-5 < 1e-2 < (expected.logits - without).abs().max()
    expected_gradients = gradients(whole)
    found = {
        f"base_model.model.{name}": p.grad
        for part in split.parts
        for name, p in part.originals()
        if p.grad is not None
    }
    assert found.keys() == expected_gradients.keys() and len(found) == 2 * 2 * 5
    for name, gradient in expected_gradients.items():
        assert (found[name] - gradient).abs().max() <= 1e-5 and "lora_" in name, name


@pytest.mark.parametrize("padding", ["first generation", None, "left", "right"])
@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (0, 1)], ids=str)
def test_prefixes_are_keys_and_values_before_those_of_the_tokens(padding, cut, tmp_path):
    whole = chatglm(1 if padding == "first generation" else 2)
    split = SplitModel.from_model(whole, *cut)
    prefix = with_prefixes(split, 3)
    inputs, tokens = padded(padding)
    expected = whole(**inputs, prefix=prefix)
    leaves = [states for pair in prefix for states in pair]
    expected_gradients = torch.autograd.grad(expected.loss, leaves)
    output = split(**inputs)
    output.loss.backward()
    assert (output.logits - expected.logits)[tokens].abs().max() <= 1e-5
    assert (output.logits - whole(**inputs).logits).abs().max() > 1e-2
    found = torch.cat([part.prefix.encoder.embedding.weight.grad for part in split.parts if part.prefix], dim=1)
    for own, gradient in zip(found.chunk(2 * 5, dim=1), expected_gradients, strict=True):
        assert (own - gradient.sum(1).flatten(1)).abs().max() <= 1e-5
    assert all(parameter.grad is None for part in split.parts for parameter in part.model.parameters())


@pytest.mark.parametrize("generation", [1, 2])
def test_parts_prefixes_are_saved_as_one_adapter(generation, tmp_path):
    split = SplitModel.from_model(chatglm(generation), 2, 1)
    with_prefixes(split, 3)
    split.save_pretrained(tmp_path)
    saved = PrefixTuningConfig.from_pretrained(str(tmp_path))
    heads, size = (2, 16) if generation == 1 else (1, 8)
    assert (saved.num_layers, saved.num_attention_heads, saved.token_dim) == (5, heads, size)
    state = load_file(tmp_path / "adapter_model.safetensors")
    own = [part.prefix.encoder.embedding.weight for part in split.parts]
    assert torch.equal(state["prompt_embeddings"], torch.cat(own, dim=1)) and len(state) == 1
    again = SplitModel.from_model(chatglm(generation), 1, 2)
    again.add_adapter(saved)
    load_adapter(again.parts, state)
    assert (again(first_generation()).logits - split(first_generation()).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("num_virtual_tokens", [0, 3])
@pytest.mark.parametrize("cut", [(0, 1), (2, 2)], ids=str)
def test_several_tokens_may_come_to_a_cache_behind_padding(cut, num_virtual_tokens):
    split = SplitModel.from_model(chatglm(2), *cut)
    if num_virtual_tokens:
        with_prefixes(split, num_virtual_tokens)
    ids, mask = first_generation(), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = split(ids, attention_mask=mask).logits
        cache = split.new_cache()
        first = split(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache).logits
        then = split(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
    assert (torch.cat((first, then), dim=1) - expected)[mask.bool()].abs().max() <= 1e-5


def test_keys_and_values_may_come_as_one_tensor(monkeypatch):
    whole = chatglm(2)
    split = SplitModel.from_model(whole)
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = split.generate(first_generation(), **settings)
    mix = Block2.mix

    def stacked(self, hidden, factor, unseen, past, use_cache):
        hidden, present = mix(self, hidden, factor, unseen, past, use_cache)
        return hidden, torch.stack(present).unsqueeze(0) if use_cache and past is None else present

    monkeypatch.setattr(Block2, "mix", stacked)
    assert torch.equal(split.generate(first_generation(), **settings), expected)


def test_a_prefix_takes_no_positions():
    split = SplitModel.from_model(chatglm(2))
    with_prefixes(split, 3)
    assert split(torch.randint(4, 30, (1, 32))).logits.shape == (1, 32, 40)
    with pytest.raises(ValueError, match="A sequence of 33 positions came"):
        split(torch.randint(4, 30, (1, 33)))


@pytest.mark.parametrize("generation", [1, 2])
def test_saved_parts_become_the_whole_model_with_what_all_of_them_have(generation, tmp_path):
    AutoConfig.register("chatglm", ChatGlmConfig, exist_ok=True)
    whole = chatglm(generation)
    split = SplitModel.from_model(whole, 2, 1)
    save_parts([split.client_head, split.client_tail], whole.config, tmp_path / "client")
    save_parts([split.server_body], whole.config, tmp_path / "server")
    merge_parts([tmp_path / "client", tmp_path / "server"], tmp_path / "whole")
    merged = load_file(tmp_path / "whole" / "model.safetensors")
    assert merged.keys() == whole.state_dict().keys()
    assert all(torch.equal(merged[name], value) for name, value in whole.state_dict().items())


def with_prefixes(split: SplitModel, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gives a split model prefixes; of each block keys and values, `(length, batch, heads, size)`, as leaves."""
    torch.manual_seed(3)
    split.add_adapter(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=length))
    heads, size = split.client_tail.layout.runner.key_value_heads(split.config)
    prefixes = []
    for part in split.parts:
        if part.prefix is not None:
            torch.nn.init.normal_(part.prefix.encoder.embedding.weight)
            columns = part.prefix.embeddings().detach().chunk(2 * len(part.blocks), dim=1)
            states = [own.view(length, 1, heads, size).repeat(1, 2, 1, 1).requires_grad_() for own in columns]
            prefixes += zip(states[::2], states[1::2], strict=True)
    return prefixes


def sent_length(blob: bytes) -> int:
    """Tokens whose states a message carries; 0 of one that carries none."""
    fields = unpack(blob)["fields"]
    return len(fields["hidden"]["values"]) // fields["batch_size"] if "hidden" in fields else 0
