"""FedID: clients receive feedback on how the server's loss on labeled examples changed after it learned from them.

Ma et al., FedID: Federated Interactive Distillation for Large-Scale Pretraining Language Models (EMNLP 2023),
algorithm 1 and equations 9 to 15.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from ..messages import Feedback
from ..methods import ClientPart
from ..utils.meta_tensors import to_cpu
from ..utils.random import derived_seed
from .base import ClientLogits, Distillation
from .client import DistillationPart
from .client_weights import num_examples_by_client, weighted_mean
from .codec import rows_of
from .cohort import Cohort
from .feedback import logit_feedback
from .losses import soft_cross_entropy
from .public_rows import PublicRows
from .requirements import Requirements
from .server import DistillationServer
from .surrogates import (
    chain_rule_surrogate,
    mpl_sampled_surrogate,
    mpl_surrogate,
    per_example_feedback,
    per_example_surrogate,
    sample_pseudo_labels,
)


# Smallest distance of the clients' probabilities from their mean in a mini-batch, for the log of `feedback_ratio`.
SMALLEST_DIFFERENCE = 1e-6
FEEDBACKS = ("chain_rule", "per_example", "mpl_sampled", "mpl", "none")


class FedIDPart(DistillationPart):
    """Client half of [`FedID`]."""

    def feedback_loss(self, logits: torch.Tensor, message: Feedback) -> torch.Tensor:
        method, num_classes = self.method, logits.shape[-1]
        ensemble = self.encoding.decode_targets(message.targets, num_classes).to(logits.device)
        weight, improvement = message.settings["weight"], message.settings["improvement"]
        labels = _draw_labels(ensemble, message.settings["labels"])
        if method.feedback == "mpl":
            # In the published code, clients learn hard labels.
            distillation = F.cross_entropy(logits, ensemble.argmax(-1))
        else:
            distillation = soft_cross_entropy(logits, ensemble)
        loss = distillation if method.clients_distill else torch.zeros_like(distillation)
        if method.feedback == "chain_rule":
            gradient = self.encoding.codec.dense.decode(message.feedback, rows_of(num_classes))["rows"]
            gradient = gradient.to(logits.device)
            gradient = torch.ldexp(gradient, torch.tensor(message.settings["exponent"], device=logits.device))
            loss = loss + chain_rule_surrogate(logits.softmax(-1), gradient, weight)
        elif method.feedback == "per_example":
            rewards = message.feedback["rewards"].to(logits.device)
            loss = loss + per_example_surrogate(logits.softmax(-1), ensemble, labels, rewards, weight)
        elif method.feedback == "mpl_sampled":
            loss = loss + mpl_sampled_surrogate(logits.softmax(-1), ensemble, labels, improvement, weight)
        elif method.feedback == "mpl":
            loss = loss + mpl_surrogate(logits, logits.argmax(-1), improvement, weight)
        return loss


@dataclass(kw_only=True, repr=False, eq=False)
class FedID(Distillation):
    """
    FedID: clients learn from the ensemble and from feedback on the server's loss on labeled examples.

    [FedID: Federated Interactive Distillation for Large-Scale Pretraining Language
    Models](https://aclanthology.org/2023.emnlp-main.529) (Ma et al., EMNLP 2023), algorithm 1 and equations 9 to 15.

    The server and the clients process the public examples together, one mini-batch at a time:

    1. The clients send their predictions.
    2. The server's model takes a step on their mean `q = Σ_k w_k y_k`. `y_k` are probabilities, and `w_k` is
       proportional to the client's number of examples.
    3. The server computes its loss on a batch of its labeled examples, and answers with `q` and with feedback.
    4. Each client takes one step on `CE(q, f_k(x))` plus the term of the feedback (equation 15).

    The paper broadcasts the validation loss, which is a number without a gradient for any client. Equation 12 implies
    the chain rule through `q`, which is the default here:

    | `feedback` | sent in addition to `q` | gradient that a client adds |
    |---|---|---|
    | `"chain_rule"` | `∂L_val/∂q`, as many numbers as `q` | the gradient of the server's loss after a plain step |
    | `"per_example"` | one number per row | an unbiased estimate of it, also small for a vocabulary |
    | `"mpl_sampled"` | one number | an estimate of it, if the server's step is on labels drawn from `q` |
    | `"mpl"` | one number | the gradient of the paper's published code, which is biased |
    | `"none"` | nothing | none: the ablation, and the literal reading of the paper |

    | paper | here |
    |---|---|
    | `η` of equation 11, the server's step | `server_lr` |
    | `η` of equation 12, in the derivative of the server's loss | `virtual_step_size` |
    | factor 1 of `g_feedback` in equation 15 | `feedback_weight / virtual_step_size` |
    | `η^k` of equation 15 | `client_lr` |

    Every mini-batch moves the clients towards their mean. If some clients know only one label, or have barely been
    trained, the mean is nearly constant, and all clients agree on it before the server has learned anything. Let the
    clients train long enough first, and set `client_lr` below the learning rate of their local training.

    Clients send predictions in training mode, with dropout, because they take their step on the same graph. The server
    computes its loss on labeled examples without dropout.

    In tagging and token prediction, each row of the predictions is a word or a token, and `B` is the number of words
    or tokens over which a loss is averaged.

    Args:
        feedback (`str`, *optional*, defaults to `"chain_rule"`):
            Kind of feedback, as in the table.
        virtual_step_size (`float`, *optional*, defaults to `0.01`):
            `η` of `θ⁺ = θ − η ∇L_S(θ)`, the plain gradient descent step after which `"chain_rule"` and `"per_example"`
            compute the gradient of the server's loss. The server's own step has `server_lr`.
        feedback_weight (`float`, *optional*, defaults to `0.01`):
            Scale `λ` of the feedback of `"chain_rule"` and `"per_example"`. With `λ = η`, the feedback is the gradient
            of the server's loss after the virtual step. With the learning rate of an adaptive optimizer (2e-5), the
            feedback would be negligible compared to the distillation. With `"chain_rule"`, the log has the ratio of
            the norm of the feedback's gradient to the norm of the distillation's gradient, with respect to the
            clients' logits (`federated/feedback_ratio`). A ratio far below 1 is nearly `"none"`.
        clients_distill (`bool`, *optional*, defaults to `True`):
            Whether clients learn `q`. `False` is the paper's ablation "without g_distill".
        public_epochs (`int`, *optional*, defaults to `1`):
            Number of passes over the public examples in a round. It replaces `server_epochs` and `client_epochs`.
        feedback_step_size (`float`, *optional*):
            Alias that sets `virtual_step_size` and `feedback_weight` to one number. Model cards and saved
            configurations contain these two settings.
        kwargs (*optional*): As in [`Distillation`], except `server_epochs`, `client_epochs`, `temperature` and
            `train_on_labeled`. The losses have no temperature, and the server does not train on its labeled
            examples.

    Raises:
        ValueError: If the feedback is unknown, a number is out of range, or a setting has no effect given another
            setting.

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients, and labeled examples on the server
          (`server_dataset`), except with `feedback="none"`.
        - Models: any architectures and tokenizers with the same labels in the same order. Token prediction needs the
          same vocabulary.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]).
        - Sent: for each mini-batch, logits from the clients, and `q` and the feedback from the server. No parameters.

    Relations:
        - [`MHAT`] exchanges predictions once per round and can train the server on its labeled examples. Choose MHAT
          if communication for each mini-batch is too slow.
        - [`AdaFD`] weighs clients by their training loss and needs no labeled examples on the server.
        - Choose FedID if the server has a few labeled examples that it should use for feedback rather than for
          training.

    Example:

    ```python
    >>> from hf_federated import FedID

    >>> FedID(feedback="per_example")
    FedID(feedback='per_example')
    ```
    """

    name: ClassVar[str] = "fedid"
    client_part: ClassVar[type[ClientPart]] = FedIDPart
    broadcasts: ClassVar[str] = "probabilities"
    aliases: ClassVar[Mapping[str, str]] = {**Distillation.aliases, "feedback_step_size": "virtual_step_size"}
    # The server evaluates on its labeled examples and does not train on them.
    ignores: ClassVar[tuple[str, ...]] = ("server_epochs", "client_epochs", "temperature", "train_on_labeled")

    feedback: str = "chain_rule"
    virtual_step_size: float = 0.01
    feedback_weight: float = 0.01
    clients_distill: bool = True
    public_epochs: int = 1
    feedback_step_size: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_of("feedback", FEEDBACKS)
        self._require(("public_epochs",), lambda value: value >= 1, "at least 1")
        scales = ("virtual_step_size", "feedback_weight")
        if self.feedback not in ("chain_rule", "per_example"):
            self._refuse_without_effect("feedback_step_size", *scales, given=f"feedback={self.feedback!r}")
        if self.feedback_step_size is not None:
            if given := self.non_default_settings().keys() & set(scales):
                raise ValueError(
                    f"`feedback_step_size` is {self.feedback_step_size} and sets `virtual_step_size` and "
                    f"`feedback_weight`, but `{min(given)}` is {getattr(self, min(given))}. Leave out "
                    "`feedback_step_size`, and set the two settings."
                )
            self.virtual_step_size = self.feedback_weight = self.feedback_step_size
        self._require(scales, lambda value: 0 < value < math.inf, "positive and finite")
        if not self.alignment.is_identity:
            raise ValueError(
                f"{type(self).__name__} sends all clients the same targets and gradients, so its `alignment` must be "
                f"Alignment(), not {type(self.alignment).__name__}. Use a method that sends targets once in a round, "
                "such as DSFL."
            )
        if not self.clients_distill and self.feedback == "none":
            raise ValueError(
                "feedback='none' and clients_distill=False leave the clients nothing to learn. Change one of them."
            )

    @property
    def requirements(self) -> Requirements:
        has_feedback = self.feedback != "none"
        return dataclasses.replace(
            super().requirements,
            server_dataset=has_feedback,
            unscaled_gradients=has_feedback,
            forward_derivatives=self.feedback in ("chain_rule", "per_example"),
        )

    @property
    def passes_per_round(self) -> int:
        return self.public_epochs

    # ---- Server side

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        num_steps = server.num_rounds * self.public_epochs * server.batches_per_epoch
        server.prepare(self.public_epochs)
        results: list[tuple[torch.Tensor, tuple[float, float]]] = []
        for epoch in range(self.public_epochs):
            for number, rows in enumerate(server.mini_batches(cohort.round, epoch)):
                step = self._mini_batch(cohort, server, rows, (cohort.round, epoch, number), num_steps)
                if step is not None:
                    results.append((step.loss, step.gradient_norms))
        cohort.check_num_positions(len(results))
        losses, norms = zip(*results, strict=True)
        logs = {"server_distillation_loss": float(torch.stack(losses).mean())}
        feedback_norm, distillation_norm = map(sum, zip(*norms, strict=True))
        # Below this threshold the clients' predictions are equal up to rounding.
        if self.feedback == "chain_rule" and distillation_norm > SMALLEST_DIFFERENCE * len(norms):
            logs["feedback_ratio"] = feedback_norm / distillation_norm
        return logs

    def _mini_batch(
        self,
        cohort: Cohort,
        server: DistillationServer,
        rows: PublicRows,
        purpose: tuple[int, int, int],
        num_steps: int,
    ) -> _ServerStep | None:
        """
        Exchange one mini-batch and take the server's step on it.

        Returns:
            `_ServerStep`, *optional*: The step, or `None` if the server and the clients have no position of the batch
            in common.
        """
        round, epoch, number = purpose
        predictions = cohort.predict(rows, server.shape_of(rows), keeps_graph=True)
        if not server.num_agreed(rows):
            return None
        weights = num_examples_by_client(cohort)
        total = sum(weights.values())
        targets = self.encoding.encode_targets(
            weighted_mean({client_id: logits.softmax(-1) for client_id, logits in predictions.items()}, weights)
        )
        # Decode the encoded targets, so that the server and the clients use the same numbers.
        ensemble = self.encoding.decode_targets(targets, server.student.num_classes)
        seed = derived_seed(server.seed, "pseudo-labels", *purpose)
        inputs = server.student.inputs(server.student.with_positions(server.numbers_of(rows)))
        ensemble = ensemble.to(server.student.device)
        step = _ServerStep(self, server, inputs, ensemble, predictions, weights, purpose, seed)
        feedback = dict.fromkeys(cohort.client_ids, step.take())
        # The exponent is sent as a float, which has the same size for all values.
        common = {"improvement": step.improvement, "labels": seed, "exponent": float(step.exponent)}
        settings = {client_id: {"weight": weights[client_id] / total, **common} for client_id in cohort.client_ids}
        position = (round * self.public_epochs + epoch) * server.batches_per_epoch + number
        cohort.send_feedback(rows, targets, feedback, settings, position, num_steps)
        return step


def _draw_labels(probabilities: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw a label for each row. The same seed gives the same labels on the server and on the clients."""
    if probabilities.is_meta:  # A dry round has no values.
        return probabilities.argmax(-1)
    return sample_pseudo_labels(probabilities.cpu(), torch.Generator().manual_seed(seed)).to(probabilities.device)


