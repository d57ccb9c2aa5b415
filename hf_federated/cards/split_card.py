"""A model card from the training of a split model.

`render_split` turns a [`SplitRecord`] into the text of a card, and nothing but the record goes into it. The layout is
`split_card_template.md`, beside this file; what it says of the boundary is in `crossing.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .crossing import SplitView, what_is_revealed
from .networked import NetworkedClient
from .one_process import OneProcess
from .sections import fill, over_steps, settings
from .split_record import SplitRecord, SplitRun
from .tables import count, plural, size, table, thin


TEMPLATE = Path(__file__).parent / "split_card_template.md"

STRATEGIES = {
    "serial": "`serial`: one client at a time trains with the server",
    "client_batch": "`client_batch`: all clients take a step together, as one batch of the server",
    "server_hierarchical": "`server_hierarchical`: all clients take a step at once, each before a server body of its"
    " own",
}


def render_split_card(trainer: SplitRun, *args: Any, **kwargs: Any) -> ModelCard:
    """
    The card of a split trainer's run.

    Args:
        trainer (`SplitFederatedTrainer`): The run.
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
    return ModelCard(render_split(SplitRecord.from_trainer(trainer, *args, **kwargs)))


def render_split(record: SplitRecord) -> str:
    """
    The text of a card. The same record gives the same text.

    Args:
        record ([`SplitRecord`]): The run.
    """
    view = OneProcess(record) if record.network is None else NetworkedClient(record)
    results = record.results
    return fill(
        TEMPLATE,
        record,
        ["split-learning", record.split["strategy"].replace("_", "-")],
        **view.texts,
        summary=view.summary,
        results_heading=view.results(results["step"], results["best_by"]) if results else "",
        steps_heading=_steps_heading(view),
        steps=_steps(record),
        cut=_cut(record),
        training=_training(view),
        left=view.left,
        saw=view.saw,
        revealed=what_is_revealed(record),
    )


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


def _steps_heading(view: SplitView) -> str:
    shown, logged = len(_shown(view.record)), len(view.record.steps)
    whose, steps = view.log_of
    heading = (
        f"Results of {whose} after an optimizer step. The training loss is the last that was logged by then, a"
        f" mean over {steps}. Bytes are those since the start of the run."
    )
    return heading if shown == logged else f"{heading} {shown} of {logged} logged steps are shown."


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


def _training(view: SplitView) -> str:
    split, exchanged = view.record.split, view.record.exchanged
    turn, steps = split["steps_per_turn"], split["num_steps_run"]
    rows: list[list[Any]] = [
        ["Strategy", STRATEGIES[split["strategy"]]],
        [
            "A client's turn",
            (plural(turn, "step") if turn else "its epoch") if split["strategy"] == "serial" else None,
        ],
        ["Clients' parts", view.joined],
        ["Clients", None if split["num_clients"] is None else count(split["num_clients"])],
        ["Steps that went on without this client", view.num_late],
        ["Optimizer steps run", f"{count(steps)} of {count(split['max_steps'])}"],
        ["Epochs run", None if split["num_epochs_run"] is None else f"{split['num_epochs_run']:.4g}"],
        ["Hidden states travelled as", split["wire_dtype"]],
        ["Encryption", view.encryption],
        ["Seed of dropout and of the order of rows", split["split_seed"]],
        [f"Bytes that {view.who} sent", _bytes(exchanged["bytes_up"], steps)],
        [f"Bytes that {view.who} received", _bytes(exchanged["bytes_down"], steps)],
        ["Seconds of training", None if split["seconds"] is None else f"{split['seconds']:.1f}"],
    ]
    return settings(rows)


def _bytes(number: int, steps: int) -> str:
    return size(number) + (f", {count(round(number / steps))} an optimizer step on average" if steps else "")
