"""Sections that the cards of all kinds of runs have, each from the record alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .facts import DataFacts, ModelFacts
from .record import CardRecord
from .tables import count, metric_name, table


TAGS = ("federated-learning", "hf_federated", "generated_from_trainer")


def fill(template: Path, record: CardRecord, tags: Sequence[str], **sections: str) -> str:
    """
    The text of a card.

    Args:
        template (`Path`): The layout.
        record ([`CardRecord`]): The run.
        tags (`Sequence[str]`): Of the method, beside those of every run.
        sections (`str`): What the layout has beside the sections of this module; or in place of `usage`.
    """
    card = ModelCard.from_template(
        card_metadata(record, tags),
        template_path=str(template),
        title=record.title,
        results=_results(record),
        data=_data(record),
        arguments=_arguments(record),
        versions="\n".join(f"- {package} {version}" for package, version in record.versions.items()),
        **{"usage": _usage(record), **sections},
    )
    # Jinja leaves empty lines where a section is left out
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def card_metadata(record: CardRecord, tags: Sequence[str]) -> ModelCardData:
    """
    The header of a card.

    Args:
        record ([`CardRecord`]): The run.
        tags (`Sequence[str]`): Of the method.
    """
    said, model = record.metadata, record.model
    adapter_tags = [model.adapter.lower()] if model.adapter else []
    names = [data.name for data in (record.train_data, record.eval_data) if data is not None and data.name]
    return ModelCardData(
        language=said["language"],
        license=said["license"],
        library_name=model.library_name,
        base_model=model.base_model,
        tags=[*TAGS, *tags, *adapter_tags, *said["tags"]],
        datasets=said["dataset_tags"] or list(dict.fromkeys(names)) or None,
        pipeline_tag=_task(record),
        metrics=[result.metric_type for result in _eval_results(record)] or None,
        model_name=record.title,
        eval_results=_eval_results(record) or None,
    )


def _task(record: CardRecord) -> str | None:
    return next(iter(record.metadata["tasks"]), record.model.task)


def _eval_results(record: CardRecord) -> list[EvalResult]:
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


def origin(model: ModelFacts) -> str:
    """What a model is and where its training started, as the beginning of a sentence."""
    start = {
        "hub": f"[{model.base_model}](https://huggingface.co/{model.base_model})",
        "local": f"a `{model.class_name}` loaded from a local directory",
        "unnamed": f"a `{model.class_name}` whose starting weights have no name on record",
    }[model.start]
    commit = f" at commit `{model.base_revision}`" if model.base_revision else ""
    subject = f"This is a {model.adapter} adapter for" if model.adapter else "This model is"
    return f"{subject} {start}{commit}"


def _results(record: CardRecord) -> str:
    metrics = record.results.get("metrics", {})
    if not metrics:
        return ""
    return table(["Metric", "Value"], [[metric_name(key), value] for key, value in metrics.items()], numeric=True)


def over_steps(rows: Sequence[dict[str, Any]], before: dict[str, str], behind: dict[str, str]) -> str:
    """
    A table of what was logged over a run.

    Args:
        rows (`Sequence[dict[str, Any]]`): One a step of the trainer.
        before (`dict[str, str]`): Key to heading of the columns before the metrics.
        behind (`dict[str, str]`): The same of those behind them. Columns without a value are left out.
    """
    metrics = list(dict.fromkeys(key for row in rows for key in row if key.startswith("eval_")))
    columns = {**before, **{key: metric_name(key) for key in metrics}, **behind}
    columns = {key: name for key, name in columns.items() if any(key in row for row in rows)}
    if not rows:
        return ""
    return table(list(columns.values()), [[_cell(key, row.get(key)) for key in columns] for row in rows], numeric=True)


def _cell(key: str, value: Any) -> Any:
    return count(int(value)) if value is not None and key.startswith("federated/") else value


def settings(rows: Sequence[Sequence[Any]]) -> str:
    """A table of settings; those without a value are left out."""
    return table(["Setting", "Value"], [row for row in rows if row[1] is not None])


def _data(record: CardRecord) -> str:
    named = {"Training": record.train_data, "Public": getattr(record, "public_data", None)}
    named["Evaluation"] = record.eval_data
    tables = [table([f"{name} data", ""], _data_rows(data)) for name, data in named.items() if data is not None]
    return "\n\n".join(tables)


def _data_rows(data: DataFacts) -> list[list[Any]]:
    partitioning = dict(data.partitioning or {})
    partitioner = partitioning.pop("partitioner", None)
    arguments = {name: value for name, value in partitioning.items() if value is not None}
    rows: list[list[Any]] = [
        ["Data set", data.name or "not named by the data"],
        ["Revision", data.revision or "not recorded by the data"],
        ["Configuration", data.config],
        ["Split", data.split],
        ["Fingerprint (`datasets`)", data.fingerprint],
        ["Rows", None if data.num_rows is None else count(data.num_rows)],
        ["Clients", None if data.num_clients is None else count(data.num_clients)],
        ["Rows of a client", _least_median_most(data.rows_per_client)],
        ["Partition", call(partitioner, arguments) if partitioner else None],
    ]
    return [row for row in rows if row[1] is not None]


def _least_median_most(values: list[float] | None) -> str | None:
    if values is None:
        return None
    least, median, most = values
    return f"{least:g} to {most:g}, median {median:g}"


def _arguments(record: CardRecord) -> str:
    rows = [
        [f"`{name}`", value if isinstance(value, str) else repr(value)]
        for name, value in record.arguments.items()
        if value is not None
    ]
    return table(["Argument", "Value"], rows)


def _usage(record: CardRecord) -> str:
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


def call(name: str, arguments: dict[str, Any]) -> str:
    """A call as code."""
    return f"`{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})`"
