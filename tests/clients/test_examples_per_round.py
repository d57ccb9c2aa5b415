"""`max_rows_per_round` and `balance`: which rows a client trains on in a round, and what follows from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import arguments, rows, same_weights, tiny_model
from transformers import TrainerCallback, default_data_collator

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer
from hf_federated.cards import RunRecord, render
from hf_federated.clients import RowLimit, client_seed
from hf_federated.clients.sampling import draw_examples
from hf_federated.trainer.checkpoint import list_checkpoints


SIZES = {"a": 10, "b": 3, "c": 7}
CLIENTS = {client_id: rows(size, seed=place) for place, (client_id, size) in enumerate(SIZES.items())}
OWNER = {tuple(ids): client_id for client_id, data in CLIENTS.items() for ids in data["input_ids"]}


class Collator:
    """The default one, which notes the rows that it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        self.seen += [tuple(feature["input_ids"]) for feature in features]
        return default_data_collator(features)


class Rounds(FederatedCallback):
    """What clients sent, and the rows that they trained on, by round."""

    def __init__(self) -> None:
        self.collator = Collator()
        self.updates: list[dict[str, Any]] = []
        self.rows: list[dict[str, list[tuple[int, ...]]]] = []
        self.global_states: list[dict[str, torch.Tensor]] = []

    def on_round_begin(self, args, state, control, server=None, **kwargs):
        self.updates.append({})
        self.rows.append({})

    def on_client_end(self, args, state, control, update=None, **kwargs):
        self.updates[-1][update.client_id] = update
        self.rows[-1][update.client_id] = self.collator.seen.copy()
        self.collator.seen.clear()

    def on_distill(self, args, state, control, server=None, **kwargs):
        self.global_states.append(dict(server.weights))


