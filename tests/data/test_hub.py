"""Federated datasets on the Hub: the real `huggingface_hub` and `datasets` with a local Hub server."""

from __future__ import annotations

import json

import pytest
from hub_server import HubClient, HubServer


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        server.add_user("anna", token="hf_anna")
        server.add_user("ben", token="hf_ben")
        yield server


@pytest.fixture(scope="module")
def process(server, tmp_path_factory):
    """One process that imports the libraries once for all tests, because the imports take seconds."""
    with HubClient(server, tmp_path_factory.mktemp("home")) as client:
        yield client


@pytest.fixture
def hub(server):
    server.repositories.clear()
    server.clear_log()
    return server


@pytest.fixture
def anna(process):
    def run(function, **arguments):
        return process.run(function, token="hf_anna", **arguments)

    return run


@pytest.fixture
def fresh(process, tmp_path):
    """Run a function with an empty download cache."""

    def run(function, token=None, home="reader", **arguments):
        return process.run(function, token=token, cache_dir=str(tmp_path / home), **arguments)

    return run


def push(
    repo_id: str = "anna/clients", speaker=("Anna", "default", "007", "no") * 10, prefix: str = "text", **options
):
    from datasets import Dataset

    from hf_federated import FederatedDataset

    texts = [f"{prefix} {number}" for number in range(len(speaker))]
    rows = Dataset.from_dict({"who": speaker, "text": texts, "label": [number % 2 for number in range(len(speaker))]})
    commit = FederatedDataset.from_column(rows, "who").push_to_hub(repo_id, **options)
    return None if commit is None else commit.oid


SPEAKERS = ["Anna", "default", "007", "no"] * 10


