"""Estimate of averaging and distillation: memory of a client and of the server, bytes and round trips of a round."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from hf_federated._compat import checkpointing_settings
from hf_federated.adapters import Exchange as ExchangedTensors
from hf_federated.adapters.freezing import freeze_layers
from hf_federated.aggregation import Aggregation, FedOpt, LocalOnly, build_aggregation
from hf_federated.clients import ClientSampler, RowLimit, batches_per_round
from hf_federated.clients.sampling import limit_examples
from hf_federated.config import FederatedConfig
from hf_federated.distillation import Distillation, FedID, build_distillation
from hf_federated.experiments.estimate.meta_model import meta_model
from hf_federated.experiments.estimate.results import Estimate, PartyEstimate, UnitEstimate
from hf_federated.experiments.estimate.round_messages import RoundMessages, total_bytes
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
from hf_federated.experiments.recipe.sections import ModelSection
from hf_federated.tasks import LanguageModeling, QuestionAnswering, SequenceTagging, Task
from hf_federated.trainer.checks.arguments import resolve_federation, resolve_keep_local


@dataclass(frozen=True)
class _Round:
    """Settings of a round, and the number of micro-batches of each client, if the numbers of examples are known."""

    config: FederatedConfig
    aggregation: Aggregation
    distillation: Distillation | None
    client_ids: list[str]
    cohort: list[str]
    num_examples: dict[str, int]
    num_batches: dict[str, int] | None
    num_public: int


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
    plan = _plan(recipe, args, sizes)
    model = meta_model(recipe.model, sizes.task)
    with recipe_errors("federation"):
        if plan.config.freeze is not None:
            freeze_layers(model, plan.config.freeze)
        state = ExchangedTensors(model, plan.config.exchange, plan.config.keep_local).tensors
        lengths = find_lengths(sizes.task, model.config, options)
        num_positions, num_classes = _prediction_shape(sizes.task, model, lengths, plan.num_public)
        messages = {
            client_id: RoundMessages(
                plan.config,
                plan.aggregation,
                state,
                num_examples=plan.num_examples.get(client_id, 0),
                num_steps=_num_steps(plan, client_id, args),
                distillation=plan.distillation,
                num_public=plan.num_public,
                num_positions=num_positions,
                num_classes=num_classes,
                batch_size=args.train_batch_size,
                num_rounds=plan.config.num_rounds or 1,
            ).of_client(client_id)
            for client_id in plan.cohort
        }
        exchanged = sum(tensor.nbytes for tensor in state.values())
        sums = sum(tensor.numel() * (8 if tensor.dtype.itemsize >= 4 else 4) for tensor in state.values())
        cost = _model_cost(model, sizes.task, args, args.per_device_train_batch_size, lengths)
    clients = _client_costs(recipe, args, sizes, options, cost)
    bytes_of = [total_bytes(items) for items in messages.values()]
    exchanges = next(iter(messages.values()))
    unit = UnitEstimate(
        "round",
        len(plan.cohort),
        exchanges,
        sum(down for down, _ in bytes_of),
        sum(up for _, up in bytes_of),
        sum(item.count for item in exchanges),
        _client_flops(plan, clients, args),
        _server_flops(plan, cost, args),
    )
    sends = plan.aggregation.exchanges_parameters or (
        plan.distillation is not None and plan.distillation.sends_parameters
    )
    # A client with its own model keeps the initial parameters, another client the received ones.
    kept = exchanged if sends or plan.distillation is not None else 0
    num_rounds = plan.config.num_rounds or 1
    return Estimate(
        family="averaging" if plan.distillation is None else "distillation",
        method=(plan.distillation or plan.aggregation).name,
        parties=[
            *(PartyEstimate.training(name, item, kept) for name, item in clients.items()),
            _server(
                plan, cost, exchanged, sums if plan.aggregation.exchanges_parameters else 0, num_positions, num_classes
            ),
        ],
        units=[unit],
        num_clients=sizes.num_clients,
        num_units=num_rounds,
        run_bytes_down=num_rounds * unit.bytes_down,
        run_bytes_up=num_rounds * unit.bytes_up,
        notes=_notes(plan, sizes, args, lengths, cost, num_positions),
    )


def _plan(recipe: Recipe, args: TrainingArguments, sizes: DataSizes) -> _Round:
    config: FederatedConfig = build("federation", FederatedConfig, recipe.federation)
    with recipe_errors("federation"):
        config = resolve_federation(config, args)
        aggregation = build_aggregation(config.aggregation, config.aggregation_kwargs)
        distillation = build_distillation(config.distillation, config.distillation_kwargs)
        if distillation is not None and not distillation.returns_parameters:
            aggregation = LocalOnly()
        config = resolve_keep_local(config, aggregation, distillation)
        client_ids = ["client"] if sizes.num_examples is None else list(sizes.num_examples)
        share = config.clients_per_round if sizes.num_examples is not None else 1.0
        cohort = list(ClientSampler(client_ids, share, config.federation_seed or 0)(0))
        aggregation.setup(config.num_rounds or 1, len(client_ids))
    known = {client_id: number for client_id, number in (sizes.num_examples or {}).items() if number is not None}
    max_rows = RowLimit(dict.fromkeys(cohort) | known, config.balance, config.max_rows_per_round)(cohort)
    num_examples = {client_id: limit_examples(number, max_rows) for client_id, number in known.items()}
    num_batches = None
    if config.local_steps is not None or all(client_id in known for client_id in cohort):
        batches = batches_per_round(
            {client_id: known.get(client_id) for client_id in cohort},
            config.local_epochs,
            config.local_steps,
            args,
            max_rows,
        )
        num_batches = {client_id: int(number) for client_id, number in batches.items()}
    num_public = 0
    if distillation is not None and distillation.requirements.public_dataset:
        if sizes.num_public is None:
            raise RecipeError(
                "public: the number of public examples is not known, because the data are not on this machine. Pass"
                " --num-public."
            )
        num_public = sizes.num_public
    return _Round(config, aggregation, distillation, client_ids, cohort, num_examples, num_batches, num_public)


def _num_steps(plan: _Round, client_id: str, args: TrainingArguments) -> int:
    if plan.num_batches is None:
        return 0
    epochs = 1 if plan.config.local_steps is not None else plan.config.local_epochs
    return epochs * math.ceil(plan.num_batches[client_id] / epochs / args.gradient_accumulation_steps)


def _prediction_shape(task: Task, model: Any, lengths: Lengths, num_public: int) -> tuple[int, int]:
    """The largest number of predictions for all public examples, and the number of classes of a prediction."""
    if task.prediction_unit == "row":
        return num_public, model.config.num_labels
    positions = num_public * (lengths.source if lengths.target is None else lengths.target)
    if task.prediction_unit == "token":
        return positions, model.get_input_embeddings().weight.shape[0]
    return positions, model.config.num_labels


def _model_cost(model: Any, task: Task, args: TrainingArguments, batch_size: int, lengths: Lengths) -> StepCost:
    """The cost of a training step of a whole model."""
    if checkpointing_settings(args) is not None:
        checkpoint_activations(model)

    def build_pass() -> Any:
        return model_pass(model, _inputs(model, task, batch_size, lengths))

    return step_cost(model, args, build_pass)


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
        section = ModelSection(item.name_or_path, item.revision, kwargs=item.kwargs)
        field = f"client_models[{index}]"
        model = meta_model(section, sizes.task, field)
        with recipe_errors(f"{field}.training"):
            own = dataclasses.replace(args, **item.training) if item.training else args
        lengths = find_lengths(sizes.task, model.config, options)
        costs[f"client, model {index + 1}"] = _model_cost(
            model, sizes.task, own, own.per_device_train_batch_size, lengths
        )
    return costs


def _client_flops(plan: _Round, costs: Mapping[str, StepCost], args: TrainingArguments) -> int | None:
    """Operations of the client with the most work in a round: local training, predictions and distillation."""
    if plan.num_batches is None:
        return None
    largest = max(costs.values(), key=lambda cost: cost.flops)
    flops = max(plan.num_batches.values()) * largest.flops
    if plan.distillation is not None and plan.num_public:
        batches = math.ceil(plan.num_public / args.per_device_train_batch_size)
        if isinstance(plan.distillation, FedID):
            flops += plan.distillation.public_epochs * batches * largest.flops
        else:
            flops += batches * largest.forward_flops
            if "client_epochs" not in plan.distillation.ignores:
                flops += plan.distillation.client_epochs * batches * largest.flops
    return flops


def _server_flops(plan: _Round, cost: StepCost, args: TrainingArguments) -> int | None:
    """Operations of the server's distillation. Averaging needs none that count. `None` if they are not known."""
    if plan.distillation is None:
        return 0
    if not plan.num_public:
        return None
    batches = math.ceil(plan.num_public / args.per_device_train_batch_size)
    if isinstance(plan.distillation, FedID):
        # The feedback needs two gradients and a pass in forward mode in addition to the step of the server.
        has_gradient = plan.distillation.feedback in ("chain_rule", "per_example")
        step = 3 * cost.flops + 2 * cost.forward_flops if has_gradient else cost.flops
        return plan.distillation.public_epochs * batches * step
    predicts = "client_epochs" not in plan.distillation.ignores and plan.distillation.broadcasts == "logits"
    return plan.distillation.server_epochs * batches * cost.flops + predicts * batches * cost.forward_flops


