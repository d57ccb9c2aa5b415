"""Write eight tasks with a column `task`, and a small model that learns them, for the recipes `small_*.yaml`.

    python recipes/feddrs/prepare_small_tasks.py --newsgroups SetFit/20_newsgroups --sst2 stanfordnlp/sst2 \\
        --reviews DIR --encoder sentence-transformers/all-MiniLM-L6-v2 --output-dir outputs/feddrs-small

Four tasks are groups of 20 Newsgroups (comp, rec, sci, talk), whose labels are the newsgroups. One is the sentiment of
SST-2, and three are the sentiments of reviews of automotive, baby and health products. DIR contains files
`<domain>_<split>.jsonl.gz`, as in `recipes/adafd/prepare_data.py`. The four tasks have the same three labels.

The model is the mean of the word embeddings of --encoder, followed by a hidden layer (Iyyer et al., 2015, a deep
averaging network). It is the encoder without its blocks and dropout, with its tokenizer, positions and layer
normalization.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from transformers import AutoModel, AutoTokenizer

from hf_federated.features import EncoderClassifier, EncoderClassifierConfig


GROUPS = ("comp", "rec", "sci", "talk")
DOMAINS = ("automotive", "baby", "health")
SENTIMENTS = ("neutral", "positive", "negative")  # labels 0, 1 and 2 of the reviews
FEATURES = Features({name: Value("string") for name in ("text", "label", "task")})


def rows_of(dataset: Dataset, task: str, text: str, names: list[str]) -> Dataset:
    """Return the columns `text`, `label` and `task` of a dataset whose labels are given by `names`."""
    columns = {"text": dataset[text], "label": names, "task": [task] * len(names)}
    rows = Dataset.from_dict(columns, features=FEATURES)
    return rows.filter(lambda value: bool(value.strip()), input_columns="text")


def newsgroups(source: str, split: str) -> list[Dataset]:
    """Return a dataset for each group of 20 Newsgroups."""
    rows = load_dataset(source, split=split)
    name = "label_name" if "label_name" in rows.column_names else "label_text"
    tasks = []
    for group in GROUPS:
        part = rows.filter(lambda value, group=group: value.startswith(f"{group}."), input_columns=name)
        tasks.append(rows_of(part, f"newsgroups-{group}", "text", part[name]))
    return tasks


def reviews(folder: Path, split: str) -> list[Dataset]:
    """Return a dataset for each domain of reviews."""
    tasks = []
    for domain in DOMAINS:
        rows = load_dataset("json", data_files=str(folder / f"{domain}_{split}.jsonl.gz"), split="train")
        tasks.append(rows_of(rows, f"reviews-{domain}", "text", [SENTIMENTS[label] for label in rows["label"]]))
    return tasks


def sst2(source: str, split: str) -> Dataset:
    """Return the sentences of SST-2."""
    rows = load_dataset(source, split=split)
    names = [{"0": "negative", "1": "positive"}.get(str(label), str(label)) for label in rows["label"]]
    return rows_of(rows, "sst2", "sentence", names)


def write_model(encoder: str, labels: list[str], hidden_size: int, folder: Path) -> None:
    """Write the word embeddings of an encoder with an untrained hidden layer and classifier."""
    kwargs = {"num_hidden_layers": 0, "hidden_dropout_prob": 0.0, "dtype": torch.float32}
    words = AutoModel.from_pretrained(encoder, **kwargs)
    names = dict(enumerate(labels))
    ids = {name: index for index, name in names.items()}
    head = {"feature_size": words.config.hidden_size, "hidden_sizes": [hidden_size], "num_labels": len(labels)}
    torch.manual_seed(0)
    config = EncoderClassifierConfig(words.config.to_dict(), head, id2label=names, label2id=ids)
    model = EncoderClassifier(config)
    model.encoder.load_state_dict(words.state_dict(), strict=False)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newsgroups", required=True, help="20 Newsgroups with `text` and the name of the label")
    parser.add_argument("--sst2", required=True, help="SST-2 with `sentence` and `label`")
    parser.add_argument("--reviews", type=Path, required=True, help="folder of reviews")
    parser.add_argument("--encoder", required=True, help="model whose word embeddings are used")
    parser.add_argument("--hidden-size", type=int, default=128, help="units of the hidden layer (default: 128)")
    parser.add_argument("--max-train-rows", type=int, default=2000, help="cap of a task (default: 2000)")
    parser.add_argument("--max-test-rows", type=int, default=500, help="cap of a task (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws of caps (default: 0)")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    splits = {"train": ("train", "train", "train"), "test": ("test", "validation", "test")}
    labels: list[str] = []
    for split, (of_newsgroups, of_sst2, of_reviews) in splits.items():
        tasks = newsgroups(arguments.newsgroups, of_newsgroups)
        tasks += [sst2(arguments.sst2, of_sst2), *reviews(arguments.reviews, of_reviews)]
        cap = arguments.max_train_rows if split == "train" else arguments.max_test_rows
        taken = [task.shuffle(seed=arguments.seed).select(range(min(cap, len(task)))) for task in tasks]
        for task in taken:
            shares = Counter(task["label"]).most_common()
            print(f"{split:<6} {task['task'][0]:<18} {len(task):>5} examples, guess {shares[0][1] / len(task):.3f}")
        rows = concatenate_datasets(taken)
        rows.to_parquet(arguments.output_dir / "data" / f"{split}.parquet")
        labels = labels or sorted(set(rows["label"]))
    write_model(arguments.encoder, labels, arguments.hidden_size, arguments.output_dir / "model")


if __name__ == "__main__":
    main()
