"""Write the data of the FL-GLM recipes: a folder for each task with `train.parquet` and `validation.parquet`.

    python recipes/fl_glm/prepare_data.py --data-dir DIR --output-dir outputs/fl_glm-inputs --tasks copa cb scitldr
    python recipes/fl_glm/prepare_data.py --hub-id aps/super_glue --output-dir outputs/fl_glm-inputs --tasks copa cb
    python recipes/fl_glm/prepare_data.py --hub-id nyu-mll/glue --output-dir outputs/fl_glm-inputs --tasks sst2 \\
        --small-model
    python recipes/fl_glm/prepare_data.py --hub-id allenai/scitldr --revision refs/convert/parquet \\
        --output-dir outputs/fl_glm-inputs --tasks scitldr

Tasks of SuperGLUE become cloze questions for the recipe task `superglue-cloze`. DIR contains a folder
`superglue_<task>` or `<task>` for each task (for RTE also `glue_rte`, which has the same examples). Each folder
contains `train.jsonl` and one of `val.jsonl`, `validation.jsonl` and `dev.jsonl`, optionally with `.gz`. Two columns
name the client of each example in the two partitions of COPA in FL-GLM's figure 5. `iid_owner` gives the first client
97 examples of the first label and 102 of the second, and the second client 98 and 103. `skewed_owner` gives the first
client 195 and 5, and the second client none and 200. Other tasks use the same shares.

`sst2` contains phrases of movie reviews (`sentence`) and their sentiment (`label`, `negative` or `positive`) for the
recipe task `cloze-classification`. Its test examples are the validation split and a part of the training split: 300
phrases of at least 15 words, and all phrases that they contain or that contain them. Phrases that overlap a test
example are not in the training split. `--small-model` also writes a small model with random weights, and a tokenizer
with the words of the training phrases.

`scitldr` contains abstracts (`source`) and their one-sentence summaries (`targets`, a list for each abstract) for the
recipe task `summarization`: the abstracts-only version of SciTLDR (Cachola et al., 2020), from the folder `scitldr` or
`SciTLDR-A`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_federated.tasks import superglue_cloze_rows
from hf_federated.tasks.superglue import LABELS


SPLITS = {"train": ("train",), "validation": ("val", "validation", "dev")}
# Share of the first client in COPA's examples of the first label and of the second label.
FIRST_CLIENT_SHARES = {"iid_owner": (97 / 195, 102 / 205), "skewed_owner": (1.0, 5 / 205)}


SCITLDR = "scitldr"
SST2 = "sst2"
SENTIMENTS = ("negative", "positive")
NUM_HELD_OUT, MIN_WORDS = 300, 15
VOCABULARY_SIZE = 4000
# Alternative folder names of tasks, and Hub configurations whose name differs from the task.
ALTERNATIVE_FOLDERS = {"rte": "glue_rte", SCITLDR: "SciTLDR-A", SST2: "glue_sst2"}
CONFIGURATIONS = {SCITLDR: "Abstract"}


def read_folder(folder: Path, task: str, split: str) -> Dataset:
    """Load the raw examples of a task from files."""
    folders = [
        folder / name for name in (f"superglue_{task}", task, ALTERNATIVE_FOLDERS.get(task)) if name is not None
    ]
    paths = [path / f"{name}.jsonl{end}" for path in folders for name in SPLITS[split] for end in ("", ".gz")]
    existing = next((path for path in paths if path.is_file()), None)
    if existing is None:
        raise SystemExit(f"{folder} has no file {' or '.join(str(path.relative_to(folder)) for path in paths)}.")
    return load_dataset("json", data_files=str(existing), split="train")


def scitldr_rows(raw: Dataset) -> Dataset:
    """
    Convert raw examples of SciTLDR to abstracts with joined sentences and all their summaries.

    Examples without an abstract or without a summary are left out.

    Args:
        raw (`datasets.Dataset`): Examples with `source` and `targets` or `target`.

    Raises:
        ValueError: If a column is missing.
    """
    targets = "targets" if "targets" in raw.column_names else "target"
    missing = {"source", targets} - set(raw.column_names)
    if missing:
        raise ValueError(f"the dataset has no column {sorted(missing)}. Its columns are {raw.column_names}.")
    rows: dict[str, list[Any]] = {"source": [], "targets": []}
    for source, summaries in zip(raw["source"], raw[targets], strict=True):
        text = " ".join(part.strip() for part in ([source] if isinstance(source, str) else source or []))
        candidates = [summaries] if isinstance(summaries, str) else summaries or []
        kept = [summary.strip() for summary in candidates if summary.strip()]
        if text and kept:
            rows["source"].append(text)
            rows["targets"].append(kept)
    return Dataset.from_dict(rows)


def sst2_splits(train: Dataset, validation: Dataset, seed: int) -> dict[str, Dataset]:
    """
    Move phrases of the training split to the test examples, with all phrases that overlap them.

    Args:
        train (`datasets.Dataset`): Phrases with `sentence` and `label` (0 or 1).
        validation (`datasets.Dataset`): Sentences of other reviews, with the same columns.
        seed (`int`): Seed of the draw.
    """
    # Each phrase has a space on both sides, so a word does not match a part of a longer word.
    phrases = [f" {text.strip()} " for text in train["sentence"]]
    long = [position for position, phrase in enumerate(phrases) if len(phrase.split()) >= MIN_WORDS]
    drawn = np.random.default_rng(seed).permutation(long)[:NUM_HELD_OUT]
    is_test = overlap(phrases, [phrases[position] for position in drawn])
    tested = [phrase for phrase, is_held_out in zip(phrases, is_test, strict=True) if is_held_out]
    tested += [f" {text.strip()} " for text in validation["sentence"]]
    held_out = train.select(np.flatnonzero(is_test))
    kept = train.select(np.flatnonzero(~overlap(phrases, tested)))

    def convert(rows: Dataset) -> Dataset:
        labels = [SENTIMENTS[label] for label in rows["label"]]
        texts = [text.strip() for text in rows["sentence"]]
        return Dataset.from_dict({"sentence": texts, "label": labels})

    return {"train": convert(kept), "validation": concatenate_datasets([convert(held_out), convert(validation)])}


def overlap(phrases: list[str], others: list[str]) -> np.ndarray:
    """For each phrase, whether it is a part of one of the other phrases, or one of them is a part of it."""
    text = "\n".join(others)
    return np.array([phrase in text or any(other in phrase for other in others) for phrase in phrases])


def write_small_model(texts: list[str], folder: Path) -> None:
    """
    Write a Llama of four blocks with random weights, and a tokenizer for some texts.

    Args:
        texts (`list[str]`): The texts.
        folder (`Path`): The folder of the model.
    """
    tokenizer = ByteLevelBPETokenizer(add_prefix_space=True)
    tokenizer.train_from_iterator(texts, VOCABULARY_SIZE, show_progress=False, special_tokens=["<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=fast.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    print(f"{folder}: a model with random weights")


def add_owners(rows: Dataset, seed: int) -> Dataset:
    """Add one column for each partition of the examples between two clients."""
    labels = np.unique(np.array(rows["label"]), return_inverse=True)[1]
    for column, shares in FIRST_CLIENT_SHARES.items():
        owners = np.full(len(rows), "second", dtype=object)
        # The third label of a task uses the share of the second label.
        for label in np.unique(labels):
            positions = np.random.default_rng([seed, label + 1]).permutation(np.flatnonzero(labels == label))
            owners[positions[: round(shares[min(label, 1)] * len(positions))]] = "first"
        rows = rows.add_column(column, owners.tolist())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data-dir", type=Path, help="folder with one folder for each task")
    source.add_argument("--hub-id", help="dataset on the Hub with a configuration for each task")
    parser.add_argument("--revision", help="branch, tag or commit of the Hub dataset")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--tasks", nargs="+", choices=[*LABELS, SST2, SCITLDR], default=["copa"], help="tasks (default: copa)"
    )
    parser.add_argument("--max-train-rows", type=int, help="maximum number of training examples")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    parser.add_argument(
        "--small-model", action="store_true", help="also write a small model with random weights, for sst2"
    )
    arguments = parser.parse_args()
    if arguments.small_model and SST2 not in arguments.tasks:
        parser.error("--small-model requires --tasks sst2.")
    for task in arguments.tasks:
        raw = {split: read(arguments, task, split) for split in SPLITS}
        try:
            if task == SST2:
                splits = sst2_splits(raw["train"], raw["validation"], arguments.seed)
            elif task == SCITLDR:
                splits = {split: scitldr_rows(rows) for split, rows in raw.items()}
            else:
                splits = {
                    split: superglue_cloze_rows(task, rows, answered_only=split == "train")
                    for split, rows in raw.items()
                }
        except ValueError as error:
            raise SystemExit(f"{task}: {error}") from None
        for split, rows in splits.items():
            max_rows = arguments.max_train_rows
            if split == "train" and max_rows is not None and max_rows < len(rows):
                drawn = np.random.default_rng(arguments.seed).permutation(len(rows))[:max_rows]
                rows = rows.select(np.sort(drawn))
            if task != SCITLDR:
                rows = add_owners(rows, arguments.seed)
            target = arguments.output_dir / task / f"{split}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            rows.to_parquet(target)
            print(f"{target}: {len(rows)} examples, from {len(raw[split])}")
        if task == SST2 and arguments.small_model:
            write_small_model(splits["train"]["sentence"], arguments.output_dir / "small-model")


def read(arguments: argparse.Namespace, task: str, split: str) -> Dataset:
    """Load the raw examples of a task, from the Hub or from files."""
    if arguments.hub_id is None:
        return read_folder(arguments.data_dir, task, split)
    name = CONFIGURATIONS.get(task, task)
    return load_dataset(arguments.hub_id, name, split=split, revision=arguments.revision)


if __name__ == "__main__":
    main()
