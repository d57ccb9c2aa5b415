"""Tests of the exchanged values: adapters without the base model, trainable parameters, tied weights once."""

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


# name -> (function that creates the config, words of which each exchanged name contains one)
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


def randomized(state: dict[str, torch.Tensor], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator).to(value.dtype) if value.is_floating_point() else value + 1
        for name, value in state.items()
    }


# ---- Adapters


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("model", list(MODELS))
def test_adapter_is_exchanged_without_base_model(model, method):
    peft_model = adapted(model, method)
    exchange = Exchange(peft_model)
    assert exchange.kind == "adapter"
    exchanged = set(exchange.names)
    assert exchanged == {name for name, parameter in peft_model.named_parameters() if parameter.requires_grad}
    head = "modules_to_save" if MODELS[model][1] == "SEQ_CLS" else None
    words = METHODS[method][1] + ((head,) if head else ())
    assert all(any(word in name for word in words) for name in exchanged)
    for word in words:
        assert any(word in name for name in exchanged), f"no exchanged name contains {word}"
    # No exchanged tensor shares storage with the base model.
    base = {parameter.data_ptr() for parameter in peft_model.parameters() if not parameter.requires_grad}
    assert base and base.isdisjoint(parameter.data_ptr() for parameter in exchange.parameters.values())
    assert all(value.data_ptr() not in base for value in exchange.read().values())


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("model", list(MODELS))
def test_writing_adapter_state_reproduces_sender_weights(model, method):
    sender, receiver = adapted(model, method), adapted(model, method)
    untouched = {name: p.detach().clone() for name, p in receiver.named_parameters() if not p.requires_grad}
    state = randomized(Exchange(sender).read())
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
def test_optimizer_step_changes_only_exchanged_parameters(method):
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
    # After the write, the prompt encoder again produces the prompt of the written state.
    exchange.write(before)
    assert all(torch.equal(p, everything[name]) for name, p in model.named_parameters())


def test_only_active_adapter_is_exchanged():
    model = adapted("llama", "lora")
    model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2))
    model.set_adapter("other")
    names = Exchange(model).names
    assert names and all(".other." in name for name in names)


def test_modules_to_save_are_exchanged_with_adapter():
    model = get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["lm_head"]))
    saved = [name for name in Exchange(model).names if "lora" not in name]
    assert saved == ["base_model.model.lm_head.modules_to_save.default.weight"]


def test_adapter_mode_requires_peft_model():
    with pytest.raises(ValueError, match="exchange='adapter' needs a PEFT model, got BertForSequenceClassification"):
        Exchange(tiny_model(), "adapter")


@pytest.mark.parametrize("mode", ["auto", "adapter"])
def test_error_names_trainable_parameter_outside_adapter(mode):
    model = adapted("llama", "lora")
    model.base_model.model.lm_head.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 parameters outside the adapter are.*lm_head\.weight.*'trainable'"):
        Exchange(model, mode)
    assert "base_model.model.lm_head.weight" in Exchange(model, "trainable").names


def test_adapter_loaded_for_inference_raises():
    model = adapted("llama", "lora")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter of the model requires a gradient.*`is_trainable=True`"):
        Exchange(model)


# ---- Plain models


def test_plain_model_exchanges_all_parameters_bit_for_bit():
    sender, receiver = tiny_model(seed=1), tiny_model(seed=2)
    exchange = Exchange(receiver)
    assert exchange.kind == "trainable"
    assert exchange.names == [name for name, _ in receiver.named_parameters()]
    assert exchange.num_values == sum(parameter.numel() for parameter in receiver.parameters())
    exchange.write(Exchange(sender).read())
    assert same_weights(sender, receiver)


@pytest.mark.parametrize("mode", ["auto", "trainable"])
def test_frozen_layers_are_not_exchanged(mode):
    model = tiny_model()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    names = Exchange(model, mode).names
    assert names == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert not any("embeddings" in name or ".layer.0." in name for name in names)


def test_mode_all_exchanges_complete_state_dict():
    model = tiny_model()
    model.bert.embeddings.requires_grad_(False)
    exchange = Exchange(model, "all")
    assert set(exchange.names) == set(model.state_dict())
    assert set(exchange.trainable) == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("mode", ["auto", "all"])
def test_tied_weights_are_exchanged_once_and_stay_tied(mode):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    assert model.lm_head.weight is model.transformer.wte.weight
    exchange = Exchange(model, mode)
    assert [name for name in exchange.names if "wte" in name or "lm_head" in name] == ["transformer.wte.weight"]
    exchange.write(randomized(exchange.read()))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert exchange.num_values == sum(parameter.numel() for parameter in model.parameters())


def test_read_returns_copy():
    model = tiny_model()
    exchange = Exchange(model)
    state = exchange.read()
    for value in state.values():
        value.fill_(7.0)
    assert same_weights(model, tiny_model())
    assert not any(value.requires_grad for value in state.values())


