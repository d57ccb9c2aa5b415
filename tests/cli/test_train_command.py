"""`hf-federated train`: data loading, training, baselines, outputs and errors, with tiny models."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, load_dataset
from huggingface_hub import ModelCard
from peft import AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from hf_federated import FederatedConfig, FederatedDatasetDict, LabelDirichletPartitioner
from hf_federated.cli.main import main
from hf_federated.clients import ClientSampler
from hf_federated.experiments.baselines import Baselines, expected_client_epochs, fraction_of_examples_drawn
from hf_federated.experiments.data.raw import load_raw_data
from hf_federated.experiments.data.tokenized import load_tokenized_data
from hf_federated.experiments.model_loading import load_model, load_tokenizer
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.experiments.train_recipe import closing_table, train_recipe


def set_all(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_train_writes_model_card_plots_results_and_prints_the_table(recipe_path, tmp_path, capsys):
    out = tmp_path / "elsewhere"
    code = main(
        ["train", str(recipe_path), "--output-dir", str(out)]
        + set_all("compare=[centralized, local]", "local_clients=2", "plots=true", "federation.report_anomalies=true")
    )
    printed = capsys.readouterr().out
    assert code == 0
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.id2label == {0: "fresh", 1: "rotten"}
    ModelCard.load(out / "README.md")
    for name in ("learning_curve.png", "partition.png", "anomalies.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    results = json.loads((out / "results.json").read_text())
    assert (results["num_train_clients"], results["num_test_clients"], results["num_test_rows"]) == (36, 4, 16)
    assert results["baselines"]["local"]["num_clients"] == 2
    # One round with one local epoch and 2 of 36 clients.
    assert results["baselines"]["local"]["num_epochs"] == 1
    assert results["baselines"]["centralized"]["num_epochs"] == pytest.approx(2 / 36)
    payload = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    for direction in ("bytes_up", "bytes_down"):
        assert results["federated"][direction] == pytest.approx(2 * payload, rel=0.5)
    table = printed[printed.index("Accuracy on the same 16 examples of 4 held-out clients") :]
    for start in ("centralized ", "local-only (mean of 2)", "federated ", "federated minus local-only: "):
        assert any(line.startswith(start) for line in table.splitlines())
    assert "\n".join(closing_table(results)) in table


@pytest.mark.slow
def test_federation_learns_a_label_that_depends_on_one_word(recipe_path):
    """Each client holds 4 examples. 12 rounds with 10 clients per round are sufficient."""
    recipe = load_recipe(
        recipe_path,
        ["federation.num_rounds=12", "federation.clients_per_round=10", "training.seed=1", "training.eval_steps=12"],
    )
    assert train_recipe(recipe)["federated"]["metrics"]["accuracy"] > 0.9


def test_lora_recipe_saves_and_sends_only_the_adapter(recipe_path, tmp_path):
    recipe = load_recipe(recipe_path, ["model.lora={r: 2, target_modules: [query, value]}"])
    results = train_recipe(recipe)
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "run", num_labels=2)
    sent = [value for name, value in model.named_parameters() if "lora_" in name or "modules_to_save" in name]
    # Two clients send the adapter and a message header, which is as large as the adapter of a tiny model.
    assert results["federated"]["bytes_up"] < 2 * (sum(value.nbytes for value in sent) + 8192)


def test_metrics_over_held_out_clients_are_returned_on_request(recipe_path):
    results = train_recipe(load_recipe(recipe_path, ["federation.evaluate_clients=true"]))
    over_clients = results["federated"]["over_clients"]
    # All four clients have four examples, so the mean over clients is the mean over examples.
    assert over_clients["federated/eval_accuracy_mean"] == pytest.approx(results["federated"]["metrics"]["accuracy"])
    assert over_clients["federated/eval_accuracy_worst"] <= over_clients["federated/eval_accuracy_best"]


def test_test_examples_belong_to_clients_that_do_not_train(recipe_path):
    recipe = load_recipe(recipe_path, ["data.max_clients=10"])
    data = load_tokenized_data(recipe, load_tokenizer(recipe.model))
    assert (len(data.raw.train), len(data.raw.test_clients)) == (10, 4)
    assert not set(data.raw.train) & set(data.raw.test_clients)
    assert set(data.train.column_names) >= {"input_ids", "attention_mask", "labels"}
    lengths = [len(ids) for ids in data.test["input_ids"]]
    assert lengths == sorted(lengths) and len(lengths) == sum(data.raw.test_clients.num_rows.values())


def test_test_clients_depend_on_the_seed_but_not_on_max_clients(recipe_path):
    def test_ids(*overrides):
        return list(load_raw_data(load_recipe(recipe_path, overrides)).test_clients)

    assert test_ids() == test_ids("data.max_clients=10")
    assert test_ids() != test_ids("data.seed=1")


def test_text_pairs_are_loaded_from_a_file_and_partitioned_evenly(recipe_path, tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"one": "a film", "two": "not a plot", "label": number % 3} for number in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"data.path={path}", "partition={name: iid, num_clients: 4}", "data.test_clients=0.25"]
    recipe = load_recipe(recipe_path, [*overrides, "task.text_column=[one, two]"])
    data = load_tokenized_data(recipe, load_tokenizer(recipe.model))
    assert list(data.train.num_rows.values()) == [3, 3, 3] and len(data.raw.test_clients) == 1
    assert data.task.label_names == ("0", "1", "2")
    first = data.train[next(iter(data.train))][0]
    assert len(first["input_ids"]) == len("[CLS] a film [SEP] not a plot [SEP]".split())


TASKS = {
    "sequence-tagging": (["task.name=sequence-tagging"], "span_f1"),
    "question-answering": (["task={name: question-answering, max_length: 12, stride: 2}"], "token_f1"),
    "seq2seq": (
        [
            "task={name: seq2seq, target_column: targets, max_source_length: 8, max_target_length: 4}",
        ],
        "rougeL",
    ),
    "language-modeling": (["task={name: language-modeling, objective: masked, max_length: 12}"], "perplexity"),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.sampled(2)
def test_each_task_trains_with_its_baselines(recipe_path, texts_dir, model_dir, tmp_path, capsys, task):
    overrides, metric = TASKS[task]
    if task == "seq2seq":
        overrides = [*overrides, f"model.decoder_name_or_path={model_dir}"]
    recipe = load_recipe(
        recipe_path,
        [
            f"data.path={texts_dir}",
            "data.test_split=test",
            "data.test_clients=null",
            "partition={name: natural, column: site}",
            "task=null",
            *overrides,
            "compare=[centralized, local]",
            "local_clients=1",
            "plots=true",
        ],
    )
    results = train_recipe(recipe)
    assert results["metric"] == metric
    assert (results["num_train_clients"], results["num_test_clients"], results["num_test_rows"]) == (6, None, 12)
    for metrics in (
        results["federated"]["metrics"],
        results["baselines"]["centralized"]["metrics"],
        results["baselines"]["local"]["metrics"],
    ):
        assert np.isfinite(metrics[metric])
    # `metric_for_best_model` is checked against these names before training.
    names = recipe.task.cls.metric_names
    assert not names or set(results["federated"]["metrics"]) == {*names, "loss"}
    printed = capsys.readouterr().out
    assert "Test: 12 examples of the split 'test'." in printed
    title = metric.replace("_", " ")
    assert f"{title[0].upper()}{title[1:]} on the same 12 examples:" in printed
    for name in ("learning_curve.png", "partition.png", "model.safetensors", "README.md"):
        assert (tmp_path / "run" / name).is_file()


def test_splits_are_sampled_and_empty_texts_are_dropped_on_request(recipe_path, tmp_path):
    rows = [{"text": f"a film {n}" if n % 2 else " ", "label": n % 4 // 2} for n in range(40)]
    for split in ("train", "test"):
        Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{split}.parquet")
    overrides = [
        f"data.path={tmp_path / 'data'}",
        "data.test_clients=null",
        "data.test_split=test",
        "data.max_test_rows=5",
        "data.max_train_rows=12",
        "partition={name: iid, num_clients: 3}",
    ]
    recipe = load_recipe(recipe_path, overrides)
    with pytest.raises(
        ValueError, match="train.parquet, rows 1, 3, 5, 7, 9 and 15 more: The column 'text' has no text"
    ):
        load_tokenized_data(recipe, load_tokenizer(recipe.model))
    raw = load_raw_data(load_recipe(recipe_path, [*overrides, "data.drop_empty=true"]))
    assert raw.num_empty == 40
    assert (sum(raw.train.num_rows.values()), len(raw.test)) == (12, 5)
    reseeded = load_raw_data(load_recipe(recipe_path, [*overrides, "data.drop_empty=true", "data.seed=1"]))
    assert len(reseeded.test) == 5 and reseeded.test["text"][:] != raw.test["text"][:]


def write_splits(folder, **splits):
    for split, (values, names) in splits.items():
        rows = Dataset.from_dict({"text": ["a film"] * len(values), "label": values})
        rows.cast_column("label", ClassLabel(names=names)).to_parquet(folder / f"{split}.parquet")
    return [
        f"data.path={folder}",
        "data.test_clients=null",
        "data.test_split=test",
        "partition={name: iid, num_clients: 2}",
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (None, ["test.parquet", "differ in their columns or label names"]),
        ("data.test_split=train", ["data.test_split is 'train'"]),
        ("data.seed=-1", ["data.seed is -1"]),
        ("task.label_names=[good, bad]", ["'good' is label 0 in the recipe and label 1 in the data", "bad, good"]),
        ("data.drop_empty=true", ["no example remains of the split 'train'"]),
    ],
)
def test_data_that_does_not_match_the_recipe_is_rejected(recipe_path, tmp_path, capsys, override, words):
    test_names = ["bad", "good"] if override else ["good", "bad"]
    overrides = write_splits(tmp_path / "data", train=([0, 1] * 4, ["bad", "good"]), test=([0, 1], test_names))
    if override == "data.drop_empty=true":
        Dataset.from_dict({"text": [" ", None], "label": ["a", "b"]}).to_parquet(tmp_path / "data" / "train.parquet")
        Dataset.from_dict({"text": ["a", "b"], "label": ["a", "b"]}).to_parquet(tmp_path / "data" / "test.parquet")
    assert main(["train", str(recipe_path), *set_all(*overrides, *([override] if override else []))]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(word in error for word in words), error


def test_folder_with_two_formats_is_rejected(recipe_path, tmp_path):
    overrides = write_splits(tmp_path / "data", train=([0, 1] * 4, ["bad", "good"]), test=([0, 1], ["bad", "good"]))
    (tmp_path / "data" / "more_train.csv").write_text("text,label\na film,bad\n")
    with pytest.raises(ValueError, match="files of several formats"):
        load_raw_data(load_recipe(recipe_path, overrides))


def test_test_examples_without_a_client_are_dropped_and_counted(recipe_path, texts_dir, tmp_path):
    for split in ("train", "test"):
        rows = load_dataset(str(texts_dir), split=split)
        written = rows.filter(lambda row: row["site"] != "f") if split == "train" else rows
        written.to_parquet(tmp_path / "data" / f"{split}.parquet")
    overrides = [f"data.path={tmp_path / 'data'}", "data.test_clients=null", "data.test_split=test"]
    recipe = load_recipe(recipe_path, [*overrides, "partition.column=site"])
    assert load_raw_data(recipe).num_without_client == 0 and len(load_raw_data(recipe).test) == 12
    raw = load_raw_data(recipe, by_client=True)
    assert raw.num_without_client == 2 and len(raw.test) == 10


def test_questions_with_duplicate_ids_are_rejected_before_training(recipe_path, texts_dir, tmp_path):
    rows = load_dataset(str(texts_dir), split="test")
    rows.map(lambda row: {"id": "same"}).to_parquet(tmp_path / "data" / "test.parquet")
    rows.to_parquet(tmp_path / "data" / "train.parquet")
    overrides = [f"data.path={tmp_path / 'data'}", "data.test_clients=null", "data.test_split=test", "task=null"]
    task = "task={name: question-answering, max_length: 12, stride: 2}"
    recipe = load_recipe(recipe_path, [*overrides, task, "partition.column=site"])
    with pytest.raises(ValueError, match="data: Row 0 has the same id 'same' as another row"):
        load_tokenized_data(recipe, load_tokenizer(recipe.model))


def test_failed_round_is_reported_in_one_line(recipe_path, capsys):
    assert main(["train", str(recipe_path), *set_all("training.learning_rate=-1")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "hf-federated: error: Round 1: 2 of 2 clients failed" in error and "Invalid learning rate: -1" in error


def test_integer_labels_with_gaps_are_converted_to_named_labels(recipe_path, tmp_path):
    rows = [{"text": "a film", "label": stars} for stars in (5, 1, 10, 5, 1, 10)]
    Dataset.from_list(rows).to_parquet(tmp_path / "stars" / "train.parquet")
    recipe = load_recipe(
        recipe_path,
        [f"data.path={tmp_path / 'stars'}", "partition={name: iid, num_clients: 2}", "data.test_clients=1"],
    )
    raw = load_raw_data(recipe)
    assert raw.task.label_names == ("1", "5", "10")
    assert sorted([*raw.train.to_dataset()["label"], *raw.test["label"]]) == [0, 0, 1, 1, 2, 2]


def test_test_split_is_partitioned_if_clients_are_evaluated(recipe_path, texts_dir):
    recipe = load_recipe(
        recipe_path,
        [
            f"data.path={texts_dir}",
            "data.test_split=test",
            "data.test_clients=null",
            "partition={name: label-dirichlet, num_clients: 5, alpha: 0.5}",
            "federation.evaluate_clients=true",
        ],
    )
    results = train_recipe(recipe)
    assert results["num_test_clients"] is None  # no client is held out
    over_clients = results["federated"]["over_clients"]
    assert over_clients["federated/eval_accuracy_worst"] <= over_clients["federated/eval_accuracy_mean"] <= 1


@pytest.mark.parametrize("test_split", ["test", None])
def test_saved_federated_dataset_keeps_its_partition(recipe_path, texts_dir, tmp_path, test_split):
    splits = load_dataset(str(texts_dir)).cast_column("label", ClassLabel(names=["x", "y", "z"]))
    partitioner = LabelDirichletPartitioner(num_clients=5, alpha=0.5)
    FederatedDatasetDict.from_dataset(splits, partitioner).save_to_disk(tmp_path / "clients")
    held_out = "data.test_clients=1" if test_split is None else "data.test_clients=null"
    overrides = [f"data.path={tmp_path / 'clients'}", "partition=null", held_out]
    recipe = load_recipe(recipe_path, [*overrides, f"data.test_split={test_split or 'null'}"])
    raw = load_raw_data(recipe)
    expected = FederatedDatasetDict.from_dataset(splits, partitioner)["train"]
    for client_id, rows in raw.train.items():
        assert rows["id"][:] == expected[client_id]["id"][:]
    assert (len(raw.train), len(raw.test)) == ((4, 12) if test_split is None else (5, 12))
    assert raw.task.label_names == ("x", "y", "z")
    assert train_recipe(recipe)["num_train_clients"] == len(raw.train)
    with pytest.raises(ValueError, match="is already partitioned"):
        load_raw_data(load_recipe(recipe_path, [*overrides, "partition={name: iid, num_clients: 2}"]))


def test_head_of_a_different_size_is_rejected_unless_sizes_are_ignored(recipe_path, model_dir, tmp_path, capsys):
    AutoModelForSequenceClassification.from_pretrained(model_dir, num_labels=5).save_pretrained(tmp_path / "five")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "five")
    with_head = [f"model.name_or_path={tmp_path / 'five'}"]
    assert main(["train", str(recipe_path), *set_all(*with_head)]) == 2
    assert "does not match the number of labels of the task" in capsys.readouterr().err
    assert main(["train", str(recipe_path), *set_all(*with_head, "model.kwargs={ignore_mismatched_sizes: true}")]) == 0


def test_missing_recipe_exits_with_code_2_and_a_one_line_message(tmp_path, capsys):
    path = tmp_path / "none.yaml"
    assert main(["train", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"hf-federated: error: cannot read the recipe '{path}': No such file or directory.\n"
    )


def test_several_processes_are_rejected(recipe_path, capsys, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    assert main(["train", str(recipe_path)]) == 2
    assert "runs in one process" in capsys.readouterr().err


def test_epochs_of_baselines_follow_local_epochs_or_local_steps():
    args = TrainingArguments(output_dir="unused", per_device_train_batch_size=4, use_cpu=True)
    assert expected_client_epochs(FederatedConfig(num_rounds=6, local_epochs=2), args, examples_per_client=10) == 12
    # 6 rounds × 5 steps × 4 examples per step / 10 examples
    assert expected_client_epochs(FederatedConfig(num_rounds=6, local_steps=5), args, examples_per_client=10) == 12


def test_epochs_of_baselines_count_only_the_examples_that_clients_use():
    args = TrainingArguments(output_dir="unused", use_cpu=True)
    num_examples = {"a": 10, "b": 3, "c": 7}
    for settings, num_drawn in (({}, 20), ({"balance": "min"}, 9), ({"max_rows_per_round": 5}, 13)):
        fraction = fraction_of_examples_drawn(FederatedConfig(num_rounds=2, **settings), args, num_examples)
        assert fraction == num_drawn / 20
        assert expected_client_epochs(FederatedConfig(num_rounds=2), args, 20 / 3, fraction) == 2 * fraction
    # With two clients per round, the smallest client differs between the cohorts of the run.
    federation = FederatedConfig(num_rounds=4, clients_per_round=2, balance="min")
    cohorts = [ClientSampler(list(num_examples), 2, args.seed)(round) for round in range(4)]
    assert len(set(cohorts)) > 1
    num_drawn = sum(2 * min(num_examples[client_id] for client_id in cohort) for cohort in cohorts)
    num_total = sum(num_examples[client_id] for cohort in cohorts for client_id in cohort)
    assert fraction_of_examples_drawn(federation, args, num_examples) == num_drawn / num_total


def test_baselines_start_from_the_given_model_and_do_not_modify_it(recipe_path, tmp_path):
    recipe = load_recipe(recipe_path)
    tokenizer = load_tokenizer(recipe.model)
    data = load_tokenized_data(recipe, tokenizer)
    model = load_model(recipe.model, data.task, tokenizer, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", learning_rate=0.01)
    federation = FederatedConfig(num_rounds=1, freeze="embeddings+1")
    baselines = Baselines(model, args, federation, data.train, data.test, processing_class=tokenizer)
    losses = {}
    result = baselines.local(3, on_client=lambda client_id, metrics: losses.update({client_id: metrics["loss"]}))
    assert len(losses) == 3
    assert result.metrics["loss"] == pytest.approx(np.mean(list(losses.values())))
    assert result.spread["loss"] == pytest.approx(np.std(list(losses.values())))
    assert baselines.local(3).metrics == result.metrics  # earlier clients do not affect the result
    for name, value in model.state_dict().items():
        assert value.equal(before[name])
    assert all(parameter.requires_grad for parameter in model.parameters())
