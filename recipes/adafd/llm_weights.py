"""Run AdaFD with clients of several architectures that a local language model weights (LLMWC).

    python recipes/adafd/llm_weights.py --data outputs/adafd-inputs --llm HuggingFaceTB/SmolLM2-135M-Instruct

Each domain is a client. The clients use the models of `--client-models` in turn: encoders, or a decoder as a sequence
classifier, each with its tokenizer. The script prints the replies of the language model and, for each round, the
client weights and the server model's weighted F1 on the validation examples. The prompt contains each client's F1 on
the validation examples of its domain. The script also writes these values to `llm_weights.json`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer, TrainingArguments, pipeline

from hf_federated import (
    AdaFD,
    ClientSpec,
    FederatedConfig,
    FederatedDataset,
    FederatedTrainer,
    split_for_distillation,
    text_generation,
)
from hf_federated.cards.tables import table
from hf_federated.tasks import TextClassification


LABELS = ("neutral", "positive", "negative")


def client_spec(name: str) -> ClientSpec:
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return ClientSpec(model=name, processing_class=tokenizer)


def record_replies(generate: Callable[[str], str], replies: list[str]) -> Callable[[str], str]:
    """Wrap `generate` so that each reply is appended to `replies`."""

    def generate_and_record(prompt: str) -> str:
        replies.append(generate(prompt))
        return replies[-1]

    return generate_and_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="output folder of prepare_data.py")
    parser.add_argument("--llm", required=True, help="Hub id or folder of the language model")
    parser.add_argument("--server-model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument(
        "--client-models",
        nargs="+",
        default=[
            "sentence-transformers/paraphrase-MiniLM-L3-v2",
            "sentence-transformers/all-MiniLM-L6-v2",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        ],
    )
    parser.add_argument("--output-dir", default="outputs/adafd-llm")
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--local-epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-train-rows", type=int, default=800)
    parser.add_argument("--max-validation-rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    files = {split: str(Path(options.data) / f"{split}.jsonl") for split in ("train", "validation")}
    rows = load_dataset("json", data_files=files)
    sizes = {"train": options.max_train_rows, "validation": options.max_validation_rows}
    train, validation = (
        rows[split].filter(lambda row: bool(row["text"])).shuffle(options.seed).select(range(size))
        for split, size in sizes.items()
    )
    split = split_for_distillation(train, public_share=0.2, stratify_by_column="domain", seed=options.seed)
    clients = FederatedDataset.from_column(split.private, "domain")
    task = TextClassification(LABELS, max_length=48)
    replies: list[str] = []
    generate = record_replies(text_generation(pipeline("text-generation", options.llm), max_new_tokens=64), replies)
    trainer = FederatedTrainer(
        model=task.load_model(options.server_model),
        args=TrainingArguments(
            options.output_dir,
            seed=options.seed,
            learning_rate=options.learning_rate,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            eval_strategy="steps",
            eval_steps=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        task=task,
        processing_class=AutoTokenizer.from_pretrained(options.server_model),
        train_dataset=clients,
        eval_dataset=FederatedDataset.from_column(validation, "domain"),
        public_dataset=split.public,
        clients=dict(zip(clients, map(client_spec, itertools.cycle(options.client_models)), strict=False)),
        federation=FederatedConfig(
            num_rounds=options.num_rounds,
            local_epochs=options.local_epochs,
            freeze="embeddings",
            distillation=AdaFD(weighting="llm", generate=generate, clients_evaluate=True),
        ),
    )
    trainer.train()
    logs = {name: [] for name in ("weights", "fell_back", "f1_weighted")}
    prefix = "federated/weight/"
    for log in trainer.state.log_history:
        if "federated/llm_fell_back" in log:
            logs["weights"].append({name[len(prefix) :]: log[name] for name in log if name.startswith(prefix)})
            logs["fell_back"].append(bool(log["federated/llm_fell_back"]))
        if "eval_f1_weighted" in log:
            logs["f1_weighted"].append(log["eval_f1_weighted"])
    for number, reply in enumerate(replies, start=1):
        print(f"reply {number}: {reply!r}")
    columns = ["round", *clients, "fell back to ENWC", "F1"]
    rounds = zip(logs["weights"], logs["fell_back"], logs["f1_weighted"], strict=True)
    lines = [
        [str(number), *(f"{weights[name]:.3f}" for name in clients), "yes" if fell_back else "no", f"{f1:.3f}"]
        for number, (weights, fell_back, f1) in enumerate(rounds, start=1)
    ]
    print(table(columns, lines, numeric=True))
    path = Path(options.output_dir) / "llm_weights.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"replies": replies, **logs}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
