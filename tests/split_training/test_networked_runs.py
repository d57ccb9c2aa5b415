"""Networked runs give the same numbers as runs in one process, also with slow, disconnected and resumed clients."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from networked import DirectLink, Run
from split_runs import LORA, STRATEGIES, arguments, clients_of, rows_of, split_trainer, whole_model
from tiny import checkpoints_activations
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from hf_federated import SplitConfig, SplitModel
from hf_federated.split import load_saved_parts, merge_parts
from hf_federated.split_training.messages import SendEnvelope, as_tensor, read_message
from hf_federated.split_training.optimization import Party, create_optimizers


def config_of(strategy, **changes):
    return SplitConfig(strategy=strategy, average_every=None if strategy == "serial" else 2, **changes)


@pytest.mark.parametrize(
    ("split", "adapter", "tied"),
    [
        *((config_of(strategy), LORA, False) for strategy in STRATEGIES),
        (config_of("client_batch"), None, False),
        (config_of("client_batch"), None, True),
        (SplitConfig(average_every=2, steps_per_turn=1), LORA, False),
        (config_of("serial", wire_dtype="int4"), LORA, False),
        (config_of("client_batch", wire_dtype="topk"), LORA, False),
    ],
    ids=[*STRATEGIES, "client_batch-all", "client_batch-tied", "serial-averaged", "serial-int4", "client_batch-topk"],
)
@pytest.mark.sampled(4)
def test_networked_run_gives_identical_weights_to_run_in_one_process(split, adapter, tied, tmp_path):
    clients = clients_of(5, 3, 4)
    changes = {"num_train_epochs": 2, "max_grad_norm": 0.3, "warmup_steps": 1}
    models = [whole_model(tie_word_embeddings=tied) for _ in range(2)]
    trainer = split_trainer(tmp_path / "one", clients, split, adapter, models[0], **changes)
    trainer.train()
    run = Run(tmp_path, clients, split, adapter, model=models[1], **changes)
    run.train()
    assert not run.errors and run.server.finished.is_set()
    expected = {name: value for name, value in trainer.model.named_parameters()}
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert adapter is not None or min(norms) > changes["max_grad_norm"]
    for values in (run.values()[client_id] for client_id in clients):
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
    for name, value in run.server.server_model.parties[next(iter(run.server.server_model.parties))].state().items():
        assert torch.equal(value, expected[f"server_body.{name}"]), name
    assert all(
        client_trainer.state.global_step == trainer.state.global_step for client_trainer in run.trainers.values()
    )


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.slow] if name == "client_batch" else []) for name in STRATEGIES]
)
def test_networked_run_gives_identical_weights_in_mixed_precision(strategy, tmp_path):
    expected = []
    for bf16 in (True, False):
        reference = split_trainer(tmp_path / f"bf16 {bf16}", clients_of(4, 4), config_of(strategy), LORA, bf16=bf16)
        reference.train()
        expected.append(dict(reference.model.named_parameters()))
    run = Run(tmp_path, clients_of(4, 4), config_of(strategy), LORA, bf16=True)
    run.train()
    assert not run.errors and run.server.step == run.server.server_model.max_steps
    values = run.values()["client 0"]
    assert all(torch.equal(value, expected[0][name]) for name, value in values.items())
    assert any(not torch.equal(value, expected[1][name]) for name, value in values.items())


def test_networked_run_draws_identical_random_numbers(tmp_path):
    # Several clients would share the global generator, because they are threads of one process here.
    models = [whole_model(attention_dropout=0.2) for _ in range(2)]
    trainer = split_trainer(tmp_path / "one", clients_of(4), config_of("client_batch"), LORA, model=models[0])
    trainer.train()
    run = Run(tmp_path, clients_of(4), config_of("client_batch"), LORA, model=models[1])
    run.train()
    assert not run.errors
    expected = dict(trainer.model.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in run.values()["client 0"].items())


@pytest.mark.parametrize("strategy", ["serial", pytest.param("client_batch", marks=pytest.mark.slow), STRATEGIES[2]])
def test_resume_after_kill_gives_identical_weights(strategy, tmp_path):
    # An averaging period includes examples from before and after a checkpoint.
    # The run ends if a client fails, so that all parties resume.
    period = None if strategy == "serial" else 3
    clients, split = clients_of(6, 5), SplitConfig(strategy, average_every=period, min_clients=1.0)
    changes = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    whole = Run(tmp_path / "whole", clients, split, LORA, **changes)
    whole.train()

    broken = Run(tmp_path / "broken", clients, split, LORA, **changes)
    trainer = broken.trainers["client 1"]
    step = trainer.training_step

    def killed(*args):
        # With the serial strategy this step is in the middle of the second client's turn.
        if trainer.state.global_step == 5:
            raise RuntimeError("killed")
        return step(*args)

    trainer.training_step = killed
    broken.train()
    assert str(broken.errors["client 1"]) == "killed"
    assert "client 'client 1' disconnected" in str(broken.errors["client 0"]) or strategy == "serial"

    again = Run(tmp_path / "broken", clients, split, LORA, **changes)
    again.train(resume=True)
    assert not again.errors and again.server.resume_step == 4
    whole_values, resumed_values = whole.values(), again.values()
    for party in whole_values:
        for name, value in whole_values[party].items():
            assert torch.equal(value, resumed_values[party][name]), (party, name)


def test_client_logs_losses_of_its_own_steps(tmp_path):
    clients, split = clients_of(4, 4), config_of("serial")
    reference = split_trainer(tmp_path / "one", clients, split, LORA, num_train_epochs=2)
    reference.train()
    losses = [log["loss"] for log in reference.state.log_history if "loss" in log]
    run = Run(tmp_path, clients, split, LORA, num_train_epochs=2, logging_steps=3)
    run.train()
    assert not run.errors
    logged = {
        client_id: {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
        for client_id, trainer in run.trainers.items()
    }
    # The first client trains steps 1, 2, 5 and 6.
    means = {"client 0": {3: (0, 1), 6: (4, 5)}, "client 1": {3: (2,), 6: (3,)}}
    for client_id, expected in means.items():
        mean_losses = {
            step: sum(losses[number] for number in numbers) / len(numbers) for step, numbers in expected.items()
        }
        assert logged[client_id] == pytest.approx(mean_losses, rel=1e-6)
    assert run.trainers["client 0"].state.log_history[-1]["train_loss"] == pytest.approx(
        sum(losses[number] for number in (0, 1, 4, 5)) / 4, rel=1e-6
    )


def test_waiting_client_saves_checkpoints_with_the_training_client(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    run = Run(tmp_path, clients_of(10, 2), config_of("serial", min_clients=1.0), LORA, **changes)
    trainer = run.trainers["client 0"]
    step = trainer.training_step

    def killed(*args):
        if trainer.state.global_step == 3:
            raise RuntimeError("killed")
        return step(*args)

    trainer.training_step = killed
    run.train()
    checkpoint_steps = {
        party: {int(path.name[11:]) for path in (tmp_path / party).glob("checkpoint-*")}
        for party in ("server", *run.trainers)
    }
    assert all(max(steps) == 3 and len(steps) == 2 for steps in checkpoint_steps.values()), checkpoint_steps


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_client_that_stops_early_ends_run_and_is_named(strategy, tmp_path):
    run = Run(tmp_path, clients_of(8, 8), SplitConfig(strategy=strategy, min_clients=1.0), LORA)
    run.trainers["client 1"].add_callback(StopAfter(3))
    run.train()
    assert list(run.errors) == ["client 0"] and run.trainers["client 1"].state.global_step == 3
    assert (
        "'client 1' stopped before the last step" in str(run.errors["client 0"]) and not run.server.finished.is_set()
    )


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
def test_finished_run_can_be_resumed(strategy, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2}
    for resume in (False, True):
        run = Run(tmp_path, clients_of(4, 4), SplitConfig(strategy=strategy), LORA, **changes)
        run.train(resume)
        assert not run.errors and run.server.finished.is_set()
    assert run.server.resume_step == run.server.server_model.max_steps


def test_save_only_model_checkpoint_is_not_resumed(tmp_path):
    """A checkpoint of `save_only_model=True` contains no state of the parties."""
    changes = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
    for resume in (False, True):
        run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA, **changes)
        run.train(resume)
        assert not run.errors and run.server.resume_step == 0


def test_checkpoint_missing_on_server_starts_run_from_scratch_with_warning(tmp_path, caplog):
    changes = {"save_strategy": "steps", "save_steps": 1}
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA, **changes)
    run.train()
    shutil.rmtree(tmp_path / "server")
    run = Run(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA, **changes)
    run.train(resume=True)
    assert not run.errors and run.server.resume_step == 0
    assert "server and the clients have no checkpoint of a common step. The run starts from scratch." in caplog.text
    assert caplog.text.count("No checkpoint of the steps [") == 2


def test_server_optimizer_creates_no_hub_repository(tmp_path, monkeypatch):
    def create(*args, **kwargs):
        raise AssertionError("a repository would be created")

    monkeypatch.setattr(Trainer, "init_hf_repo", create)
    part = SplitModel.from_model(whole_model()).server_body
    party = Party("server", part, None)
    args = arguments(tmp_path, push_to_hub=True)
    create_optimizers([party], args, max_steps=3)
    assert party.optimizer is not None and args.push_to_hub


def test_clients_of_replicas_evaluate_the_saved_average(tmp_path):
    clients, split = clients_of(6, 6), config_of("server_hierarchical")
    reference = split_trainer(tmp_path / "one", clients, split, LORA)
    reference.train()
    run = Run(tmp_path, clients, split, LORA)
    losses = []
    for trainer in run.trainers.values():
        leave = trainer.leave

        def evaluate_and_leave(trainer=trainer, leave=leave):
            losses.append(trainer.evaluate(rows_of(9))["eval_loss"])
            leave()

        trainer.leave = evaluate_and_leave
    run.train()
    assert not run.errors
    assert losses == [reference.evaluate(rows_of(9))["eval_loss"]] * 2


def test_serial_clients_cannot_evaluate_during_training(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), config_of("serial"), LORA, eval_strategy="no")
    for trainer in run.trainers.values():
        trainer.args.eval_strategy = IntervalStrategy.EPOCH
    run.train()
    assert set(run.errors) == {"client 0", "client 1"}
    assert all("Set eval_strategy='no'" in str(error) for error in run.errors.values())


@pytest.mark.parametrize("strategy", ["client_batch", "server_hierarchical"])
@pytest.mark.parametrize(
    ("sizes", "average_every", "changes"),
    [((4, 4), 1, {"eval_strategy": "steps", "eval_steps": 1}), ((5, 3, 4), 3, {"eval_strategy": "epoch"})],
    ids=["steps", "epoch"],
)
@pytest.mark.sampled(2)
def test_evaluation_during_networked_run_equals_evaluation_in_one_process(
    strategy, sizes, average_every, changes, tmp_path
):
    split = SplitConfig(strategy=strategy, average_every=average_every)
    settings = {"num_train_epochs": 2, "learning_rate": 0.1, **changes}
    reference = split_trainer(tmp_path / "one", clients_of(*sizes), split, LORA, eval_dataset=rows_of(9), **settings)
    reference.train()
    run = Run(tmp_path, clients_of(*sizes), split, LORA, eval_dataset=rows_of(9), **settings)
    run.train()
    assert not run.errors
    losses, *client_losses = [
        {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
        for trainer in (reference, *run.trainers.values())
    ]
    values = sorted(losses.values())
    assert len(values) > 1 and min(high - low for low, high in zip(values, values[1:], strict=False)) > 1e-5
    assert client_losses == [losses] * len(client_losses)


@pytest.mark.parametrize("strategy", ["client_batch", "server_hierarchical"])
def test_evaluation_steps_require_equal_steps_per_epoch(strategy, tmp_path):
    """A client without remaining steps would evaluate while other clients update the body."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": rows_of(9)}
    run = Run(tmp_path, clients_of(8, 2), config_of(strategy), LORA, **settings)
    run.train()
    assert set(run.errors) == {"client 0", "client 1"} and run.server.step == 0
    assert any("steps in an epoch (client 0: 4, client 1: 1)" in str(error) for error in run.errors.values())


