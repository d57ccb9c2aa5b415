"""What each distillation method exchanges and learns, and what all of them have in common."""

from __future__ import annotations

import pytest
import torch
from distilled import (
    METHODS,
    NUM_BATCHES,
    NUM_CLASSES,
    NUM_PUBLIC,
    SIZES,
    Recorder,
    client_weights,
    distilled,
    same_clients,
)
from tiny import rows, same_weights, tiny_model

from hf_federated import DISTILLATIONS, FederatedCallback
from hf_federated.distillation import build_distillation, robust_mean, soft_cross_entropy
from hf_federated.messages import ClientUpdate, Distill, Feedback, Fit, Metrics, Predict, Predictions, public_order


def of(messages, kind):
    return [message for message in messages if isinstance(message, kind)]


def test_every_method_of_the_table_is_tried_here():
    assert {name for name, _ in METHODS} == set(DISTILLATIONS)


@pytest.mark.parametrize(("method", "kwargs"), METHODS)
def test_server_and_clients_learn_and_nothing_but_messages_is_shared(tmp_path, method, kwargs):
    objects = distilled(tmp_path / "a", method, kwargs)
    objects.train()
    through_bytes = distilled(tmp_path / "b", method, kwargs, record=Recorder(serialize=True, separate=True))
    through_bytes.train()
    assert through_bytes.engine.worker._distillation is not through_bytes.distillation
    assert same_weights(objects.model, through_bytes.model)
    assert same_clients(objects, through_bytes)
    assert objects.ledger.to_dict() == through_bytes.ledger.to_dict()
    assert not same_weights(objects.model, tiny_model())
    assert torch.isfinite(torch.tensor(objects.evaluate()["eval_loss"]))


@pytest.mark.parametrize(
    ("method", "kwargs", "store"),
    [("fedid", {}, "memory"), ("fedid", {}, "disk"), ("adafd", {}, "disk"), ("feded", {}, "memory")],
)
def test_models_that_are_put_away_come_back_as_they_were(tmp_path, method, kwargs, store):
    resident = distilled(tmp_path / "a", method, kwargs)
    resident.train()
    federation = {"max_resident_clients": 1, "client_store": store}
    put_away = distilled(tmp_path / "b", method, kwargs, federation=federation)
    put_away.train()
    assert same_weights(resident.model, put_away.model)
    assert same_clients(resident, put_away)
    assert len(put_away.engine.worker.models._resident) == 1


def test_parameters_do_not_travel_where_predictions_do(tmp_path):
    record = Recorder()
    distilled(tmp_path, "mhat", record=record).train()
    assert all(not message.state and not message.returns_state for message in of(record.sent, Fit))
    assert all(not reply.state for reply in of(record.received, ClientUpdate))


class SpoilsClient(FederatedCallback):
    """Makes a client sure of one class, after the first round."""

    def on_round_end(self, args, state, control, server, **kwargs):
        if server.round == 0:
            model = self.trainer.engine.worker.models.open("a").trainer.model
            with torch.no_grad():
                model.classifier.bias.copy_(torch.tensor([50.0, -50.0]))


