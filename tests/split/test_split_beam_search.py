"""Beam search with a split model gives the tokens of the full model, and the server reorders its part of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chatglm_layouts import ChatGlm, ChatGlm2, chatglm
from decoders import MORE_DECODERS, WITHOUT_KEYS, batch, decoder, slow
from loopback import Relay, certificates, join, serve
from networked import Run
from split_runs import STRATEGIES, clients_of, whole_model
from test_split_adapters import ADAPTERS, NO_PREFIX, create_adapted
from test_split_chatglm import chatglm_input_ids, with_prefixes
from transformers import GenerationMixin, PreTrainedModel, TrainerCallback
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_federated import SplitConfig, SplitModel
from hf_federated._compat import CACHE_NAME
from hf_federated.split import LocalLink
from hf_federated.split.messages import Forget, Forward, read_request


NUM_TOKENS = 8
BEAMS = {"num_beams": 4, "max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "beams": {},
    "all beams returned": {"num_return_sequences": 4},
    "early stopping": {"early_stopping": True, "eos_token_id": list(range(3, 37))},
    "no early stopping": {"early_stopping": "never", "eos_token_id": list(range(3, 37))},
    "sampled": {"do_sample": True, "top_p": 0.9, "temperature": 1.5},
    "no repetitions": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
}


def prompts(padding: str | None = "left", **arguments: Any) -> dict[str, torch.Tensor]:
    inputs = batch(padding, **arguments)
    return {
        "input_ids": inputs["input_ids"],
        "attention_mask": inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])),
    }


def record(split: SplitModel) -> list[Forward | Forget]:
    """Record the requests of a split model with an in-process server."""
    requests: list[Any] = []
    split.boundary.link = LocalLink(
        split.boundary.link.server, lambda message, _: requests.append(read_request(message))
    )
    return requests


def assert_caches_were_reordered(requests: list[Any], num_sequences: int) -> None:
    """Assert that each token after the first has an order, and that beams were dropped, so that the order matters."""
    first, *others = [message for message in requests if isinstance(message, Forward)]
    assert first.reorder is None and all(len(message.reorder) == num_sequences for message in others)
    assert any(len(message.reorder.unique()) < num_sequences for message in others)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cut", [(2, 1), pytest.param((0, 2), marks=pytest.mark.slow)], ids=str)
def test_beam_search_matches_the_full_model(cut, variant):
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model, *cut)
    settings = {**BEAMS, **VARIANTS[variant]}
    for padding in (None, "left"):
        generated = []
        requests = record(split)
        for model in (full_model, split):
            torch.manual_seed(3)
            generated.append(model.generate(**prompts(padding), **settings))
        assert torch.equal(*generated)
        assert_caches_were_reordered(requests, 3 * 4)
        assert len(generated[0]) == 3 * settings.get("num_return_sequences", 1)
        num_exchanges = sum(isinstance(message, Forward) for message in requests)
        assert num_exchanges < NUM_TOKENS if variant == "early stopping" else num_exchanges == NUM_TOKENS


@pytest.mark.parametrize(
    "name", ["gpt2", "qwen2-windows", *slow(["opt-projected", "glm", *WITHOUT_KEYS, *MORE_DECODERS])]
)
def test_beam_search_of_other_families_matches_the_full_model(name):
    full_model = decoder(name)
    split = SplitModel.from_model(full_model, 1, 2)
    for padding in (None, "left"):
        requests = record(split)
        expected = full_model.generate(**prompts(padding), **BEAMS)
        assert torch.equal(split.generate(**prompts(padding), **BEAMS), expected)
        assert_caches_were_reordered(requests, 3 * 4)
        assert torch.equal(split.generate(**prompts(padding), use_cache=False, **BEAMS), expected)


def with_old_name(prepare_inputs: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """PEFT 0.21 reads the cache under this name. With transformers 5.24 it would generate without the prefix."""

    def prepare(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare_inputs(*args, **kwargs)
        return {"past_key_values" if name == CACHE_NAME else name: value for name, value in inputs.items()}

    return prepare


@pytest.mark.parametrize("kind", ["prefix", "lora"])
@pytest.mark.parametrize("name", ["llama", *slow(MORE_DECODERS)])
def test_beam_search_with_adapters_matches_peft_on_the_full_model(name, kind):
    if kind == "prefix" and name in NO_PREFIX:
        pytest.skip("PEFT does not support prefixes of this model.")
    split, full_model = create_adapted(name, ADAPTERS[kind](name))
    requests = record(split)
    inputs = prompts(None if kind == "prefix" else "left")
    full_model.base_model_prepare_inputs_for_generation = with_old_name(
        full_model.base_model_prepare_inputs_for_generation
    )
    expected = full_model.generate(**inputs, **BEAMS)
    assert torch.equal(split.generate(**inputs, **BEAMS), expected)
    assert_caches_were_reordered(requests, 3 * 4)
    assert not torch.equal(decoder(name).generate(**inputs, **BEAMS), expected)


class Generating(GenerationMixin):
    """Generation with a model class of ChatGLM, without a cache."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=super().forward(input_ids, prefix=self.prefix).logits)

    def repeated(self, prefix: list[tuple[torch.Tensor, torch.Tensor]], num_beams: int) -> None:
        """Repeat the prefix of a batch of two sequences for each beam."""
        self.prefix = [tuple(states.repeat(1, num_beams, 1, 1) for states in pair) for pair in prefix]


