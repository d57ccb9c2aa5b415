"""AdaFD's client weights, from training losses or from the reply of a language model."""

from __future__ import annotations

import pytest
import torch
from distillation_setup import NUM_PUBLIC, SIZES, Recorder, distillation_trainer
from tiny import arguments, rows, tiny_model
from transformers import Trainer

from hf_federated import FederatedConfig, federate
from hf_federated.distillation import ClientReport, enwc
from hf_federated.messages import ClientUpdate


def updates(record):
    return [message for message in record.received if isinstance(message, ClientUpdate)]


class RecordedLosses(Trainer):
    """Record the losses of all training batches of all clients."""

    seen: list[float] = []

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training and torch.is_grad_enabled():
            self.seen.append(float(loss.detach()))
        return (loss, outputs) if return_outputs else loss


class RecordedMeanLosses(RecordedLosses):
    """Divide losses by the items of all accumulated batches, as language models do, and record batch means."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if num_items_in_batch is not None:
            loss = loss * inputs["labels"].numel() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulated", [1, 2, 4])
@pytest.mark.parametrize("trainer_class", [RecordedLosses, RecordedMeanLosses])
@pytest.mark.sampled(2)
def test_min_epoch_loss_is_the_smallest_epoch_mean_of_the_round(tmp_path, trainer_class, accumulated):
    trainer_class.seen.clear()
    record, sizes = Recorder(), {"a": [4, 4, 2], "b": [4, 2]}
    trainer = federate(trainer_class)(
        model=tiny_model(),
        # The learning rate is so large that losses rise and fall.
        args=arguments(tmp_path, learning_rate=0.2, gradient_accumulation_steps=accumulated),
        train_dataset={"a": rows(10), "b": rows(6, seed=1)},
        public_dataset=rows(NUM_PUBLIC, seed=5).remove_columns("labels"),
        federation=FederatedConfig(num_rounds=2, local_epochs=4, distillation="adafd"),
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train()
    seen, smallest = iter(trainer_class.seen), []
    for update in updates(record):
        epochs = []
        for _ in range(4):
            losses = [next(seen) for _ in sizes[update.client_id]]
            if trainer_class is RecordedLosses:
                epochs.append(sum(losses) / len(losses))
                continue
            # The mean over the examples of each step.
            losses_and_sizes = list(zip(losses, sizes[update.client_id], strict=True))
            steps = [losses_and_sizes[start : start + accumulated] for start in range(0, len(losses), accumulated)]
            means = [sum(loss * size for loss, size in step) / sum(size for _, size in step) for step in steps]
            epochs.append(sum(means) / len(means))
        assert update.metrics["min_epoch_loss"] == pytest.approx(min(epochs), rel=1e-5)
        if accumulated == 1 or trainer_class is RecordedMeanLosses:
            assert update.metrics["loss"] == pytest.approx(sum(epochs) / 4, rel=1e-5)
        smallest.append(epochs.index(min(epochs)))
    assert len(smallest) == 4 and next(seen, None) is None
    # The smallest loss is not always in the first epoch and not always in the last epoch.
    assert not set(smallest) <= {0} and not set(smallest) <= {3}


def test_client_weights_are_computed_from_min_epoch_loss(tmp_path):
    record = Recorder()
    trainer = distillation_trainer(tmp_path, "adafd", {"beta": 3.0}, record=record, federation={"num_rounds": 1})
    trainer.train()
    losses = {update.client_id: update.metrics["min_epoch_loss"] for update in updates(record)}
    exponentials = {client_id: torch.tensor(-3.0 * loss).exp().item() for client_id, loss in losses.items()}
    total = sum(exponentials.values())
    logged = next(entry for entry in trainer.state.log_history if "federated/weight/a" in entry)
    for client_id, value in exponentials.items():
        assert logged[f"federated/weight/{client_id}"] == pytest.approx(value / total, rel=1e-5)


def test_llm_weights_fall_back_when_the_reply_is_no_list_of_numbers(tmp_path):
    prompts: list[str] = []

    def generate(prompt: str) -> str:
        prompts.append(prompt)
        return "2, 1, 1" if len(prompts) == 1 else "I would trust the first."

    trainer = distillation_trainer(tmp_path, "adafd", {"weighting": "llm", "generate": generate})
    trainer.train()
    first, second = (entry for entry in trainer.state.log_history if "federated/weight/a" in entry)
    assert [first[f"federated/weight/{client_id}"] for client_id in SIZES] == [0.5, 0.25, 0.25]
    assert (first["federated/llm_fell_back"], second["federated/llm_fell_back"]) == (0.0, 1.0)
    assert not any(client_id in prompts[0].split() for client_id in ("b", "c"))


def test_llm_fallback_weights_use_beta(tmp_path):
    weights = {}
    for beta in (5.0, 50.0):
        record = Recorder()
        kwargs = {"weighting": "llm", "beta": beta, "generate": lambda prompt: "I would trust the first."}
        trainer = distillation_trainer(
            tmp_path / str(beta), "adafd", kwargs, record=record, federation={"num_rounds": 1}
        )
        trainer.train()
        weights[beta] = trainer.distillation.weights
        client_reports = [
            ClientReport(u.client_id, u.num_examples, u.metrics["min_epoch_loss"]) for u in updates(record)
        ]
        assert weights[beta] == pytest.approx(enwc(client_reports, beta))
    assert any(abs(weights[5.0][client_id] - weights[50.0][client_id]) > 0.01 for client_id in SIZES)