def test_clients_go_on_from_their_own_models(tmp_path):
    losses = []
    for callbacks in ([], [SpoilsClient()]):
        record = Recorder()
        trainer = distilled(tmp_path, "dsfl", record=record, federation={"local_epochs": 1})
        for callback in callbacks:
            callback.trainer = trainer
            trainer.add_callback(callback)
        trainer.train()
        weights = client_weights(trainer)
        assert len(weights["a"]) > len(weights["b"])
        losses.append({(u.round, u.client_id): u.metrics["loss"] for u in of(record.received, ClientUpdate)})
    plain, spoilt = losses
    assert all(spoilt[0, client_id] == plain[0, client_id] for client_id in SIZES)
    # About half of its rows are of the other class, at a distance of 100 between the logits.
    assert spoilt[1, "a"] > plain[1, "a"] + 10
    assert spoilt[1, "b"] == pytest.approx(plain[1, "b"], abs=1)


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("feddf", "client_epochs", 2),
        ("feddf", "prediction_dtype", "int8"),
        ("feddf", "top_k", 1),
        ("feded", "client_lr", 1e-3),
        ("fedkd", "client_epochs", 2),
        ("dsfl", "temperature", 2.0),
        ("cronus", "temperature", 2.0),
        ("fedmd", "temperature", 2.0),
        ("fedid", "server_epochs", 2),
        ("fedid", "train_on_labelled", True),
    ],
)
def test_a_setting_without_effect_is_refused(method, name, value):
    with pytest.raises(ValueError, match=f"`{name}` would have no effect"):
        build_distillation(method, {name: value})


@pytest.mark.parametrize(
    ("method", "kwargs", "name"),
    [
        ("adafd", {"weighting": "size", "beta": 2.0}, "beta"),
        ("adafd", {"weighting": "rnwc", "beta": 2.0}, "beta"),
        ("adafd", {"weighting": "enwc", "clients_evaluate": True}, "clients_evaluate"),
        ("fedid", {"feedback": "none", "feedback_step_size": 0.2}, "feedback_step_size"),
        ("fedid", {"feedback": "mpl_sampled", "feedback_step_size": 0.2}, "feedback_step_size"),
    ],
)
def test_a_setting_without_effect_beside_another_is_refused(method, kwargs, name):
    with pytest.raises(ValueError, match=f"`{name}` would have no effect on {DISTILLATIONS[method].__name__} with"):
        build_distillation(method, kwargs)


def test_allowed_settings_are_those_with_an_effect():
    with pytest.raises(ValueError) as refused:
        build_distillation("fedid", {"epochs": 3})
    assert "public_epochs" in str(refused.value) and "server_epochs" not in str(refused.value)


def test_feddf_follows_scaffold_too(tmp_path):
    trainer = distilled(tmp_path, "feddf", federation={"aggregation": "scaffold"})
    trainer.train()
    record = Recorder()
    plain = distilled(tmp_path, "feddf", record=record)
    plain.train()
    assert not same_weights(trainer.model, plain.model)
    controls = trainer.aggregation.state_dict()["control"]
    assert "public_logits" not in controls and any(value.abs().sum() > 0 for value in controls.values())
    assert all(set(update.extra) == {"public_logits"} for update in of(record.received, ClientUpdate))


def test_feded_sends_the_servers_parameters_and_gets_none_back(tmp_path):
    record = Recorder()
    trainer = distilled(tmp_path, "feded", record=record)
    trainer.train()
    second_round = [message for message in of(record.sent, Fit) if message.round == 1]
    assert all(message.state and not message.returns_state for message in second_round)
    assert all(not reply.state for reply in of(record.received, ClientUpdate))
    assert not of(record.sent, (Distill, Feedback))


def test_fedkd_is_one_upload_a_client_and_no_downlink(tmp_path):
    record = Recorder()
    distilled(tmp_path, "fedkd", record=record).train()
    assert [type(message) for message in record.sent].count(Predict) == len(SIZES)
    assert len(of(record.received, Predictions)) == len(SIZES)
    assert not of(record.sent, (Distill, Feedback))


def test_fedkd_of_more_rounds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_rounds=1"):
        distilled(tmp_path, "fedkd", federation={"num_rounds": 2}).train()


