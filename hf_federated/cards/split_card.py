"""Model cards of split models.

`render_split` creates the text of a card from a [`SplitRecord`] alone. The template is `split_card_template.md` in the
folder of this module. The description of the exchanged messages is in `split_text.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .networked_split_text import NetworkedSplitText
from .sections import fill_template, metrics_table, settings_table
from .simulated_split_text import SimulatedSplitText
from .split_record import SplitRecord, SplitRun
from .split_text import leakage_claim
from .tables import format_bytes, format_count, plural, subsample, table


TEMPLATE = Path(__file__).parent / "split_card_template.md"

STRATEGIES = {
    "serial": "`serial`: the clients train with the server one at a time",
    "client_batch": "`client_batch`: all clients take each step together, as one batch of the server",
    "server_hierarchical": "`server_hierarchical`: all clients take each step at once, each with a separate body on"
    " the server",
}


def render_split_card(trainer: SplitRun, *args: Any, **kwargs: Any) -> ModelCard:
    """
    Create the card of a split trainer's run.

    Args:
        trainer (`SplitFederatedTrainer`):
            The run.
        args, kwargs:
            Arguments of `Trainer.create_model_card`. See [`~hf_federated.cards.card_record.CardArguments`].

    Returns:
        `huggingface_hub.ModelCard`: The card, with metadata that the Hub accepts. `card.save(path)` writes it.

    Example:

    ```python
    >>> from hf_federated.cards import render_split_card
    >>> card = render_split_card(trainer, license="apache-2.0")  # doctest: +SKIP
    >>> card.save("README.md")  # doctest: +SKIP

    ```
    """
    return ModelCard(render_split(SplitRecord.from_trainer(trainer, *args, **kwargs)))


def render_split(record: SplitRecord, picture: str | None = None) -> str:
    """
    Render the text of a card. The same record always gives the same text.

    Args:
        record ([`SplitRecord`]):
            The run.
        picture (`str`, *optional*):
            File with the learning curve, in the folder of the card.
    """
    text: SimulatedSplitText | NetworkedSplitText
    text = SimulatedSplitText(record) if record.network is None else NetworkedSplitText(record)
    return fill_template(
        TEMPLATE,
        record,
        ["split-learning", record.split["strategy"].replace("_", "-")],
        **text.template_fields(),
        picture=picture or "",
        summary=text.summary(),
        results_heading=text.results_heading() if record.results else "",
        steps_heading=_steps_heading(text),
        steps=_steps(record),
        cut=_cut(record),
        training=_training(text),
        messages=text.messages(),
        receivers=text.receivers(),
        leakage=leakage_claim(record),
    )


def _shown_steps(record: SplitRecord) -> list[dict[str, Any]]:
    evaluated = [logs for logs in _with_last_loss(record) if any(key.startswith("eval_") for key in logs)]
    return subsample(evaluated or record.steps)


def _with_last_loss(record: SplitRecord) -> list[dict[str, Any]]:
    """Return the logged steps, each with the most recent training loss."""
    last_loss: dict[str, Any] = {}
    steps = []
    for logs in record.steps:
        last_loss = {"loss": logs["loss"]} if "loss" in logs else last_loss
        steps.append({**last_loss, **logs})
    return steps


def _steps_heading(text: SimulatedSplitText | NetworkedSplitText) -> str:
    num_shown, num_logged = len(_shown_steps(text.record)), len(text.record.steps)
    model, steps = text.log_sources
    heading = (
        f"Each row shows the results of {model} after that optimizer step. The training loss is the most recent logged"
        f" value, a mean over {steps}. Byte counts are cumulative from the start of the run."
    )
    if num_shown == num_logged:
        return heading
    return f"{heading} The table shows {num_shown} of {num_logged} logged steps."


def _steps(record: SplitRecord) -> str:
    return metrics_table(
        _shown_steps(record),
        {"step": "Step", "epoch": "Epoch", "loss": "Training loss"},
        {"federated/bytes_down": "Bytes down", "federated/bytes_up": "Bytes up"},
    )


def _cut(record: SplitRecord) -> str:
    names = {"head": "Head, with the embedding", "body": "Body", "tail": "Tail, with the output layer"}
    rows = [
        [
            names[role],
            "the server" if role == "body" else "each client",
            _block_range(part["first_block"], part["num_blocks"]),
            *(
                "not known to this client" if part[name] is None else format_count(part[name])
                for name in ("num_bytes", "num_trained")
            ),
        ]
        for role, part in record.parts.items()
    ]
    return table(["Part", "Held by", "Blocks", "Parameter bytes", "Trained values"], rows)


def _block_range(first_block: int, num_blocks: int) -> str:
    if num_blocks == 0:
        return "none"
    return f"{first_block}" if num_blocks == 1 else f"{first_block} to {first_block + num_blocks - 1}"


def _training(text: SimulatedSplitText | NetworkedSplitText) -> str:
    split, exchanged = text.record.split, text.record.exchanged
    steps_per_turn, num_steps = split["steps_per_turn"], split["num_steps_run"]
    turn = plural(steps_per_turn, "step") if steps_per_turn else "one epoch of the client"
    rows: list[list[Any]] = [
        ["Strategy", STRATEGIES[split["strategy"]]],
        ["Turn of a client", turn if split["strategy"] == "serial" else None],
        ["Parts of the clients", text.combination()],
        ["Clients", None if split["num_clients"] is None else format_count(split["num_clients"])],
        ["Steps without this client", text.num_late()],
        ["Completed optimizer steps", f"{format_count(num_steps)} of {format_count(split['max_steps'])}"],
        ["Completed epochs", None if split["num_epochs_run"] is None else f"{split['num_epochs_run']:.4g}"],
        ["Dtype of sent hidden states", split["wire_dtype"]],
        ["Encryption", text.encryption()],
        ["Seed of dropout and example order", split["split_seed"]],
        [f"Bytes sent by {text.party}", _bytes_with_mean(exchanged["bytes_up"], num_steps)],
        [f"Bytes received by {text.party}", _bytes_with_mean(exchanged["bytes_down"], num_steps)],
        ["Training time in seconds", None if split["seconds"] is None else f"{split['seconds']:.1f}"],
    ]
    return settings_table(rows)


def _bytes_with_mean(num_bytes: int, num_steps: int) -> str:
    mean = f", {format_count(round(num_bytes / num_steps))} per optimizer step on average" if num_steps else ""
    return format_bytes(num_bytes) + mean
