"""A model card from a federated run.

`render` turns a [`RunRecord`] into the text of a card, and nothing but the record goes into it: what a run did not
log, its card does not claim. The layout is `model_card_template.md`, beside this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .facts import DataFacts
from .run_record import FederatedRun, RunRecord
from .tables import count, metric_name, size, table, thin


TEMPLATE = Path(__file__).parent / "model_card_template.md"

TAGS = ("federated-learning", "hf_federated", "generated_from_trainer")

# Sent beside the parameters with every update: see `hf_federated.messages.ClientUpdate`.
UPDATE_FIELDS = (
    "how many rows it has, how many tokens, steps and floating point operations it took, its mean loss, its last"
    " gradient norm and its learning rate"
)


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
    card = ModelCard.from_template(
        card_metadata(record),
        template_path=str(TEMPLATE),
        title=record.title,
        summary=_summary(record),
        results_heading=_results_heading(record),
        results=_results(record),
        client_results=_client_results(record),
        client_rows=_client_rows(record),
        rounds_heading=_rounds_heading(record),
        rounds=_rounds(record),
        federation=_federation(record),
        exchanged=_exchanged(record),
        data=_data(record),
        arguments=_arguments(record),
        usage=_usage(record),
        versions="\n".join(f"- {package} {version}" for package, version in record.versions.items()),
    )
    # Jinja leaves empty lines where a section is left out
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def card_metadata(record: RunRecord) -> ModelCardData:
    """
    The header of a card.

    Args:
        record ([`RunRecord`]): The run.
    """
    said, model = record.metadata, record.model
    adapter_tags = [model.adapter.lower()] if model.adapter else []
    names = [data.name for data in (record.train_data, record.eval_data) if data is not None and data.name]
    return ModelCardData(
        language=said["language"],
        license=said["license"],
        library_name=model.library_name,
        base_model=model.base_model,
        tags=[*TAGS, _algorithm(record).lower(), *adapter_tags, *said["tags"]],
        datasets=said["dataset_tags"] or list(dict.fromkeys(names)) or None,
        pipeline_tag=_task(record),
        metrics=[result.metric_type for result in _eval_results(record)] or None,
        model_name=record.title,
        eval_results=_eval_results(record) or None,
    )


def _task(record: RunRecord) -> str | None:
    return next(iter(record.metadata["tasks"]), record.model.task)


def _eval_results(record: RunRecord) -> list[EvalResult]:
    """Results for the header; none if the task is unknown, because the Hub takes none without a task."""
    task, data = _task(record), record.eval_data or DataFacts()
    if task is None:
        return []
    name = next(iter(record.metadata["dataset"]), data.name)
    return [
        EvalResult(
            task_type=task,
            # "unknown" is what the Hub's libraries write for data without a Hub id
            dataset_type=data.name or "unknown",
            dataset_name=name or "Unknown",
            dataset_config=data.config,
            dataset_split=data.split,
            dataset_revision=data.revision,
            dataset_args=next(iter(record.metadata["dataset_args"]), None),
            metric_type=key.removeprefix("eval_"),
            metric_name=metric_name(key),
            metric_value=value,
        )
        for key, value in record.results.get("metrics", {}).items()
        if isinstance(value, (int, float))
    ]


def _summary(record: RunRecord) -> str:
    model, federation = record.model, record.federation
    start = {
        "hub": f"[{model.base_model}](https://huggingface.co/{model.base_model})",
        "local": f"a `{model.class_name}` loaded from a local directory",
        "unnamed": f"a `{model.class_name}` whose starting weights have no name on record",
    }[model.start]
    commit = f" at commit `{model.base_revision}`" if model.base_revision else ""
    subject = f"This is a {model.adapter} adapter for" if model.adapter else "This model is"
    clients, rounds = _plural(federation["num_clients"], "client"), _plural(federation["num_rounds_run"], "round")
    return (
        f"{subject} {start}{commit}, trained federatedly with `hf_federated` ({_algorithm(record)}) over"
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


def _results(record: RunRecord) -> str:
    metrics = record.results.get("metrics", {})
    if not metrics:
        return ""
    return table(["Metric", "Value"], [[metric_name(key), value] for key, value in metrics.items()], numeric=True)


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
    rows = _shown_rounds(record)
    metrics = list(dict.fromkeys(key for row in rows for key in row if key.startswith("eval_")))
    columns = {
        "round": "Round",
        "loss": "Training loss",
        **{key: metric_name(key) for key in metrics},
        "federated/num_clients": "Clients",
        "federated/bytes_down": "Bytes down",
        "federated/bytes_up": "Bytes up",
    }
    columns = {key: name for key, name in columns.items() if any(key in row for row in rows)}
    if not rows:
        return ""
    return table(list(columns.values()), [[_cell(key, row.get(key)) for key in columns] for row in rows], numeric=True)


def _cell(key: str, value: Any) -> Any:
    return count(int(value)) if value is not None and key.startswith("federated/") else value


def _federation(record: RunRecord) -> str:
    federation = record.federation
    steps = [_call(step["name"], step["settings"]) for step in federation["postprocessors"]]
    share = federation["clients_per_round"]
    local = federation["local_steps"]
    distillation = federation.get("distillation")
    rounds = f"{federation['num_rounds_run']} of {federation['num_rounds']}"
    rows: list[list[Any]] = [
        ["Algorithm", _call(federation["aggregation"], federation["aggregation_kwargs"])],
        ["Distillation", distillation and _call(distillation, federation["distillation_kwargs"])],
        ["Steps between training and aggregate", ", ".join(steps) or None],
        ["Clients", count(federation["num_clients"])],
        ["Clients sampled in a round", _share(share)],
        ["Rounds run", rounds],
        ["Local work in a round", _plural(local, "step") if local else _plural(federation["local_epochs"], "epoch")],
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
    return table(["Setting", "Value"], [row for row in rows if row[1] is not None])


def _share(clients_per_round: int | float) -> str:
    if isinstance(clients_per_round, int):
        return count(clients_per_round)
    return "all" if clients_per_round == 1 else f"{100 * clients_per_round:.4g} % of them"


def _algorithm(record: RunRecord) -> str:
    """The method's name: of a distillation its own, since what it does with parameters belongs to it."""
    return record.federation.get("distillation") or record.federation["aggregation"]


