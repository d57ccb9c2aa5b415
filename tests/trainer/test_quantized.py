"""QLoRA: adapters on a base model in 4 or 8 bits. The base model is neither sent nor changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language import language_model, texts, tokenizer
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.utils.integrations import dequantize_module_weight
from tiny import arguments
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DataCollatorForLanguageModeling

from hf_federated import FederatedCallback, FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.utils.lora_modules import RESIDUAL, find_lora_modules


pytest.importorskip("bitsandbytes")


def quantized_base(folder: Path, config: BitsAndBytesConfig) -> Any:
    # The CPU backend of bitsandbytes needs hidden sizes of at least 64.
    language_model(hidden_size=64).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    return prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)


def quantized_model(folder: Path, config: BitsAndBytesConfig) -> Any:
    base = quantized_base(folder, config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(
            base, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )


def tokenized(client_id: str, num_rows: int) -> Any:
    client_tokenizer = tokenizer()
    return (
        texts(client_id, num_rows)
        .map(lambda row: {"input_ids": client_tokenizer(row["text"])["input_ids"]})
        .remove_columns("text")
    )


CONFIGS = {
    "4 bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
    "4 bit, bfloat16": BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    ),
    "8 bit": BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_qlora_changes_and_sends_only_adapters(tmp_path, config) -> None:
    model = quantized_model(tmp_path / "base", config)
    assert any(parameter.dtype in (torch.uint8, torch.int8) for parameter in model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = FederatedTrainer(
        model=model,
        args=arguments(tmp_path / "run", learning_rate=1e-2),
        train_dataset=FederatedDataset.from_dict({"north": tokenized("north", 8), "south": tokenized("south", 5)}),
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        federation=FederatedConfig(num_rounds=2),
    )
    trainer.train()
    after = model.state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed and all("lora_" in name for name in changed)
    assert all("lora_" in name for name in trainer.exchange.names)
    adapter_bytes = sum(value.nbytes for name, value in after.items() if "lora_" in name)
    # Two clients and two rounds. Each message also has a header.
    assert 4 * adapter_bytes < trainer.ledger.bytes_up < 4 * (adapter_bytes + 3000)


class Logits(FederatedCallback):
    """Records the logits of the server and of the clients before a round."""

    def __init__(self) -> None:
        self.inputs = torch.arange(6)[None]
        self.server: list[torch.Tensor] = []
        self.clients: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def read(self, model: Any) -> torch.Tensor:
        # The model has no dropout. In evaluation mode, bitsandbytes changes the layout of weights in 4 bits.
        return model.train()(input_ids=self.inputs).logits

    def on_round_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.server.append(self.read(model))
        self.clients.append([])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.clients:
            self.clients[-1].append(self.read(model))


def dense(model: Any, folder: Path) -> Any:
    """The model with dequantized weights `W_0 + Σ s B A`, in float32."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    weights = plain.state_dict()
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" not in name:
            layer = model.get_base_model().get_submodule(name.rpartition(".")[0])
            is_quantized = name.endswith("weight") and parameter.dtype in (torch.uint8, torch.int8)
            value = dequantize_module_weight(layer) if is_quantized else parameter
            weights[name.replace(".base_layer", "")].copy_(value.detach().float())
    for module in find_lora_modules(model).values():
        path = module.base.removeprefix("base_model.model.").replace(".base_layer", "")
        for adapter in module.layer.active_adapters:
            b, a = module.factors(adapter)
            weights[path] += (module.layer.scaling[adapter] * b @ a).detach()
    plain.load_state_dict(weights)
    return plain


@pytest.mark.parametrize(
    ("bits", "aggregation"),
    [
        ("4 bit", {"aggregation": "fedex_lora"}),
        ("8 bit", {"aggregation": "fedex_lora"}),
        ("4 bit", {"aggregation": "stacked_lora", "aggregation_kwargs": {"reset": True}}),
    ],
    ids=["fedex_lora, 4 bit", "fedex_lora, 8 bit", "reset, 4 bit"],
)
def test_changes_of_quantized_weights_are_in_a_second_adapter(tmp_path, bits, aggregation) -> None:
    """Ten clients, of which two train in a round: all start from the logits of the server."""
    model, logits = quantized_model(tmp_path / "base", CONFIGS[bits]), Logits()
    before = {name: value.clone() for name, value in model.state_dict().items() if "lora_" not in name}
    north, south = tokenized("north", 4), tokenized("south", 5)
    clients = {f"client {number}": (north, south)[number % 2] for number in range(10)}
    trainer = FederatedTrainer(
        model=model,
        args=arguments(tmp_path / "run", learning_rate=0.05),
        train_dataset=FederatedDataset.from_dict(clients),
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
        federation=FederatedConfig(num_rounds=5, clients_per_round=2, **aggregation),
        callbacks=[logits],
        client_callbacks=[logits],
    )
    trainer.train()
    assert [len(clients) for clients in logits.clients] == [2] * 5
    for server, clients in zip(logits.server, logits.clients, strict=True):
        assert all(torch.equal(client, server) for client in clients)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    found = logits.read(model)
    trainer.save_model(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(quantized_base(tmp_path / "base", CONFIGS[bits]), tmp_path / "saved")
    torch.testing.assert_close(logits.read(loaded), found, rtol=0, atol=1e-5)
    modules = find_lora_modules(model).values()
    for module in modules:
        module.layer.scaling[RESIDUAL] = 0.0
    assert (logits.read(model) - found).abs().max() > 1e-3
    for module in modules:
        module.layer.scaling[RESIDUAL] = 1.0
    # PEFT dequantizes weights in 8 bits in place.
    torch.testing.assert_close(logits.read(dense(model, tmp_path / "base")), found, rtol=0, atol=1e-4)
