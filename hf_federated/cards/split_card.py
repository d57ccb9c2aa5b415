"""A model card from the training of a split model.

`render_split` turns a [`SplitRecord`] into the text of a card, and nothing but the record goes into it. The layout is
`split_card_template.md`, beside this file; what it says of the boundary is in `crossing.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .crossing import what_is_revealed, what_left, who_saw_what
from .networked import part_summary, part_usage, parts_joined, what_a_client_sent, who_saw_what_of_a_client
from .sections import fill, origin, over_steps, settings
from .split_record import SplitRecord, SplitRun
from .tables import count, plural, size, table, thin


TEMPLATE = Path(__file__).parent / "split_card_template.md"

STRATEGIES = {
    "serial": "`serial`: one client at a time trains with the server",
    "client_batch": "`client_batch`: all clients take a step together, as one batch of the server",
    "server_hierarchical": "`server_hierarchical`: all clients take a step at once, each before a server body of its"
    " own",
}


def render_split_card(trainer: SplitRun, *args: Any, leakage: str | None = None, **kwargs: Any) -> ModelCard:
    """
    The card of a split trainer's run.

    Args:
        trainer (`SplitFederatedTrainer`): The run.
        leakage (`str`, *optional*): Markdown that tells what an audit of this cut recovered.
        args, kwargs: Those of `Trainer.create_model_card`: see [`~hf_federated.cards.record.CardArguments`].

    Returns:
        `huggingface_hub.ModelCard`: With metadata that the Hub accepts; `.save(path)` writes it.

    Example:

    ```python
    >>> from hf_federated.cards import render_split_card
    >>> card = render_split_card(trainer, license="apache-2.0")  # doctest: +SKIP
    >>> card.save("README.md")  # doctest: +SKIP

    ```
    """
    return ModelCard(render_split(SplitRecord.from_trainer(trainer, *args, leakage=leakage, **kwargs)))


def render_split(record: SplitRecord) -> str:
    """
    The text of a card. The same record gives the same text.

    Args:
        record ([`SplitRecord`]): The run.
    """
    return fill(
        TEMPLATE,
        record,
        ["split-learning", record.split["strategy"].replace("_", "-")],
        **_of_a_part(record),
        summary=part_summary(record) if record.network is not None else _summary(record),
        results_heading=_results_heading(record),
        steps_heading=_steps_heading(record),
        steps=_steps(record),
        cut=_cut(record),
        training=_training(record),
        left=what_left(record) if record.network is None else what_a_client_sent(record),
        saw=who_saw_what(record) if record.network is None else who_saw_what_of_a_client(record),
        revealed=what_is_revealed(record),
    )


def _of_a_part(record: SplitRecord) -> dict[str, str]:
    """What only the card of a networked client has."""
    if record.network is None:
        return {}
    heading = "Training rows are this client's; what other clients train on is not known here."
    return {"usage": part_usage(record), "data_heading": heading}


def _summary(record: SplitRecord) -> str:
    split = record.split
    clients, steps = plural(split["num_clients"], "client"), plural(split["num_steps_run"], "optimizer step")
    return (
        f"{origin(record.model)}, trained in parts with `hf_federated`: {clients} kept the first and last blocks,"
        f" their text and their labels, and a server held the blocks between (split learning, strategy"
        f" `{split['strategy']}`, {steps}). It has {count(record.model.num_parameters)} parameters. The parts are"
        f" joined: it is an ordinary {'adapter' if record.model.adapter else 'model'} again."
    )


def _results_heading(record: SplitRecord) -> str:
    if not record.results:
        return ""
    step, best_by = record.results["step"], record.results["best_by"]
    if record.network is not None:
        return f"With this client's head and tail and the server's blocks, after optimizer step {step}."
    if best_by:
        return f"The whole model of optimizer step {step}, the best by `{best_by}`; its weights are the ones saved."
    return f"The whole model after optimizer step {step}."


def _shown(record: SplitRecord) -> list[dict[str, Any]]:
    evaluated = [row for row in _with_last_loss(record) if any(key.startswith("eval_") for key in row)]
    return thin(evaluated or record.steps)


def _with_last_loss(record: SplitRecord) -> list[dict[str, Any]]:
    """Rows of the log, each with the training loss that was logged last by then."""
    last: dict[str, Any] = {}
    rows = []
    for row in record.steps:
        last = {"loss": row["loss"]} if "loss" in row else last
        rows.append({**last, **row})
    return rows


def _steps_heading(record: SplitRecord) -> str:
    shown = len(_shown(record))
    whose, steps = "the whole model", "the steps since the one before it"
    if record.network is not None:
        whose = "this client's head and tail, as they were then, with the server's blocks"
        steps = "this client's steps since the one before it"
    heading = (
        f"Results of {whose} after an optimizer step. The training loss is the last that was logged by then, a"
        f" mean over {steps}. Bytes are those since the start of the run."
    )
    if shown < len(record.steps):
        heading += f" {shown} of {len(record.steps)} logged steps are shown."
    return heading


def _steps(record: SplitRecord) -> str:
    return over_steps(
        _shown(record),
        {"step": "Step", "epoch": "Epoch", "loss": "Training loss"},
        {"federated/bytes_down": "Bytes down", "federated/bytes_up": "Bytes up"},
    )


def _cut(record: SplitRecord) -> str:
    names = {"head": "Head, with the embedding", "body": "Body", "tail": "Tail, with the output layer"}
    rows = [
        [
            names[role],
            "the server" if role == "body" else "each client",
            _blocks(part["first_block"], part["num_blocks"]),
            *("not known here" if part[name] is None else count(part[name]) for name in ("num_bytes", "num_trained")),
        ]
        for role, part in record.parts.items()
    ]
    return table(["Part", "Held by", "Blocks", "Bytes of parameters", "Values trained"], rows)


def _blocks(first: int, number: int) -> str:
    if number == 0:
        return "none"
    return f"{first}" if number == 1 else f"{first} to {first + number - 1}"


def _training(record: SplitRecord) -> str:
    split, exchanged = record.split, record.exchanged
    turn, steps, network = split["steps_per_turn"], split["num_steps_run"], record.network
    who = "clients" if network is None else "this client"
    rows: list[list[Any]] = [
        ["Strategy", STRATEGIES[split["strategy"]]],
        [
            "A client's turn",
            (plural(turn, "step") if turn else "its epoch") if split["strategy"] == "serial" else None,
        ],
        ["Clients' parts", _joining(split) if network is None else parts_joined(record)],
        ["Clients", None if split["num_clients"] is None else count(split["num_clients"])],
        ["Steps that went on without this client", None if not network else network["num_late"] or None],
        ["Optimizer steps run", f"{count(steps)} of {count(split['max_steps'])}"],
        ["Epochs run", None if split["num_epochs_run"] is None else f"{split['num_epochs_run']:.4g}"],
        ["Hidden states travelled as", split["wire_dtype"]],
        ["Encryption", _encryption(record)],
        ["Seed of dropout and of the order of rows", split["split_seed"]],
        [f"Bytes that {who} sent", _bytes(exchanged["bytes_up"], steps)],
        [f"Bytes that {who} received", _bytes(exchanged["bytes_down"], steps)],
        ["Seconds of training", None if split["seconds"] is None else f"{split['seconds']:.1f}"],
    ]
    return settings(rows)


def _joining(split: dict[str, Any]) -> str | None:
    """How what clients trained became one model."""
    every = split["average_every"]
    if every is not None:
        times = split["num_steps_run"] // every
        bodies = ", as are the server's bodies" if split["strategy"] == "server_hierarchical" else ""
        return f"averaged every {plural(every, 'optimizer step')}{bodies}: {plural(times, 'time')} in this run"
    if split["num_clients"] == 1:
        return None
    if split["strategy"] == "serial":
        return "handed over to the next client; saved is what the last one trained"
    return "never averaged while they trained; saved is their mean"


def _encryption(record: SplitRecord) -> str | None:
    split, network = record.split, record.network
    if network is not None:
        sealed = {True: "AES-256-GCM between this client and the server", None: None}
        return sealed.get(network.get("is_sealed"), "messages were not sealed on top of what their transport does")
    if not split["encryption"]:
        return "none: messages were not sealed"
    keys = plural(split["rotate_keys_every"], "optimizer step")
    return f"AES-256-GCM between each client and the server, under keys that last {keys} of a client"


def _bytes(number: int, steps: int) -> str:
    return size(number) + (f", {count(round(number / steps))} an optimizer step on average" if steps else "")
