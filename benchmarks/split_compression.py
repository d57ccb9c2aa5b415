"""Loss of a split model after training with each wire, with and without error feedback, for several seeds.

    python benchmarks/split_compression.py                        # a model of 4 blocks, trained from scratch
    python benchmarks/split_compression.py --model HuggingFaceTB/SmolLM2-135M --texts train.jsonl --text-column text \\
        --learning-rate 2e-4 --length 128                         # LoRA on a pretrained model

Each run trains on the same examples for several epochs. `loss` is the mean loss on test examples through the wire,
`loss without the wire` is the loss of the same weights with uncompressed hidden states. The bytes are relative to
float32, without message headers.

Error feedback adds to a tensor what the compression of an earlier tensor lost. `--feedback` selects that tensor:

- `message`: as in the library. `topk` sends the mean of what the positions of a gradient lose with the same message.
- `none`: no error feedback.
- `next`: the previous tensor at the same boundary, which belongs to other examples (Seide et al., 2014; Karimireddy et
  al., 2019).
- `next-gradients`: as `next`, for gradients alone.
- `example`: the tensor of the same example in the previous epoch.
- `change`: hidden states are sent as the compressed change since the previous epoch of the same example (AQ-SGD, Wang
  et al., 2022). Gradients have no feedback.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_federated import SplitModel
from hf_federated.split import Wire


FEEDBACKS = ("message", "none", "next", "next-gradients", "example", "change")
VOCABULARY = 64


class FeedbackWire(Wire):
    """
    A wire with error feedback, for one side of a boundary that exchanges one micro-batch at a time.

    Args:
        dtype (`str`): As in [`~hf_federated.split.Wire`].
        feedback (`str`): One of `FEEDBACKS`.
    """

    state: dict[str, Any]

    def __init__(self, dtype: str, feedback: str) -> None:
        super().__init__(dtype)
        object.__setattr__(self, "feedback", feedback)
        # What was kept, by direction, kind of the tensor and example.
        object.__setattr__(self, "state", {"kept": {}, "examples": [], "num_decoded": 0})

    def begin(self, examples: list[int]) -> None:
        """Set the examples of the next micro-batch."""
        self.state.update(examples=examples, num_decoded=0)

    def compress(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Encode hidden states or gradients."""
        ((name, states),) = tensors.items()
        keys = self._keys("sent", name)
        if not keys:
            # Without feedback within the message, a gradient is sent as hidden states are.
            return super().compress({name if self.feedback == "message" else "hidden": states})  # type: ignore[attr-defined]
        sign = -1 if self.feedback == "change" else 1  # type: ignore[attr-defined]
        kept = self._kept(keys, states)
        target = {"hidden": states.detach().float() + sign * kept}
        encoded = super().compress(target)
        restored = super().decode(encoded, target)["hidden"].to(states.device)
        self._keep(keys, kept + restored if sign < 0 else target["hidden"] - restored)
        return encoded

    def decode(
        self, encoded: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Decode hidden states (first call of a micro-batch) or gradients (second call)."""
        decoded = super().decode(encoded, reference)
        self.state["num_decoded"] += 1
        if self.feedback != "change" or self.state["num_decoded"] == 2:  # type: ignore[attr-defined]
            return decoded
        ((name, restored),) = decoded.items()
        keys = self._keys("received", "hidden")
        restored = restored + self._kept(keys, restored)
        self._keep(keys, restored)
        return {name: restored}

    def _keys(self, direction: str, kind: str) -> list[tuple[str, str, int]]:
        """Return the names of the tensors of each sequence, or none without feedback."""
        feedback = self.feedback  # type: ignore[attr-defined]
        with_feedback = {"message": (), "none": (), "next-gradients": ("gradient",), "change": ("hidden",)}
        if kind not in with_feedback.get(feedback, ("hidden", "gradient")):
            return []
        examples = self.state["examples"]
        return [(direction, kind, n) for n in (range(len(examples)) if feedback.startswith("next") else examples)]

    def _kept(self, keys: list[tuple[str, str, int]], like: torch.Tensor) -> torch.Tensor:
        empty = torch.zeros(like.shape[1:], device=like.device)
        return torch.stack([self.state["kept"].get(key, empty) for key in keys])

    def _keep(self, keys: list[tuple[str, str, int]], tensors: torch.Tensor) -> None:
        self.state["kept"].update(zip(keys, tensors.clone(), strict=True))


def markov_examples(num_examples: int, length: int, seed: int) -> torch.Tensor:
    """Draw sequences of a Markov chain in which 4 of 64 tokens can follow each pair of tokens."""
    successors = torch.randint(VOCABULARY, (VOCABULARY, VOCABULARY, 4), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCABULARY, (num_examples,), generator=generator) for _ in range(2)]
    # The successors depend on the last token and on 8 classes of the token before.
    while len(tokens) < length:
        choices = torch.randint(4, (num_examples,), generator=generator)
        tokens.append(successors[tokens[-1], tokens[-2] % 8, choices])
    return torch.stack(tokens, dim=1)


def text_examples(options: argparse.Namespace) -> torch.Tensor:
    """Tokenize the texts, and cut them into sequences of equal length."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = load_dataset("json", data_files=options.texts, split="train")[options.text_column]
    ids = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    num_sequences = min(len(ids) // options.length, options.num_train + options.num_test)
    return torch.tensor(ids[: num_sequences * options.length]).view(num_sequences, options.length)


def build(options: argparse.Namespace, seed: int) -> torch.nn.Module:
    """Build the unsplit model: a pretrained model with adapters, or a small model."""
    torch.manual_seed(seed)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 2,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=options.length,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def mean_loss(split: SplitModel, examples: torch.Tensor, wire: str, options: argparse.Namespace) -> float:
    """Mean loss on examples of equal length, with a wire without feedback."""
    split.boundary.wire = split.boundary.link.server.wire = Wire(wire)  # type: ignore[attr-defined]
    split.eval()
    losses = []
    for batch in examples.split(options.batch_size):
        ids = batch.to(options.device)
        losses.append(len(ids) * float(split(input_ids=ids, labels=ids).loss))
    return sum(losses) / len(examples)


def run(wire: str, feedback: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one model, and measure its loss on the test examples."""
    examples = text_examples(options) if options.model else None
    if examples is None:
        examples = markov_examples(options.num_train + options.num_test, options.length, seed=1)
    train, test = examples[options.num_test :], examples[: options.num_test]
    split = SplitModel.from_model(build(options, seed).to(options.device), 1, 1, wire_dtype="float32")
    server = split.boundary.link.server  # type: ignore[attr-defined]
    wires = [FeedbackWire(wire, feedback) for _ in range(2)]
    trained = [parameter for parameter in split.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    num_steps = options.num_epochs * -(-len(train) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, num_steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    split.boundary.wire, server.wire = wires
    split.train()
    for _ in range(options.num_epochs):
        for indices in torch.randperm(len(train), generator=generator).split(options.batch_size):
            ids = train[indices].to(options.device)
            for side in wires:
                side.begin(indices.tolist())
            split(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    size = split.config.hidden_size
    return {
        "wire": wire,
        "feedback": feedback,
        "seed": seed,
        "bytes": Wire(wire).num_bytes({"hidden": (1, 1, size)}) / (4 * size),
        "loss": mean_loss(split, test, wire, options),
        "loss without the wire": mean_loss(split, test, "float32", options),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wires", nargs="+", default=["float32", "int8", "int4", "topk"])
    parser.add_argument("--feedback", nargs="+", default=["message"], choices=FEEDBACKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", help="folder or id of a pretrained model (default: a small model)")
    parser.add_argument("--texts", help="JSON lines with the texts, for --model")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--num-train", type=int, default=512)
    parser.add_argument("--num-test", type=int, default=512)
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda, for both parties")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="JSON file for the results")
    options = parser.parse_args()
    if bool(options.model) != bool(options.texts):
        parser.error("--model and --texts must be given together.")
    torch.set_num_threads(options.threads)

    results: list[dict[str, Any]] = []
    print("| wire | feedback | bytes | loss | loss without the wire |\n|---|---|---|---|---|")
    for wire in options.wires:
        for feedback in options.feedback:
            if feedback == "message" and wire not in ("float32", "topk") and "none" in options.feedback:
                continue  # the same runs as without feedback
            if feedback != options.feedback[0] and wire == "float32":
                continue  # float32 loses nothing
            runs = [run(wire, feedback, seed, options) for seed in options.seeds]
            results += runs
            cells = []
            for name in ("loss", "loss without the wire"):
                losses = [result[name] for result in runs]
                spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
                cells.append(f"{statistics.mean(losses):.4f} ± {spread:.4f}")
            print(f"| {wire} | {feedback} | {runs[0]['bytes']:.3f} | {' | '.join(cells)} |", flush=True)
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