@pytest.mark.parametrize("weighting", ["class_counts", "size"])
def test_fedkd_weighs_each_class_by_what_clients_have_of_it_or_all_by_rows(tmp_path, weighting):
    record = Recorder()
    trainer = distilled(tmp_path, "fedkd", {"weighting": weighting}, record=record)
    before, taught = trainer.distillation.train_server, []
    trainer.distillation.train_server = lambda targets, *args: taught.append(targets) or before(targets, *args)
    trainer.train()
    counts = {}
    for client_id in SIZES:
        labels = trainer.clients[client_id]["labels"]
        counts[client_id] = torch.tensor([labels.count(label) for label in range(NUM_CLASSES)]).double()
    shares = {client_id: count / sum(counts.values()) for client_id, count in counts.items()}
    by_size = {client_id: count.sum() / sum(SIZES.values()) for client_id, count in counts.items()}
    # The two weightings really differ here, and neither is uniform.
    assert all((shares[client_id] - by_size[client_id]).abs().max() > 0.02 for client_id in "ab")
    weights = shares if weighting == "class_counts" else by_size
    sent = {client_id: logits.double() for client_id, logits in sent_predictions(record).items()}
    expected = sum(weights[client_id] * logits for client_id, logits in sent.items())
    torch.testing.assert_close(taught[0], expected.float())
    for update in of(record.received, ClientUpdate):
        told = [update.metrics.get(f"class_count_{label}") for label in range(NUM_CLASSES)]
        assert told == (counts[update.client_id].tolist() if weighting == "class_counts" else [None] * NUM_CLASSES)
    assert not any("class_count" in name for entry in trainer.state.log_history for name in entry)


def sent_predictions(record, round=0):
    return {
        reply.client_id: reply.values["values"] for reply in of(record.received, Predictions) if reply.round == round
    }


def broadcast(record, round=0):
    """What went to the clients, which is the same for all."""
    targets = [message.targets["values"] for message in of(record.sent, Distill) if message.round == round]
    assert len(targets) == len(SIZES) and all(torch.equal(targets[0], other) for other in targets)
    return targets[0]


def test_dsfl_broadcasts_the_sharpened_mean_of_probabilities(tmp_path):
    record = Recorder()
    distilled(tmp_path, "dsfl", record=record).train()
    mean = torch.stack([logits.softmax(-1) for logits in sent_predictions(record).values()]).mean(0)
    sharpened = broadcast(record)
    torch.testing.assert_close(sharpened, (mean / 0.1).softmax(-1))

    def entropy(distribution):
        return -(distribution * distribution.log()).sum(-1)

    assert (entropy(sharpened) < entropy(mean)).all()


def test_dsfl_learns_soft_targets(tmp_path):
    algorithm = distilled(tmp_path, "dsfl").distillation
    logits, targets = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.4]])
    for loss in (algorithm.server_loss(logits, targets), algorithm.client_loss(logits, targets, {})):
        torch.testing.assert_close(loss, soft_cross_entropy(logits, targets))


def test_mhat_broadcasts_the_logits_of_the_servers_model(tmp_path):
    record = Recorder()
    trainer = distilled(tmp_path, "mhat", record=record, federation={"num_rounds": 1})
    trainer.train()
    trainer.model.eval()
    with torch.no_grad():
        inputs = torch.tensor(trainer._setup.participants.public_dataset["input_ids"])
        torch.testing.assert_close(broadcast(record), trainer.model(input_ids=inputs).logits)


def test_fedmd_broadcasts_the_mean_of_the_scores(tmp_path):
    record = Recorder()
    distilled(tmp_path, "fedmd", record=record).train()
    torch.testing.assert_close(broadcast(record), torch.stack(list(sent_predictions(record).values())).mean(0))


def test_cronus_broadcasts_a_robust_mean_of_probabilities(tmp_path):
    record = Recorder()
    distilled(tmp_path, "cronus", {"robust_method": "median"}, record=record).train()
    probabilities = torch.stack([logits.softmax(-1) for logits in sent_predictions(record).values()])
    median = robust_mean(probabilities, "median")
    torch.testing.assert_close(broadcast(record), median / median.sum(-1, keepdim=True))


