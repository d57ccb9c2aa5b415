"""Examples and clients that are held out or sampled from a federated dataset."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from datasets import ClassLabel, Dataset

from hf_federated import FederatedDataset
from hf_federated.experiments.data.held_out import draw_stratified, hold_out_examples, limit_examples
from hf_federated.experiments.recipe.schema import RecipeError


def federation(**labels: str) -> FederatedDataset:
    """One client for each argument, with one example for each letter, which is its label."""
    rows = [
        {"site": site, "label": label, "id": f"{site}{number}"}
        for site, letters in labels.items()
        for number, label in enumerate(letters)
    ]
    order = np.random.default_rng(3).permutation(len(rows))
    return FederatedDataset.from_column(Dataset.from_list([rows[position] for position in order]), "site")


def ids(clients: FederatedDataset) -> dict[str, list[str]]:
    return {client_id: rows["id"][:] for client_id, rows in clients.items()}


@pytest.mark.parametrize("seed", range(4))
def test_each_client_gives_its_share_with_the_shares_of_its_labels(seed):
    clients = federation(north="a" * 60 + "b" * 40, south="b" * 30, east="abab")
    train, test = hold_out_examples(clients, 0.2, seed, label_column="label")
    counts = {client_id: Counter(rows["label"]) for client_id, rows in test.items()}
    # 0.2 * 60 = 12 and 0.2 * 40 = 8; 0.2 * 30 = 6; 0.2 * 4 = 0.8, which is rounded up.
    assert (counts["north"], counts["south"]) == ({"a": 12, "b": 8}, {"b": 6})
    assert sum(counts["east"].values()) == 1
    for client_id, rows in clients.items():
        kept, held_out = set(train[client_id]["id"]), set(test[client_id]["id"])
        assert not kept & held_out and kept | held_out == set(rows["id"])


def test_a_client_keeps_at_least_one_training_example():
    train, test = hold_out_examples(federation(single="a", pair="ab", three="abc"), 0.9, seed=0)
    assert train.num_rows == {"pair": 1, "single": 1, "three": 1}
    assert test.num_rows == {"pair": 1, "three": 2}


def test_product_that_is_not_exact_is_not_rounded_up():
    assert 0.07 * 100 > 7  # in floating point
    _, test = hold_out_examples(federation(north="a" * 100), 0.07, seed=0)
    assert test.num_rows == {"north": 7}


def test_held_out_examples_depend_on_the_seed_and_the_client_only():
    sites = {"north": "ab" * 20, "south": "ba" * 20, "east": "a" * 40}
    held_out = [ids(hold_out_examples(federation(**sites), 0.25, seed, "label")[1]) for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]
    fewer = ids(hold_out_examples(federation(**sites).select_clients(["south", "north"]), 0.25, 0, "label")[1])
    assert {site: sorted(fewer[site]) for site in fewer} == {site: sorted(held_out[0][site]) for site in fewer}


def test_small_clients_do_not_all_hold_out_the_same_label():
    """Each client holds out one of two examples. The choice of its label must be random."""
    clients = federation(**{f"site{number}": "ab" for number in range(40)})
    _, test = hold_out_examples(clients, 0.1, seed=0, label_column="label")
    counts = Counter(test.to_dataset()["label"])
    assert counts.total() == 40 and min(counts.values()) >= 10


def test_missing_labels_and_tags_are_strata():
    rows = {"label": [0, None] * 10, "tags": [["B-PER", "O"], ["O"]] * 10}
    clients = FederatedDataset.from_dict({"a": Dataset.from_dict(rows)})
    _, test = hold_out_examples(clients, 0.2, seed=0, label_column="label")
    assert Counter(test["a"]["label"]) == {0: 2, None: 2}
    _, test = hold_out_examples(clients, 0.2, seed=0, label_column="tags")
    assert Counter(map(tuple, test["a"]["tags"])) == {("B-PER", "O"): 2, ("O",): 2}


def test_clients_with_one_example_each_cannot_hold_out_examples():
    with pytest.raises(RecipeError, match="each of the 2 clients has one example"):
        hold_out_examples(federation(north="a", south="b"), 0.1, seed=0)


def test_stored_clients_are_split_like_the_clients_in_memory(tmp_path):
    clients = federation(north="ab" * 10, south="b" * 10)
    clients.save_to_disk(tmp_path / "clients")
    loaded = FederatedDataset.load_from_disk(tmp_path / "clients")
    parts = [hold_out_examples(version, 0.2, 0, "label") for version in (clients, loaded)]
    assert [ids(part) for part in parts[0]] == [ids(part) for part in parts[1]]
    assert parts[1][0].partitioning == loaded.partitioning


def test_draw_is_uniform_over_the_positions():
    """Each of 6 positions is drawn in half of 2000 draws: 1000, with a standard deviation of 22."""
    strata = np.array([0, 0, 0, 1, 1, 2])
    drawn = [draw_stratified(strata, 3, np.random.default_rng(seed)) for seed in range(2000)]
    counts = np.bincount(np.concatenate(drawn), minlength=6)
    assert counts.sum() == 6000 and np.abs(counts - 1000).max() < 110
    # The shares of the strata are 1.5, 1 and 0.5 examples.
    by_stratum = np.array([np.bincount(strata[positions], minlength=3) for positions in drawn])
    assert set(by_stratum[:, 0]) == {1, 2} and set(by_stratum[:, 1]) == {1} and set(by_stratum[:, 2]) == {0, 1}
    assert draw_stratified(strata, 6, np.random.default_rng(0)).tolist() == [0, 1, 2, 3, 4, 5]


def test_limit_takes_the_same_share_of_each_client():
    clients = federation(north="a" * 60, south="b" * 30, east="a" * 10)
    limited = limit_examples(clients, 10, seed=0)
    assert limited.num_rows == {"east": 1, "north": 6, "south": 3}
    assert ids(limited) == ids(limit_examples(clients, 10, seed=0)) != ids(limit_examples(clients, 10, seed=1))
    assert limit_examples(clients, 100, seed=0) is clients and limit_examples(clients, None, seed=0) is clients


def test_limit_of_training_examples_keeps_each_client():
    clients = federation(north="a" * 97, south="b", east="a", west="b")
    limited = limit_examples(clients, 5, seed=0, keep_clients=True)
    assert limited.num_rows == {"east": 1, "north": 2, "south": 1, "west": 1}
    with pytest.raises(RecipeError, match="max_train_rows is 3, but there are 4 clients.*at least 4"):
        limit_examples(clients, 3, seed=0, keep_clients=True)


def test_limit_of_test_examples_leaves_out_clients_without_an_example():
    limited = limit_examples(federation(**{f"site{number}": "ab" for number in range(10)}), 3, seed=0)
    assert list(limited.num_rows.values()) == [1, 1, 1]


def test_label_names_are_kept_when_examples_are_held_out():
    rows = Dataset.from_dict({"label": [0, 1] * 5}).cast_column("label", ClassLabel(names=["x", "y"]))
    train, test = hold_out_examples(FederatedDataset.from_dict({"a": rows}), 0.2, 0, "label")
    assert train.features == test.features == rows.features
