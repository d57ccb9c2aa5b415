"""Leakage audit of a split model: text recovered from hidden states and from gradients, measured on examples."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..data.plots.matplotlib_helpers import COLORS, new_figure
from ..split import Cut, layout_of
from ..utils.untrusted_json import read_json
from .config import AuditConfig
from .embedding_gradients import TokenRecovery, attack_embedding
from .examples import TokenizedExamples, encode_examples, remove_shared_texts
from .inversion import Inversion, chance_recall, invert, known_tokens, strongest
from .targets import TargetRecovery, attack_targets


@dataclass(frozen=True)
class LeakageAudit:
    """
    Results of a leakage audit, with the settings of the measurement.

    Args:
        config ([`AuditConfig`]):
            Settings of the audit.
        num_attacker_rows (`int`):
            Number of examples of the colluding client that were used.
        num_victim_rows (`int`):
            Number of examples of the victims that were used.
        num_victim_tokens (`int`):
            Number of attacked tokens of the victims.
        num_dropped (`int`):
            Number of the victims' examples that were removed because the attacker or another victim had them.
        chance (`float`):
            Token recall of always naming the attacker's most frequent token.
        known_tokens (`float`):
            Fraction of the victims' tokens that occur in the attacker's examples.
        inversions (`list[Inversion]`):
            Results of the attacks on hidden states.
        embedding (`list[TokenRecovery]`):
            Results of the attack on gradients of the embedding. Empty if the embedding is frozen or the attack was
            disabled.
        targets (`list[TargetRecovery]`, *optional*):
            Results of the attack on gradients at the second cut. Empty if the attack was disabled.
        shared_head (`bool`, *optional*, defaults to `True`):
            Whether the victims had the same head as the attacker.
        model_name (`str`, *optional*):
            Name of the model.
        data_name (`str`, *optional*):
            Name of the dataset.
        versions (`dict[str, str]`, *optional*):
            Versions of packages.

    Example:

    ```python
    >>> from hf_federated.audits import AuditConfig, Inversion, LeakageAudit

    >>> inversion = Inversion(1, "float32", "search", 0.9, 0.9, 0.8, 0.9, 0.8)
    >>> audit = LeakageAudit(AuditConfig(head_blocks=[1]), 300, 50, 2000, 0, 0.05, 0.9, [inversion], [])
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
        Return the result of the attacker with the highest token recall at a cut. This is the leak to report.

        Args:
            head_blocks (`int`):
                The cut.
            wire_dtype (`str`, *optional*):
                Dtype of the sent hidden states. Defaults to the first dtype of the configuration.

        Raises:
            ValueError: If this cut and dtype were not measured.
        """
        return strongest(self.inversions, head_blocks, wire_dtype or self.config.wire_dtypes[0])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the results as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LeakageAudit:
        """
        Load results that `save` wrote.

        Raises:
            ValueError: If the file does not contain the results of an audit.
        """
        try:
            values = read_json(path)
            values["config"] = AuditConfig(**values["config"])
            values["inversions"] = [Inversion(**fields) for fields in values["inversions"]]
            values["embedding"] = [TokenRecovery(**fields) for fields in values["embedding"]]
            values["targets"] = [TargetRecovery(**fields) for fields in values.get("targets", [])]
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not contain the results of an audit: {error}. Pass an audit.json that `hf-federated"
                " audit` wrote."
            ) from error


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
    Run all attacks of a configuration on a model.

    Args:
        model (`PreTrainedModel`):
            The full model. It is moved to the device of the configuration.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of the model.
        attacker_texts (`Sequence[str]`):
            Texts of the colluding client. The first `num_attacker_rows` texts are used.
        victim_texts (`Sequence[str]`):
            Texts of the victims. Texts that the attacker also has are removed and counted. The first `num_victim_rows`
            remaining texts are used.
        config ([`AuditConfig`]):
            Settings of the audit.
        victim_model (`PreTrainedModel`, *optional*):
            The model whose head the victims have. Defaults to `model`.
        on_result (`Callable[[Inversion], None]`, *optional*):
            Called with the result of each attack on hidden states as soon as it is available.
        names:
            `model_name`, `data_name` and `versions` of [`LeakageAudit`].

    Returns:
        [`LeakageAudit`]: The results.

    Raises:
        ValueError: If the attacker has no examples, if no example of a victim remains, if a cut or an example does not
            fit the model, or if gradients are attacked and the examples have no target.
    """
    if config.target_rows:
        # Check the cut before the attacks on hidden states, which can take hours.
        Cut(int(getattr(model.config, layout_of(model.config).num_blocks)), 0, config.tail_blocks)
    attacker_examples, victim_examples, num_dropped = _encode_texts(
        model, tokenizer, attacker_texts, victim_texts, config
    )
    model = model.to(config.device).eval()
    if victim_model is not None:
        victim_model = victim_model.to(config.device).eval()
    inversions = invert(model, tokenizer, attacker_examples, victim_examples, config, victim_model, on_result)
    source = model if victim_model is None else victim_model
    embedding = attack_embedding(source, victim_examples, config.gradient_rows) if config.gradient_rows else []
    target_examples = victim_examples.first(config.target_rows)
    targets = [
        attack_targets(model, target_examples, config.tail_blocks, dtype, kind, victim_model)
        for dtype in (config.wire_dtypes if config.target_rows else [])
        for kind in ("last", "all")
    ]
    return LeakageAudit(
        config=config,
        num_attacker_rows=len(attacker_examples),
        num_victim_rows=len(victim_examples),
        num_victim_tokens=victim_examples.num_tokens,
        num_dropped=num_dropped,
        chance=chance_recall(attacker_examples, victim_examples),
        known_tokens=known_tokens(attacker_examples, victim_examples),
        inversions=inversions,
        embedding=embedding,
        targets=targets,
        shared_head=victim_model is None,
        **names,
    )


def _encode_texts(
    model: PreTrainedModel,
    tokenizer: Any,
    attacker_texts: Sequence[str],
    victim_texts: Sequence[str],
    config: AuditConfig,
) -> tuple[TokenizedExamples, TokenizedExamples, int]:
    """Return the examples of the attacker and of the victims, and the number of texts that both have."""
    own_texts = list(attacker_texts[: config.num_attacker_rows])
    if not own_texts:
        raise ValueError("The attacker has no examples. Pass at least one text of a colluding client.")
    remaining_texts, num_dropped = remove_shared_texts(
        own_texts, victim_texts, tokenizer, config.max_length, config.num_victim_rows
    )
    if not remaining_texts:
        raise ValueError(
            f"No example of a victim remains: the attacker has {len(own_texts)} examples, and none of the"
            f" {len(victim_texts)} examples of the victims differs from them. Pass more examples, or lower"
            " num_attacker_rows."
        )
    attacker_examples = encode_examples(own_texts, tokenizer, config.max_length)
    victim_examples = encode_examples(remaining_texts, tokenizer, config.max_length)
    for examples in (attacker_examples, victim_examples):
        _check_examples(examples, model)
    if (config.gradient_rows or config.target_rows) and victim_examples.input_ids.shape[1] < 2:
        raise ValueError(
            "All examples of the victims have one token and therefore no targets and no gradients. Set gradient_rows=0"
            " and target_rows=0."
        )
    return attacker_examples, victim_examples, num_dropped


def _check_examples(examples: TokenizedExamples, model: PreTrainedModel) -> None:
    """Raise an error if the model cannot process the examples."""
    num_positions = getattr(model.config, layout_of(model.config).max_positions, None)
    length, largest_id = examples.input_ids.shape[1], int(examples.input_ids.max())
    if num_positions is not None and length > num_positions:
        raise ValueError(
            f"An example has {length} tokens, but the model has {num_positions} positions. Set"
            f" max_length={num_positions}."
        )
    vocabulary_size = len(model.get_input_embeddings().weight)
    if largest_id >= vocabulary_size:
        raise ValueError(
            f"The tokenizer gives the token id {largest_id}, but the model has {vocabulary_size} token embeddings."
            " Pass the tokenizer of the model."
        )


def plot_leakage(audit: LeakageAudit, path: str | os.PathLike[str]) -> None:
    """
    Plot token recall by depth of the cut, with a line for each attacker and wire dtype and a line for chance.

    Args:
        audit ([`LeakageAudit`]):
            The results.
        path (`str`):
            The PNG file to write.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure, axis = new_figure(6.0, 3.8)
    names = list(dict.fromkeys(inversion.attacker for inversion in audit.inversions))
    depths = sorted(audit.config.head_blocks)
    recalls = {(each.attacker, each.wire_dtype, each.head_blocks): each.token_recall for each in audit.inversions}
    for (name, color), marker in zip(zip(names, COLORS, strict=False), "o^sD", strict=False):
        for dtype, dashes in zip(audit.config.wire_dtypes, ("-", "--", "-.", ":"), strict=False):
            label = f"{name}, {dtype}" if len(audit.config.wire_dtypes) > 1 else name
            values = [100 * recalls[name, dtype, depth] for depth in depths]
            axis.plot(np.arange(len(depths)), values, color=color, marker=marker, linestyle=dashes, label=label)
    axis.axhline(100 * audit.chance, color="#777777", linestyle=":", label="most frequent token")
    axis.set_xticks(np.arange(len(depths)), [f"{depth}" for depth in depths])
    axis.set_xlabel("client blocks before the cut")
    axis.set_ylabel("tokens recovered at their position (%)")
    axis.set_ylim(-2, 102)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