def push_error(**arguments):
    from datasets import Dataset

    from hf_federated import FederatedDataset

    rows = Dataset.from_dict({"who": ["a", "b"], "text": ["x", "y"]})
    try:
        FederatedDataset.from_column(rows, "who").push_to_hub(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def read_everything(revision: str, cache_dir: str):
    from datasets import load_dataset

    from hf_federated import FederatedDataset

    clients = FederatedDataset.from_hub("anna/clients", cache_dir=cache_dir)
    at_revision = FederatedDataset.from_hub("anna/clients", revision=revision, cache_dir=cache_dir)

    def texts(*names):
        return load_dataset("anna/clients", *names, split="train", cache_dir=cache_dir)["text"][:]

    return {
        "ids": list(clients),
        "no": clients["no"]["text"][:],
        "partitioning": clients.partitioning,
        "ids at revision": list(at_revision),
        "load_dataset": sorted(texts()),
        "load_dataset of Anna": texts("_41nna"),
        "load_dataset of no": texts("no"),
    }


def test_push_is_one_commit_and_both_libraries_load_it(hub, anna, fresh):
    first = anna(push)
    assert len(hub.requests("commit")) == 1
    seen = fresh(read_everything, revision=first)  # no token, because the repository is public
    assert seen["ids"] == sorted(set(SPEAKERS)) == seen["ids at revision"]
    assert seen["no"] == [f"text {i}" for i in range(3, 40, 4)] == seen["load_dataset of no"]
    assert seen["load_dataset"] == sorted(f"text {i}" for i in range(40))
    assert seen["load_dataset of Anna"] == [f"text {i}" for i in range(0, 40, 4)]
    settings = {"column": "who", "min_rows": None, "keep_column": False}
    assert seen["partitioning"] == {"partitioner": "from_column", **settings}


def test_second_push_uploads_changes_and_removes_old_clients(hub, anna, fresh):
    first = anna(push)
    hub.clear_log()
    assert anna(push) is None
    assert not hub.requests("storage-upload") and not hub.requests("commit")
    anna(push, speaker=["Anna" if speaker == "default" else speaker for speaker in SPEAKERS] + ["Zoë"])
    assert len(hub.requests("storage-upload", method="PUT")) == 2  # Anna's and Zoë's
    assert len(hub.requests("commit")) == 1
    folders = {path.split("/")[1] for path in hub.files("anna/clients") if path.startswith("data/")}
    assert folders == {"007", "_41nna", "no", "_5ao_c3_ab"}
    seen = fresh(read_everything, revision=first)
    assert seen["ids"] == ["007", "Anna", "Zoë", "no"]
    assert seen["ids at revision"] == sorted(set(SPEAKERS))


def test_push_keeps_user_edits_of_the_card(hub, anna):
    anna(push)
    card = hub.files("anna/clients")["README.md"].decode()
    edited = card.replace("---\n", "---\nlicense: mit\n", 1).replace("# clients\n", "# Speakers\n\nCollected by us.\n")
    hub.push("anna/clients", {"README.md": (edited + "\n## Licence\n\nAsk us.\n").encode()})
    anna(push, speaker=SPEAKERS[:38] + ["x", "y"])
    card = hub.files("anna/clients")["README.md"].decode()
    for kept in ("license: mit", "# Speakers\n\nCollected by us.", "## Licence\n\nAsk us."):
        assert kept in card
    assert card.count("## Clients") == 1 and "| train | 6 | 40 |" in card
    assert 'config_name: "x"' in card and card.count("configs:") == 1


def fetch(cache_dir: str, repo_id: str = "anna/clients", clients: list[str] | None = None):
    from hf_federated import FederatedDataset

    try:
        return list(FederatedDataset.from_hub(repo_id, clients=clients, cache_dir=cache_dir))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("num_clients", [10, pytest.param(5000, marks=pytest.mark.slow)])
def test_from_hub_downloads_only_the_requested_clients(hub, anna, fresh, num_clients):
    anna(push, speaker=[str(number) for number in range(num_clients)] * 2)
    files = hub.files("anna/clients")
    hub.clear_log()
    requested = ["7", "3"]
    assert fresh(fetch, clients=requested) == requested
    expected = len(files["partition.json"]) + sum(
        len(files[f"data/{name}/train-00000-of-00001.parquet"]) for name in requested
    )
    assert hub.bytes_served() == expected
    # The second request is served from the cache.
    hub.clear_log()
    assert fresh(fetch, clients=requested) == requested
    assert hub.bytes_served() == 0


def test_from_hub_suggests_ids_for_a_misspelled_client_and_downloads_no_client(hub, anna, fresh):
    anna(push, speaker=["north", "south"] * 2)
    hub.clear_log()
    error = fresh(fetch, clients=["south", "Nroth"])
    assert error.startswith("KeyError") and "Did you mean 'north'" in error
    assert hub.bytes_served() == len(hub.files("anna/clients")["partition.json"])


def test_private_dataset_needs_the_token_of_the_owner_and_storage_receives_no_token(hub, process, anna, fresh):
    anna(push, private=True)
    assert fresh(fetch, token="hf_anna", home="anna") == sorted(set(SPEAKERS))
    for token in (None, "hf_ben", "hf_wrong"):
        answer = fresh(fetch, token=token, home=str(token))
        assert "NotFoundError" in answer or "401" in answer, answer
    to_storage = [request for request in hub.log if request.host == "localhost"]
    assert to_storage and not any(request.has_token for request in to_storage)
    answer = process.run(push_error, token="hf_ben", repo_id="anna/clients")
    assert "403" in answer or "NotFound" in answer


def test_private_push_to_a_public_repository_raises_value_error(hub, anna):
    anna(push)
    hub.clear_log()
    answer = anna(push_error, repo_id="anna/clients", private=True)
    assert "anna/clients already exists and is public" in answer
    assert not hub.requests("commit") and not hub.requests("storage-upload")


def test_push_during_another_commit_publishes_nothing(hub, anna):
    anna(push)
    before = hub.files("anna/clients")
    hub.before_commit(lambda: hub.push("anna/clients", {"notes.txt": b"meanwhile"}))
    answer = anna(push_error, repo_id="anna/clients")
    assert answer.startswith("ConcurrentPushError: anna/clients received another commit")
    assert hub.files("anna/clients") == {**before, "notes.txt": b"meanwhile"}
    anna(push, prefix="again")
    assert hub.files("anna/clients")["notes.txt"] == b"meanwhile"


def test_interrupted_push_is_completed_by_the_next_push(hub, anna):
    for kind in ("preupload", "lfs-batch", "storage-upload", "commit"):
        hub.fail_next(kind, status=403)
        assert anna(push_error, repo_id="anna/clients") is not None
        assert "partition.json" not in hub.files("anna/clients")
    # The commit succeeds, but its reply is lost. The next push has nothing to upload.
    hub.lose_reply_to("commit")
    assert anna(push_error, repo_id="anna/clients") is not None
    assert "partition.json" in hub.files("anna/clients")
    hub.clear_log()
    assert anna(push_error, repo_id="anna/clients") is None
    assert not hub.requests("commit") and not hub.requests("storage-upload")


def test_repository_without_partition_json_is_rejected(hub, anna, fresh):
    anna(push)
    hub.push("anna/clients", {"partition.json": None})
    answer = anna(push_error, repo_id="anna/clients")
    assert "ValueError: anna/clients contains data that is not a federated dataset" in answer
    assert "FileNotFoundError: anna/clients has no partition.json" in fresh(fetch)


def test_push_keeps_files_and_configurations_of_users(hub, anna):
    anna(push)
    user_files = {
        "data/codebook.csv": b"a,b",
        "data/raw/interviews.zip": b"zip",
        "pictures/logo.png": b"png",
        "en/train.jsonl": b'{"text": "hello"}',
    }
    card = hub.files("anna/clients")["README.md"].decode()
    config = "configs:\n- config_name: en\n  data_files: en/train.jsonl\n"
    hub.push("anna/clients", {**user_files, "README.md": card.replace("configs:\n", config, 1).encode()})
    anna(push, speaker=["Anna", "no"] * 20)
    files = hub.files("anna/clients")
    assert {path: files[path] for path in user_files} == user_files
    card = files["README.md"].decode()
    assert card.count("config_name: en") == 1 and 'config_name: "no"' in card and '"007"' not in card


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"partition.json": b'{"by": "another tool"}'}, "anna/other has an invalid partition.json"),
        ({"README.md": b"---\nconfigs:\n- config_name: en\n---\n"}, "see its configs"),
        (
            {"README.md": b"---\nlicense: [mit\n---\n"},
            "metadata at the top of README.md of anna/other cannot be parsed",
        ),
        ({"README.md": "caf\xe9".encode("latin-1")}, "README.md is not valid UTF-8"),
        ({"data/train.csv": b"a"}, "contains data that is not a federated dataset"),
    ],
)
def test_repository_with_other_content_is_rejected_and_not_changed(hub, anna, files, message):
    hub.create("anna/other")
    hub.push("anna/other", files)
    before = hub.files("anna/other")
    assert message in anna(push_error, repo_id="anna/other")
    assert hub.files("anna/other") == before


