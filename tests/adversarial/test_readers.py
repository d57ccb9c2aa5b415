"""Every reader of files and messages returns a result or raises `ValueError` for every content.

Hypothesis changes valid content: it flips, inserts, removes and repeats bytes, and it replaces, removes and renames
values of JSON files and of packed trees. The slow tests read 10 000 changed contents with each reader.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_federated import FederatedConfig, FederatedDataset, IidPartitioner, Ledger, SplitConfig
from hf_federated.audits import AuditConfig, Inversion, LeakageAudit
from hf_federated.cards.saved_records import render_saved
from hf_federated.clients import DiskStore
from hf_federated.clients.store import client_file_name
from hf_federated.data.storage.partition_file import PartitionFile
from hf_federated.experiments.benchmark.run_log import LOG_NAME, RunLog, read_records
from hf_federated.experiments.recipe.fields import check_names
from hf_federated.experiments.recipe.yaml_file import read_values
from hf_federated.experiments.run_folder import RUN_NAME, RunFolder
from hf_federated.messages import ClientUpdate, Evaluate, Fit, Metrics, Predictions, read_message
from hf_federated.messages.ledger import LEDGER_NAME
from hf_federated.messages.serialization import FlatTree, pack, packed_kind, unpack
from hf_federated.security.certificates import client_fingerprints, create_certificates, load_authority
from hf_federated.security.keys import Identity, fingerprint
from hf_federated.split import ModelFingerprint, SplitSessionConfig, Wire
from hf_federated.split.cut import Cut
from hf_federated.split.messages import Backward, read_request
from hf_federated.split.saving import load_saved_parts, save_parts
from hf_federated.split_training import messages as training_messages
from hf_federated.trainer.checkpoint import FEDERATED_DIR, SERVER_FILE, read_server_state, write_server_state
from hf_federated.trainer.manifest import MANIFEST_FILE, check_manifest, write_manifest
from hf_federated.transport.credentials import TlsCredentials
from hf_federated.transport.protocol import AnswerHeader, ConnectResponse, MessageHeader


# ---- Changes of valid content

# Values that a reader may not expect, of every type of JSON.
SURPRISES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.just(10**400),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["", "..", "/", "\ud800", "north", "0", "$tensor", "nan", "a" * 300]),
    st.sampled_from([[], {}, [[]], [{}], {"": {}}, [None], [0, 0, 0], {"0": [1, 2]}]),
)
TENSORS = st.sampled_from(
    [torch.zeros(0), torch.ones(3).long(), torch.full((2, 2), torch.nan), torch.zeros(5, dtype=torch.uint8)]
)


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Content with a few flipped, inserted, removed and repeated bytes, or without its end."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(changed)))
        action = draw(st.sampled_from(["flip", "flip", "replace", "insert", "remove", "repeat", "truncate"]))
        if action == "insert":
            changed[place:place] = draw(st.binary(min_size=1, max_size=9))
        elif action == "remove":
            del changed[place : place + draw(st.integers(1, 9))]
        elif action == "repeat":
            changed[place:place] = changed[place : place + draw(st.integers(1, 64))] * draw(st.integers(1, 3))
        elif action == "truncate":
            del changed[place:]
        elif place < len(changed):
            changed[place] = (
                changed[place] ^ 1 << draw(st.integers(0, 7)) if action == "flip" else draw(st.integers(0, 255))
            )
    return bytes(changed)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with every key or index of it."""
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in [(tree, key), *places(value)]]


@st.composite
def changed_tree(draw: st.DrawFn, tree: Any, surprises: st.SearchStrategy[Any]) -> Any:
    """A tree in which a few values are replaced, removed, renamed or swapped."""
    changed = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        found = places(changed)
        if not found:
            return draw(surprises)
        container, key = draw(st.sampled_from(found))
        action = draw(st.sampled_from(["replace", "replace", "remove", "rename", "swap", "wrap"]))
        if action == "replace":
            container[key] = copy.deepcopy(draw(surprises))  # a later change may change the value
        elif action == "remove":
            del container[key]
        elif action == "rename" and isinstance(container, dict):
            container[draw(st.text(max_size=3))] = container.pop(key)
        elif action == "swap":
            other, other_key = draw(st.sampled_from(found))
            container[key] = copy.deepcopy(other[other_key])
        else:
            container[key] = [container[key]]
    return changed


def changed_json(content: bytes) -> st.SearchStrategy[bytes]:
    tree = changed_tree(json.loads(content), SURPRISES).map(lambda tree: json.dumps(tree).encode())
    return st.one_of(tree, tree, changed_bytes(content))