def _server(
    plan: _Round, cost: StepCost, exchanged: int, sums: int, num_positions: int, num_classes: int
) -> PartyEstimate:
    """The server: a model, the global state, sums of updates, and with distillation predictions and training."""
    if plan.distillation is not None:
        predictions = 0
        if not plan.distillation.returns_parameters:
            predictions = len(plan.cohort) * num_positions * num_classes * 4
        # The server keeps the global state, and the initial state or the sums of the updates.
        return PartyEstimate.training("server", cost, predictions + exchanged + (sums or exchanged))
    optimizer = 0
    if isinstance(plan.aggregation, FedOpt):
        optimizer = 3 * sums // 2  # a copy of the state and two moments, in the width of the state
    return PartyEstimate(
        "server",
        cost.num_parameters,
        cost.num_trainable,
        cost.weights,
        0,
        optimizer,
        0,
        exchanged + sums,
        cost.weights + optimizer + exchanged + sums,
    )


def _notes(
    plan: _Round, sizes: DataSizes, args: TrainingArguments, lengths: Lengths, cost: StepCost, num_positions: int
) -> list[str]:
    target = "" if lengths.target is None else f" and {lengths.target} target tokens"
    notes = [
        f"Clients and examples: {sizes.source}.",
        f"A micro-batch has {args.per_device_train_batch_size} examples of {lengths.source} tokens{target}"
        f" ({lengths.origin}), without padding.",
    ]
    if sizes.num_examples is None:
        notes.append("The number of clients is not known: the numbers are those of one client. Pass --num-clients.")
    if plan.num_batches is None:
        notes.append("The numbers of examples are not known, so the time has no computation. Pass --num-examples.")
    if plan.distillation is not None and num_positions != plan.num_public:
        notes.append(
            f"Predictions cover at most {num_positions} positions: the maximum length of {plan.num_public} public"
            " examples."
        )
    if plan.distillation is not None and not plan.num_public:
        notes.append(f"The computation of the server with {plan.distillation.name} is not estimated.")
    if plan.aggregation.postprocessors():
        notes.append(f"{plan.aggregation.name} can compress its messages, so the bytes are an upper bound.")
    if cost.optimizer_state is None:
        notes.append(f"The state of optim={args.optim!s} is not known on this machine.")
    return notes