@pytest.mark.parametrize("method", ["filter", "trimmed"])
def test_cronus_takes_the_robust_mean_that_it_is_given(tmp_path, method):
    record = Recorder()
    distilled(tmp_path, "cronus", {"robust_method": method, "outlier_share": 0.34}, record=record).train()
    probabilities = torch.stack([logits.softmax(-1) for logits in sent_predictions(record).values()])
    means = {
        name: mean / mean.sum(-1, keepdim=True)
        for name, mean in ((name, robust_mean(probabilities, name, 0.34)) for name in ("filter", "trimmed"))
    }
    torch.testing.assert_close(broadcast(record), means[method].float())
    none = robust_mean(probabilities, method, 0.0)
    assert not torch.allclose(broadcast(record), none.float(), atol=1e-5)


@pytest.mark.parametrize(("method", "steps"), [("dsfl", 2 * NUM_BATCHES), ("fedid", 2 * NUM_BATCHES)])
def test_optimizers_of_distillation_last_for_the_run(tmp_path, method, steps):
    trainer = distilled(tmp_path, method)
    trainer.train()
    models = trainer.engine.worker.models
    students = [trainer._setup.distillation_callback.server.student]
    students += [models.open(client_id).student for client_id in SIZES]
    for student in students:
        counters = {int(state["step"]) for state in student.state_dict()["optimizer"]["state"].values()}
        assert counters == {steps}
        assert student.state_dict()["scheduler"]["last_epoch"] == steps


def test_an_interactive_round_asks_for_every_mini_batch_once(tmp_path):
    record = Recorder()
    distilled(tmp_path, "fedid", record=record, federation={"num_rounds": 1}).train()
    asked = [message for message in of(record.sent, Predict) if message.client_id == "a"]
    answered = [message for message in of(record.sent, Feedback) if message.client_id == "a"]
    assert [(m.order, m.start, m.stop, m.seed) for m in asked] == [
        (m.order, m.start, m.stop, m.seed) for m in answered
    ]
    seen = torch.cat([public_order(NUM_PUBLIC, m.order)[m.start : m.stop] for m in asked])
    assert sorted(seen.tolist()) == list(range(NUM_PUBLIC))
    assert len(of(record.received, Metrics)) == len(SIZES) * NUM_BATCHES


def test_every_mini_batch_has_labelled_rows_and_drawn_labels_of_its_own(tmp_path):
    record = Recorder()
    kwargs, labelled = {"feedback": "mpl_sampled"}, rows(12, seed=6)
    trainer = distilled(tmp_path, "fedid", kwargs, record=record, server_dataset=labelled)
    batches: list[frozenset[tuple[int, ...]]] = []

    class Notes(FederatedCallback):
        def on_round_begin(self, args, state, control, server, **_):
            if server.round > 0:
                return
            of_server = trainer._setup.distillation_callback.server
            drawn = of_server.labelled_batch

            def noted(size, *purpose):
                batch = drawn(size, *purpose)
                batches.append(frozenset(map(tuple, batch["input_ids"].tolist())))
                return batch

            of_server.labelled_batch = noted

    trainer.add_callback(Notes())
    trainer.train()
    assert len(batches) == 2 * NUM_BATCHES
    # Of 12 rows 4 each time: 495 sets, of which none comes twice here, and six of which leave one row out on average.
    assert len(set(batches)) == len(batches) and all(len(batch) == 4 for batch in batches)
    assert len(frozenset.union(*batches)) >= 10
    seeds: dict[tuple[int, ...], set[int]] = {}
    for message in of(record.sent, Feedback):
        seeds.setdefault((message.round, message.start), set()).add(message.settings["labels"])
    assert len(seeds) == 2 * NUM_BATCHES and all(len(of_batch) == 1 for of_batch in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)