def changed_yaml(content: bytes) -> st.SearchStrategy[bytes]:
    tree = changed_tree(yaml.safe_load(content), SURPRISES).map(lambda tree: yaml.safe_dump(tree).encode())
    marks = st.text("&*!|>%@`[]{}:,#?-'\"\n\t ab1~", min_size=1, max_size=30).map(lambda text: content + text.encode())
    return st.one_of(tree, changed_bytes(content), marks)


def pack_flat(tree: Any) -> bytes:
    """Pack a flat tree without its checks. A changed value may be a list or a dictionary."""
    if not isinstance(tree, dict):
        return pack(tree)
    tensors = {str(name): value for name, value in tree.items() if isinstance(value, torch.Tensor)}
    scalars = {str(name): value for name, value in tree.items() if not isinstance(value, torch.Tensor)}
    return safetensors.torch.save(tensors, {name: json.dumps(value, default=str) for name, value in scalars.items()})


def changed_packed(content: bytes) -> st.SearchStrategy[bytes]:
    unpacked = unpack(content)
    tree = changed_tree(unpacked, st.one_of(SURPRISES, TENSORS)).map(
        pack_flat if isinstance(unpacked, FlatTree) else pack
    )
    length = int.from_bytes(content[:8], "little")
    # Most changes of the header are of interest. Most changes of the tensors change only their values.
    header = changed_bytes(content[: 8 + length]).map(lambda head: head + content[8 + length :])
    return st.one_of(tree, tree, header, changed_bytes(content))


# ---- Readers


@dataclasses.dataclass(frozen=True)
class Case:
    """
    A reader.

    Args:
        content (`bytes`): Valid content.
        read (`Callable`): Reads content.
        change (`Callable`): Returns the strategy of changed contents.
    """

    content: bytes
    read: Callable[[bytes], Any]
    change: Callable[[bytes], st.SearchStrategy[bytes]]


def file_case(path: Path, read: Callable[[], Any], change: Callable[[bytes], st.SearchStrategy[bytes]]) -> Case:
    """A reader of an existing file, which reads the file after its content is replaced."""

    original = path.read_bytes()

    def replace_and_read(content: bytes) -> Any:
        path.write_bytes(content)
        try:
            return read()
        finally:
            path.write_bytes(original)

    return Case(original, replace_and_read, change)


def build_messages(folder: Path) -> Iterator[tuple[str, Case]]:
    state = {"layer.weight": torch.ones(2, 3), "layer.bias": torch.zeros(3)}
    metrics = {"loss": 0.5, "learning_rate": 1e-3}
    messages = [
        Fit(round=1, client_id="north", seed=7, state=state, settings={"mu": 0.1, "names": ["a"]}),
        ClientUpdate(
            round=1, client_id="north", state=state, num_examples=9, num_tokens=0, num_steps=3, metrics=metrics
        ),
        Evaluate(round=1, client_id="north", state=state),
        Metrics(round=1, client_id="north", num_examples=9, metrics=metrics),
        Predictions(round=1, client_id="north", values={"logits": torch.ones(4, 2)}),
    ]
    for message in messages:
        yield f"message {message.kind}", Case(message.to_bytes(), read_message, changed_packed)
    tree = {"pairs": {0: 1.5, "b": (1, [None, True])}, "nested": [{"a": torch.ones(2)}]}
    yield "packed tree", Case(pack(tree), unpack, changed_packed)
    yield "kind of a packed tree", Case(pack({"kind": "fit", **tree}), packed_kind, changed_packed)


def build_files(folder: Path) -> Iterator[tuple[str, Case]]:
    ledger = Ledger()
    for round in range(3):
        for client_id in ("north", "south"):
            ledger.record(round, client_id, 100 + round, 7)
    ledger.save(folder)
    yield "ledger", file_case(folder / LEDGER_NAME, lambda: Ledger.load(folder), changed_json)
    blob = pack(ledger.state_dict())
    yield "ledger of a checkpoint", Case(blob, lambda blob: Ledger.from_state_dict(unpack(blob)), changed_packed)
    federation = FederatedConfig(aggregation="fedprox", aggregation_kwargs={"mu": 0.1}, clients_per_round=0.5)
    for config in (federation, SplitConfig()):
        config.save_pretrained(folder)
        load = type(config).from_pretrained
        yield config.file_name, file_case(folder / config.file_name, lambda load=load: load(folder), changed_json)
    checkpoint = folder / "checkpoint-1"
    (checkpoint / FEDERATED_DIR).mkdir(parents=True)
    state = {"identity": {"clients": {"north": 4}}, "aggregation": {}, "ledger": ledger.state_dict(), "clients": {}}
    write_server_state(checkpoint, state)
    write_manifest(checkpoint)
    yield "manifest", file_case(checkpoint / MANIFEST_FILE, lambda: check_manifest(checkpoint), changed_json)
    server_file = checkpoint / FEDERATED_DIR / SERVER_FILE
    yield "server state", file_case(server_file, lambda: read_server_state(checkpoint), changed_packed)
    store = DiskStore(folder / "store")
    store.set("north", {"optimizer": {0: torch.ones(2)}, "step": 3})
    client_file = folder / "store" / client_file_name("north")
    yield "client state", file_case(client_file, lambda: store.get("north"), changed_packed)


