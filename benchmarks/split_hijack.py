"""Measure what a server of a split model gains if it chooses the gradients of a client: feature-space hijacking.

    python benchmarks/split_hijack.py --output split_hijack.json

After the attack of [Pasquini et al. (2021)](https://arxiv.org/abs/2012.02670): a discriminator learns to separate the
hidden states of the client from those of a head that the server knows, on public texts. The server answers the client
with the gradient of the discriminator in place of that of the client's loss, so that the client trains its head until
its hidden states look like those of the known head. The attackers of the audit, which know that head, then read the
client's texts.

Two clients are attacked: one that starts from the weights that the server knows, and one with an own first part. Texts
are random walks over words, and the model is small and randomly initialized. The client trains all its parameters with
AdamW. `scale` is the size of the gradients of the server, as a multiple of those of an honest server.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import binary_cross_entropy_with_logits, softplus
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_federated import SplitModel
from hf_federated.audits import AuditConfig, TokenizedExamples, build_head, invert
from hf_federated.split.agreement import AnswerBounds, RefusedAnswerError
from hf_federated.split.body import BodyServer
from hf_federated.split.boundary import LocalLink
from hf_federated.split.messages import Backward, Forward, Gradient, Hidden, read_request


NUM_WORDS, LENGTH, BATCH = 96, 16, 8


class Texts:
    """Random walks over words. The frequencies of the words follow Zipf's law, and each word has four successors."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        frequencies = 1 / torch.arange(1, NUM_WORDS + 1).expand(NUM_WORDS, -1)
        self._successors = torch.multinomial(frequencies, 4, generator=generator)

    def examples(self, num_texts: int, seed: int) -> TokenizedExamples:
        """Return tokenized texts."""
        generator = torch.Generator().manual_seed(seed)
        words = [torch.randint(NUM_WORDS, (num_texts,), generator=generator)]
        for _ in range(LENGTH - 1):
            choice = torch.randint(4, (num_texts,), generator=generator)
            words.append(self._successors[words[-1], choice])
        ids = torch.stack(words, 1)
        return TokenizedExamples(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool))


