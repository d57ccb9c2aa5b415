"""What a card, and a report, say of the text that a server could read from a split model's client."""

from __future__ import annotations

import re
from dataclasses import asdict

from ..audits import AuditConfig, Inversion, LeakageAudit
from .tables import count, plural, table


HEADING = "## What hidden states reveal"

# Zheng et al. 2024, Table 4, in percent: what the client has, attacker, ROUGE-1, ROUGE-2, ROUGE-L, BLEU-4.
PAPER_TABLE_4 = (
    ("embedding", "linear", 33.29, 7.053, 26.732, 28.57),
    ("embedding and one block", "transformer", 0.135, 0.002, 0.473, 0.335),
)

_CLAIM = (
    "Raw text and labels stay with the client. Against an honest-but-curious server that knows the pretrained weights,"
    " the hidden states and gradients that it receives can still reveal text and labels."
)
_LENGTHS = (
    'Without any attack it knows how many tokens each row has, with `strategy="client_batch"` how many target tokens'
    " each batch has, which of a batch of one row are that row's, and of a model that asks for it (ChatGLM-6B) where"
    " each row's context ends: where the length of an answer follows from these, it tells apart labels whose words are"
    " of different numbers of tokens."
)
_ATTACKERS = {
    "nearest": "untrained: the token that alone gives the nearest hidden state",
    "decoder": "trained on the attacker's rows, each position by itself",
    "transformer": "trained on the attacker's rows, one block over all positions",
    "search": "runs what the others propose through the head, from left to right, and keeps what fits what crossed",
}
_RULES = {
    "nonzero": "`nonzero` names the rows that are not zero.",
    "sign": "The matrix is the output layer too, and every row changes: `sign` names rows that point against most.",
    "size": "`size` names the largest rows, and is told how many.",
}
_LIMITS = (
    "That is what these attackers found, and no bound: another may find more. Noise on what is sent would lower a"
    " measured leak, and guarantees nothing without a stated bound of differential privacy. A server that departs from"
    " the protocol was not considered."
)


def leakage_section(audit: LeakageAudit, head_blocks: int | None = None) -> str:
    """
    The section of a model card on what leaves a client of a split model.

    Args:
        audit ([`LeakageAudit`]): What was measured.
        head_blocks (`int`, *optional*): The cut at which the model is used; all that were measured by default.

    Raises:
        ValueError: If this cut was not measured.

    Example:

    ```python
    >>> from hf_federated.audits import AuditConfig, Inversion, LeakageAudit
    >>> from hf_federated.cards import leakage_section

    >>> found = Inversion(1, "float32", "search", 0.9, 0.9, 0.8, 0.9, 0.8)
    >>> audit = LeakageAudit(AuditConfig(head_blocks=[1]), 300, 50, 2000, 0, 0.05, 0.9, [found], [])
    >>> "1 block before the cut, 90.0 % of the tokens" in leakage_section(audit)
    True

    ```
    """
    cuts = audit.config.head_blocks if head_blocks is None else [head_blocks]
    best = [audit.strongest(cut, dtype) for cut in cuts for dtype in audit.config.wire_dtypes]
    measured = "; ".join(
        f"with {plural(cut, 'block')} before the cut, {_percent(audit.strongest(cut).token_recall)} % of the tokens"
        for cut in cuts
    )
    of_model = f" on `{audit.model_name}`" if audit.model_name else ""
    text = (
        f"{HEADING}\n\n{_CLAIM} {_LENGTHS} Measured{of_model} at the position of each token, the strongest of the"
        f" attackers recovered, {measured}. {_setting(audit)} {_LIMITS}\n\n{inversion_table(best)}"
    )
    return f"{text}\n\n{targets_text(audit)}\n\n{embedding_text(audit)}\n"


def add_leakage(card: str, audit: LeakageAudit, head_blocks: int | None = None) -> str:
    """
    A model card with the section on what leaves a client, in place of one that it has.

    Args:
        card (`str`): Text of a model card.
        audit ([`LeakageAudit`]): What was measured.
        head_blocks (`int`, *optional*): As in [`leakage_section`].
    """
    section = leakage_section(audit, head_blocks)
    there = re.search(rf"^{HEADING}\n.*?(?=^## |\Z)", card, flags=re.MULTILINE | re.DOTALL)
    if there is not None:
        after = card[there.end() :]
        return f"{card[: there.start()]}{section}" + (f"\n{after}" if after else "")
    before, mark, versions = card.rpartition("\n## Versions")
    if not mark:
        return f"{card.rstrip()}\n\n{section}"
    return f"{before.rstrip()}\n\n{section}{mark}{versions}"


