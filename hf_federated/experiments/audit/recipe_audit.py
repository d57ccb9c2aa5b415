"""Audit a recipe: simulate clients with the recipe's training, and attack what they send.

Every simulated client trains in a separate federation of one client, so the server's model after the run is what
this client's payload teaches the server: the client's parameters, or the model that the server distilled from the
client's predictions. The clients share examples: each example belongs to half of the clients.

With secure aggregation, a server receives no single update. The simulated client then trains in a federation with
other clients, and the attacked payload is the weighted mean of their updates. The other clients have examples that
neither the simulated clients nor the attacker have, drawn anew for each federation.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from torch import nn
from transformers import PrinterCallback, TrainingArguments

from hf_federated.adapters import copy_model
from hf_federated.audits import (
    PAYLOAD_ATTACKS,
    AttackResult,
    Evidence,
    Payload,
    PayloadAudit,
    PayloadRecorder,
    SumRecorder,
)
from hf_federated.audits.payloads.evidence import ShadowLosses
from hf_federated.clients import ClientSampler
from hf_federated.config import FederatedConfig
from hf_federated.data import FederatedDataset
from hf_federated.experiments.baselines import WITHOUT_OUTPUTS
from hf_federated.experiments.cached_features import refuse_head
from hf_federated.experiments.data.tokenized import load_tokenized_data
from hf_federated.experiments.model_loading import load_model, load_tokenizer, without_head_warnings
from hf_federated.experiments.recipe.recipe import AuditVariant, Recipe
from hf_federated.experiments.recipe.schema import RecipeError, build, recipe_errors
from hf_federated.experiments.recipe.sections import AuditSection
from hf_federated.experiments.trainer_arguments import dataset_arguments
from hf_federated.postprocessing import ClipUpdate, GaussianNoise, Postprocessor
from hf_federated.tasks import LanguageModeling, TextClassification
from hf_federated.trainer import federate
from hf_federated.trainer.checks.secure_aggregation import build_secure_aggregation
from hf_federated.utils.optional_packages import require_packages


# Id of the simulated client.
CLIENT_ID = "audited"
# Training arguments of all simulated clients.
_QUIET = {
    **WITHOUT_OUTPUTS,
    "disable_tqdm": True,
    "per_device_eval_batch_size": 1,  # the loss of a batch is the loss of an example
}
# Training arguments of one plain SGD step.
_SGD = {
    "optim": "sgd",
    "learning_rate": 0.1,  # with a small learning rate, rounding errors of the parameters hide the gradient
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "gradient_accumulation_steps": 1,
}
# In the first round, the gradient of a LoRA matrix A is zero, because its matrix B is zero.
_STEP_ROUNDS = 2
_CANARY_WORDS = 8
_MAX_PUBLIC = 500


def check_packages() -> None:
    """Raise an error if a package of the audit is not installed, before training takes hours."""
    with recipe_errors("audit"):
        require_packages("the audit", {"metrics": {"sklearn": "scikit-learn"}})


def audit_recipe(recipe: Recipe, echo: Callable[[str], None] = print) -> PayloadAudit:
    """
    Run the attacks of the section `audit` on each variant of a recipe.

    Args:
        recipe ([`Recipe`]): A recipe with a section `audit`.
        echo (`Callable`, *optional*): Prints a line after each variant.

    Returns:
        [`~hf_federated.audits.PayloadAudit`]: The results of all variants.

    Raises:
        RecipeError: If a variant cannot be audited.
    """
    section = recipe.audit
    if section is None:
        raise RecipeError("audit: the recipe has no such section. Add the section audit, which can be empty ({}).")
    check_packages()
    results, sums = {}, {}
    for name, variant in recipe.variants.items():
        with without_head_warnings():
            audited = _Variant(variant, section, name)
            results[name] = audited.attack()
        if audited.num_summed > 1:
            sums[name] = audited.num_summed
        echo(f"Audited {name}: {', '.join(_summary(result) for result in results[name])}.")
    return PayloadAudit(
        results,
        {
            **dataclasses.asdict(section),
            "num_examples": audited.num_examples,
            **({"num_summed": sums} if sums else {}),
        },
        model_name=public_name(recipe.model.name_or_path),
        data_name=public_name(recipe.data.path),
        versions={package: importlib.metadata.version(package) for package in ("torch", "transformers")},
    )


@dataclass
class _Variant:
    """
    One setting of an audit.

    Args:
        variant ([`AuditVariant`]): The recipe of the setting, and its postprocessors.
        section ([`AuditSection`]): The section `audit`.
        name (`str`): Name of the setting, for errors.
    """

    variant: AuditVariant
    section: AuditSection
    name: str

    def __post_init__(self) -> None:
        recipe = self.variant.recipe
        where = f"audit.variants.{self.name}: "
        if recipe.client_models:
            raise RecipeError(f"{where}the audit does not support client_models. Remove the section.")
        refuse_head(recipe.model, "the audit")
        self.tokenizer = load_tokenizer(recipe.model)
        self.data = load_tokenized_data(recipe, self.tokenizer)
        task: Any = self.data.task
        is_classification = isinstance(task, TextClassification) and isinstance(task.text_column, str)
        is_causal = isinstance(task, LanguageModeling) and task.objective == "causal" and task.block_size is None
        if not is_classification and not is_causal:
            raise RecipeError(
                f"{where}the audit does not support the task {recipe.task.name} with these arguments. It supports"
                " text-classification of one text, and causal language-modeling without block_size."
            )
        seed = int(recipe.training.get("seed", 42))
        self.model = load_model(recipe.model, task, self.tokenizer, seed)
        generator = np.random.default_rng(self.section.seed)
        rows, tokenized = self.data.raw.train.to_dataset(), self.data.train.to_dataset()
        self.num_summed = self._count_summed(where)
        # A third of the examples stays with the attacker, or with the other clients of a sum.
        self.num_examples = min(self.section.num_examples, 2 * len(rows) // 3)
        order = generator.permutation(len(rows))
        self.pool = tokenized.select(order[: self.num_examples])
        rest = order[self.num_examples :]
        num_public = _MAX_PUBLIC if self.num_summed == 1 else min(_MAX_PUBLIC, len(rest) // 2)
        self.public = tokenized.select(rest[:num_public])
        self._reserve = tokenized.select(rest[num_public:])
        num_random = self.section.num_canaries + self.section.num_references
        canaries = task.prepare(_random_texts(rows, task, num_random, generator), self.tokenizer)
        canaries = canaries.cast(self.pool.features) if canaries.features != self.pool.features else canaries
        self.canaries = canaries.select(range(self.section.num_canaries))
        self.references = canaries.select(range(self.section.num_canaries, num_random))

    def _count_summed(self, where: str) -> int:
        """Return the number of clients whose updates the attacked payload sums."""
        federation, given = self.variant.recipe.federation, self.variant.num_summed
        config: FederatedConfig = build("federation", FederatedConfig, copy.deepcopy(federation))
        if given is not None and given > 1 and config.distillation is not None:
            raise RecipeError(
                f"{where}num_summed={given} is set, but with distillation={config.distillation!r} the server receives "
                "the predictions of each client and no sum. Remove num_summed."
            )
        with recipe_errors("federation"):
            protocol = build_secure_aggregation(config)
            if protocol is None:
                return given or 1
            in_round = ClientSampler(list(self.data.train), config.clients_per_round, 0).num_sampled
        number = given or in_round
        if number < protocol.min_survivors:
            raise RecipeError(
                f"{where}num_summed={number}, but with secure_aggregation={protocol.name!r} the server receives sums "
                f"of at least {protocol.min_survivors} clients (min_survivors). Raise num_summed."
            )
        return number

    def attack(self) -> list[AttackResult]:
        """Collect the evidence that the attacks read, and run them."""
        attacks = [PAYLOAD_ATTACKS[name]() for name in self.section.attacks]
        evidence = self.evidence(set(self.section.attacks))
        return [result for attack in attacks for result in attack.run(evidence)]

    def evidence(self, attacks: set[str]) -> Evidence:
        """Train the simulated clients, and return what the attacks with these names read."""
        payload = small_payload = step_payload = shadows = None
        if attacks & {"loss_threshold", "lira", "canary"}:
            shadows, payload = self._shadows()
        elif "token_set" in attacks:
            payload, _ = self._train(self.pool, self.section.num_rounds, self.draw_others(len(self.pool)))
        if "dager" in attacks:
            few = self.pool.select(range(min(self.section.num_inversion_examples, len(self.pool))))
            others = self.draw_others(len(few))
            small_payload, _ = self._train(few, self.section.num_rounds, others)
            sgd = {**_SGD, "per_device_train_batch_size": len(few)}
            step_payload, _ = self._train(few, _STEP_ROUNDS, others, sgd, {"local_steps": 1}, dropout=False)
        ends = {ids[-1] for ids in self.public["input_ids"]}
        return Evidence(
            model=self.model,
            payload=payload,
            small_payload=small_payload,
            step_payload=step_payload,
            shadows=shadows,
            public_token_ids=[list(ids) for ids in self.public["input_ids"]],
            end_token=ends.pop() if len(ends) == 1 else None,
            max_length=max(len(ids) for part in (self.public, self.pool) for ids in part["input_ids"]),
        )

    def _shadows(self) -> tuple[ShadowLosses, Payload]:
        """Train one client for each model, and return the losses of all models and the payload of the first one."""
        generator = np.random.default_rng([self.section.seed, 1])
        num_models = self.section.num_models
        members = _halves(num_models, len(self.pool), generator)
        canary_members = _halves(num_models, len(self.canaries), generator)
        scored = concatenate_datasets([self.pool, self.canaries, self.references])
        losses: list[torch.Tensor] = []
        payloads: list[Payload] = []
        for number, (included, included_canaries) in enumerate(zip(members, canary_members, strict=True)):
            examples = self.pool.select(np.flatnonzero(included))
            inserted = self.canaries.select(np.flatnonzero(included_canaries))
            others = self.draw_others(len(self.pool) // 2, number)
            payload, trainer = self._train(concatenate_datasets([examples, inserted]), self.section.num_rounds, others)
            losses.append(_example_losses(trainer, scored))
            payloads = payloads or [payload]
        pool, canaries, references = torch.stack(losses).split(
            [len(self.pool), len(self.canaries), len(self.references)], dim=1
        )
        of_canaries = (canaries, torch.from_numpy(canary_members), references) if len(self.canaries) else ()
        return ShadowLosses(pool, torch.from_numpy(members), *of_canaries), payloads[0]

    def draw_others(self, size: int, draw: int = 0) -> dict[str, Dataset]:
        """Draw the examples of the other clients of a sum, without an example of the pool and of the attacker."""
        number = self.num_summed - 1
        if number * size > len(self._reserve):
            raise RecipeError(
                f"audit.variants.{self.name}: a sum of {self.num_summed} clients needs {number * size} examples of "
                f"other clients, but {len(self._reserve)} are left. Lower num_summed or audit.num_examples."
            )
        order = np.random.default_rng([self.section.seed, 2, draw]).permutation(len(self._reserve))
        return {f"other {i + 1}": self._reserve.select(order[i * size : (i + 1) * size]) for i in range(number)}

    @cached_property
    def _postprocessors(self) -> list[Postprocessor]:
        steps: list[Postprocessor] = []
        if self.variant.clip is not None:
            steps.append(ClipUpdate(self.variant.clip))
        if self.variant.noise is not None:
            steps.append(GaussianNoise(self.variant.noise, reproducible=True))
        return steps

    def _train(
        self,
        examples: Dataset,
        num_rounds: int,
        others: dict[str, Dataset],
        training: dict[str, Any] | None = None,
        federation: dict[str, Any] | None = None,
        dropout: bool = True,
    ) -> tuple[Payload, Any]:
        """Train a federation of the client and of others, and return the last payload and the server's trainer."""
        recipe, task = self.variant.recipe, self.data.task
        trainer_class: Any = task.trainer_class
        model = copy_model(self.model)
        if not dropout:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        with tempfile.TemporaryDirectory() as folder:
            values = {**recipe.training, **_QUIET, **(training or {}), "output_dir": folder}
            args: TrainingArguments = build("training", recipe.task.cls.arguments_class, values)
            settings = {**recipe.federation, "num_rounds": num_rounds, "clients_per_round": 1.0}
            settings |= {"min_clients": 1.0, "evaluate_clients": False, **(federation or {})}
            config: FederatedConfig = build("federation", FederatedConfig, copy.deepcopy(settings))
            if config.secure_aggregation is not None:
                # The sum has the same bytes with masks.
                kwargs: Any = config.secure_aggregation_kwargs
                config = dataclasses.replace(config, secure_aggregation_kwargs={**kwargs, "masks": False})
            shared = {"processing_class": self.tokenizer, "data_collator": task.data_collator(self.tokenizer)}
            clients = FederatedDataset.from_dict({CLIENT_ID: examples, **others})
            data = dataclasses.replace(self.data, train=clients, test_clients=None)
            recorder: PayloadRecorder | SumRecorder = PayloadRecorder(CLIENT_ID, examples["input_ids"])
            if others:
                other_ids = [ids for dataset in others.values() for ids in dataset["input_ids"]]
                recorder = SumRecorder(examples["input_ids"], other_ids)
            with recipe_errors(f"audit.variants.{self.name}"):
                trainer: Any = federate(trainer_class)(
                    model=model,
                    args=args,
                    federation=config,
                    postprocessors=self._postprocessors,
                    callbacks=[recorder],
                    **dataset_arguments(recipe, data, self.tokenizer, args, shared),
                )
                trainer.remove_callback(PrinterCallback)
                trainer.train()
        if recorder.payload is None:
            raise RecipeError(f"audit.variants.{self.name}: the server received no update of the simulated client.")
        if recorder.payload.after:
            # The server has the client's parameters, or their mean, before a server optimizer changes them.
            trainer.exchange.write(recorder.payload.after)
        return recorder.payload, trainer


