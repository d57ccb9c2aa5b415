"""Model cards of federated runs.

`render` creates the text of a card from a [`RunRecord`] alone, so the card makes no claim that the run did not log.
The template is `model_card_template.md` in the folder of this module.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from ..aggregation import lora_inexactness
from ..aggregation.stacked_lora import TRUNCATION
from .exchange_text import exchange_text
from .run_record import FederatedRun, RunRecord
from .sections import fill_template, format_call, metrics_table, model_origin, results_heading, settings_table
from .tables import format_bytes, format_count, format_value, metric_name, plural, subsample, table


TEMPLATE = Path(__file__).parent / "model_card_template.md"


def render_model_card(trainer: FederatedRun, *args: Any, **kwargs: Any) -> ModelCard:
    """
    Create the card of a trainer's run.

    Args:
        trainer (`FederatedTrainer`):
            The run.
        args, kwargs:
            Arguments of `Trainer.create_model_card`. See [`~hf_federated.cards.card_record.CardArguments`].

    Returns:
        `huggingface_hub.ModelCard`: The card, with metadata that the Hub accepts. `card.save(path)` writes it.

    Example:

    ```python
    >>> from hf_federated.cards import render_model_card
    >>> card = render_model_card(trainer, license="apache-2.0")  # doctest: +SKIP
    >>> card.save("README.md")  # doctest: +SKIP

    ```
    """
    return ModelCard(render(RunRecord.from_trainer(trainer, *args, **kwargs)))


def render(record: RunRecord, picture: str | None = None) -> str:
    """
    Render the text of a card. The same record always gives the same text.

    Args:
        record ([`RunRecord`]):
            The run.
        picture (`str`, *optional*):
            File with the learning curve, in the folder of the card.
    """
    return fill_template(
        TEMPLATE,
        record,
        [_algorithm(record).lower()],
        picture=picture or "",
        summary=_summary(record),
        results_heading=results_heading(record.results, "global model", "round") if record.results else "",
        client_results=_client_results(record),
        client_rows=_client_rows(record),
        rounds_heading=_rounds_heading(record),
        rounds=_rounds(record),
        federation=_federation(record),
        lora=_lora(record),
        exchanged=exchange_text(record),
    )


def _summary(record: RunRecord) -> str:
    model, federation = record.model, record.federation
    clients, rounds = plural(federation["num_clients"], "client"), plural(federation["num_rounds_run"], "round")
    return (
        f"{model_origin(model)}, trained with federated learning (`hf_federated`, {_algorithm(record)}) on {clients}"
        f" in {rounds}. It has {format_count(model.num_parameters)} parameters."
    )


def _client_results(record: RunRecord) -> str:
    if not record.client_results:
        return ""
    rows = [
        [metric_name(key), *(statistics.get(name) for name in ("mean", "worst", "best", "spread"))]
        for key, statistics in record.client_results.items()
    ]
    return table(["Metric", "Mean", "Worst", "Best", "Spread"], rows, numeric=True)


def _client_rows(record: RunRecord) -> str:
    if not record.client_metrics:
        return ""
    keys = list(dict.fromkeys(key for metrics in record.client_metrics.values() for key in metrics))
    rows = [[client_id, *map(metrics.get, keys)] for client_id, metrics in record.client_metrics.items()]
    return table(["Client", *map(metric_name, keys)], rows, numeric=True)


def _shown_rounds(record: RunRecord) -> list[dict[str, Any]]:
    evaluated = [logs for logs in record.rounds if any(key.startswith("eval_") for key in logs)]
    return subsample(evaluated or record.rounds)


def _rounds_heading(record: RunRecord) -> str:
    num_shown = len(_shown_rounds(record))
    heading = (
        "Each row shows the results of the global model after that round. Byte counts are cumulative from the start of"
        " the run."
    )
    if num_shown < len(record.rounds):
        heading += f" The table shows {num_shown} of {len(record.rounds)} rounds."
    return heading


def _rounds(record: RunRecord) -> str:
    return metrics_table(
        _shown_rounds(record),
        {"round": "Round", "loss": "Training loss"},
        {
            "federated/num_clients": "Clients",
            "federated/bytes_down": "Bytes down",
            "federated/bytes_up": "Bytes up",
        },
    )


def _federation(record: RunRecord) -> str:
    federation = record.federation
    postprocessors = [format_call(step["name"], step["settings"]) for step in federation["postprocessors"]]
    local_steps = federation["local_steps"]
    local_training = plural(local_steps, "step") if local_steps else plural(federation["local_epochs"], "epoch")
    distillation = federation.get("distillation")
    rows: list[list[Any]] = [
        ["Algorithm", format_call(federation["aggregation"], federation["aggregation_kwargs"])],
        ["Distillation", distillation and format_call(distillation, federation["distillation_kwargs"])],
        ["Postprocessing of updates", ", ".join(postprocessors) or None],
        ["Clients", format_count(federation["num_clients"])],
        ["Clients per round", _clients_per_round(federation["clients_per_round"])],
        ["Completed rounds", f"{federation['num_rounds_run']} of {federation['num_rounds']}"],
        ["Local training per round", local_training],
        ["Examples per client and round", _example_limit(federation)],
        ["Client optimizer state", federation["client_optimizer_state"]],
        ["Learning rate schedule", federation["lr_schedule"]],
        ["Minimum updates per round", federation["min_clients"]],
        ["Failed or rejected updates", federation["num_failed"]],
        ["Frozen layers", federation["freeze"]],
        ["Federation seed", federation["federation_seed"]],
        ["Bytes from server to clients", format_bytes(record.exchanged["bytes_down"])],
        ["Bytes from clients to server", format_bytes(record.exchanged["bytes_up"])],
        ["Training time in seconds", None if federation["seconds"] is None else f"{federation['seconds']:.1f}"],
    ]
    return settings_table(rows)


def _lora(record: RunRecord) -> str:
    """Return how far the LoRA factors of the global model were from the mean of the clients' products."""
    subjects = {
        lora_inexactness.MEDIAN: "The product `B A` of the averaged LoRA factors",
        TRUNCATION: "The product `B A` of the truncated LoRA factors",
    }
    for name, subject in subjects.items():
        if medians := [logs[name] for logs in record.rounds if name in logs]:
            largest = max(logs[f"{name}_max"] for logs in record.rounds if name in logs)
            text = (
                f"{subject} differs from the weighted mean of the clients' products by "
                f"{format_value(statistics.median(medians))} of the change of a round (median over the modules and "
                f"rounds), and by at most {format_value(largest)} in any module and round."
            )
            in_base = " The base weights contain the difference."
            return text + in_base * (record.federation["aggregation"] == "FedExLoRA")
    return ""


def _clients_per_round(clients_per_round: int | float) -> str:
    if isinstance(clients_per_round, int):
        return format_count(clients_per_round)
    return "all" if clients_per_round == 1 else f"{100 * clients_per_round:.4g}% of the clients"


def _example_limit(federation: Mapping[str, Any]) -> str | None:
    """Return the limit on a client's examples in a round. Records of older versions have no limit."""
    max_rows, limits = federation.get("max_rows_per_round"), []
    if max_rows is not None:
        limits.append(f"at most {format_count(max_rows)}")
    if federation.get("balance") == "min":
        limits.append("at most the number of the smallest sampled client")
    return ", ".join(limits) or None


def _algorithm(record: RunRecord) -> str:
    """Return the name of the distillation if there is one. Its treatment of parameters includes the aggregation."""
    return record.federation.get("distillation") or record.federation["aggregation"]
