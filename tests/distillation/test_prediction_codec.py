"""Encoded predictions: rounding errors, rejected values and number of bytes."""

from __future__ import annotations

import math

import pytest
import torch

from hf_federated.distillation import PredictionCodec
from hf_federated.distillation.codec import rows_of
from hf_federated.messages.serialization import pack, unpack


DTYPES = ["float32", "float16", "bfloat16", "int8"]


def logits(num_rows: int, num_classes: int, seed: int = 0, scale: float = 5.0) -> torch.Tensor:
    return scale * torch.randn(num_rows, num_classes, generator=torch.Generator().manual_seed(seed))


def sent(codec: PredictionCodec, predictions: torch.Tensor) -> torch.Tensor:
    """Predictions that were encoded, converted to bytes and back, and decoded."""
    encoded = unpack(pack(codec.encode({"logits": predictions})))
    return codec.decode(encoded, {"logits": predictions})["logits"]


def rounding(dtype: str, predictions: torch.Tensor) -> torch.Tensor:
    """The largest allowed error of each value, of shape `(N, 1)`."""
    largest = predictions.abs().amax(1, keepdim=True)
    if dtype == "int8":
        steps = (predictions.amax(1, keepdim=True) - predictions.amin(1, keepdim=True)) / 255
        return steps / 2 * (1 + 1e-4) + largest * torch.finfo(torch.float32).eps
    return largest * torch.finfo(getattr(torch, dtype)).eps / 2 if dtype != "float32" else 0 * largest


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_row_is_restored_within_the_rounding_of_the_dtype(dtype, seed):
    num_classes = [1, 2, 3, 256, 257, 1000][seed]
    predictions = logits(17, num_classes, seed, scale=10.0 ** (seed - 2)) + 3 * seed
    codec = PredictionCodec(dtype)
    result = sent(codec, predictions)
    assert result.dtype == torch.float32 and result.shape == predictions.shape
    assert ((result - predictions).abs() <= rounding(dtype, predictions)).all()


def test_float32_is_restored_bit_for_bit_and_other_input_dtypes_are_accepted():
    predictions = logits(5, 9)
    assert torch.equal(sent(PredictionCodec(), predictions), predictions)
    assert torch.equal(sent(PredictionCodec(), predictions.double()), predictions)
    assert torch.equal(sent(PredictionCodec("bfloat16"), predictions.bfloat16()), predictions.bfloat16().float())


@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e30])
def test_constant_rows_are_exact_in_int8(value):
    predictions = torch.full((2, 4), value)
    assert torch.equal(sent(PredictionCodec("int8"), predictions), predictions)


def test_int8_keeps_the_extremes_and_the_order_of_a_row():
    predictions = logits(20, 30).sort(dim=1).values
    result = sent(PredictionCodec("int8"), predictions)
    assert torch.equal(result[:, 0], predictions[:, 0])
    torch.testing.assert_close(result[:, -1], predictions[:, -1], rtol=0, atol=1e-5)
    assert (result.diff(dim=1) >= 0).all()


def test_dense_codec_encodes_probabilities_and_gradients_without_top_k():
    codec = PredictionCodec("int8", top_k=2)
    assert codec.dense == PredictionCodec("int8")
    probabilities = logits(8, 5).softmax(1)
    result = sent(codec.dense, probabilities)
    torch.testing.assert_close(result.sum(1), torch.ones(8), rtol=0, atol=5 * 0.5 / 255)
    gradients = 1e-9 * logits(8, 5)
    assert ((sent(codec.dense, gradients) - gradients).abs() <= rounding("int8", gradients)).all()


@pytest.mark.parametrize("num_classes", [5, 300, 50_000])
@pytest.mark.parametrize("top_k", [1, 4])
def test_top_k_keeps_the_top_probabilities_and_spreads_the_rest_evenly(num_classes, top_k):
    predictions = logits(6, num_classes)
    expected = predictions.double().softmax(1)
    result = sent(PredictionCodec(top_k=top_k), predictions).double().softmax(1)
    kept = expected.topk(top_k, dim=1).indices
    torch.testing.assert_close(result.gather(1, kept), expected.gather(1, kept), rtol=1e-5, atol=0)
    rest = torch.ones_like(expected, dtype=torch.bool).scatter(1, kept, False)
    share = (1 - expected.gather(1, kept).sum(1)) / (num_classes - top_k)
    torch.testing.assert_close(
        result[rest].view(6, -1), share.unsqueeze(1).expand(-1, num_classes - top_k), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 300.0, -70_000.0])
