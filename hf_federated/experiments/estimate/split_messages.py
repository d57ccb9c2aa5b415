"""Messages of a split model for an optimizer step, a generated token and an average, and their sizes.

The messages are built from tensors on the meta device, and their sizes are those that the ledger records for sequences
without padding. A message with padding also has the attention mask, one bit for each position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_federated.experiments.estimate.round_messages import Exchange
from hf_federated.messages.serialization import packed_size
from hf_federated.security.authenticated_encryption import OVERHEAD_BYTES
from hf_federated.split.layouts import AttentionInputs
from hf_federated.split.messages import Backward, Forward, Gradient, Hidden
from hf_federated.split.model import SplitModel
from hf_federated.split_training.messages import (
    BeginStep,
    BeginStepReply,
    EndStep,
    EndStepReply,
    PartParameters,
)


# The step that messages name. Its digits count in the size of a message.
STEP = 100
# A cache id of 62 random bits, which nearly always has 18 or 19 digits.
CACHE_ID = 2**61


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
        sends_targets (`bool`): Whether the client sends its number of target tokens, as with `"client_batch"`.
        encryption (`bool`): Whether the messages are encrypted.
    """

    model: SplitModel
    client_id: str
    batch_size: int
    length: int
    num_batches: int
    sends_targets: bool
    encryption: bool

    def step(self) -> list[Exchange]:
        """The messages with hidden states and gradients of a client in an optimizer step."""
        num_targets = self.batch_size * (self.length - 1) if self.sends_targets else None
        forward = self._forward(self.length, training=True, grad=True)
        gradient = self._states(self.length)
        backward = Backward(self.client_id, STEP, 0, gradient, num_targets)
        return [
            self._exchange("hidden states", forward, Hidden(self.client_id, STEP, 0, self._states(self.length))),
            self._exchange("gradients", backward, Gradient(self.client_id, STEP, 0, gradient)),
        ]

    def control(self) -> Exchange:
        """The messages that begin and end a step of a networked run, together."""
        begin = BeginStep(self.client_id, STEP, self.num_batches, self.batch_size * self.num_batches)
        messages = (begin, EndStep(self.client_id, STEP, 0.0))
        replies = (BeginStepReply(self.client_id, STEP), EndStepReply(self.client_id, STEP, 0.0))
        overhead = 2 * self._overhead
        return Exchange(
            "begin and end of the step",
            sum(reply.num_bytes for reply in replies) + overhead,
            sum(message.num_bytes for message in messages) + overhead,
        )

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

    def _states(self, length: int) -> dict[str, torch.Tensor]:
        layout = self.model.boundary.wire.layout(hidden_size_of(self.model))
        return {
            name: torch.empty(self.batch_size * length, *shape, dtype=dtype, device="meta")
            for name, (dtype, shape) in layout.items()
        }

    @property
    def _overhead(self) -> int:
        return OVERHEAD_BYTES if self.encryption else 0

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
