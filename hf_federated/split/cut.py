"""Position of the cuts of a split model: the number of blocks that each party holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..utils.fields import check_fields


Role = Literal["head", "body", "tail"]
ROLES: tuple[Role, ...] = ("head", "body", "tail")


@dataclass(frozen=True)
class Cut:
    """
    Number of blocks in the head, the body and the tail of a split model.

    Args:
        num_blocks (`int`): Number of blocks of the full model.
        head_blocks (`int`, *optional*, defaults to `1`):
            Number of first blocks, which the client keeps together with the embedding. With 0 the client sends the
            embeddings themselves, from which the server can read the text. Use 0 for audits only.
        tail_blocks (`int`, *optional*, defaults to `1`):
            Number of last blocks, which the client keeps. At least 1.

    Raises:
        ValueError: If a number is out of range, or no block is left for the server.

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
        check_fields(self, "A cut is invalid: ")
        if self.head_blocks < 0:
            raise ValueError(f"head_blocks={self.head_blocks}, but it must be at least 0.")
        if self.tail_blocks < 1:
            raise ValueError(
                f"tail_blocks={self.tail_blocks}, but it must be at least 1. Without a client block after the "
                "server's blocks, the server holds the hidden states from which the model predicts the labels."
            )
        if self.head_blocks + self.tail_blocks >= self.num_blocks:
            raise ValueError(
                f"head_blocks={self.head_blocks} and tail_blocks={self.tail_blocks} leave no block for the server: "
                f"the model has {self.num_blocks} blocks. Lower head_blocks or tail_blocks."
            )

    def blocks(self, role: Role) -> range:
        """Return the indices of a part's blocks in the full model."""
        first_of_tail = self.num_blocks - self.tail_blocks
        return {
            "head": range(self.head_blocks),
            "body": range(self.head_blocks, first_of_tail),
            "tail": range(first_of_tail, self.num_blocks),
        }[role]
