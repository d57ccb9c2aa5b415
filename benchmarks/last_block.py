"""The trained parts of a BERT classifier with a frozen encoder, on cached inputs from the frozen parts.

The classifier reads the first token only. [`Head`] has the pooler and the classifier, and its input is the first token
after the last block. [`LastBlock`] has the last block as well, and computes it for the first token only: keys and
values of all tokens come from frozen weights. The outputs equal those of the whole model, at about 1 % of the cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, TrainingArguments


ARRAYS = ("last", "first", "keys", "values", "mask", "labels")


class Head(nn.Module):
    """
    The pooler and the classifier of a BERT classifier.

    Args:
        model (`BertForSequenceClassification`): The whole model. The modules are shared with it.
    """

    inputs = ("last",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.pooler = model.bert.pooler
        self.classifier = model.classifier

    def forward(self, last: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """
        Classify a batch.

        Args:
            last (`torch.Tensor` of shape `(batch_size, hidden_size)`): First token after the last block.
            labels (`torch.Tensor` of shape `(batch_size,)`, *optional*): Labels.
        """
        logits = self.classifier(self.pooler(last[:, None]))
        return _with_loss(logits, labels)


class LastBlock(nn.Module):
    """
    The last block of a BERT classifier, without its keys and values, with the pooler and the classifier.

    Args:
        model (`BertForSequenceClassification`): The whole model. The modules are shared with it.
    """

    inputs = ("first", "keys", "values", "mask")

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        block = model.bert.encoder.layer[-1]
        self.num_heads = model.config.num_attention_heads
        self.query = block.attention.self.query
        self.attention_output = block.attention.output
        self.intermediate = block.intermediate
        self.output = block.output
        self.head = Head(model)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(
        self,
        first: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        Classify a batch.

        Args:
            first (`torch.Tensor` of shape `(batch_size, hidden_size)`): First token after the block below.
            keys, values (`torch.Tensor` of shape `(batch_size, num_tokens, hidden_size)`): Keys and values.
            mask (`torch.Tensor` of shape `(batch_size, num_tokens)`): 1 for tokens, 0 for padding.
            labels (`torch.Tensor` of shape `(batch_size,)`, *optional*): Labels.
        """
        return self.head(self.hidden(first, keys, values, mask), labels)

    def hidden(
        self, first: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the first token after the block, of shape `(batch_size, hidden_size)`."""
        batch_size, _, hidden_size = keys.shape
        heads = (batch_size, -1, self.num_heads, hidden_size // self.num_heads)
        context = nn.functional.scaled_dot_product_attention(
            self.query(first).view(heads).transpose(1, 2),
            keys.view(heads).transpose(1, 2),
            values.view(heads).transpose(1, 2),
            attn_mask=mask[:, None, None].bool(),
        )
        attended = self.attention_output(context.transpose(1, 2).reshape(batch_size, hidden_size), first)
        return self.output(self.intermediate(attended), attended)


def _with_loss(logits: torch.Tensor, labels: torch.Tensor | None) -> dict[str, torch.Tensor]:
    loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
    return {**loss, "logits": logits}


class Features:
    """
    Cached inputs of [`Head`] or [`LastBlock`], read from memory-mapped files.

    Args:
        directory (`pathlib.Path`): A folder that [`prepare`] wrote to.
        names (`Sequence[str]`): Inputs of the model.
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._names = names
        self._arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        self.labels = np.asarray(self._arrays["labels"])
        self.info: dict[str, Any] = json.loads((directory / "info.json").read_text())

    def batch(self, rows: Sequence[int] | np.ndarray) -> dict[str, torch.Tensor]:
        """Return the inputs of examples, without labels."""
        rows = np.asarray(rows)
        num_tokens = int(self._arrays["mask"][rows].sum(1).max()) if "mask" in self._names else 0
        batch = {}
        for name in self._names:
            array = self._arrays[name][rows]
            has_tokens = name in ("keys", "values", "mask")
            batch[name] = torch.from_numpy(array[:, :num_tokens] if has_tokens else array).float()
        return batch

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a training batch of examples with the columns `row` and `labels`."""
        batch = self.batch([example["row"] for example in examples])
        return batch | {"labels": torch.tensor([example["labels"] for example in examples])}


def training_arguments(directory: str, learning_rate: float, batch_size: int, seed: int) -> TrainingArguments:
    """
    Return the training arguments of a federation that writes nothing.

    Args:
        directory (`str`): Output directory.
        learning_rate (`float`): Learning rate of the clients.
        batch_size (`int`): Number of examples of a step.
        seed (`int`): Seed of the run.
    """
    return TrainingArguments(
        output_dir=directory,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        seed=seed,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        label_names=["labels"],
    )


def load_model(directory: str, num_labels: int) -> PreTrainedModel:
    """Load a pretrained encoder with a new pooler, if it has none, and a new classifier from seed 0."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(directory, num_labels=num_labels).eval()


@torch.no_grad()
def prepare(
    texts: Sequence[str], labels: Sequence[int], model: str, directory: Path, max_length: int, info: Mapping[str, Any]
) -> None:
    """
    Compute and save the inputs of the trained parts, and compare their logits with those of the whole model.

    Args:
        texts, labels (`Sequence`): Examples.
        model (`str`): Folder or Hub id of a BERT encoder.
        directory (`pathlib.Path`): Folder to create.
        max_length (`int`): Number of tokens at which texts are cut.
        info (`Mapping[str, Any]`): Values to save.
    """
    whole, tokenizer = load_model(model, int(max(labels)) + 1), AutoTokenizer.from_pretrained(model)
    directory.mkdir(parents=True)
    hidden_size = whole.config.hidden_size
    layouts: dict[str, tuple[Any, tuple[int, ...]]] = {
        "last": (np.float32, (hidden_size,)),
        "first": (np.float32, (hidden_size,)),
        "keys": (np.float16, (max_length, hidden_size)),
        "values": (np.float16, (max_length, hidden_size)),
        "mask": (np.uint8, (max_length,)),
    }
    arrays = {
        name: np.lib.format.open_memmap(directory / f"{name}.npy", "w+", dtype, (len(texts), *shape))
        for name, (dtype, shape) in layouts.items()
    }
    block = whole.bert.encoder.layer[-1]
    before, after = [], []
    block.register_forward_hook(lambda module, args, output: (before.append(args[0]), after.append(output)) and None)
    order = np.array(sorted(range(len(texts)), key=lambda row: len(texts[row])))
    expected = []
    for rows in np.array_split(order, -(-len(texts) // 64)):
        batch = tokenizer(
            [texts[row] for row in rows], truncation=True, max_length=max_length, padding=True, return_tensors="pt"
        )
        expected.append((rows, whole(**batch).logits))
        hidden = before.pop()
        num_tokens = hidden.shape[1]
        arrays["last"][rows] = after.pop()[:, 0].numpy()
        arrays["first"][rows] = hidden[:, 0].numpy()
        arrays["keys"][rows, :num_tokens] = block.attention.self.key(hidden).numpy()
        arrays["values"][rows, :num_tokens] = block.attention.self.value(hidden).numpy()
        arrays["mask"][rows, :num_tokens] = batch["attention_mask"].numpy()
    for array in arrays.values():
        array.flush()
    np.save(directory / "labels.npy", np.asarray(labels, dtype=np.int64))
    (directory / "info.json").write_text(json.dumps(dict(info)))
    rows, logits = expected[len(expected) // 2]
    for cls in (Head, LastBlock):
        difference = (cls(whole)(**Features(directory, cls.inputs).batch(rows))["logits"] - logits).abs().max()
        print(f"{cls.__name__}: relative difference of the logits {float(difference / logits.abs().max()):.1e}")
