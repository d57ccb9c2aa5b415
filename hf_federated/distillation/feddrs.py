"""FedDRS: the averaged model learns from the clients' models on inputs that nobody wrote.

Text-Free Federated Transformers Knowledge Distillation Without GAN (under review at ICLR 2024), algorithm 1. What the
paper leaves open is settled here as the docstring of [`FedDRS`] says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from ..generators import derived_seed, own_draws
from .base import Distillation
from .cohort import Cohort
from .feedback import evaluation_mode
from .losses import kl_divergence
from .pseudo_samples import (
    ADVERSARIES,
    IGNORED,
    INITIALIZATIONS,
    KINDS,
    adversarial_loss,
    check_takes_embeddings,
    descend,
    draw_labels,
    initial_embeddings,
    labelled_positions,
    word_embeddings,
)
from .server import DistillationServer
from .teachers import Teachers


# A client's pseudo-samples of all kinds: `embeddings`, `labels` and what the client's model says of them, `logits` of
# the positions that have a label.
Samples = dict[str, torch.Tensor]


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
    | `η*` | `server_learning_rate`, with the optimizer of the training arguments |
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
        server_learning_rate (`float`, *optional*, defaults to `1e-5`):
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
    sends_parameters: ClassVar[bool] = True
    returns_parameters: ClassVar[bool] = True
    needs_public: ClassVar[bool] = False
    needs_teachers: ClassVar[bool] = True
    ignores: ClassVar[tuple[str, ...]] = (
        "server_epochs",
        "client_epochs",
        "temperature",
        "client_learning_rate",
        "train_on_labelled",
        "prediction_dtype",
        "top_k",
    )

    server_learning_rate: float | None = 1e-5
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
        self.sampling = KINDS if kinds == ["mixed"] else tuple(kind for kind in KINDS if kind in kinds)
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
        if not self.step_size > 0:
            raise ValueError(f"`step_size` is {self.step_size}; it must be positive.")
        for name, allowed in (("adversary", ADVERSARIES), ("initialization", INITIALIZATIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; allowed are {', '.join(map(repr, allowed))}.")
        if self.post_only and self.post_num_iterations == 0:
            raise ValueError("post_only=True with post_num_iterations=0 leaves nothing to do.")
        if self.label_texts is not None:
            self.label_texts = tuple(self.label_texts)

    @property
    def needs_class_counts(self) -> bool:
        return True

    def check_model(self, model: Any) -> None:
        check_takes_embeddings(model)
        if model.config.is_encoder_decoder == (self.label_texts is None):
            raise ValueError(
                "`label_texts` are what an encoder–decoder writes for each class, and "
                f"{type(model).__name__} is {'one' if model.config.is_encoder_decoder else 'none'}: "
                f"{'give them' if model.config.is_encoder_decoder else 'leave them out'}."
            )

    # ---- Server side

    def uses_updates_of(self, round: int, server: DistillationServer) -> bool:
        return not self.post_only or round == server.num_rounds - 1 or self.keeps_teachers(server)

    def keeps_teachers(self, server: DistillationServer) -> bool:
        return self.post_num_iterations > 0 and server.clients_per_round < server.num_clients

    def distill(self, cohort: Cohort, server: DistillationServer) -> dict[str, float]:
        teachers = cohort.teachers
        assert teachers is not None
        logs: dict[str, float] = {}
        sampler = _Sampler(self, server, self._num_steps_of_run(server))
        if not self.post_only:
            for iteration in range(self.num_iterations):
                purpose = ("round", cohort.round, iteration)
                loss = self._iterate(cohort, teachers, sampler, cohort.client_ids, self.adversarial_weight, purpose)
                logs["server_distillation_loss"] = loss
        if cohort.round == server.num_rounds - 1 and self.post_num_iterations:
            logs |= self._post_process(cohort, teachers, sampler)
        return logs

    def _post_process(self, cohort: Cohort, teachers: Teachers, sampler: _Sampler) -> dict[str, float]:
        everybody = [client_id for client_id in teachers.everybody() if client_id not in cohort.rejected]
        # Of a mean nobody could tell whose model spoiled it.
        self._of_each(cohort, teachers, "models before their mean", everybody, partial(sampler.check, teachers))
        everybody = [client_id for client_id in everybody if client_id not in cohort.rejected]
        mean = teachers.mean(everybody) | self._left_as_is(sampler.server, cohort.round)
        sampler.server.exchange.write(mean)
        weight = self.adversarial_weight if self.post_adversarial_weight is None else self.post_adversarial_weight
        loss = 0.0
        for iteration in range(self.post_num_iterations):
            loss = self._iterate(cohort, teachers, sampler, everybody, weight, ("post", cohort.round, iteration))
        num_left = len([client_id for client_id in everybody if client_id not in cohort.rejected])
        return {"post_distillation_loss": loss, "post_num_clients": num_left}

    def _left_as_is(self, server: DistillationServer, round: int) -> dict[str, torch.Tensor]:
        """The server's values of what no client of a round trained: those who were not asked have sent other ones."""
        frozen = {id(parameter) for parameter in self.frozen_parameters(server.student.model, round)}
        live = server.exchange.live
        return {name: live[name] for name, item in server.exchange.parameters.items() if id(item) in frozen}

    def _iterate(
        self,
        cohort: Cohort,
        teachers: Teachers,
        sampler: _Sampler,
        client_ids: Sequence[str],
        weight: float,
        purpose: tuple[str, int, int],
    ) -> float:
        """Make samples of each client, and let the server's model learn them in one pass; the mean loss."""
        seed = sampler.server.seed

        def sample(client_id: str) -> Samples:
            own = derived_seed(seed, "pseudo-samples", client_id, *purpose)
            return sampler.sample(teachers, client_id, weight, own)

        samples = self._of_each(cohort, teachers, f"pseudo-samples {purpose}", client_ids, sample)
        self.samples = samples if self.keeps_samples else {}
        return sampler.learn(list(samples.values()), derived_seed(seed, "pseudo-samples' order", *purpose))

    def _of_each(
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
        for client_id in teachers.here(asked):
            try:
                made[client_id] = make(client_id)
            except ValueError as error:
                made[client_id] = {"error": str(error)}
            except FloatingPointError as error:
                made[client_id] = {"of the server": str(error)}
        found = teachers.together(place, made, asked)
        for client_id, theirs in found.items():
            if "error" in theirs:
                cohort.leave_out(client_id, f"Client {client_id!r}, round {cohort.round}: {theirs['error']}")
        of_the_server = [theirs["of the server"] for theirs in found.values() if "of the server" in theirs]
        if of_the_server:
            names = ", ".join(map(repr, cohort.rejected))
            left_out = f" Left out in this round, and perhaps averaged before: {names}." if names else ""
            raise FloatingPointError(f"Round {cohort.round}: {of_the_server[0]}{left_out}")
        cohort.check_enough()
        return {client_id: theirs for client_id, theirs in found.items() if "error" not in theirs}

    def _num_steps_of_run(self, server: DistillationServer) -> int:
        """Optimizer steps of the server over the run, if no client fails."""

        def steps(num_clients: int) -> int:
            return -(-num_clients * len(self.sampling) * self.num_samples // server.batch_size)

        in_rounds = 0 if self.post_only else server.num_rounds * self.num_iterations * steps(server.clients_per_round)
        return in_rounds + self.post_num_iterations * steps(server.num_clients)

    # ---- Client side

    def label_sequences(self, tokenizer: Any) -> torch.Tensor | None:
        if self.label_texts is None:
            return None
        if tokenizer is None:
            raise ValueError("`label_texts` are turned into tokens: give the trainer a `processing_class`.")
        rows = tokenizer(text_target=list(self.label_texts))["input_ids"]
        table = torch.full((len(rows), max(map(len, rows))), IGNORED)
        for number, row in enumerate(rows):
            table[number, : len(row)] = torch.tensor(row)
        return table

    def frozen_parameters(self, model: Any, round: int) -> list[nn.Parameter]:
        # The average could not learn how clients moved a table that is the decoder's, too.
        if round == 0 or not model.config.is_encoder_decoder:
            return []
        shared = word_embeddings(model)
        return [shared] if word_embeddings(model.get_decoder()) is shared else []


class _Sampler:
    """
    Makes a client's pseudo-samples, and lets the server's model learn them.

    Args:
        algorithm ([`FedDRS`]): The settings.
        server ([`DistillationServer`]): The server's model.
        num_training_steps (`int`): Optimizer steps of the server over the run.
    """

    def __init__(self, algorithm: FedDRS, server: DistillationServer, num_training_steps: int) -> None:
        self._algorithm = algorithm
        self.server = server
        self._student = server.student
        # What the optimizer never knew it cannot decay.
        with frozen(word_embeddings(server.student.model)):
            server.student.prepare(num_training_steps)
        tokenizer = server.student.processing_class
        self._special_ids: list[int] = [] if tokenizer is None else list(tokenizer.all_special_ids)
        # Tables are filled up with rows that stand for nothing: T5's has 32128 for 32100 tokens.
        self._num_tokens = None if tokenizer is None else len(tokenizer)
        sequences = algorithm.label_sequences(tokenizer)
        # What a model takes for each class.
        self._labels = torch.arange(self._student.num_classes) if sequences is None else sequences
        self._cls = None
        if algorithm.pin_cls:
            self._cls = None if tokenizer is None else tokenizer.cls_token_id
            if self._cls is None:
                raise ValueError("pin_cls=True needs a `processing_class` with a [CLS] token.")

    def _logits(self, model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def logits(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)
            inputs = {"inputs_embeds": embeddings.to(word_embeddings(model).dtype), "attention_mask": mask}
            if self._labels.ndim == 2:
                inputs["labels"] = labels
            return self._student.forward(inputs, model)

        return logits

    def _class_counts(self, teachers: Teachers, client_id: str) -> list[float]:
        counts = teachers.class_counts(client_id)
        if len(counts) != len(self._labels):
            raise ValueError(f"its label histogram has {len(counts)} classes, and the server {len(self._labels)}.")
        missing = [label for label, count in enumerate(counts) if math.isnan(count)]
        if missing:
            raise ValueError(f"its label histogram has no number for the classes {missing}.")
        return counts

    def check(self, teachers: Teachers, client_id: str) -> dict[str, torch.Tensor]:
        """
        Ask a client's model once, before its values are mixed with others'.

        Args:
            teachers ([`Teachers`]): Of which the client's model is opened.
            client_id (`str`): The client.

        Returns:
            `dict[str, torch.Tensor]`: Nothing.

        Raises:
            ValueError: If the client's histogram does not fit the classes, or its model gives NaN or infinity.
        """
        labels = draw_labels(self._class_counts(teachers, client_id), self._algorithm.num_samples, torch.Generator())
        if not self._is_finite(teachers.open(client_id), self._labels[labels].to(self._student.device)):
            raise ValueError("its model gives NaN or infinite values on its own word embeddings.")
        return {}

    @torch.no_grad()
    def _is_finite(self, model: nn.Module, labels: torch.Tensor) -> bool:
        """Whether a model, in evaluation mode, gives finite logits on word embeddings of its own."""
        shape = (len(labels), self._algorithm.sample_length)
        embeddings = self._draw(word_embeddings(model), shape, torch.Generator())
        return bool(self._logits(model)(embeddings, labels).isfinite().all())

    def _blame(self, teacher: nn.Module, labels: torch.Tensor, kind: str) -> NoReturn:
        """Say whose pseudo-samples these are that came to NaN: both models move them."""
        is_sound = self._is_finite(teacher, labels)
        if is_sound and not self._is_finite(self._student.model, labels):
            raise FloatingPointError(
                "the server's model gives NaN or infinite values on word embeddings, where a client's does not. Lower "
                "the learning rate (`learning_rate`, `server_learning_rate`) or clip gradients (`max_grad_norm`)."
            )
        advice = " On word embeddings it does not: lower `step_size`." if is_sound and kind != "random" else ""
        raise ValueError(f"its model gives NaN or infinite values on {kind} pseudo-samples.{advice}")

    def sample(self, teachers: Teachers, client_id: str, weight: float, seed: int) -> Samples:
        """
        A client's samples of all kinds.

        Args:
            teachers ([`Teachers`]): Of which the client's model is opened.
            client_id (`str`): The client.
            weight (`float`): `λ`.
            seed (`int`): Of what is drawn.

        Returns:
            `dict[str, torch.Tensor]`: `embeddings` of shape `(kinds × samples, positions, hidden)`, `labels`, and the
            client's `logits`, of the positions that have a label, in their order: `(labelled positions, classes)`; on
            the CPU.

        Raises:
            ValueError: If the client's histogram does not fit the classes, or its model gives NaN or infinity.
            FloatingPointError: If the server's model does, and not the client's.
        """
        counts = self._class_counts(teachers, client_id)
        generator = torch.Generator().manual_seed(seed)
        student = self._student.model
        teacher = teachers.open(client_id)
        own, theirs = self._logits(teacher), self._logits(student)
        parts: list[Samples] = []
        with evaluation_mode(student):
            for kind in self._algorithm.sampling:
                labels = self._labels[draw_labels(counts, self._algorithm.num_samples, generator)]
                labels = labels.to(self._student.device)
                starts = embeddings = self._begin(teacher, generator)
                if kind != "random":
                    strength = weight if kind == "adversarial" else 0.0
                    embeddings = self._descend(embeddings, labels, own, theirs, strength)
                with torch.no_grad():
                    logits = own(embeddings, labels)
                if not bool(logits.isfinite().all()) or not bool(embeddings.isfinite().all()):
                    self._blame(teacher, labels, kind)
                # Of a vocabulary they are most of what is kept.
                part = {"embeddings": embeddings, "labels": labels, "logits": labelled_positions(logits, labels)}
                if self._algorithm.keeps_samples:
                    part["starts"] = starts
                parts.append({name: value.cpu() for name, value in part.items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _begin(self, teacher: nn.Module, generator: torch.Generator) -> torch.Tensor:
        algorithm = self._algorithm
        weight = word_embeddings(teacher if algorithm.initialization == "client" else self._student.model)
        shape = (algorithm.num_samples, algorithm.sample_length)
        embeddings = self._draw(weight, shape, generator, algorithm.initialization == "gaussian")
        if self._cls is not None:
            embeddings[:, 0] = weight.detach()[self._cls]
        # Steps are small against what a narrow number can tell apart.
        return embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))

    def _draw(
        self, weight: torch.Tensor, shape: tuple[int, int], generator: torch.Generator, gaussian: bool = False
    ) -> torch.Tensor:
        return initial_embeddings(weight, shape, generator, self._special_ids, gaussian, self._num_tokens)

    def _descend(
        self, embeddings: torch.Tensor, labels: torch.Tensor, teacher: Any, student: Any, weight: float
    ) -> torch.Tensor:
        algorithm = self._algorithm
        return descend(
            embeddings,
            lambda moved: adversarial_loss(moved, labels, teacher, student, weight, algorithm.adversary),
            algorithm.num_steps,
            algorithm.step_size,
            num_pinned=0 if self._cls is None else 1,
        )

    def learn(self, samples: Sequence[Samples], seed: int) -> float:
        """
        One pass of the server's model over samples of several clients, shuffled together.

        Args:
            samples (`Sequence[dict[str, torch.Tensor]]`): Of each client, as from `sample`.
            seed (`int`): Of the order and of dropout.

        Returns:
            `float`: The mean loss of the steps.
        """
        places = [(client, row) for client, theirs in enumerate(samples) for row in range(len(theirs["labels"]))]
        order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed)).tolist()
        targets_of = [theirs["logits"].split(_num_labelled(theirs["labels"])) for theirs in samples]
        size, device = self.server.batch_size, self._student.device
        logits_of = self._logits(self._student.model)
        self._student.model.train()
        losses: list[torch.Tensor] = []
        with own_draws(derived_seed(seed, "dropout")), frozen(word_embeddings(self._student.model)):
            for start in range(0, len(order), size):
                batch = [places[place] for place in order[start : start + size]]
                embeddings, labels = (
                    torch.stack([samples[client][name][row] for client, row in batch]).to(device)
                    for name in ("embeddings", "labels")
                )
                targets = torch.cat([targets_of[client][row] for client, row in batch]).to(device)
                logits = labelled_positions(logits_of(embeddings, labels), labels)
                losses.append(self._student.step(kl_divergence(logits, targets)))
        return float(torch.stack(losses).mean())


def _num_labelled(labels: torch.Tensor) -> list[int]:
    """Of each sample, how many of its positions have a label."""
    return (labels.view(len(labels), -1) != IGNORED).sum(1).tolist()


@contextmanager
def frozen(parameter: nn.Parameter) -> Iterator[None]:
    """Whatever trains in the body, this parameter does not."""
    trained = parameter.requires_grad
    parameter.requires_grad_(False)
    try:
        yield
    finally:
        parameter.requires_grad_(trained)
