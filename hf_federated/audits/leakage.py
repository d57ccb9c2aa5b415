"""The whole audit of a split model: what hidden states and embedding gradients tell of text, measured on rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..data.plots.figures import COLORS, new_figure
from ..split import Cut, layout_of
from .config import AuditConfig
from .embedding_gradients import TokenRecovery, attack_embedding
from .inversion import Inversion, chance_recall, invert, known_tokens, strongest
from .rows import TokenRows, drop_shared, encode_rows
from .targets import TargetRecovery, attack_targets


@dataclass(frozen=True)
class LeakageAudit:
    """
    What was measured, with what it was measured on.

    Args:
        config ([`AuditConfig`]): How it was made.
        num_attacker_rows (`int`): Rows of the colluding client that there were.
        num_victim_rows (`int`): Rows of the victims that there were.
        num_victim_tokens (`int`): Tokens of the victims that were sought.
        num_dropped (`int`): Rows of the victims that were left out because the attacker had them, or another victim.
        chance (`float`): Token recall of always naming the attacker's most frequent token.
        known_tokens (`float`): Share of the victims' tokens that occur in the attacker's rows.
        inversions (`list[Inversion]`): From hidden states.
        embedding (`list[TokenRecovery]`): From gradients of the embedding; none where it is frozen or was left out.
        targets (`list[TargetRecovery]`, *optional*): From gradients at the second cut; none where it was left out.
        shared_head (`bool`, *optional*, defaults to `True`): Whether the victims had the attacker's head.
        model_name (`str`, *optional*): The model.
        data_name (`str`, *optional*): The data.
        versions (`dict[str, str]`, *optional*): Of packages.

    Example:

    ```python
    >>> from hf_federated.audits import AuditConfig, Inversion, LeakageAudit

    >>> found = Inversion(1, "float32", "search", 0.9, 0.9, 0.8, 0.9, 0.8)
    >>> audit = LeakageAudit(AuditConfig(head_blocks=[1]), 300, 50, 2000, 0, 0.05, 0.9, [found], [])
    >>> audit.strongest(head_blocks=1).token_recall
    0.9
    ```
    """

    config: AuditConfig
    num_attacker_rows: int
    num_victim_rows: int
    num_victim_tokens: int
    num_dropped: int
    chance: float
    known_tokens: float
    inversions: list[Inversion]
    embedding: list[TokenRecovery]
    targets: list[TargetRecovery] = field(default_factory=list)
    shared_head: bool = True
    model_name: str = ""
    data_name: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def strongest(self, head_blocks: int, wire_dtype: str | None = None) -> Inversion:
        """
        The attacker that recovered most tokens at a cut: the leak to report.

        Args:
            head_blocks (`int`): The cut.
            wire_dtype (`str`, *optional*): How hidden states travelled; the first of the configuration by default.

        Raises:
            ValueError: If it was not measured.
        """
        return strongest(self.inversions, head_blocks, wire_dtype or self.config.wire_dtypes[0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LeakageAudit:
        """
        Read what `save` wrote.

        Raises:
            ValueError: If the file holds something else.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            values["config"] = AuditConfig(**values["config"])
            values["inversions"] = [Inversion(**one) for one in values["inversions"]]
            values["embedding"] = [TokenRecovery(**one) for one in values["embedding"]]
            values["targets"] = [TargetRecovery(**one) for one in values.get("targets", [])]
            return cls(**values)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no audit that hf-federated wrote: {error}") from error