@pytest.mark.parametrize("num_virtual_tokens", [0, 3])
@pytest.mark.parametrize("generation", [1, 2])
def test_beam_search_of_chatglm_matches_the_full_model_without_a_cache(generation, num_virtual_tokens):
    full_model = chatglm(generation)
    split = SplitModel.from_model(full_model, 2, 1)
    prefix = with_prefixes(split, num_virtual_tokens) if num_virtual_tokens else None
    base: type[PreTrainedModel] = ChatGlm if generation == 1 else ChatGlm2
    full_model.__class__ = type("GeneratingChatGlm", (Generating, base), {"prefix": None})
    full_model.generation_config = split.generation_config
    if prefix is not None:
        full_model.repeated(prefix, 4)
    requests = record(split)
    # The special tokens of a prompt must not be generated again.
    settings = {**BEAMS, "suppress_tokens": [36, 37, 38]}
    expected = full_model.generate(chatglm_input_ids(), use_cache=False, **settings)
    assert torch.equal(split.generate(chatglm_input_ids(), **settings), expected)
    assert_caches_were_reordered(requests, 2 * 4)


def test_the_prompts_are_one_exchange_and_each_further_token_of_all_beams_is_one_exchange():
    split = SplitModel.from_model(decoder("llama"))
    requests = record(split)
    split.generate(**prompts(), **BEAMS)
    assert [type(message) for message in requests] == [Forward] * NUM_TOKENS + [Forget]
    assert all(message.batch_size == 3 * 4 for message in requests[:-1])
    assert [len(message.hidden["values"]) for message in requests[:-1]] == [3 * 4 * 9] + [3 * 4] * (NUM_TOKENS - 1)


