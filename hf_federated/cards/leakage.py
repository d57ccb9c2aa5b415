"""Card section and report on the text that a server could read from the clients of a split model."""

from __future__ import annotations

from dataclasses import asdict

from ..audits import Inversion, LeakageAudit
from .payload_leakage import replace_section, settings_and_versions
from .tables import format_count, plural, table


# `add_leakage` finds the section of an existing card by this heading.
HEADING = "## What hidden states reveal"

# Zheng et al. 2024, Table 4, in percent: the client's part, attacker, ROUGE-1, ROUGE-2, ROUGE-L, BLEU-4.
PAPER_TABLE_4 = (
    ("embedding", "linear", 33.29, 7.053, 26.732, 28.57),
    ("embedding and one block", "transformer", 0.135, 0.002, 0.473, 0.335),
)

_CLAIM = (
    "Raw text and labels stay with the client. However, the hidden states and gradients that the server receives can"
    " still reveal text and labels to an honest-but-curious server that knows the pretrained weights."
)
_LENGTHS = (
    "Without any attack, the server knows the number of tokens of each example. With"
    ' `strategy="client_batch"`, it also knows the number of target tokens of each batch; for a batch of one example,'
    " this is the number of target tokens of that example. For models that require it (ChatGLM-6B), it knows where the"
    " context of each example ends. If the length of an answer follows from these numbers, the server can distinguish"
    " labels whose words have different numbers of tokens."
)
_ATTACKERS = {
    "nearest": "not trained; selects the token that has the nearest hidden state without context",
    "decoder": "trained on the attacker's examples; decodes each position independently",
    "transformer": "trained on the attacker's examples; decodes all positions with one transformer block",
    "search": "runs the proposals of the other attackers through the head, from left to right, and keeps the tokens"
    " that match the received hidden states",
}
_RULES = {
    "nonzero": "The rule `nonzero` selects the rows of the matrix that are not zero.",
    "sign": "The embedding matrix is also the output layer, so all its rows change: the rule `sign` selects the rows"
    " that point against most rows.",
    "size": "The rule `size` selects the largest rows and is given their number.",
}
_LIMITS = (
    "These results describe the given attackers only and are not a bound: another attacker may find more. Adding"
    " noise to the sent tensors would lower a measured leak, but guarantees nothing without a stated differential"
    " privacy bound. A server that deviates from the protocol was not considered."
)


def leakage_section(audit: LeakageAudit, head_blocks: int | None = None) -> str:
    """
    Create the section of a model card on the leakage of a split model.

    Args:
        audit ([`LeakageAudit`]):
            The measurements.
        head_blocks (`int`, *optional*):
            The cut at which the model is used. Defaults to all measured cuts.

    Raises:
        ValueError: If the audit did not measure this cut.

    Example:

    ```python
    >>> from hf_federated.audits import AuditConfig, Inversion, LeakageAudit
    >>> from hf_federated.cards import leakage_section

    >>> inversion = Inversion(1, "float32", "search", 0.9, 0.9, 0.8, 0.9, 0.8)
    >>> audit = LeakageAudit(AuditConfig(head_blocks=[1]), 300, 50, 2000, 0, 0.05, 0.9, [inversion], [])
    >>> "90.0% of the tokens with 1 block before the cut" in leakage_section(audit)
    True

    ```
    """
    cuts = audit.config.head_blocks if head_blocks is None else [head_blocks]
    strongest = [audit.strongest(cut, dtype) for cut in cuts for dtype in audit.config.wire_dtypes]
    recalls = "; ".join(
        f"{_percent(audit.strongest(cut).token_recall)}% of the tokens with {plural(cut, 'block')} before the cut"
        for cut in cuts
    )
    model = f" on `{audit.model_name}`" if audit.model_name else ""
    text = (
        f"{HEADING}\n\n{_CLAIM} {_LENGTHS} In a measurement{model}, the strongest attacker recovered {recalls}. A"
        f" token counts as recovered only at its position. {_setting(audit)} {_LIMITS}\n\n{inversion_table(strongest)}"
    )
    return f"{text}\n\n{targets_text(audit)}\n\n{embedding_text(audit)}\n"


def add_leakage(card: str, audit: LeakageAudit, head_blocks: int | None = None) -> str:
    """
    Add the leakage section to a model card. An existing leakage section is replaced.

    Args:
        card (`str`):
            Text of the model card.
        audit ([`LeakageAudit`]):
            The measurements.
        head_blocks (`int`, *optional*):
            The cut at which the model is used, as in [`leakage_section`].

    Returns:
        `str`: The text of the card with the section.
    """
    return replace_section(card, HEADING, leakage_section(audit, head_blocks))


