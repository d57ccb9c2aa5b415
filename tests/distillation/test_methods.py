"""The messages and targets of each distillation method, and the properties that all methods share."""

from __future__ import annotations

import pytest
import torch
from client_parts import received
from distillation_setup import (
    METHODS,
    NUM_BATCHES,
    NUM_CLASSES,
    NUM_PUBLIC,
    SIZES,
    Recorder,
    client_weights,
    distillation_trainer,
    same_clients,
)
from tiny import rows, same_weights, tiny_model

from hf_federated import DISTILLATIONS, FederatedCallback
from hf_federated.distillation import build_distillation, robust_mean, soft_cross_entropy
from hf_federated.messages import ClientUpdate, Distill, Feedback, Fit, Metrics, Predict, Predictions, public_order


def select_messages(messages, kind):
    """Messages of a type."""
    return [message for message in messages if isinstance(message, kind)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Call `finished(method, kwargs, ...)` to get the trainer and the recorder of a run, which tests only read."""
    runs = {}

    def run(method, kwargs=None, **federation):
        key = repr((method, build_distillation(method, kwargs).settings(), federation))
        if key not in runs:
            record = Recorder()
            trainer = distillation_trainer(
                tmp_path_factory.mktemp(method), method, kwargs, record=record, federation=federation
            )
            trainer.train()
            runs[key] = trainer, record
        return runs[key]

    return run


def test_method_list_covers_all_distillations():
    assert {name for name, _ in METHODS} == set(DISTILLATIONS)


@pytest.mark.parametrize(("method", "kwargs"), METHODS)
@pytest.mark.sampled(6)
def test_training_through_serialized_messages_gives_identical_results(finished, tmp_path, method, kwargs):
    objects, _ = finished(method, kwargs)
    through_bytes = distillation_trainer(tmp_path, method, kwargs, record=Recorder(serialize=True))
    through_bytes.train()
    assert same_weights(objects.model, through_bytes.model)
    assert same_clients(objects, through_bytes)
    assert objects.ledger.to_dict() == through_bytes.ledger.to_dict()
    assert not same_weights(objects.model, tiny_model())
    assert torch.isfinite(torch.tensor(objects.evaluate()["eval_loss"]))


@pytest.mark.parametrize(
    ("method", "kwargs", "store"),
    [("fedid", {}, "memory"), ("fedid", {}, "disk"), ("adafd", {}, "disk"), ("feded", {}, "memory")],
)
@pytest.mark.sampled(2)
def test_limit_on_resident_clients_does_not_change_the_result(finished, tmp_path, method, kwargs, store):
    resident, _ = finished(method, kwargs)
    federation = {"max_resident_clients": 1, "client_store": store}
    limited = distillation_trainer(tmp_path, method, kwargs, federation=federation)
    limited.train()
    assert same_weights(resident.model, limited.model)
    assert same_clients(resident, limited)
    assert len(limited.engine.worker.models._resident) == 1


def test_mhat_sends_no_parameters(finished):
    _, record = finished("mhat")
    assert all(not message.state and not message.returns_state for message in select_messages(record.sent, Fit))
    assert all(not reply.state for reply in select_messages(record.received, ClientUpdate))


class SetClientBiases(FederatedCallback):
    """Set the biases of a client so that it strongly prefers one class, after the first round."""

    def on_round_end(self, args, state, control, round, **kwargs):
        if round.number == 0:
            model = self.trainer.engine.worker.models.open("a").trainer.model
            with torch.no_grad():
                model.classifier.bias.copy_(torch.tensor([50.0, -50.0]))


def test_clients_continue_from_their_own_models(tmp_path):
    losses = []
    for callbacks in ([], [SetClientBiases()]):
        record = Recorder()
        trainer = distillation_trainer(tmp_path, "dsfl", record=record, federation={"local_epochs": 1})
        for callback in callbacks:
            callback.trainer = trainer
            trainer.add_callback(callback)
        trainer.train()
        weights = client_weights(trainer)
        assert len(weights["a"]) > len(weights["b"])
        losses.append(
            {(u.round, u.client_id): u.metrics["loss"] for u in select_messages(record.received, ClientUpdate)}
        )
    plain, changed = losses
    assert all(changed[0, client_id] == plain[0, client_id] for client_id in SIZES)
    # About half of the client's examples have the other class, and the logits differ by 100.
    assert changed[1, "a"] > plain[1, "a"] + 10
    assert changed[1, "b"] == pytest.approx(plain[1, "b"], abs=1)


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
        ("fedid", "train_on_labeled", True),
    ],
)
def test_setting_without_effect_is_rejected(method, name, value):
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
        ("fedid", {"feedback": "mpl_sampled", "virtual_step_size": 0.2}, "virtual_step_size"),
        ("fedid", {"feedback": "mpl", "feedback_weight": 0.2}, "feedback_weight"),
    ],
)
def test_setting_without_effect_in_combination_is_rejected(method, kwargs, name):
    with pytest.raises(ValueError, match=f"`{name}` would have no effect on {DISTILLATIONS[method].__name__} with"):
        build_distillation(method, kwargs)


def test_error_lists_only_settings_with_an_effect():
    with pytest.raises(ValueError) as error:
        build_distillation("fedid", {"epochs": 3})
    assert "public_epochs" in str(error.value) and "server_epochs" not in str(error.value)


def test_feddf_works_with_scaffold(finished, tmp_path):
    trainer = distillation_trainer(tmp_path, "feddf", federation={"aggregation": "scaffold"})
    trainer.train()
    plain, record = finished("feddf")
    assert not same_weights(trainer.model, plain.model)
    controls = trainer.aggregation.state_dict()["control"]
    assert "public_logits" not in controls and any(value.abs().sum() > 0 for value in controls.values())
    assert all(set(update.extra) == {"public_logits"} for update in select_messages(record.received, ClientUpdate))


def test_feded_sends_server_parameters_and_receives_none(finished):
    _, record = finished("feded")
    second_round = [message for message in select_messages(record.sent, Fit) if message.round == 1]
    assert all(message.state and not message.returns_state for message in second_round)
    assert all(not reply.state for reply in select_messages(record.received, ClientUpdate))
    assert not select_messages(record.sent, (Distill, Feedback))


def test_fedkd_has_one_upload_per_client_and_no_download(finished):
    _, record = finished("fedkd")
    assert [type(message) for message in record.sent].count(Predict) == len(SIZES)
    assert len(select_messages(record.received, Predictions)) == len(SIZES)
    assert not select_messages(record.sent, (Distill, Feedback))


def test_fedkd_with_several_rounds_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="num_rounds=1"):
        distillation_trainer(tmp_path, "fedkd", federation={"num_rounds": 2}).train()


@pytest.mark.parametrize("weighting", ["class_counts", "size"])
def test_fedkd_weights_predictions_by_class_counts_or_size(tmp_path, weighting):
    record = Recorder()
    trainer = distillation_trainer(tmp_path, "fedkd", {"weighting": weighting}, record=record)
    train_server, server_targets = trainer.distillation.train_server, []
    trainer.distillation.train_server = lambda targets, *args: (
        server_targets.append(targets) or train_server(targets, *args)
    )
    trainer.train()
    counts = {}
    for client_id in SIZES:
        labels = trainer.clients[client_id]["labels"]
        counts[client_id] = torch.tensor([labels.count(label) for label in range(NUM_CLASSES)]).double()
    shares = {client_id: count / sum(counts.values()) for client_id, count in counts.items()}
    by_size = {client_id: count.sum() / sum(SIZES.values()) for client_id, count in counts.items()}
    # The two weightings differ for this data, and neither weighting is uniform.
    assert all((shares[client_id] - by_size[client_id]).abs().max() > 0.02 for client_id in "ab")
    weights = shares if weighting == "class_counts" else by_size
    sent = {client_id: logits.double() for client_id, logits in sent_predictions(record).items()}
    expected = sum(weights[client_id] * logits for client_id, logits in sent.items())
    torch.testing.assert_close(server_targets[0], expected.float())
    for update in select_messages(record.received, ClientUpdate):
        reported = [update.metrics.get(f"class_count_{label}") for label in range(NUM_CLASSES)]
        assert reported == (counts[update.client_id].tolist() if weighting == "class_counts" else [None] * NUM_CLASSES)
    assert not any("class_count" in name for entry in trainer.state.log_history for name in entry)


def sent_predictions(record, round=0):
    return {
        reply.client_id: reply.values["values"]
        for reply in select_messages(record.received, Predictions)
        if reply.round == round
    }


def broadcast_targets(record, round=0):
    """The targets of a round, which are the same for all clients."""
    targets = [
        message.targets["values"] for message in select_messages(record.sent, Distill) if message.round == round
    ]
    assert len(targets) == len(SIZES) and all(torch.equal(targets[0], other) for other in targets)
    return targets[0]


def test_dsfl_broadcasts_the_sharpened_mean_of_probabilities(finished):
    _, record = finished("dsfl")
    mean = torch.stack([logits.softmax(-1) for logits in sent_predictions(record).values()]).mean(0)
    sharpened = broadcast_targets(record)
    torch.testing.assert_close(sharpened, (mean / 0.1).softmax(-1))

    def entropy(distribution):
        return -(distribution * distribution.log()).sum(-1)

    assert (entropy(sharpened) < entropy(mean)).all()


def test_dsfl_trains_with_soft_cross_entropy(tmp_path):
    algorithm = distillation_trainer(tmp_path, "dsfl").distillation
    logits, targets = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.4]])
    for loss in (algorithm.server_loss(logits, targets), received(algorithm).client_loss(logits, targets, {})):
        torch.testing.assert_close(loss, soft_cross_entropy(logits, targets))


def test_mhat_broadcasts_the_logits_of_the_servers_model(finished):
    trainer, record = finished("mhat", num_rounds=1)
    trainer.model.eval()
    with torch.no_grad():
        inputs = torch.tensor(trainer.public_dataset["input_ids"])
        torch.testing.assert_close(broadcast_targets(record), trainer.model(input_ids=inputs).logits)


def test_fedmd_broadcasts_the_mean_of_logits(finished):
    _, record = finished("fedmd")
    torch.testing.assert_close(broadcast_targets(record), torch.stack(list(sent_predictions(record).values())).mean(0))


def test_cronus_broadcasts_a_robust_mean_of_probabilities(tmp_path):
    record = Recorder()
    distillation_trainer(tmp_path, "cronus", {"robust_method": "median"}, record=record).train()
    probabilities = torch.stack([logits.softmax(-1) for logits in sent_predictions(record).values()])
    median = robust_mean(probabilities, "median")
    torch.testing.assert_close(broadcast_targets(record), median / median.sum(-1, keepdim=True))


@pytest.mark.parametrize("method", ["filter", "trimmed"])
def test_cronus_uses_the_configured_robust_mean(tmp_path, method):
    record = Recorder()
    distillation_trainer(tmp_path, "cronus", {"robust_method": method, "outlier_share": 0.34}, record=record).train()
    probabilities = torch.stack([logits.softmax(-1) for logits in sent_predictions(record).values()])
    means = {
        name: mean / mean.sum(-1, keepdim=True)
        for name, mean in ((name, robust_mean(probabilities, name, 0.34)) for name in ("filter", "trimmed"))
    }
    torch.testing.assert_close(broadcast_targets(record), means[method].float())
    plain_mean = robust_mean(probabilities, method, 0.0)
    assert not torch.allclose(broadcast_targets(record), plain_mean.float(), atol=1e-5)


@pytest.mark.parametrize(("method", "steps"), [("dsfl", 2 * NUM_BATCHES), ("fedid", 2 * NUM_BATCHES)])
def test_distillation_optimizers_persist_over_rounds(finished, method, steps):
    trainer, _ = finished(method)
    models = trainer.engine.worker.models
    students = [trainer.distillation.server.student]
    students += [models.open(client_id).student for client_id in SIZES]
    for student in students:
        counters = {int(state["step"]) for state in student.state_dict()["optimizer"]["state"].values()}
        assert counters == {steps}
        assert student.state_dict()["scheduler"]["last_epoch"] == steps


def test_interactive_round_requests_every_mini_batch_once(finished):
    _, record = finished("fedid", num_rounds=1)
    predictions = [message for message in select_messages(record.sent, Predict) if message.client_id == "a"]
    feedback = [message for message in select_messages(record.sent, Feedback) if message.client_id == "a"]
    assert [(m.order, m.start, m.stop, m.seed) for m in predictions] == [
        (m.order, m.start, m.stop, m.seed) for m in feedback
    ]
    seen = torch.cat([public_order(NUM_PUBLIC, m.order)[m.start : m.stop] for m in predictions])
    assert sorted(seen.tolist()) == list(range(NUM_PUBLIC))
    assert len(select_messages(record.received, Metrics)) == len(SIZES) * NUM_BATCHES


def test_each_mini_batch_has_its_own_labeled_examples_and_label_seed(tmp_path):
    record = Recorder()
    kwargs, labeled = {"feedback": "mpl_sampled"}, rows(12, seed=6)
    trainer = distillation_trainer(tmp_path, "fedid", kwargs, record=record, server_dataset=labeled)
    batches: list[frozenset[tuple[int, ...]]] = []

    class BatchRecorder(FederatedCallback):
        def on_round_begin(self, args, state, control, round, **_):
            if round.number > 0:
                return
            distillation_server = trainer.distillation.server
            labeled_batch = distillation_server.labeled_batch

            def recorded(size, *purpose):
                batch = labeled_batch(size, *purpose)
                batches.append(frozenset(map(tuple, batch["input_ids"].tolist())))
                return batch

            distillation_server.labeled_batch = recorded

    trainer.add_callback(BatchRecorder())
    trainer.train()
    assert len(batches) == 2 * NUM_BATCHES
    # A batch draws 4 of 12 examples, which gives 495 possible batches. No batch repeats here. On average, six batches
    # together leave one example out.
    assert len(set(batches)) == len(batches) and all(len(batch) == 4 for batch in batches)
    assert len(frozenset.union(*batches)) >= 10
    seeds: dict[tuple[int, ...], set[int]] = {}
    for message in select_messages(record.sent, Feedback):
        seeds.setdefault((message.round, message.start), set()).add(message.settings["labels"])
    assert len(seeds) == 2 * NUM_BATCHES and all(len(batch_seeds) == 1 for batch_seeds in seeds.values())
    assert len(set.union(*seeds.values())) == len(seeds)


@pytest.mark.parametrize(
    ("method", "prediction"),
    [
        # FedID's predictions of every micro-batch are compressed. The other methods compress like `dsfl`.
        pytest.param(method, prediction, marks=[] if method in ("dsfl", "fedid") else [pytest.mark.slow])
        for method in ("adafd", "cronus", "dsfl", "fedid")
        for prediction in ({"prediction_dtype": "float16"}, {"prediction_dtype": "int8"}, {"top_k": 1})
    ],
)
@pytest.mark.sampled(3)
def test_methods_train_with_compressed_predictions(finished, tmp_path, method, prediction):
    _, uncompressed = finished(method, num_rounds=1)
    compressed = Recorder(serialize=True)
    trainer = distillation_trainer(tmp_path, method, prediction, record=compressed, federation={"num_rounds": 1})
    trainer.train()
    for record in (uncompressed, compressed):
        assert len(select_messages(record.received, Predictions)) == len(
            select_messages(uncompressed.received, Predictions)
        )
    if prediction != {"top_k": 1}:
        a, b = (next(iter(select_messages(record.received, Predictions))) for record in (uncompressed, compressed))
        decoded = trainer.distillation.encoding.decode(b.values, NUM_CLASSES)
        torch.testing.assert_close(decoded, a.values["values"], atol=2e-2, rtol=0)
        assert b.values["values"].element_size() < a.values["values"].element_size()


def test_feddf_server_targets_are_the_mean_of_client_logits(tmp_path):
    record = Recorder()
    trainer = distillation_trainer(tmp_path, "feddf", record=record, federation={"num_rounds": 1})
    server_targets, models = [], []

    def server_loss(logits, targets):
        server_targets.append(targets)
        models.append({name: value.clone() for name, value in trainer.exchange.read().items()})
        return logits.sum() * 0

    trainer.distillation.server_loss = server_loss
    trainer.train()
    updates = select_messages(record.received, ClientUpdate)
    assert len({float(update.state["classifier.weight"][0, 0]) for update in updates}) == len(SIZES)
    for name, value in models[0].items():  # The server's distillation starts from these parameters.
        mean = sum(SIZES[update.client_id] / sum(SIZES.values()) * update.state[name] for update in updates)
        torch.testing.assert_close(value, mean)
    logits = [update.extra["public_logits"] for update in updates]
    mean = torch.stack(logits).mean(0)
    assert all(any(torch.allclose(row, other) for other in mean) for row in torch.cat(server_targets))
    assert not select_messages(record.sent, (Predict, Distill, Feedback))


def test_train_on_labeled_trains_the_server_on_labeled_examples(finished, tmp_path):
    without, _ = finished("mhat")
    trainer = distillation_trainer(tmp_path, "mhat", {"train_on_labeled": True, "server_epochs": 2})
    trainer.train()
    assert not same_weights(without.model, trainer.model)
    losses = [entry["federated/server_labelled_loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]
    # Each round has two epochs, each with 3 batches of public examples and 2 batches of labeled examples.
    student = trainer.distillation.server.student
    assert student.state_dict()["scheduler"]["last_epoch"] == 2 * 2 * (NUM_BATCHES + 2)
    assert student.state_dict()["scheduler"]["_last_lr"][0] == pytest.approx(0)


@pytest.mark.parametrize("method", ["dsfl", "fedid"])
def test_scheduler_advances_for_rounds_without_the_client(tmp_path, method):
    """A client's learning rate depends on the round, not on the number of rounds in which it participated."""
    record = Recorder()
    federation = {"num_rounds": 4, "clients_per_round": 2, "local_epochs": 1}
    trainer = distillation_trainer(tmp_path, method, record=record, federation=federation)
    trainer.train()
    rounds_of_client = {
        client_id: [
            update.round for update in select_messages(record.received, ClientUpdate) if update.client_id == client_id
        ]
        for client_id in SIZES
    }
    assert any(0 < len(rounds) < rounds[-1] + 1 for rounds in rounds_of_client.values())
    models = trainer.engine.worker.models
    for client_id, rounds in rounds_of_client.items():
        if rounds:
            schedule = models.open(client_id).student.state_dict()["scheduler"]
            assert schedule["last_epoch"] == (rounds[-1] + 1) * NUM_BATCHES
            share_left = 1 - (rounds[-1] + 1) / 4
            assert schedule["_last_lr"][0] == pytest.approx(trainer.run_args.learning_rate * share_left)
