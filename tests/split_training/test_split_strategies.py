"""Strategies of split training against plain training and closed forms."""

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


class Watch(TrainerCallback):
    """Calls a function with the trainer after every step."""

    def __init__(self, look) -> None:
        self.look = look
        self.trainer = None

    def on_step_end(self, args, state, control, **kwargs):
        self.look(self.trainer, state.global_step)


def watched(trainer, look):
    callback = Watch(look)
    callback.trainer = trainer
    trainer.add_callback(callback)
    return trainer


def values_of(party: Party) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in party.state().items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("strategy", "encryption"), [(own, False) for own in STRATEGIES] + [("client_batch", True)])
def test_one_client_trains_as_the_unsplit_model(strategy, encryption, tied, tmp_path):
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
    found = type(plain.model).from_pretrained(tmp_path / "whole")
    # Where clients meet, gradients are summed first and divided then; Adam's first steps make more of a rounding.
    bound = 1e-5 if strategy == "client_batch" else 1e-6
    assert_close(dict(found.named_parameters()), dict(plain.model.named_parameters()), bound)
    logs = [(own["grad_norm"], own["learning_rate"]) for own in trainer.state.log_history if "grad_norm" in own]
    expected = [(own["grad_norm"], own["learning_rate"]) for own in plain.state.log_history if "grad_norm" in own]
    # All are clipped, by a norm in which a tied matrix counts once.
    assert len(logs) == 4 and min(norm for norm, _ in expected) > changes["max_grad_norm"]
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in zip(logs, expected, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_precision_is_that_of_the_unsplit_model(strategy, tmp_path):
    plain = Trainer(whole_model(), arguments(tmp_path, bf16=True), train_dataset=rows_of(0))
    plain.train()
    trainer = split_trainer(tmp_path, rows_of(0), SplitConfig(strategy=strategy), bf16=True)
    trainer.train()
    losses = [[own["loss"] for own in each.state.log_history if "loss" in own] for each in (plain, trainer)]
    # Where clients meet, gradients are summed in bfloat16 before they are divided.
    assert losses[0][0] == losses[1][0] and losses[0] == pytest.approx(losses[1], abs=2e-3)


def test_target_tokens_are_counted_as_trainer_counts_them(tmp_path):
    # GPT-2 names no loss, and all its labels are counted.
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
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "whole")
    assert_close(dict(found.named_parameters()), dict(model.named_parameters()), 1e-6)


def test_a_loss_that_calls_the_model_twice_is_refused_where_clients_meet(tmp_path):
    class Twice(SplitFederatedTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            losses = [super(Twice, self).compute_loss(model, dict(inputs), *args, **kwargs) for _ in range(2)]
            return sum(losses) / 2

    split = SplitConfig(strategy="client_batch")
    trainer = Twice(whole_model(), arguments(tmp_path), train_dataset=rows_of(0), split=split)
    with pytest.raises(ValueError, match="24 target tokens in a step of 12"):
        trainer.train()


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_client_without_target_tokens_leaves_the_others_loss_as_it_is(strategy, tmp_path):
    silent = rows_of(1, 2).map(lambda row: {"labels": [-100] * len(row["input_ids"])})
    losses = []
    for clients in ({"a": rows_of(0, 2)}, {"a": rows_of(0, 2), "b": silent}):
        trainer = split_trainer(tmp_path, clients, SplitConfig(strategy=strategy))
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1] > 0


def test_clients_that_hand_over_train_one_model_one_after_the_other(tmp_path):
    # Without a state of the optimizer it is one model's training on the first client's rows and then the second's.
    changes = {"optim": "sgd", "learning_rate": 0.5, "train_sampling_strategy": "sequential", "num_train_epochs": 2}
    clients = clients_of(4, 6)
    whole = whole_model()
    pooled = concatenate_datasets(list(clients.values()))
    plain = Trainer(whole, arguments(tmp_path, **changes), train_dataset=pooled)
    plain.train()
    trainer = split_trainer(tmp_path, clients, **changes)
    trainer.train()
    trainer.save_model(str(tmp_path / "whole"))
    found = type(whole).from_pretrained(tmp_path / "whole")
    assert_close(dict(found.named_parameters()), dict(whole.named_parameters()), 1e-6)


def test_turns_pass_to_the_next_client_after_so_many_steps(tmp_path):
    holders = []
    trainer = split_trainer(tmp_path, clients_of(6, 4), SplitConfig(steps_per_turn=1))
    watched(trainer, lambda trainer, step: holders.append(trainer._federation.holder))
    trainer.train()
    assert holders == ["client 0", "client 1", "client 0", "client 1", "client 0"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4, 6]), (None, [])])
