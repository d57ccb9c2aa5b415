"""What a distillation refuses, when the trainer is built or when a checkpoint is of something else."""

from __future__ import annotations

import pytest
from datasets import Dataset
from distilled import SIZES, client_model, distilled
from language import tokenizer
from tiny import arguments, rows, tiny_model

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer, Postprocessor


def named(*labels, **config):
    maps = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    return tiny_model(num_labels=len(labels), **maps, **config)


def test_labels_in_another_order_are_refused_with_both_orders(tmp_path):
    trainer = distilled(
        tmp_path,
        "dsfl",
        model=named("bad", "good"),
        client_model_init=lambda client_id: named("good", "bad") if client_id == "b" else named("bad", "good"),
    )
    with pytest.raises(ValueError, match=r"client 'b' has the labels \['good', 'bad'\].*server's.*\['bad', 'good'\]"):
        trainer.train()


def test_a_model_that_is_given_with_labels_in_another_order_is_refused_when_the_trainer_is_built(tmp_path):
    clients = {"a": ClientSpec(model=named("bad", "good")), "b": ClientSpec(model=named("good", "bad"))}
    with pytest.raises(ValueError, match=r"client 'b' has the labels \['good', 'bad'\].*server's.*\['bad', 'good'\]"):
        distilled(tmp_path, "dsfl", differ=False, model=named("bad", "good"), clients=clients)


def test_other_numbers_of_classes_are_refused(tmp_path):
    trainer = distilled(tmp_path, "dsfl", client_model_init=lambda client_id: tiny_model(num_labels=3))
    with pytest.raises(ValueError, match="client 'a' has the labels .*LABEL_2"):
        trainer.train()


def test_labels_without_names_are_taken_in_their_places(tmp_path):
    distilled(tmp_path, "dsfl", model=named("bad", "good"), federation={"num_rounds": 1}).train()


@pytest.mark.parametrize(
    ("method", "others", "words"),
    [
        ("dsfl", {"public_dataset": None}, "'dsfl' needs `public_dataset`.*none was given"),
        ("dsfl", {"public_dataset": rows(0)}, "'dsfl' needs `public_dataset`.*it has no rows"),
        ("fedid", {"server_dataset": None}, r"FedID\(\) needs `server_dataset`: labelled rows"),
        ("fedid", {"server_dataset": rows(0)}, r"FedID\(\) needs `server_dataset`: labelled rows"),
        (None, {}, "`public_dataset` and `server_dataset` are for distillation"),
        ("dsfl", {"clients": {"z": ClientSpec()}}, r"`clients` names \['z'\], which have no rows.*\['a', 'b', 'c'\]"),
        (
            "dsfl",
            {"clients": {"b": ClientSpec(processing_class=tokenizer())}},
            "Client 'b' has a tokenizer of its own.*give the trainer a `task`",
        ),
        ("feded", {"client_model_init": client_model}, "'feded' exchanges parameters, which must fit all of them"),
        (
            "dsfl",
            {"postprocessors": [Postprocessor()]},
            "Postprocessor works on parameters, and with 'dsfl' none leave",
        ),
    ],
)
def test_combinations_that_mean_nothing_are_refused_when_the_trainer_is_built(tmp_path, method, others, words):
    with pytest.raises(ValueError, match=words):
        distilled(tmp_path, method, **others)


def test_models_of_their_own_do_not_average(tmp_path):
    with pytest.raises(ValueError, match="'fedavg' exchanges parameters, which must fit all of them.*'fedid'"):
        FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset={"a": rows(4), "b": rows(4)},
            client_model_init=client_model,
            federation=FederatedConfig(),
        )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True of client 'b' does not work in a federation"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "'reduce_lr_on_plateau' of client 'b'",
        ),
    ],
)
def test_arguments_with_which_no_client_can_train_are_refused_of_one_too(tmp_path, argument, words):
    with pytest.raises(ValueError, match=words):
        distilled(tmp_path, "dsfl", clients={"b": ClientSpec(args=arguments(tmp_path, **argument))})


@pytest.mark.parametrize("aggregation", ["fedopt", "scaffold"])
def test_an_average_beside_a_distillation_is_refused(tmp_path, aggregation):
    with pytest.raises(ValueError, match=f"aggregation='{aggregation}' has nothing to average.*'mhat'"):
        distilled(tmp_path, "mhat", federation={"aggregation": aggregation})


def test_rows_of_the_server_without_labels_are_refused(tmp_path):
    trainer = distilled(tmp_path, "fedid", server_dataset=rows(6).rename_column("labels", "sentiment"))
    with pytest.raises(ValueError, match="`server_dataset` has the columns .* and no label column"):
        trainer.train()


def test_a_name_of_a_model_needs_a_task_to_load_it(tmp_path):
    trainer = distilled(tmp_path, "dsfl", differ=False, clients={"b": ClientSpec(model="roberta-base")})
    with pytest.raises(ValueError, match="client 'b' is the name 'roberta-base', .* Pass a `task` to the trainer"):
        trainer.train()


def test_another_public_data_set_does_not_resume(tmp_path):
    first = distilled(tmp_path, "dsfl", args={"save_strategy": "epoch"}, federation={"num_rounds": 1})
    first.train()
    other = distilled(tmp_path, "dsfl", args={"save_strategy": "epoch"}, public_dataset=rows(9))
    with pytest.raises(ValueError, match="rows of `public_dataset`: here 9, there 10"):
        other.train(resume_from_checkpoint=True)


