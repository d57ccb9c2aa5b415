"""Cards of distillation runs: the method, the public data and the exchanged information."""

from __future__ import annotations

import pytest
from tiny import arguments, rows, tiny_model

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.cards import RunRecord, render
from hf_federated.cards.tables import format_bytes


def trained(folder, method, public=True, trainer_arguments=None, **kwargs):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(folder),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        **{"eval_dataset": rows(6, seed=2), **(trainer_arguments or {})},
        public_dataset=rows(11, seed=3).remove_columns("labels") if public else None,
        federation=FederatedConfig(num_rounds=2, distillation=method, distillation_kwargs=kwargs),
    )
    trainer.train()
    return trainer


def test_dsfl_card_names_public_data_and_bytes(tmp_path):
    trainer = trained(tmp_path, "dsfl", sharpening_temperature=0.5)
    record = RunRecord.from_trainer(trainer)
    text = render(record)
    assert "trained with federated learning (`hf_federated`, DSFL)" in text
    assert "DSFL(sharpening_temperature=0.5)" in text
    assert "predictions of its model on 11 public examples" in text and "stayed with the clients" in text
    assert (
        f"together sent {format_bytes(trainer.ledger.bytes_up)} and received {format_bytes(trainer.ledger.bytes_down)}"
        in text
    )
    assert "dsfl" in text.split("---")[1]
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == text


@pytest.mark.parametrize(
    ("method", "expected"),
    [("feddf", "also sent the parameters"), ("feded", "The clients received the parameters of the server's model")],
)
def test_card_names_direction_of_exchanged_parameters(tmp_path, method, expected):
    assert expected in render(RunRecord.from_trainer(trained(tmp_path, method)))


@pytest.mark.parametrize(
    ("privacy", "expected"),
    [
        ({}, "| public example | server | none |"),
        (
            {"dp_epsilon": 0.5, "dp_delta": 1e-5},
            "| public example | server | ε=0.5 and δ=1e-05, for this value alone |",
        ),
    ],
)
def test_fedaux_card_names_scores_and_differential_privacy(tmp_path, privacy, expected):
    record = RunRecord.from_trainer(trained(tmp_path, "fedaux", **privacy))
    text = render(record)
    assert "predictions of its model on 11 public examples" in text and "also sent the parameters" in text
    assert "| certainty score: how similar the example is" in text and expected in text
    record.save(tmp_path / "run.json")
    assert render(RunRecord.load(tmp_path / "run.json")) == text


def test_feddrs_card_without_public_data_names_parameters_and_class_counts(tmp_path):
    small = {"num_samples": 3, "sample_length": 4, "num_steps": 1}
    text = render(RunRecord.from_trainer(trained(tmp_path, "feddrs", public=False, **small)))
    assert "a sampled client received and sent back the trainable parameters" in text
    assert "| number of examples | class | server | none |" in text and "public example" not in text


def render_after_reload(record, folder):
    """Render the card, and check that the saved record gives the same card."""
    record.save(folder / "run.json")
    assert render(RunRecord.load(folder / "run.json")) == render(record)
    return render(record)


@pytest.mark.parametrize(
    ("method", "name", "trainer_arguments"),
    [("fedid", "FedID", {"server_dataset": rows(4, seed=4)}), ("adafd", "AdaFD", {})],
)
def test_fedid_and_adafd_cards_name_public_data_and_bytes(tmp_path, method, name, trainer_arguments):
    trainer = trained(tmp_path, method, trainer_arguments=trainer_arguments)
    text = render_after_reload(RunRecord.from_trainer(trainer), tmp_path)
    assert f"trained with federated learning (`hf_federated`, {name})" in text and f"{name}()" in text
    assert method in text.split("---")[1]
    assert "predictions of its model on 11 public examples, which the server and all clients have. The param" in text
    assert "stayed with the clients" in text and "function that the user provided" not in text
    assert (
        f"together sent {format_bytes(trainer.ledger.bytes_up)} and received {format_bytes(trainer.ledger.bytes_down)}"
        in text
    )
    public = text[text.index("| Public data ") : text.index("| Evaluation data ")]
    assert f"| {trainer.public_dataset._fingerprint} |" in public.replace("`", "")
    assert [row.split("|")[2].strip() for row in public.splitlines() if "| Examples" in row] == ["11"]


def test_card_names_number_of_passes_over_public_data(tmp_path):
    trainer = trained(tmp_path, "fedid", trainer_arguments={"server_dataset": rows(4, seed=4)}, public_epochs=3)
    text = render_after_reload(RunRecord.from_trainer(trainer), tmp_path)
    assert (
        "11 public examples, which the server and all clients have, in each of 3 passes over these examples." in text
    )


@pytest.mark.parametrize("evaluates", [False, True])
def test_card_names_inputs_of_the_user_function_that_weights_clients(tmp_path, evaluates):
    trainer_arguments = {"eval_dataset": FederatedDataset.from_dict({"a": rows(4, seed=2), "b": rows(4, seed=3)})}
    prompts = []
    settings = {"weighting": "llm", "generate": lambda prompt: prompts.append(prompt) or "1, 1"}
    trainer = trained(tmp_path, "adafd", trainer_arguments=trainer_arguments, clients_evaluate=evaluates, **settings)
    text = render_after_reload(RunRecord.from_trainer(trainer), tmp_path)
    assert "A function that the user provided computed the weights of the clients." in text
    assert "This function may call an external service." in text
    recipient = "the user's function or language model"
    assert f"| training loss | client | {recipient} | none |" in text
    assert f"| mean and standard deviation of the logits | class | {recipient} | none |" in text
    assert f"| mean entropy of the predictions | client | {recipient} | none |" in text
    assert (f"| F1, if the metrics have one | client | {recipient} | none |" in text) == evaluates
    assert ("| metrics of the client's model on its own evaluation examples | client | server |" in text) == evaluates
    assert all(field in prompts[0] for field in ("training loss=", "mean logits per class=", "logits entropy="))


def test_mutual_kd_card_names_update_factors_and_no_parameters(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        client_model_init=lambda client_id: tiny_model(seed=7),
        federation=FederatedConfig(num_rounds=1, aggregation="mutual_kd"),
    )
    trainer.train()
    text = render_after_reload(RunRecord.from_trainer(trainer), tmp_path)
    assert "trained with federated learning (`hf_federated`, MutualKD)" in text
    assert "a sampled client received the trainable parameters: " in text and "sent back the trainable" not in text
    assert "It sent back how training changed these parameters, and no parameters." in text
    assert "| change, whole or as factors of its singular value decomposition |" in text


def test_fedavg_card_names_returned_parameters(tmp_path):
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(8), "b": rows(8, seed=1)},
        federation=FederatedConfig(num_rounds=1),
    )
    trainer.train()
    assert "received and sent back the trainable parameters: " in render(RunRecord.from_trainer(trainer))