def test_parts_are_averaged_at_every_period_and_never_when_it_is_off(strategy, every, expected, tmp_path):
    equal_at = []

    def look(trainer, step):
        own = [values_of(party) for party in trainer._federation.clients.values()]
        if all(torch.equal(own[0][name], other[name]) for other in own[1:] for name in own[0]):
            equal_at.append(step)

    clients = clients_of(6, 6) if strategy == "serial" else clients_of(12, 12)
    trainer = split_trainer(tmp_path, clients, SplitConfig(strategy=strategy, average_every=every), LORA)
    watched(trainer, look)
    trainer.train()
    assert trainer.state.global_step == 6
    # Of clients that hand over, the second takes the first's over once; they are never averaged.
    assert [step for step in equal_at if step] == expected


@pytest.mark.parametrize(
    ("split", "kinds"),
    [
        (SplitConfig(strategy="server_hierarchical", average_every=3), ("client", "server")),
        (SplitConfig(strategy="client_batch", average_every=3), ("client",)),
        (SplitConfig(average_every=8, steps_per_turn=2), ("client",)),
    ],
    ids=lambda own: getattr(own, "strategy", ""),
)
def test_parts_become_their_mean_weighted_by_rows(split, kinds, tmp_path, monkeypatch):
    seen = []
    average = SplitFederation.average

    def watched_average(self):
        before = {name: values_of(party) for name, party in self.parties.items()}
        rows = {name: client.num_rows for name, client in self.clients.items()}
        average(self)
        seen.append((before, rows, {name: values_of(party) for name, party in self.parties.items()}))

    monkeypatch.setattr(SplitFederation, "average", watched_average)
    split_trainer(tmp_path, clients_of(6, 3, 5), split).train()
    ((before, rows, after),) = seen
    assert rows == {"client 0": 6, "client 1": 3, "client 2": 5}
    for kind in kinds:
        for name in before[f"{kind}/client 0"]:
            mean = sum(before[f"{kind}/{own}"][name].double() * rows[own] for own in rows) / sum(rows.values())
            for own in rows:
                assert (after[f"{kind}/{own}"][name] - mean).abs().max() <= 1e-6
        different = before[f"{kind}/client 0"], before[f"{kind}/client 1"]
        assert any(not torch.equal(different[0][name], different[1][name]) for name in different[0])


