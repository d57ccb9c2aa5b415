"""Pseudo-embeddings: inputs of a model that nobody wrote, drawn from its embeddings and moved by gradient descent.

FedDRS (Text-Free Federated Transformers Knowledge Distillation Without GAN, section 4) distils on them instead of
text. Here is how one client's are made; `feddrs.py` has the algorithm.

| kind | what it is |
|---|---|
| `"random"` | rows of the word embeddings, as they are |
| `"target"` | moved until the client's model sees its labels in them: `Σ CE(teacher(θ), γ)` (equation 6) |
| `"adversarial"` | and the server's model does not: `Σ CE(teacher(θ), γ) − λ CE(student(θ), γ)` (equation 7) |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .feedback import evaluation_mode
from .losses import kl_divergence


KINDS = ("random", "target", "adversarial")
ADVERSARIES = ("ce", "kl")
INITIALIZATIONS = ("averaged", "client", "gaussian")
# The label of a position that has none.
IGNORED = -100

# `logits(embeddings, labels)`: a model's, of shape `(samples, classes)`, or `(samples, tokens, vocabulary)` of one
# that writes its labels.
Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def word_embeddings(model: Any) -> nn.Parameter:
    """A model's word embeddings, of shape `(vocabulary, hidden)`."""
    return model.get_input_embeddings().weight


def token_embeddings(model: Any) -> torch.Tensor:
    """
    What a model takes for each token, of shape `(vocabulary, hidden)`: its word embeddings, and where its embedding
    module scales them (Gemma, mBART) these times the scale, in a copy.
    """
    module = model.get_input_embeddings()
    if type(module) is nn.Embedding:
        return module.weight.detach()
    with torch.no_grad():
        return module(torch.arange(len(module.weight), device=module.weight.device))