def leakage_report(audit: LeakageAudit, picture: str | None = None) -> str:
    """
    The report of an audit, in Markdown: every attacker at every cut, and the paper's numbers beside them.

    Args:
        audit ([`LeakageAudit`]): What was measured.
        picture (`str`, *optional*): File of the picture, relative to the report.
    """
    settings = asdict(audit.config)
    parts = [
        f"# What a client's hidden states reveal: {audit.model_name or 'a model'}",
        f"{_CLAIM} {_LENGTHS} {_setting(audit)} {_LIMITS}",
        "## Text from hidden states\n\nScores in percent; recall is of tokens at their position.",
        "\n".join(f"- {name}: {_ATTACKERS[name]}" for name in audit.config.attackers),
        inversion_table(audit.inversions),
    ]
    if picture is not None:
        parts.append(f"![Tokens recovered over the depth of the cut]({picture})")
    header = ["Before the cut", "Attacker", "ROUGE-1", "ROUGE-2", "ROUGE-L", "BLEU-4"]
    parts += [
        "## Published beside it\n\nZheng et al. 2024 (FL-GLM), Table 4: ChatGLM-6B, BoolQ, a colluding client's data."
        " The published code has the attacker predict the token after the position, which is another question than"
        " which token is there: the numbers are not of one measure.",
        table(header, [[*row[:2], *(f"{value:g}" for value in row[2:])] for row in PAPER_TABLE_4], numeric=True),
        f"## Targets from gradients at the second cut\n\n{targets_text(audit)}",
        f"## Tokens from gradients of the embedding\n\n{embedding_text(audit)}",
        "## Settings\n\n" + table(["Setting", "Value"], [[f"`{name}`", value] for name, value in settings.items()]),
    ]
    if audit.versions:
        parts.append("## Versions\n\n" + "\n".join(f"- {name} {version}" for name, version in audit.versions.items()))
    return "\n\n".join(parts) + "\n"


def inversion_table(inversions: list[Inversion]) -> str:
    """
    A table of attacks, in percent.

    Args:
        inversions (`list[Inversion]`): The attacks.
    """
    header = ["Blocks before the cut", "Wire", "Attacker", "Token recall", "ROUGE-1", "ROUGE-2", "ROUGE-L", "BLEU-4"]
    rows = [
        [
            one.head_blocks,
            one.wire_dtype,
            one.attacker,
            *map(_percent, (one.token_recall, one.rouge1, one.rouge2, one.rougeL, one.bleu4)),
        ]
        for one in inversions
    ]
    return table(header, rows, numeric=True)


def targets_text(audit: LeakageAudit) -> str:
    """
    What was read from the gradients that a client sends back, as a sentence and a table.

    Args:
        audit ([`LeakageAudit`]): What was measured.
    """
    if not audit.targets:
        return "Gradients at the second cut were not attacked, from which a server may read labels."
    header = ["Wire", "Targets of a row", "Targets", "Named", "Positions named that have one", "Positions found"]
    rows = [
        [
            one.wire_dtype,
            {"last": "the last token", "all": "every token"}[one.targets],
            one.num_targets,
            *map(_percent, (one.token_recall, one.position_precision, one.position_recall)),
        ]
        for one in audit.targets
    ]
    number = audit.config.tail_blocks
    blocks = "last block" if number == 1 else f"last {number} blocks"
    of_tail = "as the victims have it" if audit.shared_head else "of the model, while the victims had trained theirs"
    return (
        f"Labels: from the gradient that a client sends back, an attacker with the client's {blocks} and output layer,"
        f" {of_tail}, reads which positions have a target and which token it is. Where every token of a text is a"
        " target, that is the text, whatever the first cut hides. In percent:\n\n" + table(header, rows, numeric=True)
    )


def embedding_text(audit: LeakageAudit) -> str:
    """
    What was read from gradients of the embedding, as a sentence and a table.

    Args:
        audit ([`LeakageAudit`]): What was measured.
    """
    if not audit.config.gradient_rows:
        return "Gradients of the embedding were not attacked."
    if not audit.embedding:
        return "The embedding is frozen: no gradient of it is there to be read."
    header = ["Sent", "Rule", "Precision", "Recall"]
    rules = list(dict.fromkeys(one.rule for one in audit.embedding))
    rows = [[one.source, one.rule, _percent(one.precision), _percent(one.recall)] for one in audit.embedding]
    return (
        "Where the embedding is trained and its change is sent, the change names words: of the different tokens of a"
        f" batch of {plural(audit.config.gradient_rows, 'row')} ({audit.embedding[0].num_tokens:.0f} on average), in"
        " percent. A frozen embedding (LoRA, prefixes) sends no such change. `adamw` is what the first step of AdamW"
        f" makes of a gradient. {' '.join(_RULES[rule] for rule in rules)}\n\n" + table(header, rows, numeric=True)
    )


def _setting(audit: LeakageAudit) -> str:
    config: AuditConfig = audit.config
    of_data = f" of {audit.data_name}" if audit.data_name else ""
    dropped = f" ({plural(audit.num_dropped, 'row')} that the attacker had or that came twice left out)"
    head = "that the victims have" if audit.shared_head else "of the model, while the victims had trained theirs"
    return (
        f"The attacker had {plural(audit.num_attacker_rows, 'row')} of its own{of_data}, and the head {head}; it was"
        f" tried on {plural(audit.num_victim_rows, 'row')} of victims"
        f"{dropped if audit.num_dropped else ', none of them its own'}, with {count(audit.num_victim_tokens)} tokens,"
        f" at most {config.max_length} a row. Naming the most frequent token everywhere finds"
        f" {_percent(audit.chance)} %; {_percent(audit.known_tokens)} % of the victims' tokens occur in the attacker's"
        " rows."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
