"""Input that a distillation rejects when the trainer is built, when training starts or when a run resumes."""

from __future__ import annotations

import pytest
from datasets import Dataset
from distillation_setup import SIZES, client_model, distillation_trainer
from language import tokenizer
from tiny import arguments, rows, tiny_model

from hf_federated import ClientSpec, FederatedConfig, FederatedTrainer, Postprocessor


def model_with_labels(*labels, **config):
    """A tiny model with the given label names."""
    maps = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    return tiny_model(num_labels=len(labels), **maps, **config)


def test_different_label_order_is_rejected_with_both_orders(tmp_path):
    trainer = distillation_trainer(
        tmp_path,
        "dsfl",
        model=model_with_labels("bad", "good"),
        client_model_init=lambda client_id: (
            model_with_labels("good", "bad") if client_id == "b" else model_with_labels("bad", "good")
        ),
    )
    with pytest.raises(ValueError, match=r"client 'b' has the labels \['good', 'bad'\].*server's.*\['bad', 'good'\]"):
        trainer.train()


def test_different_label_order_of_a_given_model_is_rejected_when_the_trainer_is_built(tmp_path):
    clients = {
        "a": ClientSpec(model=model_with_labels("bad", "good")),
        "b": ClientSpec(model=model_with_labels("good", "bad")),
    }
    with pytest.raises(ValueError, match=r"client 'b' has the labels \['good', 'bad'\].*server's.*\['bad', 'good'\]"):
        distillation_trainer(
            tmp_path, "dsfl", different_models=False, model=model_with_labels("bad", "good"), clients=clients
        )


def test_different_number_of_classes_is_rejected(tmp_path):
    trainer = distillation_trainer(tmp_path, "dsfl", client_model_init=lambda client_id: tiny_model(num_labels=3))
    with pytest.raises(ValueError, match="client 'a' has the labels .*LABEL_2"):
        trainer.train()


def test_default_label_names_are_matched_by_position(tmp_path):
    distillation_trainer(
        tmp_path, "dsfl", model=model_with_labels("bad", "good"), federation={"num_rounds": 1}
    ).train()


@pytest.mark.parametrize(
    ("method", "trainer_kwargs", "words"),
    [
        ("dsfl", {"public_dataset": None}, "'dsfl' needs `public_dataset`.*none was given"),
        ("dsfl", {"public_dataset": rows(0)}, "'dsfl' needs `public_dataset`.*the given dataset has no examples"),
        ("fedid", {"server_dataset": None}, r"FedID\(\) needs `server_dataset`: labeled examples"),
        ("fedid", {"server_dataset": rows(0)}, r"FedID\(\) needs `server_dataset`: labeled examples"),
        (None, {"client_model_init": None}, "`public_dataset` and `server_dataset` are for distillation"),
        (
            "dsfl",
            {"clients": {"z": ClientSpec()}},
            r"`clients` names \['z'\], which have no examples. There are 3 clients, the first is 'a'",
        ),
        ("dsfl", {"clients": {"B": ClientSpec()}}, r"`clients` names \['B'\], which have no examples.*mean 'b'"),
        (
            "dsfl",
            {"clients": {"b": ClientSpec(processing_class=tokenizer())}},
            "Client 'b' has its own tokenizer.*Pass a `task`",
        ),
        (
            "feded",
            {"client_model_init": client_model},
            "'feded'.*: clients receive parameters, which must fit all models",
        ),
        (
            "dsfl",
            {"postprocessors": [Postprocessor()]},
            "Postprocessor does not work with distillation='dsfl': the step works on parameters",
        ),
    ],
)
def test_invalid_combinations_are_rejected_when_the_trainer_is_built(tmp_path, method, trainer_kwargs, words):
    with pytest.raises(ValueError, match=words):
        distillation_trainer(tmp_path, method, **trainer_kwargs)


def test_averaging_rejects_client_models(tmp_path):
    with pytest.raises(
        ValueError, match="'fedavg'.*: clients exchange parameters, which must fit all models.*'fedid'"
    ):
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
def test_unsupported_training_arguments_of_one_client_are_rejected(tmp_path, argument, words):
    with pytest.raises(ValueError, match=words):
        distillation_trainer(tmp_path, "dsfl", clients={"b": ClientSpec(args=arguments(tmp_path, **argument))})