def test_saved_parts_merge_into_whole_model(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), config_of("server_hierarchical"))
    run.train()
    assert not run.errors
    client = run.trainers["client 1"]
    client.save_model()
    folders = [tmp_path / "client 1", tmp_path / "server"]
    runs = [json.loads((folder / "split_parts.json").read_text())["run"] for folder in folders]
    assert runs[0] == runs[1] and runs[0]["step"] == run.server.step and len(runs[0]["digest"]) == 64
    merge_parts(folders, tmp_path / "whole")
    load_saved_parts([client.model.client_head, client.model.client_tail], tmp_path / "client 1")
    assert (tmp_path / "whole" / "model.safetensors").is_file()


def test_no_replica_is_updated_if_gradients_of_one_are_not_finite(tmp_path):
    server_model = Run(tmp_path, clients_of(2, 2), config_of("server_hierarchical")).server.server_model
    server_model.prepare(1)
    before = {
        name: {key: value.clone() for key, value in party.state().items()}
        for name, party in server_model.parties.items()
    }
    for party, gradient in zip(server_model.parties.values(), (1.0, float("inf")), strict=True):
        for parameter in party.trained_parameters().values():
            parameter.grad = torch.full_like(parameter, gradient)
    with pytest.raises(ValueError, match="'server/client 1' for client 1 are not finite at step 0"):
        server_model.train_step(0, {"client 0": 1.0, "client 1": 1.0}, {"client 0": 2, "client 1": 2})
    for name, party in server_model.parties.items():
        assert all(torch.equal(value, before[name][key]) for key, value in party.state().items()), name


