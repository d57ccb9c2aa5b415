"""Tensors that clients train and keep: they never travel, and each client trains and evaluates with its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import CLIENTS, build_federation
from peft import LoraConfig, get_peft_model
from tiny import rows, same_weights, tiny_model
from torch import nn
from transformers import Trainer, TrainerCallback

from hf_federated import Aggregation, ClientPart, FederatedCallback, FederatedDataset, FederatedTrainer
from hf_federated.clients import ClientWorker
from hf_federated.engines import LocalEngine
from hf_federated.messages import ClientUpdate, Evaluate, Fit, Message
from hf_federated.messages.serialization import pack
from hf_federated.trainer.checkpoint import list_checkpoints, read_server_state
from hf_federated.utils.errors import CheckpointError


HEAD = ["classifier.weight", "classifier.bias"]
NUM_CLASSES = 2


def is_head(name: str, parameter: torch.Tensor) -> bool:
    return name.startswith("classifier.")


class BatchNormModel(nn.Module):
    """A classifier with a batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(32, 8)
            self.norm = nn.BatchNorm1d(8)
            self.classifier = nn.Linear(8, NUM_CLASSES)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.classifier(self.norm(self.embedding(input_ids).mean(1)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def lora() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return get_peft_model(tiny_model(), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))


class ConstantAggregation(Aggregation):
    """Keeps the global state constant, so that updates of later rounds can be compared between federations."""

    def aggregate(self, accumulator, state):
        return state


class Updates(FederatedCallback):
    """Records the bytes of every update, and the rejected clients of each round."""

    def __init__(self) -> None:
        self.updates: dict[tuple[int, str], bytes] = {}
        self.rejected: list[dict[str, str]] = []

    def on_client_end(self, args, state, control, update, round, **kwargs) -> None:
        self.updates[round.number, update.client_id] = pack(update.state)

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        self.rejected.append(dict(round.rejected))


class LocalValues(TrainerCallback):
    """Records the named values at the start and at the end of each local training."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.starts: list[bytes] = []
        self.ends: list[bytes] = []

    def _values(self, model: nn.Module) -> bytes:
        values = model.state_dict()
        return pack({name: values[name].clone() for name in self.names})

    def on_train_begin(self, args, state, control, model, **kwargs) -> None:
        self.starts.append(self._values(model))

    def on_train_end(self, args, state, control, model, **kwargs) -> None:
        self.ends.append(self._values(model))


def train(
    directory: Path,
    clients: Any = None,
    *,
    model: Callable[[], nn.Module] = tiny_model,
    base: type[Trainer] = Trainer,
    federation: dict[str, Any] | None = None,
    **trainer: Any,
) -> FederatedTrainer:
    args = trainer.pop("args", {})
    found = build_federation(
        directory,
        clients,
        num_rounds=trainer.pop("num_rounds", 2),
        base=base,
        federation={"keep_local": "head", **(federation or {})},
        trainer={"model": model(), **trainer},
        **args,
    )
    found.train()
    return found


def kept_states(directory: Path) -> dict[str, bytes]:
    """The files of the clients in the last checkpoint."""
    folder = list_checkpoints(directory)[-1] / "federated" / "clients"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


# ---- They never travel

# The model, the fields of the configuration and the names of the local tensors.
KEPT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "head": (tiny_model, {"keep_local": "head"}, HEAD),
    "patterns": (tiny_model, {"keep_local": ["*.bias", "classifier*"], "exchange": "*.weight"}, []),
    "function": (tiny_model, {"keep_local": is_head, "exchange": "all"}, HEAD),
    "fedper": (tiny_model, {"keep_local": None, "aggregation": "fedper"}, HEAD),
    "scaffold": (tiny_model, {"aggregation": "scaffold"}, HEAD),
    "buffers": (BatchNormModel, {"keep_local": "norm.*"}, []),
    "adapter": (lora, {}, []),
}


@pytest.mark.parametrize("serialize", [False, True])
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.sampled(5)
def test_local_tensors_are_in_no_message(tmp_path, monkeypatch, kind, serialize) -> None:
    model, federation, names = KEPT[kind]
    messages: list[Message] = []
    handle = ClientWorker.handle

    def record(worker: ClientWorker, message: Message) -> Message:
        reply = handle(worker, message)
        messages.extend([message, reply])
        return reply

    monkeypatch.setattr(ClientWorker, "handle", record)
    trainer = train(
        tmp_path,
        model=model,
        federation={**federation, "evaluate_clients": True},
        engine=LocalEngine(serialize),
        eval_dataset=FederatedDataset.from_dict(CLIENTS),
        args={"eval_strategy": "epoch", "optim": "sgd"},
    )
    local, initial = trainer.exchange.local_names, model().state_dict()
    assert local and (not names or local == names)
    # Two rounds of training and two evaluations, each a request and a reply.
    assert len(messages) == 2 * 4 * len(CLIENTS)
    for message in messages:
        blob = message.to_bytes()
        assert not any(name.encode() in blob for name in local)
        assert not any(initial[name].numpy().tobytes() in blob for name in local if initial[name].any())
        if isinstance(message, (Fit, Evaluate, ClientUpdate)):
            # Each name of a sent tensor would be found.
            assert message.state and all(name.encode() in blob for name in message.state)
    # The server's model keeps its initial values.
    for name in local:
        assert torch.equal(trainer.model.state_dict()[name], initial[name])


# ---- Each client continues with its own


def test_each_client_trains_from_its_own_local_tensors(tmp_path) -> None:
    values = LocalValues(HEAD)
    trainer = train(tmp_path, num_rounds=3, client_callbacks=[values])
    number = len(CLIENTS)
    initial = pack({name: tiny_model().state_dict()[name] for name in HEAD})
    assert values.starts[:number] == [initial] * number
    assert values.starts[number:] == values.ends[:-number]
    assert len({initial, *values.ends}) == 1 + 3 * number
    assert pack({name: trainer.model.state_dict()[name] for name in HEAD}) == initial


def test_batch_norm_statistics_stay_with_their_client(tmp_path) -> None:
    names = [name for name in BatchNormModel().state_dict() if name.startswith("norm.")]
    assert "norm.running_mean" in names and "norm.num_batches_tracked" in names
    values = LocalValues(names)
    train(tmp_path, model=BatchNormModel, federation={"keep_local": "norm.*"}, client_callbacks=[values])
    number = len(CLIENTS)
    assert values.starts[number:] == values.ends[:number] and len(set(values.ends)) == 2 * number


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_other_clients_do_not_change_local_tensors(tmp_path, store) -> None:
    federation = {"aggregation": ConstantAggregation(), "client_store": store, "client_optimizer_state": "carry"}
    args = {"save_strategy": "steps"}
    found = {}
    for names in ("north south", "west south north"):
        updates = Updates()
        clients = {name: CLIENTS[name] for name in names.split()}
        train(tmp_path / names, clients, federation=federation, callbacks=[updates], args=args)
        found[names] = updates.updates, kept_states(tmp_path / names)
    (two, kept_by_two), (three, kept_by_three) = found.values()
    assert two.items() <= three.items() and kept_by_two.items() <= kept_by_three.items()
    assert two[0, "north"] != two[1, "north"]


def test_memory_and_disk_store_the_same_states(tmp_path) -> None:
    for store in ("memory", "disk"):
        train(tmp_path / store, federation={"client_store": store}, args={"save_strategy": "steps"})
    assert kept_states(tmp_path / "memory") == kept_states(tmp_path / "disk")
    assert len(kept_states(tmp_path / "disk")) == len(CLIENTS)


def test_clients_without_local_tensors_keep_no_further_state(tmp_path) -> None:
    train(tmp_path, federation={"keep_local": None}, args={"save_strategy": "steps"})
    assert kept_states(tmp_path) == {}


class FailsForMarkedExamples(Trainer):
    """Raises in the second step if the first token of an example is a marker. The head has already changed."""

    def compute_loss(self, model, inputs, **kwargs):
        if (inputs["input_ids"][:, 0] == 31).any() and self.state.global_step == 1:
            raise OSError("the disk of this client is full")
        return super().compute_loss(model, inputs, **kwargs)


def marked(first_token: int, seed: int) -> Any:
    return rows(8, seed=seed).map(lambda row: {"input_ids": [first_token, *row["input_ids"][1:]]})


def test_local_tensors_of_a_failed_client_are_restored(tmp_path) -> None:
    clients = {"a": marked(1, 0), "b": marked(1, 1)}
    evaluation = {name: rows(8, seed=9) for name in ("a", "bad", "b")}
    found = {}
    for name, others in (("with", {"bad": marked(31, 2)}), ("without", {})):
        updates = Updates()
        trainer = train(
            tmp_path / name,
            {"a": clients["a"], **others, "b": clients["b"]},
            base=FailsForMarkedExamples,
            federation={"evaluate_clients": True},
            callbacks=[updates],
            eval_dataset=FederatedDataset.from_dict({key: evaluation[key] for key in ("a", *others, "b")}),
        )
        trainer.evaluate()
        found[name] = trainer, updates
    (trainer, updates), (without, expected) = found["with"], found["without"]
    assert [list(rejected) for rejected in updates.rejected] == [["bad"], ["bad"]]
    assert updates.updates == expected.updates and same_weights(trainer.model, without.model)
    # The failed client evaluates with the initial head, which is the head of the server's model.
    loss = trainer.evaluate(evaluation["bad"])["eval_loss"]
    assert trainer.client_metrics["bad"]["eval_loss"] == loss
    assert trainer.client_metrics["a"]["eval_loss"] == without.client_metrics["a"]["eval_loss"] != loss


def test_client_that_never_trained_evaluates_with_the_initial_tensors(tmp_path) -> None:
    evaluation = {name: rows(8, seed=9) for name in CLIENTS}
    trainer = train(
        tmp_path,
        num_rounds=1,
        federation={"clients_per_round": 1, "evaluate_clients": True},
        eval_dataset=FederatedDataset.from_dict(evaluation),
    )
    trainer.evaluate()
    loss = trainer.evaluate(rows(8, seed=9))["eval_loss"]
    losses = [metrics["eval_loss"] for metrics in trainer.client_metrics.values()]
    assert losses.count(loss) == len(CLIENTS) - 1


class NaNHead(TrainerCallback):
    """Replaces a value of the head by NaN at the end of the local training."""

    def on_train_end(self, args, state, control, model, **kwargs) -> None:
        model.classifier.bias.data[0] = torch.nan


def test_client_whose_local_tensors_diverge_fails_by_name(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="NaN or infinite values in 'classifier.bias'"):
        train(tmp_path, client_callbacks=[NaNHead()])


# ---- The client halves of methods


class ParameterNames(ClientPart):
    """Notes the parameters of `on_gradients` and fails if the head has no gradient."""

    seen: set[str] = set()

    def on_gradients(self, parameters):
        self.seen.update(parameters)
        model = self.context.model.trainer.model
        assert model.classifier.weight.grad is not None


class WatchParameters(Aggregation):
    client_part = ParameterNames
    needs_gradients = True


def test_client_halves_see_the_exchanged_parameters_only(tmp_path) -> None:
    ParameterNames.seen = set()
    trainer = train(tmp_path, federation={"aggregation": WatchParameters()})
    assert ParameterNames.seen == set(trainer.exchange.names)
    assert {name for name, _ in trainer.model.named_parameters()} - ParameterNames.seen == set(HEAD)


# ---- Checkpoints


def test_resumed_run_has_the_initial_tensors_of_the_checkpoint(tmp_path) -> None:
    """An adapter has no other file with the head of the server, which may have been drawn without a seed."""
    train(tmp_path, model=lora, args={"save_strategy": "steps"})
    checkpoint = list_checkpoints(tmp_path)[0]
    name = "base_model.model.classifier.modules_to_save.default.weight"

    def other_head() -> nn.Module:
        model = lora()
        model.get_parameter(name).data += 1.0
        return model

    resumed = build_federation(
        tmp_path, federation={"keep_local": "head"}, trainer={"model": other_head()}, save_strategy="steps"
    )
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(resumed.model.get_parameter(name), lora().get_parameter(name))
    assert torch.equal(read_server_state(checkpoint)["local"][name], lora().get_parameter(name))


@pytest.mark.parametrize("changed", [{"keep_local": "classifier.weight"}, {"exchange": "*"}])
def test_checkpoint_with_other_selections_is_refused_by_name(tmp_path, changed) -> None:
    train(tmp_path, args={"save_strategy": "steps"})
    (name,) = changed
    other = build_federation(tmp_path, federation={"keep_local": "head", **changed}, save_strategy="steps")
    with pytest.raises(CheckpointError, match=f"{name}: '.*' in this run, '.*' in the checkpoint"):
        other.train(resume_from_checkpoint=True)


def test_saved_model_has_the_initial_local_tensors(tmp_path) -> None:
    trainer = train(tmp_path)
    trainer.save_model(tmp_path / "saved")
    loaded = type(tiny_model()).from_pretrained(tmp_path / "saved")
    assert same_weights(loaded, trainer.model)
    assert torch.equal(loaded.classifier.weight, tiny_model().classifier.weight)
    assert not torch.equal(loaded.bert.pooler.dense.weight, tiny_model().bert.pooler.dense.weight)


# ---- Combinations without use

PUBLIC = {"public_dataset": rows(4, seed=7)}


@pytest.mark.parametrize(
    ("federation", "trainer", "message"),
    [
        ({"aggregation": "local_only"}, {}, "with aggregation='local_only': each client already keeps"),
        (
            {"aggregation": "mutual_kd"},
            {"client_model_init": lambda client_id: tiny_model()},
            "with aggregation='mutual_kd': each client already keeps its own model",
        ),
        (
            {"aggregation": "fltrust"},
            {"server_dataset": rows(4)},
            "with aggregation='fltrust': the server trains on its own examples.*Leave `keep_local` out",
        ),
        ({"distillation": "dsfl"}, PUBLIC, "keep_local='head' does not work with distillation='dsfl': "),
        ({"distillation": "feddf"}, PUBLIC, "keep_local='head' does not work with distillation='feddf': "),
        (
            {"aggregation": "fedper", "aggregation_kwargs": {"local": "classifier*"}},
            {},
            "keep_local='head' does not work with aggregation='fedper': the method selects.*Leave `keep_local` out",
        ),
    ],
)
def test_method_without_use_for_local_tensors_is_refused_by_name(tmp_path, federation, trainer, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_federation(tmp_path, federation={"keep_local": "head", **federation}, trainer=trainer)
