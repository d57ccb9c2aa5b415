"""Estimate of a split model: memory of a client and of the server, bytes and round trips of a step and of a token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import nn
from transformers import TrainingArguments

from hf_federated._compat import checkpointing_settings
from hf_federated.experiments.estimate.meta_model import meta_model
from hf_federated.experiments.estimate.results import Estimate, PartyEstimate, UnitEstimate, total_bytes
from hf_federated.experiments.estimate.sizes import DataSizes, EstimateOptions, find_lengths
from hf_federated.experiments.estimate.split_messages import (
    SplitMessages,
    attention_inputs,
    example_ids,
    hidden_size_of,
)
from hf_federated.experiments.estimate.step_cost import StepCost, checkpoint_activations, step_cost
from hf_federated.experiments.recipe.recipe import Recipe
from hf_federated.experiments.recipe.schema import build, recipe_errors
from hf_federated.split.model import SplitModel
from hf_federated.split_training import SplitConfig
from hf_federated.split_training.micro_batches import exchanges_per_step
from hf_federated.split_training.optimization import Party
from hf_federated.split_training.step_plan import StepPlan, count_steps


def estimate_split(recipe: Recipe, args: TrainingArguments, sizes: DataSizes, options: EstimateOptions) -> Estimate:
    """
    Estimate a recipe with the section `split`.

    Args:
        recipe ([`Recipe`]): The recipe.
        args (`TrainingArguments`): The training arguments.
        sizes ([`DataSizes`]): Numbers of clients and examples.
        options ([`EstimateOptions`]): Given numbers.

    Raises:
        RecipeError: If the model cannot be built or split.
    """
    split: SplitConfig = build("split", SplitConfig, recipe.split or {})
    model = meta_model(recipe.model, sizes.task, split=split)
    assert isinstance(model, SplitModel), "a split was requested"
    lengths = find_lengths(sizes.task, model.config, options)
    length = lengths.source
    batch_size, num_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    is_simultaneous = split.strategy != "serial"
    client_ids = ["client"] if sizes.num_examples is None else list(sizes.num_examples)
    num_active = len(client_ids) if is_simultaneous else 1

    def messages_of(client_id: str) -> SplitMessages:
        return SplitMessages(model, client_id, batch_size, length, num_batches, split)

    with recipe_errors("split"):
        messages = messages_of(client_ids[0])
        steps = {client_id: total_bytes(messages_of(client_id).step()) for client_id in client_ids}
        step_exchanges = messages.step()
        generation = dataclasses.replace(messages, batch_size=args.per_device_eval_batch_size)
        prompt, token = generation.prompt(), generation.token()
        client = Party("client", nn.ModuleDict({"head": model.client_head, "tail": model.client_tail}), None)
        average_bytes = messages.parameters(client.state())
        # The costs replace the parameters of the model by fake tensors, so the messages come first.
        if checkpointing_settings(args) is not None:
            for part in model.parts:
                checkpoint_activations(part.model)
        stacked = num_active if split.strategy == "client_batch" else 1
        in_flight = min(num_batches, split.micro_batches_in_flight)
        client_cost = _with_in_flight(lambda number: _client_cost(model, args, batch_size, length, number), in_flight)
        server_cost = _with_in_flight(
            lambda number: _server_cost(model, args, batch_size * stacked, length, number), in_flight
        )
    active = dict(list(steps.items())[:num_active])
    step = UnitEstimate(
        "optimizer step",
        num_active,
        step_exchanges,
        sum(down for down, _ in active.values()),
        sum(up for _, up in active.values()),
        exchanges_per_step(split, num_batches),
        num_batches * client_cost.flops,
        num_batches * server_cost.flops * num_active // stacked,
    )
    units = [
        step,
        UnitEstimate("prompt", 1, [prompt], prompt.bytes_down, prompt.bytes_up, 1),
        UnitEstimate("generated token", 1, [token], token.bytes_down, token.bytes_up, 1),
    ]
    server = PartyEstimate.training("server", server_cost)
    if split.strategy == "server_hierarchical":
        server = _replicated(server, server_cost, model.require_server_body(), num_active)
    num_steps, run = _run_bytes(split, args, sizes, steps, average_bytes)
    return Estimate(
        family="split",
        method=f"{split.strategy}, {split.head_blocks} first and {split.tail_blocks} last blocks on a client",
        parties=[PartyEstimate.training("client", client_cost), server],
        units=units,
        num_clients=sizes.num_clients,
        num_units=num_steps,
        run_bytes_down=run if run is None else run[0],
        run_bytes_up=run if run is None else run[1],
        average_bytes=average_bytes if len(client_ids) > 1 else None,
        notes=[
            f"Clients and examples: {sizes.source}.",
            f"A micro-batch has {batch_size} sequences of {length} tokens ({lengths.origin}), without padding. Hidden"
            f" states have {hidden_size_of(model)} values and are sent in {model.boundary.wire.dtype}.",
            f"A prompt and a generated token are those of {args.per_device_eval_batch_size} sequences together.",
            *(["The handshakes of encrypted links are not counted."] if split.encryption else []),
            "Bytes, round trips and memory are those of a networked run, with"
            f" {in_flight} micro-batch{'' if in_flight == 1 else 'es'} in flight. A run in one process has no control"
            " messages. The messages that join and leave the run are not counted.",
            *([] if client_cost.optimizer_state is not None else [f"The state of optim={args.optim!s} is not known."]),
        ],
    )


def _with_in_flight(cost_of: Callable[[int], StepCost], in_flight: int) -> StepCost:
    """The operations of one micro-batch, and the memory of several micro-batches in flight."""
    cost = cost_of(1)
    if in_flight == 1:
        return cost
    memory = cost_of(in_flight)
    return dataclasses.replace(memory, flops=cost.flops, forward_flops=cost.forward_flops)


def _client_cost(model: SplitModel, args: TrainingArguments, batch_size: int, length: int, in_flight: int) -> StepCost:
    """The cost of head and tail, without the blocks of the server."""
    ids = example_ids(model, batch_size, length)
    inputs = attention_inputs(model, batch_size, length)

    def run() -> Callable[[], None]:
        sent = [
            model.client_head(ids, None, inputs.position_ids, None, inputs.context_lengths).logits
            for _ in range(in_flight)
        ]
        received = [torch.empty_like(hidden).requires_grad_() for hidden in sent]

        def tail_loss(hidden: torch.Tensor) -> torch.Tensor:
            output = model.client_tail(hidden, None, inputs.position_ids, None, inputs.context_lengths, labels=ids)
            loss: torch.Tensor = output.loss
            return loss

        losses = [tail_loss(received[0])]

        def backward() -> None:
            for hidden in received:
                # The graph of a micro-batch after the cut layer is freed before the next one is computed.
                (losses.pop() if losses else tail_loss(hidden)).backward()
            for hidden in sent:
                if hidden.requires_grad:
                    hidden.backward(torch.empty_like(hidden))

        return backward

    return step_cost(nn.ModuleList([model.client_head, model.client_tail]), args, lambda: run)


def _server_cost(model: SplitModel, args: TrainingArguments, batch_size: int, length: int, in_flight: int) -> StepCost:
    """Measure a training step of the server: its blocks on `in_flight` batches, forwards and then backwards."""
    body, hidden_size = model.require_server_body(), hidden_size_of(model)
    inputs = attention_inputs(model, batch_size, length)

    def run() -> Callable[[], None]:
        outputs = []
        for _ in range(in_flight):
            received = torch.empty(batch_size, length, hidden_size, dtype=body.dtype).requires_grad_()
            outputs.append(body(received, None, inputs.position_ids, None, inputs.context_lengths).logits)

        def backward() -> None:
            while outputs:
                output = outputs.pop(0)
                output.backward(torch.empty_like(output))

        return backward

    return step_cost(body, args, lambda: run)


def _replicated(server: PartyEstimate, cost: StepCost, body: nn.Module, num_replicas: int) -> PartyEstimate:
    """The server with a replica of the body for each client. The replicas share their frozen parameters."""
    trained = sum(parameter.nbytes for parameter in body.parameters() if parameter.requires_grad)
    further = num_replicas - 1
    return dataclasses.replace(
        server,
        name=f"server, {num_replicas} bodies",
        weights=server.weights + further * trained,
        gradients=server.gradients * num_replicas,
        optimizer_state=None if server.optimizer_state is None else server.optimizer_state * num_replicas,
        activations=server.activations * num_replicas,
        total=server.total + further * (cost.total - cost.weights + trained),
    )


def _run_bytes(
    split: SplitConfig,
    args: TrainingArguments,
    sizes: DataSizes,
    steps: dict[str, tuple[int, int]],
    average_bytes: int,
) -> tuple[int | None, tuple[int, int] | None]:
    """The number of optimizer steps of the run, and its bytes down and up, if the numbers of examples are known."""
    known = sizes.num_examples or {}
    if not known or any(number is None for number in known.values()):
        return (args.max_steps if args.max_steps > 0 else None), None
    counts = {
        client_id: count_steps(
            number or 0, args.per_device_train_batch_size, args.gradient_accumulation_steps, args.dataloader_drop_last
        )
        for client_id, number in known.items()
    }
    plan = StepPlan(counts, split.strategy != "serial", split.steps_per_turn)
    num_steps = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs * len(plan))
    order = [list(plan[number % len(plan)]) for number in range(num_steps)]
    down, up = (sum(steps[client_id][side] for clients in order for client_id in clients) for side in (0, 1))
    turns = [clients[0] for clients in order] if split.hands_over else []
    num_handovers = sum(before != after for before, after in itertools.pairwise(turns))
    num_averages = 0 if split.average_every is None else num_steps // split.average_every
    sent = (num_handovers + num_averages * len(steps)) * average_bytes
    return num_steps, (down + sent, up + sent)
