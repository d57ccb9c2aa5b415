"""Evaluation over ranks: the evaluations that are spread, and the share of each rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from federations import build_federation
from tiny import arguments, rows, tiny_model
from transformers import Trainer

from hf_federated import FederatedTrainer
from hf_federated.trainer.evaluation import SpreadLoader, SpreadPredictions, can_spread


# Two batches of 4 and 3 examples.
EVAL_ROWS = rows(7, seed=2)


def test_evaluation_of_several_batches_is_spread(tmp_path):
    trainer = build_federation(tmp_path, trainer={"eval_dataset": EVAL_ROWS})
    assert can_spread(trainer, trainer.get_eval_dataloader())


def test_evaluation_of_one_batch_is_not_spread(tmp_path):
    trainer = build_federation(tmp_path, trainer={"eval_dataset": EVAL_ROWS})
    assert not can_spread(trainer, trainer.get_eval_dataloader(rows(3)))


@pytest.mark.parametrize("method", ["compute_loss", "prediction_step", "evaluation_loop"])
def test_evaluation_with_custom_prediction_is_not_spread(tmp_path, method):
    """A custom method may count or log the batches that it receives."""
    custom = type(
        "Custom", (Trainer,), {method: lambda self, *args, **kwargs: getattr(Trainer, method)(self, *args, **kwargs)}
    )
    trainer = build_federation(tmp_path, base=custom, trainer={"eval_dataset": EVAL_ROWS})
    assert not can_spread(trainer, trainer.get_eval_dataloader())


class TwoRanks:
    """The two ranks of a launch. The test runs the ranks one after another."""

    world_size = 2

    def __init__(self) -> None:
        self.rank = 0
        self.parts: list[dict] = [{}, {}]

    def gather(self, label, tree):
        self.parts[self.rank] = tree
        return self.parts


def test_each_rank_predicts_every_second_batch(tmp_path):
    trainer = FederatedTrainer(model=tiny_model(), args=arguments(tmp_path), train_dataset={"a": rows(4)})
    predicted: list[tuple[int, int]] = []
    ranks = TwoRanks()

    def prediction_step(model, inputs, prediction_loss_only, ignore_keys=None):
        predicted.append((ranks.rank, inputs))
        return torch.tensor(float(inputs)), None, None

    trainer.prediction_step = prediction_step
    loader = SpreadLoader(SimpleNamespace(__len__=None), 5, trainer.accelerator.gradient_state)
    loader.window = [10, 11, 12, 13, 14]
    results = []
    for ranks.rank in (1, 0):
        step = SpreadPredictions(trainer, ranks, loader)
        if ranks.rank == 1:
            with pytest.raises(KeyError):  # Rank 0 has not predicted yet.
                step(None, None, True)
            continue
        results = [float(step(None, None, True)[0]) for _ in range(5)]
    assert results == [10, 11, 12, 13, 14]
    assert predicted == [(1, 11), (1, 13), (0, 10), (0, 12), (0, 14)]


def test_gradient_state_reports_the_end_of_the_data_with_the_last_batch(tmp_path):
    trainer = build_federation(tmp_path, trainer={"eval_dataset": EVAL_ROWS})
    plain = trainer.get_eval_dataloader()
    state = trainer.accelerator.gradient_state
    loader = SpreadLoader(trainer.get_eval_dataloader(), 8, state)
    expected = [(state.end_of_dataloader, state.remainder) for _ in plain]
    assert [(state.end_of_dataloader, state.remainder) for _ in loader] == expected == [(False, 3), (True, 3)]
    assert not state.in_dataloader