def test_push_keeps_text_and_metadata_of_an_existing_card(hub, anna):
    marks = "<!-- hf_federated: end -->\nKept.\n<!-- hf_federated: begin -->\n"
    card = f"\ufeff---\nlicense: mit\ntags: nlp\n---\n# Mine\n\n{marks}"
    hub.create("anna/other")
    hub.push("anna/other", {"README.md": card.encode()})
    for _ in range(2):
        assert anna(push_error, repo_id="anna/other") is None
    card = hub.files("anna/other")["README.md"].decode()
    assert "license: mit" in card and "- nlp\n" in card and "# Mine" in card and "Kept." in card


def test_failed_push_changes_nothing_on_the_hub(hub, anna):
    for options in ({"split": "all"}, {"label_column": "nope"}, {"max_shard_size": "foo"}):
        assert "ValueError" in anna(push_error, repo_id="anna/new", **options)
        assert not hub.repositories and not hub.requests("create-repo")
    anna(push)
    hub.clear_log()
    assert "public" in anna(push_error, repo_id="anna/clients", private=True, revision="v2")
    assert not hub.requests("branch")


def push_by_name():
    from datasets import Dataset

    from hf_federated import FederatedDataset

    rows = Dataset.from_dict({"who": ["a", "b"], "text": ["x", "y"]})
    FederatedDataset.from_column(rows, "who").push_to_hub("mine")
    return list(FederatedDataset.from_hub("anna/mine"))


def test_repo_id_without_namespace_uses_the_namespace_of_the_user(hub, anna):
    assert anna(push_by_name) == ["a", "b"]


def use_explicit_token(cache_dir: str, secret: str):
    from datasets import Dataset

    from hf_federated import DatasetSource, FederatedDataset, IidPartitioner

    Dataset.from_dict({"text": [f"text {i}" for i in range(8)]}).push_to_hub("anna/rows", private=True, token=secret)
    clients = FederatedDataset.from_dataset(DatasetSource("anna/rows"), IidPartitioner(2), token=secret)
    clients.push_to_hub("anna/index", index_only=True, private=True, token=secret)
    clients.push_to_hub("anna/copies", private=True, token=secret)
    return [
        {i: client["text"][:] for i, client in opened.items()}
        for opened in (
            clients,
            FederatedDataset.from_hub("anna/index", token=secret, cache_dir=cache_dir),
            FederatedDataset.from_hub("anna/copies", token=secret, cache_dir=cache_dir),
        )
    ]


def test_explicit_token_is_used_for_every_request(hub, process, tmp_path):
    partitioned, index_only, copied = process.run(use_explicit_token, cache_dir=str(tmp_path), secret="hf_anna")
    assert partitioned == index_only == copied


