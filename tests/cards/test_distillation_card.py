"""The card of a distillation names the method, the public rows and what clients revealed."""

from __future__ import annotations

import pytest
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.cards import RunRecord, render
from hf_federated.cards.tables import size


def trained(folder, method, public=True, others=None, **kwargs):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(folder),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        **{"eval_dataset": rows(6, seed=2), **(others or {})},
        public_dataset=rows(11, seed=3).remove_columns("labels") if public else None,
        federation=FederatedConfig(num_rounds=2, distillation=method, distillation_kwargs=kwargs),
    )
    trainer.train()
    return trainer


def test_the_card_says_what_travelled_and_what_stayed(tmp_path):
    trainer = trained(tmp_path, "dsfl", sharpening_temperature=0.5)
    record = RunRecord.from_trainer(trainer)
    text = render(record)
    assert "trained federatedly with `hf_federated` (DSFL)" in text
    assert "DSFL(sharpening_temperature=0.5)" in text
    assert "predictions of 11 public rows" in text and "stayed with the clients" in text
    assert f"together sent {size(trainer.ledger.bytes_up)} and received {size(trainer.ledger.bytes_down)}" in text
    assert "dsfl" in text.split("---")[1]
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == text


@pytest.mark.parametrize(("method", "said"), [("feddf", "also sent the parameters"), ("feded", "They received those")])
def test_the_card_says_where_parameters_travelled_too(tmp_path, method, said):
    assert said in render(RunRecord.from_trainer(trained(tmp_path, method)))


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({}, "(without noise)"),
        ({"dp_epsilon": 0.5, "dp_delta": 1e-5}, "with noise for ε=0.5 and δ=1e-05, which hold"),
    ],
)
def test_the_card_says_that_scores_of_public_rows_travelled(tmp_path, privacy, said):
    record = RunRecord.from_trainer(trained(tmp_path, "fedaux", **privacy))
    text = render(record)
    assert "predictions of 11 public rows" in text and "also sent the parameters" in text
    assert "Beside these it sent a score of each public row" in text and said in text
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == text


def test_the_card_of_a_method_without_public_rows_says_what_travelled(tmp_path):
    small = {"num_samples": 3, "sample_length": 4, "num_steps": 1}
    text = render(RunRecord.from_trainer(trained(tmp_path, "feddrs", public=False, **small)))
    assert "a sampled client received and sent back the trainable parameters" in text
    assert "how many rows of each label it has" in text and "public row" not in text


def saved_and_read(record, folder):
    """The card, which a saved record gives too."""
    record.save(folder / "run.json")
    assert render(RunRecord.load(folder / "run.json")) == render(record)
    return render(record)


@pytest.mark.parametrize(
    ("method", "name", "others"),
    [("fedid", "FedID", {"server_dataset": rows(4, seed=4)}), ("adafd", "AdaFD", {})],
)
def test_the_card_names_the_method_the_public_data_and_the_bytes(tmp_path, method, name, others):
    trainer = trained(tmp_path, method, others=others)
    text = saved_and_read(RunRecord.from_trainer(trainer), tmp_path)
    assert f"trained federatedly with `hf_federated` ({name})" in text and f"{name}()" in text
    assert method in text.split("---")[1]
    assert "predictions of 11 public rows, which server and clients all have. Parameters" in text
    assert "stayed with the clients" in text and "function of the user's" not in text
    assert f"together sent {size(trainer.ledger.bytes_up)} and received {size(trainer.ledger.bytes_down)}" in text
    public = text[text.index("| Public data ") : text.index("| Evaluation data ")]
    assert f"| {trainer.public_dataset._fingerprint} |" in public.replace("`", "")
    assert [row.split("|")[2].strip() for row in public.splitlines() if "| Rows" in row] == ["11"]


def test_the_card_says_how_often_predictions_of_a_row_travelled(tmp_path):
    trainer = trained(tmp_path, "fedid", others={"server_dataset": rows(4, seed=4)}, public_epochs=3)
    text = saved_and_read(RunRecord.from_trainer(trainer), tmp_path)
    assert "predictions of 11 public rows, which server and clients all have, in each of 3 passes over them." in text


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_card_says_what_a_function_that_weighs_clients_was_given(tmp_path, evaluates):
    others = {"eval_dataset": FederatedDataset.from_dict({"a": rows(4, seed=2), "b": rows(4, seed=3)})}
    prompts = []
    settings = {"weighting": "llm", "generate": lambda prompt: prompts.append(prompt) or "1, 1"}
    trainer = trained(tmp_path, "adafd", others=others, clients_evaluate=evaluates, **settings)
    text = saved_and_read(RunRecord.from_trainer(trainer), tmp_path)
    assert "weighed by a function of the user's, which may call a service elsewhere" in text
    f1 = ", its F1 where its metrics have one" if evaluates else ""
    assert f"It was given each client's training loss{f1} and, of its predictions, each class's mean logit" in text
    assert ("it sent the metrics of its model on its own evaluation rows" in text) == evaluates
    assert all(what in prompts[0] for what in ("training loss=", "mean logits per class=", "logits entropy="))


def test_the_card_of_mutual_kd_says_that_factors_of_updates_came_back(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        client_model_init=lambda client_id: tiny_model(seed=7),
        federation=FederatedConfig(num_rounds=1, aggregation="mutual_kd"),
    )
    trainer.train()
    text = saved_and_read(RunRecord.from_trainer(trainer), tmp_path)
    assert "trained federatedly with `hf_federated` (MutualKD)" in text
    assert "a sampled client received the trainable parameters: " in text and "sent back the trainable" not in text
    assert "It sent back what it had changed in them and no parameters, each matrix as the factors" in text


def test_the_card_of_an_average_says_that_parameters_came_back(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        federation=FederatedConfig(num_rounds=1),
    )
    trainer.train()
    assert "received and sent back the trainable parameters: " in render(RunRecord.from_trainer(trainer))
