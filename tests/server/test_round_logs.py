"""Log entries of a federation equal values that are counted by hand."""

from __future__ import annotations

import functools
import statistics

import pytest
from federations import CLIENTS, build_federation
from tiny import ROW_LENGTH, arguments, rows, tiny_model
from transformers import Trainer

from hf_federated import FederatedCallback


EVAL_ROWS = rows(8, seed=3)

build = functools.partial(build_federation, num_rounds=4)


def test_logged_loss_is_the_mean_over_clients_weighted_by_examples(tmp_path) -> None:
    trainer = build(tmp_path, federation={"log_clients": True})
    trainer.train()
    weights = {name: data.num_rows for name, data in CLIENTS.items()}
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in entries:
        mean = sum(weights[name] * entry[f"client/{name}/loss"] for name in CLIENTS) / sum(weights.values())
        assert entry["loss"] == pytest.approx(mean, rel=1e-6)
        for name in ("grad_norm", "learning_rate"):
            assert entry[name] == pytest.approx(statistics.fmean(entry[f"client/{c}/{name}"] for c in CLIENTS))
        assert [entry[f"client/{name}/num_steps"] for name in CLIENTS] == [2, 1, 2]
    assert all(entry["federated/num_clients"] == 3 and entry["federated/num_failed"] == 0 for entry in entries)


def test_logged_learning_rate_is_the_rate_of_the_last_local_step(tmp_path) -> None:
    # Two steps per round and eight in total, from 0.01 down to 0. The second step of round r has the index 2r + 1.
    trainer = build(tmp_path, train_dataset={"a": rows(8), "b": rows(8, seed=1)})
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.01 * (1 - (2 * round + 1) / 8) for round in range(4)])


def test_logged_bytes_equal_the_ledger(tmp_path) -> None:
    trainer = build(tmp_path)
    trainer.train()
    rounds = trainer.ledger.rounds()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for number, entry in enumerate(entries, start=1):
        for direction in ("bytes_up", "bytes_down"):
            assert entry[f"federated/{direction}"] == sum(row[direction] for row in rounds[:number])
    model_bytes = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert 3 * model_bytes < rounds[0]["bytes_down"] < 3 * (model_bytes + 8192)


@pytest.mark.parametrize("include", ["no", "all", "non_padding"])
def test_flos_and_tokens_of_one_client_equal_the_plain_trainer(tmp_path, include) -> None:
    options = {"include_num_input_tokens_seen": include}
    plain = Trainer(tiny_model(), arguments(tmp_path / "plain", num_train_epochs=4, **options), train_dataset=rows(10))
    plain.train()
    one = build(tmp_path / "one", train_dataset=rows(10), **options)
    one.train()
    assert one.state.total_flos == plain.state.total_flos > 0
    assert one.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
    tokens = [[entry.get("num_input_tokens_seen") for entry in run.state.log_history] for run in (one, plain)]
    assert tokens[0] == tokens[1]
    if include != "no":
        assert one.state.num_input_tokens_seen == 4 * 10 * ROW_LENGTH


def test_throughput_counts_the_examples_of_all_clients(tmp_path) -> None:
    sampled: list[str] = []

    class CohortRecorder(FederatedCallback):
        def on_round_begin(self, args, state, control, round, **kwargs) -> None:
            sampled.extend(round.cohort)

    trainer = build(
        tmp_path,
        federation={"clients_per_round": 2, "local_epochs": 3},
        trainer={"callbacks": [CohortRecorder()]},
    )
    trainer.train()
    end = trainer.state.log_history[-1]
    assert len(sampled) == 4 * 2
    num_examples = 3 * sum(CLIENTS[client].num_rows for client in sampled)
    assert end["train_samples_per_second"] == pytest.approx(num_examples / end["train_runtime"], abs=1e-3)
    assert end["train_steps_per_second"] == pytest.approx(4 / end["train_runtime"], rel=0.01)


def test_throughput_of_a_resumed_run_counts_the_examples_after_the_checkpoint(tmp_path) -> None:
    build(tmp_path, save_strategy="steps", save_steps=1).train()
    trainer = build(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    end = trainer.state.log_history[-1]
    num_examples = sum(dataset.num_rows for dataset in CLIENTS.values())
    assert end["train_samples_per_second"] == pytest.approx(num_examples / end["train_runtime"], abs=1e-3)


def test_throughput_of_local_steps_counts_the_trained_examples(tmp_path) -> None:
    trainer = build(tmp_path, train_dataset={"a": rows(40), "b": rows(40)}, federation={"local_steps": 2})
    trainer.train()
    end = trainer.state.log_history[-1]
    # 4 rounds of 2 clients with 2 batches of 4 examples.
    assert end["train_samples_per_second"] == pytest.approx(64 / end["train_runtime"], abs=1e-3)
