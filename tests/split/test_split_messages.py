"""Client and server exchange only the declared messages."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from decoders import batch, decoder
from peft import LoraConfig
from safetensors.torch import load

from hf_federated import SplitModel
from hf_federated.codecs.bits import pack_mask, unpack_mask
from hf_federated.messages.serialization import FlatTree, pack, unpack
from hf_federated.split import Backward, BodyServer, Forward, Gradient, Hidden, LocalLink, Wire
from hf_federated.split.agreement import RefusedAnswerError
from hf_federated.split.wire import WIRE_DTYPES


def traffic(split: SplitModel, **inputs: torch.Tensor) -> list[bytes]:
    """Return the messages of a forward and a backward pass, in order."""
    blobs: list[bytes] = []
    split.boundary.link = LocalLink(split.boundary.link.server, lambda *pair: blobs.extend(pair))
    split(**inputs).loss.backward()
    return blobs


def forward_message(**changes: object) -> Forward:
    values = {"step": 0, "micro_step": 0, "hidden": {"values": torch.zeros(6, 32)}, "batch_size": 2, **changes}
    return Forward("client", **values)


def test_messages_contain_no_token_ids_labels_or_loss():
    split = SplitModel.from_model(decoder("llama"))
    inputs = batch("right", batch_size=2, length=11)
    blobs = traffic(split, **inputs)
    assert len(blobs) == 4
    declared = {
        "split_forward": {"hidden.values", "mask"},
        "split_hidden": {"hidden.values"},
        "split_backward": {"gradient.values"},
        "split_gradient": {"gradient.values"},
    }
    for blob in blobs:
        tree = unpack(blob)
        tensors = {name for name, value in tree.items() if isinstance(value, torch.Tensor)}
        assert tensors == declared[tree["kind"]]
        # Numbers outside of tensors are counts and ids, so no number is a loss.
        assert not any(isinstance(value, float) for value in tree.values())
        # The bits of the mask are the only integer tensor in the serialized message.
        dtypes = {str(tensor.dtype) for tensor in load(blob).values()}
        assert dtypes <= {"torch.float32", "torch.uint8"}
        for secret in (inputs["input_ids"], inputs["labels"]):
            assert secret.numpy().tobytes() not in blob
            assert secret.int().numpy().tobytes() not in blob


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_num_bytes_matches_the_size_of_the_messages(dtype):
    split = SplitModel.from_model(decoder("llama"), wire_dtype=dtype)
    batch_size, length, hidden = 4, 37, 32
    inputs = batch("right", batch_size=batch_size, length=length)
    blobs = traffic(split, **inputs)
    bytes_per_value = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1 + 8 / hidden}
    # Four bits and 8 bytes for the only group. Two bytes for a quarter of the values, and a bit for each value.
    bytes_per_value |= {"int4": 1 / 2 + 8 / hidden, "topk": 1 / 4 * 2 + 1 / 8}
    # Two messages with hidden states, two with gradients, the bits of the mask, and the headers.
    states = 4 * batch_size * length * hidden * bytes_per_value[dtype]
    states += 2 * 4 * hidden * (dtype == "topk")  # the mean loss of each gradient
    bits = batch_size * math.ceil(length / 8)
    headers = [len(blob) - sum(tensor.nbytes for tensor in load(blob).values()) for blob in blobs]
    assert sum(map(len, blobs)) == states + bits + sum(headers)
    assert max(headers) <= 320
    wire = Wire(dtype)
    sizes = [wire.num_bytes({name: (batch_size, length, hidden)}) for name in ("hidden", "gradient")]
    assert 2 * sum(sizes) == states


@pytest.mark.parametrize("dtype", WIRE_DTYPES)
def test_headers_take_less_than_one_percent_of_a_step_with_64_tokens(dtype):
    wire = Wire(dtype)
    hidden = wire.encode({"hidden": torch.randn(1, 64, 576)})
    gradient = wire.encode({"gradient": torch.randn(1, 64, 576)})
    messages = [
        Forward("client", 0, 0, hidden, 1, training=True, grad=True),
        Hidden("client", 0, 0, hidden),
        Backward("client", 0, 0, gradient),
        Gradient("client", 0, 0, gradient),
    ]
    num_bytes = 2 * sum(wire.num_bytes({name: (1, 64, 576)}) for name in ("hidden", "gradient"))
    assert sum(len(message.to_bytes()) for message in messages) <= 1.01 * num_bytes


def test_attention_mask_without_padding_is_not_sent():
    split = SplitModel.from_model(decoder("llama"))
    inputs = batch(None)
    blobs = traffic(split, **inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
    assert Forward.from_bytes(blobs[0]).mask is None and "mask" not in unpack(blobs[0])


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 65])
def test_unpack_mask_inverts_pack_mask(width):
    mask = torch.randint(0, 2, (5, width), generator=torch.Generator().manual_seed(width))
    bits = pack_mask(mask)
    assert bits.shape == (5, math.ceil(width / 8))
    assert torch.equal(unpack_mask(bits, width), mask)


def test_message_with_labels_raises_error_on_the_server():
    split = SplitModel.from_model(decoder("llama"))
    tree = forward_message().to_tree()
    tree["labels"] = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="'labels'"):
        split.boundary.link.exchange(pack(tree))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden": {"values": torch.zeros(6, 32, dtype=torch.int64)}},
            "hidden\\['values'\\] must be a tensor .* but is a tensor of torch.int64",
        ),
        (
            {"hidden": {"values": torch.zeros(6, 32), "labels": torch.zeros(1)}},
            "but is \\['labels', 'values'\\]",
        ),
        ({"hidden": torch.zeros(6, 32)}, "must be a dictionary .* but is a tensor"),
        ({"batch_size": 4}, "6 hidden states cannot be divided into batch_size=4 sequences"),
        ({"batch_size": 0}, "cannot be divided into batch_size=0 sequences"),
        ({"mask": torch.ones(2, 3)}, "mask must be torch.uint8"),
        (
            {"mask": torch.ones(2, 3, dtype=torch.uint8), "mask_width": 3},
            "mask has shape \\(2, 3\\), .* need shape \\(2, 1\\)",
        ),
        ({"hidden": {"values": torch.zeros(0, 32)}}, "hidden must have the shape \\(batch · sequence, hidden\\)"),
        ({"batch_size": True}, "cannot be divided into batch_size=True sequences"),
        ({"seen": 2}, "caches are for generation"),
        ({"cache_id": 1, "grad": True}, "caches are for generation"),
        (
            {"mask": torch.ones(2, 1, dtype=torch.uint8), "mask_width": 4},
            "mask_width=4, but the mask must cover 0 cached and 3 new positions",
        ),
        ({"mask_width": -1}, "mask_width must be an int of at least 0, but is -1"),
        ({"step": -1}, "step=-1 and micro_step=0, but both must be at least 0"),
        ({"micro_step": -1}, "step=0 and micro_step=-1, but both must be at least 0"),
        ({"training": 1}, "training must be True or False, but is 1"),
        ({"cache_id": "0"}, "cache_id must be an int, but is '0'"),
        ({"autocast": "load"}, "autocast must be bfloat16 or float16, but is 'load'"),
        ({"context_lengths": torch.ones(3, dtype=torch.int32)}, "context_lengths has shape \\(3,\\), but 2 sequences"),
        ({"position_ids": torch.ones(2, 3)}, "position_ids must be torch.int32"),
        ({"reorder": torch.zeros(2)}, "reorder must be torch.int32, but is a tensor of torch.float32"),
        ({"reorder": torch.zeros(3, dtype=torch.int32), "cache_id": 1, "seen": 2}, "reorder must have shape \\(2,\\)"),
        (
            {"reorder": torch.tensor([0, 2], dtype=torch.int32), "cache_id": 1, "seen": 2},
            "reorder must have shape \\(2,\\) and values from 0 to 1, .* values \\[0, 2\\]",
        ),
        ({"reorder": torch.tensor([-1, 0], dtype=torch.int32), "cache_id": 1, "seen": 2}, "values from 0 to 1"),
        ({"reorder": torch.zeros(2, dtype=torch.int32), "cache_id": 1}, "Send it with seen > 0"),
        ({"position_ids": torch.ones(2, 4, dtype=torch.int32)}, "position_ids has shape \\(2, 4\\)"),
    ],
)
def test_invalid_message_field_raises_error(changes, message):
    with pytest.raises(ValueError, match=message):
        forward_message(**changes)


def test_row_without_scale_raises_error():
    states = {"hidden": torch.randn(1, 6, 4)}
    encoded = Wire("int8").encode(states)
    encoded["int8"] = encoded["int8"][:, 4:]
    with pytest.raises(
        ValueError, match="int8 has shape \\(6, 8\\), but 6 positions of hidden size 4 need shape \\(6, 12\\)"
    ):
        Wire("int8").decode(encoded, states)


def test_invalid_micro_batch_id_raises_error():
    with pytest.raises(ValueError, match="step must be int, but is float"):
        Hidden("client", 1.0, 0, {"values": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match="client_id must be str"):
        Hidden(None, 1, 0, {"values": torch.zeros(1, 2)})


def test_server_rejects_invalid_messages_and_answers_later_messages():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    exchange = split.boundary.link.exchange
    valid = forward_message(grad=True)
    for blob, error in (
        (b"no message", "Not a packed tree"),
        (pack({"kind": "predict", "fields": {}}), "got kind 'predict'"),
        (pack({"kind": [1], "fields": {}}), "got kind '<list>'"),
        (pack(FlatTree(kind="split_forget", client_id=1, cache_id=0)), "client_id must be str"),
        (pack({"kind": "split_forget", "fields": {"client_id": "a", "cache_id": 0}}), "must be a flat tree"),
        (
            forward_message(hidden={"values": torch.zeros(130, 32)}).to_bytes(),
            "65 positions, but the model supports at most 64",
        ),
        (forward_message(position_ids=torch.full((1, 3), 64, dtype=torch.int32)).to_bytes(), "range from 64 to 64"),
        (forward_message(position_ids=torch.full((1, 3), -1, dtype=torch.int32)).to_bytes(), "range from -1 to -1"),
        (
            forward_message(position_ids=torch.zeros(2, 2, 3, dtype=torch.int32)).to_bytes(),
            "the model has one position per token",
        ),
        (
            forward_message(context_lengths=torch.ones(2, dtype=torch.int32)).to_bytes(),
            "the model does not support context lengths",
        ),
        (forward_message(cache_id=5, seen=3).to_bytes(), "no cache of 3 positions"),
        (
            forward_message(hidden={"values": torch.zeros(6, 31)}).to_bytes(),
            "shape \\(6, 31\\), but 6 positions of hidden size 32 need shape \\(6, 32\\)",
        ),
        (forward_message(hidden={"values": torch.zeros(6, 32).half()}).to_bytes(), "same wire dtype"),
        (forward_message(hidden={"values": torch.full((6, 32), math.nan)}).to_bytes(), "not finite"),
        (Backward("client", 0, 0, {"values": torch.zeros(6, 32)}).to_bytes(), "does not wait for a gradient"),
    ):
        with pytest.raises(ValueError, match=error):
            exchange(blob)
    assert Hidden.from_bytes(exchange(valid.to_bytes())).micro_batch_id == ("client", 0, 0)
    with pytest.raises(ValueError, match="gradient has shape"):
        exchange(Backward("client", 0, 0, {"values": torch.zeros(4, 32)}).to_bytes())
    with pytest.raises(ValueError, match="5 positions cannot be divided into 2 sequences"):
        exchange(Backward("client", 0, 0, {"values": torch.zeros(5, 32)}).to_bytes())
    for count in (10**400, -1, True):
        with pytest.raises(ValueError, match="num_targets must be an int from 0 to the number of positions, 6"):
            Backward("client", 0, 0, {"values": torch.zeros(6, 32)}, num_targets=count)
    assert all(parameter.grad is None for parameter in full_model.parameters())
    exchange(Backward("client", 0, 0, {"values": torch.ones(6, 32)}).to_bytes())
    with pytest.raises(ValueError, match="already received"):
        exchange(Backward("client", 0, 0, {"values": torch.ones(6, 32)}).to_bytes())


def test_overflowing_gradient_raises_error_and_does_not_change_the_body():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    exchange = BodyServer(split.server_body, split.boundary.wire).answer
    exchange(forward_message(hidden={"values": torch.randn(6, 32)}, grad=True).to_bytes())
    with pytest.raises(ValueError, match="are not finite"):
        exchange(Backward("client", 0, 0, {"values": torch.full((6, 32), 3e38)}).to_bytes())
    assert all(parameter.grad is None for parameter in full_model.parameters())


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_failed_backward_pass_keeps_the_gradients_of_the_body(accumulated, monkeypatch):
    split = SplitModel.from_model(decoder("llama"))
    split.boundary.link = LocalLink(BodyServer(split.server_body, split.boundary.wire))
    split.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"))
    tokens = torch.tensor([[1, 2, 3]])
    if accumulated:
        split(tokens, labels=tokens).loss.backward()
    before = {name: value.grad for name, value in split.server_body.named_parameters()}
    values = {name: None if value is None else value.clone() for name, value in before.items()}
    hidden = split(tokens).logits
    monkeypatch.setattr(Wire, "encode", lambda *args, **kwargs: {"values": torch.full((3, 32), 3e38)})
    with pytest.raises(ValueError, match="are not finite"):
        hidden.sum().backward()
    for name, value in split.server_body.named_parameters():
        assert value.grad is before[name]
        assert values[name] is None or torch.equal(value.grad, values[name])
    assert accumulated == any(value is not None for value in values.values())


def test_the_server_of_a_split_model_does_not_check_the_gradients_of_its_parameters():
    """Within one process they overflow as without a split. A server for other processes checks them by default."""
    split = SplitModel.from_model(decoder("llama"))
    assert split.boundary.link.server.trusts_clients
    assert not BodyServer(split.server_body, split.boundary.wire).trusts_clients
    exchange = split.boundary.link.exchange
    exchange(forward_message(hidden={"values": torch.randn(6, 32)}, grad=True).to_bytes())
    exchange(Backward("client", 0, 0, {"values": torch.full((6, 32), 3e38)}).to_bytes())
    gradients = [parameter.grad for parameter in split.server_body.parameters()]
    assert not all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("trusts_clients", [True, False])
def test_a_parameter_without_a_gradient_keeps_its_earlier_gradient(trusts_clients):
    split = SplitModel.from_model(decoder("llama"))
    split.boundary.link = LocalLink(BodyServer(split.server_body, split.boundary.wire, trusts_clients=trusts_clients))
    split.server_body.unused = torch.nn.Parameter(torch.ones(2))
    split.server_body.unused.grad = earlier = torch.tensor([3.0, 4.0])
    split(**batch(None)).loss.backward()
    assert split.server_body.unused.grad is earlier and earlier.tolist() == [3.0, 4.0]


def test_finite_gradients_with_overflowing_norm_are_accepted():
    full_model = decoder("llama")
    split = SplitModel.from_model(full_model)
    exchange = BodyServer(split.server_body, split.boundary.wire).answer
    exchange(forward_message(hidden={"values": torch.randn(6, 32)}, grad=True).to_bytes())
    exchange(Backward("client", 0, 0, {"values": torch.full((6, 32), 1e25)}).to_bytes())
    actual = [parameter.grad for parameter in full_model.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in actual)
    assert max(gradient.norm() for gradient in actual) == torch.inf


def test_number_of_graphs_without_gradient_is_limited():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    for micro_step in range(80):
        server.forward(dataclasses.replace(forward_message(grad=True), micro_step=micro_step))
    assert len(server.graphs) == 64
    split.eval()
    with torch.no_grad():
        split(**batch(None))
    assert len(server.graphs) == 64


def test_answer_to_another_micro_batch_raises_error():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server

    class Mixed:
        def exchange(self, blob: bytes) -> bytes:
            return dataclasses.replace(Hidden.from_bytes(server.answer(blob)), micro_step=7).to_bytes()

    split.boundary.link = Mixed()
    with pytest.raises(RefusedAnswerError, match="`micro_step` .* is 7. The client agreed to 0, that of its message"):
        split(**batch(None))
