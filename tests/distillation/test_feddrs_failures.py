"""FedDRS with a client's model or a server's model that gives NaN, and with invalid label histograms."""

from __future__ import annotations

import pytest
import torch
from feddrs_runs import EMBEDDINGS, feddrs_trainer
from tiny import rows

from hf_federated import FederatedCallback
from hf_federated.messages import CLASS_COUNT


class OverflowingClients(FederatedCallback):
    """
    Change the updates of the round's first clients so that the logits of their models overflow.

    The change happens after the check of updates. The changes of two clients cancel each other out in the average.
    """

    def __init__(self, num_clients=2, bias=100.0, weight=3e38):
        self.num_clients, self.bias, self.weight = num_clients, bias, weight
        self.changed, self.sent, self.rejected = [], {}, []

    def on_client_end(self, args, state, control, update, **kwargs):
        if update.round == 0 and len(self.changed) < self.num_clients:
            sign = (-1) ** len(self.changed)
            update.state["bert.pooler.dense.bias"].fill_(self.bias * sign)
            update.state["classifier.weight"][0].fill_(self.weight * sign)
            update.state["classifier.weight"][1].fill_(-self.weight * sign)
            self.changed.append(update.client_id)
        self.sent[update.client_id] = update.state[EMBEDDINGS].clone()

    def on_round_end(self, args, state, control, round, **kwargs):
        self.rejected.append(dict(round.rejected))

    def mean_of_unchanged_clients(self):
        """The mean word embeddings of the unchanged clients. Post-processing does not move the embeddings."""
        kept = [value.double() for client_id, value in self.sent.items() if client_id not in self.changed]
        return torch.stack(kept).mean(0).float()


@pytest.mark.parametrize("post_only", [False, True])
@pytest.mark.sampled(1)
def test_teacher_with_nan_is_left_out_and_named_and_excluded_from_the_final_mean(tmp_path, post_only):
    # The cohorts are a, b and c, then d, e and f.
    federation = {"num_rounds": 2, "clients_per_round": 3, "federation_seed": 38}
    data = {client_id: rows(8, seed=ord(client_id)) for client_id in "abcdef"}
    overflowing = OverflowingClients()
    trainer = feddrs_trainer(tmp_path, data=data, callbacks=[overflowing], federation=federation, post_only=post_only)
    trainer.train()
    assert overflowing.changed == ["a", "b"] and len(overflowing.sent) == 6
    reasons = overflowing.rejected[1 if post_only else 0]
    assert sorted(reasons) == sorted(overflowing.changed) and not overflowing.rejected[0 if post_only else 1]
    for client_id, reason in reasons.items():
        assert f"{client_id!r}" in reason and "gives NaN or infinite values on" in reason
    logs = [entry for entry in trainer.state.log_history if "federated/post_num_clients" in entry]
    assert [entry["federated/post_num_clients"] for entry in logs] == [4]
    torch.testing.assert_close(trainer.model.state_dict()[EMBEDDINGS], overflowing.mean_of_unchanged_clients())
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_teacher_with_nan_is_excluded_from_the_mean_of_a_single_round(tmp_path):
    overflowing = OverflowingClients(num_clients=1)
    trainer = feddrs_trainer(tmp_path, callbacks=[overflowing], federation={"num_rounds": 1}, post_only=True)
    trainer.train()
    assert list(overflowing.rejected[0]) == overflowing.changed
    assert trainer.state.log_history[0]["federated/post_num_clients"] == 2
    torch.testing.assert_close(trainer.model.state_dict()[EMBEDDINGS], overflowing.mean_of_unchanged_clients())


def test_clients_with_diverging_samples_are_excluded_from_post_processing(tmp_path):
    # The logits are finite for the initial samples, but gradient steps on the samples make them overflow.
    overflowing = OverflowingClients(bias=0.0, weight=1e37)
    trainer = feddrs_trainer(tmp_path, callbacks=[overflowing], federation={"num_rounds": 1}, post_only=True)
    trainer.train()
    assert sorted(overflowing.rejected[0]) == sorted(overflowing.changed)
    assert all("lower `step_size`" in reason for reason in overflowing.rejected[0].values())
    assert trainer.state.log_history[0]["federated/post_num_clients"] == 1


class OverflowingServer(FederatedCallback):
    @torch.no_grad()
    def on_distill(self, args, state, control, model, **kwargs):
        model.bert.pooler.dense.bias.fill_(100.0)
        model.classifier.weight.fill_(3e38)


@pytest.mark.parametrize(
    ("callback", "named"),
    [(OverflowingServer(), r"`max_grad_norm`\)\.$"), (OverflowingClients(num_clients=1), "averaged before: 'a'")],
)
def test_server_model_with_nan_raises_an_error_about_the_server(tmp_path, callback, named):
    trainer = feddrs_trainer(tmp_path, callbacks=[callback], federation={"num_rounds": 1})
    with pytest.raises(FloatingPointError, match=f"Round 1: the server's model gives NaN.*{named}"):
        trainer.train()


class ReplaceHistogram(FederatedCallback):
    """Replace the label histogram of client `a` with other classes."""

    def __init__(self, classes):
        self.classes, self.reasons = classes, {}

    def on_client_end(self, args, state, control, update, **kwargs):
        if update.client_id == "a":
            for label in range(2):
                del update.metrics[f"{CLASS_COUNT}{label}"]
            update.metrics.update({f"{CLASS_COUNT}{label}": 4.0 for label in self.classes})

    def on_round_end(self, args, state, control, round, **kwargs):
        self.reasons = dict(round.rejected)


INVALID_HISTOGRAMS = [
    ([0, 1, 2], "has 3 classes, but the server has 2."),
    ([0, 2], "has no number for the classes [1]."),
    (["x", -1], "has no number for the classes [0, 1]."),
    ([], "has 0 classes, but the server has 2."),
]


@pytest.mark.parametrize(
    ("classes", "message", "post_only"),
    [
        *((*histogram, False) for histogram in INVALID_HISTOGRAMS),
        (*INVALID_HISTOGRAMS[0], True),
        *(pytest.param(*histogram, True, marks=pytest.mark.slow) for histogram in INVALID_HISTOGRAMS[1:]),
    ],
)
@pytest.mark.sampled(2)
def test_client_with_an_invalid_histogram_is_left_out_and_named(tmp_path, classes, message, post_only):
    miscount = ReplaceHistogram(classes)
    trainer = feddrs_trainer(tmp_path, callbacks=[miscount], federation={"num_rounds": 1}, post_only=post_only)
    trainer.train()
    assert miscount.reasons == {"a": f"Client 'a', round 1: its label histogram {message}"}
    assert trainer.state.log_history[0]["federated/post_num_clients"] == 2


def test_round_fails_when_too_few_clients_have_a_valid_histogram(tmp_path):
    trainer = feddrs_trainer(tmp_path, callbacks=[ReplaceHistogram([0, 2])], federation={"min_clients": 3})
    with pytest.raises(RuntimeError, match=r"min_clients=3.*'a'.*its label histogram has no number"):
        trainer.train()