def _exponent(gradient: torch.Tensor) -> int:
    """The smallest power of 2 that exceeds all absolute values. 0 for zeros and for values that are not finite."""
    largest = float(gradient.abs().max()) if gradient.numel() and not gradient.is_meta else 0.0
    return math.frexp(largest)[1] if math.isfinite(largest) else 0


@dataclass(eq=False)
class _ServerStep:
    """
    The server's step on one mini-batch, and its feedback to the clients.

    Args:
        algorithm ([`FedID`]): The settings.
        server ([`DistillationServer`]): The server's model and examples.
        inputs (`dict[str, Any]`): The mini-batch, as inputs of the server's model.
        ensemble (`torch.Tensor`): `q`, of shape `(rows, classes)`.
        predictions (`Mapping[str, torch.Tensor]`): Logits by client.
        weights (`Mapping[str, float]`): Number of examples of each client.
        purpose (`tuple[int, ...]`): Round, epoch and number of the mini-batch.
        seed (`int`): Seed of the labels that are drawn from `q`.
    """

    algorithm: FedID
    server: DistillationServer
    inputs: dict[str, Any]
    ensemble: torch.Tensor
    predictions: ClientLogits
    weights: Mapping[str, float]
    purpose: tuple[int, ...]
    seed: int
    # L_old - L_new, for "mpl" and "mpl_sampled".
    improvement: float = 0.0
    # The feedback is sent divided by 2 to this power, so that `float16` keeps small numbers. The division is exact.
    exponent: int = 0
    # The server's loss, and the norms of the gradients of feedback and distillation, summed over all clients.
    loss: torch.Tensor = field(init=False)
    gradient_norms: tuple[float, float] = (0.0, 0.0)

    def take(self) -> dict[str, torch.Tensor]:
        """Take the server's step and return the feedback for all clients."""
        method = self.algorithm.feedback
        feedback: dict[str, torch.Tensor] = {}
        if method in ("chain_rule", "per_example"):
            step_size, scale = self.algorithm.virtual_step_size, self.algorithm.feedback_weight
            gradient = self.server.ensemble_gradient(self.inputs, self.ensemble, self._labeled_loss, step_size, scale)
            if method == "chain_rule":
                self.exponent = _exponent(gradient)
                scaled = torch.ldexp(gradient, torch.tensor(-self.exponent, device=gradient.device))
                feedback = self.algorithm.encoding.codec.dense.encode({"gradient": scaled})
                if not gradient.is_meta:
                    self.gradient_norms = self._gradient_norms(gradient)
            else:
                feedback = {"rewards": to_cpu(per_example_feedback(gradient, self._labels).float())}
        sends_improvement = method in ("mpl", "mpl_sampled")
        before = self.server.evaluate_loss(self._labeled_loss) if sends_improvement else 0.0
        self.loss = self.server.train_step(self.inputs, self._loss, self.purpose)
        if sends_improvement:
            self.improvement = before - self.server.evaluate_loss(self._labeled_loss)
        return feedback

    def _gradient_norms(self, gradient: torch.Tensor) -> tuple[float, float]:
        total = sum(self.weights.values())
        feedback_norm = distillation_norm = 0.0
        for client_id, logits in self.predictions.items():
            own = logits.softmax(-1).to(gradient)
            feedback_norm += float(logit_feedback(own, gradient).norm()) * self.weights[client_id] / total
            distillation_norm += float((own - self.ensemble.to(own)).norm()) / max(1, len(own))
        return feedback_norm, distillation_norm

    def _loss(self, logits: torch.Tensor) -> torch.Tensor:
        if self.algorithm.feedback == "mpl_sampled":
            return F.cross_entropy(logits, self._labels)
        if self.algorithm.feedback == "mpl":
            total = sum(self.weights.values())
            losses = [
                F.cross_entropy(logits, client_logits.argmax(-1).to(logits.device)) * (self.weights[client_id] / total)
                for client_id, client_logits in self.predictions.items()
            ]
            return torch.stack(losses).sum()
        return soft_cross_entropy(logits, self.ensemble)

    @cached_property
    def _labels(self) -> torch.Tensor:
        return _draw_labels(self.ensemble, self.seed)

    @cached_property
    def _labeled(self) -> dict[str, Any]:
        """The labeled examples of this step. Only a method with feedback reads them."""
        return self.server.labeled_batch(self.server.batch_size, *self.purpose)

    def _labeled_loss(self) -> torch.Tensor:
        if self.server.student.positions is not None:
            # The model's own loss covers the words or tokens that have labels.
            loss = self.server.student.loss(self._labeled)
        else:
            inputs = {name: value for name, value in self._labeled.items() if name != "labels"}
            loss = F.cross_entropy(self.server.student.forward(inputs), self._labeled["labels"])
        if not bool(loss.detach().isfinite()):
            raise FloatingPointError(
                f"The server's loss on a batch of its labeled examples is {float(loss.detach())}: no example of the "
                "batch has a label, or the parameters of the server's model are no longer finite. Check the labels of "
                "`server_dataset`, or lower `server_lr`."
            )
        return loss
