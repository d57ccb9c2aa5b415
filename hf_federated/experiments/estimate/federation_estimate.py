"""Estimate of averaging and distillation: memory of a client and of the server, bytes and round trips of a round."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import TrainingArguments

from hf_federated._compat import checkpointing_settings
from hf_federated.adapters.freezing import freeze_layers
from hf_federated.aggregation import build_aggregation
from hf_federated.compatibility import Combination, check_combination
from hf_federated.config import FederatedConfig
from hf_federated.distillation import build_distillation
from hf_federated.experiments.estimate.dry_parties import DryFederation
from hf_federated.experiments.estimate.dry_round import DryRun, dry_run
from hf_federated.experiments.estimate.dry_secure_sums import DryProtocol
from hf_federated.experiments.estimate.meta_model import meta_model
from hf_federated.experiments.estimate.results import Estimate, PartyEstimate, UnitEstimate
from hf_federated.experiments.estimate.sizes import DataSizes, EstimateOptions, Lengths, find_lengths
from hf_federated.experiments.estimate.step_cost import (
    StepCost,
    checkpoint_activations,
    model_pass,
    step_cost,
    token_ids,
)
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import RecipeError, build, recipe_errors
from hf_federated.messages import Evaluate
from hf_federated.server import UpdateCollector
from hf_federated.tasks import LanguageModeling, QuestionAnswering, SequenceTagging, Task
from hf_federated.trainer.checks.arguments import resolve_federation
from hf_federated.trainer.checks.secure_aggregation import build_secure_aggregation, check_weights
from hf_federated.trainer.setup import algorithm_postprocessors
from hf_federated.utils.algorithm_names import COLLECTOR_NAMES


def estimate_federation(
    recipe: Recipe, args: TrainingArguments, sizes: DataSizes, options: EstimateOptions
) -> Estimate:
    """
    Estimate a recipe with rounds: averaging or distillation.

    Args:
        recipe ([`Recipe`]): The recipe.
        args (`TrainingArguments`): The training arguments.
        sizes ([`DataSizes`]): Numbers of clients and examples.
        options ([`EstimateOptions`]): Given numbers.

    Raises:
        RecipeError: If a model cannot be built, or the number of public examples is missing.
    """
    model = meta_model(recipe.model, sizes.task)
    lengths = find_lengths(sizes.task, model.config, options)
    with recipe_errors("federation"):
        federation = _describe(recipe, args, sizes, model, lengths)
        config, aggregation, distillation = federation.config, federation.aggregation, federation.distillation
        num_rounds = config.num_rounds or 1
        # The messages of later rounds are those of the second one.
        run = dry_run(federation, min(num_rounds, 2))
        state = federation.exchange().tensors.values()
        exchanged = sum(tensor.nbytes for tensor in state)
        sums = sum(tensor.numel() * (8 if tensor.dtype.itemsize >= 4 else 4) for tensor in state)
        cost = _model_cost(model, sizes.task, args, lengths)
    clients = _client_costs(recipe, args, sizes, options, cost)
    rounds, cohort = run.ledger.rounds(), run.exchanges[0]
    exchanges = [dataclasses.replace(item, count=count) for item, count in next(iter(cohort.values())).items()]
    is_known = config.local_steps is not None or all(federation.num_examples[client_id] for client_id in cohort)
    unit = UnitEstimate(
        "round",
        rounds[0]["num_clients"],
        exchanges,
        rounds[0]["bytes_down"],
        rounds[0]["bytes_up"],
        sum(item.count for item in exchanges),
        run.client_flops(max(clients.values(), key=lambda cost: cost.flops)) if is_known else None,
        run.server_flops(cost) if distillation is None or federation.num_public else None,
    )
    # A client with its own model keeps the initial parameters, another client the received ones.
    kept = exchanged if aggregation.exchanges_parameters or distillation is not None else 0
    return Estimate(
        family="averaging" if distillation is None else "distillation",
        method=(distillation or aggregation).name,
        parties=[
            *(PartyEstimate.training(name, item, kept) for name, item in clients.items()),
            _server(federation, run, cost, exchanged, sums if aggregation.exchanges_parameters else 0),
        ],
        units=[unit],
        num_clients=sizes.num_clients,
        num_units=num_rounds,
        run_bytes_down=unit.bytes_down + (num_rounds - 1) * rounds[-1]["bytes_down"],
        run_bytes_up=unit.bytes_up + (num_rounds - 1) * rounds[-1]["bytes_up"],
        notes=_notes(federation, run, sizes, lengths, cost, is_known),
    )


def _describe(
    recipe: Recipe, args: TrainingArguments, sizes: DataSizes, model: Any, lengths: Lengths
) -> DryFederation:
    """Describe the federation of a recipe. The model is frozen as configured."""
    config = resolve_federation(build("federation", FederatedConfig, recipe.federation), args)
    aggregation = build_aggregation(config.aggregation, config.aggregation_kwargs)
    distillation = build_distillation(config.distillation, config.distillation_kwargs)
    collector = COLLECTOR_NAMES.build(config.collector, config.collector_kwargs, UpdateCollector)
    secure = build_secure_aggregation(config)
    combination = Combination(
        config=config,
        args=args,
        aggregation=aggregation,
        distillation=distillation,
        collector=collector,
        secure_aggregation=secure,
        reports_anomalies=config.report_anomalies,
        model=model,
    )
    check_combination(combination)
    aggregation = combination.averaging
    config = dataclasses.replace(config, keep_local=combination.keep_local)
    if sizes.num_examples is None:
        config = dataclasses.replace(config, clients_per_round=1.0)
    if config.freeze is not None:
        freeze_layers(model, config.freeze)
    num_public = 0
    if distillation is not None and distillation.requirements.public_dataset:
        if sizes.num_public is None:
            raise RecipeError(
                "public: the number of public examples is not known, because the data are not on this machine. Pass"
                " --num-public."
            )
        num_public = sizes.num_public
    num_positions, num_classes = _prediction_shape(sizes.task, model, lengths, num_public)
    check_weights(aggregation, secure)
    return DryFederation(
        config=config,
        args=args,
        model=model,
        aggregation=aggregation,
        distillation=distillation,
        num_examples=sizes.num_examples or {"client": None},
        postprocessors=algorithm_postprocessors(aggregation, config),
        num_tokens=lengths.source,
        num_public=num_public,
        num_positions=num_positions,
        num_classes=num_classes,
        secure_aggregation=None if secure is None else DryProtocol(secure),
    )


def _prediction_shape(task: Task, model: Any, lengths: Lengths, num_public: int) -> tuple[int, int]:
    """The largest number of predictions for all public examples, and the number of classes of a prediction."""
    if task.prediction_unit == "row":
        return num_public, model.config.num_labels
    positions = num_public * (lengths.source if lengths.target is None else lengths.target)
    if task.prediction_unit == "token":
        return positions, model.get_input_embeddings().weight.shape[0]
    return positions, model.config.num_labels


def _model_cost(model: Any, task: Task, args: TrainingArguments, lengths: Lengths) -> StepCost:
    """The cost of a training step of a whole model."""
    if checkpointing_settings(args) is not None:
        checkpoint_activations(model)
    batch_size = args.per_device_train_batch_size
    return step_cost(model, args, lambda: model_pass(model, _inputs(model, task, batch_size, lengths)))


def _inputs(model: Any, task: Task, batch_size: int, lengths: Lengths) -> dict[str, torch.Tensor]:
    ids = token_ids((batch_size, lengths.source))
    if isinstance(task, QuestionAnswering):
        positions = token_ids((batch_size,))
        return {"input_ids": ids, "start_positions": positions, "end_positions": positions}
    if model.config.is_encoder_decoder:
        return {"input_ids": ids, "labels": token_ids((batch_size, lengths.target or lengths.source))}
    if isinstance(task, (LanguageModeling, SequenceTagging)) or "CausalLM" in task.model_class.__name__:
        return {"input_ids": ids, "labels": token_ids((batch_size, lengths.source))}
    return {"input_ids": ids, "labels": token_ids((batch_size,))}


def _client_costs(
    recipe: Recipe, args: TrainingArguments, sizes: DataSizes, options: EstimateOptions, cost: StepCost
) -> dict[str, StepCost]:
    """The cost of a step of each kind of client."""
    if not recipe.client_models:
        return {"client": cost}
    costs = {}
    for index, item in enumerate(recipe.client_models):
        field = f"client_models[{index}]"
        model = meta_model(item.model, sizes.task, field)
        with recipe_errors(f"{field}.training"):
            own = dataclasses.replace(args, **item.training) if item.training else args
        lengths = find_lengths(sizes.task, model.config, options)
        costs[f"client, model {index + 1}"] = _model_cost(model, sizes.task, own, lengths)
    return costs


def _server(federation: DryFederation, run: DryRun, cost: StepCost, exchanged: int, sums: int) -> PartyEstimate:
    """The server: a model, the global state, sums of updates, and with distillation predictions and training."""
    distillation = federation.distillation
    if distillation is not None:
        predictions = 0
        if not distillation.returns_parameters:
            predictions = len(run.exchanges[0]) * federation.num_positions * federation.num_classes * 4
        # The server keeps the global state, and the initial state or the sums of the updates.
        return PartyEstimate.training("server", cost, predictions + exchanged + (sums or exchanged))
    without_training = dataclasses.replace(
        cost, gradients=0, optimizer_state=run.state_bytes, activations=0, peak=cost.weights
    )
    return PartyEstimate.training("server", without_training, exchanged + sums)


def _notes(
    federation: DryFederation, run: DryRun, sizes: DataSizes, lengths: Lengths, cost: StepCost, is_known: bool
) -> list[str]:
    args, aggregation, distillation = federation.args, federation.aggregation, federation.distillation
    target = "" if lengths.target is None else f" and {lengths.target} target tokens"
    notes = [
        f"Clients and examples: {sizes.source}.",
        f"A micro-batch has {args.per_device_train_batch_size} examples of {lengths.source} tokens{target}"
        f" ({lengths.origin}), without padding.",
    ]
    if sizes.num_examples is None:
        notes.append("The number of clients is not known: the numbers are those of one client. Pass --num-clients.")
    if not is_known:
        notes.append("The numbers of examples are not known, so the time has no computation. Pass --num-examples.")
    if distillation is not None and federation.num_positions != federation.num_public:
        notes.append(
            f"Predictions cover at most {federation.num_positions} positions: the maximum length of"
            f" {federation.num_public} public examples."
        )
    if distillation is not None and not federation.num_public:
        notes.append(f"The computation of the server with {distillation.name} is not estimated.")
    if aggregation.postprocessors():
        notes.append(f"{aggregation.name} can compress its messages, so the bytes are an upper bound.")
    if run.without_state:
        notes.append(f"The bytes assume that the messages of {aggregation.name} do not depend on its new state.")
    if any(item.name == Evaluate.kind for items in run.exchanges[0].values() for item in items):
        notes.append("The metrics of an evaluation on the clients are counted as five numbers.")
    if cost.optimizer_state is None:
        notes.append(f"The state of optim={args.optim!s} is not known on this machine.")
    return notes