def test_rows_of_the_server_that_are_gone_do_not_resume(tmp_path):
    distilled(tmp_path, "dsfl", args={"save_strategy": "epoch"}, federation={"num_rounds": 1}).train()
    other = distilled(tmp_path, "dsfl", args={"save_strategy": "epoch"}, server_dataset=None)
    with pytest.raises(ValueError, match="rows of `server_dataset`: here None, there 6"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("argument", ["public_dataset", "server_dataset"])
def test_as_many_other_rows_do_not_resume(tmp_path, argument):
    own = {"public_dataset": rows(10), "server_dataset": rows(6)}
    first = distilled(tmp_path, "fedid", args={"save_strategy": "epoch"}, federation={"num_rounds": 1}, **own)
    first.train()
    turned = {argument: own[argument].select(range(len(own[argument]))[::-1])}
    other = distilled(tmp_path, "fedid", args={"save_strategy": "epoch"}, **(own | turned))
    with pytest.raises(ValueError, match=f"another federation.*content of `{argument}`: here 'sha256:"):
        other.train(resume_from_checkpoint=True)
    # The same rows go on, however they are stored.
    stored = {
        name: given.select(range(len(given))[::-1]).select(range(len(given))[::-1]) for name, given in own.items()
    }
    distilled(tmp_path, "fedid", args={"save_strategy": "epoch"}, **stored).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("problem", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
@pytest.mark.parametrize("method", ["fedid", "adafd", "dsfl", "feddf", "feddrs"])
def test_models_whose_outputs_are_no_distribution_over_classes_are_refused(tmp_path, method, problem):
    kwargs = {"sample_length": 5} if method == "feddrs" else {}
    with pytest.raises(ValueError, match="learns distributions over classes.*one number|several labels"):
        distilled(tmp_path, method, kwargs, differ=False, model=tiny_model(**problem))


def test_fedmd_learns_the_scores_of_a_regression(tmp_path):
    def numbers(num_rows, seed):
        ids = rows(num_rows, seed)["input_ids"]
        return Dataset.from_dict({"input_ids": ids, "labels": [tokens[0] / 20 for tokens in ids]})

    trainer = distilled(
        tmp_path,
        "fedmd",
        {"server_learning_rate": 1e-3, "server_epochs": 20},
        model=tiny_model(num_labels=1),
        client_model_init=lambda client_id: tiny_model(ord(client_id), num_labels=1),
        train_dataset={client_id: numbers(size, ord(client_id)) for client_id, size in SIZES.items()},
        server_dataset=None,
        eval_dataset=numbers(8, seed=7),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.parametrize("argument", ["public_dataset", "server_dataset"])
@pytest.mark.parametrize("kind", ["stream", "list"])
def test_rows_that_have_no_numbers_are_refused(tmp_path, argument, kind):
    given = rows(6, seed=6)
    given = given.to_iterable_dataset() if kind == "stream" else list(given)
    with pytest.raises(ValueError, match=f"`{argument}` is a (IterableDataset|list).*give a `datasets.Dataset`"):
        distilled(tmp_path, "fedid", **{argument: given})


@pytest.mark.parametrize("argument", ["public_dataset", "server_dataset"])
@pytest.mark.parametrize("tokens", [[], None])
def test_a_row_without_tokens_is_refused_by_its_number(tmp_path, argument, tokens):
    given = rows(6, seed=6).to_dict()
    given["input_ids"][4] = tokens
    with pytest.raises(ValueError, match=f"Row 4 of `{argument}` has no tokens"):
        # In another order than they lie in, as after a shuffle.
        distilled(tmp_path, "fedid", **{argument: Dataset.from_dict(given).select([0, 2, 1, 3, 4, 5])})


def test_clients_that_shall_evaluate_need_rows_for_it(tmp_path):
    kwargs = {"weighting": "llm", "generate": lambda prompt: "1, 1, 1", "clients_evaluate": True}
    with pytest.raises(ValueError, match="lets clients evaluate.*`eval_dataset` is no FederatedDataset"):
        distilled(tmp_path, "adafd", kwargs)


@pytest.mark.parametrize(
    ("method", "kwargs", "words"),
    [
        ("fedid", {}, "loss on a batch of its labelled rows is nan: none of them has a label"),
        ("dsfl", {"train_on_labelled": True}, "has the loss nan .*NaN if no example has a label"),
    ],
)
def test_rows_of_the_server_whose_labels_are_left_out_are_said(tmp_path, method, kwargs, words):
    unlabelled = Dataset.from_dict({"input_ids": rows(6, seed=6)["input_ids"], "labels": [-100] * 6})
    with pytest.raises(FloatingPointError, match=words):
        distilled(tmp_path, method, kwargs, server_dataset=unlabelled).train()


def test_another_size_of_mini_batches_over_which_rates_fall_does_not_resume(tmp_path):
    distilled(tmp_path, "adafd", args={"save_strategy": "epoch", "per_device_train_batch_size": 2}).train()
    trainer = distilled(tmp_path, "adafd", args={"per_device_train_batch_size": 10})
    with pytest.raises(ValueError, match="per_device_train_batch_size: here 10, there 2"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"num_hidden_layers": 2}, r"'bert.encoder.layer.2.* None in the model"),
        (
            {"num_hidden_layers": 3, "intermediate_size": 24},
            r"'bert.encoder.layer.0.inter.* \(16,\) in the state and \(24,\) in",
        ),
    ],
)
def test_a_clients_model_of_another_shape_does_not_resume(tmp_path, shape, words):
    distilled(tmp_path, "dsfl", args={"save_strategy": "epoch"}).train()
    trainer = distilled(tmp_path, "dsfl", client_model_init=lambda client_id: tiny_model(**shape))
    with pytest.raises(ValueError, match=f"saved state of client 'a' does not match its current model: {words}"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
