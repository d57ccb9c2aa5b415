"""Estimates of recipes compared with measured runs: parameters, bytes, round trips and memory."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from chatglm_repository import write_repository
from datasets import Dataset
from networked import DirectLink, Run
from split_runs import clients_of, whole_model
from threaded_clients import ANNOUNCED, honest, run_with_threads

from hf_federated import AGGREGATIONS, DISTILLATIONS, SplitConfig, SplitModel
from hf_federated.cli.main import main
from hf_federated.experiments.data.tokenized import load_tokenized_data
from hf_federated.experiments.estimate.recipe_estimate import estimate_recipe
from hf_federated.experiments.estimate.results import Estimate, total_bytes
from hf_federated.experiments.estimate.sizes import EstimateOptions
from hf_federated.experiments.estimate.split_messages import CONTROL_MESSAGES, SplitMessages
from hf_federated.experiments.execution import build_run
from hf_federated.experiments.model_loading import load_tokenizer
from hf_federated.experiments.recipe.recipe import load_recipe
from hf_federated.split_training.micro_batches import exchanges_per_step


# A seed or a count has one digit more or less than in the estimate, and a header is padded to a multiple of 8 bytes.
PADDING = 8
PUBLIC = [
    "public={share: 0.25, server_share: 0.1}",
    "data={path: TEXTS, test_split: test}",
    "partition={name: iid, num_clients: 3}",
    "federation.clients_per_round=3",
]


@pytest.fixture
def recipe(recipe_path, texts_dir, llama_dir):
    """A function that loads a recipe with settings, in which names of folders are replaced by their paths."""

    def load(*settings: str) -> Any:
        names = {"TEXTS": texts_dir, "LLAMA": llama_dir}
        for name, folder in names.items():
            settings = tuple(text.replace(name, str(folder)) for text in settings)
        return load_recipe(recipe_path, settings)

    return load


def compare_with_run(loaded: Any) -> Estimate:
    """Run a recipe, and compare the bytes and requests of a round and the parameters with the estimate."""
    estimate = estimate_recipe(loaded)
    run = build_run(loaded)
    parameters = list(run.trainer.model.parameters())
    requests: list[str] = []
    execute = run.trainer.engine.run
    run.trainer.engine.run = lambda plan, on_dispatch=None: execute(plan, requests.append)
    run.trainer.train()
    measured = run.trainer.ledger.rounds()[0]
    unit = estimate.units[0]
    assert unit.round_trips == requests.count(requests[0])
    tolerance = PADDING * unit.round_trips * unit.num_clients
    assert unit.num_clients == measured["num_clients"]
    assert unit.bytes_down == pytest.approx(measured["bytes_down"], abs=tolerance)
    assert unit.bytes_up == pytest.approx(measured["bytes_up"], abs=tolerance)
    server = estimate.parties[-1]
    assert server.num_parameters == sum(parameter.numel() for parameter in parameters)
    assert server.num_trainable == sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return estimate


AVERAGING = {name: [f"federation.aggregation={name}"] for name in AGGREGATIONS if name != "mutual_kd"}
for name in (name for name, cls in AGGREGATIONS.items() if cls.needs_lora):
    AVERAGING[name].append("model.lora={r: 2}")
AVERAGING["fednova"].append("training.optim=sgd")
AVERAGING["krum"].append("federation.clients_per_round=5")
AVERAGING["fltrust"] += PUBLIC
AVERAGING["freeze"] = ["federation.freeze=embeddings+1"]
AVERAGING["buffers"] = ["federation.exchange=all"]
AVERAGING["local"] = ["federation.keep_local=classifier*", "federation.aggregation=scaffold"]
AVERAGING["adapter"] = ["federation.exchange_dtype=bfloat16", "model.lora={r: 2}", "federation.aggregation=scaffold"]
DISTILLATION = {name: [f"federation.distillation={name}"] for name in DISTILLATIONS}
DISTILLATION["feddrs"].append("federation.distillation_kwargs={num_steps: 1, num_samples: 2}")
DISTILLATION["top_k"] = ["federation.distillation=dsfl", "federation.distillation_kwargs={top_k: 2}"]
DISTILLATION["fedid, example"] = [*DISTILLATION["fedid"], "federation.distillation_kwargs={feedback: per_example}"]
DISTILLATION["fedid, mpl"] = [*DISTILLATION["fedid"], "federation.distillation_kwargs={feedback: mpl}"]


def slow_except(name: str, names: Any) -> list[Any]:
    return [each if each == name else pytest.param(each, marks=pytest.mark.slow) for each in names]


@pytest.mark.parametrize("name", slow_except("adapter", AVERAGING))
def test_bytes_and_parameters_of_averaging_are_those_of_a_run(recipe, name):
    estimate = compare_with_run(recipe(*AVERAGING[name]))
    assert estimate.family == "averaging" and estimate.units[0].round_trips == 1


@pytest.mark.parametrize("name", slow_except("top_k", DISTILLATION))
def test_bytes_and_parameters_of_distillation_are_those_of_a_run(recipe, name):
    estimate = compare_with_run(recipe(*PUBLIC, *DISTILLATION[name]))
    assert estimate.family == "distillation"


def test_round_trips_of_a_networked_round_are_the_requests_that_a_client_receives(recipe, tmp_path):
    requests: list[Any] = []

    def reply(request: Any) -> Any:
        requests.append(request)
        return honest(request)

    trainer, _ = run_with_threads(tmp_path, {"north": reply}, {"north": ANNOUNCED})
    assert len(requests) / trainer.state.max_steps == estimate_recipe(recipe()).units[0].round_trips


SPLIT = ["model.name_or_path=LLAMA", "data={path: SAME, test_split: test}", "federation=null"]
SPLIT += ["task={name: summarization, max_source_length: 16, max_target_length: 4}"]
SPLIT += ["partition={name: iid, num_clients: 2}", "training.per_device_train_batch_size=2"]
STRATEGIES = {
    "serial": ["split={strategy: serial}", "training.gradient_accumulation_steps=2"],
    "encrypted": ["split={strategy: serial, encryption: true}"],
    "averaged": ["split={strategy: serial, average_every: 2, steps_per_turn: 1, wire_dtype: topk}"],
    "client_batch": ["split={strategy: client_batch, average_every: 2, wire_dtype: int8}"],
    "server_hierarchical": ["split={strategy: server_hierarchical, wire_dtype: int4}"],
    "adapter": ["split={strategy: serial}", "model.lora={r: 2, target_modules: [q_proj, v_proj]}"],
    "prefix": ["split={strategy: client_batch}", "model.prefix={num_virtual_tokens: 3}"],
}


@pytest.fixture(scope="session")
def equal_texts_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two splits of equal texts, so that no example is padded."""
    folder = tmp_path_factory.mktemp("equal")
    for split, num_rows in (("train", 16), ("test", 2)):
        Dataset.from_dict({"source": ["a dull film"] * num_rows, "target": ["a plot"] * num_rows}).to_parquet(
            folder / f"{split}.parquet"
        )
    return folder


