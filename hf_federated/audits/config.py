"""How an audit of a split model is made: cuts, attackers, rows and training of the attackers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..messages.quantization import TRAVEL_DTYPES


ATTACKERS = ("nearest", "decoder", "transformer", "search")


@dataclass(frozen=True)
class AuditConfig:
    """
    What is attacked, by whom, and with how many rows.

    Args:
        head_blocks (`list[int]`, *optional*, defaults to `[0, 1, 2, 4]`):
            Cuts to measure: blocks that the client keeps behind the embedding.
        attackers (`list[str]`, *optional*, defaults to `["nearest", "decoder", "search"]`):
            Any of `"nearest"`, `"decoder"`, `"transformer"` and `"search"`. What they do stands in
            `hf_federated.audits.attackers`. `"search"` checks what the others propose.
        wire_dtypes (`list[str]`, *optional*, defaults to `["float32"]`):
            Dtypes in which hidden states travel: `"float32"`, `"float16"`, `"bfloat16"`, `"int8"`.
        num_attacker_rows (`int`, *optional*, defaults to `300`): Rows of the colluding client.
        num_victim_rows (`int`, *optional*, defaults to `50`): Rows of the victims, none of them the attacker's.
        max_length (`int`, *optional*, defaults to `48`): Tokens of a row; the others are cut off.
        num_steps (`int`, *optional*, defaults to `300`): Optimizer steps of a learned attacker.
        batch_size (`int`, *optional*, defaults to `16`): Rows of a step of a learned attacker.
        learning_rate (`float`, *optional*, defaults to `0.001`): Of a learned attacker's AdamW.
            It falls to 0 linearly.
        num_negatives (`int`, *optional*, defaults to `2048`): Random tokens that a learned attacker must tell from the
            true ones in a step. A vocabulary no larger is taken whole.
        num_candidates (`int`, *optional*, defaults to `32`): Tokens that the search tries at a position, of each of
            those that propose.
        gradient_rows (`int`, *optional*, defaults to `4`): Rows of the victims in a gradient of the embedding. 0
            leaves that attack out.
        tail_blocks (`int`, *optional*, defaults to `1`): Blocks of the client behind the cut at which it sends
            gradients, from which its targets are read.
        target_rows (`int`, *optional*, defaults to `8`): Rows of the victims whose targets are sought. 0 leaves that
            attack out.
        seed (`int`, *optional*, defaults to `0`): Of the rows drawn and of the attackers.
        device (`str`, *optional*, defaults to `"cpu"`): Where it is computed, such as `"cuda"`.

    Raises:
        ValueError: If a number is out of range or a name is not known.

    Example:

    ```python
    >>> from hf_federated.audits import AuditConfig

    >>> AuditConfig(head_blocks=[0, 1], wire_dtypes=["float32", "int8"]).attackers
    ['nearest', 'decoder', 'search']
    ```
    """

    head_blocks: list[int] = field(default_factory=lambda: [0, 1, 2, 4])
    attackers: list[str] = field(default_factory=lambda: ["nearest", "decoder", "search"])
    wire_dtypes: list[str] = field(default_factory=lambda: ["float32"])
    num_attacker_rows: int = 300
    num_victim_rows: int = 50
    max_length: int = 48
    num_steps: int = 300
    batch_size: int = 16
    learning_rate: float = 1e-3
    num_negatives: int = 2048
    num_candidates: int = 32
    gradient_rows: int = 4
    tail_blocks: int = 1
    target_rows: int = 8
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("head_blocks", "attackers", "wire_dtypes"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must name at least one, and each once; got {values}.")
        for name, allowed in (("attackers", ATTACKERS), ("wire_dtypes", tuple(TRAVEL_DTYPES))):
            unknown = [value for value in getattr(self, name) if value not in allowed]
            if unknown:
                raise ValueError(f"{name} may be {', '.join(allowed)}; got {', '.join(unknown)}.")
        if self.attackers == ["search"]:
            raise ValueError('"search" checks what others propose: name "nearest" or "decoder" beside it.')
        if min(self.head_blocks) < 0:
            raise ValueError(f"head_blocks must not be negative, got {min(self.head_blocks)}.")
        for name in (
            "num_attacker_rows",
            "num_victim_rows",
            "num_steps",
            "batch_size",
            "num_negatives",
            "num_candidates",
            "tail_blocks",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {self.max_length}.")
        for name in ("gradient_rows", "target_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}.")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}.")