def _exchanged(record: RunRecord) -> str:
    exchanged = record.exchanged
    if record.federation.get("distillation"):
        return _revealed(record)
    kind = {
        "adapter": "the adapter's parameters",
        "trainable": "the trainable parameters",
        "all": "all parameters and buffers",
    }[exchanged["kind"]]
    what = f"{_plural(exchanged['num_tensors'], 'tensor')} with {_plural(exchanged['num_values'], 'value')}"
    evaluations = ", and the metrics of its own evaluation" if record.federation["evaluate_clients"] else ""
    return (
        f"In a round, a sampled client received and sent back {kind}: {what} in {', '.join(exchanged['dtypes'])}. With"
        f" these it sent {UPDATE_FIELDS}{evaluations}. What the algorithm sends beside the parameters is in the bytes"
        " above. No message has a field for rows of the data set. Parameters can still tell something about the rows"
        " they were trained on."
    )


def _revealed(record: RunRecord) -> str:
    """What left a client that the server's model learned from: predictions, or parameters alone."""
    exchanged, federation = record.exchanged, record.federation
    values = _plural(exchanged["num_values"], "value")
    if record.public_data is None:
        what = "Parameters"
        sent = f"the parameters that it had trained, {values}."
    else:
        what = "Predictions"
        rows = _plural(record.public_data.num_rows or 0, "public row")
        sent = f"its model's predictions of {rows}, which server and clients all have."
        if exchanged["parameters_returned"]:
            sent += f" It also sent the parameters that it had trained, {values}."
        else:
            sent += " Parameters of the clients' models stayed with the clients."
            if exchanged["parameters_sent"]:
                sent += f" They received those of the server's model, {values}."
    beside = f" Beside these it sent {exchanged['beside']}." if exchanged.get("beside") else ""
    evaluations = ", and the metrics of its own evaluation" if federation["evaluate_clients"] else ""
    return (
        f"In a round, a sampled client sent {sent}{beside}"
        f" With these it sent {UPDATE_FIELDS}, and what the method asks for of its training{evaluations}."
        f" In {_plural(federation['num_rounds_run'], 'round')} all clients together sent {size(exchanged['bytes_up'])}"
        f" and received {size(exchanged['bytes_down'])}. No message has a field for rows of the data set. {what}"
        " can still tell something about the rows that a model was trained on."
    )


def _data(record: RunRecord) -> str:
    parts = [table(["Training data", ""], _data_rows(record.train_data))]
    if record.public_data is not None:
        parts.append(table(["Public data", ""], _data_rows(record.public_data)))
    if record.eval_data is not None:
        parts.append(table(["Evaluation data", ""], _data_rows(record.eval_data)))
    return "\n\n".join(parts)


def _data_rows(data: DataFacts) -> list[list[Any]]:
    partitioning = dict(data.partitioning or {})
    partitioner = partitioning.pop("partitioner", None)
    settings = {name: value for name, value in partitioning.items() if value is not None}
    rows: list[list[Any]] = [
        ["Data set", data.name or "not named by the data"],
        ["Revision", data.revision or "not recorded by the data"],
        ["Configuration", data.config],
        ["Split", data.split],
        ["Fingerprint (`datasets`)", data.fingerprint],
        ["Rows", None if data.num_rows is None else count(data.num_rows)],
        ["Clients", None if data.num_clients is None else count(data.num_clients)],
        ["Rows of a client", _least_median_most(data.rows_per_client)],
        ["Partition", _call(partitioner, settings) if partitioner else None],
    ]
    return [row for row in rows if row[1] is not None]


def _least_median_most(values: list[float] | None) -> str | None:
    if values is None:
        return None
    least, median, most = values
    return f"{least:g} to {most:g}, median {median:g}"


def _arguments(record: RunRecord) -> str:
    rows = [
        [f"`{name}`", value if isinstance(value, str) else repr(value)]
        for name, value in record.arguments.items()
        if value is not None
    ]
    return table(["Argument", "Value"], rows)


def _usage(record: RunRecord) -> str:
    model = record.model
    if not model.is_transformers_class:
        return ""
    lines = [f"from transformers import {model.class_name}", ""]
    if model.adapter is None:
        lines.append(f'model = {model.class_name}.from_pretrained("path/to/this/repository")')
    else:
        lines.insert(0, "from peft import PeftModel")
        lines.append(f'base = {model.class_name}.from_pretrained("{model.base_model or "path/to/the/base/model"}")')
        lines.append('model = PeftModel.from_pretrained(base, "path/to/this/repository")')
    return "\n".join(["```python", *lines, "```"])


def _call(name: str, settings: dict[str, Any]) -> str:
    return f"`{name}({', '.join(f'{key}={value!r}' for key, value in settings.items())})`"


def _plural(value: int, noun: str) -> str:
    return f"{count(value)} {noun}" + ("" if value == 1 else "s")
