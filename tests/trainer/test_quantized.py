"""QLoRA: adapters on a base model in 4 or 8 bits. The base model is neither sent nor changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language import language_model, texts, tokenizer
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tiny import arguments
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DataCollatorForLanguageModeling

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer


pytest.importorskip("bitsandbytes")


def quantized_model(folder: Path, config: BitsAndBytesConfig) -> Any:
    # The CPU backend of bitsandbytes needs hidden sizes of at least 64.
    language_model(hidden_size=64).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
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


@pytest.mark.parametrize(
    "config",
    [
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
        BitsAndBytesConfig(load_in_8bit=True),
    ],
    ids=["4 bit", "4 bit, bfloat16", "8 bit"],
)
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