@pytest.fixture
def split_recipe(recipe, equal_texts_dir):
    """A function that loads a recipe of a split model, and the number of tokens of its examples."""

    def load(name: str) -> tuple[Any, int]:
        settings = [text.replace("SAME", str(equal_texts_dir)) for text in (*SPLIT, *STRATEGIES[name])]
        loaded = recipe(*settings)
        data = load_tokenized_data(loaded, load_tokenizer(loaded.model))
        return loaded, len(data.train["0"][0]["input_ids"])

    return load


def compare_generation(model: SplitModel, estimate: Estimate, batch_size: int, length: int) -> None:
    """Generate three tokens of each sequence, and compare the messages with the estimate."""
    sizes: list[tuple[int, int]] = []
    model.boundary.link.watch = lambda blob, answer: sizes.append((len(answer), len(blob)))
    model.eval().generate(torch.ones(batch_size, length, dtype=torch.int64), max_new_tokens=3, min_new_tokens=3)
    for unit, measured in zip(estimate.units[1:], sizes, strict=False):
        assert (unit.bytes_down, unit.bytes_up) == pytest.approx(measured, abs=PADDING)
        assert unit.round_trips == 1
    assert len(sizes) >= 3
    model.boundary.link.watch = None


@pytest.mark.parametrize("name", slow_except("prefix", STRATEGIES))
def test_bytes_and_parameters_of_a_split_run_are_those_of_the_estimate(split_recipe, name):
    loaded, length = split_recipe(name)
    estimate = estimate_recipe(loaded, EstimateOptions(sequence_length=length))
    trainer = build_run(loaded).trainer
    model, trained = trainer.model, {}
    for party, parts in (("client", [model.client_head, model.client_tail]), ("server", [model.server_body])):
        parameters = list(torch.nn.ModuleList(parts).parameters())
        trained[party] = [parameter.numel() for parameter in parameters if parameter.requires_grad]
        number = sum(parameter.numel() for parameter in parameters)
        (found,) = (item for item in estimate.parties if item.name.startswith(party))
        assert (found.num_parameters, found.num_trainable) == (number, sum(trained[party]))
    if name != "encrypted":  # the model that is evaluated sends no encrypted messages
        compare_generation(model, estimate, loaded.training.get("per_device_eval_batch_size", 8), length)
    trainer.train()
    assert trainer.state.max_steps == estimate.num_units
    step = trainer.ledger.rounds()[1]
    unit = estimate.units[0]
    assert unit.num_clients == step["num_clients"]
    (control,) = (item for item in unit.exchanges if item.name == CONTROL_MESSAGES)
    # The control messages of a step, which a run in one process does not send.
    control_down, control_up = (unit.num_clients * number for number in (control.bytes_down, control.bytes_up))
    tolerance = PADDING * 2 * unit.num_clients * unit.round_trips
    assert unit.bytes_down - control_down == pytest.approx(step["bytes_down"], abs=tolerance)
    assert unit.bytes_up - control_up == pytest.approx(step["bytes_up"], abs=tolerance)
    # The estimate does not contain the handshakes of encrypted links, which count in a run as short as this one.
    relative = 0.03 if name == "encrypted" else 0.01
    num_steps = trainer.state.max_steps
    assert estimate.run_bytes_up - num_steps * control_up == pytest.approx(trainer.ledger.bytes_up, rel=relative)
    assert estimate.run_bytes_down - num_steps * control_down == pytest.approx(trainer.ledger.bytes_down, rel=relative)