def test_beam_search_over_broken_connections_matches_the_full_model(tmp_path):
    """A repeated order would change the cache twice. The connection breaks after the server processed a message."""
    full_model = decoder("llama")
    split = SplitModel.from_model(decoder("llama"), client_id="north")
    body, messages = split.boundary.link.server, []
    tls = certificates(tmp_path, ["north"])

    def answer(client_id: str, message: bytes) -> bytes:
        answered = body.answer(message)
        messages.append(read_request(message))
        if len(messages) in (3, 5):
            relay.cut()
        return answered

    with serve(tls, answer, clients=["north"]) as server, Relay(server) as relay, join(tls, relay) as link:
        split.boundary.link = link
        generated = split.generate(**prompts(), **BEAMS)
    assert torch.equal(generated, full_model.generate(**prompts(), **BEAMS))
    assert_caches_were_reordered(messages, 3 * 4)
    assert sum(isinstance(message, Forward) for message in messages) == NUM_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_beam_search_of_clients_of_a_networked_run_matches_the_full_model(strategy, tmp_path):
    """Clients of a run generate at the same time, before the first step, with one body or a body for each client."""
    full_model = whole_model(pad_token_id=0, initializer_range=0.5)
    run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy=strategy, average_every=1), model=full_model)
    ids = torch.tensor([[5, 6, 7], [9, 3, 8]])
    generated = {}

    class Generate(TrainerCallback):
        def __init__(self, client_id: str) -> None:
            self.client_id = client_id

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            generated[self.client_id] = run.trainers[self.client_id].model.eval().generate(ids, **BEAMS)

    for client_id, trainer in run.trainers.items():
        trainer.add_callback(Generate(client_id))
    expected = full_model.generate(ids, **BEAMS)
    run.train()
    assert not run.errors and len(generated) == 2
    assert all(torch.equal(tokens, expected) for tokens in generated.values())


def test_reordered_cache_continues_the_selected_sequences():
    """Orders between two calls are combined, and a cache that `generate` returned can be used again."""
    split = SplitModel.from_model(decoder("llama"))
    requests = record(split)
    ids = batch(None)["input_ids"]
    with torch.no_grad():
        cache = split(ids[:, :5], use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        cache.reorder_cache(torch.tensor([1, 0, 0]))
        actual = split(ids[:, 5:], past_key_values=cache).logits
        expected = split(torch.cat((ids[[0, 2, 2], :5], ids[:, 5:]), dim=1)).logits[:, 5:]
        assert (actual - expected).abs().max() <= 1e-6
        assert requests[1].reorder.tolist() == [0, 2, 2]
        split(ids[:, :1], past_key_values=cache)
    assert requests[-1].reorder is None


def test_reordered_cache_of_chatglm_continues_the_selected_sequences():
    """The context lengths and positions of the first generation depend on all tokens of a sequence."""
    split = SplitModel.from_model(chatglm(1))
    ids = chatglm_input_ids()
    with torch.no_grad():
        cache = split.new_cache()
        split(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        actual = split(ids[:, :1], past_key_values=cache).logits
        expected = split(torch.cat((ids[[1, 0]], ids[:, :1]), dim=1)).logits[:, -1:]
    assert (actual - expected).abs().max() <= 1e-6


def test_order_that_does_not_fit_the_cache_raises_error_on_client_and_server():
    split = SplitModel.from_model(decoder("llama"))
    requests = record(split)
    ids = batch(None)["input_ids"]
    split.new_cache().reorder_cache(torch.tensor([0]))  # an empty cache has no order
    with torch.no_grad():
        cache = split(ids[:, :5], use_cache=True).past_key_values
        with pytest.raises(ValueError, match="beam_idx has shape \\(2,\\), but the cache has 3 sequences"):
            cache.reorder_cache(torch.tensor([0, 1]))
        states = {"hidden": {"values": torch.zeros(2, 32)}, "batch_size": 2, "seen": 5, "cache_id": cache.cache_id}
        reorder = torch.tensor([1, 0], dtype=torch.int32)
        with pytest.raises(ValueError, match="The message has 2 sequences, but the cache has 3 sequences"):
            split.boundary.link.exchange(Forward("client", 0, 0, **states, reorder=reorder).to_bytes())
        # The rejected message did not change the cache of the server.
        actual = split(ids[:, 5:], past_key_values=cache).logits
        assert (actual - split(ids).logits[:, 5:]).abs().max() <= 1e-6
    assert not [message for message in requests if isinstance(message, Forward) and message.reorder is not None]
