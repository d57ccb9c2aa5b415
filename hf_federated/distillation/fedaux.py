"""FedAUX: FedDF whose teacher hears each client where it is at home.

Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning (IEEE TNNLS 2021, arXiv 2102.02514).
The paper's other half, a model that was pre-trained on the auxiliary data without labels, is the model that the
trainer is given. Its clients with models of several architectures are not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import Trainer

from ..clients.context import ClientContext
from ..clients.features import base_model_of
from ..clients.student import Student
from ..messages import Disclosure, public_order
from ..tasks.metrics.base import require_extra
from ..utils.random import derived_seed, isolated_rng
from .base import Distillation
from .certainty import certainty, fit_certainty, noise_std, scale_into_unit_ball
from .client import DistillationClient, LocalDistillation
from .cohort import Cohort
from .requirements import Requirements
from .server import DistillationServer


CERTAINTY = "certainty"
WEIGHTED_LOGITS = "weighted_logits"
# How much larger a number may come out of bfloat16, relatively.
ROUNDING = 2**-8


class SendWeightedLogits(LocalDistillation):
    """Sends the logits of all public examples, multiplied by the client's certainty scores, and the scores."""

    def __init__(self, student: Student, scores: torch.Tensor) -> None:
        self._student = student
        self._scores = scores

    def finish(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, torch.Tensor]:
        logits = self._student.predict(range(self._student.num_rows))
        return {WEIGHTED_LOGITS: self._scores.unsqueeze(-1) * logits, CERTAINTY: self._scores}


class FedAUXClient(DistillationClient):
    """The client side of [`FedAUX`]: scores the public examples once, with features of the initial model."""

    def before_training(self, context: ClientContext) -> None:
        if context.state:
            return
        model, student, dataset = context.model, context.student, context.open_dataset()
        # The global state of this round is written afterwards.
        model.exchange.write(model.initial or {})
        seed = derived_seed(context.seed, "features", context.client_id)
        limit = self.algorithm.max_score_rows
        if limit is not None and limit < len(dataset):
            dataset = dataset.select(public_order(len(dataset), derived_seed(seed, "rows"))[:limit].tolist())
        # An import may draw random numbers too: scikit-learn's first import in a process does.
        with isolated_rng(seed):
            context.state[CERTAINTY] = self.scores(student.features(dataset), student.features(), seed)

    def scores(self, own: torch.Tensor, public: torch.Tensor, seed: int) -> torch.Tensor:
        """
        Certainty scores of the public examples.

        Args:
            own (`torch.Tensor`): Features of the client's examples, of shape `(own examples, features)`.
            public (`torch.Tensor`): Features of the public examples, of shape `(public examples, features)`.
            seed (`int`): Seed of the noise.

        Returns:
            `torch.Tensor`: Of shape `(public examples,)`.
        """
        algorithm = self.algorithm
        own, public = scale_into_unit_ball(own, public)
        weights = fit_certainty(own, public, algorithm.regularization)
        if algorithm.dp_epsilon is not None and algorithm.dp_delta is not None:
            num_examples = len(own) + len(public)
            std = noise_std(num_examples, algorithm.regularization, algorithm.dp_epsilon, algorithm.dp_delta)
            generator = torch.Generator().manual_seed(seed)
            weights = weights + std * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
        return certainty(weights, public, algorithm.score_offset)

    def local_training(self, context: ClientContext, round: int) -> LocalDistillation:
        return SendWeightedLogits(context.student, context.state[CERTAINTY])


