"""The card of a run over a network lists what the server learned of a client before its first update."""

from __future__ import annotations

import pytest
from threaded_clients import honest, run_with_threads
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.cards import RunRecord, render


FEDDRS = {"distillation": "feddrs", "distillation_kwargs": {"num_samples": 2, "sample_length": 3, "num_steps": 1}}
CLASSES = "its number of training examples of each class"


@pytest.mark.parametrize("federation", [{}, FEDDRS], ids=["fedavg", "feddrs"])
def test_card_lists_what_clients_announced_and_which_settings_were_compared(tmp_path, federation):
    trainer, _ = run_with_threads(tmp_path, {"north": honest, "south": honest}, {}, **federation)
    record = RunRecord.from_trainer(trainer)
    text = render(record)
    assert "Before its first update, the server learned of a client its name, its number of training examples" in text
    assert "its number of evaluation examples" in text and (CLASSES in text) == bool(federation)
    settings = record.exchanged["compared_settings"]
    assert f"{len(settings)} settings" in text and all(f"`{name}`" in text for name in settings)
    assert {"learning_rate", "labels", "model"} <= set(settings)
    assert record.train_data.num_rows == 16 and record.train_data.rows_per_client == [8, 8.0, 8]
    # The examples of the global evaluation are those of the server.
    assert record.eval_data is not None and record.eval_data.num_rows == 4 and record.eval_data.num_clients is None


def test_model_and_card_do_not_contain_the_number_of_examples_of_each_client(tmp_path):
    counts = {"north": 31_337, "south": 31_337}
    trainer, _ = run_with_threads(tmp_path, dict.fromkeys(counts, honest), {}, max_examples_per_client=counts)
    trainer.save_model()
    record = RunRecord.from_trainer(trainer)
    assert record.federation["max_examples_per_client"] == "one number for each of 2 clients"
    assert "31337" not in repr(record) and "31337" not in (tmp_path / "federated_config.json").read_text()
    assert trainer.federation.max_examples_per_client == counts


def test_card_of_a_run_in_one_process_has_no_such_paragraph(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"north": rows(4), "south": rows(4)},
        federation=FederatedConfig(num_rounds=1),
    )
    assert "Before its first update" not in render(RunRecord.from_trainer(trainer))
