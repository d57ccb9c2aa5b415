"""`PseudoSampler`: makes pseudo-samples for [`FedDRS`] and trains the server's model on them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ..utils.random import derived_seed, isolated_rng
from .feedback import evaluation_mode
from .losses import kl_divergence
from .pseudo_samples import (
    IGNORED,
    Logits,
    adversarial_loss,
    draw_labels,
    initial_embeddings,
    labeled_positions,
    token_embeddings,
    word_embeddings,
)
from .sample_descent import descend
from .server import DistillationServer
from .teachers import Teachers


# A client's pseudo-samples of all kinds: `embeddings`, `labels`, and `logits` of the client's model at the positions
# that have a label.
Samples = dict[str, torch.Tensor]


class SamplingSettings(Protocol):
    """The arguments of [`FedDRS`] that describe its pseudo-samples."""

    sampling: str | Sequence[str]
    num_samples: int
    sample_length: int
    initialization: str
    adversary: str
    num_steps: int
    step_size: float
    step_size_schedule: str
    tolerance: float
    pin_cls: bool
    keeps_samples: bool
    samples: dict[str, Samples]

    def label_sequences(self, tokenizer: Any) -> torch.Tensor | None:
        """Return the texts of the classes as labels, or `None` if classes have no texts."""


class PseudoSampler:
    """
    Makes pseudo-samples from a client's model and trains the server's model on them.

    Args:
        algorithm ([`FedDRS`]): The settings.
        server ([`DistillationServer`]): The server's model.
        teachers ([`Teachers`]): The clients' models.
        num_training_steps (`int`): Number of optimizer steps of the server over the run.

    Raises:
        ValueError: If `pin_cls=True` and there is no tokenizer with a `[CLS]` token.
    """

    def __init__(
        self, algorithm: SamplingSettings, server: DistillationServer, teachers: Teachers, num_training_steps: int
    ) -> None:
        self._algorithm = algorithm
        self.server = server
        self.teachers = teachers
        self._student = server.student
        # The optimizer is created without the word embeddings, so that weight decay does not change them.
        with frozen(word_embeddings(server.student.model)):
            server.student.prepare(num_training_steps)
        tokenizer = server.student.processing_class
        self._draw = functools.partial(
            initial_embeddings,
            special_ids=[] if tokenizer is None else tokenizer.all_special_ids,
            # Embedding tables may have padding rows. The table of T5 has 32128 rows for 32100 tokens.
            num_tokens=None if tokenizer is None else len(tokenizer),
        )
        sequences = algorithm.label_sequences(tokenizer)
        # Labels of each class, as inputs of the model.
        self._labels = torch.arange(self._student.num_classes) if sequences is None else sequences
        self._cls = tokenizer.cls_token_id if algorithm.pin_cls and tokenizer is not None else None
        if algorithm.pin_cls and self._cls is None:
            raise ValueError("pin_cls=True needs a `processing_class` with a [CLS] token.")

    def _logits(self, model: nn.Module) -> Logits:
        def logits(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)
            inputs = {"inputs_embeds": embeddings.to(word_embeddings(model).dtype), "attention_mask": mask}
            if self._labels.ndim == 2:
                inputs["labels"] = labels
            return self._student.forward(inputs, model)

        return logits

    def _class_counts(self, client_id: str) -> list[float]:
        counts = self.teachers.class_counts(client_id)
        if len(counts) != len(self._labels):
            raise ValueError(f"its label histogram has {len(counts)} classes, but the server has {len(self._labels)}.")
        if missing := [label for label, count in enumerate(counts) if math.isnan(count)]:
            raise ValueError(f"its label histogram has no number for the classes {missing}.")
        return counts

    def check(self, client_id: str) -> Samples:
        """
        Run a client's model once, before its parameters are averaged with those of other clients.

        Args:
            client_id (`str`): Id of the client.

        Returns:
            `dict[str, torch.Tensor]`: An empty dictionary.

        Raises:
            ValueError: If the client's histogram does not fit the classes, or its model gives NaN or infinite values.
        """
        labels = draw_labels(self._class_counts(client_id), self._algorithm.num_samples, torch.Generator())
        if not self._is_finite(self.teachers.open(client_id), self._labels[labels].to(self._student.device)):
            raise ValueError("its model gives NaN or infinite values on its own word embeddings.")
        return {}

    @torch.no_grad()
    def _is_finite(self, model: nn.Module, labels: torch.Tensor) -> bool:
        """Whether a model in evaluation mode gives finite logits for its own word embeddings."""
        shape = (len(labels), self._algorithm.sample_length)
        embeddings = self._draw(token_embeddings(model), shape, torch.Generator())
        return bool(self._logits(model)(embeddings, labels).isfinite().all())

    def _raise_non_finite(self, teacher: nn.Module, labels: torch.Tensor, kind: str) -> NoReturn:
        """
        Raise an error that names the model that caused NaN or infinite values in pseudo-samples.

        Both the client's model and the server's model move the samples. Each model is tested on its own word
        embeddings.

        Raises:
            FloatingPointError: If the server's model gives such values and the client's model does not.
            ValueError: In all other cases.
        """
        is_sound = self._is_finite(teacher, labels)
        if is_sound and not self._is_finite(self._student.model, labels):
            raise FloatingPointError(
                "the server's model gives NaN or infinite values on word embeddings, but a client's model does not. "
                "Lower the learning rate (`learning_rate`, `server_lr`) or clip gradients (`max_grad_norm`)."
            )
        advice = (
            " Its values on word embeddings are finite: lower `step_size`." if is_sound and kind != "random" else ""
        )
        raise ValueError(f"its model gives NaN or infinite values on {kind} pseudo-samples.{advice}")

    def sample(self, client_id: str, weight: float, seed: int) -> Samples:
        """
        Make samples of all kinds from a client's model.

        Args:
            client_id (`str`): Id of the client.
            weight (`float`): `λ`.
            seed (`int`): Seed of labels and initial embeddings.

        Returns:
            `dict[str, torch.Tensor]`: `embeddings` of shape `(kinds × samples, positions, hidden)`, `labels`, and the
            client's `logits` at the positions that have a label, in order, of shape `(labeled positions, classes)`.
            All tensors are on the CPU.

        Raises:
            ValueError: If the client's histogram does not fit the classes, or its model gives NaN or infinite values.
            FloatingPointError: If the server's model gives NaN or infinite values and the client's model does not.
        """
        algorithm, student = self._algorithm, self._student.model
        counts = self._class_counts(client_id)
        generator = torch.Generator().manual_seed(seed)
        teacher = self.teachers.open(client_id)
        teacher_logits, student_logits = self._logits(teacher), self._logits(student)
        parts: list[Samples] = []
        with evaluation_mode(student):
            for kind in algorithm.sampling:
                labels = self._labels[draw_labels(counts, algorithm.num_samples, generator)]
                labels = labels.to(self._student.device)
                starts = embeddings = self._begin(teacher, generator)
                if kind != "random":
                    models = {"teacher": teacher_logits, "student": student_logits}
                    embeddings = self._descend(starts, labels, weight if kind == "adversarial" else 0.0, models)
                with torch.no_grad():
                    logits = teacher_logits(embeddings, labels)
                if not bool(logits.isfinite().all()) or not bool(embeddings.isfinite().all()):
                    self._raise_non_finite(teacher, labels, kind)
                # Logits over a vocabulary take most of the memory, so only labeled positions are kept.
                part = {"embeddings": embeddings, "labels": labels, "logits": labeled_positions(logits, labels)}
                if algorithm.keeps_samples:
                    part["starts"] = starts
                parts.append({name: value.cpu() for name, value in part.items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _descend(
        self, starts: torch.Tensor, labels: torch.Tensor, weight: float, models: dict[str, Logits]
    ) -> torch.Tensor:
        algorithm = self._algorithm

        def losses(embeddings: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return adversarial_loss(embeddings, labels[rows], **models, weight=weight, adversary=algorithm.adversary)

        return descend(
            starts,
            losses,
            algorithm.num_steps,
            algorithm.step_size,
            num_pinned=0 if self._cls is None else 1,
            tolerance=algorithm.tolerance,
            schedule=algorithm.step_size_schedule,
        )

    def _begin(self, teacher: nn.Module, generator: torch.Generator) -> torch.Tensor:
        algorithm = self._algorithm
        table = token_embeddings(teacher if algorithm.initialization == "client" else self._student.model)
        shape = (algorithm.num_samples, algorithm.sample_length)
        embeddings = self._draw(table, shape, generator, gaussian=algorithm.initialization == "gaussian")
        if self._cls is not None:
            embeddings[:, 0] = table[self._cls]
        # The steps are too small for the precision of narrow dtypes.
        return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))

    def learn(self, samples: Sequence[Samples], seed: int) -> float:
        """
        Train the server's model for one pass over the shuffled samples of several clients.

        Args:
            samples (`Sequence[dict[str, torch.Tensor]]`): Samples of each client, from `sample`.
            seed (`int`): Seed of the order and of dropout.

        Returns:
            `float`: Mean loss of the steps.
        """
        pairs = [(client, row) for client, part in enumerate(samples) for row in range(len(part["labels"]))]
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
        targets_of = [part["logits"].split(_num_labeled(part["labels"])) for part in samples]
        size, device = self.server.batch_size, self._student.device
        logits_of = self._logits(self._student.model)
        self._student.model.train()
        losses: list[torch.Tensor] = []
        with isolated_rng(derived_seed(seed, "dropout")), frozen(word_embeddings(self._student.model)):
            for start in range(0, len(order), size):
                batch = [pairs[index] for index in order[start : start + size]]
                embeddings = torch.stack([samples[client]["embeddings"][row] for client, row in batch]).to(device)
                labels = torch.stack([samples[client]["labels"][row] for client, row in batch]).to(device)
                targets = torch.cat([targets_of[client][row] for client, row in batch]).to(device)
                logits = labeled_positions(logits_of(embeddings, labels), labels)
                losses.append(self._student.step(kl_divergence(logits, targets)))
        return float(torch.stack(losses).mean())


def _num_labeled(labels: torch.Tensor) -> list[int]:
    """Number of positions with a label, for each sample."""
    return (labels.view(len(labels), -1) != IGNORED).sum(1).tolist()


@contextmanager
def frozen(parameter: nn.Parameter) -> Iterator[None]:
    """Freeze a parameter in the body of the `with` statement."""
    trained = parameter.requires_grad
    parameter.requires_grad_(False)
    try:
        yield
    finally:
        parameter.requires_grad_(trained)
