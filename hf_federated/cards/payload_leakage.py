"""Card section and report on what the payloads of clients reveal: parameters, adapters and predictions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..audits import AttackResult, PayloadAudit
from .tables import plural, table


# `add_payload_audit` finds the section of an existing card by this heading.
HEADING = "## What a client's payload reveals"

SOURCES = (
    "- Tokens: the changed rows of the word embeddings (Melis et al. 2019). Without word embeddings in the payload,"
    " the attacker guesses frequent tokens; the result is the chance level.",
    "- Sequences: DAGER (Petrov et al. 2024), the share of tokens recovered at their position. Published: ROUGE-1 and"
    " ROUGE-2 above 0.99 for batches of up to 128 examples. The attack is exact for one SGD step without dropout, and"
    " an approximation for the training of the recipe.",
    "- Membership: loss threshold (Yeom et al. 2018) and LiRA (Carlini et al. 2022). TPR is the true positive rate at"
    " a false positive rate of 1 %; 1 % is chance. For a method that exchanges predictions, the attacked model is the"
    " model that the server distilled from one client's predictions (distillation-based LiRA, Shi et al. 2025).",
    "- Canaries: exposure in bits (Carlini et al. 2019) of random texts that the client had, and of random texts that"
    " it did not have. Without memorization, the mean is about 1.44.",
)
NOT_TRIED = (
    "Not tried: gradient inversion by optimization (LAMP and its successors), attacks that combine several rounds, a"
    " server that changes the model it sends, inference of labels and of other attributes, reconstruction of examples"
    " from predictions, and attacks that are adapted to noise. The results are no bound: another attacker may find"
    " more."
)
# Attack and metric of each column of the table.
_COLUMNS = {
    "Tokens: precision": ("token_set", "precision"),
    "Tokens: recall": ("token_set", "recall"),
    "Chance": ("token_set", "chance"),
    "Sequences: one SGD step": ("dager_step", "tokens"),
    "Sequences: training": ("dager_run", "tokens"),
    "Loss: AUC": ("loss_threshold", "auc"),
    "LiRA: AUC": ("lira", "auc"),
    "LiRA: TPR": ("lira", "tpr"),
    "Canary, had": ("canary", "exposure"),
    "Canary, had not": ("canary", "absent"),
}
# Further columns of a table with sums: what the server learns of all clients together.
_SUM_COLUMNS = {
    "All clients, tokens: precision": ("token_set", "union_precision"),
    "All clients, tokens: recall": ("token_set", "union_recall"),
    "All clients, sequences: one SGD step": ("dager_step", "union_tokens"),
}


def payload_table(audit: PayloadAudit) -> str:
    """
    Format the results of an audit as a table with one row for each setting. Shares are percentages.

    Args:
        audit ([`~hf_federated.audits.PayloadAudit`]): The results.

    Example:

    ```python
    >>> from hf_federated.audits import AttackResult, PayloadAudit
    >>> from hf_federated.cards.payload_leakage import payload_table

    >>> audit = PayloadAudit({"full": [AttackResult("token_set", {"precision": 1.0, "recall": 0.5, "chance": 0.2})]})
    >>> payload_table(audit).splitlines()[-1]
    '| full | 100.0 | 50.0 | 20.0 | – | – | – | – | – | – | – |'
    ```
    """
    found = {
        (result.attack, metric)
        for results in audit.results.values()
        for result in results
        for metric in result.metrics
    }
    columns = {**_COLUMNS, **(_SUM_COLUMNS if found & set(_SUM_COLUMNS.values()) else {})}
    rows = [
        [name, *(_cell(audit.find(name, attack), metric) for attack, metric in columns.values())]
        for name in audit.results
    ]
    return table(["Setting", *columns], rows, numeric=True)


def _cell(result: AttackResult | None, metric: str) -> str:
    if result is None or metric not in result.metrics:
        return "–"
    value = result.metrics[metric]
    if metric in ("exposure", "absent"):
        return f"{value:.2f}"
    digits, scale = (3, 1) if metric == "auc" else (1, 100)
    interval = result.intervals.get(metric)
    suffix = "" if interval is None else f" [{', '.join(f'{scale * bound:.{digits}f}' for bound in interval)}]"
    return f"{scale * value:.{digits}f}{suffix}"


def payload_section(audit: PayloadAudit) -> str:
    """
    Create the section of a model card on what the payloads of clients reveal.

    Args:
        audit ([`~hf_federated.audits.PayloadAudit`]): The results.
    """
    settings = audit.settings
    setting = ""
    if settings:
        setting = (
            f" {plural(settings['num_models'], 'simulated client')} each trained for"
            f" {plural(settings['num_rounds'], 'round')} on a random half of"
            f" {plural(settings['num_examples'], 'example')} and of"
            f" {plural(settings['num_canaries'], 'random text')}, the canaries. Intervals are 95 % bootstrap intervals"
            f" over these clients. DAGER attacked a client with"
            f" {plural(settings['num_inversion_examples'], 'example')}."
        )
    notes = [
        f"- {name}: the payload is the weighted mean of the updates of {plural(number, 'client')}. The scores are"
        " those of one of these clients, except in the columns of all clients."
        for name, number in settings.get("num_summed", {}).items()
    ]
    notes += [
        f"- {name}, {result.attack}: {result.note}"
        for name, results in audit.results.items()
        for result in results
        if result.note
    ]
    on = f" on `{audit.model_name}`" if audit.model_name else ""
    data = f" with examples of {audit.data_name}" if audit.data_name else ""
    parts = [
        f"{HEADING}\n\nAn audit attacked what the server receives in one round{on}{data}, as an honest-but-curious"
        f" server that knows the model.{setting} Shares are percentages.",
        payload_table(audit),
        "\n".join(SOURCES),
        *(["\n".join(notes)] if notes else []),
        NOT_TRIED,
    ]
    return "\n\n".join(parts) + "\n"


def add_payload_audit(card: str, audit: PayloadAudit) -> str:
    """
    Add the section of an audit to a model card. An existing section is replaced.

    Args:
        card (`str`): Text of the model card.
        audit ([`~hf_federated.audits.PayloadAudit`]): The results.

    Returns:
        `str`: The text of the card with the section.
    """
    return replace_section(card, HEADING, payload_section(audit))


def replace_section(card: str, heading: str, section: str) -> str:
    """
    Insert a section before the section "Versions" of a card, or replace the section with the same heading.

    Args:
        card (`str`): Text of the card.
        heading (`str`): First line of the section.
        section (`str`): Text of the section, which ends with a line break.
    """
    existing = re.search(rf"^{re.escape(heading)}\n.*?(?=^## |\Z)", card, flags=re.MULTILINE | re.DOTALL)
    if existing is not None:
        after = card[existing.end() :]
        return f"{card[: existing.start()]}{section}" + (f"\n{after}" if after else "")
    before, versions_heading, versions = card.rpartition("\n## Versions")
    if not versions_heading:
        return f"{card.rstrip()}\n\n{section}"
    return f"{before.rstrip()}\n\n{section}{versions_heading}{versions}"


def payload_report(audit: PayloadAudit) -> str:
    """
    Create the report of an audit in Markdown.

    Args:
        audit ([`~hf_federated.audits.PayloadAudit`]): The results.
    """
    parts = [
        f"# What a client's payload reveals: {audit.model_name or 'a model'}",
        payload_section(audit).removeprefix(f"{HEADING}\n\n").rstrip(),
    ]
    return "\n\n".join([*parts, *settings_and_versions(audit.settings, audit.versions)]) + "\n"


def settings_and_versions(settings: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
    """Create the last sections of the report of an audit. A section without a value is omitted."""
    sections = []
    if settings:
        rows = [[f"`{name}`", value] for name, value in settings.items()]
        sections.append("## Settings\n\n" + table(["Setting", "Value"], rows))
    if versions:
        sections.append("## Versions\n\n" + "\n".join(f"- {name} {version}" for name, version in versions.items()))
    return sections
