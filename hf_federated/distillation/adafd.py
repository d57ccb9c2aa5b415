"""AdaFD: clients weigh what their training losses say.

Xiao and Liu, Adaptive Federated Distillation for Multi-Domain Non-IID Textual Data, equations 6 to 10.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, Trainer, pipeline

from ..clients.context import ClientContext
from ..messages import Disclosure
from .base import Distillation, Predictions, weighted_mean
from .client import DistillationClient, LocalDistillation
from .client_weights import WEIGHTINGS, ClientReport, enwc
from .cohort import Cohort, reports
from .epoch_losses import EpochLosses
from .llm_weighting import LLMWeighting, text_generation
from .losses import mean_squared_error
from .requirements import Requirements
from .server import DistillationServer


LLM = "llm"


LANGUAGE_MODEL = "the user's function or language model"


class ReportEpochLosses(LocalDistillation):
    """Reports the mean loss of the local epochs and the smallest one."""

    def __init__(self) -> None:
        self._losses = EpochLosses()
        self.callbacks = (self._losses,)

    def on_batch(self, trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], num_items: Any) -> None:
        self._losses.on_batch(trainer, model, inputs, num_items)

    def finish(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, torch.Tensor]:
        losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        metrics |= {"loss": statistics.fmean(losses), "min_epoch_loss": min(self._losses.mean_batch_losses(losses))}
        return {}


class AdaFDClient(DistillationClient):
    """The client side of [`AdaFD`]."""

    def local_training(self, context: ClientContext, round: int) -> LocalDistillation:
        return ReportEpochLosses() if self.algorithm.uses_losses else LocalDistillation()


@dataclass(kw_only=True, repr=False, eq=False)
class AdaFD(Distillation):
    """
    The server learns the weighted mean of the clients' logits by their squared error, and the clients learn the
    server's logits by KL divergence. What a client weighs follows from `l_k`, the smallest of its local epochs' mean
    training losses in this round.

    Args:
        weighting (`str`, *optional*, defaults to `"enwc"`):
            `"rnwc"`: `w_k ∝ 1 / l_k` (equation 6); `"enwc"`: `w_k ∝ exp(−β l_k)` (equation 7); `"llm"`: a language
            model says (section V-A); `"size"`: rows; `"uniform"`.
        beta (`float`, *optional*, defaults to `5.0`):
            `β` of ENWC, by which the language model's clients weigh too where it gives no weights.
        center (`bool`, *optional*, defaults to `False`):
            Whether the squared error is of centred logits, which is what KL divergence tends to with its temperature.
            Equation 10 is of the raw ones.
        generate (`Callable[[str], str]` or `str`, *optional*):
            For `"llm"`: the answer to a prompt, or the Hub id or directory of a model that gives it, which is loaded
            when it is first asked. [`text_generation`] makes a function of a pipeline. Of several processes the main
            one asks for all.
        clients_evaluate (`bool`, *optional*, defaults to `False`):
            For `"llm"`: whether clients evaluate their models on their evaluation rows, whose F1 then stands in the
            prompt. `eval_dataset` must then be a [`FederatedDataset`], and its metrics have an `f1`,
            `f1_weighted`, `f1_macro` or `span_f1`, of which the first is taken.
        kwargs (*optional*): As in [`Distillation`]; `temperature` is that of the clients' loss.

    Raises:
        ValueError: If the weighting is unknown, or `generate` or another setting does not go with it; when a trainer
            is built, if a language model shall read the logits of a vocabulary, or there is none of the name.

    Example:

    ```python
    >>> from hf_federated import AdaFD

    >>> AdaFD(weighting="rnwc")
    AdaFD(weighting='rnwc')
    ```
    """

    name: ClassVar[str] = "adafd"
    client_class: ClassVar[type[DistillationClient]] = AdaFDClient

    weighting: str = "enwc"
    beta: float = 5.0
    center: bool = False
    generate: Callable[[str], str] | str | None = None
    clients_evaluate: bool = False
    # What each client weighed, of the last round.
    weights: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting not in (*WEIGHTINGS, LLM):
            allowed = ", ".join(map(repr, (*WEIGHTINGS, LLM)))
            raise ValueError(f"`weighting` is {self.weighting!r}; allowed are {allowed}.")
        if (self.weighting == LLM) != (self.generate is not None):
            raise ValueError("`generate` and weighting='llm' go together: a function or a model answers the prompt.")
        if self.generate is not None and not isinstance(self.generate, str) and not callable(self.generate):
            raise ValueError(
                f"`generate` is {self.generate!r}; give a function from a prompt to its answer, or a model's name."
            )
        if self.weighting != LLM:
            self._refuse_without_effect("clients_evaluate", given=f"weighting={self.weighting!r}")
        if self.weighting not in ("enwc", LLM):
            self._refuse_without_effect("beta", given=f"weighting={self.weighting!r}")
        self._fell_back = False
        self._llm: LLMWeighting | None = None

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, client_evaluation=self.clients_evaluate)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        found = []
        if self.uses_losses:
            found.append(Disclosure("smallest mean training loss of an epoch", "client"))
        if self.clients_evaluate:
            found.append(Disclosure("metrics of the client's model on its own evaluation examples", "client"))
        if self.weighting == LLM:
            # Without the clients' ids.
            found.append(Disclosure("training loss", "client", LANGUAGE_MODEL))
            if self.clients_evaluate:
                found.append(Disclosure("F1, if the metrics have one", "client", LANGUAGE_MODEL))
            found.append(Disclosure("mean and standard deviation of the logits", "class", LANGUAGE_MODEL))
            found.append(Disclosure("mean entropy of the predictions", "client", LANGUAGE_MODEL))
        return tuple(found)

    @property
    def uses_losses(self) -> bool:
        """Whether clients report the smallest mean training loss of their local epochs."""
        return self.weighting in ("rnwc", "enwc", LLM)

    @property
    def ensembles_rows_independently(self) -> bool:
        return self.weighting != LLM

    def check_unit(self, unit: str, num_classes: int) -> None:
        if unit == "token" and self.weighting == LLM:
            raise ValueError(
                f"weighting='llm' of AdaFD describes the clients' logits class by class, and this task has the "
                f"{num_classes} tokens of a vocabulary: take weighting='enwc' or 'rnwc'."
            )

    def check_model(self, model: Any) -> None:
        if not isinstance(self.generate, str):
            return
        try:
            AutoConfig.from_pretrained(self.generate)
        except (OSError, ValueError) as error:  # before clients train for nothing
            raise ValueError(
                f"`generate` is {self.generate!r}, and no model is found there: {error} If it is the name of a "
                "function, as a saved configuration has it, give the function itself."
            ) from error

    def check_report(self, metrics: Mapping[str, float], num_classes: int) -> None:
        loss = metrics.get("min_epoch_loss")
        if self.uses_losses and (loss is None or not 0 <= loss < math.inf):
            raise ValueError(
                f"it reports {loss!r} as the smallest mean loss of its epochs, by which weighting={self.weighting!r} "
                "weighs it; expected a finite number that is not negative. Look at this client's training."
            )

    def weigh(self, predictions: Predictions, cohort: Cohort) -> dict[str, float]:
        """
        What each client weighs.

        Args:
            predictions (`Mapping[str, torch.Tensor]`): Logits by client, each of shape `(rows, classes)`.
            cohort ([`Cohort`]): The clients, with what they reported.

        Returns:
            `dict[str, float]`: By client, adding up to one.
        """
        if self.weighting == LLM:
            client_reports = reports(cohort, predictions, cohort.evaluate() if self.clients_evaluate else None)
            return self._ask_model(client_reports, cohort)
        client_reports = reports(cohort)
        return (
            enwc(client_reports, self.beta) if self.weighting == "enwc" else WEIGHTINGS[self.weighting](client_reports)
        )

    def _ask_model(self, client_reports: list[ClientReport], cohort: Cohort) -> dict[str, float]:
        """The weights of a language model, which may answer each process otherwise, so that one of them asks."""

        def find() -> dict[str, Any]:
            if self._llm is None:
                self._llm = LLMWeighting(self._load_answers(), beta=self.beta)
            return {"weights": self._llm(client_reports), "fell_back": self._llm.fell_back}

        answer = cohort.run_on_main(f"weights of a language model, round {cohort.round}", find)
        self._fell_back = bool(answer["fell_back"])
        return answer["weights"]

    def _load_answers(self) -> Callable[[str], str]:
        assert self.generate is not None  # checked with the weighting
        if not isinstance(self.generate, str):
            return self.generate
        return text_generation(pipeline("text-generation", self.generate))

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        logs = super().distill(cohort, server)
        logs |= {f"weight/{client_id}": weight for client_id, weight in self.weights.items()}
        if self.weighting == LLM:
            logs["llm_fell_back"] = float(self._fell_back)
        return logs

    def ensemble(self, predictions: Predictions, cohort: Cohort) -> torch.Tensor:
        self.weights = self.weigh(predictions, cohort)
        # Whoever failed to evaluate has no weight.
        return weighted_mean({client_id: predictions[client_id] for client_id in self.weights}, self.weights)

    def server_loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mean_squared_error(logits, targets, center=self.center)