@pytest.mark.parametrize("strategy", ["serial", "client_batch"])
@pytest.mark.parametrize(("num_batches", "in_flight"), [pytest.param(1, 8, marks=pytest.mark.slow), (3, 2)])
def test_bytes_and_round_trips_of_a_split_step_are_those_of_a_networked_client(
    tmp_path, strategy, num_batches, in_flight
):
    """The first exchange joins the run, and the last ones end the last step and leave the run."""
    sizes: list[tuple[int, int]] = []

    class CountingLink(DirectLink):
        def exchange(self, blob: bytes) -> bytes:
            answer = super().exchange(blob)
            sizes.append((len(answer), len(blob)))
            return answer

    split = SplitConfig(strategy, micro_batches_in_flight=in_flight)
    clients, num_steps = clients_of(4 * 2 * num_batches), 4
    run = Run(tmp_path, clients, split, links=CountingLink, gradient_accumulation_steps=num_batches)
    run.train()
    assert not run.errors
    number = exchanges_per_step(split, num_batches)
    steps = [sizes[1:][start : start + number] for start in range(0, num_steps * number, number)]
    assert len(sizes) == 1 + num_steps * number + (1 if strategy == "client_batch" else 2)
    messages = SplitMessages(SplitModel.from_model(whole_model()), "client 0", 2, 7, num_batches, split)
    measured = tuple(sum(values) for values in zip(*steps[2], strict=True))
    assert total_bytes(messages.step()) == measured


