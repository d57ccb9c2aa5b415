"""Memory of parties and computation of steps: estimates compared with measured peaks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tiny import arguments
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from hf_federated._compat import enable_activation_checkpointing
from hf_federated.experiments.estimate.recipe_estimate import estimate_recipe
from hf_federated.experiments.estimate.sizes import EstimateOptions
from hf_federated.experiments.estimate.step_cost import checkpoint_activations, model_pass, step_cost, token_ids
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.recipe.recipe import load_recipe


LLAMA = LlamaConfig(
    vocab_size=2000, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
)
BERT = BertConfig(vocab_size=2000, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4)
T5 = T5Config(
    vocab_size=2000, d_model=128, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
)
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=16)
# Model, adapter and training arguments.
STEPS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LLAMA, None, {}),
    "lora": (LLAMA, LORA, {}),
    "prefix": (LLAMA, PREFIX, {}),
    "bfloat16": (LLAMA, None, {"bf16": True}),
    "accumulation": (LLAMA, None, {"gradient_accumulation_steps": 2}),
    "checkpointing": (LLAMA, None, {}),
    "checkpointing, lora": (LLAMA, LORA, {}),
    "sgd": (LLAMA, None, {"optim": "sgd"}),
    "adafactor": (LLAMA, None, {"optim": "adafactor"}),
    "bert": (BERT, None, {}),
    "t5": (T5, None, {}),
}
CLASSES = {
    LlamaConfig: LlamaForCausalLM,
    BertConfig: BertForSequenceClassification,
    T5Config: T5ForConditionalGeneration,
}


def measured_bytes(function: Callable[[], None]) -> tuple[int, int]:
    """The largest number of bytes that torch allocates during a function, and those that are alive after it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    live = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, live


@pytest.mark.parametrize(
    "name", [item if item == "lora" else pytest.param(item, marks=pytest.mark.slow) for item in STEPS]
)
def test_memory_of_a_step_is_the_measured_peak(tmp_path, name):
    config, adapter, changes = STEPS[name]
    args = arguments(tmp_path, **changes)

    def build() -> Any:
        model = CLASSES[type(config)](copy.deepcopy(config))
        if adapter is not None:
            model = get_peft_model(model, copy.deepcopy(adapter))
        return model.train()

    def inputs() -> dict[str, torch.Tensor]:
        return {"input_ids": token_ids((4, 64)), "labels": token_ids((4,) if config is BERT else (4, 64))}

    model, values = build(), inputs()
    if "checkpointing" in name:
        enable_activation_checkpointing(model, {"use_reentrant": False})
    optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
    optimizer = optimizer_class([item for item in model.parameters() if item.requires_grad], **kwargs)

    def train() -> None:
        for _ in range(args.gradient_accumulation_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = model(**values).loss
            loss.backward()

    peak, _ = measured_bytes(train)
    state = measured_bytes(optimizer.step)[1]
    with init_empty_weights(include_buffers=True):
        empty = build()
    if "checkpointing" in name:
        checkpoint_activations(empty)
    cost = step_cost(empty, args, lambda: model_pass(empty, inputs()))
    assert cost.peak - cost.weights == pytest.approx(peak, rel=0.02)
    # The number of steps of each parameter is a tensor, too.
    assert cost.optimizer_state == pytest.approx(state, rel=0.02, abs=4096)
    assert cost.weights == sum(item.nbytes for item in (*model.parameters(), *model.buffers()))
    assert cost.gradients == sum(item.nbytes for item in model.parameters() if item.requires_grad)


def test_computation_of_a_step_is_six_operations_for_each_parameter_and_token(tmp_path):
    """Without attention and embeddings: two operations in the forward pass, and twice as many in the backward pass."""
    with init_empty_weights(include_buffers=True):
        model = LlamaForCausalLM(LLAMA)
    embedding = model.get_input_embeddings().weight.numel()
    cost = step_cost(
        model,
        arguments(tmp_path),
        lambda: model_pass(model, {"input_ids": token_ids((1, 8)), "labels": token_ids((1, 8))}),
    )
    assert cost.flops == pytest.approx(6 * 8 * (cost.num_parameters - embedding), rel=0.05)
    assert cost.forward_flops == pytest.approx(cost.flops / 3, rel=0.05)


@pytest.fixture
def large_models(model_dir, llama_dir, tmp_path) -> dict[str, Any]:
    """Models whose weights and activations need megabytes, with the tokenizers of the small models."""
    folders = {}
    for name, folder, model_class in (("ENCODER", model_dir, AutoModel), ("DECODER", llama_dir, AutoModelForCausalLM)):
        config = AutoConfig.from_pretrained(folder)
        config.update({"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64})
        config.update({"num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 4000})
        folders[name] = tmp_path / name
        model_class.from_config(config).save_pretrained(folders[name])
        AutoTokenizer.from_pretrained(folder).save_pretrained(folders[name])
    return folders


ROUNDS = ["data={path: LONG, test_split: test}", "task={max_length: 64}", "model.name_or_path=ENCODER"]
ROUNDS += ["partition={name: iid, num_clients: 2}", "training.eval_strategy=no", "training.num_train_epochs=2"]
CAUSAL = [*ROUNDS, "model.name_or_path=DECODER", "federation=null", "partition.num_clients=1"]
CAUSAL.append("task={name: summarization, max_source_length: 60, max_target_length: 4}")
RUNS = {
    "averaging": ROUNDS,
    "averaging, sgd": [*ROUNDS, "training.optim=sgd"],
    "distillation": [*ROUNDS, "federation.distillation=dsfl", "federation.num_rounds=3", "public={share: 0.5}"],
    "split": [*CAUSAL, "split={strategy: serial}"],
    "split, lora": [*CAUSAL, "split={strategy: serial}", "model.lora={r: 4}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_memory_of_all_parties_is_within_a_fifth_of_the_measured_peak(recipe_path, large_models, tmp_path, name):
    """One process has all parties, which share some tensors, and one client trains at a time."""
    text = "a dull film and a plot " * 20
    data = Dataset.from_dict({"text": [text] * 32, "source": [text] * 32, "label": [0, 1] * 16, "target": ["a"] * 32})
    for split in ("train", "test"):
        data.to_parquet(tmp_path / "long" / f"{split}.parquet")
    settings = [text.replace("LONG", str(tmp_path / "long")) for text in RUNS[name]]
    for model, folder in large_models.items():
        settings = [text.replace(model, str(folder)) for text in settings]
    loaded = load_recipe(recipe_path, settings)
    length = len(build_run(loaded).data.train["0"][0]["input_ids"])
    client, server = estimate_recipe(loaded, EstimateOptions(sequence_length=length)).parties
    peak, _ = measured_bytes(build_run(loaded).trainer.train)
    if name.startswith("averaging"):
        # The client trains the model of the server, which exists before the measurement, from the global state.
        expected = client.total - client.weights + server.exchanged - client.exchanged
    elif name == "distillation":
        # Each of two clients has a model and an optimizer. The server keeps its optimizer and two states.
        training = client.total - client.weights - client.optimizer_state - client.exchanged
        persistent = 2 * (client.weights + client.optimizer_state) + server.optimizer_state + server.exchanged
        expected = training + persistent
    else:
        # The client has copies of the trained parameters of the model, which exists before the measurement.
        copied = client.gradients - client.weights
        expected = client.total + copied + server.total - server.weights
    assert expected == pytest.approx(peak, rel=0.2)
