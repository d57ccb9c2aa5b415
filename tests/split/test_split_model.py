"""A split model is the model that it was made from."""

from __future__ import annotations

import copy
import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from datasets import Dataset
from decoders import DECODERS, NUM_BLOCKS, VOCABULARY, batch, decoder
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hf_federated import SplitModel
from hf_federated.split import Cut, Forget, Layout, LocalLink
from hf_federated.split.messages import Forward, read_request


CUTS = [(1, 1), (0, 1), (2, 2)]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_loss_and_gradients_are_those_of_the_whole_model(name, cut):
    whole = decoder(name)
    split = SplitModel.from_model(whole, *cut)
    for padding in (None, "left", "right"):
        inputs = batch(padding)
        whole.zero_grad()
        expected = whole(**inputs)
        expected.loss.backward()
        expected_gradients = gradients(whole)
        whole.zero_grad()
        output = split(**inputs)
        output.loss.backward()
        tokens = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        assert (output.logits - expected.logits)[tokens].abs().max() <= 1e-5
        assert (output.loss - expected.loss).abs() <= 1e-6
        # The parts share the whole model's parameters, so their gradients are there.
        found = gradients(whole)
        assert found.keys() == expected_gradients.keys()
        for parameter, gradient in found.items():
            assert (gradient - expected_gradients[parameter]).abs().max() <= 1e-5, parameter


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_ten_steps_of_a_trainer_end_where_the_whole_models_end(name, tmp_path):
    ids = torch.randint(3, VOCABULARY, (40, 8), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    whole, again = decoder(name), decoder(name)
    losses = []
    for model in (whole, SplitModel.from_model(again)):
        args = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=10,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            # Adam makes steps of the rounding of gradients that are zero, as those of biases of keys are.
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
    for (parameter, expected), found in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert (expected - found).abs().max() <= 1e-6, parameter
    assert not torch.equal(whole.get_input_embeddings().weight, decoder(name).get_input_embeddings().weight)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt-projected", "qwen2-windows", "glm"])
def test_greedy_generation_is_that_of_the_whole_model(name):
    whole = decoder(name)
    split = SplitModel.from_model(whole, 2, 1)
    for padding in (None, "left"):
        inputs = batch(padding)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        settings = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        expected = whole.generate(inputs["input_ids"], **settings)
        assert torch.equal(split.generate(inputs["input_ids"], **settings), expected)
        assert torch.equal(split.generate(inputs["input_ids"], use_cache=False, **settings), expected)


def test_sampling_draws_what_the_whole_model_draws():
    whole = decoder("llama")
    split = SplitModel.from_model(whole)
    ids = batch(None)["input_ids"]
    settings = {"max_new_tokens": 8, "do_sample": True, "top_p": 0.9, "eos_token_id": None}
    drawn = []
    for model in (whole, split):
        torch.manual_seed(3)
        drawn.append(model.generate(ids, **settings))
    assert torch.equal(*drawn)


def test_the_server_sends_one_tokens_states_a_step_and_drops_the_cache_afterwards():
    split = SplitModel.from_model(decoder("llama"))
    sizes: list[int] = []
    server = split.boundary.link.server
    split.boundary.link = LocalLink(server, lambda message, answer: sizes.append(len(message)))
    split.generate(batch(None)["input_ids"], max_new_tokens=5, do_sample=False, eos_token_id=None)
    prompt, *others = sizes[:5]
    assert prompt > 9 * 3 * 32 * 4 > max(others) > 3 * 32 * 4
    gc.collect()
    assert not server._caches


class OneAtATime:
    """A link as one over a network, which takes a message after the other; garbage is collected during each."""

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


def test_a_cache_that_is_collected_in_the_midst_of_an_exchange_sends_nothing_there():
    split = SplitModel.from_model(decoder("llama"))
    ids = batch(None)["input_ids"]
    link = split.boundary.link = OneAtATime(split.boundary.link.server)
    with torch.no_grad():
        cache = split(ids, use_cache=True).past_key_values
        cache.itself = cache
        del cache
        split(ids)
        assert [type(message) for message in link.sent] == [Forward, Forward] and len(link.server._caches) == 1
        split(ids)
    assert [type(message) for message in link.sent[2:]] == [Forget, Forward] and not link.server._caches


def test_a_cache_of_generate_is_dropped_at_its_end_unless_the_output_has_it():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    split.generate(batch(None)["input_ids"], **settings)
    assert not server._caches
    output = split.generate(batch(None)["input_ids"], return_dict_in_generate=True, **settings)
    assert list(server._caches) == [("client", output.past_key_values.number)]


def test_a_link_that_ended_takes_no_generated_text_with_it():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    ids = batch(None)["input_ids"]
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = split.generate(ids, **settings)

    def end_at_forget(blob):
        if isinstance(read_request(blob), Forget):
            raise ConnectionError("the link ended")
        return server.answer(blob)

    split.boundary.link = type("Link", (), {"exchange": staticmethod(end_at_forget)})()
    assert torch.equal(split.generate(ids, **settings), expected)


def test_ways_of_generating_that_a_server_cannot_follow_are_refused():
    split = SplitModel.from_model(decoder("llama"))
    ids = batch(None)["input_ids"]
    with pytest.raises(ValueError, match="num_beams=1"):
        split.generate(ids, num_beams=2, max_new_tokens=2)
    with pytest.raises(ValueError, match="dynamic cache"):
        split.generate(ids, cache_implementation="static", max_new_tokens=2)


def test_a_frozen_head_leaves_the_servers_gradients_as_they_are():
    whole = decoder("llama")
    split = SplitModel.from_model(whole)
    inputs = batch("right")
    whole(**inputs).loss.backward()
    expected = gradients(split.server_body)
    whole.zero_grad()
    split.client_head.requires_grad_(False)
    split(**inputs).loss.backward()
    found = gradients(split.server_body)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_activation_checkpointing_in_the_parts_changes_no_gradient():
    whole = decoder("llama").train()
    split = SplitModel.from_model(whole, 2, 2)
    inputs = batch("right")
    whole(**inputs).loss.backward()
    expected = gradients(whole)
    whole.zero_grad()
    split.activation_checkpointing_enable()
    assert all(part.model.is_activation_checkpointing for part in split.parts)
    split(**inputs).loss.backward()
    assert all((gradient - expected[name]).abs().max() <= 1e-6 for name, gradient in gradients(whole).items())


def test_autocast_reaches_the_server():
    whole = decoder("llama")
    split = SplitModel.from_model(whole, wire_dtype="float32")
    answer = split.boundary.link.exchange

    class OfAThread(LocalLink):
        """The threads that serve a network have no autocast of their own."""

        def exchange(self, blob):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(answer, blob).result()

    split.boundary.link = OfAThread(split.boundary.link.server)
    inputs = batch("right")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(**inputs).logits
        found = split(**inputs).logits
    assert torch.equal(found, expected)
    assert not torch.equal(found, whole(**inputs).logits)


# As measured: what is off by a factor of two is another encoding.
@pytest.mark.parametrize(("dtype", "error"), [("float16", 2.7e-4), ("bfloat16", 2.3e-3), ("int8", 6.6e-3)])
def test_a_narrow_wire_costs_a_measured_error(dtype, error):
    whole = decoder("llama")
    inputs = batch("right")
    exact = whole(**inputs).logits
    found = SplitModel.from_model(whole, wire_dtype=dtype)(**inputs).logits
    relative = (found - exact).norm() / exact.norm()
    assert error / 2 < relative < 2 * error


def test_a_bfloat16_model_travels_as_it_is():
    whole = decoder("llama").to(torch.bfloat16)
    # `.to` rounds the frequencies of rotary embeddings too; models are built with exact ones.
    whole.model.rotary_emb.inv_freq = decoder("llama").model.rotary_emb.inv_freq
    split = SplitModel.from_model(whole)
    assert split.boundary.wire.dtype == "bfloat16"
    inputs = batch("right")
    assert torch.equal(split(**inputs).logits, whole(**inputs).logits)


def test_every_parameter_belongs_to_one_part():
    whole = decoder("llama-tied")
    split = SplitModel.from_model(whole, 1, 2)
    sizes = split.part_bytes()
    assert sum(sizes.values()) == sum(parameter.nbytes for parameter in whole.parameters())
    assert split.get_output_embeddings().weight is split.get_input_embeddings().weight
    block = sum(parameter.nbytes for parameter in whole.model.layers[0].parameters())
    assert sizes["body"] == (NUM_BLOCKS - 3) * block


def test_a_cut_that_does_not_fit_is_refused():
    for cut, text in (((3, 2), "cannot leave 3 \\+ 2"), ((-1, 1), "not be negative"), ((1, 0), "at least 1")):
        with pytest.raises(ValueError, match=text):
            SplitModel.from_model(decoder("llama"), *cut)


def test_a_model_without_a_layout_is_refused_and_takes_a_given_one():
    whole = decoder("llama")
    whole.config.model_type = "another"
    with pytest.raises(ValueError, match="No layout for models of type 'another'"):
        SplitModel.from_model(whole)
    layout = Layout(
        blocks="model.layers",
        embedding="model.embed_tokens",
        output="lm_head",
        of_head={"model.embed_tokens": "identity"},
        of_tail={"model.norm": "identity", "lm_head": "identity"},
    )
    split = SplitModel.from_model(whole, layout=layout)
    ids = batch(None)["input_ids"]
    assert torch.equal(split(ids).logits, whole(ids).logits)


def test_blocks_that_depend_on_their_number_are_refused():
    config = GPT2Config(n_layer=4, n_embd=8, n_head=2, vocab_size=9, scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx=False"):
        SplitModel.from_model(GPT2LMHeadModel(config))


def test_a_sequence_longer_than_the_positions_is_refused():
    split = SplitModel.from_model(decoder("gpt2"))
    with pytest.raises(ValueError, match="65 positions came to a model of 64"):
        split(torch.full((1, 65), 3))


def test_what_is_not_declared_is_refused_before_it_leaves():
    split = SplitModel.from_model(decoder("llama"))
    ids = batch(None)["input_ids"]
    with pytest.raises(TypeError, match="takes no \\['speaker'\\]"):
        split(ids, speaker=ids)
    with pytest.raises(TypeError, match="takes no \\['token_type_ids'\\]"):
        SplitModel.from_model(decoder("gpt2"))(ids, token_type_ids=ids)
    # As the whole model, which has no embedding of them either.
    assert torch.equal(split(ids, token_type_ids=ids).logits, decoder("llama")(ids, token_type_ids=ids).logits)
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        split(ids, output_hidden_states=True)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        split()


def test_positions_of_the_users_own_reach_the_server():
    whole = decoder("llama")
    split = SplitModel.from_model(whole)
    ids = batch(None)["input_ids"]
    # Two packed sequences a row, told by their positions.
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(3, -1)
    found = split(ids, position_ids=positions).logits
    assert (found - whole(ids, position_ids=positions, use_cache=False).logits).abs().max() <= 1e-5
    assert (found - whole(ids).logits).abs().max() > 1e-2


def test_the_parts_keep_the_users_frozen_parameters_frozen():
    whole = decoder("llama")
    whole.model.layers[2].requires_grad_(False)
    before = copy.deepcopy({name: p.requires_grad for name, p in whole.named_parameters()})
    SplitModel.from_model(whole)
    assert {name: p.requires_grad for name, p in whole.named_parameters()} == before


def test_a_cut_names_the_blocks_of_the_whole_model():
    cut = Cut(num_blocks=6, head_blocks=2, tail_blocks=1)
    assert [*cut.blocks("head"), *cut.blocks("body"), *cut.blocks("tail")] == list(range(6))


def test_a_run_goes_on_from_a_trainers_checkpoint(tmp_path):
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


def test_a_cache_that_the_server_has_not_is_an_error_and_not_an_empty_one():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    ids = batch(None)["input_ids"]
    with torch.no_grad():
        cache = split(ids, use_cache=True).past_key_values
        expected = split(ids[:, :1], past_key_values=cache).logits
        # As many others as the server keeps of one client.
        others = [split(ids, use_cache=True).past_key_values for _ in range(16)]
        assert len(others) == len(server._caches) == 16
        with pytest.raises(ValueError, match="no cache of 10 positions"):
            split(ids[:, :1], past_key_values=cache)
        again = split(ids, use_cache=True).past_key_values
        assert torch.equal(split(ids[:, :1], past_key_values=again).logits, expected)
        for wrong in (lambda: copy.deepcopy(again), lambda: again.crop(2), lambda: again.reset()):
            with pytest.raises(ValueError, match="cannot be copied, cut"):
                wrong()


def test_a_copy_of_a_model_has_nothing_under_way():
    split = SplitModel.from_model(decoder("llama-tied"))
    inputs = batch(None)
    split(**inputs)
    other = copy.deepcopy(split)
    assert not other.boundary.link.server._graphs and len(split.boundary.link.server._graphs) == 1
    assert other.boundary.link.server.body is other.server_body
    with torch.no_grad():
        other.client_head.model.model.embed_tokens.weight.add_(1)
        assert not torch.equal(other(**inputs).logits, split(**inputs).logits)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight


def test_methods_that_a_split_model_has_not_say_what_to_do():
    split = SplitModel.from_model(decoder("llama"))
    with pytest.raises(ValueError, match="split it then"):
        split.resize_token_embeddings(60)
    with pytest.raises(TypeError, match="from_model"):
        SplitModel.from_pretrained("somewhere")
    with pytest.raises(ValueError, match="attention_mask is \\(batch, sequence\\)"):
        split(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.ones(1, 1, 3, 3))


@pytest.mark.parametrize("fails_at", ["server", "tail"])
def test_a_cache_of_which_some_parts_saw_a_call_that_failed_is_not_gone_on_with(fails_at, monkeypatch):
    split = SplitModel.from_model(decoder("llama")).eval()
    ids = batch(None)["input_ids"]
    link = split.boundary.link

    def lost(*args, **kwargs):
        raise ConnectionError("lost")

    with torch.no_grad():
        cache = split(ids[:, :3], use_cache=True).past_key_values
        with monkeypatch.context() as patch, pytest.raises(ConnectionError):
            owner, name = (link, "exchange") if fails_at == "server" else (split.client_tail.model, "forward")
            patch.setattr(owner, name, lost)
            split(ids[:, 3:4], past_key_values=cache)
        with pytest.raises(ValueError, match="generate from the beginning"):
            split(ids[:, 3:4], past_key_values=cache)


def test_a_cache_is_refused_with_gradients_and_for_other_rows_before_it_changes():
    split = SplitModel.from_model(decoder("llama")).eval()
    ids = batch(None)["input_ids"]
    cache = split.new_cache()
    with pytest.raises(ValueError, match="call the model under torch.no_grad"):
        split(ids[:, :3], past_key_values=cache)
    with torch.no_grad():
        split(ids[:, :3], past_key_values=cache)
        with pytest.raises(ValueError, match=f"1 rows came to a cache of {len(ids)}"):
            split(ids[:1, 3:], past_key_values=cache)
        found = split(ids[:, 3:], past_key_values=cache).logits
        assert (found - split(ids).logits[:, 3:]).abs().max() <= 1e-5


def test_a_cache_may_be_collected_when_the_link_is_gone(monkeypatch):
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    monkeypatch.setattr(sys, "excepthook", lambda *error: ignored.append(error))
    split = SplitModel.from_model(decoder("llama"))

    class Gone:
        def exchange(self, blob: bytes) -> bytes:
            raise ConnectionError("gone")

    cache = split.new_cache()
    split.boundary.link = Gone()
    del cache
    gc.collect()
    assert not ignored
