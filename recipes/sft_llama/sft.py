"""Fine-tune a Llama on instructions with LoRA over clients: a script with TRL's `SFTTrainer`, made federated.

    python recipes/sft_llama/sft.py --config recipes/sft_llama/sft.yaml [--any_option value]
    accelerate launch --num_processes 8 recipes/sft_llama/sft.py --config recipes/sft_llama/sft.yaml

The options are the fields of `SFTConfig`, `FederatedConfig`, TRL's `ModelConfig` (LoRA, quantization) and `Inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from hf_federated import FederatedConfig, FederatedDataset, federate


@dataclass
class Inputs:
    """Dataset and client column of the script."""

    data: str = field(metadata={"help": "Hub id or folder of a dataset with the columns `prompt` and `completion`."})
    client_column: str = field(metadata={"help": "Column with the client of each example."})
    eval_rows: int = field(default=64, metadata={"help": "Number of examples held out for evaluation."})
    max_rows: int | None = field(default=None, metadata={"help": "Maximum number of examples to use (default: all)."})


def main() -> None:
    inputs, args, federation, model = TrlParser(
        (Inputs, SFTConfig, FederatedConfig, ModelConfig)
    ).parse_args_and_config()
    rows = load_dataset(inputs.data, split="train").shuffle(seed=args.seed)
    if inputs.max_rows is not None:
        rows = rows.select(range(inputs.max_rows))
    parts = rows.train_test_split(test_size=inputs.eval_rows, seed=args.seed)
    clients = FederatedDataset.from_column(parts["train"], inputs.client_column)
    trainer = federate(SFTTrainer)(
        model=model.model_name_or_path,
        args=args,
        train_dataset=clients,
        eval_dataset=parts["test"].remove_columns(inputs.client_column),
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
        peft_config=get_peft_config(model),
        federation=federation,
    )
    print(trainer.evaluate())
    trainer.train()
    print(trainer.evaluate())
    trainer.save_model()


if __name__ == "__main__":
    main()