def build_model(seed: int) -> LlamaForCausalLM:
    """A small model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the words."""
    words = Tokenizer(models.WordLevel({f"word{number}": number for number in range(NUM_WORDS)}, unk_token="word0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words)


class HijackingServer(LocalLink):
    """
    A server that answers with the gradient of a discriminator.

    Args:
        server ([`BodyServer`]): An honest server.
        known_head (`Part`): The head that the server knows.
        public ([`TokenizedExamples`]): Texts of the server.
        scale (`float`): Size of the gradients, as a multiple of those of the honest server. 0 sends gradients of zero,
            which keep the head of the client as it is.
    """

    def __init__(self, server: BodyServer, known_head: Any, public: TokenizedExamples, scale: float) -> None:
        super().__init__(server)
        self.scale = scale
        self._known_head, self._public = known_head, public
        self._generator = torch.Generator().manual_seed(0)
        self._received: dict[int, torch.Tensor] = {}
        torch.manual_seed(1)
        size = known_head.model.config.hidden_size
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout=0.0, batch_first=True)
        self._discriminator = nn.Sequential(layer, nn.Linear(size, 1))
        self._optimizer = torch.optim.AdamW(self._discriminator.parameters(), lr=1e-3)

    def exchange(self, blob: bytes) -> bytes:
        request: Any = read_request(blob)
        answer = self.server.answer(blob)
        if isinstance(request, Forward):
            self._received[request.step] = request.hidden["values"].view(BATCH, LENGTH, -1)
        if isinstance(request, Backward):
            honest = Gradient.from_bytes(answer)
            gradient = self._hijack(self._received.pop(request.step)).flatten(0, 1) if self.scale else torch.zeros(1)
            gradient = gradient.expand_as(honest.gradient["values"]).contiguous()
            gradient *= self.scale * honest.gradient["values"].norm() / gradient.norm().clamp_min(1e-30)
            return Gradient(*request.micro_batch_id, gradient={"values": gradient}).to_bytes()
        return answer

    def deliver(self, message: Forward | Backward, answer_class: Any) -> Hidden | Gradient:
        return answer_class.from_bytes(self.exchange(message.to_bytes()))

    @sdpa_kernel(SDPBackend.MATH)  # the other kernels have no second derivative
    @torch.enable_grad()  # autograd calls the link in the backward pass of the client
    def _hijack(self, received: torch.Tensor) -> torch.Tensor:
        """Train the discriminator, and return the gradient that makes hidden states look like those of the head."""
        for _ in range(3):
            rows = torch.randint(len(self._public), (BATCH,), generator=self._generator)
            with torch.no_grad():
                known = self._known_head(self._public.input_ids[rows], use_cache=False).logits
            known.requires_grad_()
            logits = self._discriminator(torch.cat([known, received]))
            labels = torch.cat([torch.ones(BATCH), torch.zeros(BATCH)])[:, None, None].expand_as(logits)
            # The penalty of Mescheder et al. (2018), without which the training of the client diverges.
            (slope,) = torch.autograd.grad(logits[:BATCH].sum(), known, create_graph=True)
            loss = binary_cross_entropy_with_logits(logits, labels) + slope.square().sum() / BATCH
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        states = received.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(softplus(-self._discriminator(states)).mean(), states)
        return gradient


def attack(
    known: LlamaForCausalLM,
    client: LlamaForCausalLM,
    scale: float | None,
    bounded: bool,
    num_steps: int,
    options: Any,
) -> dict[str, Any]:
    """
    Train a client, and read its texts.

    Args:
        known (`LlamaForCausalLM`): The model whose head the server knows.
        client (`LlamaForCausalLM`): The model of the client before the training.
        scale (`float`, *optional*): Size of the gradients of the server. `None` is an honest server.
        bounded (`bool`): Whether the client checks the answers of the server.
        num_steps (`int`): Training steps of the client.
        options (`argparse.Namespace`): The options of the command.
    """
    texts = Texts()
    public, private = texts.examples(512, seed=1), texts.examples(options.num_texts, seed=2)
    model = SplitModel.from_model(client)
    if scale is not None:
        server = model.boundary.link.server
        model.boundary.link = HijackingServer(server, build_head(copy.deepcopy(known), 1), public, scale)
    model.boundary.bounds = AnswerBounds() if bounded else None
    torch.manual_seed(0)
    parts = nn.ModuleList([model.client_head, model.client_tail])
    optimizer, losses, refusal = torch.optim.AdamW(parts.parameters(), lr=options.learning_rate), [], ""
    order = torch.Generator().manual_seed(0)
    model.train()
    for step in range(num_steps):
        rows = torch.randint(len(private), (BATCH,), generator=order)
        model.boundary.begin_step(step)
        try:
            loss = model(private.input_ids[rows], labels=private.input_ids[rows]).loss
            loss.backward()
        except RefusedAnswerError as error:
            refusal = f"step {step}: {error}"
            break
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
    config = AuditConfig(head_blocks=[1], num_steps=options.attack_steps, num_candidates=8)
    victims = texts.examples(64, seed=3)
    results = invert(known.eval(), tokenizer(), public, victims, config, client.eval())
    return {
        "recall": {result.attacker: result.token_recall for result in results},
        "first_loss": sum(losses[:10]) / max(len(losses[:10]), 1),
        "last_loss": sum(losses[-10:]) / max(len(losses[-10:]), 1),
        "refusal": refusal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=600, help="training steps of the client")
    parser.add_argument("--num-texts", type=int, default=512, help="texts of the client")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--attack-steps", type=int, default=300, help="training steps of the attackers of the audit")
    parser.add_argument("--output", help="JSON file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    for start, seed in (("the known weights", 0), ("an own first part", 1)):
        for name, scale, bounded in (
            ("before training", None, True),
            ("honest server", None, True),
            ("gradients of zero, with the bound", 0.0, True),
            ("hijacking, gradients of honest size, with the bound", 1.0, True),
            ("hijacking, gradients of 10,000 times this size, without the bound", 1e4, False),
            ("hijacking, gradients of 10,000 times this size, with the bound", 1e4, True),
        ):
            num_steps = 0 if name == "before training" else options.num_steps
            result = attack(build_model(0), build_model(seed), scale, bounded, num_steps, options)
            report[f"{start}: {name}"] = result
            recall = ", ".join(f"{attacker} {value:.1%}" for attacker, value in result["recall"].items())
            print(f"{start}: {name}: {recall}; loss {result['last_loss']:.2f} {result['refusal']}", flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