@pytest.mark.parametrize("prediction", [{"prediction_dtype": "float16"}, {"prediction_dtype": "int8"}, {"top_k": 1}])
@pytest.mark.parametrize("method", ["adafd", "cronus", "dsfl", "fedid"])
def test_predictions_that_travel_smaller_are_learnt_from_as_well(tmp_path, method, prediction):
    whole, smaller = Recorder(), Recorder(serialize=True)
    distilled(tmp_path / "a", method, record=whole, federation={"num_rounds": 1}).train()
    trainer = distilled(tmp_path / "b", method, prediction, record=smaller, federation={"num_rounds": 1})
    trainer.train()
    for record in (whole, smaller):
        assert len(of(record.received, Predictions)) == len(of(whole.received, Predictions))
    if prediction != {"top_k": 1}:
        a, b = (next(iter(of(record.received, Predictions))) for record in (whole, smaller))
        decoded = trainer.distillation.decode(b.values, NUM_CLASSES)
        torch.testing.assert_close(decoded, a.values["values"], atol=2e-2, rtol=0)
        assert b.values["values"].element_size() < a.values["values"].element_size()


def test_feddf_learns_the_mean_of_the_clients_logits_after_averaging(tmp_path):
    record = Recorder()
    trainer = distilled(tmp_path, "feddf", record=record, federation={"num_rounds": 1})
    learnt, models = [], []

    def server_loss(logits, targets):
        learnt.append(targets)
        models.append({name: value.clone() for name, value in trainer.exchange.read().items()})
        return logits.sum() * 0

    trainer._setup.distillation_callback.algorithm.server_loss = server_loss
    trainer.train()
    updates = of(record.received, ClientUpdate)
    assert len({float(update.state["classifier.weight"][0, 0]) for update in updates}) == len(SIZES)
    for name, value in models[0].items():  # where the server's distillation begins
        mean = sum(SIZES[update.client_id] / sum(SIZES.values()) * update.state[name] for update in updates)
        torch.testing.assert_close(value, mean)
    logits = [update.extra["public_logits"] for update in updates]
    mean = torch.stack(logits).mean(0)
    assert all(any(torch.allclose(row, other) for other in mean) for row in torch.cat(learnt))
    assert not of(record.sent, (Predict, Distill, Feedback))


def test_the_server_learns_its_labelled_rows_where_it_shall(tmp_path):
    without = distilled(tmp_path / "a", "mhat")
    without.train()
    trainer = distilled(tmp_path / "b", "mhat", {"train_on_labelled": True, "server_epochs": 2})
    trainer.train()
    assert not same_weights(without.model, trainer.model)
    losses = [entry["federated/server_labelled_loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]
    # 3 batches of public rows and 2 of labelled ones, twice a round.
    student = trainer._setup.distillation_callback.server.student
    assert student.state_dict()["scheduler"]["last_epoch"] == 2 * 2 * (NUM_BATCHES + 2)
    assert student.state_dict()["scheduler"]["_last_lr"][0] == pytest.approx(0)


@pytest.mark.parametrize("method", ["dsfl", "fedid"])
def test_a_client_that_was_not_asked_is_where_the_others_are_on_the_curve(tmp_path, method):
    record = Recorder()
    federation = {"num_rounds": 4, "clients_per_round": 2, "local_epochs": 1}
    trainer = distilled(tmp_path, method, record=record, federation=federation)
    trainer.train()
    asked = {
        client_id: [update.round for update in of(record.received, ClientUpdate) if update.client_id == client_id]
        for client_id in SIZES
    }
    assert any(0 < len(rounds) < rounds[-1] + 1 for rounds in asked.values())
    models = trainer.engine.worker.models
    for client_id, rounds in asked.items():
        if rounds:
            schedule = models.open(client_id).student.state_dict()["scheduler"]
            assert schedule["last_epoch"] == (rounds[-1] + 1) * NUM_BATCHES
            share_left = 1 - (rounds[-1] + 1) / 4
            assert schedule["_last_lr"][0] == pytest.approx(trainer.run_args.learning_rate * share_left)
