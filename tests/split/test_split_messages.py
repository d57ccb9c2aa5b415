"""What crosses between client and server, and that nothing else can."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from decoders import batch, decoder
from safetensors.torch import load

from hf_federated import SplitModel
from hf_federated.messages.serialization import pack, unpack
from hf_federated.split import Backward, Forward, Hidden, LocalLink, Wire
from hf_federated.split.messages import pack_mask, unpack_mask


def traffic(split: SplitModel, **inputs: torch.Tensor) -> list[bytes]:
    """Every blob of a forward and a backward pass, in order."""
    blobs: list[bytes] = []
    split.boundary.link = LocalLink(split.boundary.link.server, lambda *pair: blobs.extend(pair))
    split(**inputs).loss.backward()
    return blobs


def forward_message(**changes: object) -> Forward:
    values = {"step": 0, "micro_step": 0, "hidden": {"values": torch.zeros(6, 32)}, "batch_size": 2, **changes}
    return Forward("client", **values)


def test_recorded_traffic_holds_no_token_ids_labels_or_loss():
    split = SplitModel.from_model(decoder("llama"))
    inputs = batch("right", rows=2, length=11)
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
        tensors = {
            name if isinstance(value, torch.Tensor) else f"{name}.values"
            for name, value in tree["fields"].items()
            if isinstance(value, (torch.Tensor, dict))
        }
        assert tensors == declared[tree["kind"]]
        # Numbers that are no tensors count or name something: none is a loss.
        assert not any(isinstance(value, float) for value in tree["fields"].values())
        # And byte for byte: no tensor in the blob is one of integers but the mask's bits.
        kinds = {str(tensor.dtype) for tensor in load(blob).values()}
        assert kinds <= {"torch.float32", "torch.uint8"}
        for secret in (inputs["input_ids"], inputs["labels"]):
            assert secret.numpy().tobytes() not in blob
            assert secret.int().numpy().tobytes() not in blob


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_bytes_of_a_step_follow_the_formula(dtype):
    split = SplitModel.from_model(decoder("llama"), wire_dtype=dtype)
    rows, length, hidden = 4, 37, 32
    inputs = batch("right", rows=rows, length=length)
    blobs = traffic(split, **inputs)
    bytes_per_value = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1 + 8 / hidden}[dtype]
    # Two activations, two gradients, the mask's bits; the header is what is left of a message of one number.
    states = 4 * rows * length * hidden * bytes_per_value
    bits = rows * math.ceil(length / 8)
    tiny = [len(blob) - sum(tensor.nbytes for tensor in load(blob).values()) for blob in blobs]
    assert sum(map(len, blobs)) == states + bits + sum(tiny)
    assert max(tiny) < 800
    wire = Wire(dtype)
    assert 4 * wire.num_bytes(rows, length, hidden) == states


def test_a_mask_of_ones_is_not_sent():
    split = SplitModel.from_model(decoder("llama"))
    inputs = batch(None)
    blobs = traffic(split, **inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
    assert unpack(blobs[0])["fields"]["mask"] is None


@pytest.mark.parametrize("width", [1, 7, 8, 9, 64, 65])
def test_a_mask_comes_back_from_its_bits(width):
    mask = torch.randint(0, 2, (5, width), generator=torch.Generator().manual_seed(width))
    bits = pack_mask(mask)
    assert bits.shape == (5, math.ceil(width / 8))
    assert torch.equal(unpack_mask(bits, width), mask)


def test_a_message_with_labels_is_refused_by_the_server():
    split = SplitModel.from_model(decoder("llama"))
    tree = forward_message().to_tree()
    tree["fields"]["labels"] = torch.tensor([[1, 2]])
    with pytest.raises(ValueError, match="'labels'"):
        split.boundary.link.exchange(pack(tree))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": {"values": torch.zeros(6, 32, dtype=torch.int64)}}, "no such tensor: a tensor of torch.int64"),
        (
            {"hidden": {"values": torch.zeros(6, 32), "labels": torch.zeros(1)}},
            "got \\['labels', 'values'\\]",
        ),
        ({"hidden": torch.zeros(6, 32)}, "at most, got a tensor"),
        ({"batch_size": 4}, "6 hidden states do not make 4 rows"),
        ({"batch_size": 0}, "do not make 0 rows"),
        ({"mask": torch.ones(2, 3)}, "mask must be torch.uint8"),
        ({"mask": torch.ones(2, 3, dtype=torch.uint8), "mask_width": 3}, "has shape \\(2, 1\\), got \\(2, 3\\)"),
        ({"hidden": {"values": torch.zeros(0, 32)}}, "hidden is \\(batch · sequence, hidden\\)"),
        ({"batch_size": True}, "do not make True rows"),
        ({"seen": 2}, "a cache is for generation"),
        ({"cache_id": 1, "grad": True}, "a cache is for generation"),
        ({"mask": torch.ones(2, 1, dtype=torch.uint8), "mask_width": 4}, "a mask of 4 positions came with 3 behind 0"),
        ({"mask_width": -1}, "mask_width is a count, got -1"),
        ({"step": -1}, "steps are counted from 0, got -1 and 0"),
        ({"micro_step": -1}, "steps are counted from 0, got 0 and -1"),
        ({"training": 1}, "training is True or False, got 1"),
        ({"cache_id": "0"}, "cache_id is a number, got '0'"),
        ({"autocast": "load"}, "autocast is bfloat16 or float16, got 'load'"),
        ({"context_lengths": torch.ones(3, dtype=torch.int32)}, "context_lengths of 2 rows have shape"),
        ({"position_ids": torch.ones(2, 3)}, "position_ids must be torch.int32"),
        ({"position_ids": torch.ones(2, 4, dtype=torch.int32)}, "got \\(2, 4\\)"),
    ],
)
def test_what_does_not_belong_into_a_field_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        forward_message(**changes)


def test_scales_that_do_not_fit_their_positions_are_refused():
    encoded = Wire("int8").encode(torch.randn(1, 6, 4))
    encoded["scale"] = encoded["scale"][:1]
    with pytest.raises(ValueError, match="scale has shape \\(1,\\) for 6 positions"):
        Wire("int8").decode(encoded, 1, torch.float32)


def test_a_passage_is_named_by_whole_numbers():
    with pytest.raises(ValueError, match="step must be int, got float"):
        Hidden("client", 1.0, 0, {"values": torch.zeros(1, 2)})
    with pytest.raises(ValueError, match="client_id must be str"):
        Hidden(None, 1, 0, {"values": torch.zeros(1, 2)})


def test_the_server_refuses_what_does_not_fit_and_answers_afterwards():
    whole = decoder("llama")
    split = SplitModel.from_model(whole)
    exchange = split.boundary.link.exchange
    good = forward_message(grad=True)
    for blob, text in (
        (b"no message", "Not a packed tree"),
        (pack({"kind": "predict", "fields": {}}), "got 'predict'"),
        (pack({"kind": [1], "fields": {}}), "got \\[1\\]"),
        (pack({"kind": "split_forget", "fields": {"client_id": [1], "cache_id": 0}}), "names a client"),
        (forward_message(hidden={"values": torch.zeros(130, 32)}).to_bytes(), "65 positions came to a model of 64"),
        (forward_message(position_ids=torch.full((1, 3), 64, dtype=torch.int32)).to_bytes(), "reach from 64 to 64"),
        (forward_message(position_ids=torch.full((1, 3), -1, dtype=torch.int32)).to_bytes(), "reach from -1 to -1"),
        (forward_message(position_ids=torch.zeros(2, 2, 3, dtype=torch.int32)).to_bytes(), "counts in one"),
        (forward_message(context_lengths=torch.ones(2, dtype=torch.int32)).to_bytes(), "not for this model"),
        (forward_message(cache_id=5, seen=3).to_bytes(), "no cache of 3 positions"),
        (forward_message(hidden={"values": torch.zeros(6, 31)}).to_bytes(), "31 numbers came to a body of 32"),
        (forward_message(hidden={"values": torch.zeros(6, 32).half()}).to_bytes(), "same wire dtype"),
        (forward_message(hidden={"values": torch.full((6, 32), math.nan)}).to_bytes(), "not finite"),
        (Backward("client", 0, 0, {"values": torch.zeros(6, 32)}).to_bytes(), "waits for its gradient"),
    ):
        with pytest.raises(ValueError, match=text):
            exchange(blob)
    assert Hidden.from_bytes(exchange(good.to_bytes())).passage == ("client", 0, 0)
    with pytest.raises(ValueError, match="gradient has shape"):
        exchange(Backward("client", 0, 0, {"values": torch.zeros(4, 32)}).to_bytes())
    with pytest.raises(ValueError, match="5 positions do not make 2 rows"):
        exchange(Backward("client", 0, 0, {"values": torch.zeros(5, 32)}).to_bytes())
    for count in (10**400, -1, True):
        with pytest.raises(ValueError, match="num_targets counts targets of 6 positions"):
            Backward("client", 0, 0, {"values": torch.zeros(6, 32)}, num_targets=count)
    assert all(parameter.grad is None for parameter in whole.parameters())
    exchange(Backward("client", 0, 0, {"values": torch.ones(6, 32)}).to_bytes())
    with pytest.raises(ValueError, match="answered already"):
        exchange(Backward("client", 0, 0, {"values": torch.ones(6, 32)}).to_bytes())


def test_a_gradient_that_overflows_leaves_the_body_as_it_was():
    whole = decoder("llama")
    exchange = SplitModel.from_model(whole).boundary.link.exchange
    exchange(forward_message(hidden={"values": torch.randn(6, 32)}, grad=True).to_bytes())
    with pytest.raises(ValueError, match="are not finite"):
        exchange(Backward("client", 0, 0, {"values": torch.full((6, 32), 3e38)}).to_bytes())
    assert all(parameter.grad is None for parameter in whole.parameters())


def test_gradients_whose_norm_alone_overflows_are_taken():
    whole = decoder("llama")
    exchange = SplitModel.from_model(whole).boundary.link.exchange
    exchange(forward_message(hidden={"values": torch.randn(6, 32)}, grad=True).to_bytes())
    exchange(Backward("client", 0, 0, {"values": torch.full((6, 32), 1e25)}).to_bytes())
    found = [parameter.grad for parameter in whole.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in found)
    assert max(gradient.norm() for gradient in found) == torch.inf


def test_graphs_whose_gradient_never_comes_do_not_pile_up():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server
    for micro_step in range(80):
        server.forward(dataclasses.replace(forward_message(grad=True), micro_step=micro_step))
    assert len(server._graphs) == 64
    split.eval()
    with torch.no_grad():
        split(**batch(None))
    assert len(server._graphs) == 64


def test_a_link_that_mixes_answers_up_is_noticed():
    split = SplitModel.from_model(decoder("llama"))
    server = split.boundary.link.server

    class Mixed:
        def exchange(self, blob: bytes) -> bytes:
            return dataclasses.replace(Hidden.from_bytes(server.answer(blob)), micro_step=7).to_bytes()

    split.boundary.link = Mixed()
    with pytest.raises(ValueError, match="mixes messages up"):
        split(**batch(None))