@pytest.mark.parametrize(("steps_per_turn", "is_told"), [(None, True), (3, True), (2, False)])
def test_means_of_one_client_alone_are_told(steps_per_turn, is_told, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("hf_federated.split_training.trainer_mixin.logger.warning", told.append)
    split_trainer(tmp_path, clients_of(6, 6), SplitConfig(average_every=3, steps_per_turn=steps_per_turn)).train()
    assert any("nothing is averaged" in text for text in told) == is_told


@pytest.mark.parametrize("average_every", [1, 2])
def test_replicas_on_equal_rows_train_as_one(average_every, tmp_path):
    # In one order: clients draw orders of their own.
    changes = {"train_sampling_strategy": "sequential", "max_grad_norm": 0.1}
    config = SplitConfig(strategy="server_hierarchical", average_every=average_every)
    one = split_trainer(tmp_path, rows_of(0, 8), config, **changes)
    one.train()
    three = split_trainer(tmp_path, {str(own): rows_of(0, 8) for own in range(3)}, config, **changes)
    three.train()
    assert_close(trained_values(three.model), trained_values(one.model), 1e-6)


def test_a_batch_of_clients_clips_by_the_norm_of_server_and_clients(tmp_path):
    trainer = split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), max_grad_norm=1e-3)
    squares = {}

    class Norms(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            for name, party in trainer._federation.parties.items():
                gradients = [own.grad.double().flatten() for own in party.module.parameters() if own.grad is not None]
                squares[name] = float(torch.cat(gradients).square().sum())

    trainer.add_callback(Norms())
    trainer.train()
    assert squares.keys() == {"client/client 0", "client/client 1", "server"} and min(squares.values()) > 0
    assert trainer.state.log_history[0]["grad_norm"] == pytest.approx(sum(squares.values()) ** 0.5, rel=1e-5)


def test_a_clients_part_does_not_depend_on_what_others_draw(tmp_path):
    # Dropout in every block; the second client has other rows, and its part must not notice the first's.
    own = []
    for seed in (0, 9):
        clients = {"a": rows_of(seed, 4), "b": rows_of(1, 4)}
        config = SplitConfig(strategy="server_hierarchical")
        trainer = split_trainer(tmp_path, clients, config, model=whole_model(attention_dropout=0.5))
        watched(trainer, lambda trainer, step: own.append(values_of(trainer._federation.clients["b"])))
        trainer.train()
    assert len(own) == 4
    assert all(torch.equal(own[1][name], own[3][name]) for name in own[1])


def bytes_of_steps(tmp_path, strategy, num_epochs=1, **settings):
    """Bytes up and down of every step of a run of two clients, whose epochs are two steps of 16 rows of 60 tokens."""
    clients = {str(own): rows_of(own, 32, 60) for own in range(2)}
    config = SplitConfig(strategy=strategy, **settings)
    changes = {"per_device_train_batch_size": 16, "num_train_epochs": num_epochs}
    trainer = split_trainer(tmp_path, clients, config, LORA, **changes)
    trainer.train()
    return [(step["bytes_up"], step["bytes_down"]) for step in trainer.ledger.rounds()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_bytes_of_a_step_are_within_a_hundredth_of_the_formula(strategy, tmp_path):
    steps = bytes_of_steps(tmp_path, strategy)
    taking_part = 1 if strategy == "serial" else 2
    # Two activations and two gradients in float32.
    formula = taking_part * 4 * 16 * 60 * 16 * 4
    for number, step in enumerate(steps):
        # The second client takes over what the first trained.
        handed_over = 5000 if strategy == "serial" and number == 2 else 0
        assert formula < sum(step) <= 1.01 * formula + handed_over, (number, step)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sealing_adds_28_bytes_a_message_and_keys_as_often_as_promised(strategy, tmp_path):
    plain = bytes_of_steps(tmp_path / "plain", strategy, num_epochs=2)
    sealed = bytes_of_steps(tmp_path / "sealed", strategy, num_epochs=2, encryption=True, rotate_keys_every=3)
    taking_part = 1 if strategy == "serial" else 2
    for number, steps in enumerate(zip(plain, sealed, strict=True)):
        # Of the client's own steps: one after the other, the second's first is the third of all.
        own = {0: 0, 1: 1, 2: 0, 3: 1, 4: 2, 5: 3, 6: 2, 7: 3}[number] if strategy == "serial" else number
        for before, after in zip(*steps, strict=True):
            added = after - before
            if own % 3:
                assert added == taking_part * 2 * 28, number
            else:  # two keys, signatures and fingerprints, of RSA-3072
                assert 5_000 < added / taking_part < 9_500, number


def test_only_what_trains_is_copied_and_handed_over(tmp_path):
    trainer = split_trainer(tmp_path, clients_of(2, 2), adapter=LORA)
    seen = []

    def look(trainer, step):
        first, second = trainer._federation.clients.values()
        frozen = [p for p in first.module.parameters() if not p.requires_grad]
        others = {id(p) for p in second.module.parameters()}
        seen.append((all(id(p) in others for p in frozen), [id(p) in others for p in first.trained().values()]))
        assert set(first.state()) == set(first.trained()) and all("lora" in name for name in first.state())

    watched(trainer, look).train()
    assert seen and all(shared and not any(own) for shared, own in seen)
    frozen = nn.ModuleList(trainer.model.parts)
    before = whole_model()
    weights = {name: value for name, value in before.named_parameters()}
    assert torch.equal(frozen[0].model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_the_loss_of_a_step_is_that_of_all_its_rows(strategy, tmp_path):
    clients = clients_of(2, 1)
    pooled = torch.tensor([row["input_ids"] for own in clients.values() for row in own])
    trainer = split_trainer(tmp_path, clients, SplitConfig(strategy=strategy), max_steps=1)
    expected = whole_model()(pooled, labels=pooled).loss.item()
    assert trainer.train().training_loss == pytest.approx(expected, rel=1e-6)


def test_a_body_draws_anew_in_every_passage():
    model = SplitModel.from_model(whole_model(attention_dropout=0.5))
    boundary = model.boundary
    boundary.link = LocalLink(BodyServer(model.server_body, boundary.wire, seed=0))
    hidden = torch.randn(1, 7, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for step in (0, 0, 1):
        boundary.begin_step(step)
        found.append([boundary.cross(hidden, None, None, training=True) for _ in range(2)])
    assert all(torch.equal(*own) for own in zip(found[0], found[1], strict=True))
    assert not torch.equal(*found[0]) and not torch.equal(found[0][0], found[2][0])