@pytest.mark.parametrize("method", ["fedid", "feddrs"])
def test_float16_is_rejected_for_methods_with_gradients_outside_of_training_steps(tmp_path, method):
    with pytest.raises(ValueError, match=f"fp16=True does not work with distillation='{method}'.*Use bf16=True"):
        distillation_trainer(tmp_path, method, args={"fp16": True})


def test_float16_is_rejected_for_private_models(tmp_path):
    with pytest.raises(ValueError, match="fp16=True does not work with aggregation='mutual_kd'.*Use bf16=True"):
        FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path, fp16=True),
            train_dataset={"a": rows(4), "b": rows(4)},
            client_model_init=client_model,
            federation=FederatedConfig(aggregation="mutual_kd"),
        )


def test_float16_of_one_client_is_rejected_if_the_trainer_does_not_use_it(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(ValueError, match="fp16=True of client 'b' does not work.*fp16=False"):
        FederatedTrainer(
            model=tiny_model(),
            args=args,
            train_dataset={"a": rows(4), "b": rows(4)},
            clients={"b": ClientSpec(args=arguments(tmp_path, fp16=True))},
            federation=FederatedConfig(aggregation="local_only"),
        )


@pytest.mark.parametrize("aggregation", ["fedopt", "scaffold"])
def test_aggregation_is_rejected_for_methods_that_exchange_predictions(tmp_path, aggregation):
    with pytest.raises(
        ValueError, match=f"aggregation='{aggregation}' does not work with distillation='mhat': there is nothing"
    ):
        distillation_trainer(tmp_path, "mhat", federation={"aggregation": aggregation})


def test_server_dataset_without_a_label_column_is_rejected(tmp_path):
    trainer = distillation_trainer(tmp_path, "fedid", server_dataset=rows(6).rename_column("labels", "sentiment"))
    with pytest.raises(ValueError, match="`server_dataset` has the columns .* and no label column"):
        trainer.train()


def test_model_name_without_a_task_is_rejected(tmp_path):
    trainer = distillation_trainer(
        tmp_path, "dsfl", different_models=False, clients={"b": ClientSpec(model="roberta-base")}
    )
    with pytest.raises(ValueError, match="client 'b' is the name 'roberta-base', .* Pass a `task` to the trainer"):
        trainer.train()


def test_resume_with_another_public_dataset_is_rejected(tmp_path):
    first = distillation_trainer(tmp_path, "dsfl", args={"save_strategy": "epoch"}, federation={"num_rounds": 1})
    first.train()
    other = distillation_trainer(tmp_path, "dsfl", args={"save_strategy": "epoch"}, public_dataset=rows(9))
    with pytest.raises(ValueError, match="rows of `public_dataset`: 9 in this run, 10 in the checkpoint"):
        other.train(resume_from_checkpoint=True)


def test_resume_without_the_server_dataset_is_rejected(tmp_path):
    distillation_trainer(tmp_path, "dsfl", args={"save_strategy": "epoch"}, federation={"num_rounds": 1}).train()
    other = distillation_trainer(tmp_path, "dsfl", args={"save_strategy": "epoch"}, server_dataset=None)
    with pytest.raises(ValueError, match="rows of `server_dataset`: None in this run, 6 in the checkpoint"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("argument", ["public_dataset", "server_dataset"])
@pytest.mark.sampled(1)
def test_resume_with_the_same_number_of_other_examples_is_rejected(tmp_path, argument):
    datasets = {"public_dataset": rows(10), "server_dataset": rows(6)}
    first = distillation_trainer(
        tmp_path, "fedid", args={"save_strategy": "epoch"}, federation={"num_rounds": 1}, **datasets
    )
    first.train()
    reversed_dataset = {argument: datasets[argument].select(range(len(datasets[argument]))[::-1])}
    other = distillation_trainer(tmp_path, "fedid", args={"save_strategy": "epoch"}, **(datasets | reversed_dataset))
    with pytest.raises(ValueError, match=f"another federation.*content of `{argument}`: 'sha256:"):
        other.train(resume_from_checkpoint=True)
    # A run resumes with the same examples in the same order, independent of how they are stored.
    same_datasets = {
        name: data.select(range(len(data))[::-1]).select(range(len(data))[::-1]) for name, data in datasets.items()
    }
    distillation_trainer(tmp_path, "fedid", args={"save_strategy": "epoch"}, **same_datasets).train(
        resume_from_checkpoint=True
    )


@pytest.mark.parametrize("problem", [{"num_labels": 1}, {"problem_type": "multi_label_classification"}])
@pytest.mark.parametrize("method", ["fedid", "adafd", "dsfl", "feddf", "feddrs"])
def test_regression_and_multi_label_models_are_rejected(tmp_path, method, problem):
    kwargs = {"sample_length": 5} if method == "feddrs" else {}
    with pytest.raises(
        ValueError, match="learns probabilities of classes that exclude each other.*one number|several labels"
    ):
        distillation_trainer(tmp_path, method, kwargs, different_models=False, model=tiny_model(**problem))


def test_fedmd_trains_regression_models(tmp_path):
    def numbers(num_rows, seed):
        ids = rows(num_rows, seed)["input_ids"]
        return Dataset.from_dict({"input_ids": ids, "labels": [tokens[0] / 20 for tokens in ids]})

    trainer = distillation_trainer(
        tmp_path,
        "fedmd",
        {"server_lr": 1e-3, "server_epochs": 20},
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
def test_streams_and_lists_are_rejected(tmp_path, argument, kind):
    data = rows(6, seed=6)
    data = data.to_iterable_dataset() if kind == "stream" else list(data)
    with pytest.raises(ValueError, match=f"`{argument}` is of type (IterableDataset|list).*Pass a `datasets.Dataset`"):
        distillation_trainer(tmp_path, "fedid", **{argument: data})


@pytest.mark.parametrize("argument", ["public_dataset", "server_dataset"])
@pytest.mark.parametrize("tokens", [[], None])
def test_example_without_tokens_is_rejected_with_its_index(tmp_path, argument, tokens):
    data = rows(6, seed=6).to_dict()
    data["input_ids"][4] = tokens
    with pytest.raises(ValueError, match=f"Example 4 of `{argument}` has no tokens"):
        # The examples have an indices mapping, as after a shuffle.
        distillation_trainer(tmp_path, "fedid", **{argument: Dataset.from_dict(data).select([0, 2, 1, 3, 4, 5])})


def test_clients_evaluate_without_evaluation_data_is_rejected(tmp_path):
    kwargs = {"weighting": "llm", "generate": lambda prompt: "1, 1, 1", "clients_evaluate": True}
    with pytest.raises(ValueError, match="lets clients evaluate.*`eval_dataset` is not a FederatedDataset"):
        distillation_trainer(tmp_path, "adafd", kwargs)


@pytest.mark.parametrize(
    ("method", "kwargs", "words"),
    [
        ("fedid", {}, "loss on a batch of its labeled examples is nan: no example of the batch has a label"),
        ("dsfl", {"train_on_labeled": True}, "has the loss nan .*NaN if no example has a label"),
    ],
)
def test_server_dataset_with_ignored_labels_raises_an_error(tmp_path, method, kwargs, words):
    unlabeled = Dataset.from_dict({"input_ids": rows(6, seed=6)["input_ids"], "labels": [-100] * 6})
    with pytest.raises(FloatingPointError, match=words):
        distillation_trainer(tmp_path, method, kwargs, server_dataset=unlabeled).train()


def test_resume_with_another_batch_size_is_rejected(tmp_path):
    distillation_trainer(tmp_path, "adafd", args={"save_strategy": "epoch", "per_device_train_batch_size": 2}).train()
    trainer = distillation_trainer(tmp_path, "adafd", args={"per_device_train_batch_size": 10})
    with pytest.raises(ValueError, match="per_device_train_batch_size: 10 in this run, 2 in the checkpoint"):
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
def test_resume_with_another_client_architecture_is_rejected(tmp_path, shape, words):
    distillation_trainer(tmp_path, "dsfl", args={"save_strategy": "epoch"}).train()
    trainer = distillation_trainer(tmp_path, "dsfl", client_model_init=lambda client_id: tiny_model(**shape))
    with pytest.raises(ValueError, match=f"saved state of client 'a' does not match its current model: {words}"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
