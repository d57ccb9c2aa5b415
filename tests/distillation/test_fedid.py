"""FedID end to end: the gradients of clients and server for one mini-batch, against reference formulas.

Models are in float64, local training has a learning rate of 0, and the optimizer is plain gradient descent. A
client's change over a round is therefore its learning rate times one gradient. Predictions, their mean and the
feedback are sent as float32. This rounds each value a few times by a relative error of at most 2⁻²⁴, 6e-8. Gradients
therefore agree within 1e-6 of their largest value.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from distillation_setup import Recorder, client_weights, distillation_trainer
from tiny import rows, tiny_model
from torch.func import functional_call
from torch.nn import functional as F

from hf_federated import FedID
from hf_federated.distillation import sample_pseudo_labels
from hf_federated.messages import Feedback, Fit, Predict, Predictions, public_order


NUM_CLASSES, NUM_ROWS = 3, 4
WEIGHTS = {"a": 8 / 24, "b": 12 / 24, "c": 4 / 24}
SHAPES = {"a": {"num_hidden_layers": 1}, "b": {"num_hidden_layers": 3}, "c": {"hidden_size": 8}}
SERVER_RATE, CLIENT_RATE, STEP_SIZE = 0.05, 0.2, 0.3


def sharp_model(seed=0, **config):
    """
    A model without dropout whose predictions differ between examples.

    It uses eager attention, since fused attention has no second derivative.
    """
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
    return tiny_model(seed, NUM_CLASSES, initializer_range=0.3, **no_dropout, **config).double()


def three_classes(num_rows, seed):
    data = rows(num_rows, seed)
    labels = [tokens[0] % NUM_CLASSES for tokens in data["input_ids"]]
    return Dataset.from_dict({"input_ids": data["input_ids"], "labels": labels})


PUBLIC, LABELLED = three_classes(NUM_ROWS, seed=5), three_classes(NUM_ROWS, seed=6)


def client_model(client_id):
    return sharp_model(ord(client_id), **SHAPES[client_id])


@dataclass
class Run:
    """The messages, the parameter changes and the log of a finished round."""

    record: Recorder
    server: dict[str, torch.Tensor]
    clients: dict[str, dict[str, torch.Tensor]]
    log: dict[str, float]

    @property
    def feedback_messages(self) -> dict[str, Feedback]:
        return {message.client_id: message for message in self.record.sent if isinstance(message, Feedback)}

    @property
    def public(self) -> torch.Tensor:
        """The mini-batch in the order of the exchange."""
        message = self.feedback_messages["a"]
        return torch.tensor(PUBLIC["input_ids"])[public_order(NUM_ROWS, message.order)[message.start : message.stop]]


def one_round(tmp_path, server=None, **kwargs) -> Run:
    """Train one round of FedID. `kwargs` are settings of `FedID`."""
    record = Recorder()
    feedback = kwargs.get("feedback", "chain_rule")
    server_data = {} if feedback == "none" else {"server_dataset": LABELLED}
    if feedback in ("chain_rule", "per_example"):
        scales = {"virtual_step_size": STEP_SIZE, "feedback_weight": STEP_SIZE}
        kwargs = kwargs if "feedback_step_size" in kwargs else {**scales, **kwargs}
    trainer = distillation_trainer(
        tmp_path,
        "fedid",
        {
            "server_lr": SERVER_RATE,
            "client_lr": CLIENT_RATE,
            **kwargs,
        },
        federation={"num_rounds": 1, "local_epochs": 1},
        args={"learning_rate": 0.0, "optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant"},
        record=record,
        **{
            "model": server or sharp_model(),
            "client_model_init": client_model,
            "train_dataset": {
                client_id: three_classes(round(24 * weight), seed=ord(client_id))
                for client_id, weight in WEIGHTS.items()
            },
            "public_dataset": PUBLIC,
            "server_dataset": None,
            "eval_dataset": None,
            **server_data,
        },
    )
    trainer.train()
    server = changes(sharp_model(), trainer.exchange.read())
    clients = {
        client_id: changes(client_model(client_id), after) for client_id, after in client_weights(trainer).items()
    }
    return Run(record, server, clients, next(entry for entry in trainer.state.log_history if "loss" in entry))


def full_feedback(message: Feedback) -> torch.Tensor:
    """`∂L_val/∂q`. The message holds this gradient divided by a power of 2."""
    return message.feedback["values"].double() * 2.0 ** message.settings["exponent"]


def changes(before, after):
    return {name: after[name] - value.detach() for name, value in before.named_parameters()}


def check_steps(moved, gradients, rate):
    """Check that a model moved by `-rate` times the gradients."""
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(-moved[name] / rate, gradient, atol=1e-6 * largest, rtol=0)


def gradients_of(loss, model):
    gradients = torch.autograd.grad(
        loss, list(model.parameters()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(dict(model.named_parameters()), gradients, strict=True))


class Reference:
    """The round as in the paper, with one graph from the clients' parameters to the validation loss."""

    def __init__(self, public: torch.Tensor) -> None:
        self.models = {client_id: client_model(client_id).eval() for client_id in WEIGHTS}
        self.logits = {client_id: model(input_ids=public).logits for client_id, model in self.models.items()}
        self.ensemble = sum(WEIGHTS[client_id] * z.softmax(-1) for client_id, z in self.logits.items())
        self.server = sharp_model().eval()
        self.server_logits = self.server(input_ids=public).logits
        self.parameters = dict(self.server.named_parameters())

    def cross_entropy(self, logits: torch.Tensor) -> torch.Tensor:
        return -(self.ensemble * logits.log_softmax(-1)).sum(-1).mean()

    def distillation(self, client_id: str) -> torch.Tensor:
        return -(self.ensemble.detach() * self.logits[client_id].log_softmax(-1)).sum(-1).mean()

    def validation_loss(self, parameters=None) -> torch.Tensor:
        inputs = {"input_ids": torch.tensor(LABELLED["input_ids"])}
        logits = functional_call(self.server, parameters or self.parameters, (), inputs).logits
        return F.cross_entropy(logits, torch.tensor(LABELLED["labels"]))

    def validation_loss_after_step(self) -> torch.Tensor:
        """The validation loss with a graph through the server's step of plain gradient descent."""
        gradients = torch.autograd.grad(
            self.cross_entropy(self.server_logits),
            list(self.parameters.values()),
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        stepped = {
            name: value - STEP_SIZE * gradient
            for (name, value), gradient in zip(self.parameters.items(), gradients, strict=True)
        }
        return self.validation_loss(stepped)

    def moved_server(self, moved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.detach() + moved[name] for name, value in self.parameters.items()}


@pytest.mark.parametrize("clients_distill", [True, False])
def test_chain_rule_clients_follow_the_gradient_through_the_servers_step(tmp_path, clients_distill):
    run = one_round(tmp_path, clients_distill=clients_distill)
    reference = Reference(run.public)
    validation_loss = reference.validation_loss_after_step()
    for client_id, model in reference.models.items():
        loss = validation_loss + clients_distill * reference.distillation(client_id)
        check_steps(run.clients[client_id], gradients_of(loss, model), CLIENT_RATE)
    check_steps(
        run.server, gradients_of(reference.cross_entropy(reference.server_logits), reference.server), SERVER_RATE
    )


@pytest.mark.parametrize("weight", [0.02, 3.0])
def test_feedback_weight_scales_the_gradient_of_the_virtual_step(tmp_path, weight):
    """The virtual step keeps its length, so the reference multiplies the gradient of the whole graph."""
    run = one_round(tmp_path, feedback_weight=weight)
    reference = Reference(run.public)
    feedback = weight / STEP_SIZE * reference.validation_loss_after_step()
    for client_id, model in reference.models.items():
        check_steps(
            run.clients[client_id], gradients_of(feedback + reference.distillation(client_id), model), CLIENT_RATE
        )
    ratio = one_round(tmp_path / "equal").log["federated/feedback_ratio"] * weight / STEP_SIZE
    assert run.log["federated/feedback_ratio"] == pytest.approx(ratio, rel=1e-5)


def test_rewards_of_examples_are_scaled_by_the_feedback_weight(tmp_path):
    equal, weighted = (
        one_round(tmp_path / name, feedback="per_example", feedback_weight=weight)
        for name, weight in (("equal", STEP_SIZE), ("weighted", 8 * STEP_SIZE))
    )
    for client_id, message in weighted.feedback_messages.items():
        expected = 8 * equal.feedback_messages[client_id].feedback["rewards"]
        torch.testing.assert_close(message.feedback["rewards"], expected)


def test_feedback_step_size_sets_both_numbers_and_sends_the_same_bytes(tmp_path):
    alias = one_round(tmp_path / "alias", feedback_step_size=STEP_SIZE)
    both = one_round(tmp_path / "both")
    # A nonce is random.
    sent, expected = ([message.with_nonce("").to_bytes() for message in run.record.sent] for run in (alias, both))
    assert sent == expected
    assert FedID(feedback_step_size=0.2).non_default_settings() == {"virtual_step_size": 0.2, "feedback_weight": 0.2}
    with pytest.raises(ValueError, match="`feedback_step_size` is 0.2 and sets .*, but `feedback_weight` is 0.3"):
        FedID(feedback_step_size=0.2, feedback_weight=0.3)


@pytest.mark.parametrize("name", ["virtual_step_size", "feedback_weight", "feedback_step_size"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_numbers_of_the_virtual_step_are_positive_and_finite(name, value):
    with pytest.raises(ValueError, match="must be positive and finite"):
        FedID(**{name: value})


@pytest.mark.parametrize("feedback", ["chain_rule", "mpl_sampled"])
def test_validation_loss_is_computed_without_dropout(tmp_path, feedback):
    dropout_model = tiny_model(
        0, NUM_CLASSES, initializer_range=0.3, hidden_dropout_prob=0.5, attn_implementation="eager"
    ).double()
    run = one_round(tmp_path, dropout_model, feedback=feedback)
    reference = Reference(run.public)
    # The server's own step uses dropout.
    without = gradients_of(reference.cross_entropy(reference.server_logits), reference.server)
    assert not torch.allclose(-run.server["classifier.weight"] / SERVER_RATE, without["classifier.weight"], rtol=0.01)
    if feedback == "mpl_sampled":
        after = reference.validation_loss(reference.moved_server(run.server))
        improvement = float(reference.validation_loss() - after)
        assert run.feedback_messages["a"].settings["improvement"] == pytest.approx(improvement, abs=1e-9)
        return
    for client_id, model in reference.models.items():
        loss = reference.validation_loss_after_step() + reference.distillation(client_id)
        check_steps(run.clients[client_id], gradients_of(loss, model), CLIENT_RATE)


def test_feedback_ratio_compares_the_norms_of_feedback_and_distillation_gradients(tmp_path):
    run = one_round(tmp_path)
    reference = Reference(run.public)
    validation_loss, norms = reference.validation_loss_after_step(), []
    for client_id, logits in reference.logits.items():
        for loss in (validation_loss, reference.distillation(client_id)):
            norms.append(torch.autograd.grad(loss, logits, retain_graph=True)[0].norm())
    expected = sum(norms[::2]) / sum(norms[1::2])
    assert run.log["federated/feedback_ratio"] == pytest.approx(float(expected), rel=1e-5)
    assert "federated/feedback_ratio" not in one_round(tmp_path / "none", feedback="none").log


def test_feedback_ratio_is_not_logged_for_a_single_client(tmp_path):
    trainer = distillation_trainer(tmp_path, "fedid", train_dataset={"a": rows(8, seed=1)})
    trainer.train()
    assert not any("federated/feedback_ratio" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("step_size", [1e-6, 1e-9])
def test_small_feedback_is_preserved_in_float16(tmp_path, step_size):
    full = one_round(tmp_path / "a", feedback_weight=step_size)
    half = one_round(tmp_path / "b", feedback_weight=step_size, prediction_dtype="float16")
    for client_id in WEIGHTS:
        message = half.feedback_messages[client_id]
        assert message.feedback["values"].dtype == torch.float16
        expected = full_feedback(full.feedback_messages[client_id])
        assert 0 < expected.abs().max() < 6e-5  # The smallest normal number of float16 is about 6e-5.
        error = (full_feedback(message) - expected).abs().max()
        assert error < 0.01 * expected.abs().max()  # float16 rounds the ensemble too.


def test_without_feedback_clients_receive_and_learn_the_ensemble_only(tmp_path):
    run = one_round(tmp_path, feedback="none")
    reference = Reference(run.public)
    for client_id, model in reference.models.items():
        check_steps(run.clients[client_id], gradients_of(reference.distillation(client_id), model), CLIENT_RATE)
        assert run.feedback_messages[client_id].feedback == {}
    for message in run.feedback_messages.values():
        torch.testing.assert_close(message.targets["values"], reference.ensemble.detach().float(), atol=1e-6, rtol=0)


def drawn_labels(message: Feedback) -> torch.Tensor:
    ensemble = message.targets["values"]
    generator = torch.Generator().manual_seed(message.settings["labels"])
    return sample_pseudo_labels(ensemble / ensemble.sum(-1, keepdim=True), generator)


def log_likelihoods(reference: Reference, client_id: str, labels: torch.Tensor) -> torch.Tensor:
    """`log q_{i, ŷ_i}` of the ensemble, with a graph to this client only."""
    rest = sum(WEIGHTS[other] * z.softmax(-1).detach() for other, z in reference.logits.items() if other != client_id)
    ensemble = rest + WEIGHTS[client_id] * reference.logits[client_id].softmax(-1)
    return ensemble.gather(1, labels[:, None])[:, 0].log()


def test_per_example_rewards_are_gradients_at_the_drawn_labels(tmp_path):
    full, run = one_round(tmp_path / "a"), one_round(tmp_path / "b", feedback="per_example")
    reference = Reference(run.public)
    for client_id, model in reference.models.items():
        message = run.feedback_messages[client_id]
        labels, rewards = drawn_labels(message), message.feedback["rewards"]
        assert rewards.shape == (NUM_ROWS,)
        # The rewards are the entries of the whole gradient at the drawn labels.
        assert torch.equal(
            rewards, full_feedback(full.feedback_messages[client_id]).float().gather(1, labels[:, None])[:, 0]
        )
        surrogate = (rewards * log_likelihoods(reference, client_id, labels)).sum()
        check_steps(
            run.clients[client_id],
            gradients_of(reference.distillation(client_id) + surrogate, model),
            CLIENT_RATE,
        )


def test_mpl_sampled_clients_draw_the_labels_of_the_server(tmp_path):
    run = one_round(tmp_path, feedback="mpl_sampled")
    reference = Reference(run.public)
    labels = drawn_labels(run.feedback_messages["a"])
    check_steps(
        run.server, gradients_of(F.cross_entropy(reference.server_logits, labels), reference.server), SERVER_RATE
    )
    improvement = float(reference.validation_loss() - reference.validation_loss(reference.moved_server(run.server)))
    for client_id, model in reference.models.items():
        message = run.feedback_messages[client_id]
        assert message.settings["improvement"] == pytest.approx(improvement, abs=1e-9)
        assert message.feedback == {} and torch.equal(drawn_labels(message), labels)
        loss = reference.distillation(client_id) - improvement * log_likelihoods(reference, client_id, labels).sum()
        check_steps(run.clients[client_id], gradients_of(loss, model), CLIENT_RATE)


def test_mpl_server_learns_the_most_likely_labels_of_each_client(tmp_path):
    """This variant of the feedback follows the published code."""
    run = one_round(tmp_path, feedback="mpl")
    reference = Reference(run.public)
    server_loss = sum(
        WEIGHTS[client_id] * F.cross_entropy(reference.server_logits, z.argmax(-1))
        for client_id, z in reference.logits.items()
    )
    check_steps(run.server, gradients_of(server_loss, reference.server), SERVER_RATE)
    improvement = float(reference.validation_loss() - reference.validation_loss(reference.moved_server(run.server)))
    for client_id, model in reference.models.items():
        z = reference.logits[client_id]
        loss = F.cross_entropy(z, reference.ensemble.argmax(-1))
        loss = loss + WEIGHTS[client_id] * improvement * F.cross_entropy(z, z.argmax(-1))
        check_steps(run.clients[client_id], gradients_of(loss, model), CLIENT_RATE)


def test_exchange_is_predictions_and_feedback_for_the_same_examples(tmp_path):
    run = one_round(tmp_path)
    kinds = [type(message) for message in run.record.sent]
    assert kinds == [Fit] * 3 + [Predict] * 3 + [Feedback] * 3
    for reply in run.record.received:
        if isinstance(reply, Predictions):
            expected = Reference(run.public).logits[reply.client_id].detach().float()
            torch.testing.assert_close(reply.values["values"], expected, atol=1e-6, rtol=1e-6)
