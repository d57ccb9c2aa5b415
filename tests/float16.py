"""A `Trainer` that trains in float16 on the CPU.

On a CPU, `accelerate` creates no gradient scaler. This trainer adds the one of torch to its accelerator, where
`accelerate` keeps the scaler of a GPU, and enables the autocast to float16.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import Trainer, TrainerCallback


class Float16Trainer(Trainer):
    """
    Needs the training argument `fp16=True`.

    With the initial scale, the gradients of the tiny model overflow in more steps than a round has. The scale grows
    again after two steps without an overflow.
    """

    init_scale: ClassVar[float] = 2.0**24
    growth_interval: ClassVar[int] = 2

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        assert self.accelerator.mixed_precision == "fp16"
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=self.init_scale, growth_interval=self.growth_interval
        )


class ScaleRecorder(TrainerCallback):
    """Records the loss scale before each step, and whether the optimizer skipped the step."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.scales.append(optimizer.scaler.get_scale())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any, **kwargs: Any) -> None:
        self.skipped.append(optimizer.step_was_skipped)
