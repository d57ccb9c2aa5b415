"""`EncodeUpdate`: the way up of `exchange_codec`: the change of a client, with error feedback."""

from __future__ import annotations

import dataclasses

from transformers.utils import logging

from ..codecs import Codec
from ..messages import ClientUpdate, Fit
from ..messages.validation import InvalidUpdateError
from ..utils.weighted_mean import State
from .base import Memory, Postprocessor
from .encoded_changes import add_changes, encode_changes


logger = logging.get_logger(__name__)


class EncodeUpdate(Postprocessor):
    """
    Send the encoded change of a client: `Δ = x_i − x̂ + e_i`, `x_i ← x + C(Δ)`, `e_i ← Δ − C(Δ)`.

    `x` is the global state, `x̂` the state that the client received, and `x_i` the state that it trained. The client
    keeps the error `e_i` ([Seide et al.,
    2014](https://www.isca-archive.org/interspeech_2014/seide14_interspeech.html), [Karimireddy et al.,
    2019](https://arxiv.org/abs/1901.09847)). Over the rounds whose updates the server uses, the sum of the sent
    changes is the sum of the changes, up to the last `e_i`. After an update that the server did not use, the client
    returns to `e_i` of the last used update.

    `exchange_codec` of [`FederatedConfig`] adds this step. Integer tensors and `extra` are not encoded.

    Args:
        codec ([`~hf_federated.codecs.Codec`]): The codec `C`.
        error_feedback (`bool`, *optional*, defaults to `True`): Whether the client keeps `e_i`. The error has the size
            of an update.

    Raises:
        ValueError: In a run, if the memory of a client belongs to another round than the message of the server.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import TopK
    >>> from hf_federated.messages import ClientUpdate, Fit
    >>> from hf_federated.postprocessing import EncodeUpdate

    >>> step, memory = EncodeUpdate(TopK(0.5)), {}
    >>> sent = Fit(round=0, client_id="a", seed=0, state={"w": torch.zeros(2)})
    >>> update = ClientUpdate(0, "a", {"w": torch.tensor([1.0, 3.0])}, num_examples=1, num_tokens=0, num_steps=1)
    >>> step.server_receive(step.client_send(update, sent, memory), sent.state, {}).state["w"]
    tensor([0., 3.])
    >>> memory["next"]["w"]["residual"]["w"]
    tensor([1., 0.])
    ```
    """

    # Only the client has a memory.
    keeps_server_memory = False

    def __init__(self, codec: Codec, error_feedback: bool = True) -> None:
        self.codec = codec
        self.error_feedback = error_feedback

    def client_receive(self, message: Fit, memory: Memory) -> Fit:
        accepted = message.accepted_round
        following, sent_round = memory.pop("next", None), memory.pop("sent_round", None)
        if accepted is not None and accepted == sent_round:
            memory.update(kept=following, round=accepted)
        elif accepted is not None and not memory:
            logger.warning(
                f"Client {message.client_id!r}, round {message.round + 1}: the client has no memory of its update of "
                f"round {accepted + 1}, so what the codec lost in earlier rounds is not sent. Keep the `state_dir` of "
                "a client that restarts."
            )
            memory.update(kept={}, round=accepted)
        if accepted != memory.get("round"):
            raise ValueError(
                f"Client {message.client_id!r}, round {message.round + 1}: the memory of EncodeUpdate, of round "
                f"{memory.get('round')}, does not belong to the message with accepted_round={accepted}. Resume the "
                "server and the client from the same checkpoint, or start a new run."
            )
        return message

    def client_send(self, update: ClientUpdate, message: Fit, memory: Memory) -> ClientUpdate:
        kept = memory.get("kept") or {}
        state, following = encode_changes(self.codec, update.state, message.state, kept, self.error_feedback)
        memory.update(next=following, sent_round=message.round)
        return dataclasses.replace(update, state=state)

    def server_receive(self, update: ClientUpdate, state: State, memory: Memory) -> ClientUpdate:
        try:
            return dataclasses.replace(update, state=add_changes(self.codec, update.state, state))
        except ValueError as error:
            raise InvalidUpdateError(f"Client {update.client_id!r}, round {update.round + 1}: {error}") from error
