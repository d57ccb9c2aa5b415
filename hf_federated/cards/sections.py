"""Sections that the cards of all runs have in common. Each section depends on the record alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .card_record import CardRecord
from .comparison_text import comparison_section
from .facts import DataFacts, ModelFacts
from .tables import format_count, metric_name, table


# The number of training tokens of the run, which trainers of TRL log with an evaluation.
NUM_TOKENS = "eval_num_tokens"

# Where the files of the model are.
_REPOSITORY = "path/to/this/repository"
# The arguments of a pipeline for a text, by task.
_PIPELINES = {
    "fill-mask": 'f"This is an {pipe.tokenizer.mask_token}."',
    "text-classification": '"This is an example."',
    "text-generation": '"This is", max_new_tokens=20',
    "token-classification": '"This is an example."',
}

TAGS = ("federated-learning", "hf_federated", "generated_from_trainer")


def fill_template(template: Path, record: CardRecord, tags: Sequence[str], **sections: str) -> str:
    """
    Render the text of a card.

    Args:
        template (`Path`):
            The template.
        record ([`CardRecord`]):
            The run.
        tags (`Sequence[str]`):
            Tags of the method, in addition to the tags of all runs.
        sections (`str`):
            Further sections of the template. `usage` replaces the section of the same name.
    """
    card = ModelCard.from_template(
        card_metadata(record, tags),
        template_path=str(template),
        title=record.title,
        results=_results(record),
        data=_data(record),
        arguments=_arguments(record),
        versions="\n".join(f"- {package} {version}" for package, version in record.versions.items()),
        labels=_labels(record),
        comparison=comparison_section(record.comparison),
        **{"usage": _usage(record), **sections},
    )
    # Jinja leaves empty lines in place of omitted sections
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def card_metadata(record: CardRecord, tags: Sequence[str]) -> ModelCardData:
    """
    Return the metadata of a card.

    Args:
        record ([`CardRecord`]):
            The run.
        tags (`Sequence[str]`):
            Tags of the method.
    """
    metadata, model = record.metadata, record.model
    all_tags = [*TAGS, *tags, *_adapter_tags(model), *model.tags, *metadata["tags"]]
    names = [data.name for data in (record.train_data, record.eval_data) if data is not None and data.name]
    return ModelCardData(
        language=metadata["language"],
        license=metadata["license"],
        library_name=model.library_name,
        base_model=model.base_model,
        tags=list(dict.fromkeys(all_tags)),
        datasets=metadata["dataset_tags"] or list(dict.fromkeys(names)) or None,
        pipeline_tag=_task(record),
        metrics=[result.metric_type for result in _eval_results(record)] or None,
        model_name=record.title,
        eval_results=_eval_results(record) or None,
        peft_version=model.peft_version,
    )


def _adapter_tags(model: ModelFacts) -> list[str]:
    """Return the tags with which PEFT marks an adapter on the Hub, and its type."""
    if model.adapter is None:
        return []
    of_base = [f"base_model:adapter:{model.base_model}"] if model.base_model else []
    return [model.adapter.lower(), "transformers", *of_base]


def _task(record: CardRecord) -> str | None:
    return next(iter(record.metadata["tasks"]), record.model.task)


def _eval_results(record: CardRecord) -> list[EvalResult]:
    """Return the results for the header, or none if the task is unknown, because the Hub requires the task."""
    task, data = _task(record), record.eval_data or DataFacts()
    if task is None:
        return []
    name = next(iter(record.metadata["dataset"]), data.name)
    return [
        EvalResult(
            task_type=task,
            # the Hub's libraries write "unknown" for datasets without a Hub id
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
        if isinstance(value, (int, float)) and key != NUM_TOKENS
    ]


def model_origin(model: ModelFacts) -> str:
    """Return the beginning of a sentence that names the model and its initial weights."""
    start = {
        "hub": f"[{model.base_model}](https://huggingface.co/{model.base_model})",
        "local": f"a `{model.class_name}` loaded from a local directory",
        "unnamed": f"a `{model.class_name}` whose initial weights have no recorded name",
    }[model.start]
    commit = f" at commit `{model.base_revision}`" if model.base_revision else ""
    subject = f"This is a {model.adapter} adapter for" if model.adapter else "This model is"
    return f"{subject} {start}{commit}"


def results_heading(results: dict[str, Any], model: str, unit: str) -> str:
    """
    Return the sentence that introduces the results.

    Args:
        results (`dict[str, Any]`):
            `results` of a [`CardRecord`] with metrics.
        model (`str`):
            The evaluated model.
        unit (`str`):
            `"round"` or `"optimizer step"`. Its last word is the key of the step after which the model was evaluated.
    """
    step_name = unit.split()[-1]
    heading = f"Results of the {model} after {unit} {results[step_name]}."
    if results["best_by"]:
        heading += f" This {step_name} has the best `{results['best_by']}`, and its weights were saved."
    return heading


def _results(record: CardRecord) -> str:
    metrics = record.results.get("metrics", {})
    if not metrics:
        return ""
    rows = [[metric_name(key), _cell(key, value)] for key, value in metrics.items()]
    return table(["Metric", "Value"], rows, numeric=True)


def metrics_table(steps: Sequence[dict[str, Any]], first_columns: dict[str, str], last_columns: dict[str, str]) -> str:
    """
    Format a table of the values that were logged during a run.

    Args:
        steps (`Sequence[dict[str, Any]]`):
            The logged values of each step.
        first_columns (`dict[str, str]`):
            Key and heading of the columns before the metrics.
        last_columns (`dict[str, str]`):
            Key and heading of the columns after the metrics. All columns without a value are omitted.
    """
    metrics = list(dict.fromkeys(key for logs in steps for key in logs if key.startswith("eval_")))
    columns = {**first_columns, **{key: metric_name(key) for key in metrics}, **last_columns}
    columns = {key: name for key, name in columns.items() if any(key in logs for logs in steps)}
    if not steps:
        return ""
    cells = [[_cell(key, logs.get(key)) for key in columns] for logs in steps]
    return table(list(columns.values()), cells, numeric=True)


def _cell(key: str, value: Any) -> Any:
    is_count = key.startswith("federated/") or key == NUM_TOKENS
    return format_count(int(value)) if value is not None and is_count else value


def settings_table(rows: Sequence[Sequence[Any]]) -> str:
    """Format a table of settings. Settings without a value are omitted."""
    return table(["Setting", "Value"], [row for row in rows if row[1] is not None])


def _data(record: CardRecord) -> str:
    datasets = {"Training": record.train_data, "Public": getattr(record, "public_data", None)}
    datasets["Evaluation"] = record.eval_data
    tables = [table([f"{name} data", ""], _data_rows(data)) for name, data in datasets.items() if data is not None]
    return "\n\n".join(tables)


def _data_rows(data: DataFacts) -> list[list[Any]]:
    partitioning = dict(data.partitioning or {})
    partitioner = partitioning.pop("partitioner", None)
    arguments = {name: value for name, value in partitioning.items() if value is not None}
    rows: list[list[Any]] = [
        ["Dataset", data.name or "name not recorded"],
        ["Revision", data.revision or "not recorded"],
        ["Configuration", data.config],
        ["Split", data.split],
        ["Fingerprint (`datasets`)", data.fingerprint],
        ["Examples", None if data.num_rows is None else format_count(data.num_rows)],
        ["Examples that the trainer dropped", None if data.num_dropped is None else format_count(data.num_dropped)],
        ["Clients", None if data.num_clients is None else format_count(data.num_clients)],
        ["Examples per client", _range_and_median(data.rows_per_client)],
        ["Partitioning", format_call(partitioner, arguments) if partitioner else None],
    ]
    return [row for row in rows if row[1] is not None]


def _range_and_median(values: list[float] | None) -> str | None:
    if values is None:
        return None
    minimum, median, maximum = values
    return f"{minimum:g} to {maximum:g}, median {median:g}"


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
    call = _PIPELINES.get(model.pipeline or "")
    if model.adapter is None:
        lines = [f"from transformers import {model.class_name}", ""]
        lines.append(f'model = {model.class_name}.from_pretrained("{_REPOSITORY}")')
        arguments = f'"{model.pipeline}", model="{_REPOSITORY}"'
    else:
        base = f'"{model.base_model or "path/to/the/base/model"}"'
        # A base model without a classifier gets one of this size, whose weights the adapter contains.
        base += f", num_labels={model.num_labels}" if model.num_labels else ""
        lines = ["from peft import PeftModel", f"from transformers import {model.class_name}", ""]
        lines.append(f"base = {model.class_name}.from_pretrained({base})")
        lines.append(f'model = PeftModel.from_pretrained(base, "{_REPOSITORY}")')
        arguments = f'"{model.pipeline}", model=model, tokenizer="{_REPOSITORY}"'
    if call is not None:
        lines = [line.replace(f"import {model.class_name}", f"import {model.class_name}, pipeline") for line in lines]
        lines += ["", f"pipe = pipeline({arguments})", f"print(pipe({call}))"]
    return "\n".join(["```python", *lines, "```"])


def _labels(record: CardRecord) -> str:
    model = record.model
    if not model.labels:
        return ""
    hidden = (model.num_labels or 0) - len(model.labels)
    more = f"\n\nand {hidden} more labels" if hidden > 0 else ""
    return table(["Id", "Label"], [[number, name] for number, name in enumerate(model.labels)]) + more


def format_call(name: str, arguments: dict[str, Any]) -> str:
    """Format a call as inline code."""
    return f"`{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})`"
