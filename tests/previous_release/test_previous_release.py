"""Algorithms and callbacks that users wrote for version 0.1 run, with a warning, and give the same result."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import pytest
import torch
from distillation_setup import distillation_trainer, same_clients
from federations import CLIENTS, build_federation
from tiny import same_weights

import hf_federated
from hf_federated import DSFL, MHAT, FedID, FedProx, aggregation, distillation
from hf_federated.distillation import DistillationClient
from hf_federated.messages import Predictions


def load(name: str):
    """Import a module anew, because a class warns when it is defined."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


def test_local_hook_of_version_0_1_trains_as_before(tmp_path) -> None:
    with pytest.warns(FutureWarning, match=r"Pull\.local_hook is an interface of hf_federated 0\.1"):
        module = load("averaging_0_1")
    trainer = build_federation(tmp_path / "old", federation={"aggregation": module.Pull(0.5)})
    trainer.train()
    reference = build_federation(tmp_path / "new", federation={"aggregation": FedProx(0.5)})
    reference.train()
    assert same_weights(trainer.model, reference.model)
    # The clients take two, one and two steps in each of two rounds, and keep the count.
    assert trainer.aggregation.num_steps == pytest.approx(2 * (2 + 1 + 2) / 3)


def test_distillation_client_of_version_0_1_trains_as_before(tmp_path) -> None:
    with pytest.warns(FutureWarning, match="interface of hf_federated 0.1"):
        module = load("distillation_0_1")
    trainer = distillation_trainer(tmp_path / "old", module.SharpMean())
    trainer.train()
    reference = distillation_trainer(tmp_path / "new", DSFL())
    reference.train()
    assert same_weights(trainer.model, reference.model)
    num_rounds, num_clients = trainer.federation.num_rounds, len(trainer.clients)
    assert trainer.distillation.updates == [(name, num_rounds) for name in trainer.clients] * num_rounds
    assert num_clients == len({name for name, _ in trainer.distillation.updates})
    logged = [entry["rounds_of_client"] for entry in trainer.state.log_history if "rounds_of_client" in entry]
    assert logged == [float(number + 1) for number in range(num_rounds)]
    memory = trainer.engine.worker.models.get_state(next(iter(trainer.clients)))["memories"]["1 sharp_mean"]
    # Each round asks for predictions and sends targets.
    assert memory == {"rounds": num_rounds, "answers": 2 * num_rounds}


@pytest.mark.parametrize(("method", "kwargs"), [(DSFL, {}), (FedID, {"feedback": "per_example"})])
def test_distillation_that_calls_the_loss_of_its_base_class_trains_as_the_base_class(tmp_path, method, kwargs) -> None:
    with pytest.warns(FutureWarning, match="SameLoss.client_loss is an interface") as warned:

        @dataclass(kw_only=True, repr=False, eq=False)
        class SameLoss(method):
            def client_loss(self, logits, targets, settings):
                return super().client_loss(logits, targets, settings)

            def feedback_loss(self, logits, message):
                return super().feedback_loss(logits, message)

    assert {warning.filename for warning in warned} == {__file__}
    trainer, reference = (
        distillation_trainer(tmp_path / cls.__name__, cls(**kwargs), federation={"num_rounds": 1})
        for cls in (SameLoss, method)
    )
    for run in (trainer, reference):
        run.train()
    assert same_weights(trainer.model, reference.model) and same_clients(trainer, reference)


