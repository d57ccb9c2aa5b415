"""AdaFD: clients are weighted by their training losses.

Xiao and Liu, Adaptive Federated Distillation for Multi-Domain Non-IID Textual Data, equations 6 to 10.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, pipeline

from ..messages import ClientUpdate, Disclosure, Fit
from ..methods import ClientPart
from .base import ClientLogits, Distillation
from .client import DistillationPart
from .client_reports import ClientReport, reports
from .client_weights import WEIGHTINGS, Weighting, enwc, weighted_mean
from .cohort import Cohort
from .digit_weighting import DigitWeighting, Score, candidate_scoring
from .epoch_losses import EpochLosses
from .llm_weighting import LLMWeighting, text_generation
from .losses import mean_squared_error
from .requirements import Requirements
from .server import DistillationServer


LLM = "llm"
LOSSES = ("squared_error", "kl")
# Recipient of the prompt, for the model card.
LANGUAGE_MODEL = "the user's function or language model"


# Largest loss that a client may report. With a cross-entropy, a loss of 700 is a probability of 1e-304.
MAX_EPOCH_LOSS = 1e6


class ReportEpochLosses(DistillationPart):
    """Client half of [`AdaFD`]. It reports the mean training loss, and the smallest mean of a local epoch."""

    _losses: EpochLosses | None = None

    def receive(self, message: Fit) -> None:
        if self.method.uses_losses:
            self._losses = EpochLosses()
            self.callbacks = (self._losses,)

    def on_batch(self, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        if self._losses is not None:
            self._losses.on_batch(self.context.local_trainer, model, inputs, num_items)

    def send(self, update: ClientUpdate) -> ClientUpdate:
        if self._losses is None:
            return update
        losses = [float(entry["loss"]) for entry in self.context.local_trainer.state.log_history if "loss" in entry]
        reported = {"loss": statistics.fmean(losses), "min_epoch_loss": min(self._losses.mean_batch_losses(losses))}
        return dataclasses.replace(update, metrics={**update.metrics, **reported})


@dataclass(kw_only=True, repr=False, eq=False)
class AdaFD(Distillation):
    """
    AdaFD: the server's model learns the mean of the clients' logits, weighted by their training losses.

    [Adaptive Federated Distillation for Multi-Domain Non-IID Textual Data](https://arxiv.org/abs/2508.20557) (Xiao and
    Liu, 2025), equations 6 to 10.

    The server's model learns the weighted mean of the clients' logits, `Σ_k w_k z_k`, by squared error. The clients
    learn the logits of the server's model by KL divergence. The weight `w_k` of client `k` is computed from `l_k`, the
    smallest mean training loss of its local epochs in this round.

    | paper | here |
    |---|---|
    | RNWC, equation 6: `w_k ∝ 1 / l_k` | `weighting="rnwc"` |
    | ENWC, equation 7: `w_k ∝ exp(−β l_k)` | `weighting="enwc"`, `beta` |
    | LLMWC, section V-A: a language model chooses `w_k` | `weighting="llm"`, `generate` or `score` |
    | equation 10, the limit `τ → ∞` of the KL divergence | `loss="squared_error"` |
    | equations 3 and 4, the baseline that the paper calls FedAvg | `weighting="uniform"`, `loss="kl"` |

    Args:
        weighting (`str`, *optional*, defaults to `"enwc"`):
            `"rnwc"`, `"enwc"` or `"llm"` as in the table, `"size"` for the number of examples, or `"uniform"`.
        beta (`float`, *optional*, defaults to `5.0`):
            `β` of ENWC. `"llm"` also uses it if the language model returns no valid weights.
        loss (`str`, *optional*, defaults to `"squared_error"`):
            The server's loss on the weighted mean of the logits: `"squared_error"`, or the KL divergence `"kl"` with
            `temperature`.
        center (`bool`, *optional*, defaults to `False`):
            For `"squared_error"`: whether to center the logits before computing the squared error. KL divergence
            approaches the centered error as its temperature grows. Equation 10 uses the logits without centering.
        generate (`Callable[[str], str]` or `str`, *optional*):
            For `"llm"`: a function that maps a prompt to an answer, or the Hub id or directory of a language model.
            The model is loaded when it is first needed. [`text_generation`] makes a function from a pipeline. With
            several processes, only the main process asks the model.
        score (`Callable[[str, str, Sequence[str]], Sequence[float]]` or `str`, *optional*):
            For `"llm"`, instead of `generate`: the Hub id or directory of a language model that chooses among the
            digits 1 to 9 for each client, or a function as in [`DigitWeighting`]. Every model then gives valid
            weights, also a small model that cannot write a list of numbers.
        clients_evaluate (`bool`, *optional*, defaults to `False`):
            For `"llm"`: whether clients evaluate their models on their evaluation examples. The prompt then contains
            their F1. `eval_dataset` must be a [`FederatedDataset`]. The prompt has the first of the metrics `f1`,
            `f1_weighted`, `f1_macro` and `span_f1` that exists.
        kwargs (*optional*): As in [`Distillation`]. `temperature` applies to the clients' loss, and to the server's
            loss `"kl"`.

    Raises:
        ValueError: If the weighting or the loss is unknown, or `generate` or another setting does not apply to it.
            When a trainer is built, if `weighting="llm"` is used for token prediction, or no model named `generate` or
            `score` is found.

    Requirements:
        - Data: the same unlabeled public examples on the server and all clients. `train_on_labeled=True` also needs
          labeled examples on the server. `clients_evaluate=True` also needs evaluation examples on the clients.
        - Models: any architectures and tokenizers with the same labels in the same order. Token prediction needs the
          same vocabulary.
        - Tasks: single-label classification, tagging ([`~hf_federated.tasks.SequenceTagging`]) and token prediction
          ([`~hf_federated.tasks.Seq2Seq`] with public targets, causal [`~hf_federated.tasks.LanguageModeling`]). Token
          prediction does not work with `weighting="llm"`.
        - Sent: logits of the public examples in both directions. Clients also report their smallest mean epoch loss,
          except with `"size"` and `"uniform"`. No parameters.

    Relations:
        - [`MHAT`] weighs clients by their number of examples and averages probabilities.
        - [`FedID`] uses labeled examples of the server instead of the clients' training losses.
        - Choose AdaFD if some clients learn their task much better than other clients. A client that reports a small
          loss is trusted, so prefer [`Cronus`] if clients may report wrong values.

    Example:

    ```python
    >>> from hf_federated import AdaFD

    >>> AdaFD(weighting="rnwc")
    AdaFD(weighting='rnwc')
    ```
    """

    name: ClassVar[str] = "adafd"
    client_part: ClassVar[type[ClientPart]] = ReportEpochLosses

    weighting: str = "enwc"
    beta: float = 5.0
    loss: str = "squared_error"
    center: bool = False
    generate: Callable[[str], str] | str | None = None
    score: Score | str | None = None
    clients_evaluate: bool = False
    # Weight of each client in the last round.
    weights: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_one_of("weighting", (*WEIGHTINGS, LLM))
        self._require_one_of("loss", LOSSES)
        if self.loss == "kl":
            self._refuse_without_effect("center", given="loss='kl'")
        for name, purpose in (("generate", "maps a prompt to an answer"), ("score", "scores continuations")):
            self._require(
                (name,),
                lambda value: isinstance(value, str) or callable(value),
                f"a function that {purpose}, or the Hub id or directory of a model",
                optional=True,
            )
        if self.weighting != LLM:
            self._refuse_without_effect("clients_evaluate", "generate", "score", given=f"weighting={self.weighting!r}")
        elif (self.generate is None) == (self.score is None):
            state = "are both None" if self.score is None else "are both set"
            raise ValueError(
                f"weighting='llm' needs one language model, but `generate` and `score` {state}. Set `generate` to a "
                "function that maps a prompt to an answer, or to the Hub id or directory of a model. For a small "
                "model, set `score` to its Hub id or directory instead."
            )
        if self.weighting not in ("enwc", LLM):
            self._refuse_without_effect("beta", given=f"weighting={self.weighting!r}")
        self.ensembles_rows_independently = self.weighting != LLM
        self._fell_back = False

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, client_evaluation=self.clients_evaluate)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        asks, evaluates = self.weighting == LLM, self.clients_evaluate
        # The prompt of the language model does not contain the clients' ids.
        found = {
            Disclosure("smallest mean training loss of an epoch", "client"): self.uses_losses,
            Disclosure("metrics of the client's model on its own evaluation examples", "client"): evaluates,
            Disclosure("training loss", "client", LANGUAGE_MODEL): asks,
            Disclosure("F1, if the metrics have one", "client", LANGUAGE_MODEL): asks and evaluates,
            Disclosure("mean and standard deviation of the logits", "class", LANGUAGE_MODEL): asks,
            Disclosure("mean entropy of the predictions", "client", LANGUAGE_MODEL): asks,
        }
        return tuple(disclosure for disclosure, applies in found.items() if applies)

    @property
    def uses_losses(self) -> bool:
        """Whether clients report the smallest mean training loss of their local epochs."""
        return self.weighting in ("rnwc", "enwc", LLM)

    def check_unit(self, unit: str, num_classes: int) -> None:
        if unit == "token" and self.weighting == LLM:
            raise ValueError(
                f"weighting='llm' of AdaFD describes the clients' logits of each class, but the classes of this task "
                f"are the {num_classes} tokens of a vocabulary. Set weighting='enwc' or 'rnwc'."
            )

    def check_model(self, model: Any) -> None:
        for field_name, name in (("generate", self.generate), ("score", self.score)):
            if not isinstance(name, str):
                continue
            try:
                AutoConfig.from_pretrained(name)
            except (OSError, ValueError) as error:  # checked before the clients start to train
                raise ValueError(
                    f"`{field_name}` is {name!r}, but there is no model with this name: {error} Set `{field_name}` to "
                    "a Hub id or a directory. If the value is the name of a function in a saved configuration, pass "
                    "the function itself."
                ) from error

    def check_report(self, metrics: Mapping[str, float], num_classes: int) -> None:
        loss = metrics.get("min_epoch_loss")
        if self.uses_losses and (loss is None or not 0 <= loss <= MAX_EPOCH_LOSS):
            raise ValueError(
                f"it reports {loss!r} as the smallest mean loss of its epochs, which weighting={self.weighting!r} "
                f"needs. Expected a number between 0 and {MAX_EPOCH_LOSS:g}. Check this client's training."
            )

    def weigh(self, predictions: ClientLogits, cohort: Cohort) -> dict[str, float]:
        """
        Compute the weight of each client.

        Args:
            predictions (`Mapping[str, torch.Tensor]`): Logits by client, each of shape `(rows, classes)`.
            cohort ([`Cohort`]): The clients and the metrics that they reported.

        Returns:
            `dict[str, float]`: Weights by client. They sum to 1.
        """
        if self.weighting == LLM:
            client_reports = reports(cohort, predictions, cohort.evaluate() if self.clients_evaluate else None)
            return self._ask_model(client_reports, cohort)
        weigh: Weighting = partial(enwc, beta=self.beta) if self.weighting == "enwc" else WEIGHTINGS[self.weighting]
        return weigh(reports(cohort))

    @cached_property
    def _llm(self) -> LLMWeighting:
        given: Any = self.generate if self.score is None else self.score
        loaded = pipeline("text-generation", given) if isinstance(given, str) else None
        if self.score is None:
            return LLMWeighting(text_generation(loaded) if loaded else given, beta=self.beta)
        return DigitWeighting(candidate_scoring(loaded) if loaded else given, beta=self.beta)

    def _ask_model(self, client_reports: list[ClientReport], cohort: Cohort) -> dict[str, float]:
        """
        Ask the language model for weights, on the main process only.

        If all processes asked, the model could give each process a different answer.
        """

        def find() -> dict[str, Any]:
            return {"weights": self._llm(client_reports), "fell_back": self._llm.fell_back}

        answer = cohort.run_on_main(f"weights of a language model, round {cohort.round}", find)
        self._fell_back = bool(answer["fell_back"])
        return answer["weights"]

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        logs = super().distill(cohort, server)
        logs |= {f"weight/{client_id}": weight for client_id, weight in self.weights.items()}
        if self.weighting == LLM:
            logs["llm_fell_back"] = float(self._fell_back)
        return logs

    def ensemble(self, predictions: ClientLogits, cohort: Cohort) -> torch.Tensor:
        self.weights = self.weigh(predictions, cohort)
        # A client whose evaluation failed has no weight.
        return weighted_mean({client_id: predictions[client_id] for client_id in self.weights}, self.weights)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.loss == "kl":
            return super().server_loss(logits, targets)
        return mean_squared_error(logits, targets, center=self.center)