def test_common_offset_of_a_row_does_not_reduce_the_precision_of_top_k(dtype, offset):
    predictions = torch.tensor([[2.0, 0.0, 1.0, -1.0, 0.5]]) + offset
    result = sent(PredictionCodec(dtype, top_k=3), predictions)
    torch.testing.assert_close(
        result.softmax(1)[:, [0, 2, 4]], predictions.softmax(1)[:, [0, 2, 4]], rtol=0.015, atol=0
    )
    torch.testing.assert_close(result[:, [0, 2, 4]], predictions[:, [0, 2, 4]], rtol=0, atol=0.01 + abs(offset) * 2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_of_all_classes_or_more_equals_the_dense_encoding(dtype):
    predictions = logits(3, 4)
    for top_k in (4, 100):
        encoded, plain = (PredictionCodec(dtype, k).encode({"logits": predictions}) for k in (top_k, None))
        assert set(encoded) == set(plain) and all(torch.equal(encoded[name], plain[name]) for name in plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [None, 1, 2, 3])
def test_masked_classes_stay_masked_or_are_rejected(dtype, top_k):
    predictions = logits(4, 6)
    predictions[:, 2:] = -torch.inf
    codec = PredictionCodec(dtype, top_k)
    if dtype == "int8" and top_k not in (1, 2):
        with pytest.raises(ValueError, match="4 of 4 rows .* int8 has no -inf"):
            sent(codec, predictions)
    else:
        result = sent(codec, predictions)
        if top_k == 1:  # The rest of the probability is spread over all other classes.
            expected = predictions.amax(1).double().sub(predictions.double().logsumexp(1)).exp()
            torch.testing.assert_close(result.double().softmax(1).amax(1), expected, rtol=0, atol=0.02)
        else:
            assert torch.equal(result == -torch.inf, predictions == -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [None, 2, 20])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_rejected_with_their_row(dtype, top_k, bad):
    predictions = logits(6, 9)
    predictions[4, 3] = bad
    predictions[5, :] = bad
    with pytest.raises(ValueError, match="2 of 6 rows hold NaN or .inf.* the first is row 4"):
        sent(PredictionCodec(dtype, top_k), predictions)


@pytest.mark.parametrize("top_k", [None, 2])
def test_fully_masked_row_is_rejected(top_k):
    predictions = logits(3, 5)
    predictions[1] = -torch.inf
    with pytest.raises(ValueError, match="the first is row 1"):
        sent(PredictionCodec(top_k=top_k), predictions)


def test_float16_overflow_is_rejected_and_not_clipped():
    with pytest.raises(ValueError, match="float16 ends at 65504"):
        sent(PredictionCodec("float16"), torch.tensor([[1e5, 0.0]]))


@pytest.mark.parametrize(
    ("num_classes", "expected"),
    [(256, torch.uint8), (257, torch.uint16), (65_536, torch.uint16), (65_537, torch.int32)],
)
def test_indices_have_the_smallest_dtype_that_holds_the_last_class(num_classes, expected):
    predictions = torch.zeros(1, num_classes)
    predictions[0, -1] = 4.0
    codec = PredictionCodec(top_k=1)
    assert codec.encode({"logits": predictions})["indices"].dtype == expected
    assert sent(codec, predictions).argmax().item() == num_classes - 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [None, 3, 7])
@pytest.mark.parametrize("num_classes", [5, 300, 70_000])
def test_number_of_bytes_per_row_matches_the_tensors(dtype, top_k, num_classes):
    codec = PredictionCodec(dtype, top_k)
    encoded = codec.encode({"logits": torch.zeros(11, num_classes)})
    assert sum(tensor.nbytes for tensor in encoded.values()) == 11 * codec.num_bytes({"logits": (1, num_classes)})


def test_empty_predictions_are_restored():
    for codec in (PredictionCodec(), PredictionCodec("int8", top_k=2)):
        assert sent(codec, torch.zeros(0, 5)).shape == (0, 5)


