"""A folder with tiny models and data at the paths that the documentation names, so that its code runs offline.

`from_pretrained("distilbert/distilbert-base-uncased")` and `load_dataset("you/reviews")` open a local folder if the
working directory has a folder of this name.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
from causal import bytes_tokenizer, llama
from datasets import Dataset, Features, Image, Value
from recipe_model_fixtures import WORDS
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForMaskedLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForSequenceClassification,
)


ENCODERS = (
    "sentence-transformers/all-MiniLM-L6-v2",
    "distilbert/distilbert-base-uncased",
    "FacebookAI/roberta-base",
)
DECODER = "HuggingFaceTB/SmolLM2-135M-Instruct"
SITES = ("north", "south", "east", "west")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


def build(folder: Path) -> None:
    """Write all models and datasets into a folder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name in ENCODERS:
            write_encoder(folder / name)
        write_decoder(folder / DECODER)
        write_image_model(folder / "google/vit-base-patch16-224")
        write_audio_model(folder / "facebook/wav2vec2-base")
    write_reviews(folder / "outputs/quickstart-inputs/reviews")
    write_sites(folder)
    write_pictures(folder / "you/pictures")
    write_conversations(folder / "you/conversations")


def write_encoder(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    BertForMaskedLM(config).save_pretrained(folder)


def write_decoder(folder: Path) -> None:
    tokenizer = bytes_tokenizer(["user: a dull film", "assistant: a bright plot"], vocab_size=270)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    llama(len(tokenizer), num_layers=4).save_pretrained(folder)


def write_image_model(folder: Path) -> None:
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(folder)


def write_audio_model(folder: Path) -> None:
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    config = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 8),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        mask_time_prob=0.0,
    )
    Wav2Vec2ForSequenceClassification(config).save_pretrained(folder)


def write_reviews(folder: Path) -> None:
    """Reviews of twelve movies, four of each."""
    folder.mkdir(parents=True)
    rows = [
        {
            "text": f"a {WORDS[1 + (movie + number) % 2]} film {' '.join(WORDS[: movie % 5])}",
            "label": ["rotten", "fresh"][(movie + number) % 2],
            "movie": f"movie {movie:02}",
        }
        for movie in range(12)
        for number in range(4)
    ]
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")


def write_sites(folder: Path) -> None:
    """One CSV file for each site in `sites`, and all rows in `examples.csv`."""
    (folder / "sites").mkdir()
    rows = {
        site: [
            {"text": f"a {WORDS[1 + (number + place) % 2]} film", "label": ["defect", "fine"][(number + place) % 2]}
            for number in range(12)
        ]
        for place, site in enumerate(SITES)
    }
    for site, examples in rows.items():
        write_csv(folder / "sites" / f"{site}.csv", examples)
    write_csv(folder / "examples.csv", [{"site": site, **row} for site in SITES for row in rows[site]])


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_pictures(folder: Path) -> None:
    """Pictures of three hospitals: noise in one of two shades."""
    import PIL.Image

    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    rows = [
        {
            "image": PIL.Image.fromarray(generator.integers(0, 120, (8, 8, 3), dtype=np.uint8) + 100 * (number % 2)),
            "label": number % 2,
            "hospital": f"hospital {number % 3}",
        }
        for number in range(24)
    ]
    features = Features({"image": Image(), "label": Value("int64"), "hospital": Value("string")})
    Dataset.from_list(rows, features=features).to_parquet(folder / "train.parquet")


def write_conversations(folder: Path) -> None:
    """Prompts and answers of three companies, with a rejected answer for DPO."""
    folder.mkdir(parents=True)
    rows = [
        {
            "prompt": f"a {WORDS[number % 4]} film",
            "completion": f" {WORDS[(number + 1) % 4]}",
            "chosen": f" {WORDS[(number + 1) % 4]}",
            "rejected": f" {WORDS[(number + 2) % 4]}",
            "company": f"company {number % 3}",
        }
        for number in range(24)
    ]
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
