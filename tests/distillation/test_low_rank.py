"""Updates as singular vectors: what is kept, what it costs, and that names and bits come back."""

from __future__ import annotations

import pytest
import torch

from hf_federated.distillation import compress, decompress, energy_schedule
from hf_federated.messages.serialization import pack, unpack


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def matrix_of(singular_values, rows, columns, dtype=torch.float64):
    """A matrix with these singular values."""
    u = torch.linalg.qr(normal(rows, len(singular_values), dtype=torch.float64)).Q
    v = torch.linalg.qr(normal(columns, len(singular_values), seed=1, dtype=torch.float64)).Q
    return ((u * torch.tensor(singular_values, dtype=torch.float64)) @ v.T).to(dtype)


def num_bytes(state):
    return sum(value.nbytes for value in state.values())


def kept_share(matrix, restored):
    lost = (matrix.double() - restored.double()).square().sum()
    return 1 - (lost / matrix.double().square().sum()).item()


# ---- How much is kept


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.95, 0.98, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_at_least_the_energy_asked_for_is_kept(energy, dtype):
    matrix = matrix_of([1 / (i + 1) for i in range(20)], 40, 60, dtype)
    sent = compress({"w": matrix}, energy)
    assert set(sent) == {"w/u", "w/s", "w/v"}
    assert kept_share(matrix, decompress(sent)["w"]) >= energy - 1e-6


@pytest.mark.parametrize(("energy", "rank"), [(0.66, 1), (0.67, 2), (0.83, 2), (0.84, 3), (1.0, 3)])
def test_the_rank_is_the_smallest_that_keeps_it(energy, rank):
    """Of 64 + 16 + 16 = 96 the first one has 0.667, the first two have 0.833."""
    assert compress({"w": matrix_of([8.0, 4.0, 4.0], 12, 12)}, energy)["w/s"].shape == (rank,)


def test_a_share_that_is_met_exactly_is_enough():
    matrix = torch.diag(torch.tensor([4.0] * 4 + [0.0] * 5))
    assert compress({"w": matrix}, 0.75)["w/s"].tolist() == [4.0] * 3


@pytest.mark.parametrize("energy", [0.9999, 1.0])
def test_a_matrix_of_rank_two_is_exact(energy):
    matrix = matrix_of([1.0, 0.7], 30, 50, torch.float32)
    sent = compress({"w": matrix}, energy)
    assert sent["w/s"].shape == (2,)
    torch.testing.assert_close(decompress(sent)["w"], matrix, rtol=0, atol=1e-6)


def test_all_the_energy_of_a_matrix_of_full_rank_is_its_bits():
    matrix = normal(30, 50)
    assert torch.equal(decompress(compress({"w": matrix}, 1.0))["w"], matrix)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
def test_the_size_of_an_update_does_not_change_its_rank(scale):
    matrix = matrix_of([1.0, 0.9, 0.1, 0.01], 30, 50)
    ranks = [len(compress({"w": (matrix * s).float()}, 0.98)["w/s"]) for s in (1.0, scale)]
    assert ranks == [2, 2]


# ---- What it costs


def test_factors_are_fewer_bytes():
    update = {"w": matrix_of([1.0, 0.5, 0.1], 64, 96, torch.float32)}
    sent = compress(update, 0.98)
    rank = len(sent["w/s"])
    assert num_bytes(sent) == 4 * rank * (64 + 96 + 1) < num_bytes(update)
    assert len(pack(sent)) < len(pack(update))


@pytest.mark.parametrize(("columns", "is_factored"), [(3, False), (4, True)])
def test_factors_that_save_nothing_are_not_sent(columns, is_factored):
    """Of rank 1 and 2 rows: 2 + n + 1 numbers against 2 n."""
    matrix = torch.outer(torch.tensor([1.0, 2.0]), torch.arange(1.0, columns + 1))
    assert (2 + columns + 1 < 2 * columns) == is_factored
    assert set(compress({"w": matrix}, 0.95)) == ({"w/u", "w/s", "w/v"} if is_factored else {"w/dense"})


def test_factors_do_not_hold_on_to_what_was_cut_off():
    sent = compress({"w": matrix_of([1.0], 64, 96, torch.float32)}, 0.98)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in sent.values())


def test_a_matrix_of_zeros_costs_nothing():
    sent = compress({"w": torch.zeros(5, 7)}, 0.95)
    assert num_bytes(sent) == 0
    restored = decompress(sent)["w"]
    assert restored.dtype == torch.float32 and torch.equal(restored, torch.zeros(5, 7))


