"""A model card from a federated run.

`render` turns a [`RunRecord`] into the text of a card, and nothing but the record goes into it: what a run did not
log, its card does not claim. The layout is `model_card_template.md`, beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from .revealed import what_left
from .run_record import FederatedRun, RunRecord
from .sections import call, fill, origin, over_steps, settings
from .tables import count, metric_name, plural, size, table, thin


TEMPLATE = Path(__file__).parent / "model_card_template.md"


def render_model_card(
    trainer: FederatedRun,
    language: str | list[str] | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    dataset_args: str | list[str] | None = None,
) -> ModelCard:
    """
    The card of a trainer's run. The arguments are those of `Trainer.create_model_card`.

    Args:
        trainer (`FederatedTrainer`):
            The run.
        language (`str` or `list[str]`, *optional*):
            Language of the model.
        license (`str`, *optional*):
            License of the model.
        tags (`str` or `list[str]`, *optional*):
            Tags beside those of every federated run.
        model_name (`str`, *optional*):
            Title of the card. Defaults to the name of the output directory.
        finetuned_from (`str`, *optional*):
            Hub id of the base model. Defaults to what the model knows; a local directory is not named.
        tasks (`str` or `list[str]`, *optional*):
            Pipeline tags. Defaults to that of the model's class.
        dataset_tags (`str` or `list[str]`, *optional*):
            Hub ids of the data. Defaults to what the data set knows.
        dataset (`str` or `list[str]`, *optional*):
            Names of the data as people say them.
        dataset_args (`str` or `list[str]`, *optional*):
            Arguments with which the data was loaded.

    Returns:
        `huggingface_hub.ModelCard`: With metadata that the Hub accepts; `.save(path)` writes it.

    Example:

    ```python
    >>> from hf_federated.cards import render_model_card
    >>> card = render_model_card(trainer, license="apache-2.0")  # doctest: +SKIP
    >>> card.save("README.md")  # doctest: +SKIP

    ```
    """
    record = RunRecord.from_trainer(
        trainer,
        language=language,
        license=license,
        tags=tags,
        model_name=model_name,
        finetuned_from=finetuned_from,
        tasks=tasks,
        dataset_tags=dataset_tags,
        dataset=dataset,
        dataset_args=dataset_args,
    )
    return ModelCard(render(record))


def render(record: RunRecord) -> str:
    """
    The text of a card. The same record gives the same text.

    Args:
        record ([`RunRecord`]): The run.
    """
    return fill(
        TEMPLATE,
        record,
        [_algorithm(record).lower()],
        summary=_summary(record),
        results_heading=_results_heading(record),
        client_results=_client_results(record),
        client_rows=_client_rows(record),
        rounds_heading=_rounds_heading(record),
        rounds=_rounds(record),
        federation=_federation(record),
        exchanged=what_left(record),
    )


def _summary(record: RunRecord) -> str:
    model, federation = record.model, record.federation
    clients, rounds = plural(federation["num_clients"], "client"), plural(federation["num_rounds_run"], "round")
    return (
        f"{origin(model)}, trained federatedly with `hf_federated` ({_algorithm(record)}) over"
        f" {clients} in {rounds}."
        f" It has {count(model.num_parameters)} parameters."
    )


def _results_heading(record: RunRecord) -> str:
    if not record.results:
        return ""
    step, best_by = record.results["round"], record.results["best_by"]
    if best_by:
        return f"The global model of round {step}, the best by `{best_by}`; its weights are the ones saved."
    return f"The global model after round {step}."


def _client_results(record: RunRecord) -> str:
    if not record.client_results:
        return ""
    rows = [
        [metric_name(key), *(found.get(statistic) for statistic in ("mean", "worst", "best", "spread"))]
        for key, found in record.client_results.items()
    ]
    return table(["Metric", "Mean", "Worst", "Best", "Spread"], rows, numeric=True)


def _client_rows(record: RunRecord) -> str:
    if not record.client_metrics:
        return ""
    keys = list(dict.fromkeys(key for metrics in record.client_metrics.values() for key in metrics))
    rows = [[client_id, *map(metrics.get, keys)] for client_id, metrics in record.client_metrics.items()]
    return table(["Client", *map(metric_name, keys)], rows, numeric=True)


def _shown_rounds(record: RunRecord) -> list[dict[str, Any]]:
    evaluated = [row for row in record.rounds if any(key.startswith("eval_") for key in row)]
    return thin(evaluated or record.rounds)


def _rounds_heading(record: RunRecord) -> str:
    shown = len(_shown_rounds(record))
    heading = "Results of the global model after a round. Bytes are those since the start of the run."
    if shown < len(record.rounds):
        heading += f" {shown} of {len(record.rounds)} rounds are shown."
    return heading


def _rounds(record: RunRecord) -> str:
    return over_steps(
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
    steps = [call(step["name"], step["settings"]) for step in federation["postprocessors"]]
    share = federation["clients_per_round"]
    local = federation["local_steps"]
    distillation = federation.get("distillation")
    rounds = f"{federation['num_rounds_run']} of {federation['num_rounds']}"
    rows: list[list[Any]] = [
        ["Algorithm", call(federation["aggregation"], federation["aggregation_kwargs"])],
        ["Distillation", distillation and call(distillation, federation["distillation_kwargs"])],
        ["Steps between training and aggregate", ", ".join(steps) or None],
        ["Clients", count(federation["num_clients"])],
        ["Clients sampled in a round", _share(share)],
        ["Rounds run", rounds],
        ["Local work in a round", plural(local, "step") if local else plural(federation["local_epochs"], "epoch")],
        ["Rows of a client in a round", _row_limit(federation)],
        ["Client optimizer state", federation["client_optimizer_state"]],
        ["Learning-rate schedule", federation["lr_schedule"]],
        ["Fewest updates in a round", federation["min_clients"]],
        ["Failed or rejected updates", federation["num_failed"]],
        ["Frozen", federation["freeze"]],
        ["Federation seed", federation["federation_seed"]],
        ["Bytes from server to clients", size(record.exchanged["bytes_down"])],
        ["Bytes from clients to server", size(record.exchanged["bytes_up"])],
        ["Seconds of training", None if federation["seconds"] is None else f"{federation['seconds']:.1f}"],
    ]
    return settings(rows)


def _share(clients_per_round: int | float) -> str:
    if isinstance(clients_per_round, int):
        return count(clients_per_round)
    return "all" if clients_per_round == 1 else f"{100 * clients_per_round:.4g} % of them"


def _row_limit(federation: Mapping[str, Any]) -> str | None:
    """What limits them; a record of before there was a limit has none."""
    max_rows, limits = federation.get("max_rows_per_round"), []
    if max_rows is not None:
        limits.append(f"at most {count(max_rows)}")
    if federation.get("balance") == "min":
        limits.append("at most those of the smallest client sampled")
    return ", ".join(limits) or None


def _algorithm(record: RunRecord) -> str:
    """The method's name: of a distillation its own, since what it does with parameters belongs to it."""
    return record.federation.get("distillation") or record.federation["aggregation"]
