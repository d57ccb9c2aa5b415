"""The dataset card (README.md) of a stored federated dataset.

The card contains the configurations that `datasets` needs to load the dataset, and a description for readers. The
section between two markers is generated and is replaced at each push. Text outside the markers is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import yaml
from huggingface_hub import DatasetCard, DatasetCardData
from transformers.utils import logging

from .partition_file import PARTITION_FILE, PartitionFile


# `load_dataset` downloads and parses the whole card. For 5000 clients this takes 4.5 MB and several seconds.
MAX_CLIENT_CONFIGS = 1000
# Maximum number of clients in the table.
MAX_TABLE_CLIENTS = 20

logger = logging.get_logger(__name__)

_BEGIN, _END = "<!-- hf_federated: begin -->", "<!-- hf_federated: end -->"
_TAGS = ("federated-learning", "hf_federated")


def render_dataset_card(
    partition_file: PartitionFile,
    repo_id: str | None = None,
    pictures: Sequence[tuple[str, str]] = (),
    existing: str | None = None,
    previous_config_names: Collection[str] = (),
) -> str:
    """
    Render the text of the dataset card.

    Args:
        partition_file ([`PartitionFile`]):
            The description of the stored dataset.
        repo_id (`str`, *optional*):
            The repository on the Hub. The examples in the card contain a placeholder if it is `None`.
        pictures (`Sequence[tuple[str, str]]`, *optional*):
            Caption and path of each picture.
        existing (`str`, *optional*):
            The existing card. Its metadata except the configurations, and its text outside the markers are kept.
        previous_config_names (`Collection[str]`, *optional*):
            The client configurations that the previous push wrote. Other configurations of the existing card are kept.

    Raises:
        `ValueError`: If the metadata of the existing card cannot be parsed.
    """
    body = f"{_BEGIN}\n\n{_section(partition_file, repo_id, pictures)}\n{_END}"
    if existing is None:
        title = repo_id.split("/")[-1] if repo_id else "Federated dataset"
        metadata: dict[str, Any] = {}
        text = f"# {title}\n\n{body}\n"
    else:
        metadata, text = _parse(existing, repo_id)
        before, begin, rest = text.partition(_BEGIN)
        _, end, after = rest.partition(_END)
        # Without both markers in the right order, all existing text was written by users and is kept.
        text = f"{before}{body}{after}" if begin and end else f"{text.rstrip()}\n\n{body}\n"
    # `datasets` reads features and sizes from the files, so outdated values are removed.
    metadata.pop("dataset_info", None)
    tags = metadata.get("tags") or []
    metadata["tags"] = [*dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *_TAGS])]
    kept = [
        config
        for config in metadata.pop("configs", None) or []
        if config.get("config_name") not in {"default", *previous_config_names}
    ]
    configs = _configs(partition_file, kept)
    header = DatasetCardData(**metadata).to_yaml() if metadata else ""
    return f"---\n{header}\n{configs}---\n\n{text}"


def config_names(card: str, repo_id: str | None) -> list[str]:
    """Return the names of the configurations in a card. Raises `ValueError` if its metadata cannot be parsed."""
    return [str(config.get("config_name")) for config in _parse(card, repo_id)[0].get("configs") or []]


def _parse(card: str, repo_id: str | None) -> tuple[dict[str, Any], str]:
    """Return the metadata and the text of a card."""
    try:
        parsed = DatasetCard(card, ignore_metadata_errors=True)
        metadata = parsed.data.to_dict()
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(
            f"The metadata at the top of README.md{f' of {repo_id}' if repo_id else ''} cannot be parsed:"
            f" {' '.join(str(error).split())}. Correct the metadata on the Hub, and push again."
        ) from error
    return metadata, parsed.text.lstrip("\n")


def _configs(partition_file: PartitionFile, kept: Sequence[dict[str, Any]] = ()) -> str:
    """Return the YAML of the configurations for all clients and for each client, followed by the kept ones."""
    if partition_file.index:
        return yaml.dump({"configs": list(kept)}, sort_keys=False, allow_unicode=True) if kept else ""
    configs: list[dict[str, Any]] = [_config("default", "*", partition_file.splits, default=True)]
    if len(partition_file.clients) > MAX_CLIENT_CONFIGS:
        logger.warning(
            f"The dataset has {len(partition_file.clients)} clients. The card lists configurations for at most"
            f" {MAX_CLIENT_CONFIGS} clients, so it has none for single clients. Use load_dataset(path) to load all"
            " rows, and FederatedDataset to load single clients."
        )
    else:
        # Only the splits of the client are listed, because a pattern without a matching file is an error.
        configs += [_config(client.name, client.name, list(client.splits)) for client in partition_file.clients]
    return yaml.dump(
        {"configs": [*configs, *kept]}, Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True, width=1000
    )


def _config(name: str, folder: str, splits: Sequence[str], default: bool = False) -> dict[str, Any]:
    files = [{"split": _Quoted(split), "path": _Quoted(f"data/{folder}/{split}-*.parquet")} for split in splits]
    return {"config_name": _Quoted(name), "data_files": files, **({"default": True} if default else {})}


class _Quoted(str):
    """Text that YAML must not parse as a number, a date or a boolean. Client names may be `007`, `no` or `1e5`."""


class _QuotingDumper(yaml.SafeDumper):
    pass


_QuotingDumper.add_representer(
    _Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"')
)


def _section(partition_file: PartitionFile, repo_id: str | None, pictures: Sequence[tuple[str, str]]) -> str:
    paragraphs = [
        "## Clients",
        _summary(partition_file),
        _sizes(partition_file),
        _table(partition_file),
        *(f"![{caption}]({path})" for caption, path in pictures),
        "## Use",
        _usage(partition_file, repo_id),
        "## Partitioning",
        _provenance(partition_file),
    ]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def _summary(partition_file: PartitionFile) -> str:
    columns = ", ".join(_cell(name) for name in partition_file.features)
    where = (
        f"The rows of each client are in separate files, which are listed in `{PARTITION_FILE}`."
        if not partition_file.index
        else "The rows are not stored here. `index/` holds the row numbers of each client in the source dataset."
    )
    return f"A federated dataset with {len(partition_file.clients)} clients and the columns {columns}. {where}"


def _sizes(partition_file: PartitionFile) -> str:
    lines = ["| split | clients | rows | smallest | median | largest |", "|---|---|---|---|---|---|"]
    for split in partition_file.splits:
        sizes = np.array([client.splits[split].num_rows for client in partition_file.clients_of(split)])
        lines.append(
            f"| {split} | {len(sizes)} | {sizes.sum()} | {sizes.min()} | {np.median(sizes):g} | {sizes.max()} |"
        )
    return "\n".join(lines)


def _table(partition_file: PartitionFile) -> str:
    splits, names = partition_file.splits, partition_file.label_names or []
    first = splits[0]
    ranked = sorted(partition_file.clients, key=lambda client: -sum(rows.num_rows for rows in client.splits.values()))[
        :MAX_TABLE_CLIENTS
    ]
    chosen = {client.client_id for client in ranked}
    shown_names = names if len(names) <= 12 else []
    header = ["client", *(f"rows, {split}" for split in splits), *(f"{name} ({first})" for name in shown_names)]
    lines = [f"| {' | '.join(map(_cell, header))} |", "|---" * len(header) + "|"]
    for client in (client for client in partition_file.clients if client.client_id in chosen):
        cells = [client.client_id]
        cells += [str(client.splits[split].num_rows) if split in client.splits else "–" for split in splits]
        counts = client.splits[first].label_counts if first in client.splits else None
        cells += [str(count) for count in counts] if counts and shown_names else ["–"] * len(shown_names)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    if len(partition_file.clients) > len(ranked):
        lines.append(
            f"\nThe table lists the {len(ranked)} clients with the most rows. `{PARTITION_FILE}` lists all clients."
        )
    return "\n".join(lines)


def _cell(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    text = text if len(text) <= 40 else f"{text[:39]}…"
    return re.sub(r"([|<>`*_\[\]\\#])", r"\\\1", text)


def _usage(partition_file: PartitionFile, repo_id: str | None) -> str:
    repo = repo_id or "PATH_OR_REPOSITORY"
    client = partition_file.clients[0]
    # A client id can contain any text, including the markers of the section and the end of a code block.
    name = json.dumps(client.client_id, ensure_ascii=False).replace("<", "\\u003c").replace("`", "\\u0060")
    lines = [
        "```python",
        "from hf_federated import FederatedDataset",
        "",
        f'clients = FederatedDataset.from_hub("{repo}")  # a mapping from client id to Dataset',
        f'client = FederatedDataset.from_hub("{repo}", clients=[{name}])  # downloads only this client',
    ]
    if not partition_file.index:
        lines += ["", "from datasets import load_dataset", "", f'dataset = load_dataset("{repo}")']
        if len(partition_file.clients) <= MAX_CLIENT_CONFIGS:
            lines.append(f'client = load_dataset("{repo}", "{client.name}")')
    return "\n".join([*lines, "```"])


def _provenance(partition_file: PartitionFile) -> str:
    lines = []
    for split in partition_file.splits:
        settings = partition_file.partitioning.get(split)
        method = "one dataset for each client" if settings is None else _settings(settings)
        source = partition_file.sources.get(split)
        origin = "" if source is None else f", source `{source.repo_id}` at commit `{source.revision}`"
        lines.append(f"- {split}: {method}{origin}")
    return "\n".join(lines)


def _settings(settings: dict[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in settings.items() if name != "partitioner")
    return f"`{settings['partitioner']}({arguments})`"
