"""MutualKD: a private mentor and a shared mentee teach each other; updates are sent as low-rank factors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from client_parts import received
from datasets import Dataset
from tiny import arguments, rows, same_weights, tiny_model
from torch.nn import functional as F
from transformers import BertConfig, BertForTokenClassification, LlamaConfig, LlamaForCausalLM, Trainer

from hf_federated import ClientSpec, FederatedCallback, FederatedConfig, FederatedTrainer, MutualKD, federate
from hf_federated.adapters import Exchange, ModelMismatchError
from hf_federated.aggregation import LowRankUpdates
from hf_federated.distillation.losses import kl_divergence
from hf_federated.messages import ClientUpdate, Fit


def mentor_of(client_id):
    return tiny_model(seed=7, num_hidden_layers=4, hidden_size=32, intermediate_size=32)


class UpdateRecorder(FederatedCallback):
    def __init__(self):
        self.names = []

    def on_client_end(self, args, state, control, update, **kwargs):
        self.names.append(sorted(update.state))


def trainer_of(tmp_path, num_rounds=2, model_init=mentor_of, args=None, callbacks=(), **kwargs):
    return FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path, **(args or {})),
        train_dataset={"a": rows(8), "b": rows(6, seed=1)},
        eval_dataset=rows(8, seed=2),
        client_model_init=model_init,
        callbacks=list(callbacks),
        federation=FederatedConfig(
            num_rounds=num_rounds, aggregation="mutual_kd", aggregation_kwargs=kwargs, freeze="embeddings"
        ),
    )


def kept(trainer, client_id):
    return trainer.engine.worker.models.store.get(client_id)["memories"]["0 mutual_kd"]


def test_mentors_are_trained_and_never_sent(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[callback := UpdateRecorder()])
    trainer.train()
    assert not same_weights(trainer.model, tiny_model())
    initial = mentor_of("a").state_dict()
    mentors = {client_id: kept(trainer, client_id)["mentor"] for client_id in "ab"}
    name = "bert.encoder.layer.3.output.dense.weight"
    assert not torch.equal(mentors["a"][name], initial[name])
    assert not torch.equal(mentors["a"][name], mentors["b"][name])
    assert all(name not in names for names in callback.names)


def test_frozen_embeddings_are_never_sent(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[callback := UpdateRecorder()])
    trainer.train()
    assert callback.names and not any("embeddings" in name for names in callback.names for name in names)


def test_mentors_keep_their_optimizers_between_rounds(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    # Client a trains 2 batches in each of 2 rounds.
    assert {int(state["step"]) for state in kept(trainer, "a")["optimizer"]["state"].values()} == {4}


def test_updates_are_smaller_than_the_sent_model(tmp_path):
    trainer = trainer_of(tmp_path, energy_start=0.5, energy_end=0.5)
    trainer.train()
    assert trainer.ledger.bytes_up < 0.8 * trainer.ledger.bytes_down


class MessageRecorder(FederatedCallback):
    """Record each message to a client with its reply."""

    def __init__(self):
        self.pairs = []

    def on_round_begin(self, args, state, control, **kwargs):
        worker = self.trainer.engine.worker

        def recorded(message):
            reply = type(worker).handle(worker, message)
            self.pairs.append((message, reply))
            return reply

        worker.handle = recorded


def test_update_contains_factors_and_the_server_sends_the_whole_mentee(tmp_path):
    """A matrix of rank `r` is sent as `r (m + n + 1)` values, or as a whole if it has fewer values."""
    trainer = trainer_of(tmp_path, callbacks=[record := MessageRecorder()], energy_start=0.5, energy_end=0.5)
    record.trainer = trainer
    trainer.train()
    assert len(record.pairs) == 2 * 2
    shapes = {name: tuple(value.shape) for name, value in trainer.exchange.read().items()}
    for sent, reply in record.pairs:
        down = sum(map(math.prod, shapes.values()))
        ranks = {name: len(reply.state[f"{name}/s"]) for name in shapes if f"{name}/s" in reply.state}
        up = sum(
            ranks[name] * (sum(shape) + 1) if name in ranks else math.prod(shape) for name, shape in shapes.items()
        )
        assert len(ranks) > 5 and up < down
        headers = [8 + int.from_bytes(message.to_bytes()[:8], "little") for message in (sent, reply)]
        # Each value has 4 bytes.
        expected = (4 * down + headers[0], 4 * up + headers[1])
        assert trainer.ledger.account(sent.round, sent.client_id) == expected


def test_full_energy_is_lossless():
    state = {"w": torch.randn(8, 6), "b": torch.randn(3)}
    sent = Fit(0, "a", 0, state, settings={"low_rank_energy": 1.0})
    trained = {"w": state["w"] + torch.outer(torch.randn(8), torch.randn(6)), "b": state["b"] + 1}
    update = ClientUpdate(0, "a", trained, num_examples=1, num_tokens=0, num_steps=1)
    packed = LowRankUpdates().client_send(update, sent, {})
    assert packed.state["w/u"].shape == (8, 1)
    unpacked = LowRankUpdates().server_receive(packed, state, {})
    torch.testing.assert_close(unpacked.state, update.state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["energy_start", "energy_end"])
def test_energy_out_of_range_raises_an_error_with_the_argument(name):
    with pytest.raises(ValueError, match=f"`{name}` is 1.5; it must be above 0 and at most 1"):
        MutualKD(**{name: 1.5})


def test_energy_grows_over_the_rounds():
    algorithm = MutualKD(energy_start=0.5, energy_end=0.9)
    algorithm.setup(num_rounds=4, num_clients=1)
    energies = []
    for _ in range(4):
        energies.append(algorithm.fit_settings()["low_rank_energy"])
        accumulator = algorithm.accumulator({"w": torch.zeros(1)})
        accumulator.add(ClientUpdate(0, "a", {"w": torch.zeros(1)}, 1, 0, 1))
        algorithm.aggregate(accumulator, {"w": torch.zeros(1)})
    assert energies == pytest.approx([0.6, 0.7, 0.8, 0.9])


@pytest.mark.parametrize("hidden_size", [16, 32])
def test_loss_equals_the_formula_of_the_paper(tmp_path, hidden_size):
    mentee = tiny_model(num_hidden_layers=2).eval()
    mentor = tiny_model(seed=3, num_hidden_layers=4, hidden_size=hidden_size, intermediate_size=16)
    hook = received(
        MutualKD(temperature=2.0, match_hidden=True, match_attention=False),
        model=mentee,
        private=(Trainer(model=mentor, args=arguments(tmp_path)), Exchange(mentor)),
    )
    mentor.eval()
    batch = {name: torch.tensor(values) for name, values in rows(5, seed=4).to_dict().items()}
    inputs = hook.inputs(batch)
    outputs = mentee(**inputs)
    loss = hook.loss(outputs.loss, outputs, inputs)

    mentor_outputs = mentor(**batch, output_hidden_states=True)
    small, large = outputs.logits / 2, mentor_outputs.logits / 2

    def kl(teacher, student):
        return (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1).mean() * 4

    project = (lambda hidden: hidden) if hidden_size == 16 else hook._projection
    hidden = sum(
        F.mse_loss(project(outputs.hidden_states[layer]), mentor_outputs.hidden_states[2 * layer])
        for layer in range(3)
    )
    on_labels = outputs.loss + mentor_outputs.loss
    expected = on_labels + (kl(large, small) + kl(small, large) + hidden) / on_labels.detach()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("num_attention_heads", [2, 4])
def test_attention_is_matched_at_the_same_depth(tmp_path, num_attention_heads):
    mentee, mentor = tiny_model(num_hidden_layers=2).eval(), tiny_model(seed=3, num_hidden_layers=4).eval()
    if num_attention_heads != mentee.config.num_attention_heads:
        mentor = tiny_model(seed=3, num_hidden_layers=4, num_attention_heads=num_attention_heads).eval()
    losses = []
    for match_attention in (False, True):
        if match_attention:
            for model in (mentee, mentor):
                model.set_attn_implementation("eager")
        hook = received(
            MutualKD(temperature=1.0, match_hidden=False, match_attention=match_attention),
            model=mentee,
            private=(Trainer(model=mentor, args=arguments(tmp_path)), Exchange(mentor)),
        )
        mentor.eval()
        batch = {name: torch.tensor(values) for name, values in rows(5, seed=4).to_dict().items()}
        inputs = hook.inputs(batch)
        outputs = mentee(**inputs)
        losses.append(hook.loss(outputs.loss, outputs, inputs))
    mentor_outputs = mentor(**inputs)
    pairs = [(outputs.attentions[layer], mentor_outputs.attentions[2 * layer + 1]) for layer in range(2)]
    if num_attention_heads != mentee.config.num_attention_heads:
        pairs = [(one.mean(1), other.mean(1)) for one, other in pairs]
    matched = sum(((one - other) ** 2).mean() for one, other in pairs)
    assert matched > 0
    torch.testing.assert_close(losses[1], losses[0] + matched / (outputs.loss + mentor_outputs.loss).detach())


@pytest.mark.parametrize("which", ["shared", "private"])
def test_matching_attention_without_attention_maps_raises_an_error(tmp_path, which):
    models = {"shared": tiny_model(), "private": tiny_model(seed=3)}
    for name, model in models.items():
        model.set_attn_implementation("sdpa" if name == which else "eager")
    trainer = Trainer(model=models["private"], args=arguments(tmp_path))
    with pytest.raises(
        ValueError, match=f"the {which} model does not return attention maps with attn_implementation='sdpa'"
    ):
        received(
            MutualKD(match_hidden=False, match_attention=True),
            model=models["shared"],
            private=(trainer, Exchange(models["private"])),
        )


def padded(batch, value):
    """Pad a batch on the right by three positions with token id `value`."""
    more = torch.full((len(batch["input_ids"]), 3), value)
    return {
        "input_ids": torch.cat([batch["input_ids"], more], 1),
        "attention_mask": torch.cat([torch.ones_like(batch["input_ids"]), torch.zeros_like(more)], 1),
        "labels": batch["labels"] if batch["labels"].ndim == 1 else F.pad(batch["labels"], (0, 3), value=-100),
    }


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}


def tagger_of(seed, **config):
    values = {**tiny_model().config.to_diff_dict(), "num_labels": 3, **NO_DROPOUT, **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForTokenClassification(BertConfig(**values))


def llama_of(seed, **config):
    values = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, **config}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(pad_token_id=0, attn_implementation="eager", **values))


def classifier_of(seed, **config):
    return tiny_model(seed, **NO_DROPOUT, **config)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("model_of", [classifier_of, tagger_of, llama_of])
def test_padding_does_not_change_the_loss(tmp_path, model_of, heads):
    mentee = model_of(0, num_hidden_layers=1)
    mentor = model_of(3, num_hidden_layers=2, num_attention_heads=heads)
    hook = received(
        MutualKD(temperature=2.0, match_hidden=True, match_attention=True),
        model=mentee,
        private=(Trainer(model=mentor, args=arguments(tmp_path)), Exchange(mentor)),
    )
    ids = torch.tensor(rows(5, seed=4)["input_ids"])
    labels = {classifier_of: ids[:, 0] % 2, tagger_of: ids % 3, llama_of: ids}[model_of]
    batch = {"input_ids": ids, "labels": labels}
    losses = []
    for given in (batch, padded(batch, 0), padded(batch, 7)):
        inputs = hook.inputs(given)
        outputs = mentee(**inputs)
        losses.append(hook.loss(outputs.loss, outputs, inputs))
    torch.testing.assert_close(losses[1], losses[2])
    if model_of is not llama_of:  # the last position of Llama has no next label and counts only without padding
        torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize(("model_of", "offset"), [(tagger_of, 0), (llama_of, 1)])
def test_kl_divergence_uses_only_positions_with_a_label(tmp_path, model_of, offset):
    mentee, mentor = model_of(0, num_hidden_layers=1), model_of(3, num_hidden_layers=1)
    hook = received(
        MutualKD(temperature=1.0, match_hidden=False, match_attention=False),
        model=mentee,
        private=(Trainer(model=mentor, args=arguments(tmp_path)), Exchange(mentor)),
    )
    ids = torch.tensor(rows(2, seed=4)["input_ids"])
    # Labels of the third and fourth token of the first sequence and of the second token of the second sequence.
    labels = torch.full_like(ids, -100)
    positions = ([0, 0, 1], [2, 3, 1])
    labels[positions] = ids[positions] % 3
    batch = {"input_ids": ids, "labels": labels}
    outputs, mentor_outputs = mentee(**batch), mentor(**batch)
    predicted = (positions[0], [position - offset for position in positions[1]])
    small, large = outputs.logits[predicted], mentor_outputs.logits[predicted]
    on_labels = outputs.loss + mentor_outputs.loss
    kl = sum(
        F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
        for student, teacher in ((small, large), (large, small))
    )
    torch.testing.assert_close(hook.loss(outputs.loss, outputs, batch), on_labels + kl / on_labels)


@pytest.mark.parametrize("model_of", [tagger_of, llama_of])
def test_kl_divergence_uses_all_positions_without_padding(tmp_path, model_of):
    mentee, mentor = model_of(0, num_hidden_layers=1), model_of(3, num_hidden_layers=1)
    hook = received(
        MutualKD(temperature=1.0, match_hidden=False, match_attention=False),
        model=mentee,
        private=(Trainer(model=mentor, args=arguments(tmp_path)), Exchange(mentor)),
    )
    ids = torch.tensor(rows(2, seed=4)["input_ids"])
    batch = {"input_ids": ids, "labels": ids % 3}
    outputs, mentor_outputs = mentee(**batch), mentor(**batch)
    small, large = outputs.logits.flatten(0, 1), mentor_outputs.logits.flatten(0, 1)
    on_labels = outputs.loss + mentor_outputs.loss
    kl = kl_divergence(small, large) + kl_divergence(large, small)
    assert torch.equal(hook.loss(outputs.loss, outputs, batch), on_labels + kl / on_labels)


class Batches(Trainer):
    """Record the batches of all steps."""

    seen: list[dict] = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.seen.append({name: inputs[name].clone() for name in ("input_ids", "labels")})
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize(("model_of", "divides"), [(llama_of, True), (classifier_of, False)])
def test_accumulated_batches_have_the_same_weight_in_all_terms(tmp_path, model_of, divides):
    """One model divides its loss by the tokens of all batches. The other returns a mean, which `Trainer` averages."""
    Batches.seen.clear()
    data = rows(4, seed=4)
    if divides:
        hidden = [[-100] * number + ids[number:] for number, ids in enumerate(data["input_ids"])]
        data = Dataset.from_dict({"input_ids": data["input_ids"], "labels": hidden})
    models = {"mentee": model_of(0, num_hidden_layers=1), "mentor": model_of(3, num_hidden_layers=1)}
    before = {name: copy.deepcopy(model) for name, model in models.items()}
    sgd_options = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    trainer = federate(Batches)(
        model=models["mentee"],
        args=arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **sgd_options),
        train_dataset={"a": data, "b": data},
        client_model_init=lambda client_id: models["mentor"],
        federation=FederatedConfig(
            num_rounds=1,
            clients_per_round=1,
            aggregation="mutual_kd",
            aggregation_kwargs={"energy_start": 1.0, "energy_end": 1.0},
        ),
    )
    trainer.train()
    assert len(Batches.seen) == 2
    # Each position predicts the next token.
    num_items = [int((batch["labels"][..., 1:] != -100).sum()) if divides else 1 for batch in Batches.seen]
    assert not divides or num_items[0] != num_items[1]
    total = 0.0
    hook = received(
        MutualKD(temperature=1.0, match_hidden=True, match_attention=False),
        model=before["mentee"],
        private=(Trainer(model=before["mentor"], args=arguments(tmp_path)), Exchange(before["mentor"])),
    )
    for batch, number in zip(Batches.seen, num_items, strict=True):
        inputs = hook.inputs(batch)
        outputs = before["mentee"](**inputs)
        total = total + hook.loss(outputs.loss, outputs, inputs) * (number / sum(num_items) if divides else 1)
    total.backward()
    client_id = next(client_id for client_id in "ab" if client_id in trainer.engine.worker.models)
    after = {"mentee": trainer.model.state_dict(), "mentor": kept(trainer, client_id)["mentor"]}
    for model, weights in after.items():
        for name, parameter in before[model].named_parameters():
            if parameter.grad is not None:
                stepped = parameter.detach() - 0.1 * parameter.grad
                torch.testing.assert_close(weights[name], stepped, atol=1e-6, rtol=1e-4)


def test_kl_divergence_has_no_gradient_for_the_teacher(tmp_path):
    mentee, mentor = tiny_model().eval(), tiny_model(seed=3).eval()
    hook = received(
        MutualKD(temperature=1.0, match_hidden=False, match_attention=False),
        model=mentee,
        private=(Trainer(model=mentor, args=arguments(tmp_path)), Exchange(mentor)),
    )
    mentor.eval()
    batch = {name: torch.tensor(values) for name, values in rows(5, seed=4).to_dict().items()}
    outputs = mentee(**batch)
    mentor_outputs = mentor(**batch)
    loss = hook.loss(outputs.loss, outputs, batch)
    got = torch.autograd.grad(loss, mentee.classifier.weight, retain_graph=True)[0]
    small, large = outputs.logits, mentor_outputs.logits.detach()
    divisor = (outputs.loss + mentor_outputs.loss).detach()
    own = outputs.loss + F.kl_div(small.log_softmax(-1), large.softmax(-1), reduction="batchmean") / divisor
    torch.testing.assert_close(got, torch.autograd.grad(own, mentee.classifier.weight)[0])


def test_resume_gives_identical_weights(tmp_path):
    whole = trainer_of(tmp_path / "a", num_rounds=3, args={"save_strategy": "steps"})
    whole.train()
    resumed = trainer_of(tmp_path / "b", num_rounds=3, args={"save_strategy": "steps"})
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert same_weights(whole.model, resumed.model)
    a, b = (kept(trainer, "a")["mentor"] for trainer in (whole, resumed))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_resume_starts_a_copied_mentor_from_the_initial_mentee(tmp_path):
    def run(directory, checkpoint=None):
        trainer = FederatedTrainer(
            model=tiny_model(),
            args=arguments(directory, save_strategy="steps"),
            train_dataset={"a": rows(8), "b": rows(6, seed=1)},
            clients={"a": ClientSpec(model=mentor_of("a"))},
            federation=FederatedConfig(
                num_rounds=4,
                clients_per_round=1,
                aggregation="mutual_kd",
                federation_seed=1,  # samples a, b, b, b
            ),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = run(tmp_path / "a")
    resumed = run(tmp_path / "b", str(tmp_path / "a" / "checkpoint-1"))
    assert same_weights(whole.model, resumed.model)
    first, second = (kept(trainer, "b")["mentor"] for trainer in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("depth", "words"), [(2, "None in the model"), (5, "None in the state")])
def test_resume_with_another_mentor_shape_raises_an_error(tmp_path, depth, words):
    trainer_of(tmp_path, args={"save_strategy": "steps"}).train()
    trainer = trainer_of(
        tmp_path,
        model_init=lambda client_id: tiny_model(num_hidden_layers=depth, hidden_size=32, intermediate_size=32),
    )
    with pytest.raises(ModelMismatchError, match=f"saved state of client '[ab]' does not match .*{words}"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_run_without_mentors_raises_an_error(tmp_path):
    with pytest.raises(ValueError, match="client_model_init"):
        trainer_of(tmp_path, model_init=None)


def test_update_of_another_shape_is_rejected_with_the_client_id():
    state = {"w": torch.zeros(8, 6)}
    bad = ClientUpdate(
        3, "north", {"w/u": torch.zeros(9, 1), "w/s": torch.zeros(1), "w/v": torch.zeros(1, 6)}, 1, 0, 1
    )
    with pytest.raises(ValueError, match="Client 'north', round 4: 'w' has shape"):
        LowRankUpdates().server_receive(bad, state, {})
