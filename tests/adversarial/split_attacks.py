"""The attacks of a hostile client of a networked split model, and the link that carries them out."""

from __future__ import annotations

import functools
import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from networked import DirectLink, unbundled

from hf_federated.messages.serialization import FlatTree, pack, unpack
from hf_federated.split.messages import Backward, Forward
from hf_federated.split_training.messages import (
    BeginStep,
    Bundle,
    EndStep,
    FetchEnvelope,
    Finish,
    Join,
    LateReply,
    SendEnvelope,
    as_tensor,
    read_message,
)


HOSTILE = "client 1"
# Replaces a serialized message of the hostile client: arguments are the link, the message and its bytes. Returns the
# bytes to send, or `None` to send the message unchanged.
Attack = Callable[["HostileLink", Any, bytes], bytes | None]
ATTACKS: dict[str, Attack] = {}


class HostileLink(DirectLink):
    """
    Link of the hostile client.

    Attributes:
        sent (`list[bytes]`): The messages that the link sent.
    """

    def __init__(self, server, client_id, attack) -> None:
        super().__init__(server, client_id)
        self.attack = attack
        self.sent: list[bytes] = []

    def exchange(self, blob: bytes) -> bytes:
        messages = unbundled(blob)
        if self.client_id == HOSTILE:
            messages = [self.attack(self, read_message(message), message) or message for message in messages]
        self.sent += messages
        if len(messages) > 1:
            return super().exchange(Bundle(self.client_id, list(map(as_tensor, messages))).to_bytes())
        return super().exchange(messages[0])


def attack(kind: type | None = None, step: int = 0) -> Callable[[Attack], Attack]:
    """Register an attack on the messages of a kind from a step on."""

    def register(function: Attack) -> Attack:
        @functools.wraps(function)
        def run(link: HostileLink, message: Any, blob: bytes) -> bytes | None:
            if (kind is None or isinstance(message, kind)) and getattr(message, "step", step) >= step:
                return function(link, message, blob)
            return None

        ATTACKS[function.__name__.replace("_", " ")] = run
        return run

    return register


def with_fields(blob: bytes, **changes: Any) -> bytes:
    """Change fields of a serialized message without the checks of its class. `...` removes a field."""
    tree = unpack(blob)
    if not isinstance(tree, FlatTree):
        fields = {name: value for name, value in {**tree["fields"], **changes}.items() if value is not ...}
        return pack({**tree, "fields": fields})
    values = {name: value for name, value in tree.items() if name.partition(".")[0] not in changes}
    for name, value in changes.items():
        values |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    scalars = {name: json.dumps(value) for name, value in values.items() if name not in tensors and value is not ...}
    return safetensors.torch.save(tensors, scalars)