def set_all(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture
def config_only(model_dir, tmp_path) -> Any:
    """A folder with the config of a model, without weights and tokenizer."""
    folder = tmp_path / "config-only"
    folder.mkdir()
    shutil.copy(model_dir / "config.json", folder)
    return folder


def test_command_needs_neither_weights_nor_data(recipe_path, config_only, capsys):
    settings = [f"model.name_or_path={config_only}", "data.path=someone/on-the-hub", "federation.clients_per_round=4"]
    numbers = ["--num-clients", "8", "--num-examples", "20", "--num-labels", "3"]
    speeds = ["--bandwidth-mbit", "8", "--latency-ms", "50", "--tflops", "1e-6"]
    assert main(["estimate", str(recipe_path), *set_all(*settings), *numbers]) == 0
    table = capsys.readouterr().out
    assert "averaging: fedavg, 8 clients" in table and "One round, 4 clients" in table and "Time:" not in table
    assert main(["estimate", str(recipe_path), *set_all(*settings), *numbers, *speeds, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    unit, seconds = found["units"][0], found["units"][0]["seconds"]
    assert seconds["waiting"] == pytest.approx(0.1)
    # 20 examples are 3 batches of 8, and 8 Mbit/s are 10^6 bytes per second.
    assert seconds["client"] == pytest.approx(unit["client_flops"] / 1e6)
    assert seconds["transfer"] == pytest.approx((unit["bytes_down"] + unit["bytes_up"]) / 4 / 1e6)
    assert seconds["total"] == pytest.approx(0.1 + seconds["client"] + seconds["transfer"])
    assert found["run_seconds"] == pytest.approx(found["num_units"] * seconds["total"])


def test_table_states_the_speeds_and_the_source_of_the_numbers(recipe_path, reviews_dir, capsys):
    assert main(["estimate", str(recipe_path), "--latency-ms", "50"]) == 0
    table = capsys.readouterr().out
    assert "Time: 100 ms (waiting 100 ms)" in table
    assert f"Clients and examples: the data in {reviews_dir}." in table
    assert "16 tokens (task.max_length)" in table


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (["data.path=someone/on-the-hub"], [], "Pass --num-labels"),
        (["data.path=someone/on-the-hub", *PUBLIC[:1]], ["--num-labels", "2"], "Pass --num-public"),
        (["model.kwargs={quantization_config: {}}"], [], "a quantized model cannot be estimated"),
        ([], ["--tflops", "-1"], "tflops is -1; it must be above 0"),
    ],
)
def test_missing_and_invalid_numbers_are_named(recipe_path, settings, options, message, capsys):
    settings = [*settings, "federation.distillation=dsfl"] if "public" in str(settings) else settings
    assert main(["estimate", str(recipe_path), *set_all(*settings), *options]) == 2
    assert message in capsys.readouterr().err


def test_unknown_numbers_of_examples_leave_out_the_computation(recipe):
    loaded = recipe("data.path=someone/on-the-hub", "task.label_names=[a, b]", "partition=null")
    estimate = estimate_recipe(loaded)
    assert estimate.num_clients is None and estimate.units[0].client_flops is None
    assert any("Pass --num-examples" in note for note in estimate.notes)


@pytest.mark.slow
def test_distillation_between_different_models_estimates_each_client_model(recipe, model_dir):
    models = f"[{{name_or_path: {model_dir}, kwargs: {{num_hidden_layers: 1}}}}, {{name_or_path: {model_dir}}}]"
    loaded = recipe(*PUBLIC, "federation.distillation=adafd", f"client_models={models}")
    first, second, server = estimate_recipe(loaded).parties
    assert first.num_parameters < second.num_parameters == server.num_parameters


@pytest.mark.slow
def test_model_with_code_of_its_repository_has_the_bytes_of_a_run(recipe, equal_texts_dir, tmp_path):
    folder = write_repository(tmp_path / "chatglm", 1, ["a dull film", "a plot", "a bright film and a warm plot"] * 8)
    settings = [text.replace("SAME", str(equal_texts_dir)) for text in (*SPLIT, *STRATEGIES["prefix"])]
    settings += [f"model.name_or_path={folder}", "model.kwargs={trust_remote_code: true}"]
    settings.append("training.per_device_eval_batch_size=1")
    loaded = recipe(*settings, "task.max_source_length=40")
    data = load_tokenized_data(loaded, load_tokenizer(loaded.model))
    length = len(data.train["0"][0]["input_ids"])
    unit = estimate_recipe(loaded, EstimateOptions(sequence_length=length)).units[0]
    trainer = build_run(loaded).trainer
    trainer.train()
    step = trainer.ledger.rounds()[1]
    (control,) = (item for item in unit.exchanges if item.name == CONTROL_MESSAGES)
    expected = step["bytes_up"] + unit.num_clients * control.bytes_up  # a run in one process has no control messages
    assert unit.bytes_up == pytest.approx(expected, abs=PADDING * 2 * unit.num_clients * unit.round_trips)
