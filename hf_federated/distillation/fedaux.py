"""FedAUX: FedDF whose teacher weighs each client by its certainty for each example.

Sattler et al., FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning (IEEE TNNLS 2021, arXiv 2102.02514).
The paper also pre-trains the model on the unlabeled auxiliary data. Here, pass the pre-trained model to the trainer.
The paper's variant with several architectures is not implemented.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..clients.features import base_model_of
from ..messages import ClientUpdate, Disclosure, Fit, public_order
from ..methods import ClientPart
from ..utils.optional_packages import require_packages
from ..utils.random import derived_seed, isolated_rng
from ..utils.weighted_mean import State, Tensors
from .base import Distillation
from .certainty import certainty, fit_certainty, noise_std, scale_into_unit_ball
from .client import DistillationPart
from .cohort import MAX_LOGIT, Cohort
from .requirements import Requirements
from .server import DistillationServer


CERTAINTY = "certainty"
WEIGHTED_LOGITS = "weighted_logits"
# Relative rounding error that bfloat16 may add to a score.
ROUNDING = 2**-8


class FedAUXPart(DistillationPart):
    """Client half of [`FedAUX`]: scores the public examples once, with features of the initial model."""

    def receive(self, message: Fit) -> None:
        if self.memory:
            return
        context = self.context
        model, student, dataset = context.model, context.student, context.open_dataset()
        # The global state of this round is written afterwards.
        model.exchange.write(model.initial or {})
        seed = derived_seed(context.seed, "features", context.client_id)
        limit = self.method.max_score_rows
        if limit is not None and limit < len(dataset):
            dataset = dataset.select(public_order(len(dataset), derived_seed(seed, "rows"))[:limit].tolist())
        # The first import of scikit-learn in a process draws random numbers.
        with isolated_rng(seed):
            self.memory[CERTAINTY] = self.scores(student.features(dataset), student.features(), seed)

    def scores(self, own: torch.Tensor, public: torch.Tensor, seed: int) -> torch.Tensor:
        """
        Certainty scores of the public examples.

        Args:
            own (`torch.Tensor`): Features of the client's examples, of shape `(own examples, features)`.
            public (`torch.Tensor`): Features of the public examples, of shape `(public examples, features)`.
            seed (`int`): Seed of the noise.

        Returns:
            `torch.Tensor`: Scores of shape `(public examples,)`.
        """
        if own.is_meta:  # A dry round has no features.
            return own.new_empty(len(public))
        algorithm = self.method
        own, public = scale_into_unit_ball(own, public)
        weights = fit_certainty(own, public, algorithm.regularization)
        if algorithm.dp_epsilon is not None:
            std = noise_std(len(own) + len(public), algorithm.regularization, algorithm.dp_epsilon, algorithm.dp_delta)
            generator = torch.Generator().manual_seed(seed)
            weights = weights + std * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)
        return certainty(weights, public, algorithm.score_offset)

    def send(self, update: ClientUpdate) -> ClientUpdate:
        student, scores = self.context.student, self.memory[CERTAINTY]
        extra = {WEIGHTED_LOGITS: scores.unsqueeze(-1) * student.predict(range(student.num_rows)), CERTAINTY: scores}
        return dataclasses.replace(update, extra={**update.extra, **extra})


@dataclass(kw_only=True, repr=False, eq=False)
class FedAUX(Distillation):
    """
    FedAUX: FedDF with a certainty score for each client and public example.

    [FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning](https://arxiv.org/abs/2102.02514) (Sattler et
    al., IEEE TNNLS 2021).

    The parameters are averaged as `aggregation` defines. Then the server's model learns the weighted mean of the
    clients' logits of the public examples by KL divergence. Each client is weighted per example by its certainty score
    `s_k(x)`. The teacher of example `x` is `softmax(Σ_k s_k(x) z_k(x) / Σ_k s_k(x))`.

    Each client computes its scores once, with the model from before the first round, which all clients share. A
    logistic regression separates the features of the client's examples from the features of the public examples
    ([`certainty`]). The scores depend on the model, the examples and the run's seed, but not on the round in which the
    client first takes part. Clients send `s_k z_k` and `s_k` together with their parameters. The server needs only the
    means of these tensors.

    | paper | here |
    |---|---|
    | `h` | mean over the positions of the base model's last hidden states ([`features`]), scaled |
    | `D_i`, `D⁻`, `D_distill` | the client's examples (`max_score_rows` of them); the public examples, for both |
    | `λ` | `regularization`, added to the mean of the log-losses |
    | `ξ` | `score_offset` |
    | `ε`, `δ` | `dp_epsilon`, `dp_delta` |

    With `dp_epsilon` and `dp_delta`, Gaussian noise is added to the weights of the regression. The scores of a client
    are then (ε, δ)-differentially private with regard to one of its examples, no matter how often they are sent. This
    guarantee covers the scores only, not the parameters and logits. It holds against parties that do not know the
    run's seed. The noise is drawn from this seed, so that a resumed run is identical.

    Args:
        regularization (`float`, *optional*, defaults to `0.01`):
            `λ` of the logistic regression.
        score_offset (`float`, *optional*, defaults to `1e-8`):
            `ξ`, added to every score. It gives a teacher to examples that resemble no client's data.
        dp_epsilon (`float`, *optional*):
            `ε` of differential privacy, between 0 and 1. By default, no noise is added.
        dp_delta (`float`, *optional*):
            `δ` of differential privacy, between 0 and 1. Required with `dp_epsilon`.
        max_score_rows (`int`, *optional*):
            Number of a client's examples for the regression, drawn without replacement. By default, all examples are
            used.
        kwargs (*optional*): As in [`Distillation`], except `client_epochs`, `client_lr`, `prediction_dtype` and
            `top_k`. Clients do not distill, and the averaged tensors are sent in float32.

    Raises:
        ValueError: If a setting is out of range, or only one of `dp_epsilon` and `dp_delta` is given. When a trainer
            is built, if its task predicts words or tokens, for which there are no scores.
        ImportError: When a trainer is built, if scikit-learn is not installed.

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. Clients need a `Dataset`, not an
          `IterableDataset`, because the scores use all their examples.
        - Models: one architecture for the server and all clients, with last hidden states.
        - Tasks: single-label classification.
        - Sent: parameters in both directions, and from the clients also their weighted logits and scores of the public
          examples.
        - Packages: scikit-learn (extra `metrics`).

    Relations:
        - [`FedDF`] is the same method with equal scores. It also supports tagging and token prediction.
        - [`FedDRS`] needs no public examples.
        - Choose FedAUX if the clients' data cover different parts of the public examples.

    Example:

    ```python
    >>> from hf_federated import FedAUX

    >>> FedAUX(dp_epsilon=0.5, dp_delta=1e-5)
    FedAUX(dp_epsilon=0.5, dp_delta=1e-05)
    ```
    """

    name: ClassVar[str] = "fedaux"
    parameters: ClassVar[str] = "averaged"
    client_part: ClassVar[type[ClientPart]] = FedAUXPart
    ignores: ClassVar[tuple[str, ...]] = ("client_epochs", "client_lr", "prediction_dtype", "top_k")

    regularization: float = 0.01
    score_offset: float = 1e-8
    dp_epsilon: float | None = None
    dp_delta: float | None = None
    max_score_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            ("regularization", "score_offset"), lambda value: 0 < value < float("inf"), "positive and finite"
        )
        if (self.dp_epsilon is None) != (self.dp_delta is None):
            raise ValueError(
                f"dp_epsilon={self.dp_epsilon} and dp_delta={self.dp_delta}: differential privacy needs both. Set "
                "both, or leave both out."
            )
        self._require(
            ("dp_epsilon", "dp_delta"), lambda value: 0 < value < 1, "between 0 and 1, both excluded", optional=True
        )
        self._require(("max_score_rows",), lambda value: value >= 1, "at least 1, or None for all", optional=True)

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, initial_model=True)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        score = "certainty score: how similar the example is to the client's own examples"
        return (Disclosure(score, "public example", dp_epsilon=self.dp_epsilon, dp_delta=self.dp_delta),)

    def check_model(self, model: Any) -> None:
        require_packages(type(self).__name__, {"metrics": {"sklearn": "scikit-learn"}})
        base_model_of(model)

    def check_unit(self, unit: str, num_classes: int) -> None:
        raise ValueError(
            f"distillation='fedaux' scores each public example as a whole, but this task predicts every {unit} of an "
            "example, and the paper defines no score for a part of an example. Set distillation='feddf', the same "
            "method without scores."
        )

    # ---- Server side

    def update_extra(self, state: State) -> State:
        server = self.server
        return {WEIGHTED_LOGITS: torch.empty(server.shape), CERTAINTY: torch.empty(server.num_rows)}

    def check_extra(self, extra: Tensors) -> None:
        # The mean score is a divisor and must not be 0. A negative or huge score would suppress the other clients.
        scores, largest = extra[CERTAINTY], 1 + self.score_offset
        wrong = (scores <= 0) | (scores > largest * (1 + ROUNDING))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"its certainty score of public example {row} is {float(scores[row]):g}, and {int(wrong.sum())} of "
                f"{len(scores)} scores are out of range; a score is positive and at most {largest:g} "
                "(1 + `score_offset`). Give this client the same settings and software as the other clients. Float16 "
                "rounds scores below 3e-8 to 0. With float16, set a larger `score_offset` or another `exchange_dtype`."
            )
        logits = (extra[WEIGHTED_LOGITS].double() / scores.double().unsqueeze(-1)).abs()
        if logits.numel() and float(logits.max()) > MAX_LOGIT:
            raise ValueError(
                f"its weighted logits contain a logit of magnitude {float(logits.max()):g}; at most {MAX_LOGIT:g} is "
                "allowed."
            )

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        weighted, scores = (cohort.extra.mean_of(name, wide=True) for name in (WEIGHTED_LOGITS, CERTAINTY))
        return self.train_server((weighted / scores.unsqueeze(-1)).to(torch.float32), cohort.round, server)
