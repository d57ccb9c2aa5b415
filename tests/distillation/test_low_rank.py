"""Low-rank compression of updates: kept energy, size, and restored names and values."""

from __future__ import annotations

import pytest
import torch

from hf_federated.distillation import compress, decompress, energy_schedule
from hf_federated.messages.serialization import pack, unpack


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def matrix_of(singular_values, rows, columns, dtype=torch.float64):
    """A matrix with the given singular values."""
    u = torch.linalg.qr(normal(rows, len(singular_values), dtype=torch.float64)).Q
    v = torch.linalg.qr(normal(columns, len(singular_values), seed=1, dtype=torch.float64)).Q
    return ((u * torch.tensor(singular_values, dtype=torch.float64)) @ v.T).to(dtype)


def num_bytes(state):
    return sum(value.nbytes for value in state.values())


def kept_share(matrix, restored):
    lost = (matrix.double() - restored.double()).square().sum()
    return 1 - (lost / matrix.double().square().sum()).item()


# ---- Kept energy


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.95, 0.98, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compression_keeps_at_least_the_requested_energy(energy, dtype):
    matrix = matrix_of([1 / (i + 1) for i in range(20)], 40, 60, dtype)
    sent = compress({"w": matrix}, energy)
    assert set(sent) == {"w/u", "w/s", "w/v"}
    assert kept_share(matrix, decompress(sent)["w"]) >= energy - 1e-6


@pytest.mark.parametrize(("energy", "rank"), [(0.66, 1), (0.67, 2), (0.83, 2), (0.84, 3), (1.0, 3)])
def test_rank_is_the_smallest_that_keeps_the_energy(energy, rank):
    """The energy is 64 + 16 + 16 = 96. The first singular value has a share of 0.667, the first two have 0.833."""
    assert compress({"w": matrix_of([8.0, 4.0, 4.0], 12, 12)}, energy)["w/s"].shape == (rank,)


def test_rank_that_keeps_exactly_the_energy_is_sufficient():
    matrix = torch.diag(torch.tensor([4.0] * 4 + [0.0] * 5))
    assert compress({"w": matrix}, 0.75)["w/s"].tolist() == [4.0] * 3


@pytest.mark.parametrize("energy", [0.9999, 1.0])
def test_matrix_of_rank_two_is_restored_exactly(energy):
    matrix = matrix_of([1.0, 0.7], 30, 50, torch.float32)
    sent = compress({"w": matrix}, energy)
    assert sent["w/s"].shape == (2,)
    torch.testing.assert_close(decompress(sent)["w"], matrix, rtol=0, atol=1e-6)


def test_full_rank_matrix_with_energy_one_is_restored_bit_for_bit():
    matrix = normal(30, 50)
    assert torch.equal(decompress(compress({"w": matrix}, 1.0))["w"], matrix)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_scale_of_an_update_does_not_change_its_rank(scale):
    matrix = matrix_of([1.0, 0.9, 0.1, 0.01], 30, 50)
    ranks = [len(compress({"w": (matrix * s).float()}, 0.98)["w/s"]) for s in (1.0, scale)]
    assert ranks == [2, 2]


# ---- Size


def test_factors_are_smaller_than_the_update():
    update = {"w": matrix_of([1.0, 0.5, 0.1], 64, 96, torch.float32)}
    sent = compress(update, 0.98)
    rank = len(sent["w/s"])
    assert num_bytes(sent) == 4 * rank * (64 + 96 + 1) < num_bytes(update)
    assert len(pack(sent)) < len(pack(update))


@pytest.mark.parametrize(("columns", "is_factored"), [(3, False), (4, True)])
def test_matrix_is_sent_dense_when_factors_are_not_smaller(columns, is_factored):
    """With rank 1 and 2 rows, the factors have 2 + n + 1 values and the matrix has 2 n values."""
    matrix = torch.outer(torch.tensor([1.0, 2.0]), torch.arange(1.0, columns + 1))
    assert (2 + columns + 1 < 2 * columns) == is_factored
    assert set(compress({"w": matrix}, 0.95)) == ({"w/u", "w/s", "w/v"} if is_factored else {"w/dense"})


def test_factors_do_not_keep_truncated_values_in_memory():
    sent = compress({"w": matrix_of([1.0], 64, 96, torch.float32)}, 0.98)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in sent.values())


def test_zero_matrix_takes_no_bytes():
    sent = compress({"w": torch.zeros(5, 7)}, 0.95)
    assert num_bytes(sent) == 0
    restored = decompress(sent)["w"]
    assert restored.dtype == torch.float32 and torch.equal(restored, torch.zeros(5, 7))


# ---- Restored values


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).reshape(2, 3),
        torch.ones(40, dtype=torch.bool),
        torch.tensor(3.0),
        torch.ones(40),
        torch.ones(9, 9, 9),
        torch.empty(0, 4),
        torch.empty(4, 0),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}",
)
def test_tensor_that_is_no_floating_matrix_is_sent_unchanged(value):
    sent = compress({"w": value}, 0.95)
    assert list(sent) == ["w/dense"] and sent["w/dense"] is value
    assert decompress(sent)["w"] is value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_matrix_is_restored_in_its_dtype(dtype):
    matrix = matrix_of([300.0, 100.0], 64, 64, dtype)
    sent = compress({"w": matrix}, 0.95)
    assert (sent["w/u"].dtype, sent["w/s"].dtype, sent["w/v"].dtype) == (dtype, torch.float32, dtype)
    restored = decompress(sent)["w"]
    assert restored.dtype == dtype and kept_share(matrix, restored) > 0.95