def test_client_class_keeps_the_loss_of_the_base_class_and_may_override_the_replies(tmp_path) -> None:
    predicted = []

    class Client(DistillationClient):
        def predict(self, message, model, student):
            predicted.append(message.client_id)
            return Predictions(message.round, message.client_id, {"values": torch.zeros(student.num_rows, 2)})

    with pytest.warns(FutureWarning, match="ZeroPredictions.client is an interface"):

        @dataclass(kw_only=True, repr=False, eq=False)
        class ZeroPredictions(DSFL):
            client_class = Client

    trainer = distillation_trainer(tmp_path / "old", ZeroPredictions(), federation={"num_rounds": 1})
    trainer.train()
    assert predicted == list(trainer.clients)

    class ZeroPart(DSFL.client_part):
        def predict(self, message, model, student):
            return Predictions(message.round, message.client_id, {"values": torch.zeros(student.num_rows, 2)})

    @dataclass(kw_only=True, repr=False, eq=False)
    class Zero(DSFL):
        client_part = ZeroPart

    reference = distillation_trainer(tmp_path / "new", Zero(), federation={"num_rounds": 1})
    reference.train()
    assert same_weights(trainer.model, reference.model) and same_clients(trainer, reference)


def test_names_of_version_0_1_are_found_where_they_were() -> None:
    assert aggregation.LocalHook is hf_federated.LocalHook
    assert distillation.ClientContext is hf_federated.methods.ClientContext


def test_train_on_labelled_of_version_0_1_is_train_on_labeled() -> None:
    with pytest.warns(FutureWarning, match="Use `train_on_labeled`") as warned:
        former = MHAT(train_on_labelled=True)
    assert warned[0].filename == __file__
    assert former.settings() == MHAT(train_on_labeled=True).settings()
    assert former.train_on_labelled and not MHAT().train_on_labelled
    with pytest.raises(ValueError, match="Set only `train_on_labeled`"):
        MHAT(train_on_labeled=True, train_on_labelled=False)


def test_names_of_labeled_examples_in_version_0_1_work(tmp_path) -> None:
    trainer = distillation_trainer(tmp_path, "mhat", {"train_on_labeled": True})
    trainer.train()
    server = trainer.distillation.server
    with pytest.warns(FutureWarning, match="Use `labeled`"):
        assert server.labelled is server.labeled
    with pytest.warns(FutureWarning, match="Use `labeled_batch`"):
        assert torch.equal(server.labelled_batch(2)["labels"], server.labeled_batch(2)["labels"])
    server.prepare(0, 1)
    with pytest.warns(FutureWarning, match="Use `fit_labeled`"):
        assert server.fit_labelled(1, 0) > 0


def test_callback_of_version_0_1_sees_and_changes_the_round(tmp_path) -> None:
    module = load("callback_0_1")
    observer = module.Observer()
    trainer = build_federation(tmp_path / "old", trainer={"callbacks": [observer]})
    with pytest.warns(FutureWarning, match=r"`server\.cohort` of a callback"):
        trainer.train()
    reference = build_federation(tmp_path / "new")
    reference.train()
    names = tuple(CLIENTS)
    assert observer.seen == [
        entry
        for number in range(2)
        for entry in (("begin", number, names, names, 2), ("aggregate", [], sorted(names)))
    ]
    for name, value in reference.exchange.read().items():
        assert torch.equal(trainer.exchange.read()[name], value / 2)
    assert [entry["federated/num_seen"] for entry in trainer.state.log_history if "loss" in entry] == [3.0, 3.0]


def test_no_method_of_the_library_uses_an_interface_of_version_0_1() -> None:
    """Importing every module in a fresh process raises no `FutureWarning` of the library."""
    import subprocess

    script = (
        "import warnings; warnings.filterwarnings('error', message='.*interface of hf_federated 0.1.*')\n"
        "import hf_federated, hf_federated.server\n"
        "from hf_federated.methods import previous_release as methods\n"
        "from hf_federated.distillation import previous_release as distillations\n"
        "parts = [cls.client_part for cls in [*hf_federated.AGGREGATIONS.values(), "
        "*hf_federated.DISTILLATIONS.values()]]\n"
        "old = (methods.HookPart, distillations.LossPart, distillations.ClientClassPart)\n"
        "assert parts and not any(issubclass(part, old) for part in parts)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
