"""`max_rows_per_round` and `balance`: the examples that a client trains on in a round, and the effects on training."""

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
CLIENTS = {client_id: rows(size, seed=seed) for seed, (client_id, size) in enumerate(SIZES.items())}
OWNER = {tuple(ids): client_id for client_id, data in CLIENTS.items() for ids in data["input_ids"]}


class RecordingCollator:
    """The default collator. It records the examples that it receives."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        self.seen += [tuple(feature["input_ids"]) for feature in features]
        return default_data_collator(features)


class RoundRecorder(FederatedCallback):
    """Records the updates of clients and the examples that they trained on, by round."""

    def __init__(self) -> None:
        self.collator = RecordingCollator()
        self.updates: list[dict[str, Any]] = []
        self.examples: list[dict[str, list[tuple[int, ...]]]] = []
        self.global_states: list[dict[str, torch.Tensor]] = []

    def on_round_begin(self, args, state, control, round=None, **kwargs):
        self.updates.append({})
        self.examples.append({})

    def on_client_end(self, args, state, control, update=None, **kwargs):
        self.updates[-1][update.client_id] = update
        self.examples[-1][update.client_id] = self.collator.seen.copy()
        self.collator.seen.clear()

    def on_distill(self, args, state, control, round=None, **kwargs):
        self.global_states.append(dict(round.state))


def train_federation(
    folder: Path, num_rounds: int = 2, callbacks: Any = (), clients: Any = None, resume: Any = None, **settings: Any
) -> tuple[FederatedTrainer, RoundRecorder]:
    """Train a federation. `args` in `settings` are training arguments; the other settings configure the federation."""
    recorder = RoundRecorder()
    trainer = FederatedTrainer(
        model=tiny_model(problem_type="single_label_classification"),
        args=arguments(folder, **settings.pop("args", {})),
        train_dataset=clients or CLIENTS,
        data_collator=recorder.collator,
        callbacks=[recorder, *callbacks],
        federation=FederatedConfig(num_rounds=num_rounds, **settings),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, recorder


def num_examples(recorder: RoundRecorder) -> list[dict[str, int]]:
    return [{client_id: update.num_examples for client_id, update in updates.items()} for updates in recorder.updates]


# ---- Number of examples


@pytest.mark.parametrize(
    ("balance", "max_rows", "expected"),
    [("min", None, 3), ("min", 2, 2), ("min", 9, 3), (None, 8, 8), (None, None, None)],
)
def test_smaller_limit_of_balance_and_max_rows_per_round_applies(balance, max_rows, expected):
    assert RowLimit(SIZES, balance, max_rows)(["a", "b", "c"]) == expected


def test_balanced_clients_train_on_the_number_of_examples_of_the_smallest_client(tmp_path):
    _, recorder = train_federation(tmp_path, balance="min")
    assert num_examples(recorder) == [{"a": 3, "b": 3, "c": 3}] * 2


def test_balance_uses_the_smallest_client_of_the_cohort(tmp_path):
    _, recorder = train_federation(tmp_path, num_rounds=6, balance="min", clients_per_round=2)
    cohorts = [tuple(counts) for counts in num_examples(recorder)]
    assert {("a", "c"), ("b", "c")} <= set(cohorts)
    for cohort, counts in zip(cohorts, num_examples(recorder), strict=True):
        assert set(counts.values()) == {min(SIZES[client_id] for client_id in cohort)}


def test_clients_below_the_limit_train_on_all_examples(tmp_path):
    _, recorder = train_federation(tmp_path, max_rows_per_round=5)
    assert num_examples(recorder) == [{"a": 5, "b": 3, "c": 5}] * 2


# ---- Selection of examples


def test_each_round_draws_other_examples_of_the_client_without_replacement(tmp_path):
    _, recorder = train_federation(tmp_path, num_rounds=4, max_rows_per_round=5)
    drawn = [frozenset(seen["a"]) for seen in recorder.examples]
    for round, examples_by_client in enumerate(recorder.examples):
        for client_id, seen in examples_by_client.items():
            assert len(seen) == len(set(seen)) == min(SIZES[client_id], 5)
            assert {OWNER[ids] for ids in seen} == {client_id}
        # The selection depends only on the seed of the run, the round and the client id.
        positions = draw_examples(10, 5, client_seed(42, "a", round))
        assert drawn[round] == {tuple(ids) for ids in CLIENTS["a"][positions]["input_ids"]}
    assert len(set(drawn)) == 4


def test_local_epochs_repeat_the_drawn_examples(tmp_path):
    _, recorder = train_federation(tmp_path, num_rounds=1, max_rows_per_round=5, local_epochs=3)
    seen = recorder.examples[0]["a"]
    assert len(seen) == 15 and {seen.count(ids) for ids in seen} == {3}
    assert recorder.updates[0]["a"].num_steps == 3 * 2  # batches of 4


def test_local_steps_use_the_drawn_examples(tmp_path):
    trainer, recorder = train_federation(tmp_path, num_rounds=1, max_rows_per_round=5, local_steps=6)
    assert {update.num_steps for update in recorder.updates[0].values()} == {6}
    assert len(set(recorder.examples[0]["a"])) == 5
    assert num_examples(recorder) == [{"a": 5, "b": 3, "c": 5}]


def test_examples_are_drawn_uniformly_and_keep_their_order():
    counts = np.zeros(10)
    for seed in range(4000):
        drawn = draw_examples(10, 3, seed)
        assert drawn.tolist() == sorted(set(drawn.tolist()))
        counts[drawn] += 1
    deviation = (4000 * 0.3 * 0.7) ** 0.5
    assert np.abs(counts - 1200).max() < 5 * deviation


def test_draws_do_not_change_the_global_generators():
    np.random.seed(0), torch.manual_seed(0)
    states = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    draw_examples(10, 3, seed=1)
    assert states == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_limits_above_all_clients_do_not_change_the_result(tmp_path):
    plain, _ = train_federation(tmp_path / "plain", clients={"a": rows(6), "b": rows(6, seed=1)})
    limited, _ = train_federation(
        tmp_path / "limited", clients={"a": rows(6), "b": rows(6, seed=1)}, balance="min", max_rows_per_round=6
    )
    assert same_weights(plain.model, limited.model)


def test_drawn_examples_do_not_depend_on_other_clients(tmp_path):
    _, alone = train_federation(tmp_path / "alone", clients={"a": CLIENTS["a"]}, max_rows_per_round=5)
    _, together = train_federation(tmp_path / "together", max_rows_per_round=5)
    for round in range(2):
        assert set(alone.examples[round]["a"]) == set(together.examples[round]["a"])


# ---- Effects on training


def test_average_weights_clients_by_the_number_of_drawn_examples(tmp_path):
    _, recorder = train_federation(tmp_path, num_rounds=1, max_rows_per_round=5)
    updates, weights = recorder.updates[0], {"a": 5, "b": 3, "c": 5}
    for name, value in recorder.global_states[0].items():
        if value.is_floating_point():
            mean = sum(weights[client_id] * updates[client_id].state[name].double() for client_id in SIZES) / 13
            torch.testing.assert_close(value.double(), mean, atol=1e-6, rtol=0)


def test_global_schedule_decays_over_the_rounds_for_cohorts_of_any_size(tmp_path):
    _, recorder = train_federation(
        tmp_path,
        num_rounds=6,
        balance="min",
        clients_per_round=2,
        local_epochs=4,
        args={"lr_scheduler_type": "linear"},
    )
    assert len({tuple(counts) for counts in num_examples(recorder)}) > 1
    for round, updates in enumerate(recorder.updates):
        for update in updates.values():
            steps = update.num_steps
            assert steps == 4 * -(-update.num_examples // 4)
            # The learning rate at the last step of the round, on a linear schedule of six rounds of `steps` steps.
            expected = 1e-2 * (1 - (round * steps + steps - 1) / (6 * steps))
            assert update.metrics["learning_rate"] == pytest.approx(expected)


def test_samples_per_second_counts_drawn_examples(tmp_path):
    trainer, _ = train_federation(tmp_path, balance="min", local_epochs=2)
    end = trainer.state.log_history[-1]
    # Two rounds of two epochs, in which each of three clients draws three examples.
    assert end["train_samples_per_second"] == pytest.approx(2 * 2 * 9 / end["train_runtime"], abs=1e-3)


class StopAfterFirst(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = True


def test_resumed_run_draws_the_examples_of_an_uninterrupted_run(tmp_path):
    settings: dict[str, Any] = {"num_rounds": 3, "balance": "min", "max_rows_per_round": 6, "clients_per_round": 2}
    saving = {"args": {"save_strategy": "steps"}}
    uninterrupted, expected = train_federation(tmp_path / "whole", **settings, **saving)
    train_federation(tmp_path / "stopped", **settings, **saving, callbacks=[StopAfterFirst()])
    assert [path.name for path in list_checkpoints(tmp_path / "stopped")] == ["checkpoint-1"]
    resumed, recorder = train_federation(tmp_path / "stopped", **settings, **saving, resume=True)
    assert recorder.examples == expected.examples[1:]
    assert same_weights(resumed.model, uninterrupted.model)
    with pytest.raises(ValueError, match="max_rows_per_round: 5 in this run, 6 in the checkpoint"):
        train_federation(tmp_path / "stopped", **{**settings, "max_rows_per_round": 5}, **saving, resume=True)


def test_model_card_states_the_limit_of_examples(tmp_path):
    trainer, _ = train_federation(tmp_path, num_rounds=1, balance="min", max_rows_per_round=1250)
    card = render(RunRecord.from_trainer(trainer))
    assert re.search(
        r"Examples per client and round \| at most 1,250, at most the number of the smallest sampled client", card
    )


# ---- Invalid settings


@pytest.mark.parametrize("settings", [{"balance": "min"}, {"max_rows_per_round": 3}])
def test_limits_are_refused_for_streams(tmp_path, settings):
    clients = {"a": rows(4).to_iterable_dataset(), "b": rows(4, seed=1).to_iterable_dataset()}
    with pytest.raises(
        ValueError,
        match=f"of client 'a' does not work with {next(iter(settings))}=.*leave `{next(iter(settings))}` out",
    ):
        train_federation(tmp_path, clients=clients, local_steps=2, **settings)


def test_limit_below_the_batch_size_is_refused_with_dataloader_drop_last(tmp_path):
    clients = {"a": rows(8), "b": rows(8, seed=1)}
    with pytest.raises(
        ValueError, match="max_rows_per_round=3 is less than a batch of 4.*Set `dataloader_drop_last` to False"
    ):
        train_federation(tmp_path, clients=clients, max_rows_per_round=3, args={"dataloader_drop_last": True})


@pytest.mark.parametrize(("max_rows", "expected"), [(None, 3), (2, 2)])
def test_clients_without_a_known_number_of_examples_do_not_limit_the_others(max_rows, expected):
    """A client on another machine has no number before it joins, and a hostile client may announce 0 examples."""
    limit = RowLimit({"a": 10, "b": 3, "late": None, "empty": 0}, "min", max_rows)
    assert limit(["a", "b", "late", "empty"]) == expected
    assert limit(["late", "empty"]) == max_rows
