"""What travels of a model: adapters without their base, trainable parameters, tied weights once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from tiny import rows, same_weights, tiny_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hf_federated.adapters import Exchange


LLAMA = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}


def llama() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**LLAMA))


def llama_classifier() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForSequenceClassification(LlamaConfig(**LLAMA))


# name -> (config for a model, words one of which is in every key that travels)
METHODS: dict[str, tuple[Callable[[str], PeftConfig], tuple[str, ...]]] = {
    "lora": (lambda task: LoraConfig(task_type=task, r=2), ("lora_A", "lora_B")),
    "ia3": (lambda task: IA3Config(task_type=task), ("ia3_l",)),
    "prompt tuning": (lambda task: PromptTuningConfig(task_type=task, num_virtual_tokens=3), ("prompt_encoder",)),
    "p-tuning with an MLP": (
        lambda task: PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=8),
        ("prompt_encoder",),
    ),
    "p-tuning with an LSTM": (
        lambda task: PromptEncoderConfig(
            task_type=task,
            num_virtual_tokens=3,
            encoder_hidden_size=8,
            encoder_num_layers=1,
            encoder_reparameterization_type="LSTM",
        ),
        ("prompt_encoder",),
    ),
    "prefix tuning": (lambda task: PrefixTuningConfig(task_type=task, num_virtual_tokens=3), ("prompt_encoder",)),
    "prefix tuning with a projection": (
        lambda task: PrefixTuningConfig(
            task_type=task, num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
        ),
        ("prompt_encoder",),
    ),
}
MODELS = {
    "bert": (tiny_model, "SEQ_CLS"),
    "llama": (llama, "CAUSAL_LM"),
    "llama classifier": (llama_classifier, "SEQ_CLS"),
}


def adapted(model: str, method: str) -> nn.Module:
    build, task = MODELS[model]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(build(), METHODS[method][0](task))


def randomised(state: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype) if value.is_floating_point() else value + 1
        for name, value in state.items()
    }


# ---- Adapters


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("model", list(MODELS))
def test_the_adapter_travels_and_the_base_does_not(model, method):
    peft_model = adapted(model, method)
    exchange = Exchange(peft_model)
    assert exchange.kind == "adapter"
    travels = set(exchange.names)
    assert travels == {name for name, parameter in peft_model.named_parameters() if parameter.requires_grad}
    head = "modules_to_save" if MODELS[model][1] == "SEQ_CLS" else None
    words = METHODS[method][1] + ((head,) if head else ())
    assert all(any(word in name for word in words) for name in travels)
    for word in words:
        assert any(word in name for name in travels), f"nothing of {word} travels"
    # No tensor of the base, by its storage.
    base = {parameter.data_ptr() for parameter in peft_model.parameters() if not parameter.requires_grad}
    assert base and base.isdisjoint(parameter.data_ptr() for parameter in exchange.parameters.values())
    assert all(value.data_ptr() not in base for value in exchange.read().values())


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("model", list(MODELS))
def test_an_adapter_is_written_as_it_was_read(model, method):
    sender, receiver = adapted(model, method), adapted(model, method)
    untouched = {name: p.detach().clone() for name, p in receiver.named_parameters() if not p.requires_grad}
    state = randomised(Exchange(sender).read())
    Exchange(sender).write(state)
    exchange = Exchange(receiver)
    exchange.write(Exchange(sender).read())
    assert same_weights(sender, receiver)
    read = exchange.read()
    assert list(read) == list(state) and all(torch.equal(read[name], state[name]) for name in state)
    for name, parameter in receiver.named_parameters():
        if name in untouched:
            assert torch.equal(parameter, untouched[name])


@pytest.mark.parametrize("method", list(METHODS))
def test_what_an_optimizer_step_changes_is_all_that_travels(method):
    model = adapted("llama", method)
    exchange = Exchange(model)
    before = exchange.read()
    everything = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor(rows(4)["input_ids"])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, everything[name])}
    assert changed and changed <= set(exchange.names)
    # The reparameterised prompt that a forward pass uses is again that of the state sent.
    exchange.write(before)
    assert all(torch.equal(p, everything[name]) for name, p in model.named_parameters())


def test_only_the_active_adapter_travels():
    model = adapted("llama", "lora")
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2))
    model.set_adapter("other")
    names = Exchange(model).names
    assert names and all(".other." in name for name in names)


def test_modules_to_save_travel_beside_the_adapter():
    model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["lm_head"]))
    saved = [name for name in Exchange(model).names if "lora" not in name]
    assert saved == ["base_model.model.lm_head.modules_to_save.default.weight"]


def test_asking_for_the_adapter_of_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="exchange='adapter' needs a PEFT model, got BertForSequenceClassification"):
        Exchange(tiny_model(), "adapter")


@pytest.mark.parametrize("what", ["auto", "adapter"])
def test_parameters_that_train_outside_the_adapter_are_refused_by_name(what):
    model = adapted("llama", "lora")
    model.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 parameters outside the adapter train.*lm_head\.weight.*'trainable'"):
        Exchange(model, what)
    assert "base_model.model.lm_head.weight" in Exchange(model, "trainable").names


def test_an_adapter_loaded_for_inference_is_refused():
    model = adapted("llama", "lora")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient.*`is_trainable=True`"):
        Exchange(model)


# ---- Plain models


def test_all_parameters_of_a_plain_model_travel_bit_for_bit():
    sender, receiver = tiny_model(seed=1), tiny_model(seed=2)
    exchange = Exchange(receiver)
    assert exchange.kind == "trainable"
    assert exchange.names == [name for name, _ in receiver.named_parameters()]
    assert exchange.num_values == sum(parameter.numel() for parameter in receiver.parameters())
    exchange.write(Exchange(sender).read())
    assert same_weights(sender, receiver)


@pytest.mark.parametrize("what", ["auto", "trainable"])
def test_frozen_layers_never_travel(what):
    model = tiny_model()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    names = Exchange(model, what).names
    assert names == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not any("embeddings" in name or ".layer.0." in name for name in names)


def test_everything_travels_when_asked_for():
    model = tiny_model()
    model.bert.embeddings.requires_grad_(False)
    exchange = Exchange(model, "all")
    assert set(exchange.names) == set(model.state_dict())
    assert set(exchange.trainable) == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("what", ["auto", "all"])
def test_tied_weights_travel_once_and_stay_tied(what):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    assert model.lm_head.weight is model.transformer.wte.weight
    exchange = Exchange(model, what)
    assert [name for name in exchange.names if "wte" in name or "lm_head" in name] == ["transformer.wte.weight"]
    exchange.write(randomised(exchange.read()))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert exchange.num_values == sum(parameter.numel() for parameter in model.parameters())


def test_what_was_read_is_a_copy():
    model = tiny_model()
    exchange = Exchange(model)
    state = exchange.read()
    for value in state.values():
        value.fill_(7.0)
    assert same_weights(model, tiny_model())
    assert not any(value.requires_grad for value in state.values())


def test_what_was_written_may_change_afterwards():
    model = tiny_model()
    exchange = Exchange(model)
    state = randomised(exchange.read())
    exchange.write(state)
    written = exchange.read()
    for value in state.values():
        value.zero_()
    assert all(torch.equal(value, written[name]) for name, value in exchange.read().items())


def test_writing_keeps_the_parameters_and_their_optimizer():
    model = tiny_model()
    parameters = list(model.parameters())
    exchange = Exchange(model)
    exchange.write(randomised(exchange.read()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_a_state_in_another_dtype_is_cast():
    model = tiny_model().bfloat16()
    exchange = Exchange(model)
    state = randomised({name: value.float() for name, value in exchange.read().items()})
    exchange.write(state)
    for name, value in exchange.read().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, state[name].bfloat16())


def test_a_state_that_lacks_a_name_is_refused_and_changes_nothing():
    model = tiny_model()
    exchange = Exchange(model)
    state = randomised(exchange.read())
    del state["classifier.bias"]
    with pytest.raises(KeyError, match="The state lacks 'classifier.bias', which the model exchanges"):
        exchange.write(state)
    assert same_weights(model, tiny_model())


def test_a_model_that_trains_nothing_is_refused():
    model = tiny_model().requires_grad_(False)
    for what in ("auto", "trainable", "all"):
        with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
            Exchange(model, what)


# ---- Buffers


class Buffered(nn.Module):
    """A trained and a frozen normalisation with running statistics, and a buffer outside the state."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.BatchNorm1d(2)
        self.frozen = nn.BatchNorm1d(2).requires_grad_(False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.cache += values.detach().mean(dim=0)
        return self.frozen(self.trained(values))


def test_buffers_travel_with_the_modules_that_train():
    exchange = Exchange(Buffered())
    statistics = ["running_mean", "running_var", "num_batches_tracked"]
    assert exchange.names == [f"trained.{name}" for name in ["weight", "bias", *statistics]]
    assert exchange.read()["trained.num_batches_tracked"].dtype == torch.int64
    everything = Exchange(Buffered(), "all").names
    assert set(everything) == set(Buffered().state_dict()) and "cache" not in everything


def test_integer_buffers_are_written_exactly():
    model = Buffered()
    exchange = Exchange(model)
    state = exchange.read()
    state["trained.num_batches_tracked"] = torch.tensor(2**53 + 1)
    exchange.write(state)
    assert model.trained.num_batches_tracked.item() == 2**53 + 1


def test_buffers_that_stay_are_put_back_with_every_write():
    model = Buffered()
    exchange = Exchange(model)
    state = exchange.read()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):
        model(torch.randn(8, 2) + 3)
        assert all(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        exchange.write(state)
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_model_that_is_moved_is_read_and_written_where_it_is():
    model = Buffered()
    exchange = Exchange(model)
    storage = model.trained.weight.data_ptr()
    model.to(torch.device("cpu", 0))
    assert model.trained.weight.data_ptr() != storage
    state = {name: torch.full_like(value, 3) for name, value in exchange.read().items()}
    model(torch.randn(8, 2))
    exchange.write(state)
    assert model.trained.weight.eq(3).all() and model.trained.running_mean.eq(3).all()
    assert model.cache.eq(0).all()
    model.trained.weight.data.fill_(5)
    assert exchange.read()["trained.weight"].eq(5).all()
