"""FedDRS: the averaged model learns from the clients' models on inputs that nobody wrote.

Text-Free Federated Transformers Knowledge Distillation Without GAN (under review at ICLR 2024), algorithm 1. What the
paper leaves open is settled here as the docstring of [`FedDRS`] says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..clients.context import ClientContext
from ..messages import ClientUpdate, Disclosure
from ..utils.random import derived_seed
from .base import Distillation
from .class_counts import NUM_EXAMPLES_PER_CLASS, ReportClassCounts
from .client import DistillationClient, LocalDistillation
from .cohort import Cohort
from .pseudo_sampler import PseudoSampler, Samples
from .pseudo_samples import ADVERSARIES, IGNORED, INITIALIZATIONS, KINDS, check_takes_embeddings, word_embeddings
from .requirements import Requirements
from .server import DistillationServer
from .teachers import Teachers


def frozen_parameters(model: Any, round: int) -> list[nn.Parameter]:
    """
    The parameters that local training does not change: from the second round on, a word embedding that encoder and
    decoder share. The average could not learn how clients moved a table that is also the decoder's.

    Args:
        model (`torch.nn.Module`): The client's model.
        round (`int`): Round number, from 0.
    """
    if round == 0 or not model.config.is_encoder_decoder:
        return []
    shared = word_embeddings(model)
    return [shared] if word_embeddings(model.get_decoder()) is shared else []


class FedDRSClient(DistillationClient):
    """The client side of [`FedDRS`]."""

    def local_training(self, context: ClientContext, round: int) -> LocalDistillation:
        trainer = context.model.trainer
        sequences = self.algorithm.label_sequences(trainer.processing_class)
        training = ReportClassCounts(context.student.num_classes, sequences)
        training.frozen = frozen_parameters(trainer.model, round)
        return training


@dataclass(kw_only=True, repr=False, eq=False)
class FedDRS(Distillation):
    """
    Parameters are averaged as `aggregation` says, and the average learns from each client's model on pseudo-samples
    of that client: `Σ_k KL(softmax f(θ_k; ω_k) ‖ softmax f(θ_k; ω_S))` (equation 8). `θ_k` are sequences of word
    embeddings, drawn from those of the averaged model and moved by gradient descent ([`pseudo_samples`]). Clients add
    nothing to their parameters but how many rows of each label they have.

    After the last round the mean of all clients' models learns once more, `post_num_iterations` times, from what each
    of them sent last. A client whose model gives NaN or infinity is left out by name, of that mean, too, until it
    sends another.

    | paper | here |
    |---|---|
    | `θ` of 64 × 64 × 768 | `num_samples`, `sample_length`, the model's own size |
    | `β`, 100 iterations | `step_size`, `num_steps` |
    | `γ_k` | labels drawn in the proportions of client k's rows |
    | `λ`, in the post-processing | `adversarial_weight`, `post_adversarial_weight` |
    | `I`, `I*` | `num_iterations`, `post_num_iterations` |
    | `η*` | `server_lr`, with the optimizer of the training arguments |
    | random, target, adversary, mixed sampling; AdOnly | `sampling` |
    | PostOnly | `post_only` |

    Models are in evaluation mode while samples are made. One pass over all clients' samples, in batches of
    `per_device_train_batch_size`, is a step of the paper. Word embeddings stay as averaged; those which an
    encoder–decoder shares between its parts are frozen on clients, too, after the first round. The paper's average is
    unweighted: `aggregation_kwargs={"weighting": "uniform"}`.

    In memory are one client's model beside the server's (of a PEFT model its adapter alone) with the values that were
    read into it, and the samples. Of these there are clients × kinds × `num_samples`, each of `sample_length` × hidden
    size numbers and the logits: one for each class, and of an encoder–decoder label tokens × vocabulary, which is the
    most. The mean of all clients' models is summed in twice their width. What clients sent lies in
    `output_dir/teachers` until it is used.

    Args:
        sampling (`str` or `Sequence[str]`, *optional*, defaults to `"mixed"`):
            Kinds of samples: `"random"`, `"target"`, `"adversarial"`, several of them, or `"mixed"`, which is all.
        num_iterations (`int`, *optional*, defaults to `1`):
            Times that samples are made and learned in a round.
        post_num_iterations (`int`, *optional*, defaults to `3`):
            Times after the last round.
        post_only (`bool`, *optional*, defaults to `False`):
            Whether only the latter happen.
        adversarial_weight (`float`, *optional*, defaults to `0.1`):
            How much adversarial samples avoid what the server's model knows.
        post_adversarial_weight (`float`, *optional*):
            The same after the last round; as in the rounds by default.
        adversary (`str`, *optional*, defaults to `"ce"`):
            By which loss: `"ce"` or `"kl"`.
        num_samples (`int`, *optional*, defaults to `64`):
            Samples of each kind and client.
        sample_length (`int`, *optional*, defaults to `64`):
            Positions of a sample.
        step_size (`float`, *optional*, defaults to `0.1`):
            Of the gradient descent on samples, whose loss is summed over them.
        num_steps (`int`, *optional*, defaults to `100`):
            Its steps.
        initialization (`str`, *optional*, defaults to `"averaged"`):
            Where samples begin: rows of the `"averaged"` word embeddings, of the `"client"`'s, or `"gaussian"` noise
            with the mean and deviation of the averaged ones.
        pin_cls (`bool`, *optional*, defaults to `False`):
            Whether the first position is the embedding of the tokenizer's `[CLS]` and stays so.
        label_texts (`Sequence[str]`, *optional*):
            What an encoder–decoder writes for each class. Its decoder is given the text of the pseudo-label.
        server_lr (`float`, *optional*, defaults to `1e-5`):
            Of the server's distillation.
        kwargs (*optional*): No other setting of [`Distillation`] has a place here.

    Raises:
        ValueError: If a setting is out of range.

    Example:

    ```python
    >>> from hf_federated import FedDRS

    >>> FedDRS(sampling="adversarial", post_only=True)
    FedDRS(sampling=('adversarial',), post_only=True)
    ```
    """

    name: ClassVar[str] = "feddrs"
    parameters: ClassVar[str] = "averaged"
    client_class: ClassVar[type[DistillationClient]] = FedDRSClient
    ignores: ClassVar[tuple[str, ...]] = (
        "server_epochs",
        "client_epochs",
        "temperature",
        "client_lr",
        "train_on_labelled",
        "prediction_dtype",
        "top_k",
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
    initialization: str = "averaged"
    pin_cls: bool = False
    label_texts: Sequence[str] | None = None
    # The last samples, by client, for whoever asks that they be kept.
    keeps_samples: bool = field(default=False, init=False)
    samples: dict[str, Samples] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = [self.sampling] if isinstance(self.sampling, str) else list(self.sampling)
        self.sampling = KINDS if "mixed" in kinds else tuple(kind for kind in KINDS if kind in kinds)
        if not self.sampling or not {*kinds} <= {*KINDS, "mixed"}:
            raise ValueError(f"`sampling` is {kinds}; allowed are {', '.join(map(repr, KINDS))}, and 'mixed' for all.")
        for name in ("num_iterations", "post_num_iterations", "num_steps", "num_samples", "sample_length"):
            least = 0 if name == "post_num_iterations" else 1
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least {least}.")
        for name in ("adversarial_weight", "post_adversarial_weight"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"`{name}` is {value}; it must be finite, and zero or more.")
        if not 0 < self.step_size < float("inf"):
            raise ValueError(f"`step_size` is {self.step_size}; it must be positive and finite.")
        for name, allowed in (("adversary", ADVERSARIES), ("initialization", INITIALIZATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; allowed are {', '.join(map(repr, allowed))}.")
        if self.post_only and self.post_num_iterations == 0:
            raise ValueError("post_only=True with post_num_iterations=0 leaves nothing to do.")
        if self.label_texts is not None:
            self.label_texts = tuple(self.label_texts)

    @property
    def requirements(self) -> Requirements:
        return dataclasses.replace(super().requirements, public_dataset=False)

    @property
    def disclosures(self) -> tuple[Disclosure, ...]:
        return (NUM_EXAMPLES_PER_CLASS,)

    def check_model(self, model: Any) -> None:
        check_takes_embeddings(model, self.sample_length)
        if model.config.is_encoder_decoder == (self.label_texts is None):
            raise ValueError(
                "`label_texts` are what an encoder–decoder writes for each class, and "
                f"{type(model).__name__} is {'one' if model.config.is_encoder_decoder else 'none'}: "
                f"{'give them' if model.config.is_encoder_decoder else 'leave them out'}."
            )

    # ---- Server side

    def build_teachers(self, build: Callable[[], Teachers]) -> Teachers | None:
        return build()

    def on_update(self, update: ClientUpdate, server: DistillationServer) -> None:
        is_teacher = not self.post_only or update.round == server.num_rounds - 1 or self._keeps_teachers(server)
        if is_teacher and server.teachers is not None:
            server.teachers.keep(update)

    def _keeps_teachers(self, server: DistillationServer) -> bool:
        """Whether a later round needs the updates of this round."""
        return self.post_num_iterations > 0 and server.clients_per_round < server.num_clients

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        teachers = cohort.teachers
        assert teachers is not None
        logs: dict[str, float] = {}
        sampler = PseudoSampler(self, server, self._num_steps_of_run(server))
        if not self.post_only:
            for iteration in range(self.num_iterations):
                purpose = ("round", cohort.round, iteration)
                loss = self._iterate(cohort, teachers, sampler, cohort.client_ids, self.adversarial_weight, purpose)
                logs["server_distillation_loss"] = loss
        if cohort.round == server.num_rounds - 1 and self.post_num_iterations:
            logs |= self._post_process(cohort, teachers, sampler)
        if not self._keeps_teachers(server):
            teachers.clear()
        return logs

    def _post_process(self, cohort: Cohort, teachers: Teachers, sampler: PseudoSampler) -> dict[str, float]:
        client_ids = [client_id for client_id in teachers.client_ids() if client_id not in cohort.rejected]
        # Of a mean nobody could tell whose model spoiled it.
        self._for_each_client(
            cohort, teachers, "models before their mean", client_ids, partial(sampler.check, teachers)
        )
        client_ids = [client_id for client_id in client_ids if client_id not in cohort.rejected]
        mean = teachers.mean(client_ids) | self._frozen_server_values(sampler.server, cohort.round)
        sampler.server.exchange.write(mean)
        weight = self.adversarial_weight if self.post_adversarial_weight is None else self.post_adversarial_weight
        loss = 0.0
        for iteration in range(self.post_num_iterations):
            loss = self._iterate(cohort, teachers, sampler, client_ids, weight, ("post", cohort.round, iteration))
        num_left = len([client_id for client_id in client_ids if client_id not in cohort.rejected])
        return {"post_distillation_loss": loss, "post_num_clients": num_left}

    def _frozen_server_values(self, server: DistillationServer, round: int) -> dict[str, torch.Tensor]:
        """The server's values of what no client of a round trained: those who were not asked have sent other ones."""
        frozen = {id(parameter) for parameter in frozen_parameters(server.student.model, round)}
        live = server.exchange.tensors
        return {name: live[name] for name, item in server.exchange.parameters.items() if id(item) in frozen}

    def _iterate(
        self,
        cohort: Cohort,
        teachers: Teachers,
        sampler: PseudoSampler,
        client_ids: Sequence[str],
        weight: float,
        purpose: tuple[str, int, int],
    ) -> float:
        """Make samples of each client, and let the server's model learn them in one pass; the mean loss."""
        seed = sampler.server.seed

        def sample(client_id: str) -> Samples:
            own = derived_seed(seed, "pseudo-samples", client_id, *purpose)
            return sampler.sample(teachers, client_id, weight, own)

        samples = self._for_each_client(cohort, teachers, f"pseudo-samples {purpose}", client_ids, sample)
        self.samples = samples if self.keeps_samples else {}
        return sampler.learn(list(samples.values()), derived_seed(seed, "pseudo-samples' order", *purpose))

    def _for_each_client(
        self,
        cohort: Cohort,
        teachers: Teachers,
        place: str,
        client_ids: Sequence[str],
        make: Callable[[str], dict[str, torch.Tensor]],
    ) -> dict[str, dict[str, torch.Tensor]]:
        """What is made of each client's model, wherever that is; a client of which nothing can be is left out."""
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
                cohort.exclude(client_id, f"Client {client_id!r}, round {cohort.round}: {result['error']}")
        server_errors = [result["server_error"] for result in found.values() if "server_error" in result]
        if server_errors:
            names = ", ".join(map(repr, cohort.rejected))
            left_out = f" Left out in this round, and perhaps averaged before: {names}." if names else ""
            raise FloatingPointError(f"Round {cohort.round}: {server_errors[0]}{left_out}")
        cohort.check_enough()
        return {client_id: result for client_id, result in found.items() if "error" not in result}

    def _num_steps_of_run(self, server: DistillationServer) -> int:
        """Optimizer steps of the server over the run, if no client fails."""

        def steps(num_clients: int) -> int:
            return -(-num_clients * len(self.sampling) * self.num_samples // server.batch_size)

        in_rounds = 0 if self.post_only else server.num_rounds * self.num_iterations * steps(server.clients_per_round)
        return in_rounds + self.post_num_iterations * steps(server.num_clients)

    def label_sequences(self, tokenizer: Any) -> torch.Tensor | None:
        """
        The token ids of each label text, for a model that writes its labels.

        Args:
            tokenizer (`PreTrainedTokenizerBase`): The model's tokenizer.

        Returns:
            `torch.Tensor`, *optional*: Of shape `(classes, tokens)`, with -100 behind the end; `None` without
            `label_texts`.
        """
        if self.label_texts is None:
            return None
        if tokenizer is None:
            raise ValueError("`label_texts` are turned into tokens: give the trainer a `processing_class`.")
        rows = tokenizer(text_target=list(self.label_texts))["input_ids"]
        table = torch.full((len(rows), max(map(len, rows))), IGNORED)
        for number, row in enumerate(rows):
            table[number, : len(row)] = torch.tensor(row)
        return table
