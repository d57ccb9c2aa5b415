"""`EncodeState`: the way down of `exchange_codec`: changes of the global state since the last round."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..codecs import Codec
from ..messages import Fit
from ..methods import Accumulator
from ..utils.weighted_mean import State
from .base import Memory, Postprocessor
from .encoded_changes import add_changes, checksum, encode_changes


# Name of the setting of a message with the checksum of the state to which its changes are added.
CHECKSUM = "encode_state"


class EncodeState(Postprocessor):
    """
    Send the encoded change of the global state: `x̂_t = x̂_{t−1} + C(x_t − x̂_{t−1})`.

    `x_t` is the global state of round `t`, and `x̂_t` the state that the clients decode, which is the reference of the
    next round. The error of a round is therefore part of the next change and does not add up. All clients of a round
    train from the same `x̂_t`. The server keeps one copy of it.

    A client receives the change if the server used its update of the last round. Otherwise its reference is old, and
    it receives all of `x̂_t`. The first round sends `x̂_0 = x_0`.

    `exchange_codec` of [`FederatedConfig`] adds this step.

    Args:
        codec ([`~hf_federated.codecs.Codec`]): The codec `C`.

    Raises:
        ValueError: In a run, if a client has lost the reference to which a change belongs.

    Relations:
        [`QuantizeChanges`] keeps a reference for each client. Its clients receive a change after any number of rounds,
        and the memory of the server grows with the number of clients.

    Example:

    ```python
    >>> import torch
    >>> from hf_federated.codecs import Int8
    >>> from hf_federated.messages import Fit
    >>> from hf_federated.postprocessing import EncodeState

    >>> step, shared = EncodeState(Int8()), {}
    >>> first = Fit(round=0, client_id="a", seed=0, state={"w": torch.zeros(512)})
    >>> second = Fit(round=1, client_id="a", seed=0, state={"w": torch.ones(512)}, accepted_round=0)
    >>> [step.server_send_shared(message, {}, shared).state["w"].nbytes for message in (first, second)]
    [2048, 520]
    ```
    """

    # The server has one memory for all clients.
    keeps_server_memory = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def server_send_shared(self, message: Fit, memory: Memory, shared: Memory) -> Fit:
        self._advance(message.state, message.round, shared)
        if message.accepted_round is None or message.accepted_round != shared["last_round"]:
            return dataclasses.replace(message, state=shared["state"])
        settings = {**message.settings, CHECKSUM: shared["checksum"]}
        return dataclasses.replace(message, state=shared["changes"], settings=settings)

    def on_sums(self, sums: Accumulator, round: Any, memory: Memory) -> Accumulator:
        # A process without a client in the round has sent no message.
        self._advance(round.state, round.number, memory)
        return sums

    def _advance(self, state: State, number: int, shared: Memory) -> None:
        """Compute the reference of a round, once."""
        if shared.get("round") == number:
            return
        known, last = shared.get("state", {}), shared.get("round")
        changes, kept = encode_changes(self.codec, state, known, shared.get("codec", {}))
        shared.update(
            round=number,
            last_round=last,
            state=add_changes(self.codec, changes, known),
            # The first round sends all of the state.
            changes=changes if known else {},
            checksum=checksum(known),
            codec=kept,
        )

    def client_receive(self, message: Fit, memory: Memory) -> Fit:
        sent, sent_round = memory.pop("sent", None), memory.pop("sent_round", None)
        if sent is not None and message.accepted_round == sent_round:
            memory["state"] = add_changes(self.codec, sent, memory["state"]) if "state" in memory else sent
        if (expected := message.settings.get(CHECKSUM)) is None:
            # All of the state. An older reference is not needed any more.
            memory.clear()
            memory.update(sent=message.state, sent_round=message.round)
            return message
        known = memory.get("state", {})
        if expected != checksum(known):
            raise ValueError(
                f"Client {message.client_id!r}, round {message.round + 1}: the client lacks the state to which the "
                f"changes of the message belong (accepted_round={message.accepted_round}). The server sends all of "
                "the state in the next round. Keep the `state_dir` of a client that restarts."
            )
        memory.update(sent=message.state, sent_round=message.round)
        return dataclasses.replace(message, state=add_changes(self.codec, message.state, known))
