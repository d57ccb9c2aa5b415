"""Gaussian noise on client updates."""

from __future__ import annotations

import dataclasses
import secrets
from typing import ClassVar

import torch
import torch.distributed as dist

from ..messages import ClientUpdate, Fit
from ..utils.arguments import require
from ..utils.weighted_mean import wide_dtype
from .base import Memory, Postprocessor


class GaussianNoise(Postprocessor):
    """
    Add Gaussian noise to a client update: `x_i ← x_i + N(0, σ² I)`.

    Use it if the exact values of one update must not reach the server. `hf-federated audit` measures what it hides.

    Place the step after [`ClipUpdate`], which bounds the influence of a client before the noise (McMahan et al.,
    Learning Differentially Private Recurrent Language Models, ICLR 2018). The library does not account for a privacy
    budget, and the step alone is no claim of differential privacy.

    The server knows the seed of a client's message. By default, the noise is therefore drawn from a generator that the
    operating system seeds, and two runs differ. With `reproducible=True` the noise depends on the message's seed: two
    runs are equal, but the server can compute the noise and subtract it.

    Args:
        std (`float`): Standard deviation `σ` of the noise of each value, positive.
        reproducible (`bool`, *optional*, defaults to `False`): Whether the noise depends on the seed of the message.
            Set it in simulations only. A launch of several processes needs it, because each process computes the
            noise of a client.

    Raises:
        ValueError: If `std` is not positive, or in a launch of several processes without `reproducible=True`.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated import GaussianNoise
    >>> from hf_federated.messages import ClientUpdate, Fit

    >>> sent = Fit(round=0, client_id="a", seed=0, state={"w": torch.zeros(1000)})
    >>> update = ClientUpdate(0, "a", {"w": torch.ones(1000)}, num_examples=1, num_tokens=0, num_steps=1)
    >>> noisy = GaussianNoise(std=0.1).client_send(update, sent, {}).state["w"]
    >>> round(float(noisy.std()), 1)
    0.1
    ```
    """

    adds_noise: ClassVar[bool] = True

    def __init__(self, std: float, reproducible: bool = False) -> None:
        require("std", std, std > 0, "positive")
        self.std = std
        self.reproducible = reproducible

    def client_send(self, update: ClientUpdate, message: Fit, memory: Memory) -> ClientUpdate:
        if not self.reproducible and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"GaussianNoise draws different noise in each of the {dist.get_world_size()} processes. Set"
                " reproducible=True, or use one process."
            )
        # The global generator is seeded from the message, see `Postprocessor`.
        seed = int(torch.randint(2**62, ()).item()) if self.reproducible else secrets.randbits(62)
        generator = torch.Generator().manual_seed(seed)
        noisy = {
            # Drawn in float32 or wider on the CPU, so that the noise does not depend on the device or on the dtype.
            name: (value + self.std * _normal(value, generator)).to(value.dtype)
            for name, value in update.state.items()
            if value.is_floating_point()
        }
        return dataclasses.replace(update, state={**update.state, **noisy})


def _normal(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(value.shape, generator=generator, dtype=wide_dtype(value.dtype)).to(value.device)