@dataclass(kw_only=True, repr=False, eq=False)
class FedAUX(Distillation):
    """
    Parameters are averaged as `aggregation` says; then the server's model learns, by KL divergence, the mean of the
    clients' logits of the public rows, in which each client weighs what it is certain of: the teacher of row x is
    `softmax(Σ_k s_k(x) z_k(x) / Σ_k s_k(x))`. Equal scores are [`FedDF`].

    Scores are found once by each client, with the model as it was before the first round, which all clients have: its
    features of the client's rows are told from its features of the public rows by a logistic regression
    ([`certainty`]). They depend on the model, the rows and the run's seed, and not on when the client is first asked.
    With its parameters a client sends `s_k z_k` and `s_k`, of which the server needs the means alone.

    | paper | here |
    |---|---|
    | `h` | mean over the positions of the base model's last hidden states ([`features`]), scaled |
    | `D_i`, `D⁻`, `D_distill` | the client's rows (`max_score_rows` of them); the public rows, for both |
    | `λ` | `regularization`, beside the mean of the log-losses |
    | `ξ` | `score_offset` |
    | `ε`, `δ` | `dp_epsilon`, `dp_delta` |

    With `dp_epsilon` and `dp_delta` the regression's weights get Gaussian noise, and the scores of a client, however
    often they are sent, are (ε, δ)-differentially private with regard to one of its rows. This is said of the scores
    alone, not of parameters and logits; and of somebody who does not know the run's seed, from which the noise is
    drawn so that a resumed run is the same.

    Needs scikit-learn (extra `metrics`).

    Args:
        regularization (`float`, *optional*, defaults to `0.01`):
            `λ` of the logistic regression.
        score_offset (`float`, *optional*, defaults to `1e-8`):
            Added to every score, so that a row which is like no client's has a teacher too.
        dp_epsilon (`float`, *optional*):
            Of differential privacy, between 0 and 1; no noise by default.
        dp_delta (`float`, *optional*):
            The same, between 0 and 1; goes with `dp_epsilon`.
        max_score_rows (`int`, *optional*):
            How many of a client's rows the regression sees, drawn without replacement; all by default.
        kwargs (*optional*): As in [`Distillation`], but for `client_epochs`, `client_lr`,
            `prediction_dtype` and `top_k`: clients do not distil, and what is averaged travels in float32.

    Raises:
        ValueError: If a setting is out of range, or one of `dp_epsilon` and `dp_delta` comes without the other; when a
            trainer is built, if its task predicts words or tokens, of which there are no scores.
        ImportError: When a trainer is built, if scikit-learn is not installed.

    Example:

    ```python
    >>> from hf_federated import FedAUX

    >>> FedAUX(dp_epsilon=0.5, dp_delta=1e-5)
    FedAUX(dp_epsilon=0.5, dp_delta=1e-05)
    ```
    """

    name: ClassVar[str] = "fedaux"
    parameters: ClassVar[str] = "averaged"
    client_class: ClassVar[type[DistillationClient]] = FedAUXClient
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr", "prediction_dtype", "top_k")

    regularization: float = 0.01
    score_offset: float = 1e-8
    dp_epsilon: float | None = None
    dp_delta: float | None = None
    max_score_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("regularization", "score_offset"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be positive and finite.")
        if (self.dp_epsilon is None) != (self.dp_delta is None):
            raise ValueError(
                f"dp_epsilon={self.dp_epsilon} and dp_delta={self.dp_delta}: differential privacy needs both. Give "
                "both, or leave both out."
            )
        for name in ("dp_epsilon", "dp_delta"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"`{name}` is {value}; the noise's formula holds between 0 and 1, both excluded.")
        if self.max_score_rows is not None and self.max_score_rows < 1:
            raise ValueError(f"`max_score_rows` is {self.max_score_rows}; it must be at least 1, or None for all.")

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, initial_model=True)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        score = "certainty score: how similar the example is to the client's own examples"
        return (Disclosure(score, "public example", dp_epsilon=self.dp_epsilon, dp_delta=self.dp_delta),)

    def check_model(self, model: Any) -> None:
        require_extra("sklearn", "scikit-learn", type(self).__name__)
        base_model_of(model)

    def check_unit(self, unit: str, num_classes: int) -> None:
        raise ValueError(
            f"distillation='fedaux' scores public rows as a whole, and this task predicts every {unit} of a row: the "
            "paper has no score of these. Take distillation='feddf', of which it is the variant with scores."
        )

    # ---- Server side

    def expected_extra(self, server: DistillationServer) -> dict[str, torch.Tensor]:
        return {WEIGHTED_LOGITS: torch.empty(server.shape), CERTAINTY: torch.empty(server.num_rows)}

    def check_extra(self, extra: Mapping[str, torch.Tensor]) -> None:
        # Of the mean of scores a zero is divided by, and a negative score or a huge one silences the other clients.
        scores, largest = extra[CERTAINTY], 1 + self.score_offset
        wrong = (scores <= 0) | (scores > largest * (1 + ROUNDING))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"its certainty score of public row {row} is {float(scores[row]):g}, and {int(wrong.sum())} of "
                f"{len(scores)} are like it; a score is positive and at most {largest:g} (1 + `score_offset`). Give "
                "this client the same settings and software as the others. What travels in float16 is zero below "
                "3e-8: then choose a larger `score_offset`, or another `exchange_dtype`."
            )

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        assert cohort.extra is not None
        weighted, scores = (cohort.extra.mean_of(name, wide=True) for name in (WEIGHTED_LOGITS, CERTAINTY))
        return self.train_server((weighted / scores.unsqueeze(-1)).to(torch.float32), cohort.round, server)
