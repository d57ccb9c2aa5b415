"""FedDRS where a client's model, its histogram or the server's model is of no use."""

from __future__ import annotations

import pytest
import torch
from feddrs_runs import EMBEDDINGS, trainer_of
from tiny import rows

from hf_federated import FederatedCallback
from hf_federated.messages import CLASS_COUNT


class Opposites(FederatedCallback):
    """
    Makes what the first clients of a round send so large that their models' logits overflow, after the check of
    updates. Two of them cancel each other out in the average.
    """

    def __init__(self, num_clients=2, bias=100.0, weight=3e38):
        self.num_clients, self.bias, self.weight = num_clients, bias, weight
        self.spoiled, self.sent, self.rejected = [], {}, []

    def on_client_end(self, args, state, control, update, **kwargs):
        if update.round == 0 and len(self.spoiled) < self.num_clients:
            sign = (-1) ** len(self.spoiled)
            update.state["bert.pooler.dense.bias"].fill_(self.bias * sign)
            update.state["classifier.weight"][0].fill_(self.weight * sign)
            update.state["classifier.weight"][1].fill_(-self.weight * sign)
            self.spoiled.append(update.client_id)
        self.sent[update.client_id] = update.state[EMBEDDINGS].clone()

    def on_round_end(self, args, state, control, server, **kwargs):
        self.rejected.append(dict(server.rejected))

    def mean_of_the_others(self):
        """The word embeddings of those who were left as they are, which nothing moves after their mean."""
        kept = [value.double() for client_id, value in self.sent.items() if client_id not in self.spoiled]
        return torch.stack(kept).mean(0).float()


@pytest.mark.parametrize("post_only", [False, True])
def test_a_teacher_that_gives_nan_is_left_out_by_name_and_of_the_final_mean_of_later_rounds(tmp_path, post_only):
    # Asked are a, b and c, then d, e and f.
    federation = {"num_rounds": 2, "clients_per_round": 3, "federation_seed": 38}
    data = {client_id: rows(8, seed=ord(client_id)) for client_id in "abcdef"}
    opposites = Opposites()
    trainer = trainer_of(tmp_path, data=data, callbacks=[opposites], federation=federation, post_only=post_only)
    trainer.train()
    assert opposites.spoiled == ["a", "b"] and len(opposites.sent) == 6
    reasons = opposites.rejected[1 if post_only else 0]
    assert sorted(reasons) == sorted(opposites.spoiled) and not opposites.rejected[0 if post_only else 1]
    for client_id, reason in reasons.items():
        assert f"{client_id!r}" in reason and "gives NaN or infinite values on" in reason
    logs = [entry for entry in trainer.state.log_history if "federated/post_num_clients" in entry]
    assert [entry["federated/post_num_clients"] for entry in logs] == [4]
    torch.testing.assert_close(trainer.model.state_dict()[EMBEDDINGS], opposites.mean_of_the_others())
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_a_teacher_that_gives_nan_is_left_out_before_the_mean_of_the_only_round(tmp_path):
    opposites = Opposites(num_clients=1)
    trainer = trainer_of(tmp_path, callbacks=[opposites], federation={"num_rounds": 1}, post_only=True)
    trainer.train()
    assert list(opposites.rejected[0]) == opposites.spoiled
    assert trainer.state.log_history[0]["federated/post_num_clients"] == 2
    torch.testing.assert_close(trainer.model.state_dict()[EMBEDDINGS], opposites.mean_of_the_others())


def test_clients_whose_samples_run_off_are_not_counted_among_those_of_the_post_processing(tmp_path):
    # Finite where samples begin, and of gradients with which they do not stay so.
    opposites = Opposites(bias=0.0, weight=1e37)
    trainer = trainer_of(tmp_path, callbacks=[opposites], federation={"num_rounds": 1}, post_only=True)
    trainer.train()
    assert sorted(opposites.rejected[0]) == sorted(opposites.spoiled)
    assert all("lower `step_size`" in reason for reason in opposites.rejected[0].values())
    assert trainer.state.log_history[0]["federated/post_num_clients"] == 1


class SpoiledServer(FederatedCallback):
    @torch.no_grad()
    def on_distill(self, args, state, control, model, **kwargs):
        model.bert.pooler.dense.bias.fill_(100.0)
        model.classifier.weight.fill_(3e38)


@pytest.mark.parametrize(
    ("callback", "named"),
    [(SpoiledServer(), r"`max_grad_norm`\)\.$"), (Opposites(num_clients=1), "averaged before: 'a'")],
)
def test_a_servers_model_that_gives_nan_is_no_clients_fault(tmp_path, callback, named):
    trainer = trainer_of(tmp_path, callbacks=[callback], federation={"num_rounds": 1})
    with pytest.raises(FloatingPointError, match=f"Round 0: the server's model gives NaN.*{named}"):
        trainer.train()


class Miscount(FederatedCallback):
    """Client a's label histogram in other classes than it has."""

    def __init__(self, classes):
        self.classes, self.reasons = classes, {}

    def on_client_end(self, args, state, control, update, **kwargs):
        if update.client_id == "a":
            for label in range(2):
                del update.metrics[f"{CLASS_COUNT}{label}"]
            update.metrics.update({f"{CLASS_COUNT}{label}": 4.0 for label in self.classes})

    def on_round_end(self, args, state, control, server, **kwargs):
        self.reasons = dict(server.rejected)


@pytest.mark.parametrize("post_only", [False, True])
@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([0, 1, 2], "has 3 classes, but the server has 2."),
        ([0, 2], "has no number for the classes [1]."),
        (["x", -1], "has no number for the classes [0, 1]."),
        ([], "has 0 classes, but the server has 2."),
    ],
)
def test_a_histogram_of_other_classes_leaves_its_client_out_by_name(tmp_path, classes, message, post_only):
    miscount = Miscount(classes)
    trainer = trainer_of(tmp_path, callbacks=[miscount], federation={"num_rounds": 1}, post_only=post_only)
    trainer.train()
    assert miscount.reasons == {"a": f"Client 'a', round 0: its label histogram {message}"}
    assert trainer.state.log_history[0]["federated/post_num_clients"] == 2


def test_too_few_clients_with_a_histogram_fail_the_round(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[Miscount([0, 2])], federation={"min_clients": 3})
    with pytest.raises(RuntimeError, match=r"min_clients=3.*'a'.*its label histogram has no number"):
        trainer.train()