def test_encoding_does_not_change_predictions_and_keeps_no_graph():
    predictions = logits(3, 5).requires_grad_()
    before = predictions.detach().clone()
    encoded = PredictionCodec(top_k=2).encode({"logits": predictions})
    encoded["values"].zero_()
    assert torch.equal(predictions, before) and not encoded["values"].requires_grad
    plain = PredictionCodec().encode({"logits": predictions})
    plain["values"].zero_()
    assert torch.equal(predictions, before)


@pytest.mark.parametrize(
    "predictions", [torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(2, 0), torch.ones(2, 3).long()]
)
def test_predictions_of_wrong_shape_or_dtype_are_rejected(predictions):
    with pytest.raises(ValueError, match="expected a floating tensor with a row for each prediction"):
        PredictionCodec().encode({"logits": predictions})


def test_invalid_settings_are_rejected():
    with pytest.raises(ValueError, match="`dtype` is 'int4'; .* float32, float16, bfloat16, int8"):
        PredictionCodec("int4")
    with pytest.raises(ValueError, match="`top_k` is 0; it must be at least 1"):
        PredictionCodec(top_k=0)


def tampered(**changes: object) -> dict[str, object]:
    encoded: dict[str, object] = dict(PredictionCodec("int8", top_k=2).encode({"logits": logits(3, 5)}))
    encoded.update(changes)
    return {name: value for name, value in encoded.items() if value is not None}


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (tampered(rest=None), r"hold \['indices', 'scale', 'values', 'zero_point'\]; .* sends \['indices', 'rest'"),
        (tampered(values=None), "hold .*; .* sends"),
        (tampered(extra=torch.zeros(3)), "hold .*'extra'"),
        (tampered(values="no tensor"), "'values' of encoded predictions is a str; .* sends torch.int8 of shape"),
        (tampered(values=torch.zeros(3, 2)), "'values' .* is torch.float32 .* sends torch.int8 of shape"),
        (tampered(values=torch.zeros(3, 3).char()), r"'values' .* shape \(3, 3\); .* of shape \(3, 2\)"),
        (tampered(values=torch.tensor(1).char()), r"'values' .* shape \(\); .* of shape \(0, 2\)"),
        (tampered(scale=torch.ones(2)), r"'scale' .* shape \(2,\); .* of shape \(3,\)"),
        (tampered(zero_point=torch.ones(3).half()), "'zero_point' .* is torch.float16"),
        (tampered(rest=torch.ones(3, 1)), r"'rest' .* shape \(3, 1\)"),
        (tampered(indices=torch.zeros(3, 2).long()), "'indices' .* is torch.int64 .* sends torch.uint8"),
        (tampered(indices=torch.tensor([[0, 1], [2, 5], [0, 1]]).byte()), r"Row 1 .* outside 0 to 4: \[2, 5\]"),
        (tampered(indices=torch.tensor([[0, 1], [2, 3], [4, 4]]).byte()), "Row 2 .* names a class twice"),
        (tampered(scale=torch.tensor([1.0, math.nan, 1.0])), "the first is row 1"),
        (tampered(rest=torch.tensor([1.0, 1.0, math.inf])), "the first is row 2"),
        ([1], "are a list; expected a mapping"),
    ],
)
def test_malformed_encoding_is_rejected_with_the_expected_format(encoded, message):
    with pytest.raises(ValueError, match=message):
        PredictionCodec("int8", top_k=2).decode(encoded, rows_of(5))


def test_wrong_number_of_classes_is_rejected():
    with pytest.raises(ValueError, match=r"shape \(3, 5\); .* of shape \(3, 6\)"):
        PredictionCodec().decode(PredictionCodec().encode({"logits": logits(3, 5)}), rows_of(6))
    codec = PredictionCodec(top_k=2)
    with pytest.raises(ValueError, match="sends torch.uint16"):
        codec.decode(codec.encode({"logits": logits(3, 5)}), rows_of(500))
    with pytest.raises(ValueError, match="sends .'values'. for 2 classes"):
        codec.decode(codec.encode({"logits": logits(3, 5)}), rows_of(2))


def test_negative_index_is_rejected():
    codec = PredictionCodec(top_k=1)
    encoded = codec.encode({"logits": logits(1, 70_000)})
    encoded["indices"] = torch.tensor([[-1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="outside 0 to 69999"):
        codec.decode(encoded, rows_of(70_000))