def build_data(folder: Path) -> Iterator[tuple[str, Case]]:
    rows = Dataset.from_dict({"text": list("abcdef"), "label": [0, 1] * 3})
    clients = FederatedDataset.from_dataset(rows, IidPartitioner(num_clients=2, seed=0))
    clients.save_to_disk(folder / "clients", label_column="label")
    content = (folder / "clients" / "partition.json").read_bytes()
    yield "partition.json", Case(content, PartitionFile.from_json, changed_json)


def build_experiments(folder: Path) -> Iterator[tuple[str, Case]]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "model: {name_or_path: m}\ndata: {path: d, max_train_rows: 9}\npartition: {name: iid, num_clients: 4}\n"
        "training: {learning_rate: 5e-4, seed: 1}\nfederation: {num_rounds: 2, aggregation: fedprox}\n"
        "scales: {small: {data: {max_train_rows: 3}}}\nscale: small\nbenchmark: {runs: {a: {}}}\n"
    )

    def read_recipe() -> None:
        check_names(read_values(recipe))

    yield "recipe", file_case(recipe, read_recipe, changed_yaml)
    run = folder / "run"
    RunFolder(run, {"federation": {"num_rounds": 5}}).begin()

    def read_run() -> None:
        RunFolder(run, {"federation": {"num_rounds": 5}}, overwrite=True).find_baseline("local")

    yield "record of a run", file_case(run / RUN_NAME, read_run, changed_json)
    with RunLog(folder / "log") as log:
        log.append({"run": "FedAvg", "seed": 0, "digest": "ab", "value": 0.5})
    yield "log of runs", file_case(folder / "log" / LOG_NAME, lambda: read_records(folder / "log"), changed_bytes)


def build_cards(folder: Path) -> Iterator[tuple[str, Case]]:
    records = Path(__file__).parents[2] / "model_cards"
    for name in ("quickstart", "split"):
        path = folder / f"{name}.json"
        path.write_bytes((records / path.name).read_bytes())
        yield f"card of {name}", file_case(path, lambda path=path: render_saved(path), changed_json)
    audit = folder / "audit.json"
    inversion = Inversion(1, "float32", "search", 0.9, 0.9, 0.8, 0.9, 0.8)
    LeakageAudit(AuditConfig(head_blocks=[1]), 300, 50, 2000, 0, 0.05, 0.9, [inversion], []).save(audit)
    yield "audit", file_case(audit, lambda: LeakageAudit.load(audit), changed_json)


def build_split(folder: Path) -> Iterator[tuple[str, Case]]:
    from decoders import decoder
    from peft import LoraConfig

    from hf_federated import SplitModel
    from hf_federated.split import add_adapter

    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    for name, config in (("parts", None), ("adapter parts", lora)):
        split = SplitModel.from_model(decoder("llama"), 1, 2)
        if config is not None:
            add_adapter(split.parts, split.config, config)
        parts, saved = [split.client_head, split.client_tail], folder / name
        save_parts(parts, split.config, saved, config)
        for path in sorted(saved.iterdir()):
            if path.name in ("split_parts.json", "model.safetensors", "adapter_model.safetensors"):
                change = changed_json if path.suffix == ".json" else changed_header
                load = lambda parts=parts, saved=saved: load_saved_parts(parts, saved)  # noqa: E731
                yield f"{path.name} of {name}", file_case(path, load, change)
    checkpoint = folder / "checkpoint"
    decoder("llama").save_pretrained(checkpoint)
    mine = ModelFingerprint.from_checkpoint(checkpoint)
    session = SplitSessionConfig(mine, Cut(4, 1, 2), Wire(), None, {"batch_size": 2})
    text = json.dumps(session.to_dict()).encode()
    yield "session config", Case(text, lambda text: session.differences(json.loads(text)), changed_json_only)
    for path in (checkpoint / "config.json", checkpoint / "model.safetensors"):
        change = changed_json if path.suffix == ".json" else changed_header
        yield (
            f"fingerprint of {path.name}",
            file_case(path, lambda: ModelFingerprint.from_checkpoint(checkpoint), change),
        )
    shards = folder / "shards"
    decoder("llama").save_pretrained(shards, max_shard_size="20KB")
    index = shards / "model.safetensors.index.json"
    yield "index of weights", file_case(index, lambda: ModelFingerprint.from_checkpoint(shards), changed_json)