def test_float16_update_with_singular_values_beyond_float16_is_restored():
    matrix = torch.full((64, 64), 60_000.0, dtype=torch.float16)  # σ_1 = 64 · 60000
    restored = decompress(compress({"w": matrix}, 0.95))["w"]
    torch.testing.assert_close(restored, matrix, rtol=2e-3, atol=0)


def test_any_parameter_names_are_restored():
    names = ["a", "a/u", "a/dense", "a/s/v", "/", "", "model.layers.0.weight", "ключ"]
    update = {name: matrix_of([1.0 + i], 8, 9, torch.float32) for i, name in enumerate(names)}
    update |= {f"{name}/bias": torch.full((3,), float(i)) for i, name in enumerate(names)}
    restored = decompress(unpack(pack(compress(update, 0.95))))
    assert list(restored) == list(update)
    for name, value in update.items():
        torch.testing.assert_close(restored[name], value, rtol=0, atol=1e-5)


def test_compression_is_deterministic_and_does_not_change_the_update():
    update = {"w": normal(20, 30).requires_grad_(), "b": normal(3)}
    before = {name: value.detach().clone() for name, value in update.items()}
    first, second = compress(update, 0.5), compress(update, 0.5)
    assert all(torch.equal(first[key], second[key]) and not first[key].requires_grad for key in first)
    assert all(torch.equal(update[name], before[name]) for name in update)


# ---- Rejected input


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(4, 5), (4,)])
def test_non_finite_value_is_rejected_with_the_parameter_name(value, shape):
    bad = torch.ones(shape)
    bad[0] = value
    with pytest.raises(ValueError, match="'layer.weight' holds NaN or infinite values"):
        compress({"fine": torch.ones(2), "layer.weight": bad}, 0.95)


@pytest.mark.parametrize("energy", [0.0, -0.5, 1.01, float("nan")])
def test_invalid_energy_is_rejected(energy):
    with pytest.raises(ValueError, match="`energy` is"):
        compress({}, energy)


@pytest.mark.parametrize("key", ["w", "w/x", "dense", "w.u", ""])
def test_unknown_key_is_rejected(key):
    with pytest.raises(ValueError, match="is no key of a compressed update"):
        decompress({key: torch.ones(2)})


@pytest.mark.parametrize("kinds", [("u", "v"), ("u", "s", "v", "dense"), ("s",)])
def test_incomplete_factors_are_rejected(kinds):
    with pytest.raises(ValueError, match="'w' has the parts .* expected either 'dense' or all of"):
        decompress({f"w/{kind}": torch.ones(1, 1) for kind in kinds})


@pytest.mark.parametrize(
    ("u", "s", "v"),
    [
        (torch.ones(4, 2), torch.ones(1), torch.ones(2, 5)),
        (torch.ones(4, 2), torch.ones(2), torch.ones(1, 5)),
        (torch.ones(4, 1), torch.ones(1), torch.ones(5)),
        (torch.ones(4, 1), torch.ones(1), torch.ones(1, 5).half()),
    ],
)
def test_factors_of_incompatible_shapes_are_rejected(u, s, v):
    with pytest.raises(ValueError, match="The factors of 'w' do not fit"):
        decompress({"w/u": u, "w/s": s, "w/v": v})


def test_factors_of_unexpected_shape_are_rejected_before_the_product():
    reference = {"w": torch.zeros(4, 5), "b": torch.zeros(2)}
    huge = 10**9  # The product would take an exabyte, the factors take no memory.
    sent = {"w/u": torch.empty(huge, 0), "w/s": torch.empty(0), "w/v": torch.empty(0, huge)}
    with pytest.raises(ValueError, match=rf"'w' has shape \({huge}, {huge}\), expected \(4, 5\)"):
        decompress(sent, reference)
    with pytest.raises(ValueError, match=r"'b' has shape \(3,\), expected \(2,\)"):
        decompress({"b/dense": torch.ones(3)}, reference)
    with pytest.raises(ValueError, match=r"'x' has shape \(3,\), but no tensor of this name is expected"):
        decompress({"x/dense": torch.ones(3)}, reference)
    update = {"w": torch.outer(torch.ones(4), torch.ones(5)), "b": torch.ones(2)}
    restored = decompress(compress(update, 0.95), reference)
    torch.testing.assert_close(restored, update)


# ---- Energy schedule


def test_energy_grows_linearly_to_its_final_value():
    values = [energy_schedule(round, num_rounds=4) for round in range(4)]
    assert values == pytest.approx([0.95 + (0.98 - 0.95) * (round + 1) / 4 for round in range(4)], abs=1e-15)
    assert values[-1] == 0.98
    assert energy_schedule(0, 1) == 0.98
    assert energy_schedule(1, 2, start=0.5, end=1.0) == 1.0


@pytest.mark.parametrize(("round", "num_rounds"), [(-1, 3), (3, 3), (0, 0)])
def test_round_outside_the_run_is_rejected(round, num_rounds):
    with pytest.raises(ValueError, match="is out of range: a run of"):
        energy_schedule(round, num_rounds)


@pytest.mark.parametrize("ends", [{"start": 0.0}, {"end": 1.1}, {"end": float("nan")}])
def test_schedule_outside_the_valid_range_is_rejected(ends):
    with pytest.raises(ValueError, match=f"`{next(iter(ends))}` is .* must be above 0 and at most 1"):
        energy_schedule(0, 2, **ends)
