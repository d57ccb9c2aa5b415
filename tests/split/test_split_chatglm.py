"""Models with ChatGLM's layouts can be split with a block runner."""

from __future__ import annotations

import pytest
import torch
from chatglm_layouts import Block2, ChatGlm, ChatGlm2, ChatGlmConfig, Embedding2, chatglm
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig

from hf_federated import SplitModel
from hf_federated.messages.serialization import packed_kind
from hf_federated.split import ClientBatchRunner, Forward, merge_parts, save_parts
from hf_federated.split.adapters import load_adapter
from hf_federated.split.chatglm import ChatGlmRunner
from hf_federated.split.layouts import AttentionInputs


def chatglm_input_ids() -> torch.Tensor:
    """Create sequences with contexts of different lengths. 37 and 36 are mask tokens, 38 is the start token."""
    return torch.tensor([[5, 6, 7, 37, 38, 8, 9, 4], [5, 36, 4, 4, 6, 7, 38, 8]])


def padded(padding: str | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Create inputs with labels, in which the first sequence is padded, and a mask of the token positions."""
    ids, mask = chatglm_input_ids(), torch.ones(2, 8, dtype=torch.long)
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
def test_logits_and_gradients_match_the_full_model(padding, cut):
    full_model = chatglm(1 if padding == "first generation" else 2)
    inputs, tokens = padded(padding)
    split = SplitModel.from_model(full_model, *cut)
    expected = full_model(**inputs)
    expected.loss.backward()
    expected_gradients = gradients(full_model)
    full_model.zero_grad()
    output = split(**inputs)
    output.loss.backward()
    assert (output.logits - expected.logits)[tokens].abs().max() <= 1e-5
    actual = gradients(full_model)
    assert actual.keys() == expected_gradients.keys()
    assert all((actual[name] - expected_gradients[name]).abs().max() <= 1e-5 for name in actual)


def test_context_lengths_and_positions_are_sent_but_token_ids_are_not():
    split = SplitModel.from_model(chatglm(1))
    blobs: list[bytes] = []
    split.boundary.link.watch = lambda *pair: blobs.extend(pair)
    split(chatglm_input_ids())
    message = Forward.from_bytes(blobs[0])
    assert message.context_lengths.tolist() == [4, 6]
    assert message.position_ids.tolist() == [
        [[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 0, 0, 1, 2, 3, 4]],
        [[0, 1, 2, 3, 4, 5, 1, 1], [0, 0, 0, 0, 0, 0, 1, 2]],
    ]
    assert chatglm_input_ids().int().numpy().tobytes() not in blobs[0]


@pytest.mark.parametrize("generation", [1, 2])
def test_checkpoint_can_be_split(generation, tmp_path):
    AutoConfig.register("chatglm", ChatGlmConfig, exist_ok=True)
    full_model = chatglm(generation)
    full_model.save_pretrained(tmp_path)
    split = SplitModel.from_model(str(tmp_path), 2, 1, model_class=ChatGlm if generation == 1 else ChatGlm2).eval()
    assert torch.equal(split(chatglm_input_ids()).logits, full_model(chatglm_input_ids()).logits)
    # Rotary frequencies are saved with the weights, but they are not parameters.
    assert len(list(split.parameters())) == len(list(full_model.parameters()))


@pytest.mark.parametrize("num_virtual_tokens", [0, 3])
@pytest.mark.parametrize("generation", [1, 2])
def test_generation_with_cache_matches_the_full_model(generation, num_virtual_tokens):
    full_model = chatglm(generation)
    split = SplitModel.from_model(full_model, 2, 1)
    prefix = None
    if num_virtual_tokens:
        prefix = with_prefixes(split, num_virtual_tokens)
    ids = chatglm_input_ids()
    expected = ids
    for _ in range(6):
        expected = torch.cat(
            [expected, full_model(expected, prefix=prefix).logits[:, -1].argmax(-1, keepdim=True)], dim=1
        )
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    lengths: list[int] = []
    split.boundary.link.watch = lambda message, _: lengths.append(sent_length(message))
    assert torch.equal(split.generate(ids, **settings), expected)
    assert lengths[:6] == [8, 1, 1, 1, 1, 1]
    assert torch.equal(split.generate(ids, use_cache=False, **settings), expected)


def test_generation_with_cache_works_with_left_padding():
    split = SplitModel.from_model(chatglm(2))
    ids, mask = chatglm_input_ids(), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    generated = split.generate(ids, **settings)
    assert torch.equal(generated, split.generate(ids, use_cache=False, **settings))
    unpadded = split.generate(ids[:1, 3:], max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(generated[0, 3:], unpadded[0])


def test_unsupported_inputs_of_the_first_generation_raise_error():
    split = SplitModel.from_model(chatglm(1))
    with pytest.raises(ValueError, match="Sequence 1 has no start token \\(id 38\\)"):
        split(torch.tensor([[5, 37, 38, 6], [5, 37, 6, 7]]))
    with pytest.raises(ValueError, match="does not support padding"):
        split(chatglm_input_ids(), attention_mask=torch.tensor([[0] + [1] * 7, [1] * 8]))
    with pytest.raises(ValueError, match="Pass input_ids"):
        split(inputs_embeds=torch.zeros(1, 4, 16))


def test_model_class_with_batch_dimension_first_raises_error(monkeypatch, tmp_path):
    AutoConfig.register("chatglm", ChatGlmConfig, exist_ok=True)
    full_model = chatglm(2)
    full_model.save_pretrained(tmp_path)
    monkeypatch.setattr(Embedding2, "forward", lambda self, input_ids: self.word_embeddings(input_ids))
    message = r"ChatGlm2 returns hidden states of shape \(1, 2, .* sequence dimension first"
    with pytest.raises(ValueError, match=message):
        SplitModel.from_model(full_model, 1, 1)
    with pytest.raises(ValueError, match=message):
        SplitModel.from_model(str(tmp_path), 1, 1, model_class=ChatGlm2)


@pytest.mark.parametrize("generation", [1, 2])
def test_too_long_sequence_raises_error_on_client_and_server(generation):
    split = SplitModel.from_model(chatglm(generation))
    blobs: list[bytes] = []
    split.boundary.link.watch = lambda *pair: blobs.extend(pair)
    ids = torch.tensor([[5, 37, 38, *[6] * 30]])
    with pytest.raises(
        ValueError, match="A sequence has 33 positions, but the model supports at most 32. Shorten the"
    ):
        split(ids)
    assert not blobs
    inputs = AttentionInputs()
    if generation == 1:
        inputs = ChatGlmRunner().attention_inputs(split.config, ids, inputs)
    arguments = {"position_ids": inputs.position_ids, "context_lengths": inputs.context_lengths}
    with pytest.raises(ValueError, match="33 positions, but the model supports at most 32"):
        split.boundary.run_body(torch.zeros(1, 33, 16), None, training=False, **arguments)
    assert split(ids[:, :32]).logits.shape == (1, 32, 40)


@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (0, 1)], ids=str)
@pytest.mark.parametrize("generation", [1, 2])
def test_lora_outputs_and_gradients_match_peft_on_the_full_model(generation, cut):
    ids = chatglm_input_ids()
    base_logits = chatglm(generation)(ids).logits
    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["query_key_value", "mlp"], init_lora_weights=False)
    full_model = get_peft_model(chatglm(generation), lora).eval()
    split = SplitModel.from_model(full_model, *cut)
    expected = full_model(input_ids=ids, labels=ids)
    expected.loss.backward()
    output = split(ids, labels=ids)
    output.loss.backward()
    assert (output.logits - expected.logits).abs().max() <= 1e-5 < 1e-2 < (expected.logits - base_logits).abs().max()
    expected_gradients = gradients(full_model)
    actual = {
        f"base_model.model.{name}": p.grad
        for part in split.parts
        for name, p in part.named_original_parameters()
        if p.grad is not None
    }
    assert actual.keys() == expected_gradients.keys() and len(actual) == 2 * 2 * 5
    for name, gradient in expected_gradients.items():
        assert (actual[name] - gradient).abs().max() <= 1e-5 and "lora_" in name, name


@pytest.mark.parametrize("padding", ["first generation", None, "left", "right"])
@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (0, 1)], ids=str)
def test_prefix_outputs_and_gradients_match_the_full_model(padding, cut, tmp_path):
    full_model = chatglm(1 if padding == "first generation" else 2)
    split = SplitModel.from_model(full_model, *cut)
    prefix = with_prefixes(split, 3)
    inputs, tokens = padded(padding)
    expected = full_model(**inputs, prefix=prefix)
    leaves = [states for pair in prefix for states in pair]
    expected_gradients = torch.autograd.grad(expected.loss, leaves)
    output = split(**inputs)
    output.loss.backward()
    assert (output.logits - expected.logits)[tokens].abs().max() <= 1e-5
    assert (output.logits - full_model(**inputs).logits).abs().max() > 1e-2
    actual = torch.cat([part.prefix.encoder.embedding.weight.grad for part in split.parts if part.prefix], dim=1)
    for prefix_gradient, gradient in zip(actual.chunk(2 * 5, dim=1), expected_gradients, strict=True):
        assert (prefix_gradient - gradient.sum(1).flatten(1)).abs().max() <= 1e-5
    assert all(parameter.grad is None for part in split.parts for parameter in part.model.parameters())


@pytest.mark.parametrize("generation", [1, 2])
def test_prefixes_of_all_parts_are_saved_as_one_adapter(generation, tmp_path):
    split = SplitModel.from_model(chatglm(generation), 2, 1)
    with_prefixes(split, 3)
    split.save_pretrained(tmp_path)
    saved = PrefixTuningConfig.from_pretrained(str(tmp_path))
    num_heads, token_dim = (2, 16) if generation == 1 else (1, 8)
    assert (saved.num_layers, saved.num_attention_heads, saved.token_dim) == (5, num_heads, token_dim)
    state = load_file(tmp_path / "adapter_model.safetensors")
    prefixes = [part.prefix.encoder.embedding.weight for part in split.parts]
    assert torch.equal(state["prompt_embeddings"], torch.cat(prefixes, dim=1)) and len(state) == 1
    restored = SplitModel.from_model(chatglm(generation), 1, 2)
    restored.add_adapter(saved)
    load_adapter(restored.parts, state)
    assert (restored(chatglm_input_ids()).logits - split(chatglm_input_ids()).logits).abs().max() <= 1e-5


@pytest.mark.parametrize("num_virtual_tokens", [0, 3])
@pytest.mark.parametrize("cut", [(0, 1), (2, 2)], ids=str)
def test_several_tokens_can_be_appended_to_a_cache_with_left_padding(cut, num_virtual_tokens):
    split = SplitModel.from_model(chatglm(2), *cut)
    if num_virtual_tokens:
        with_prefixes(split, num_virtual_tokens)
    ids, mask = chatglm_input_ids(), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = split(ids, attention_mask=mask).logits
        cache = split.new_cache()
        first = split(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache).logits
        second = split(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
    assert (torch.cat((first, second), dim=1) - expected)[mask.bool()].abs().max() <= 1e-5


def test_blocks_may_return_keys_and_values_as_one_tensor(monkeypatch):
    full_model = chatglm(2)
    split = SplitModel.from_model(full_model)
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = split.generate(chatglm_input_ids(), **settings)
    mix = Block2.mix

    def stacked(self, hidden, factor, masked, past, use_cache):
        hidden, present = mix(self, hidden, factor, masked, past, use_cache)
        return hidden, torch.stack(present).unsqueeze(0) if use_cache and past is None else present

    monkeypatch.setattr(Block2, "mix", stacked)
    assert torch.equal(split.generate(chatglm_input_ids(), **settings), expected)


def test_prefix_takes_no_positions():
    split = SplitModel.from_model(chatglm(2))
    with_prefixes(split, 3)
    assert split(torch.randint(4, 30, (1, 32))).logits.shape == (1, 32, 40)
    with pytest.raises(ValueError, match="A sequence has 33 positions, but"):
        split(torch.randint(4, 30, (1, 33)))


@pytest.mark.parametrize("generation", [1, 2])
def test_merged_parts_contain_every_weight_and_buffer_of_the_full_model(generation, tmp_path):
    AutoConfig.register("chatglm", ChatGlmConfig, exist_ok=True)
    full_model = chatglm(generation)
    split = SplitModel.from_model(full_model, 2, 1)
    save_parts([split.client_head, split.client_tail], full_model.config, tmp_path / "client")
    save_parts([split.server_body], full_model.config, tmp_path / "server")
    merge_parts([tmp_path / "client", tmp_path / "server"], tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == full_model.state_dict().keys()
    assert all(torch.equal(merged[name], value) for name, value in full_model.state_dict().items())


def with_prefixes(split: SplitModel, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Add prefixes to a split model, and return each block's keys and values, `(length, batch, heads, size)`."""
    torch.manual_seed(3)
    split.add_adapter(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=length))
    num_heads, head_size = split.client_tail.layout.runner.key_value_heads(split.config)
    prefixes = []
    for part in split.parts:
        if part.prefix is not None:
            torch.nn.init.normal_(part.prefix.encoder.embedding.weight)
            columns = part.prefix.embeddings().detach().chunk(2 * len(part.blocks), dim=1)
            states = [
                column.view(length, 1, num_heads, head_size).repeat(1, 2, 1, 1).requires_grad_() for column in columns
            ]
            prefixes += zip(states[::2], states[1::2], strict=True)
    return prefixes


def sent_length(blob: bytes) -> int:
    """Return the number of tokens per sequence whose hidden states a message contains; 0 without hidden states."""
    if packed_kind(blob) != Forward.kind:
        return 0
    message = Forward.from_bytes(blob)
    return len(message.hidden["values"]) // message.batch_size


def test_clients_of_a_server_batch_may_have_sequences_of_different_lengths():
    full_model = chatglm(1)
    inputs = {"long": chatglm_input_ids(), "short": chatglm_input_ids()[:1, :6]}
    clients = {name: SplitModel.from_model(full_model, client_id=name) for name in inputs}
    runner = ClientBatchRunner(clients["long"].boundary.link.server)
    for name, client in clients.items():
        client.boundary.link = runner.link(name)
    work = {name: lambda name=name: clients[name](inputs[name]).logits for name in clients}
    logits = runner.run(work)
    for name, ids in inputs.items():
        assert (logits[name] - full_model(ids).logits).abs().max() <= 1e-5
