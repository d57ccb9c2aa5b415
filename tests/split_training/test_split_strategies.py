"""Strategies of split training, compared with plain training and with closed forms."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import concatenate_datasets
from split_runs import (
    LORA,
    STRATEGIES,
    arguments,
    assert_close,
    clients_of,
    rows_of,
    split_trainer,
    trained_values,
    whole_model,
)
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel
from hf_federated.split.body import BodyServer
from hf_federated.split.boundary import LocalLink
from hf_federated.split_training.in_process import SplitFederation
from hf_federated.split_training.optimization import Party


class StepCallback(TrainerCallback):
    """Call a function with the trainer after every step."""

    def __init__(self, callback_function) -> None:
        self.callback_function = callback_function
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        self.callback_function(self.trainer, state.global_step)


def with_step_callback(trainer, callback_function):
    callback = StepCallback(callback_function)
    callback.trainer = trainer
    trainer.add_callback(callback)
    return trainer


def values_of(party: Party) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in party.state().items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("strategy", "encryption"), [(strategy, False) for strategy in STRATEGIES] + [("client_batch", True)]
)
@pytest.mark.sampled(4)
def test_single_client_gives_weights_of_unsplit_model(strategy, encryption, tied, tmp_path):
    changes = {"num_train_epochs": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    plain = Trainer(whole_model(tie_word_embeddings=tied), arguments(tmp_path, **changes), train_dataset=rows_of(0, 7))
    loss = plain.train().training_loss
    trainer = split_trainer(
        tmp_path,
        rows_of(0, 7),
        SplitConfig(strategy=strategy, encryption=encryption, average_every=None if strategy == "serial" else 2),
        model=whole_model(tie_word_embeddings=tied),
        **changes,
    )
    assert abs(trainer.train().training_loss - loss) <= 1e-6
    trainer.save_model(str(tmp_path / "whole"))
    split_model = type(plain.model).from_pretrained(tmp_path / "whole")
    # `client_batch` divides the gradients after the sum. Adam amplifies the rounding error in its first steps.
    bound = 1e-5 if strategy == "client_batch" else 1e-6
    assert_close(dict(split_model.named_parameters()), dict(plain.model.named_parameters()), bound)
    logs = [(log["grad_norm"], log["learning_rate"]) for log in trainer.state.log_history if "grad_norm" in log]
    expected = [(log["grad_norm"], log["learning_rate"]) for log in plain.state.log_history if "grad_norm" in log]
    # All gradients are clipped. A tied matrix counts once in the norm.
    assert len(logs) == 4 and min(norm for norm, _ in expected) > changes["max_grad_norm"]
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in zip(logs, expected, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_precision_gives_losses_of_unsplit_model(strategy, tmp_path):
    plain = Trainer(whole_model(), arguments(tmp_path, bf16=True), train_dataset=rows_of(0))
    plain.train()
    trainer = split_trainer(tmp_path, rows_of(0), SplitConfig(strategy=strategy), bf16=True)
    trainer.train()
    losses = [
        [log["loss"] for log in each_trainer.state.log_history if "loss" in log] for each_trainer in (plain, trainer)
    ]
    # `client_batch` sums the gradients in bfloat16 before it divides them.
    assert losses[0][0] == losses[1][0] and losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_target_tokens_are_counted_as_in_trainer(tmp_path):
    # GPT-2 defines no loss type, and all its labels are counted.
    config = GPT2Config(
        vocab_size=40, n_positions=8, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config)
    changes = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 1}
    trainer = split_trainer(
        tmp_path, rows_of(0), SplitConfig(strategy="client_batch"), model=copy.deepcopy(model), **changes
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "whole"))
    Trainer(model, arguments(tmp_path, **changes), train_dataset=rows_of(0)).train()
    split_model = GPT2LMHeadModel.from_pretrained(tmp_path / "whole")
    assert_close(dict(split_model.named_parameters()), dict(model.named_parameters()), 1e-6)


def test_client_batch_rejects_loss_that_calls_model_twice(tmp_path):
    class Twice(SplitFederatedTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            losses = [super(Twice, self).compute_loss(model, dict(inputs), *args, **kwargs) for _ in range(2)]
            return sum(losses) / 2

    split = SplitConfig(strategy="client_batch")
    trainer = Twice(whole_model(), arguments(tmp_path), train_dataset=rows_of(0), split=split)
    with pytest.raises(ValueError, match="24 target tokens in a step of 12"):
        trainer.train()


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_client_without_target_tokens_does_not_change_the_loss(strategy, tmp_path):
    silent = rows_of(1, 2).map(lambda row: {"labels": [-100] * len(row["input_ids"])})
    losses = []
    for clients in ({"a": rows_of(0, 2)}, {"a": rows_of(0, 2), "b": silent}):
        trainer = split_trainer(tmp_path, clients, SplitConfig(strategy=strategy))
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1] > 0


def test_serial_clients_train_one_model_sequentially(tmp_path):
    # SGD has no state, so the run equals training of one model on the clients' datasets one after the other.
    changes = {"optim": "sgd", "learning_rate": 0.5, "train_sampling_strategy": "sequential", "num_train_epochs": 2}
    clients = clients_of(4, 6)
    whole = whole_model()
    pooled = concatenate_datasets(list(clients.values()))
    plain = Trainer(whole, arguments(tmp_path, **changes), train_dataset=pooled)
    plain.train()
    trainer = split_trainer(tmp_path, clients, **changes)
    trainer.train()
    trainer.save_model(str(tmp_path / "whole"))
    split_model = type(whole).from_pretrained(tmp_path / "whole")
    assert_close(dict(split_model.named_parameters()), dict(whole.named_parameters()), 1e-6)


def test_next_client_continues_after_steps_per_turn(tmp_path):
    clients_by_step = []
    trainer = split_trainer(tmp_path, clients_of(6, 4), SplitConfig(steps_per_turn=1))
    with_step_callback(trainer, lambda trainer, step: clients_by_step.append(trainer.active_run.last_client))
    trainer.train()
    assert clients_by_step == ["client 0", "client 1", "client 0", "client 1", "client 0"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4, 6]), (None, [])])
def test_parts_are_averaged_every_period_or_never(strategy, every, expected, tmp_path):
    equal_at = []

    def callback_function(trainer, step):
        values = [values_of(party) for party in trainer.active_run.clients.values()]
        if all(torch.equal(values[0][name], other_values[name]) for other_values in values[1:] for name in values[0]):
            equal_at.append(step)

    clients = clients_of(6, 6) if strategy == "serial" else clients_of(12, 12)
    trainer = split_trainer(tmp_path, clients, SplitConfig(strategy=strategy, average_every=every), LORA)
    with_step_callback(trainer, callback_function)
    trainer.train()
    assert trainer.state.global_step == 6
    # With the serial strategy the second client loads the parts of the first client once, without an average.
    assert [step for step in equal_at if step] == expected


@pytest.mark.parametrize(
    ("split", "kinds"),
    [
        (SplitConfig(strategy="server_hierarchical", average_every=3), ("client", "server")),
        (SplitConfig(strategy="client_batch", average_every=3), ("client",)),
        (SplitConfig(average_every=8, steps_per_turn=2), ("client",)),
    ],
    ids=lambda value: getattr(value, "strategy", ""),
)
def test_average_is_weighted_by_number_of_examples(split, kinds, tmp_path, monkeypatch):
    seen = []
    average = SplitFederation.average

    def watched_average(self):
        before = {name: values_of(party) for name, party in self.parties.items()}
        rows = {name: client.num_examples for name, client in self.clients.items()}
        average(self)
        seen.append((before, rows, {name: values_of(party) for name, party in self.parties.items()}))

    monkeypatch.setattr(SplitFederation, "average", watched_average)
    split_trainer(tmp_path, clients_of(6, 3, 5), split).train()
    ((before, rows, after),) = seen
    assert rows == {"client 0": 6, "client 1": 3, "client 2": 5}
    for kind in kinds:
        for name in before[f"{kind}/client 0"]:
            mean = sum(before[f"{kind}/{client_id}"][name].double() * rows[client_id] for client_id in rows) / sum(
                rows.values()
            )
            for client_id in rows:
                assert (after[f"{kind}/{client_id}"][name] - mean).abs().max() <= 1e-6
        different = before[f"{kind}/client 0"], before[f"{kind}/client 1"]
        assert any(not torch.equal(different[0][name], different[1][name]) for name in different[0])


@pytest.mark.parametrize(("steps_per_turn", "has_warning"), [(None, True), (3, True), (2, False)])
def test_averages_over_a_single_client_log_a_warning(steps_per_turn, has_warning, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("hf_federated.split_training.checks.logger.warning", warnings.append)
    split_trainer(tmp_path, clients_of(6, 6), SplitConfig(average_every=3, steps_per_turn=steps_per_turn)).train()
    assert any("nothing is averaged" in text for text in warnings) == has_warning


@pytest.mark.parametrize("average_every", [1, 2])
def test_replicas_on_equal_data_train_as_one_client(average_every, tmp_path):
    # Sequential sampling, because each client shuffles in its own order.
    changes = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.1}
    config = SplitConfig(strategy="server_hierarchical", average_every=average_every)
    single = split_trainer(tmp_path, rows_of(0, 8), config, **changes)
    single.train()
    three = split_trainer(tmp_path, {str(number): rows_of(0, 8) for number in range(3)}, config, **changes)
    three.train()
    assert_close(trained_values(three.model), trained_values(single.model), 1e-6)


def test_client_batch_clips_by_joint_norm_of_server_and_clients(tmp_path):
    trainer = split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), max_grad_norm=1e-3)
    squares = {}

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            for name, party in trainer.active_run.parties.items():
                gradients = [
                    parameter.grad.double().flatten()
                    for parameter in party.module.parameters()
                    if parameter.grad is not None
                ]
                squares[name] = float(torch.cat(gradients).square().sum())

    trainer.add_callback(Norms())
    trainer.train()
    assert squares.keys() == {"client/client 0", "client/client 1", "server"} and min(squares.values()) > 0
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-5)


def test_random_numbers_of_a_client_do_not_depend_on_other_clients(tmp_path):
    # With dropout in every block, the dataset of client a must not change the part of client b.
    values = []
    for seed in (0, 9):
        clients = {"a": rows_of(seed, 4), "b": rows_of(1, 4)}
        config = SplitConfig(strategy="server_hierarchical")
        trainer = split_trainer(tmp_path, clients, config, model=whole_model(attention_dropout=0.5))
        with_step_callback(trainer, lambda trainer, step: values.append(values_of(trainer.active_run.clients["b"])))
        trainer.train()
    assert len(values) == 4
    assert all(torch.equal(values[1][name], values[3][name]) for name in values[1])


def num_bytes_of_steps(tmp_path, strategy, num_epochs=1, **settings):
    """
    Bytes sent and received in every step of a run of two clients.

    An epoch of a client has two steps, each with 16 examples of 60 tokens.
    """
    clients = {str(number): rows_of(number, 32, 60) for number in range(2)}
    config = SplitConfig(strategy=strategy, **settings)
    changes = {"per_device_train_batch_size": 16, "num_train_epochs": num_epochs}
    trainer = split_trainer(tmp_path, clients, config, LORA, **changes)
    trainer.train()
    return [(step["bytes_up"], step["bytes_down"]) for step in trainer.ledger.rounds()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_of_a_step_are_within_one_percent_of_formula(strategy, tmp_path):
    steps = num_bytes_of_steps(tmp_path, strategy)
    participants = 1 if strategy == "serial" else 2
    # Two activations and two gradients in float32, 4 bytes each.
    formula = participants * 4 * 16 * 60 * 16 * 4
    for number, step in enumerate(steps):
        # At step 2 the second client receives the parts of the first client.
        handed_over = 5000 if strategy == "serial" and number == 2 else 0
        assert formula < sum(step) <= 1.01 * formula + handed_over, (number, step)


@pytest.mark.parametrize(
    # The clients of "server_hierarchical" have links like those of "serial".
    "strategy",
    ["serial", *(pytest.param(name, marks=pytest.mark.slow) for name in ("client_batch", "server_hierarchical"))],
)
def test_encryption_adds_28_bytes_per_message_and_a_handshake_per_rotation(strategy, tmp_path):
    plain = num_bytes_of_steps(tmp_path / "plain", strategy, num_epochs=2)
    encrypted = num_bytes_of_steps(tmp_path / "sealed", strategy, num_epochs=2, encryption=True, rotate_keys_every=3)
    participants = 1 if strategy == "serial" else 2
    for number, steps in enumerate(zip(plain, encrypted, strict=True)):
        # Index of the step among the client's steps. With the serial strategy each turn has two steps.
        client_step = {0: 0, 1: 1, 2: 0, 3: 1, 4: 2, 5: 3, 6: 2, 7: 3}[number] if strategy == "serial" else number
        for before, after in zip(*steps, strict=True):
            added = after - before
            if client_step % 3:
                assert added == participants * 2 * 28, number
            else:  # two keys, signatures and fingerprints with RSA-3072
                assert 5_000 < added / participants < 9_500, number


def test_only_trained_parameters_are_copied_and_exchanged(tmp_path):
    trainer = split_trainer(tmp_path, clients_of(2, 2), adapter=LORA)
    seen = []

    def callback_function(trainer, step):
        first, second = trainer.active_run.clients.values()
        frozen = [p for p in first.module.parameters() if not p.requires_grad]
        second_ids = {id(p) for p in second.module.parameters()}
        seen.append(
            (
                all(id(p) in second_ids for p in frozen),
                [id(p) in second_ids for p in first.trained_parameters().values()],
            )
        )
        assert set(first.state()) == set(first.trained_parameters()) and all("lora" in name for name in first.state())

    with_step_callback(trainer, callback_function).train()
    assert seen and all(shared and not any(is_copied) for shared, is_copied in seen)
    frozen = nn.ModuleList(trainer.model.parts)
    before = whole_model()
    weights = {name: value for name, value in before.named_parameters()}
    assert torch.equal(frozen[0].model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_loss_of_a_step_is_the_loss_of_all_examples(strategy, tmp_path):
    clients = clients_of(2, 1)
    pooled = torch.tensor([row["input_ids"] for dataset in clients.values() for row in dataset])
    trainer = split_trainer(tmp_path, clients, SplitConfig(strategy=strategy), max_steps=1)
    expected = whole_model()(pooled, labels=pooled).loss.item()
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-6)


def test_body_draws_new_dropout_masks_for_every_micro_batch():
    model = SplitModel.from_model(whole_model(attention_dropout=0.5))
    boundary = model.boundary
    boundary.link = LocalLink(BodyServer(model.server_body, boundary.wire, seed=0))
    hidden = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    outputs = []
    for step in (0, 0, 1):
        boundary.begin_step(step)
        outputs.append([boundary.run_body(hidden, None, None, training=True) for _ in range(2)])
    assert all(torch.equal(*pair) for pair in zip(outputs[0], outputs[1], strict=True))
    assert not torch.equal(*outputs[0]) and not torch.equal(outputs[0][0], outputs[2][0])