def test_files_changed_after_the_push_raise_an_error(hub, anna, fresh):
    anna(push)
    files = hub.files("anna/clients")
    hub.push("anna/clients", {"data/no/train-00000-of-00001.parquet": files["data/007/train-00000-of-00001.parquet"]})
    assert "data/no/train-00000-of-00001.parquet of client 'no' differs from its entry" in fresh(fetch)
    hub.push("anna/clients", {"data/no/train-00000-of-00001.parquet": None})
    assert "anna/clients has no file data/no/train-00000-of-00001.parquet" in fresh(fetch)


def push_index():
    from datasets import Dataset

    from hf_federated import DatasetSource, FederatedDataset, IidPartitioner

    rows = Dataset.from_dict({"text": [f"text {number}" for number in range(60)]})
    rows.push_to_hub("anna/texts")
    clients = FederatedDataset.from_dataset(DatasetSource("anna/texts"), IidPartitioner(4))
    clients.push_to_hub("anna/index", index_only=True)
    mapped = clients.map(lambda row: {"text": row["text"].upper()})
    try:
        mapped.push_to_hub("anna/mapped", index_only=True)
    except ValueError as error:
        refused = str(error)
    # The source dataset changes after the index was pushed.
    Dataset.from_dict({"text": ["other"] * 60}).push_to_hub("anna/texts")
    return {"clients": {i: client["text"][:] for i, client in clients.items()}, "refused": refused}


def read_index(cache_dir: str):
    from datasets import Dataset

    from hf_federated import FederatedDataset

    clients = FederatedDataset.from_hub("anna/index", cache_dir=cache_dir)
    selected = FederatedDataset.from_hub("anna/index", clients=["2", "0"], cache_dir=cache_dir)
    try:
        FederatedDataset.from_hub("anna/index", source=Dataset.from_dict({"text": ["other"] * 60}))
    except ValueError as error:
        refused = str(error)
    return {
        "clients": {i: client["text"][:] for i, client in clients.items()},
        "selected": {i: client["text"][:] for i, client in selected.items()},
        "refused": refused,
    }


def test_index_only_push_refers_to_the_source_at_a_fixed_commit(hub, anna, fresh):
    pushed = anna(push_index)
    assert "anna/texts at" in pushed["refused"] and "differ from the partitioned rows" in pushed["refused"]
    assert "datasets/anna/mapped" not in hub.repositories
    files = hub.files("anna/index")
    assert not [path for path in files if path.startswith("data/")]
    commit = json.loads(files["partition.json"])["index"]["train"]["source"]["revision"]
    assert len(commit) == 40
    read = fresh(read_index)
    assert read["clients"] == pushed["clients"]
    assert read["selected"] == {i: pushed["clients"][i] for i in ("2", "0")}
    assert "rows of source differ from the partitioned rows" in read["refused"]


def push_splits():
    from datasets import Dataset, load_dataset

    from hf_federated import FederatedDataset, FederatedDatasetDict

    rows = Dataset.from_dict({"who": ["a", "b", "c"] * 4, "text": [f"text {number}" for number in range(12)]})
    both = FederatedDatasetDict(
        train=FederatedDataset.from_column(rows, "who"),
        test=FederatedDataset.from_column(rows.select(range(2)), "who"),
    )
    both.push_to_hub("anna/both", revision="v1")
    read = FederatedDatasetDict.from_hub("anna/both", clients=["b", "c"], revision="v1")
    return {
        "read": {split: {i: client["text"][:] for i, client in clients.items()} for split, clients in read.items()},
        "configs": {name: list(load_dataset("anna/both", name, revision="v1")) for name in ("a", "c", "default")},
    }


def test_several_splits_are_pushed_together_to_a_branch(hub, anna):
    seen = anna(push_splits)
    assert seen["read"]["train"] == {
        "b": [f"text {number}" for number in (1, 4, 7, 10)],
        "c": [f"text {number}" for number in (2, 5, 8, 11)],
    }
    assert seen["read"]["test"] == {"b": ["text 1"]}
    assert seen["configs"] == {"a": ["train", "test"], "c": ["train"], "default": ["train", "test"]}
    assert "partition.json" not in hub.files("anna/both")
    assert "partition.json" in hub.files("anna/both", revision="v1")


def fetch_without_network(cache_dir: str):
    from unittest import mock

    from huggingface_hub import constants

    from hf_federated import FederatedDataset

    # `huggingface_hub` reads the environment variable only on import.
    with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
        return FederatedDataset.from_hub("anna/clients", clients=["no"], cache_dir=cache_dir)["no"]["text"][:]


def test_downloaded_clients_load_without_a_network(hub, anna, fresh):
    anna(push)
    fresh(fetch, clients=["no"])
    hub.clear_log()
    assert fresh(fetch_without_network) == [f"text {i}" for i in range(3, 40, 4)]
    assert not hub.log
