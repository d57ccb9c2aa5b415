"""Write an untrained LSTM of FedNLP (appendix F.2) and its vocabulary to a folder.

    python recipes/fednlp/prepare_lstm.py --data SetFit/20_newsgroups --output-dir outputs/fednlp-inputs/lstm
    python recipes/fednlp/prepare_lstm.py --data DIR --column tokens --bidirectional \\
        --output-dir outputs/fednlp-inputs/bilstm

The vocabulary contains the words of the training split of --data, over all clients. Recipes load the folder with
`model.kwargs: {trust_remote_code: true}`, because it contains the code of the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from datasets import load_dataset
from lstm import LSTMConfig, LSTMForSequenceClassification, LSTMForTokenClassification
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def write_model(texts: Iterable[str], folder: str, bidirectional: bool, max_words: int) -> int:
    """
    Write a tokenizer and an untrained model with its code.

    Args:
        texts (`Iterable[str]`): The training texts.
        folder (`str`): The output folder.
        bidirectional (`bool`): Whether the LSTM also reads backwards.
        max_words (`int`): Largest number of words; rare words become `[UNK]`.

    Returns:
        `int`: The size of the vocabulary.
    """
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()  # lower case, without accents
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordLevelTrainer(vocab_size=max_words, min_frequency=2, special_tokens=["[PAD]", "[UNK]"])
    words.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)

    config = LSTMConfig(vocab_size=len(tokenizer), bidirectional=bidirectional)
    LSTMConfig.register_for_auto_class()
    LSTMForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
    LSTMForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
    torch.manual_seed(0)
    model = LSTMForSequenceClassification(config)
    # One folder serves both tasks and any number of classes: each run has a new classifier.
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith("classifier.")}
    model.save_pretrained(folder, state_dict=weights)
    config = LSTMConfig.from_pretrained(folder)
    config.auto_map |= {"AutoModelForTokenClassification": "lstm.LSTMForTokenClassification"}
    config.save_pretrained(folder)
    return len(tokenizer)


def main() -> None:
    """Read the texts and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="Hub id, or a folder with a file for each split")
    parser.add_argument("--column", default="text", help="column of texts or of lists of words (default: %(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="also read the texts backwards")
    parser.add_argument("--max-words", type=int, default=8000, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument("--output-dir", required=True)
    args = parser.parse_args()
    column = load_dataset(args.data, split="train")[args.column]
    texts = (text if isinstance(text, str) else " ".join(text) for text in column if text)
    size = write_model(texts, args.output_dir, args.bidirectional, args.max_words)
    print(f"{args.output_dir}: {size} words")


if __name__ == "__main__":
    main()
