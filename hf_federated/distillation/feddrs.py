"""FedDRS: the averaged model learns from the clients' models on pseudo-samples instead of text.

Text-Free Federated Transformers Knowledge Distillation Without GAN (submitted to ICLR 2024), algorithm 1. The
docstring of [`FedDRS`] describes the choices that the paper leaves open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from ..messages import ClientUpdate, Fit
from ..methods import ClientPart, Round
from ..utils.random import derived_seed
from .base import Distillation
from .class_counts import NUM_EXAMPLES_PER_CLASS, ReportClassCounts, count_classes
from .cohort import Cohort
from .pseudo_sampler import PseudoSampler, Samples
from .pseudo_samples import ADVERSARIES, IGNORED, INITIALIZATIONS, KINDS, check_takes_embeddings, word_embeddings
from .requirements import Requirements
from .sample_descent import STEP_SIZE_SCHEDULES
from .server import DistillationServer
from .teachers import Teachers


def frozen_parameters(model: Any, round: int) -> list[nn.Parameter]:
    """
    Exchanged parameters that local training does not change.

    From the second round on, this is a word embedding that encoder and decoder share. The server's distillation leaves
    word embeddings as averaged, so it could not learn how clients changed a table that the decoder also uses.

    Args:
        model (`torch.nn.Module`): The client's model.
        round (`int`): Round number, from 0.

    Returns:
        `list[torch.nn.Parameter]`: The shared word embedding, or an empty list.
    """
    if round == 0 or not model.config.is_encoder_decoder:
        return []
    shared = word_embeddings(model)
    return [shared] if word_embeddings(model.get_decoder()) is shared else []


class FedDRSPart(ReportClassCounts):
    """Client half of [`FedDRS`]."""

    def receive(self, message: Fit) -> None:
        self.frozen = frozen_parameters(self.context.model.trainer.model, message.round)


@dataclass(kw_only=True, repr=False, eq=False)
class FedDRS(Distillation):
    """
    FedDRS: the averaged model learns from each client's model on pseudo-samples.

    [Text-Free Federated Transformers Knowledge Distillation Without GAN](https://openreview.net/forum?id=ftKqt3Di3H)
    (submitted to ICLR 2024), algorithm 1.

    The parameters are averaged as `aggregation` defines. Then the averaged model learns from each client's model on
    pseudo-samples of this client, by `Σ_k KL(softmax f(θ_k; ω_k) ‖ softmax f(θ_k; ω_S))` (equation 8). `θ_k` are
    sequences of word embeddings. They are drawn from the embeddings of the averaged model and moved by gradient
    descent ([`pseudo_samples`]). In addition to their parameters, clients send only their number of examples of each
    class.

    After the last round, the mean of all clients' models learns `post_num_iterations` more times, from the last
    parameters of each client. If a client's model gives NaN or infinite values, the client is excluded, also from this
    mean, until it sends another update. The log names the client.

    | paper | here |
    |---|---|
    | `θ` of 64 × 64 × 768 | `num_samples`, `sample_length`, the model's hidden size |
    | `β`, 100 iterations | `step_size`, `num_steps` |
    | `γ_k` | labels drawn in proportion to client k's number of examples of each class |
    | `λ`, in the post-processing | `adversarial_weight`, `post_adversarial_weight` |
    | `I`, `I*` | `num_iterations`, `post_num_iterations` |
    | `η*` | `server_lr`, with the optimizer of the training arguments |
    | random, target, adversary, mixed sampling; AdOnly | `sampling` |
    | PostOnly | `post_only` |

    Models are in evaluation mode while samples are made. One pass over all clients' samples, in batches of
    `per_device_train_batch_size`, is one step of the paper. Word embeddings keep their averaged values. If an
    encoder–decoder shares word embeddings between its parts, they are also frozen on clients after the first round.
    The paper's average is unweighted: `aggregation_kwargs={"weighting": "uniform"}`.

    Memory holds the server's model, the model of one client (for a PEFT model, only its adapter) with the loaded
    values, and the samples. There are clients × kinds × `num_samples` samples. Each sample has `sample_length` ×
    hidden size numbers and its logits. A classifier has one logit per class. An encoder–decoder has label tokens ×
    vocabulary logits, which take most of the memory. The mean of all clients' models is summed in twice the width of
    their dtype. The clients' parameters are stored in `output_dir/teachers` until they are used.

    Args:
        sampling (`str` or `Sequence[str]`, *optional*, defaults to `"mixed"`):
            Kinds of samples: `"random"`, `"target"`, `"adversarial"`, several of them, or `"mixed"` for all kinds.
        num_iterations (`int`, *optional*, defaults to `1`):
            Number of times in a round that samples are made and learned.
        post_num_iterations (`int`, *optional*, defaults to `3`):
            Number of times after the last round that samples are made and learned.
        post_only (`bool`, *optional*, defaults to `False`):
            Whether to distill only after the last round.
        adversarial_weight (`float`, *optional*, defaults to `0.1`):
            `λ`, the weight of the server's model in the loss of adversarial samples.
        post_adversarial_weight (`float`, *optional*):
            `λ` after the last round. Defaults to `adversarial_weight`.
        adversary (`str`, *optional*, defaults to `"ce"`):
            Loss of the server's model for adversarial samples: `"ce"` or `"kl"`.
        num_samples (`int`, *optional*, defaults to `64`):
            Number of samples of each kind and client.
        sample_length (`int`, *optional*, defaults to `64`):
            Number of positions of a sample.
        step_size (`float`, *optional*, defaults to `0.1`):
            Size of the (shortest) step of the gradient descent on samples. The loss is summed over the samples.
        num_steps (`int`, *optional*, defaults to `100`): Length of the descent, in steps of `step_size`.
        step_size_schedule (`str`, *optional*, defaults to `"constant"`):
            `"constant"` as in the paper. `"growing"`: while the gradient of a sample changes little, one step replaces
            several steps. With `tolerance=0.1`, it makes nearly the same samples with fewer passes.
        tolerance (`float`, *optional*, defaults to `0.0`):
            A sample stops when the rest of its descent would add at most this fraction to the decrease of its loss.
        initialization (`str`, *optional*, defaults to `"averaged"`):
            Start of the samples: rows of the `"averaged"` word embeddings, rows of the `"client"`'s word embeddings,
            or `"gaussian"` noise with the mean and standard deviation of the averaged word embeddings.
        pin_cls (`bool`, *optional*, defaults to `False`):
            Whether the first position is fixed to the embedding of the tokenizer's `[CLS]`.
        label_texts (`Sequence[str]`, *optional*):
            For an encoder–decoder: the text that it generates for each class. Its decoder receives the text of the
            pseudo-label.
        server_lr (`float`, *optional*, defaults to `1e-5`):
            Learning rate of the server's distillation.
        kwargs (*optional*): The other settings of [`Distillation`] have no effect on FedDRS and are refused.

    Raises:
        ValueError: If a setting is out of range.

    Requirements:
        - Data: no public examples and no examples on the server.
        - Models: one architecture for the server and all clients: a transformers model whose `forward` accepts
          `inputs_embeds`, such as BERT, RoBERTa, T5 or Llama.
        - Tasks: classification, by a classifier or by an encoder–decoder that generates one of `label_texts`.
        - Sent: parameters in both directions, and from the clients also their number of examples of each class.

    Relations:
        - [`FedDF`] learns the mean of the clients' predictions on public examples. FedDRS learns from each client's
          model on the server, and the clients compute nothing in addition to their training.
        - [`FedAUX`] needs public examples and sends scores of them.
        - Choose FedDRS if there are no public examples, and the server has the memory and time to run the clients'
          models.

    Example:

    ```python
    >>> from hf_federated import FedDRS

    >>> FedDRS(sampling="adversarial", post_only=True)
    FedDRS(sampling=('adversarial',), post_only=True)
    ```
    """

    name: ClassVar[str] = "feddrs"
    parameters: ClassVar[str] = "averaged"
    needs_teachers: ClassVar[bool] = True
    disclosures = (NUM_EXAMPLES_PER_CLASS,)
    reports_class_counts = True
    client_part: ClassVar[type[ClientPart]] = FedDRSPart
    ignores: ClassVar[tuple[str, ...]] = tuple(
        item.name for item in dataclasses.fields(Distillation) if item.name not in ("server_lr", "train_on_labelled")
    )

    server_lr: float | None = 1e-5
    sampling: str | Sequence[str] = KINDS
    num_iterations: int = 1
    post_num_iterations: int = 3
    post_only: bool = False
    adversarial_weight: float = 0.1
    post_adversarial_weight: float | None = None
    adversary: str = "ce"
    num_samples: int = 64
    sample_length: int = 64
    step_size: float = 0.1
    num_steps: int = 100
    step_size_schedule: str = "constant"
    tolerance: float = 0.0
    initialization: str = "averaged"
    pin_cls: bool = False
    label_texts: Sequence[str] | None = None
    # The last samples, by client. They are kept only if `keeps_samples` is set to `True`, for analyses.
    keeps_samples: bool = field(default=False, init=False)
    samples: dict[str, Samples] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = [self.sampling] if isinstance(self.sampling, str) else list(self.sampling)
        self.sampling = KINDS if "mixed" in kinds else tuple(kind for kind in KINDS if kind in kinds)
        if not self.sampling or not {*kinds} <= {*KINDS, "mixed"}:
            raise ValueError(
                f"`sampling` is {kinds}; allowed are {', '.join(map(repr, KINDS))}, and 'mixed' for all kinds."
            )
        counts = ("num_iterations", "num_steps", "num_samples", "sample_length")
        self._require(counts, lambda value: value >= 1, "at least 1")
        self._require(("post_num_iterations",), lambda value: value >= 0, "at least 0")
        weights = ("adversarial_weight", "post_adversarial_weight")
        self._require(weights, lambda value: 0 <= value < float("inf"), "finite and at least 0", optional=True)
        self._require(("step_size",), lambda value: 0 < value < float("inf"), "positive and finite")
        self._require(("tolerance",), lambda value: 0 <= value < float("inf"), "finite and at least 0")
        self._require_one_of("step_size_schedule", STEP_SIZE_SCHEDULES)
        self._require_one_of("adversary", ADVERSARIES)
        self._require_one_of("initialization", INITIALIZATIONS)
        if self.post_only and self.post_num_iterations == 0:
            raise ValueError(
                "post_only=True with post_num_iterations=0 leaves nothing to do. Set `post_num_iterations` to at "
                "least 1."
            )
        if self.label_texts is not None:
            self.label_texts = tuple(self.label_texts)

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, public_dataset=False, unscaled_gradients=True)

    def class_counts(self, dataset: Any, num_classes: int, tokenizer: Any) -> list[int]:
        return count_classes(dataset, num_classes, self.label_sequences(tokenizer))

    def check_model(self, model: Any) -> None:
        check_takes_embeddings(model, self.sample_length)
        name, has_texts = type(model).__name__, self.label_texts is not None
        if model.config.is_encoder_decoder != has_texts:
            raise ValueError(
                f"`label_texts` is set, but {name} is not an encoder–decoder. Leave `label_texts` out."
                if has_texts
                else f"{name} is an encoder–decoder, but `label_texts` is not set. Set `label_texts` to the texts "
                "that the model generates for the classes."
            )

    # ---- Server side

    def begin(self, round: Round) -> None:
        if self.server.teachers is not None:
            self.server.teachers.begin_round()

    def accept(self, round: Round, update: ClientUpdate) -> None:
        server = self.server
        is_teacher = not self.post_only or update.round == server.num_rounds - 1 or self._keeps_teachers(server)
        if is_teacher and server.teachers is not None:
            server.teachers.keep(update)

    def _keeps_teachers(self, server: DistillationServer) -> bool:
        """Whether a later round needs the updates of this round."""
        return self.post_num_iterations > 0 and server.clients_per_round < server.num_clients

    def after(self, round: Round) -> None:
        if self.server.teachers is not None:
            for client_id in round.rejected:
                self.server.teachers.discard_received(client_id)
            self.server.teachers.discard_outdated(list(round.metrics))
        super().after(round)

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        if cohort.teachers is None:  # A dry round keeps no models, and the samples cause no messages.
            return {}
        logs: dict[str, float] = {}
        sampler = PseudoSampler(self, server, cohort.teachers, self._num_steps_of_run(server))
        if not self.post_only:
            for iteration in range(self.num_iterations):
                purpose = ("round", cohort.round, iteration)
                loss = self._iterate(cohort, sampler, cohort.client_ids, self.adversarial_weight, purpose)
                logs["server_distillation_loss"] = loss
        if cohort.round == server.num_rounds - 1 and self.post_num_iterations:
            logs |= self._post_process(cohort, sampler)
        if not self._keeps_teachers(server):
            cohort.teachers.clear()
        return logs

    def _post_process(self, cohort: Cohort, sampler: PseudoSampler) -> dict[str, float]:
        teachers, place = sampler.teachers, "models before their mean"
        # Checked before averaging, because a mean does not show which client's model was invalid.
        client_ids = list(self._for_each_client(cohort, teachers, place, teachers.client_ids(), sampler.check))
        mean = teachers.mean(client_ids) | self._frozen_server_values(sampler.server, cohort.round)
        sampler.server.exchange.write(mean)
        weight = self.adversarial_weight if self.post_adversarial_weight is None else self.post_adversarial_weight
        loss = 0.0
        for iteration in range(self.post_num_iterations):
            loss = self._iterate(cohort, sampler, client_ids, weight, ("post", cohort.round, iteration))
        return {"post_distillation_loss": loss, "post_num_clients": len({*client_ids} - cohort.rejected.keys())}

    def _frozen_server_values(self, server: DistillationServer, round: int) -> dict[str, torch.Tensor]:
        """
        The server's values of the parameters that no client trained in a round.

        Clients that were not selected in this round sent other values of these parameters.
        """
        frozen = {id(parameter) for parameter in frozen_parameters(server.student.model, round)}
        live = server.exchange.tensors
        return {name: live[name] for name, item in server.exchange.parameters.items() if id(item) in frozen}

    def _iterate(
        self,
        cohort: Cohort,
        sampler: PseudoSampler,
        client_ids: Sequence[str],
        weight: float,
        purpose: tuple[str, int, int],
    ) -> float:
        """
        Make samples from each client's model and train the server's model on them in one pass.

        Returns:
            `float`: Mean loss of the steps.
        """
        seed = sampler.server.seed

        def sample(client_id: str) -> Samples:
            return sampler.sample(client_id, weight, derived_seed(seed, "pseudo-samples", client_id, *purpose))

        samples = self._for_each_client(cohort, sampler.teachers, f"pseudo-samples {purpose}", client_ids, sample)
        self.samples = samples if self.keeps_samples else {}
        return sampler.learn(list(samples.values()), derived_seed(seed, "pseudo-samples' order", *purpose))

    def _for_each_client(
        self,
        cohort: Cohort,
        teachers: Teachers,
        place: str,
        client_ids: Sequence[str],
        make: Callable[[str], Samples],
    ) -> dict[str, Samples]:
        """
        Call a function for each client's model, on the process that stores the model.

        A client is excluded if the function raises a `ValueError`.

        Args:
            cohort ([`Cohort`]): The clients of the round.
            teachers ([`Teachers`]): The clients' models.
            place (`str`): Purpose of the call, for error messages.
            client_ids (`Sequence[str]`): Clients to call the function for. Excluded clients are skipped.
            make (`Callable`): Maps a client id to tensors.

        Returns:
            `dict[str, dict[str, torch.Tensor]]`: Results of all processes, by client.

        Raises:
            FloatingPointError: If the function raised it for a client: the server's model gives NaN or infinite
                values.
            RoundFailedError: If fewer than `min_clients` clients are left.
        """
        asked = [client_id for client_id in client_ids if client_id not in cohort.rejected]
        made: dict[str, Any] = {}
        for client_id in teachers.local_clients(asked):
            try:
                made[client_id] = make(client_id)
            except ValueError as error:
                made[client_id] = {"error": str(error)}
            except FloatingPointError as error:
                made[client_id] = {"server_error": str(error)}
        found = teachers.gather_results(place, made, asked)
        for client_id, result in found.items():
            if "error" in result:
                cohort.exclude(client_id, f"Client {client_id!r}, round {cohort.round + 1}: {result['error']}")
        if server_errors := [result["server_error"] for result in found.values() if "server_error" in result]:
            names = ", ".join(map(repr, cohort.rejected))
            left_out = f" Excluded in this round, but possibly averaged before: {names}." if names else ""
            raise FloatingPointError(f"Round {cohort.round + 1}: {server_errors[0]}{left_out}")
        cohort.check_enough()
        return {client_id: result for client_id, result in found.items() if "error" not in result}

    def _num_steps_of_run(self, server: DistillationServer) -> int:
        """Number of optimizer steps of the server over the run, if no client fails."""

        def steps(num_clients: int) -> int:
            return -(-num_clients * len(self.sampling) * self.num_samples // server.batch_size)

        in_rounds = 0 if self.post_only else server.num_rounds * self.num_iterations * steps(server.clients_per_round)
        return in_rounds + self.post_num_iterations * steps(server.num_clients)

    def label_sequences(self, tokenizer: Any) -> torch.Tensor | None:
        """
        The token ids of each label text, for a model that generates its labels.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer.

        Returns:
            `torch.Tensor`, *optional*: Token ids of shape `(classes, tokens)`, padded with -100. `None` without
            `label_texts`.

        Raises:
            ValueError: If there are label texts but no tokenizer.
        """
        if self.label_texts is None:
            return None
        if tokenizer is None:
            raise ValueError("`label_texts` needs a tokenizer, but there is none. Pass `processing_class`.")
        rows = tokenizer(text_target=list(self.label_texts))["input_ids"]
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=IGNORED)