def test_server_stores_one_encrypted_message_per_pair_of_clients(tmp_path, caplog, monkeypatch):
    """A recipient that fetches nothing must not make the sender fail."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    server = Run(tmp_path, clients_of(2, 2), config_of("serial")).server
    for step, blob in enumerate((b"old", b"new")):
        server.answer("client 0", SendEnvelope("client 0", step, "client 1", as_tensor(blob)).to_bytes())
    assert "Client 'client 1' did not fetch the message of client 'client 0' of step 0." in caplog.text
    assert list(server.relay.envelopes) == [("client 0", "client 1", 1)]
    with pytest.raises(ValueError, match="sent its message of step 1 to 'client 1' twice"):
        server.answer("client 0", SendEnvelope("client 0", 1, "client 1", as_tensor(b"again")).to_bytes())


def test_activation_checkpointing_applies_to_server(tmp_path):
    server = Run(tmp_path, clients_of(2), config_of("serial"), activation_checkpointing=True).server
    assert checkpoints_activations(server.server_model.parties["server"].module.model)


def test_server_relays_parameters_encrypted(tmp_path):
    seen = []

    def links(server, client_id):
        return DirectLink(server, client_id, seen.append)

    clients, split = clients_of(4, 4), SplitConfig(average_every=2)
    run = Run(tmp_path, clients, split, LORA, links=links)
    run.train()
    assert not run.errors
    sent = [message for message in map(read_message, seen) if isinstance(message, SendEnvelope)]
    assert len(sent) == 4
    trained = [value.detach() for value in run.trainers["client 0"].networked_run.client.trained_parameters().values()]
    for message in sent:
        blob = message.sealed.numpy().tobytes()
        assert all(value.numpy().tobytes()[:32] not in blob for value in trained)


def test_networked_client_rejects_arguments_for_other_clients(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), config_of("serial"))
    model = run.trainers["client 0"].model
    with pytest.raises(ValueError, match="Pass the dataset of this client only"):
        split_trainer(tmp_path, clients_of(2, 2), model=model)
    with pytest.raises(ValueError, match="Set resume_from_checkpoint to True or leave it out"):
        run.trainers["client 0"].train(resume_from_checkpoint="checkpoint-3")
    with pytest.raises(ValueError, match="min_clients=2, but the run has 1 clients"):
        Run(tmp_path, {"a": rows_of(0)}, SplitConfig(min_clients=2))
    single_client_run = Run(tmp_path, {"a": rows_of(0)}, config_of("serial"))
    single_client_run.trainers["a"].envelopes = None
    single_client_run.train()
    assert not single_client_run.errors


def test_custom_optimizer_of_networked_client_is_rejected_before_joining(tmp_path):
    run = Run(tmp_path, clients_of(2, 2), config_of("serial"))
    trainer = run.trainers["client 0"]
    trainer.optimizer_cls_and_kwargs = (torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(ValueError, match="optimizer_cls_and_kwargs of a client is not supported in a networked run"):
        trainer.train()

    class NoDecayTrainer(type(trainer)):
        def get_decay_parameter_names(self, model):
            return []

    second_trainer = run.trainers["client 1"]
    second_trainer.__class__ = NoDecayTrainer
    with pytest.raises(ValueError, match=r"NoDecayTrainer\.get_decay_parameter_names of a client"):
        second_trainer.train()
    assert run.server.step == 0