def trained(
    folder: Path, num_rounds: int = 2, callbacks: Any = (), clients: Any = None, resume: Any = None, **settings: Any
) -> tuple[FederatedTrainer, Rounds]:
    """A federation that was trained; `args` among the settings are training arguments."""
    noted = Rounds()
    trainer = FederatedTrainer(
        model=tiny_model(problem_type="single_label_classification"),
        args=arguments(folder, **settings.pop("args", {})),
        train_dataset=clients or CLIENTS,
        data_collator=noted.collator,
        callbacks=[noted, *callbacks],
        federation=FederatedConfig(num_rounds=num_rounds, **settings),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, noted


def num_examples(noted: Rounds) -> list[dict[str, int]]:
    return [{client_id: update.num_examples for client_id, update in of.items()} for of in noted.updates]


# ---- How many


@pytest.mark.parametrize(
    ("balance", "max_rows", "expected"),
    [("min", None, 3), ("min", 2, 2), ("min", 9, 3), (None, 8, 8), (None, None, None)],
)
def test_all_of_a_cohort_have_one_limit(balance, max_rows, expected):
    assert RowLimit(SIZES, balance, max_rows)(["a", "b", "c"]) == expected


def test_balanced_clients_train_on_as_many_rows_as_the_smallest(tmp_path):
    _, noted = trained(tmp_path, balance="min")
    assert num_examples(noted) == [{"a": 3, "b": 3, "c": 3}] * 2


def test_the_smallest_is_that_of_the_cohort_and_not_of_the_federation(tmp_path):
    _, noted = trained(tmp_path, num_rounds=6, balance="min", clients_per_round=2)
    cohorts = [tuple(counts) for counts in num_examples(noted)]
    assert {("a", "c"), ("b", "c")} <= set(cohorts)
    for cohort, counts in zip(cohorts, num_examples(noted), strict=True):
        assert set(counts.values()) == {min(SIZES[client_id] for client_id in cohort)}


def test_a_cap_leaves_smaller_clients_all_their_rows(tmp_path):
    _, noted = trained(tmp_path, max_rows_per_round=5)
    assert num_examples(noted) == [{"a": 5, "b": 3, "c": 5}] * 2


# ---- Which


def test_drawn_rows_are_the_clients_own_without_repetition_and_others_in_the_next_round(tmp_path):
    _, noted = trained(tmp_path, num_rounds=4, max_rows_per_round=5)
    drawn = [frozenset(of["a"]) for of in noted.rows]
    for round, of_clients in enumerate(noted.rows):
        for client_id, seen in of_clients.items():
            assert len(seen) == len(set(seen)) == min(SIZES[client_id], 5)
            assert {OWNER[ids] for ids in seen} == {client_id}
        # A function of the client's seed of the run, the round and its id.
        positions = draw_examples(10, 5, client_seed(42, "a", round))
        assert drawn[round] == {tuple(ids) for ids in CLIENTS["a"][positions]["input_ids"]}
    assert len(set(drawn)) == 4


def test_local_epochs_pass_over_the_drawn_rows(tmp_path):
    _, noted = trained(tmp_path, num_rounds=1, max_rows_per_round=5, local_epochs=3)
    seen = noted.rows[0]["a"]
    assert len(seen) == 15 and {seen.count(ids) for ids in seen} == {3}
    assert noted.updates[0]["a"].num_steps == 3 * 2  # batches of 4


def test_local_steps_are_taken_on_the_drawn_rows(tmp_path):
    trainer, noted = trained(tmp_path, num_rounds=1, max_rows_per_round=5, local_steps=6)
    assert {of.num_steps for of in noted.updates[0].values()} == {6}
    assert len(set(noted.rows[0]["a"])) == 5
    assert num_examples(noted) == [{"a": 5, "b": 3, "c": 5}]


def test_every_row_is_drawn_about_equally_often_and_in_the_order_of_the_data():
    counts = np.zeros(10)
    for seed in range(4000):
        drawn = draw_examples(10, 3, seed)
        assert drawn.tolist() == sorted(set(drawn.tolist()))
        counts[drawn] += 1
    deviation = (4000 * 0.3 * 0.7) ** 0.5
    assert np.abs(counts - 1200).max() < 5 * deviation


def test_drawing_leaves_the_global_generators_alone():
    np.random.seed(0), torch.manual_seed(0)
    states = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    draw_examples(10, 3, seed=1)
    assert states == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_limits_that_reach_no_client_change_nothing(tmp_path):
    plain, _ = trained(tmp_path / "plain", clients={"a": rows(6), "b": rows(6, seed=1)})
    limited, _ = trained(
        tmp_path / "limited", clients={"a": rows(6), "b": rows(6, seed=1)}, balance="min", max_rows_per_round=6
    )
    assert same_weights(plain.model, limited.model)


def test_what_a_client_draws_does_not_depend_on_the_others(tmp_path):
    _, alone = trained(tmp_path / "alone", clients={"a": CLIENTS["a"]}, max_rows_per_round=5)
    _, together = trained(tmp_path / "together", max_rows_per_round=5)
    for round in range(2):
        assert set(alone.rows[round]["a"]) == set(together.rows[round]["a"])


# ---- What follows


def test_averages_weigh_clients_by_the_rows_they_trained_on(tmp_path):
    _, noted = trained(tmp_path, num_rounds=1, max_rows_per_round=5)
    updates, weights = noted.updates[0], {"a": 5, "b": 3, "c": 5}
    for name, value in noted.global_states[0].items():
        if value.is_floating_point():
            mean = sum(weights[client_id] * updates[client_id].state[name].double() for client_id in SIZES) / 13
            torch.testing.assert_close(value.double(), mean, atol=1e-6, rtol=0)


def test_the_learning_rate_falls_over_the_rounds_whatever_their_cohorts_draw(tmp_path):
    _, noted = trained(
        tmp_path,
        num_rounds=6,
        balance="min",
        clients_per_round=2,
        local_epochs=4,
        args={"lr_scheduler_type": "linear"},
    )
    assert len({tuple(of) for of in num_examples(noted)}) > 1
    for round, updates in enumerate(noted.updates):
        for update in updates.values():
            steps = update.num_steps
            assert steps == 4 * -(-update.num_examples // 4)
            # At the last step of its round: `steps` of each round lie on a curve of six rounds of them.
            expected = 1e-2 * (1 - (round * steps + steps - 1) / (6 * steps))
            assert update.metrics["learning_rate"] == pytest.approx(expected)


def test_samples_per_second_count_what_was_trained_on(tmp_path):
    trainer, _ = trained(tmp_path, balance="min", local_epochs=2)
    assert trainer._federation.examples_seen == 2 * 2 * 9


class StopAfterFirst(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = True


def test_a_resumed_run_draws_the_rows_of_one_that_was_never_stopped(tmp_path):
    settings: dict[str, Any] = {"num_rounds": 3, "balance": "min", "max_rows_per_round": 6, "clients_per_round": 2}
    saving = {"args": {"save_strategy": "steps"}}
    whole, expected = trained(tmp_path / "whole", **settings, **saving)
    trained(tmp_path / "stopped", **settings, **saving, callbacks=[StopAfterFirst()])
    assert [path.name for path in list_checkpoints(tmp_path / "stopped")] == ["checkpoint-1"]
    resumed, noted = trained(tmp_path / "stopped", **settings, **saving, resume=True)
    assert noted.rows == expected.rows[1:]
    assert same_weights(resumed.model, whole.model)
    with pytest.raises(ValueError, match="max_rows_per_round: 5 in this run, 6 in the checkpoint"):
        trained(tmp_path / "stopped", **{**settings, "max_rows_per_round": 5}, **saving, resume=True)


def test_the_card_says_how_many_rows_clients_train_on(tmp_path):
    trainer, _ = trained(tmp_path, num_rounds=1, balance="min", max_rows_per_round=1250)
    card = render(RunRecord.from_trainer(trainer))
    assert re.search(
        r"Examples per client and round \| at most 1,250, at most the number of the smallest sampled client", card
    )


# ---- Refused


@pytest.mark.parametrize("settings", [{"balance": "min"}, {"max_rows_per_round": 3}])
def test_a_stream_has_no_rows_to_draw_from(tmp_path, settings):
    clients = {"a": rows(4).to_iterable_dataset(), "b": rows(4, seed=1).to_iterable_dataset()}
    with pytest.raises(ValueError, match="Client 'a' has a stream.*leave `balance` and `max_rows_per_round` out"):
        trained(tmp_path, clients=clients, local_steps=2, **settings)


def test_a_cap_below_a_batch_is_refused_where_the_rest_of_an_epoch_is_dropped(tmp_path):
    clients = {"a": rows(8), "b": rows(8, seed=1)}
    with pytest.raises(
        ValueError, match="max_rows_per_round=3 is less than a batch of 4.*Set `dataloader_drop_last` to False"
    ):
        trained(tmp_path, clients=clients, max_rows_per_round=3, args={"dataloader_drop_last": True})