def leakage_report(audit: LeakageAudit, picture: str | None = None) -> str:
    """
    Create the report of an audit in Markdown, with the results of every attacker at every cut and the paper's numbers.

    Args:
        audit ([`LeakageAudit`]):
            The measurements.
        picture (`str`, *optional*):
            File of the plot, relative to the report.

    Returns:
        `str`: The text of the report.
    """
    parts = [
        f"# What a client's hidden states reveal: {audit.model_name or 'a model'}",
        f"{_CLAIM} {_LENGTHS} {_setting(audit)} {_LIMITS}",
        "## Text from hidden states\n\nScores are percentages. Token recall counts tokens that are recovered at their"
        " position.",
        "\n".join(f"- {name}: {_ATTACKERS[name]}" for name in audit.config.attackers),
        inversion_table(audit.inversions),
    ]
    if picture is not None:
        parts.append(f"![Tokens recovered by depth of the cut]({picture})")
    header = ["Client's part", "Attacker", "ROUGE-1", "ROUGE-2", "ROUGE-L", "BLEU-4"]
    parts += [
        "## Published results\n\nZheng et al. 2024 (FL-GLM), Table 4: ChatGLM-6B, BoolQ, data of a colluding client."
        " The attacker in the published code predicts the token after each position. This audit recovers the token at"
        " each position. The published results and the results above therefore measure different quantities.",
        table(header, [[*row[:2], *(f"{value:g}" for value in row[2:])] for row in PAPER_TABLE_4], numeric=True),
        f"## Targets from gradients at the second cut\n\n{targets_text(audit)}",
        f"## Tokens from gradients of the embedding\n\n{embedding_text(audit)}",
        *settings_and_versions(asdict(audit.config), audit.versions),
    ]
    return "\n\n".join(parts) + "\n"


def inversion_table(inversions: list[Inversion]) -> str:
    """
    Format a table of attacks on hidden states, with scores in percent.

    Args:
        inversions (`list[Inversion]`):
            The results of the attacks.
    """
    scores = {
        "Token recall": "token_recall",
        "ROUGE-1": "rouge1",
        "ROUGE-2": "rouge2",
        "ROUGE-L": "rougeL",
        "BLEU-4": "bleu4",
    }
    rows = [
        [each.head_blocks, each.wire_dtype, each.attacker, *(_percent(getattr(each, key)) for key in scores.values())]
        for each in inversions
    ]
    return table(["Blocks before the cut", "Wire dtype", "Attacker", *scores], rows, numeric=True)


def targets_text(audit: LeakageAudit) -> str:
    """
    Describe the targets that were read from the gradients of clients, with a table.

    Args:
        audit ([`LeakageAudit`]):
            The measurements.
    """
    if not audit.targets:
        return "Gradients at the second cut were not attacked. A server may read labels from them."
    rows = [
        {
            "Wire dtype": recovery.wire_dtype,
            "Targets of an example": {"last": "the last token", "all": "every token"}[recovery.targets],
            "Number of targets": recovery.num_targets,
            "Recovered targets": _percent(recovery.token_recall),
            "Position precision": _percent(recovery.position_precision),
            "Position recall": _percent(recovery.position_recall),
        }
        for recovery in audit.targets
    ]
    num_blocks = audit.config.tail_blocks
    blocks = "last block" if num_blocks == 1 else f"last {num_blocks} blocks"
    weights = "with the same weights as the victims"
    if not audit.shared_head:
        weights = "with the weights of the model, while the victims had trained their own weights"
    return (
        f"Labels: an attacker has the client's {blocks} and output layer ({weights}). From the gradient that a client"
        " sends back, it reads which positions have a target and which token each target is. If every token of a text"
        " is a target, the attacker reads the text, regardless of what the first cut hides. Position precision is the"
        " share of the named positions that have a target. Position recall is the share of the positions with a target"
        " that were named. Scores are percentages:\n\n"
        + table(list(rows[0]), [list(row.values()) for row in rows], numeric=True)
    )


def embedding_text(audit: LeakageAudit) -> str:
    """
    Describe the tokens that were read from the gradients of the embedding, with a table.

    Args:
        audit ([`LeakageAudit`]):
            The measurements.
    """
    if not audit.config.gradient_rows:
        return "Gradients of the embedding were not attacked."
    if not audit.embedding:
        return "The embedding is frozen. It has no gradient that an attacker could read."
    header = ["Sent tensor", "Rule", "Precision", "Recall"]
    rules = list(dict.fromkeys(recovery.rule for recovery in audit.embedding))
    rows = [
        [recovery.source, recovery.rule, _percent(recovery.precision), _percent(recovery.recall)]
        for recovery in audit.embedding
    ]
    return (
        "If the embedding is trained and its change is sent, the change reveals tokens. The table shows the precision"
        f" and recall of the distinct tokens of a batch of {plural(audit.config.gradient_rows, 'example')}"
        f" ({audit.embedding[0].num_tokens:.0f} distinct tokens on average), in percent. A frozen embedding (LoRA,"
        " prefixes) sends no such change. `adamw` is the change that the first AdamW step makes of a gradient."
        f" {' '.join(_RULES[rule] for rule in rules)}\n\n" + table(header, rows, numeric=True)
    )


def _setting(audit: LeakageAudit) -> str:
    data = f" of {audit.data_name}" if audit.data_name else ""
    head = "the same head as the victims"
    if not audit.shared_head:
        head = "the head of the model, while the victims had trained their own head"
    overlap = " The attacker had none of these examples."
    if audit.num_dropped:
        overlap = (
            f" Victims' examples that the attacker had, or that occurred twice, were left out"
            f" ({plural(audit.num_dropped, 'example')})."
        )
    return (
        f"The attacker had {plural(audit.num_attacker_rows, 'example')}{data} and {head}. It attacked"
        f" {plural(audit.num_victim_rows, 'example')} of the victims with {format_count(audit.num_victim_tokens)}"
        f" tokens in total and at most {audit.config.max_length} tokens each.{overlap} An attacker that always names"
        f" the most frequent token recovers {_percent(audit.chance)}% of the tokens."
        f" {_percent(audit.known_tokens)}% of the victims' tokens occur in the attacker's examples."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