def _halves(num_models: int, num_examples: int, generator: np.random.Generator) -> np.ndarray:
    """Assign each example to half of the models. Returns a boolean array of shape `(num_models, num_examples)`."""
    if not num_examples:
        return np.zeros((num_models, 0), dtype=bool)
    ranks = np.stack([generator.permutation(num_models) for _ in range(num_examples)], axis=1)
    return ranks < num_models // 2


@torch.no_grad()
def _example_losses(trainer: Any, examples: Dataset) -> torch.Tensor:
    """Return the loss of each example under the model of a trainer."""
    model = trainer.model.eval()
    return torch.stack([model(**batch).loss.double().cpu() for batch in trainer.get_eval_dataloader(examples)])


def _random_texts(rows: Dataset, task: Any, num_texts: int, generator: np.random.Generator) -> Dataset:
    """Draw texts of random words of the examples. In a classification, all have the label of the first example."""
    words = sorted({word for text in rows[task.text_column] for word in text.split()})
    texts = [" ".join(generator.choice(words, _CANARY_WORDS)) for _ in range(num_texts)]
    first = rows.select([0] * num_texts)
    drawn = {name: first[name] for name in task.columns if name != task.text_column}
    columns = {name: feature for name, feature in rows.features.items() if name in task.columns}
    return Dataset.from_dict({task.text_column: texts, **drawn}).cast(rows.select_columns(list(columns)).features)


def _summary(result: AttackResult) -> str:
    values = ", ".join(f"{name} {value:.3f}" for name, value in result.metrics.items())
    return f"{result.attack} ({values})"


def public_name(name: str) -> str:
    """Return a Hub id unchanged, and only the last part of a local path."""
    return Path(name).name if Path(name).exists() else name
