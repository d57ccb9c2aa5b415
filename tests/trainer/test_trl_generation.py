"""`federate()` with trainers of TRL that generate completions, and with constructors that map their dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from public_trainers import TRAINERS, preferences, prompts
from tiny import same_weights

from hf_federated import FederatedCallback, FederatedConfig, federate
from hf_federated.clients import UnsupportedTrainerError
from hf_federated.trainer.checks.arguments import check_arguments


trl = pytest.importorskip("trl")


@pytest.fixture(autouse=True)
def without_ci(monkeypatch) -> None:
    """TRL reads more of a dataset for its usage report, which it does not send from a CI."""
    monkeypatch.delenv("CI", raising=False)


class Updates(FederatedCallback):
    def __init__(self) -> None:
        self.received: list[Any] = []

    def on_client_end(self, args, state, control, update, **kwargs) -> None:
        self.received.append(update)


def grpo(
    folder: Path, clients: Any, name: str = "GRPOTrainer", args: Any = None, federation: Any = None, **kwargs: Any
) -> Any:
    spec = TRAINERS[name]
    config = FederatedConfig(**{"num_rounds": 2, **(federation or {})})
    return spec.build(federate(spec.trainer_class), folder, clients, args, federation=config, **kwargs)


CLIENTS = {"north": prompts("north", 4), "south": prompts("south", 2)}


@pytest.mark.parametrize("name", ["GRPOTrainer", pytest.param("RLOOTrainer", marks=pytest.mark.slow)])
def test_generated_tokens_of_the_clients_are_counted(tmp_path, name) -> None:
    updates = Updates()
    trainer = grpo(
        tmp_path, CLIENTS, name, federation={"aggregation_kwargs": {"weighting": "tokens"}}, callbacks=[updates]
    )
    trainer.train()
    tokens = [update.num_tokens for update in updates.received]
    assert len(tokens) == 4 and min(tokens) > 0
    logged = [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [sum(tokens[:2]), sum(tokens)]
    assert all("reward" in update.metrics for update in updates.received)


def test_generations_of_a_client_do_not_reach_the_next_client(tmp_path) -> None:
    seen: list[list[str]] = []

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        seen.append(prompts)
        return [float(i) for i in range(len(prompts))]

    trained: list[Any] = []

    class KeepsTrainers(trl.GRPOTrainer):
        def training_step(self, *args, **kwargs):
            trained.append(self)
            return super().training_step(*args, **kwargs)

    trainer = TRAINERS["GRPOTrainer"].build(
        federate(KeepsTrainers),
        tmp_path,
        CLIENTS,
        {"num_iterations": 2},
        reward_funcs=reward,
        federation=FederatedConfig(num_rounds=2),
    )
    trainer.train()
    # The rounds of a client have different trainers, which keep nothing after their training.
    assert len({id(each) for each in trained}) == 4
    assert all({"_step", "_buffered_inputs"}.isdisjoint(vars(each)) for each in trained)
    # A local epoch generates once for each prompt, and trains on the completions twice.
    assert [words[0].split()[0][:4] for words in seen] == ["snow"] * 4 + ["sand"] * 2 + ["snow"] * 4 + ["sand"] * 2
    assert (vars(trainer)["_step"], vars(trainer)["_buffered_inputs"]) == (0, None)


def test_every_prompt_is_read_before_a_client_starts_again(tmp_path) -> None:
    seen: list[str] = []

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        seen.append(prompts[0])
        return [0.0 for _ in prompts]

    grpo(tmp_path, CLIENTS, federation={"num_rounds": 4, "local_steps": 1}, reward_funcs=reward).train()
    # Two clients in four rounds. An epoch of the client in the south has two prompts.
    north, south = seen[0::2], seen[1::2]
    assert sorted(north) == sorted(CLIENTS["north"]["prompt"])
    assert sorted(south) == sorted([*CLIENTS["south"]["prompt"]] * 2)


def test_method_that_reads_batches_is_refused_for_batches_that_are_lists(tmp_path) -> None:
    with pytest.raises(ValueError, match="lists.*reads the tensors of a batch by name.*'fedprox'"):
        grpo(tmp_path, CLIENTS, federation={"distillation": "adafd"}, public_dataset=prompts("north", 2))
    trainer = grpo(tmp_path, CLIENTS, federation={"num_rounds": 1, "aggregation": "fedprox"})
    trainer.train()


@pytest.mark.parametrize(
    ("local_steps", "accumulation", "iterations", "allowed"),
    [(1, 1, 2, "2 or 4"), (5, 1, 2, "4 or 6"), (1, 2, 3, "3 or 6"), (4, 4, 3, "3 or 6")],
)
def test_round_that_would_discard_completions_is_refused_with_the_next_values(
    tmp_path, local_steps, accumulation, iterations, allowed
) -> None:
    args = {"num_iterations": iterations, "gradient_accumulation_steps": accumulation}
    with pytest.raises(ValueError, match=f"local_steps={local_steps}.* Set `local_steps` to {allowed}"):
        grpo(tmp_path, CLIENTS, args=args, federation={"local_steps": local_steps})
    for number in allowed.split(" or "):
        grpo(tmp_path, CLIENTS, args=args, federation={"local_steps": int(number)})


def test_completions_of_a_prompt_in_several_processes_are_refused_for_clients_in_one_process(tmp_path) -> None:
    """With two processes, TRL accepts a batch of two for four completions of a prompt."""
    trainer = grpo(tmp_path, CLIENTS, args={"num_generations": 4, "per_device_train_batch_size": 4})
    trainer.args.per_device_train_batch_size = 2
    trainer.args.steps_per_generation = 1
    config = FederatedConfig(num_rounds=1, parallelism="clients")
    with pytest.raises(ValueError, match="= 2 completions at a time. .* num_generations=4. Set `per_device_train_"):
        check_arguments(trainer, config, trainer.aggregation)


def test_moving_teacher_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="teacher_model_kind='ema' does not work in a federation: set it to 'base'"):
        grpo(tmp_path, CLIENTS, "SDPOTrainer", args={"teacher_model_kind": "ema"})


def test_vllm_server_is_refused(tmp_path) -> None:
    trainer = grpo(tmp_path, CLIENTS)
    # TRL connects to the server in the constructor.
    trainer.args.use_vllm, trainer.args.vllm_mode = True, "server"
    with pytest.raises(ValueError, match="vllm_mode='server' does not work in a federation: set vllm_mode='colocate'"):
        check_arguments(trainer, trainer.federation, trainer.aggregation)


@pytest.mark.parametrize("name", ["A2POTrainer", "AsyncGRPOTrainer", "AsyncDistillationTrainer"])
def test_trainer_that_does_not_train_each_client_separately_is_refused(tmp_path, name) -> None:
    with pytest.raises(UnsupportedTrainerError, match=f"Federated{name} does not work in a federation: .* Use "):
        federate(TRAINERS[name].trainer_class)(train_dataset=CLIENTS)


def test_stream_of_prompts_is_refused(tmp_path) -> None:
    streams = {name: rows.to_iterable_dataset() for name, rows in CLIENTS.items()}
    with pytest.raises(ValueError, match="stream.*shuffle and repeat a stream themselves.*Pass a Dataset"):
        grpo(tmp_path, streams, federation={"local_steps": 1})


@pytest.mark.parametrize("name", ["ORPOTrainer", pytest.param("CPOTrainer", marks=pytest.mark.slow)])
def test_constructor_that_maps_its_dataset_runs_once_for_each_client(tmp_path, name) -> None:
    spec = TRAINERS[name]
    rows: list[str] = []

    class Counting(spec.trainer_class):
        def tokenize_row(self, feature, *args, **kwargs):
            rows.append(feature["prompt"].split()[0][:4])
            return super().tokenize_row(feature, *args, **kwargs)

    clients = {"north": preferences("north", 4), "south": preferences("south", 3)}
    trainer = spec.build(federate(Counting), tmp_path, clients, federation=FederatedConfig(num_rounds=2))
    assert not rows
    trainer.train()
    assert rows == ["snow"] * 4 + ["sand"] * 3
    assert len([entry for entry in trainer.state.log_history if "log_odds_ratio" in entry or "loss" in entry]) >= 2


def test_grpo_with_one_client_equals_the_plain_trainer(tmp_path) -> None:
    """Also if rounds end within an epoch, because a client keeps its position in the sampler."""
    spec, args = TRAINERS["GRPOTrainer"], {"beta": 0.1, "num_iterations": 2}
    rows = prompts("north", 4)
    plain = spec.build(spec.trainer_class, tmp_path, rows, {**args, "num_train_epochs": 2})
    plain.train()
    federated = {}
    for name, config in {"epochs": {}, "steps": {"num_rounds": 4, "local_steps": 4}}.items():
        federated[name] = grpo(tmp_path, rows, args=args, federation={**config, "client_optimizer_state": "carry"})
        federated[name].train()
        assert same_weights(plain.model, federated[name].model)


def test_orpo_with_one_client_equals_the_plain_trainer(tmp_path) -> None:
    spec = TRAINERS["ORPOTrainer"]
    rows = preferences("north", 6)
    plain = spec.build(spec.trainer_class, tmp_path, rows, {"num_train_epochs": 2})
    plain.train()
    config = FederatedConfig(num_rounds=2, client_optimizer_state="carry")
    federated = spec.build(federate(spec.trainer_class), tmp_path, rows, federation=config)
    federated.train()
    assert same_weights(plain.model, federated.model)
