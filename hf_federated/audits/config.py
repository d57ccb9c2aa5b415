"""Settings of the audit of a split model: cuts, attackers, examples, and training of the attackers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..split.wire import WIRE_DTYPES


ATTACKERS = ("nearest", "decoder", "transformer", "search")
# Smallest allowed value of each number.
MINIMA = {
    "num_attacker_rows": 1,
    "num_victim_rows": 1,
    "max_length": 2,
    "num_steps": 1,
    "batch_size": 1,
    "num_negatives": 1,
    "num_candidates": 1,
    "gradient_rows": 0,
    "tail_blocks": 1,
    "target_rows": 0,
}


@dataclass(frozen=True)
class AuditConfig:
    """
    Settings of a leakage audit.

    Args:
        head_blocks (`list[int]`, *optional*, defaults to `[0, 1, 2, 4]`):
            Cuts to measure, as numbers of blocks that the client keeps after the embedding.
        attackers (`list[str]`, *optional*, defaults to `["nearest", "decoder", "search"]`):
            Attackers to run: any of `"nearest"`, `"decoder"`, `"transformer"` and `"search"`. The module
            `hf_federated.audits.attackers` describes them. `"search"` checks the proposals of the other attackers.
        wire_dtypes (`list[str]`, *optional*, defaults to `["float32"]`):
            Dtypes of the sent hidden states: any of `"float32"`, `"float16"`, `"bfloat16"`, `"int8"`, `"int4"` and
            `"topk"`.
        num_attacker_rows (`int`, *optional*, defaults to `300`):
            Number of examples of the colluding client.
        num_victim_rows (`int`, *optional*, defaults to `50`):
            Number of examples of the victims, without examples of the attacker.
        max_length (`int`, *optional*, defaults to `48`):
            Maximum number of tokens of an example. Longer examples are truncated.
        num_steps (`int`, *optional*, defaults to `300`):
            Number of optimizer steps of a learned attacker.
        batch_size (`int`, *optional*, defaults to `16`):
            Number of examples in an optimizer step of a learned attacker.
        learning_rate (`float`, *optional*, defaults to `0.001`):
            AdamW learning rate of a learned attacker. It decays linearly to 0.
        num_negatives (`int`, *optional*, defaults to `2048`):
            Number of random tokens from which a learned attacker distinguishes the true tokens in a step. If the
            vocabulary is not larger than this number, all its tokens are used.
        num_candidates (`int`, *optional*, defaults to `32`):
            Number of tokens that each proposing attacker gives to the search at a position.
        gradient_rows (`int`, *optional*, defaults to `4`):
            Number of the victims' examples in each batch of the attack on embedding gradients. 0 disables this attack.
        tail_blocks (`int`, *optional*, defaults to `1`):
            Number of blocks that the client keeps after the second cut. The attack on targets reads the gradients that
            the client sends at this cut.
        target_rows (`int`, *optional*, defaults to `8`):
            Number of the victims' examples in the attack on targets. 0 disables this attack.
        seed (`int`, *optional*, defaults to `0`):
            Seed for drawing examples and for the attackers.
        device (`str`, *optional*, defaults to `"cpu"`):
            Device of the computations, such as `"cuda"`.

    Raises:
        ValueError: If a number is out of range or a name is unknown.

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
                raise ValueError(f"{name}={values} is not allowed. Set it to a non-empty list without duplicates.")
        for name, allowed in (("attackers", ATTACKERS), ("wire_dtypes", WIRE_DTYPES)):
            unknown = [value for value in getattr(self, name) if value not in allowed]
            if unknown:
                raise ValueError(
                    f"{name} contains unknown values: {', '.join(unknown)}. Choose from {', '.join(allowed)}."
                )
        if self.attackers == ["search"]:
            raise ValueError(
                'attackers=["search"] has no proposals to check. Add "nearest", "decoder" or "transformer".'
            )
        if min(self.head_blocks) < 0:
            raise ValueError(f"head_blocks contains {min(self.head_blocks)}. Set all its values to at least 0.")
        for name, minimum in MINIMA.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} is too small. Set it to at least {minimum}.")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate={self.learning_rate} is not positive. Set it to a number greater than 0.")
