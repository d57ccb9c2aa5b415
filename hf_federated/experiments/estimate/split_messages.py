"""Messages of a split model for an optimizer step, a generated token and an average, and their sizes.

The messages are built from tensors on the meta device, and their sizes are those that the ledger records for sequences
without padding. A message with padding also has the attention mask, one bit for each position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_federated.experiments.estimate.results import Exchange, total_bytes
from hf_federated.messages import Serializable
from hf_federated.messages.serialization import packed_size
from hf_federated.security.authenticated_encryption import OVERHEAD_BYTES
from hf_federated.split.layouts import AttentionInputs
from hf_federated.split.messages import Backward, Forward, Gradient, Hidden
from hf_federated.split.model import SplitModel
from hf_federated.split_training import SplitConfig
from hf_federated.split_training.messages import (
    BeginStep,
    BeginStepReply,
    Bundle,
    EndStep,
    EndStepReply,
    PartParameters,
)


# The step that messages name. Its digits count in the size of a message.
STEP = 100
# A cache id of 62 random bits, which nearly always has 18 or 19 digits.
CACHE_ID = 2**61

# Name of the messages that begin and end a step of a networked run. A run in one process does not have them.
CONTROL_MESSAGES = "control messages"

# A message and its answer.
Answered = tuple[Serializable, Serializable]


@dataclass(frozen=True)
class SplitMessages:
    """
    Builds the messages between a client and the server of a split model.

    Args:
        model ([`SplitModel`]): The split model, on the meta device.
        client_id (`str`): Id of the client.
        batch_size (`int`): Number of sequences in a micro-batch.
        length (`int`): Number of tokens of a sequence.
        num_batches (`int`): Number of micro-batches of the client in a step.
        split ([`SplitConfig`]): Strategy and encryption.
    """

    model: SplitModel
    client_id: str
    batch_size: int
    length: int
    num_batches: int
    split: SplitConfig

    def step(self) -> list[Exchange]:
        """The messages of a client in an optimizer step of a networked run."""
        forward, backward = self._micro_batch()
        exchanges = [self._exchange("hidden states", *forward), self._exchange("gradients", *backward)]
        (down, up), (states_down, states_up) = self.networked_step(), total_bytes(exchanges)
        return [*exchanges, Exchange(CONTROL_MESSAGES, down - states_down, up - states_up)]

    def _micro_batch(self) -> tuple[tuple[Forward, Hidden], tuple[Backward, Gradient]]:
        """The messages of a micro-batch, each with its answer."""
        shares_step = self.split.strategy == "client_batch"
        num_targets = self.batch_size * (self.length - 1) if shares_step else None
        states, gradient, name = self._states(self.length), self._states(self.length, True), self.client_id
        forward = self._forward(self.length, training=True, grad=True)
        backward = Backward(name, STEP, 0, gradient, num_targets)
        return (forward, Hidden(name, STEP, 0, states)), (backward, Gradient(name, STEP, 0, gradient))

    def networked_step(self) -> tuple[int, int]:
        """
        Bytes down and up of a step of a networked run, in which messages travel together.

        The messages that end the previous step and begin this step travel with the first hidden states.
        """
        end: Answered = (EndStep(self.client_id, STEP, 0.0), EndStepReply(self.client_id, STEP, 0.0))
        begin = BeginStep(self.client_id, STEP, self.num_batches, self.batch_size * self.num_batches)
        first: list[Answered] = [(begin, BeginStepReply(self.client_id, STEP))]
        bundles: list[list[Answered]] = []
        if self.split.strategy == "client_batch":
            bundles.append([end])
        else:
            first.insert(0, end)
        window = self.split.micro_batches_in_flight
        for start in range(0, self.num_batches, window):
            size = min(window, self.num_batches - start)
            forward, backward = self._micro_batch()
            last = dataclasses.replace(backward[1], squared_norm=0.0)
            is_last = start + size == self.num_batches and self.split.strategy != "client_batch"
            answers = [backward[1]] * (size - is_last) + [last] * is_last
            bundles.append([*(first if start == 0 else []), *([forward] * size)])
            bundles.append([(backward[0], answer) for answer in answers])
        bytes_up = sum(self._bundle([sent for sent, _ in bundle]) for bundle in bundles)
        return sum(self._bundle([answer for _, answer in bundle]) for bundle in bundles), bytes_up

    def _bundle(self, messages: Sequence[Serializable]) -> int:
        """Size of messages that travel together."""
        sizes = [message.num_bytes for message in messages]
        if len(sizes) == 1:
            return sizes[0] + self._overhead
        blobs = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
        return Bundle(self.client_id, blobs).num_bytes + self._overhead

    def prompt(self) -> Exchange:
        """The messages of the forward pass over the prompts, before the first generated token."""
        return self._generation("prompt", self.length, seen=0)

    def token(self) -> Exchange:
        """The messages of one generated token of each sequence."""
        return self._generation("generated token", 1, seen=self.length)

    def parameters(self, state: Mapping[str, torch.Tensor], client_id: str | None = None) -> int:
        """
        Size of the message with the trained parameters of a client, which is sent for an average or a handover.

        Args:
            state (`Mapping[str, torch.Tensor]`): The trained parameters of head and tail.
            client_id (`str`, *optional*): The client that trained the parameters. Empty for an average.
        """
        fields: dict[str, Any] = {
            "client_id": self.client_id if client_id is None else client_id,
            "step": STEP,
            "num_rows": self.batch_size * self.num_batches,
            "state": dict(state),
        }
        # The constructor of the message checks the values of the tensors.
        return packed_size({"kind": PartParameters.kind, "fields": fields})

    def _generation(self, name: str, length: int, seen: int) -> Exchange:
        forward = self._forward(length, training=False, grad=False, cache_id=CACHE_ID, seen=seen)
        return self._exchange(name, forward, Hidden(self.client_id, STEP, 0, self._states(length)), count=1)

    def _forward(self, length: int, **fields: Any) -> Forward:
        seen = fields.get("seen", 0)
        inputs = attention_inputs(self.model, self.batch_size, seen + length)
        positions, contexts = inputs.position_ids, inputs.context_lengths
        return Forward(
            self.client_id,
            STEP,
            0,
            self._states(length),
            self.batch_size,
            position_ids=None if positions is None else positions[..., seen:].int(),
            context_lengths=None if contexts is None else contexts.int(),
            **fields,
        )

    def _states(self, length: int, is_gradient: bool = False) -> dict[str, torch.Tensor]:
        shape = (self.batch_size, length, hidden_size_of(self.model))
        return self.model.boundary.wire.empty({"gradient" if is_gradient else "hidden": shape})

    @property
    def _overhead(self) -> int:
        return OVERHEAD_BYTES if self.split.encryption else 0

    def _exchange(self, name: str, up: Any, down: Any, count: int | None = None) -> Exchange:
        bytes_down, bytes_up = (message.num_bytes + self._overhead for message in (down, up))
        return Exchange(name, bytes_down, bytes_up, self.num_batches if count is None else count)


def hidden_size_of(model: SplitModel) -> int:
    """Return the size of the hidden states at the cut layers."""
    weight = next(model.get_output_embeddings().parameters())
    return weight.shape[-1]


def attention_inputs(model: SplitModel, batch_size: int, length: int) -> AttentionInputs:
    """
    Return the positions and context lengths that a client computes from the tokens, if the model class needs them.

    Args:
        model ([`SplitModel`]): The split model.
        batch_size (`int`): Number of sequences.
        length (`int`): Number of tokens of a sequence.
    """
    runner, config = model.client_head.layout.runner, model.config
    if runner is None:
        return AttentionInputs()
    return runner.attention_inputs(config, example_ids(model, batch_size, length), AttentionInputs(), 0)


def example_ids(model: SplitModel, batch_size: int, length: int) -> torch.Tensor:
    """
    Return token ids of a batch. Half of the tokens belong to the prompt, if the model class distinguishes prompts.

    Args:
        model ([`SplitModel`]): The split model.
        batch_size (`int`): Number of sequences.
        length (`int`): Number of tokens of a sequence.
    """
    ids = torch.zeros(batch_size, length, dtype=torch.int64)
    mask, start = (getattr(model.config, name, None) for name in ("gmask_token_id", "bos_token_id"))
    if model.client_head.layout.runner is not None and mask is not None and start is not None and length > 1:
        ids[:, (length - 1) // 2], ids[:, (length - 1) // 2 + 1] = mask, start
    return ids