def changed_json_only(content: bytes) -> st.SearchStrategy[bytes]:
    return changed_tree(json.loads(content), SURPRISES).map(lambda tree: json.dumps(tree).encode())


def changed_header(content: bytes) -> st.SearchStrategy[bytes]:
    length = int.from_bytes(content[:8], "little")
    return changed_bytes(content[: 8 + length]).map(lambda head: head + content[8 + length :])


def build_network(folder: Path) -> Iterator[tuple[str, Case]]:
    for header in (ConnectResponse("s", 1000, 10), MessageHeader("s", 3, "t", 9, 2), AnswerHeader("answer", "", 9)):
        yield type(header).__name__, Case(header.to_json().encode(), type(header).from_json, changed_json)
    introduction = torch.zeros(3, dtype=torch.uint8)
    messages = [
        training_messages.Join("north", "digest", 5, [1, 2], introduction),
        training_messages.EndStep("north", 3, 0.5),
        training_messages.PartParameters("north", 3, 9, {"weight": torch.ones(2)}),
    ]
    for message in messages:
        read = training_messages.read_message if message.kind != "split_parameters" else type(message).from_bytes
        yield f"message {message.kind}", Case(message.to_bytes(), read, changed_packed)
    backward = Backward("north", 3, 0, {"values": torch.ones(2, 4)})
    yield "message split_backward", Case(backward.to_bytes(), read_request, changed_packed)


def build_certificates(folder: Path) -> Iterator[tuple[str, Case]]:
    tls = folder / "tls"
    create_certificates(tls, ["localhost"], ["north"], rsa_bits=2048)
    key = (tls / "server.key").read_bytes()
    yield "private key", Case(key, lambda pem: Identity.from_pem("server", pem), changed_bytes)
    yield "certificate", Case((tls / "server.pem").read_bytes(), fingerprint, changed_bytes)
    client = tls / "clients" / "north.pem"
    yield "certificates of clients", file_case(client, lambda: client_fingerprints(tls), changed_bytes)
    other = folder / "other"
    create_certificates(other, ["localhost"], ["north"], rsa_bits=2048)
    yield "credentials", file_case(other / "server.pem", lambda: TlsCredentials.of_server(other), changed_bytes)
    authority = folder / "authority"
    create_certificates(authority, ["localhost"], [], rsa_bits=2048)

    for name in ("ca.pem", "ca.key"):
        yield name, file_case(authority / name, lambda: load_authority(authority, 30), changed_bytes)


BUILDERS: dict[str, Callable[[Path], Iterator[tuple[str, Case]]]] = {
    "messages": build_messages,
    "files": build_files,
    "data": build_data,
    "experiments": build_experiments,
    "cards": build_cards,
    "split": build_split,
    "network": build_network,
    "certificates": build_certificates,
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, Case]]:
    """Return the readers of a group by name."""
    built: dict[str, dict[str, Case]] = {}

    def build(group: str) -> Mapping[str, Case]:
        if group not in built:
            built[group] = dict(BUILDERS[group](tmp_path_factory.mktemp(group)))
        return built[group]

    return build


def check_reader(case: Case, max_examples: int) -> None:
    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case.change(case.content))
    def read(content: bytes) -> None:
        with suppress(ValueError):
            case.read(content)

    case.read(case.content)
    read()


def check_readers(cases: Mapping[str, Case], max_examples: int) -> None:
    for name, case in cases.items():
        try:
            check_reader(case, max_examples)
        except Exception as error:
            raise AssertionError(f"The reader of the {name} raised {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("group", BUILDERS)
@pytest.mark.sampled(4)
def test_reader_returns_a_result_or_raises_value_error(group, cases):
    check_readers(cases(group), max_examples=25)


@pytest.mark.slow
@pytest.mark.parametrize("group", BUILDERS)
def test_reader_returns_a_result_or_raises_value_error_in_10000_examples(group, cases):
    check_readers(cases(group), max_examples=10_000)
