"""Pseudo-samples: input embeddings that are drawn from a model's word embeddings and moved by gradient descent.

FedDRS (Text-Free Federated Transformers Knowledge Distillation Without GAN, section 4) distills on pseudo-samples
instead of text. This module makes the samples of one client. `sample_descent.py` moves them, and `feddrs.py` has the
algorithm.

| kind | samples | minimized loss |
|---|---|---|
| `"random"` | rows of the word embeddings | none: the rows are unchanged |
| `"target"` | the client's model predicts the labels `γ` | `Σ CE(teacher(θ), γ)` (equation 6) |
| `"adversarial"` | only the client's model predicts `γ` | `Σ CE(teacher(θ), γ) − λ CE(student(θ), γ)` (equation 7) |
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


KINDS = ("random", "target", "adversarial")
ADVERSARIES = ("ce", "kl")
INITIALIZATIONS = ("averaged", "client", "gaussian")
# Label of a position without a label.
IGNORED = -100

# `logits(embeddings, labels)` returns a model's logits: `(samples, classes)`, or `(samples, tokens, vocabulary)` for a
# model that generates its labels.
Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def word_embeddings(model: Any) -> nn.Parameter:
    """A model's word embedding parameter, of shape `(vocabulary, hidden)`."""
    return model.get_input_embeddings().weight


def token_embeddings(model: Any) -> torch.Tensor:
    """
    The input embedding of each token, of shape `(vocabulary, hidden)`.

    These are the word embeddings. If the embedding module scales them (Gemma, mBART), the result is a scaled copy.
    """
    module = model.get_input_embeddings()
    if type(module) is nn.Embedding:
        return module.weight.detach()
    with torch.no_grad():
        return module(torch.arange(len(module.weight), device=module.weight.device))


def check_takes_embeddings(model: nn.Module, length: int) -> None:
    """
    Check that a model accepts input embeddings, and that it uses tokens only through its embedding module.

    Args:
        model (`torch.nn.Module`): The model, possibly with an adapter. It is called once with tokens and once with
            their embeddings.
        length (`int`): Number of positions of a sample.

    Raises:
        ValueError: If the model is no transformers model, its `forward` has no `inputs_embeds`, the embeddings of
            tokens give different results than the tokens, or the model has fewer than `length` positions.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel) or "inputs_embeds" not in inspect.signature(base.forward).parameters:
        raise ValueError(
            f"Pseudo-samples are input embeddings, but {type(base).__name__} does not accept them: its `forward` has "
            "no `inputs_embeds`. Use a transformers model with `inputs_embeds`, such as BERT, RoBERTa, T5 or Llama."
        )
    config: Any = base.config
    config = getattr(config, "encoder", config)  # for an encoder–decoder that consists of two models
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"`sample_length` is {length}, but {type(base).__name__} has {limit} positions. Set `sample_length` to at "
            f"most {limit}."
        )
    embeddings = token_embeddings(model)
    number = len(embeddings)
    named = [
        getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep", "decoder_start")
    ]
    # Some configurations have a list of end tokens.
    special = {token for ids in named for token in (ids if isinstance(ids, list) else [ids])}
    # Start in the middle of the vocabulary: the first tokens are often special tokens that no configuration lists.
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
            f"{type(base).__name__} gives different results for tokens and for their embeddings: it uses tokens "
            "outside its embedding module, so it cannot read pseudo-samples. Use another model."
        )


def draw_labels(counts: Sequence[float], num_samples: int, generator: torch.Generator) -> torch.Tensor:
    """
    Draw pseudo-labels in the proportions of a client's label histogram.

    Args:
        counts (`Sequence[float]`): The client's number of examples of each class.
        num_samples (`int`): Number of labels.
        generator (`torch.Generator`): A generator on the CPU.

    Returns:
        `torch.Tensor`: Classes, of shape `(num_samples,)`. A class without examples is never drawn.

    Raises:
        ValueError: If a count is negative or not finite, or all counts are 0.
    """
    histogram = torch.tensor(list(counts), dtype=torch.float64)
    if not bool(histogram.isfinite().all()) or bool((histogram < 0).any()) or not float(histogram.sum()) > 0:
        raise ValueError(
            f"the label histogram is {list(counts)}; its counts must be finite and not negative, and at least one "
            "count must be positive."
        )
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
    Draw the initial embeddings of pseudo-samples.

    Args:
        weight (`torch.Tensor`): Word embeddings, of shape `(vocabulary, hidden)`.
        shape (`tuple[int, int]`): Number of samples, and number of positions of each sample.
        generator (`torch.Generator`): A generator on the CPU.
        special_ids (`Sequence[int]`, *optional*): Tokens that are not drawn, such as padding.
        gaussian (`bool`, *optional*, defaults to `False`): Whether to draw from the normal distribution with the mean
            and standard deviation of the embeddings in each dimension, instead of drawing embeddings.
        num_tokens (`int`, *optional*): Number of tokens of the vocabulary. Later rows of the table are padding and are
            not used. By default, all rows are used.

    Returns:
        `torch.Tensor`: Embeddings of shape `(samples, positions, hidden)`, on the device of `weight`.
    """
    weight = weight.detach()[:num_tokens]
    if gaussian:
        noise = torch.randn((*shape, weight.shape[1]), generator=generator, dtype=torch.float32)
        return (weight.mean(0) + weight.std(0) * noise.to(weight)).to(weight.dtype)
    allowed = torch.ones(weight.shape[0], dtype=torch.bool)
    allowed[[token for token in special_ids if token < weight.shape[0]]] = False
    tokens = allowed.nonzero().flatten()
    return weight[tokens[torch.randint(len(tokens), shape, generator=generator)].to(weight.device)]


def label_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """
    Cross-entropy of each sample with its pseudo-label, summed over the positions that have a label.

    Args:
        logits (`torch.Tensor`): Logits of shape `(samples, classes)` or `(samples, tokens, vocabulary)`.
        labels (`torch.Tensor`): Labels of shape `(samples,)` or `(samples, tokens)`.

    Returns:
        `torch.Tensor`: Losses of shape `(samples,)`.
    """
    flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(len(labels), -1).sum(1)


def labeled_positions(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
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
    Loss of each adversarial sample, `CE(teacher(θ), γ) − λ CE(student(θ), γ)` (FedDRS, equation 7).

    With `adversary="kl"`, the second term is `−λ KL(teacher(θ) ‖ student(θ))`. The paper tried this term and found it
    unstable.

    Args:
        embeddings (`torch.Tensor`): `θ`, of shape `(samples, positions, hidden)`.
        labels (`torch.Tensor`): `γ`, as inputs of the models.
        teacher (`Callable`): The client's model.
        student (`Callable`): The server's model.
        weight (`float`): `λ`. With 0, the student is not called.
        adversary (`str`, *optional*, defaults to `"ce"`): `"ce"` or `"kl"`.

    Returns:
        `torch.Tensor`: Losses of shape `(samples,)`.
    """
    logits = teacher(embeddings, labels)
    loss = label_loss(logits, labels)
    if weight == 0:
        return loss
    student_logits = student(embeddings, labels)
    if adversary == "ce":
        return loss - weight * label_loss(student_logits, labels)
    teacher_log, student_log = (labeled_positions(item, labels).log_softmax(-1) for item in (logits, student_logits))
    divergences = F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(-1)
    sample_of = (labels.view(len(labels), -1) != IGNORED).nonzero()[:, 0]
    return loss - weight * torch.zeros_like(loss).index_add(0, sample_of, divergences)
