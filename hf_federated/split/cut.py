"""Where a model is cut: how many blocks each party holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


Role = Literal["head", "body", "tail"]
ROLES: tuple[Role, ...] = ("head", "body", "tail")


@dataclass(frozen=True)
class Cut:
    """
    How many blocks of a model lie before, on and behind the server.

    Args:
        num_blocks (`int`): Blocks of the whole model.
        head_blocks (`int`, *optional*, defaults to `1`):
            First blocks, which the client keeps behind the embedding. 0 sends embeddings themselves, from which a
            server reads the text: for audits only.
        tail_blocks (`int`, *optional*, defaults to `1`): Last blocks, which the client keeps; at least 1.

    Raises:
        ValueError: If a number is out of range, or the server is left without a block.

    Example:

    ```python
    >>> from hf_federated.split import Cut

    >>> cut = Cut(num_blocks=30, head_blocks=1, tail_blocks=1)
    >>> cut.blocks("head"), cut.blocks("body"), cut.blocks("tail")
    (range(0, 1), range(1, 29), range(29, 30))
    ```
    """

    num_blocks: int
    head_blocks: int = 1
    tail_blocks: int = 1

    def __post_init__(self) -> None:
        if self.head_blocks < 0:
            raise ValueError(f"head_blocks must not be negative, got {self.head_blocks}.")
        if self.tail_blocks < 1:
            raise ValueError(
                f"tail_blocks must be at least 1, got {self.tail_blocks}: without a block behind the server's, the "
                "server would hold the hidden states that the labels are predicted from."
            )
        if self.head_blocks + self.tail_blocks >= self.num_blocks:
            raise ValueError(
                f"A model of {self.num_blocks} blocks cannot leave {self.head_blocks} + {self.tail_blocks} with the "
                f"client: the server needs at least one. Lower head_blocks or tail_blocks."
            )

    def blocks(self, role: Role) -> range:
        """The numbers, in the whole model, of the blocks of a part."""
        first_of_tail = self.num_blocks - self.tail_blocks
        return {
            "head": range(self.head_blocks),
            "body": range(self.head_blocks, first_of_tail),
            "tail": range(first_of_tail, self.num_blocks),
        }[role]
