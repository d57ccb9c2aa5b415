"""What clients hand over to one another, or to whoever averages: the parameters that they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..messages import Packed


@dataclass(frozen=True)
class PartParameters(Packed):
    """
    Client to client, or to whoever averages: what trains of a head and a tail.

    It is not for the server that holds the body: with a client's head it could read that client's hidden states.

    Args:
        client_id (`str`): Whose.
        step (`int`): Optimizer steps done before.
        num_rows (`int`): Rows trained since the parts were averaged last.
        state (`dict[str, torch.Tensor]`): The parameters, by name.
    """

    kind: ClassVar[str] = "split_parameters"

    client_id: str
    step: int
    num_rows: int
    state: dict[str, torch.Tensor]

    def __post_init__(self) -> None:
        for name, kind in (("client_id", str), ("step", int), ("num_rows", int), ("state", dict)):
            if type(getattr(self, name)) is not kind:
                raise ValueError(f"{self.kind}: {name} must be {kind.__name__}.")
        if self.num_rows < 0:
            raise ValueError(f"{self.kind}: num_rows of client {self.client_id!r} is {self.num_rows}.")
        for name, value in self.state.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{self.kind}: {name!r} is no tensor.")
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(
                    f"{self.kind}: {name!r} of client {self.client_id!r} holds NaN or infinite values at step "
                    f"{self.step}. Lower the learning rate, or set max_grad_norm."
                )