def check_takes_embeddings(model: nn.Module, length: int) -> None:
    """
    Refuse a model that takes tokens and nothing else, or does more with them than its embedding module.

    Args:
        model (`torch.nn.Module`): The model, also with an adapter. It is called once with tokens and once with their
            embeddings.
        length (`int`): Positions of a sample.

    Raises:
        ValueError: If it is no transformers model, its `forward` has no `inputs_embeds`, the embeddings of tokens give
            other results than the tokens, or it has no so many positions.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel) or "inputs_embeds" not in inspect.signature(base.forward).parameters:
        raise ValueError(
            f"Pseudo-samples are word embeddings, and {type(base).__name__} does not take such: its `forward` has no "
            "`inputs_embeds`. Take a transformers model that has, such as BERT, RoBERTa, T5 or Llama."
        )
    config: Any = base.config
    config = getattr(config, "encoder", config)  # of an encoder–decoder of two models
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(f"`sample_length` is {length}, and {type(base).__name__} has {limit} positions.")
    embeddings = token_embeddings(model)
    number = len(embeddings)
    named = [
        getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep", "decoder_start")
    ]
    # Some configs have several ends.
    special = {token for own in named for token in (own if isinstance(own, list) else [own])}
    # From the middle on, as the first tokens are often special ones that a config does not name.
    ordinary = [token for token in [*range(number // 2, number), *range(number // 2)] if token not in special]
    tokens = torch.tensor([(ordinary * length)[:length]], device=embeddings.device)
    reader: Any = base.get_encoder() if base.config.is_encoder_decoder else model
    try:
        with torch.no_grad(), evaluation_mode(model):
            expected, got = reader(input_ids=tokens)[0], reader(inputs_embeds=embeddings[tokens])[0]
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"{type(base).__name__} cannot read pseudo-samples of `sample_length` {length}: {error}"
        ) from error
    if expected.isfinite().all() and not torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * float(expected.std())):
        raise ValueError(
            f"{type(base).__name__} gives other results for the embeddings of tokens than for the tokens: it does "
            "more with tokens than its embedding module, and pseudo-samples would not be such as it reads."
        )


def draw_labels(counts: Sequence[float], num_samples: int, generator: torch.Generator) -> torch.Tensor:
    """
    Pseudo-labels in the proportions of a client's label histogram.

    Args:
        counts (`Sequence[float]`): Rows of each class that the client has.
        num_samples (`int`): How many.
        generator (`torch.Generator`): On the CPU.

    Returns:
        `torch.Tensor`: Classes, of shape `(num_samples,)`. A class without rows is never drawn.

    Raises:
        ValueError: If a count is negative or not finite, or all are zero.
    """
    histogram = torch.tensor(list(counts), dtype=torch.float64)
    if not bool(histogram.isfinite().all()) or bool((histogram < 0).any()) or not float(histogram.sum()) > 0:
        raise ValueError(f"a label histogram must have counts of zero or more, and some rows; got {list(counts)}.")
    return torch.multinomial(histogram, num_samples, replacement=True, generator=generator)


def initial_embeddings(
    weight: torch.Tensor,
    shape: tuple[int, int],
    generator: torch.Generator,
    special_ids: Sequence[int] = (),
    gaussian: bool = False,
    num_tokens: int | None = None,
) -> torch.Tensor:
    """
    Where pseudo-samples begin.

    Args:
        weight (`torch.Tensor`): Word embeddings, of shape `(vocabulary, hidden)`.
        shape (`tuple[int, int]`): Samples, and positions of each.
        generator (`torch.Generator`): On the CPU.
        special_ids (`Sequence[int]`, *optional*): Tokens that are not drawn, such as padding.
        gaussian (`bool`, *optional*, defaults to `False`): Draw from the normal distribution with the embeddings' mean
            and standard deviation in each dimension, instead of the embeddings themselves.
        num_tokens (`int`, *optional*): Of the vocabulary, where the table has further rows, which fill it up; all by
            default.

    Returns:
        `torch.Tensor`: Of shape `(samples, positions, hidden)`, on the embeddings' device.
    """
    weight = weight.detach()[:num_tokens]
    if gaussian:
        noise = torch.randn((*shape, weight.shape[1]), generator=generator, dtype=torch.float32)
        return (weight.mean(0) + weight.std(0) * noise.to(weight)).to(weight.dtype)
    allowed = torch.ones(weight.shape[0], dtype=torch.bool)
    allowed[[token for token in special_ids if token < weight.shape[0]]] = False
    tokens = allowed.nonzero().flatten()
    drawn = tokens[torch.randint(len(tokens), shape, generator=generator)]
    return weight[drawn.to(weight.device)]


def label_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Cross-entropy with the pseudo-labels, summed over samples and over the positions that have a label.

    Args:
        logits (`torch.Tensor`): Of shape `(samples, classes)` or `(samples, tokens, vocabulary)`.
        labels (`torch.Tensor`): Of shape `(samples,)` or `(samples, tokens)`.
    """
    flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def labelled_positions(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The logits of all positions that have a label, of shape `(positions, classes)`."""
    return logits.flatten(0, -2)[labels.flatten() != IGNORED]


def adversarial_loss(
    embeddings: torch.Tensor,
    labels: torch.Tensor,
    teacher: Logits,
    student: Logits,
    weight: float,
    adversary: str = "ce",
) -> torch.Tensor:
    """
    `Σ CE(teacher(θ), γ) − λ CE(student(θ), γ)` (FedDRS, equation 7), or with `−λ KL(teacher(θ) ‖ student(θ))`, which
    the paper tried in its place and found unstable.

    Args:
        embeddings (`torch.Tensor`): `θ`, of shape `(samples, positions, hidden)`.
        labels (`torch.Tensor`): `γ`, as the models take them.
        teacher (`Callable`): A client's model.
        student (`Callable`): The server's.
        weight (`float`): `λ`. With 0 the student is not asked.
        adversary (`str`, *optional*, defaults to `"ce"`): `"ce"` or `"kl"`.

    Returns:
        `torch.Tensor`: A scalar.
    """
    logits = teacher(embeddings, labels)
    loss = label_loss(logits, labels)
    if weight == 0:
        return loss
    theirs = student(embeddings, labels)
    if adversary == "ce":
        return loss - weight * label_loss(theirs, labels)
    ours, theirs = labelled_positions(logits, labels), labelled_positions(theirs, labels)
    return loss - weight * kl_divergence(theirs, ours) * len(ours)


def descend(
    embeddings: torch.Tensor,
    loss: Callable[[torch.Tensor], torch.Tensor],
    num_steps: int,
    step_size: float,
    num_pinned: int = 0,
) -> torch.Tensor:
    """
    Plain gradient descent on pseudo-samples, `θ ← θ − β ∇θ L`. No parameter of a model gets a gradient.

    Args:
        embeddings (`torch.Tensor`): `θ`, of shape `(samples, positions, hidden)`; not changed.
        loss (`Callable`): `L(θ)`, a scalar.
        num_steps (`int`): Steps.
        step_size (`float`): `β`.
        num_pinned (`int`, *optional*, defaults to `0`): Positions at the beginning that stay as they are.

    Returns:
        `torch.Tensor`: Of the same shape.
    """
    moved = embeddings.detach().clone()
    with torch.enable_grad():
        for _ in range(num_steps):
            moved.requires_grad_()
            (gradient,) = torch.autograd.grad(loss(moved), moved)
            moved = moved.detach()
            moved[:, num_pinned:] -= step_size * gradient[:, num_pinned:]
    return moved