def with_values(message: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> bytes:
    """Change the hidden states or gradients of a message."""
    encoded = {**getattr(message, name), "values": change(getattr(message, name)["values"])}
    return with_fields(message.to_bytes(), **{name: encoded})


# ---- Names, order and repetition


@attack(BeginStep)
def name_of_another_client(link, message, blob):
    return with_fields(blob, client_id="client 0")


@attack(BeginStep)
def unknown_name(link, message, blob):
    return with_fields(blob, client_id="client 7")


@attack(BeginStep)
def message_in_the_name_of_another_client_and_then_an_honest_one(link, message, blob):
    with pytest.raises(ValueError, match="in the name of 'client 0'"):
        link.server.answer(HOSTILE, with_fields(blob, client_id="client 0"))


@attack(EndStep)
def future_step(link, message, blob):
    return with_fields(blob, step=10**6)


@attack(EndStep, step=1)
def past_step(link, message, blob):
    return with_fields(blob, step=0)


@attack(EndStep)
def future_step_beyond_64_bits(link, message, blob):
    return with_fields(blob, step=2**70)


@attack(Forward)
def micro_batch_out_of_order(link, message, blob):
    return with_fields(blob, micro_step=3)


@attack(EndStep)
def step_ended_twice(link, message, blob):
    link.server.answer(HOSTILE, blob)
    return blob


@attack(BeginStep)
def step_begun_twice(link, message, blob):
    if message.num_batches:
        link.server.answer(HOSTILE, blob)
    return blob


@attack(Backward)
def end_of_step_without_a_gradient(link, message, blob):
    return EndStep(HOSTILE, message.step, 1.0).to_bytes()


@attack(Backward)
def gradient_sent_twice(link, message, blob):
    link.server.answer(HOSTILE, blob)
    return blob


@attack(Forward, step=1)
def replay_of_an_old_message(link, message, blob):
    return next(sent for sent in link.sent if isinstance(read_message(sent), Forward))


@attack(BeginStep, step=1)
def joining_again(link, message, blob):
    return next(sent for sent in link.sent if isinstance(read_message(sent), Join))


@attack(BeginStep)
def leaving_at_a_future_step(link, message, blob):
    return Finish(HOSTILE, 10**9).to_bytes()


@attack(BeginStep, step=1)
def leaving_early(link, message, blob):
    return Finish(HOSTILE, message.step).to_bytes()


# ---- Fields


@attack(BeginStep)
def wrong_kind(link, message, blob):
    return LateReply(HOSTILE, message.step).to_bytes()


@attack(BeginStep)
def unknown_kind(link, message, blob):
    return pack({**unpack(blob), "kind": "labels"})


@attack(BeginStep)
def missing_field(link, message, blob):
    return with_fields(blob, num_rows=...)


@attack(Forward)
def undeclared_field(link, message, blob):
    return with_fields(blob, labels=torch.zeros(2, 7, dtype=torch.long))


@attack(BeginStep)
def text_in_a_number(link, message, blob):
    return with_fields(blob, num_batches="1")


@attack(BeginStep)
def fraction_in_a_count(link, message, blob):
    return with_fields(blob, num_rows=0.5)


@attack(BeginStep)
def truth_value_in_a_count(link, message, blob):
    return with_fields(blob, num_batches=True)


@attack(Forward)
def list_in_place_of_a_tensor(link, message, blob):
    return with_fields(blob, hidden=[1.0])


@attack(BeginStep)
def number_of_examples_of_a_trillion(link, message, blob):
    return with_fields(blob, num_rows=10**12)


@attack(BeginStep)
def number_of_micro_batches_of_a_trillion(link, message, blob):
    return with_fields(blob, num_batches=10**12)


@attack(Backward)
def number_of_target_tokens_of_a_trillion(link, message, blob):
    return with_fields(blob, num_targets=10**12)


@attack(Join)
def number_of_steps_of_a_trillion(link, message, blob):
    return with_fields(blob, num_steps=10**12)


@attack(Join)
def other_settings(link, message, blob):
    return with_fields(blob, digest="0" * 64)


@attack(Forward)
def garbage(link, message, blob):
    return random.Random(0).randbytes(len(blob))


@attack(Forward)
def no_bytes_at_all(link, message, blob):
    return b"\0"


@attack(Forward)
def cut_message(link, message, blob):
    return blob[: len(blob) // 2]


@attack(Forward)
def pickle_in_place_of_a_message(link, message, blob):
    return pickle.dumps({"kind": "split_forward"})


# ---- Hidden states and gradients


@attack(Forward)
def hidden_states_of_nan(link, message, blob):
    return with_values(message, "hidden", lambda values: values * math.nan)


@attack(Forward)
def hidden_states_of_1e30(link, message, blob):
    return with_values(message, "hidden", lambda values: torch.full_like(values, 1e30))


@attack(Forward)
def hidden_states_that_overflow(link, message, blob):
    return with_values(message, "hidden", lambda values: torch.full_like(values, 3e38))


@attack(Forward)
def hidden_states_of_another_size(link, message, blob):
    return with_values(message, "hidden", lambda values: values[:, :-1].contiguous())


@attack(Forward)
def hidden_states_of_another_dtype(link, message, blob):
    return with_values(message, "hidden", lambda values: values.to(torch.bfloat16))


@attack(Forward)
def hidden_states_with_double_precision(link, message, blob):
    return with_values(message, "hidden", lambda values: values.double())


@attack(Forward)
def batch_of_ten_thousand_sequences(link, message, blob):
    hidden = {"values": message.hidden["values"].repeat(5000, 1)}
    return with_fields(blob, hidden=hidden, batch_size=10_000, mask=None, mask_width=0)


@attack(Forward)
def sequence_beyond_the_positions_of_the_model(link, message, blob):
    hidden = {"values": message.hidden["values"].repeat(100, 1)}
    return with_fields(blob, hidden=hidden, mask=None, mask_width=0)


@attack(Forward)
def positions_out_of_range(link, message, blob):
    return with_fields(blob, position_ids=torch.full((1, 7), 2**31 - 1, dtype=torch.int32))


@attack(Backward)
def gradients_of_nan(link, message, blob):
    return with_values(message, "gradient", lambda values: values * math.nan)


@attack(Backward)
def gradients_of_1e30(link, message, blob):
    return with_values(message, "gradient", lambda values: torch.full_like(values, 1e30))


@attack(Backward)
def gradients_that_overflow(link, message, blob):
    return with_values(message, "gradient", lambda values: torch.full_like(values, 3e38))


@attack(Backward, step=2)
def gradients_of_1e30_after_honest_steps(link, message, blob):
    return with_values(message, "gradient", lambda values: torch.full_like(values, 1e30))


@attack(Backward)
def gradients_that_grow_tenfold_in_each_step(link, message, blob):
    return with_values(message, "gradient", lambda values: values * 1000.0 * 10.0**message.step)


@attack(Backward)
def gradients_of_zero_target_tokens(link, message, blob):
    changed = with_values(message, "gradient", lambda values: values * 1e6)
    return with_fields(changed, num_targets=0 if message.num_targets is not None else None)


@attack(Backward)
def gradients_of_another_shape(link, message, blob):
    return with_values(message, "gradient", lambda values: values[:7])


# ---- Norms


@attack(EndStep)
def norm_of_1e15(link, message, blob):
    return with_fields(blob, squared_norm=1e30)


@attack(EndStep, step=2)
def norm_of_1e15_after_honest_steps(link, message, blob):
    return with_fields(blob, squared_norm=1e30)


@attack(EndStep)
def largest_norm_of_float64(link, message, blob):
    return with_fields(blob, squared_norm=1.7e308)


@attack(EndStep)
def norm_of_nan(link, message, blob):
    return with_fields(blob, squared_norm=math.nan)


@attack(EndStep)
def infinite_norm(link, message, blob):
    return with_fields(blob, squared_norm=math.inf)


@attack(EndStep)
def negative_norm(link, message, blob):
    return with_fields(blob, squared_norm=-1.0)


@attack(EndStep)
def norm_that_grows_tenfold_in_each_step(link, message, blob):
    return with_fields(blob, squared_norm=message.squared_norm * 1e4 * 100.0**message.step)


# ---- Absence


@attack(Backward)
def disconnection_within_a_step(link, message, blob):
    raise ConnectionError("gone")


@attack(EndStep, step=1)
def disconnection_at_the_end_of_a_step(link, message, blob):
    link.server.client_lost(HOSTILE)
    raise ConnectionError("gone")


@attack(Join)
def disconnection_before_the_first_step(link, message, blob):
    raise ConnectionError("gone")


@attack(SendEnvelope)
def disconnection_in_place_of_parameters(link, message, blob):
    raise ConnectionError("gone")


@attack(SendEnvelope)
def parameters_for_an_unknown_client(link, message, blob):
    return with_fields(blob, recipient="client 7")


@attack(SendEnvelope)
def parameters_that_cannot_be_decrypted(link, message, blob):
    return with_fields(blob, sealed=torch.zeros(100, dtype=torch.uint8))


@attack(FetchEnvelope)
def parameters_of_itself(link, message, blob):
    return with_fields(blob, sender=HOSTILE)


@attack(FetchEnvelope)
def parameters_of_a_step_in_the_far_future(link, message, blob):
    return with_fields(blob, step=10**12)


@attack(FetchEnvelope)
def parameters_of_the_same_step_twice(link, message, blob):
    DirectLink.exchange(link, blob)
    return None
