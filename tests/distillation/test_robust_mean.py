"""Robust means of predictions: formulas, bounds on the effect of outliers, and invariances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_federated.distillation import ROBUST_MEANS, robust_mean
from hf_federated.distillation.robust_mean import filtered_mean
from hf_federated.utils.robust_statistics import num_tolerated


METHODS = sorted(ROBUST_MEANS)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ---- Formulas


def reference_filter(points, num_outliers):
    """The filter as in the paper, with a covariance matrix, for one row of clients whose predictions all differ."""
    points, weights = np.asarray(points), np.ones(len(points))
    while True:
        mean = weights @ points / weights.sum()
        covariance = (weights[:, None] * (points - mean)).T @ (points - mean) / weights.sum()
        direction = np.linalg.eigh(covariance)[1][:, -1]
        scores = np.where(weights > 0, ((points - mean) @ direction) ** 2, 0)
        reduced = weights * (1 - scores / scores.max())
        if len(points) - reduced.sum() > 2 * num_outliers:
            return mean
        weights = reduced


@pytest.mark.parametrize(("num_clients", "num_outliers"), [(3, 1), (7, 1), (7, 3), (10, 2)])
def test_filter_matches_the_reference(num_clients, num_outliers):
    points = normal(num_clients, 20, 4)
    points[:num_outliers] += 3
    expected = [reference_filter(points[:, row], num_outliers) for row in range(20)]
    close(filtered_mean(points, num_outliers), torch.tensor(np.array(expected)), atol=1e-9)


def test_trimmed_mean_drops_both_ends_of_each_coordinate():
    points = normal(10, 6, 3)
    expected = points.sort(0).values[2:8].mean(0)
    close(robust_mean(points, "trimmed", outlier_share=0.2), expected)


@pytest.mark.parametrize("num_clients", [4, 5])
def test_median_is_the_middle_of_each_coordinate(num_clients):
    points = normal(num_clients, 6, 3)
    close(robust_mean(points, "median"), points.quantile(0.5, dim=0))


@pytest.mark.parametrize("method", ["filter", "trimmed"])
def test_robust_mean_with_outlier_share_zero_is_the_plain_mean(method):
    points = normal(6, 5, 3)
    close(robust_mean(points, method, outlier_share=0.0), points.mean(0))


@pytest.mark.parametrize(
    ("num_clients", "share", "expected"),
    [(1, 0.2, 0), (2, 0.4, 0), (3, 0.2, 1), (3, 0.0, 0), (5, 0.2, 1), (6, 0.2, 2), (10, 0.49, 4), (100, 0.07, 7)],
)
def test_number_of_tolerated_outliers(num_clients, share, expected):
    assert num_tolerated(num_clients, share) == expected


# ---- Outliers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_clients", [3, 5, 10])
def test_one_outlier_moves_the_robust_mean_by_a_bounded_amount(method, num_clients):
    honest = torch.rand(num_clients - 1, 50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spread = honest.amax(0) - honest.amin(0)
    for distance in (1e1, 1e6, 1e12, 1e100):
        points = torch.cat([honest, torch.full((1, 50, 4), distance, dtype=torch.float64)])
        moved = robust_mean(points, method) - honest.mean(0)
        assert (moved.abs() <= spread + 1e-12).all()
        assert points.mean(0).min() >= distance / num_clients  # The plain mean follows the outlier.


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("num_clients", "num_outliers"), [(3, 1), (5, 2), (10, 2), (11, 5), (20, 4)])
def test_filter_error_is_bounded_for_any_position_of_outliers(num_clients, num_outliers, together):
    rows = 500
    honest = normal(num_clients - num_outliers, rows, 4) * (0.1 + normal(1, rows, 4, seed=1).abs())
    mean = honest.mean(0)
    covariance = torch.einsum("knc,knd->ncd", honest - mean, honest - mean) / len(honest)
    sigma = torch.linalg.eigvalsh(covariance)[:, -1:].sqrt()
    num_directions = 1 if together else num_outliers
    directions = torch.nn.functional.normalize(normal(num_directions, rows, 4, seed=2), dim=-1)
    exponents = (
        8 * torch.rand(num_directions, rows, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 2
    )
    outliers = (mean + sigma * directions * 10**exponents).expand(num_outliers, -1, -1)

    points = torch.cat([outliers, honest])
    share = num_outliers / num_clients
    rest = 1 - 2 * share
    bound = math.sqrt(2 * share / rest) * (1 + math.sqrt(2 / rest) + 1 / rest)
    error = (filtered_mean(points, num_outliers) - mean).norm(dim=-1, keepdim=True)
    assert (error <= bound * sigma).all()
    assert ((points.mean(0) - mean).norm(dim=-1, keepdim=True) > bound * sigma).any()


@pytest.mark.parametrize("method", METHODS)
def test_prediction_of_agreeing_clients_is_found_among_outliers(method):
    honest = torch.rand(1, 50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.cat([honest.expand(4, -1, -1), 1e6 * normal(2, 50, 3), honest.expand(3, -1, -1)])
    assert torch.equal(robust_mean(points, method), honest[0])


def test_filter_removes_an_outlier_that_no_single_coordinate_shows():
    """Each coordinate of the outlier is usual, but only the coordinates of the honest clients have a sum of 0."""
    honest = normal(20, 1, 20)
    honest -= honest.mean(-1, keepdim=True)
    outlier = torch.full((1, 1, 20), 2.0, dtype=torch.float64)
    points = torch.cat([honest, outlier])
    assert robust_mean(points, "filter", outlier_share=0.05).sum().abs() < 1e-9
    assert robust_mean(points, "trimmed", outlier_share=0.05).sum() > 1


def test_robust_mean_of_distributions_is_a_distribution():
    points = normal(9, 2000, 3).softmax(-1)
    points[:4, :, 0] = 0  # If only these clients are left, rounding must not give negative values.
    points /= points.sum(-1, keepdim=True)
    mean = robust_mean(points, outlier_share=0.4)
    close(mean.sum(-1), torch.ones(2000, dtype=torch.float64))
    assert (mean >= 0).all() and (mean[:, 0] == 0).any()


# ---- Invariances


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_robust_mean_of_identical_predictions_is_exact(method, dtype):
    prediction = normal(7, 3).to(dtype)
    for num_clients in (1, 2, 3, 7):
        mean = robust_mean(prediction.expand(num_clients, -1, -1), method)
        assert mean.dtype == dtype and torch.equal(mean, prediction)


@pytest.mark.parametrize("method", METHODS)
def test_robust_mean_of_two_clients_is_the_mean(method):
    points = normal(2, 5, 3)
    close(robust_mean(points, method, outlier_share=0.4), points.mean(0))


@pytest.mark.parametrize("method", METHODS)
def test_order_of_clients_changes_no_bit(method):
    points = normal(9, 40, 4)
    points[:2] *= 1e3
    points[3] = points[4]
    points[5:, :10] = torch.eye(4, dtype=torch.float64)[:, None, :]  # The spread is equal in several directions.
    expected = robust_mean(points, method)
    for seed in range(5):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(robust_mean(points[order], method), expected)


@pytest.mark.parametrize("num_clients", [3, 4, 7, 8])
def test_filter_gives_symmetric_clients_equal_weights(num_clients):
    points = (3 * torch.eye(num_clients, dtype=torch.float64)).softmax(-1)[
        :, None, :
    ]  # Each client predicts another class.
    close(robust_mean(points), torch.full((1, num_clients), 1 / num_clients, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_averaged_independently(method):
    points = normal(7, 12, 3)
    alone = torch.cat([robust_mean(points[:, row : row + 1], method) for row in range(12)])
    close(robust_mean(points, method), alone)
    assert robust_mean(points[:, :0], method).shape == (0, 3)


@pytest.mark.parametrize("scale", [1e-250, 1e-6, 1e6, 1e250])
@pytest.mark.parametrize("method", METHODS)
def test_robust_mean_scales_with_the_predictions(method, scale):
    points = normal(7, 12, 3)
    close(robust_mean(points * scale, method) / scale, robust_mean(points, method))


def test_robust_mean_does_not_change_its_input():
    points = normal(5, 4, 3).requires_grad_()
    before = points.detach().clone()
    assert not robust_mean(points).requires_grad
    assert torch.equal(points.detach(), before)


# ---- Rejected input


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_value_is_rejected_with_client_and_row(value):
    points = normal(4, 6, 3)
    points[2, 5, 1] = value
    with pytest.raises(ValueError, match=r"client number 2 \(from 0\) hold NaN or infinite values in row 5"):
        robust_mean(points)


@pytest.mark.parametrize("points", [torch.ones(3, 2), torch.ones(0, 2, 2), torch.ones(3, 2, 2, dtype=torch.int64)])
def test_predictions_of_wrong_shape_or_dtype_are_rejected(points):
    with pytest.raises(ValueError, match=r"must be floating, of shape \(num_clients, num_rows, num_classes\)"):
        robust_mean(points)


def test_unknown_method_is_rejected():
    with pytest.raises(ValueError, match="`method` is 'krum'; allowed are 'filter', 'trimmed', 'median'"):
        robust_mean(normal(3, 2, 2), "krum")


@pytest.mark.parametrize("share", [-0.1, 0.5, float("nan")])
def test_invalid_outlier_share_is_rejected(share):
    with pytest.raises(ValueError, match="`outlier_share` is"):
        robust_mean(normal(3, 2, 2), outlier_share=share)
