"""What clients hand over to one another, or to whoever averages: the parameters that they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..messages import Packed


# By which parts are weighed: with any number of clients the sums of a mean stay numbers, also those of half precision.
MAX_ROWS = 10**9


@dataclass(frozen=True)
class PartParameters(Packed):
    """
    Client to client, or to whoever averages: what trains of a head and a tail.

    It is not for the server that holds the body: with a client's head it could read that client's hidden states.

    Args:
        client_id (`str`): Whose.
        step (`int`): Optimizer steps done before.
        num_rows (`int`): Rows trained since the parts were averaged last, at most `MAX_ROWS`. Clients take each
            other's word for it: who averages does not see the rows.
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
        if not 0 <= self.num_rows <= MAX_ROWS:
            raise ValueError(
                f"{self.kind}: num_rows of client {self.client_id!r} is {self.num_rows}, which is to be from 0 to "
                f"{MAX_ROWS}."
            )
        for name, value in self.state.items():
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{self.kind}: {name!r} is no tensor.")
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(
                    f"{self.kind}: {name!r} of client {self.client_id!r} holds NaN or infinite values at step "
                    f"{self.step}. Lower the learning rate, or set max_grad_norm."
                )
