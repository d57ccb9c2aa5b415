"""`MicroBatchRunner`: the micro-batches of an optimizer step of a networked client, whose messages travel together.

A client computes its first blocks for all micro-batches of a window, and sends the hidden states of each as soon as
they are known. It then computes its last blocks and the gradients at the cut layer, of each micro-batch as soon as its
hidden states have arrived, and sends the gradients in the same way. This is the schedule of GPipe (Huang et al., 2019,
https://arxiv.org/abs/1811.06965) with the first blocks, the server and the last blocks as stages. A step therefore
costs two round trips, and not two for each micro-batch, and the client, the server and the network work at the same
time. Gradients are added in the order of the micro-batches, so the results equal those of micro-batches in turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import nn

from ..split.lockstep import LockstepRunner
from ..split.model import SplitModel
from .config import SplitConfig
from .run_link import PostedMessage, RunLink


T = TypeVar("T")


def exchanges_per_step(config: SplitConfig, num_micro_batches: int) -> int:
    """
    Return the number of round trips that a networked client waits for in a step.

    The first and the last step of a client, and parameters for other clients, need further exchanges.

    Args:
        config ([`SplitConfig`]): The strategy, and the number of micro-batches in flight.
        num_micro_batches (`int`): Number of micro-batches that the client accumulates in the step.
    """
    num_windows = math.ceil(num_micro_batches / config.micro_batches_in_flight)
    # A client that shares its step with other clients waits for the norm of the gradients of all of them.
    return 2 * num_windows + (config.strategy == "client_batch")


class MicroBatchRunner(LockstepRunner):
    """
    Runs the micro-batches of a client together.

    Args:
        link ([`RunLink`]): The client's link to the server.
        model ([`SplitModel`]): The client's head and tail. Its boundary must use the link of this runner.
    """

    def __init__(self, link: RunLink, model: SplitModel) -> None:
        # Each micro-batch waits for its own answer when its turn continues.
        super().__init__(lambda posted: posted, "micro-batch")
        self._link = link
        self._model = model
        # Both parts add gradients to a shared parameter, such as tied embeddings. The gradients of each turn are kept
        # until the micro-batch has finished, and added in the order of the micro-batches.
        self._shared: list[nn.Parameter] = []
        self._gradients: dict[str, list[list[torch.Tensor | None]]] = {}
        self._totals: list[torch.Tensor | None] = []
        self._is_one_pass = True

    def exchange(self, name: str, message: bytes) -> bytes | memoryview:
        self._check_not_cancelled()
        posted: PostedMessage = super().exchange(name, self._link.post(message))
        return posted.answer()

    def run_all(self, functions: Sequence[Callable[[], T]], window: int) -> list[T]:
        """
        Run the micro-batches of a step.

        Args:
            functions (`Sequence[Callable]`): The forward and backward pass of each micro-batch.
            window (`int`): Number of micro-batches in flight.

        Returns:
            `list`: The return values.

        Raises:
            Exception: The error of the first micro-batch that fails.
        """
        results: list[T] = []
        for start in range(0, len(functions), window):
            group = functions[start : start + window]
            if len(group) == 1:
                results.append(group[0]())
                continue
            boundary = self._model.boundary
            defers_backward, boundary.defers_backward = boundary.defers_backward, True
            self._begin(is_one_pass=not defers_backward)
            try:
                results += self.run({str(start + number): function for number, function in enumerate(group)}).values()
                for parameter, total in zip(self._shared, self._totals, strict=True):
                    parameter.grad = total
            finally:
                boundary.defers_backward = defers_backward
                self._gradients, self._totals = {}, []
                self._link.abandon()
        return results

    def _begin(self, is_one_pass: bool) -> None:
        """
        Prepare a window of micro-batches.

        Args:
            is_one_pass (`bool`): Whether the backward pass of a micro-batch in turn goes through both parts at once.
                Autograd then adds the gradients of both parts to each other first.
        """
        model = self._model
        tail = set(map(id, model.client_tail.parameters()))
        shared = [parameter for parameter in model.client_head.parameters() if id(parameter) in tail]
        self._shared = [parameter for parameter in shared if parameter.requires_grad]
        self._totals = [parameter.grad for parameter in self._shared]
        self._is_one_pass = is_one_pass

    def _enter(self, name: str) -> None:
        for parameter in self._shared:
            parameter.grad = None

    def _leave(self, name: str) -> None:
        self._gradients.setdefault(name, []).append([parameter.grad for parameter in self._shared])

    @torch.no_grad()
    def _finish(self, name: str) -> None:
        turns = self._gradients.pop(name)
        for number, total in enumerate(self._totals):
            gradients = [gradient for turn in turns if (gradient := turn[number]) is not None]
            if self._is_one_pass and gradients:
                gradients = [functools.reduce(torch.add, gradients)]
            for gradient in gradients:
                total = gradient if total is None else total.add_(gradient)
            self._totals[number] = total


class MicroBatchLink:
    """
    A client's link to the server, on which the messages of micro-batches wait for each other.

    Args:
        link ([`RunLink`]): The link to the server.
        runner ([`MicroBatchRunner`]): The runner of the micro-batches.
    """

    def __init__(self, link: RunLink, runner: MicroBatchRunner) -> None:
        self._link = link
        self._runner = runner

    def exchange(self, blob: bytes) -> bytes | memoryview:
        """Send a message and return the answer. Raises the errors of [`RunLink.exchange`]."""
        name = self._runner.name_of_thread()
        return self._link.exchange(blob) if name is None else self._runner.exchange(name, blob)

    def end_step(self) -> None:
        """Report the end of an optimizer step."""
        self._link.end_step()
