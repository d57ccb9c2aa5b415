"""Train a small encoder-decoder for `table1_encoder_decoder.yaml` when no pretrained model is available.

    python recipes/feddrs/warm_start.py --encoder sentence-transformers/paraphrase-MiniLM-L3-v2 \
        --texts DIR --column text --output-dir outputs/feddrs-encoder-decoder

The model is two copies of an encoder, joined by new cross-attention. It learns to write the first words of a text, so
that the cross-attention learns to read the encoder's output. The texts have no labels, come from a Hub id or a folder,
and must not be the clients' texts. The word embeddings keep their values.
"""

from __future__ import annotations

import argparse

import numpy as np
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

from hf_federated.tasks import Seq2Seq


def cut_windows(texts: Dataset, column: str, num_rows: int, seed: int) -> Dataset:
    """Draw windows of up to 24 words from the texts; the target is the first six words of a window."""
    generator = np.random.default_rng(seed)
    words = [text.split() for text in texts[column]]
    words = [text_words for text_words in words if len(text_words) >= 8]
    windows = []
    for number in generator.integers(len(words), size=num_rows):
        text_words = words[number]
        start = int(generator.integers(len(text_words) - 7))
        windows.append(text_words[start : start + int(generator.integers(8, 25))])
    sources = [" ".join(window) for window in windows]
    return Dataset.from_dict({"source": sources, "target": [" ".join(window[:6]) for window in windows]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", required=True, help="Hub id or folder of the encoder")
    parser.add_argument("--texts", required=True, help="Hub id or folder of texts with the split train")
    parser.add_argument("--column", default="text")
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--num-steps", type=int, default=400)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    set_seed(options.seed)
    task = Seq2Seq(max_source_length=64, max_target_length=8)
    tokenizer = AutoTokenizer.from_pretrained(options.encoder)
    model = task.load_encoder_decoder(options.encoder, options.encoder, tokenizer)
    for part in (model.encoder, model.decoder):
        part.get_input_embeddings().requires_grad_(False)
    texts = load_dataset(options.texts, split="train")
    rows = cut_windows(texts, options.column, 32 * options.num_steps + 256, options.seed)
    encoded = task.prepare(rows, tokenizer)
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=options.output_dir,
            max_steps=options.num_steps,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            learning_rate=5e-4,
            warmup_steps=options.num_steps // 20,
            bf16=options.bf16,
            logging_steps=max(options.num_steps // 20, 1),
            eval_strategy="steps",
            eval_steps=max(options.num_steps // 4, 1),
            predict_with_generate=True,
            save_strategy="no",
            report_to="none",
            seed=options.seed,
        ),
        train_dataset=encoded.select(range(256, len(encoded))),
        eval_dataset=encoded.select(range(256)),
        processing_class=tokenizer,
        data_collator=task.data_collator(tokenizer),
        compute_metrics=task.build_compute_metrics(tokenizer),
    )
    trainer.train()
    model.requires_grad_(True)
    trainer.save_model(options.output_dir)


if __name__ == "__main__":
    main()