def audit_leakage(
    model: PreTrainedModel,
    tokenizer: Any,
    attacker_texts: Sequence[str],
    victim_texts: Sequence[str],
    config: AuditConfig,
    victim_model: PreTrainedModel | None = None,
    on_result: Callable[[Inversion], None] | None = None,
    **names: Any,
) -> LeakageAudit:
    """
    Attack a model at every cut of the configuration.

    Args:
        model (`PreTrainedModel`): The whole model. It is moved to the device of the configuration.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        attacker_texts (`Sequence[str]`): Of the colluding client; the first `num_attacker_rows` are taken.
        victim_texts (`Sequence[str]`): Of the victims. Those that the attacker has are left out and counted; of the
            others the first `num_victim_rows` are taken.
        config ([`AuditConfig`]): How.
        victim_model (`PreTrainedModel`, *optional*): Whose head the victims have, where it is another.
        on_result (`Callable[[Inversion], None]`, *optional*): Called with each attack's result as it is found.
        names: `model_name`, `data_name` and `versions` of [`LeakageAudit`].

    Returns:
        [`LeakageAudit`]: What was found.

    Raises:
        ValueError: If the attacker has no rows, no victim is left, a cut or a row does not fit the model, or gradients
            are to be attacked of rows without a target.
    """
    if config.target_rows:
        # Now, and not after hours.
        Cut(int(getattr(model.config, layout_of(model.config).num_blocks)), 0, config.tail_blocks)
    own = list(attacker_texts[: config.num_attacker_rows])
    if not own:
        raise ValueError("The attacker has no rows, and nothing to learn from: give texts of a colluding client.")
    others, num_dropped = drop_shared(own, victim_texts, tokenizer, config.max_length, config.num_victim_rows)
    if not others:
        raise ValueError(
            f"No victim is left: {len(own)} rows are the attacker's, and none of the other {len(victim_texts)} "
            "differs from them. Give more rows, or fewer to the attacker."
        )
    attacker_rows = encode_rows(own, tokenizer, config.max_length)
    victim_rows = encode_rows(others, tokenizer, config.max_length)
    for rows in (attacker_rows, victim_rows):
        _check_rows(rows, model)
    if (config.gradient_rows or config.target_rows) and victim_rows.input_ids.shape[1] < 2:
        raise ValueError("Rows of one token have no targets, and no gradients: set gradient_rows=0 and target_rows=0.")
    model = model.to(config.device).eval()
    if victim_model is not None:
        victim_model = victim_model.to(config.device).eval()
    inversions = invert(model, tokenizer, attacker_rows, victim_rows, config, victim_model, on_result)
    source = model if victim_model is None else victim_model
    embedding = attack_embedding(source, victim_rows, config.gradient_rows) if config.gradient_rows else []
    few = victim_rows.first(config.target_rows)
    targets = [
        attack_targets(model, few, config.tail_blocks, dtype, which, victim_model)
        for dtype in (config.wire_dtypes if config.target_rows else [])
        for which in ("last", "all")
    ]
    return LeakageAudit(
        config=config,
        num_attacker_rows=len(attacker_rows),
        num_victim_rows=len(victim_rows),
        num_victim_tokens=victim_rows.num_tokens,
        num_dropped=num_dropped,
        chance=chance_recall(attacker_rows, victim_rows),
        known_tokens=known_tokens(attacker_rows, victim_rows),
        inversions=inversions,
        embedding=embedding,
        targets=targets,
        shared_head=victim_model is None,
        **names,
    )


def _check_rows(rows: TokenRows, model: PreTrainedModel) -> None:
    """Refuse rows that the model cannot take."""
    positions = getattr(model.config, layout_of(model.config).max_positions, None)
    length, largest = rows.input_ids.shape[1], int(rows.input_ids.max())
    if positions is not None and length > positions:
        raise ValueError(
            f"A row has {length} tokens, and the model {positions} positions: set max_length={positions}."
        )
    known = len(model.get_input_embeddings().weight)
    if largest >= known:
        raise ValueError(
            f"The tokenizer gives token {largest}, and the model has {known}: they do not belong together."
        )


def plot_leakage(audit: LeakageAudit, path: str | os.PathLike[str]) -> None:
    """
    Draws token recall over the depth of the cut, a line for each attacker and wire dtype, and chance.

    Args:
        audit ([`LeakageAudit`]): What was found.
        path (`str`): The PNG file to write.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure, axes = new_figure(6.0, 3.8, squeeze=False)
    axis = axes[0, 0]
    names = list(dict.fromkeys(one.attacker for one in audit.inversions))
    depths = sorted(audit.config.head_blocks)
    for (name, color), marker in zip(zip(names, COLORS, strict=False), "o^sD", strict=False):
        for dtype, dashes in zip(audit.config.wire_dtypes, ("-", "--", "-.", ":"), strict=False):
            found = {
                one.head_blocks: one.token_recall
                for one in audit.inversions
                if (one.attacker, one.wire_dtype) == (name, dtype)
            }
            label = f"{name}, {dtype}" if len(audit.config.wire_dtypes) > 1 else name
            values = [100 * found[depth] for depth in depths]
            axis.plot(np.arange(len(depths)), values, color=color, marker=marker, linestyle=dashes, label=label)
    axis.axhline(100 * audit.chance, color="#777777", linestyle=":", label="most frequent token")
    axis.set_xticks(np.arange(len(depths)), [f"{depth}" for depth in depths])
    axis.set_xlabel("blocks of the client before the cut")
    axis.set_ylabel("tokens recovered at their position (%)")
    axis.set_ylim(-2, 102)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