def test_write_copies_values():
    model = tiny_model()
    exchange = Exchange(model)
    state = randomized(exchange.read())
    exchange.write(state)
    written = exchange.read()
    for value in state.values():
        value.zero_()
    assert all(torch.equal(value, written[name]) for name, value in exchange.read().items())


def test_write_keeps_parameter_objects():
    """Optimizers hold references to the parameter objects."""
    model = tiny_model()
    parameters = list(model.parameters())
    exchange = Exchange(model)
    exchange.write(randomized(exchange.read()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_write_casts_state_to_model_dtype():
    model = tiny_model().bfloat16()
    exchange = Exchange(model)
    state = randomized({name: value.float() for name, value in exchange.read().items()})
    exchange.write(state)
    for name, value in exchange.read().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, state[name].bfloat16())


def test_state_with_missing_name_raises_and_changes_nothing():
    model = tiny_model()
    exchange = Exchange(model)
    state = randomized(exchange.read())
    del state["classifier.bias"]
    with pytest.raises(KeyError, match="The state lacks 'classifier.bias', which the model exchanges"):
        exchange.write(state)
    assert same_weights(model, tiny_model())


def test_model_without_trainable_parameters_raises():
    model = tiny_model().requires_grad_(False)
    for mode in ("auto", "trainable", "all"):
        with pytest.raises(ValueError, match="No parameter of the model requires a gradient"):
            Exchange(model, mode)


# ---- Buffers


class Buffered(nn.Module):
    """A trainable and a frozen batch norm with running statistics, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.BatchNorm1d(2)
        self.frozen = nn.BatchNorm1d(2).requires_grad_(False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.cache += values.detach().mean(dim=0)
        return self.frozen(self.trained(values))


def test_buffers_of_trainable_modules_are_exchanged():
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


def test_write_restores_buffers_that_are_not_exchanged():
    model = Buffered()
    model.trained.bias.data.fill_(1)  # otherwise the mean of the frozen layer can stay exactly 0
    exchange = Exchange(model)
    state = exchange.read()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for _ in range(2):
        model(torch.randn(8, 2) + 3)
        assert all(not torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        exchange.write(state)
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_exchange_follows_model_to_new_device():
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


def test_shared_state_is_used_without_a_copy_and_earlier_tensors_stay():
    model = Buffered()
    exchange = Exchange(model, "all")
    parameters = list(model.parameters())
    before = exchange.tensors
    kept = {name: value.clone() for name, value in before.items()}
    state = {name: value + 1 for name, value in kept.items()}
    exchange.share(state)
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert all(value.data_ptr() == state[name].data_ptr() for name, value in exchange.tensors.items())
    assert all(value.equal(kept[name]) for name, value in before.items())
    exchange.share({name: value.double() for name, value in kept.items()})
    assert all(value.dtype == kept[name].dtype and value.equal(kept[name]) for name, value in exchange.tensors.items())


def changed_parts() -> dict[str, Callable[[nn.Module], object]]:
    """Changes of the trainable parameters of a model with the modules `one`, `two` and `inner.three`."""
    return {
        "'two.weight' ceased": lambda model: model.two.weight.requires_grad_(False),
        "'frozen.weight' began": lambda model: model.frozen.weight.requires_grad_(True),
        "'added' began": lambda model: model.register_parameter("added", nn.Parameter(torch.ones(1))),
        "'inner.more.weight' began": lambda model: model.inner.add_module("more", nn.Linear(1, 1, bias=False)),
        "'inner.three.weight' ceased": lambda model: setattr(model.inner, "three", None),
        "'two.weight' ceased ": lambda model: setattr(model.two, "weight", model.one.weight),
    }


@pytest.mark.parametrize("words", list(changed_parts()))
def test_change_of_the_trained_parameters_is_found_after_trainings_without_a_change(words):
    model = nn.Module()
    model.one, model.two, model.frozen = (nn.Linear(1, 1, bias=False) for _ in range(3))
    model.inner = nn.Module()
    model.inner.three = nn.Linear(1, 1, bias=False)
    model.inner.again = model.inner.three
    model.frozen.weight.requires_grad_(False)
    exchange = Exchange(model)
    for _ in range(2):
        exchange.check_unchanged(model)
        model.one.weight.data = torch.zeros(1, 1)
        model.inner.three.eval()
    changed_parts()[words](model)
    with pytest.raises(ValueError, match=words.strip()):
        exchange.check_unchanged(model)


def test_model_with_its_own_list_of_parameters_is_checked_by_its_list():
    class Chooses(nn.Linear):
        hides_bias = False

        def named_parameters(self, *args, **kwargs):
            return [
                item for item in super().named_parameters(*args, **kwargs) if not self.hides_bias or item[0] != "bias"
            ]

    model = Chooses(1, 1)
    exchange = Exchange(model)
    exchange.check_unchanged(model)
    model.hides_bias = True
    with pytest.raises(ValueError, match="'bias' ceased to train"):
        exchange.check_unchanged(model)