# ---- What comes back


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
def test_what_is_no_floating_matrix_is_sent_as_it_is(value):
    sent = compress({"w": value}, 0.95)
    assert list(sent) == ["w/dense"] and sent["w/dense"] is value
    assert decompress(sent)["w"] is value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_comes_back_in_its_dtype(dtype):
    matrix = matrix_of([300.0, 100.0], 64, 64, dtype)
    sent = compress({"w": matrix}, 0.95)
    assert (sent["w/u"].dtype, sent["w/s"].dtype, sent["w/v"].dtype) == (dtype, torch.float32, dtype)
    restored = decompress(sent)["w"]
    assert restored.dtype == dtype and kept_share(matrix, restored) > 0.95


def test_an_update_of_numbers_too_large_for_half_precision_singular_values_comes_back():
    matrix = torch.full((64, 64), 60_000.0, dtype=torch.float16)  # σ_1 = 64 · 60000
    restored = decompress(compress({"w": matrix}, 0.95))["w"]
    torch.testing.assert_close(restored, matrix, rtol=2e-3, atol=0)


def test_names_survive_whatever_they_are():
    names = ["a", "a/u", "a/dense", "a/s/v", "/", "", "model.layers.0.weight", "ключ"]
    update = {name: matrix_of([1.0 + i], 8, 9, torch.float32) for i, name in enumerate(names)}
    update |= {f"{name}/bias": torch.full((3,), float(i)) for i, name in enumerate(names)}
    restored = decompress(unpack(pack(compress(update, 0.95))))
    assert list(restored) == list(update)
    for name, value in update.items():
        torch.testing.assert_close(restored[name], value, rtol=0, atol=1e-5)


def test_compressing_twice_gives_the_same_and_leaves_the_update():
    update = {"w": normal(20, 30).requires_grad_(), "b": normal(3)}
    before = {name: value.detach().clone() for name, value in update.items()}
    first, second = compress(update, 0.5), compress(update, 0.5)
    assert all(torch.equal(first[key], second[key]) and not first[key].requires_grad for key in first)
    assert all(torch.equal(update[name], before[name]) for name in update)


# ---- What is refused


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(4, 5), (4,)])
def test_a_value_that_is_not_finite_is_refused_by_name(value, shape):
    bad = torch.ones(shape)
    bad[0] = value
    with pytest.raises(ValueError, match="'layer.weight' holds NaN or infinite values"):
        compress({"fine": torch.ones(2), "layer.weight": bad}, 0.95)


@pytest.mark.parametrize("energy", [0.0, -0.5, 1.01, float("nan")])
def test_an_energy_that_is_no_share_is_refused(energy):
    with pytest.raises(ValueError, match="`energy` is"):
        compress({}, energy)


@pytest.mark.parametrize("key", ["w", "w/x", "dense", "w.u", ""])
def test_a_key_that_compress_does_not_make_is_refused(key):
    with pytest.raises(ValueError, match="is no key of a compressed update"):
        decompress({key: torch.ones(2)})


@pytest.mark.parametrize("kinds", [("u", "v"), ("u", "s", "v", "dense"), ("s",)])
def test_half_a_matrix_is_refused(kinds):
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
def test_factors_that_do_not_fit_are_refused(u, s, v):
    with pytest.raises(ValueError, match="The factors of 'w' do not fit"):
        decompress({"w/u": u, "w/s": s, "w/v": v})


def test_factors_of_another_shape_than_asked_for_are_refused_before_they_are_multiplied():
    reference = {"w": torch.zeros(4, 5), "b": torch.zeros(2)}
    huge = 10**9  # the product would take an exabyte, the factors nothing
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


# ---- The schedule


def test_the_energy_grows_linearly_to_its_end():
    values = [energy_schedule(round, num_rounds=4) for round in range(4)]
    assert values == pytest.approx([0.95 + (0.98 - 0.95) * (round + 1) / 4 for round in range(4)], abs=1e-15)
    assert values[-1] == 0.98
    assert energy_schedule(0, 1) == 0.98
    assert energy_schedule(1, 2, start=0.5, end=1.0) == 1.0


@pytest.mark.parametrize(("round", "num_rounds"), [(-1, 3), (3, 3), (0, 0)])
def test_a_round_that_is_none_of_the_run_is_refused(round, num_rounds):
    with pytest.raises(ValueError, match="is out of range: a run of"):
        energy_schedule(round, num_rounds)


@pytest.mark.parametrize("ends", [{"start": 0.0}, {"end": 1.1}, {"end": float("nan")}])
def test_a_schedule_that_leaves_the_shares_is_refused(ends):
    with pytest.raises(ValueError, match="both must be above 0 and at most 1"):
        energy_schedule(0, 2, **ends)
