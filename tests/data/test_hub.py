"""Federated data sets on the Hub: the real `huggingface_hub` and `datasets` against a Hub on loopback."""

from __future__ import annotations

import json

import pytest
from hub_server import HubServer, run_client


# Each test runs one process or a few, which take seconds to import everything: so they ask several things each.


@pytest.fixture
def hub():
    with HubServer() as server:
        server.add_user("anna", token="hf_anna")
        server.add_user("ben", token="hf_ben")
        yield server


def push(repo_id: str, who: list[str], private: bool | None = None, prefix: str = "text", **options):
    from datasets import Dataset

    from hf_federated import FederatedDataset

    texts = [f"{prefix} {number}" for number in range(len(who))]
    rows = Dataset.from_dict({"who": who, "text": texts, "label": [number % 2 for number in range(len(who))]})
    commit = FederatedDataset.from_column(rows, "who").push_to_hub(repo_id, private=private, **options)
    return None if commit is None else commit.oid


WHO = ["Anna", "default", "007", "no"] * 10


def push_arguments(**changes):
    return {"repo_id": "anna/clients", "who": WHO, **changes}


def read_everything(revision: str):
    from datasets import load_dataset

    from hf_federated import FederatedDataset

    clients = FederatedDataset.from_hub("anna/clients")
    return {
        "ids": list(clients),
        "no": clients["no"]["text"][:],
        "partitioning": clients.partitioning,
        "then": list(FederatedDataset.from_hub("anna/clients", revision=revision)),
        "load_dataset": sorted(load_dataset("anna/clients", split="train")["text"][:]),
        "load_dataset of one": load_dataset("anna/clients", "_41nna", split="train")["text"][:],
        "load_dataset of no": load_dataset("anna/clients", "no", split="train")["text"][:],
    }


def test_a_push_is_one_commit_that_both_libraries_read(hub, tmp_path):
    first = run_client(hub, push, tmp_path / "writer", token="hf_anna", arguments=push_arguments()).value
    assert len(hub.requests("commit")) == 1
    # from another machine, without a token: the repository is public
    seen = run_client(hub, read_everything, tmp_path / "reader", arguments={"revision": first}).value
    assert seen["ids"] == sorted(set(WHO)) == seen["then"]
    assert seen["no"] == [f"text {i}" for i in range(3, 40, 4)] == seen["load_dataset of no"]
    assert seen["load_dataset"] == sorted(f"text {i}" for i in range(40))
    assert seen["load_dataset of one"] == [f"text {i}" for i in range(0, 40, 4)]
    assert seen["partitioning"] == {"partitioner": "from_column", "column": "who", "min_rows": None}

    # The same again is no commit; a client that changed, one that is new and one that is gone are one.
    hub.clear_log()
    assert run_client(hub, push, tmp_path / "writer", token="hf_anna", arguments=push_arguments()).value is None
    assert not hub.requests("storage-upload") and not hub.requests("commit")
    changed = ["Anna" if who == "default" else who for who in WHO] + ["Zoë"]
    hub.clear_log()
    run_client(hub, push, tmp_path / "writer", token="hf_anna", arguments=push_arguments(who=changed))
    assert len(hub.requests("storage-upload", method="PUT")) == 2  # Anna's and Zoë's
    folders = {path.split("/")[1] for path in hub.files("anna/clients") if path.startswith("data/")}
    assert folders == {"007", "_41nna", "no", "_5ao_c3_ab"}
    seen = run_client(hub, read_everything, tmp_path / "reader", arguments={"revision": first}).value
    assert seen["ids"] == ["007", "Anna", "Zoë", "no"]
    assert seen["then"] == sorted(set(WHO))


def test_what_people_wrote_on_the_card_stays(hub, tmp_path):
    run_client(hub, push, tmp_path, token="hf_anna", arguments=push_arguments())
    card = hub.files("anna/clients")["README.md"].decode()
    edited = card.replace("---\n", "---\nlicense: mit\n", 1).replace("# clients\n", "# Speakers\n\nCollected by us.\n")
    hub.push("anna/clients", {"README.md": (edited + "\n## Licence\n\nAsk us.\n").encode()})
    run_client(hub, push, tmp_path, token="hf_anna", arguments=push_arguments(who=WHO[:38] + ["x", "y"]))
    card = hub.files("anna/clients")["README.md"].decode()
    for kept in ("license: mit", "# Speakers\n\nCollected by us.", "## Licence\n\nAsk us."):
        assert kept in card
    assert card.count("## Clients") == 1 and "| train | 6 | 40 |" in card
    assert 'config_name: "x"' in card and card.count("configs:") == 1


def fetch(repo_id: str, clients: list[str]):
    from hf_federated import FederatedDataset

    return list(FederatedDataset.from_hub(repo_id, clients=clients))


@pytest.mark.parametrize("num_clients", [10, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_reader_downloads_the_clients_it_asks_for_and_no_other(hub, tmp_path, num_clients):
    who = [str(number) for number in range(num_clients)]
    run_client(hub, push, tmp_path / "writer", token="hf_anna", arguments=push_arguments(who=who * 2))
    files = hub.files("anna/clients")
    hub.clear_log()
    asked = ["7", "3"]
    arguments = {"repo_id": "anna/clients", "clients": asked}
    assert run_client(hub, fetch, tmp_path / "reader", arguments=arguments).value == asked
    expected = len(files["partition.json"]) + sum(
        len(files[f"data/{name}/train-00000-of-00001.parquet"]) for name in asked
    )
    assert hub.bytes_served() == expected
    # asked again, from the cache: not a byte
    hub.clear_log()
    run_client(hub, fetch, tmp_path / "reader", arguments=arguments)
    assert hub.bytes_served() == 0


def fetch_error(repo_id: str = "anna/clients"):
    from hf_federated import FederatedDataset

    try:
        return list(FederatedDataset.from_hub(repo_id))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def push_error(**arguments):
    from datasets import Dataset

    from hf_federated import FederatedDataset

    rows = Dataset.from_dict({"who": ["a", "b"], "text": ["x", "y"]})
    try:
        FederatedDataset.from_column(rows, "who").push_to_hub(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_private_data_is_for_its_owner_and_storage_sees_no_token(hub, tmp_path):
    run_client(hub, push, tmp_path / "anna", token="hf_anna", arguments=push_arguments(private=True))
    assert run_client(hub, fetch_error, tmp_path / "a", token="hf_anna").value == sorted(set(WHO))
    for token, home in ((None, "none"), ("hf_ben", "ben"), ("hf_wrong", "wrong")):
        answer = run_client(hub, fetch_error, tmp_path / home, token=token).value
        assert "NotFoundError" in answer or "401" in answer, answer
    assert hub.requests(prefix="") and not [
        request for request in hub.log if request.host == "localhost" and request.has_token
    ]
    answer = run_client(hub, push_error, tmp_path / "ben", token="hf_ben", arguments={"repo_id": "anna/clients"})
    assert "403" in answer.value or "NotFound" in answer.value
    hub.clear_log()
    run_client(hub, push, tmp_path / "anna", token="hf_anna", arguments=push_arguments(repo_id="anna/open"))
    refused = {"repo_id": "anna/open", "private": True}
    answer = run_client(hub, push_error, tmp_path / "anna", token="hf_anna", arguments=refused).value
    assert "anna/open is there already and is public" in answer
    assert len(hub.requests("commit")) == 1


def test_a_push_beside_another_publishes_nothing(hub, tmp_path):
    run_client(hub, push, tmp_path, token="hf_anna", arguments=push_arguments())
    before = hub.files("anna/clients")
    hub.before_commit(lambda: hub.push("anna/clients", {"notes.txt": b"meanwhile"}))
    answer = run_client(hub, push_error, tmp_path, token="hf_anna", arguments={"repo_id": "anna/clients"}).value
    assert answer.startswith("ConcurrentPushError: anna/clients got another commit")
    assert hub.files("anna/clients") == {**before, "notes.txt": b"meanwhile"}
    run_client(hub, push, tmp_path, token="hf_anna", arguments=push_arguments(prefix="again"))
    assert hub.files("anna/clients")["notes.txt"] == b"meanwhile"


def test_a_push_that_broke_off_is_finished_by_the_next(hub, tmp_path):
    hub.fail_next("commit", times=1, status=400)
    answer = run_client(hub, push_error, tmp_path, token="hf_anna", arguments={"repo_id": "anna/clients"}).value
    assert "400" in answer
    assert "partition.json" not in hub.files("anna/clients")
    # the reply to a commit that was carried out is lost: the rerun finds everything there
    hub.lose_reply_to("commit")
    run_client(hub, push_error, tmp_path, token="hf_anna", arguments={"repo_id": "anna/clients"})
    assert "partition.json" in hub.files("anna/clients")
    hub.clear_log()
    run_client(hub, push_error, tmp_path, token="hf_anna", arguments={"repo_id": "anna/clients"})
    assert not hub.requests("commit") and not hub.requests("storage-upload")


def test_repositories_that_hold_something_else_are_refused(hub, tmp_path):
    run_client(hub, push, tmp_path, token="hf_anna", arguments=push_arguments())
    hub.push("anna/clients", {"partition.json": None})
    answer = run_client(hub, push_error, tmp_path, token="hf_anna", arguments={"repo_id": "anna/clients"}).value
    assert "ValueError: anna/clients holds data that is no federated data set" in answer
    answer = run_client(hub, fetch_error, tmp_path, token="hf_anna").value
    assert "FileNotFoundError: anna/clients has no partition.json" in answer


def test_files_that_are_not_those_that_were_pushed_are_refused(hub, tmp_path):
    run_client(hub, push, tmp_path / "writer", token="hf_anna", arguments=push_arguments())
    files = hub.files("anna/clients")
    hub.push("anna/clients", {"data/no/train-00000-of-00001.parquet": files["data/007/train-00000-of-00001.parquet"]})
    answer = run_client(hub, fetch_error, tmp_path / "reader").value
    assert "data/no/train-00000-of-00001.parquet of client 'no' is not the one" in answer
    hub.push("anna/clients", {"data/no/train-00000-of-00001.parquet": None})
    answer = run_client(hub, fetch_error, tmp_path / "reader").value
    assert "anna/clients lacks data/no/train-00000-of-00001.parquet" in answer


def push_index():
    from datasets import Dataset

    from hf_federated import DatasetSource, FederatedDataset, IidPartitioner

    rows = Dataset.from_dict({"text": [f"text {number}" for number in range(60)]})
    rows.push_to_hub("ben/texts", token="hf_ben")
    clients = FederatedDataset.from_dataset(DatasetSource("ben/texts"), IidPartitioner(4))
    clients.push_to_hub("anna/index", index_only=True)
    mapped = clients.map(lambda row: {"text": row["text"].upper()})
    try:
        mapped.push_to_hub("anna/mapped", index_only=True)
    except ValueError as error:
        refused = str(error)
    # the source goes on without the index
    Dataset.from_dict({"text": ["other"] * 60}).push_to_hub("ben/texts", token="hf_ben")
    return {"clients": {i: client["text"][:] for i, client in clients.items()}, "refused": refused}


def read_index():
    from datasets import Dataset

    from hf_federated import FederatedDataset

    clients = FederatedDataset.from_hub("anna/index")
    two = FederatedDataset.from_hub("anna/index", clients=["2", "0"])
    try:
        FederatedDataset.from_hub("anna/index", source=Dataset.from_dict({"text": ["other"] * 60}))
    except ValueError as error:
        refused = str(error)
    return {
        "clients": {i: client["text"][:] for i, client in clients.items()},
        "two": {i: client["text"][:] for i, client in two.items()},
        "refused": refused,
    }


def test_row_numbers_are_published_over_a_source_at_a_fixed_commit(hub, tmp_path):
    pushed = run_client(hub, push_index, tmp_path / "writer", token="hf_anna").value
    assert "ben/texts at" in pushed["refused"] and "are not those that were cut" in pushed["refused"]
    assert "anna/mapped" not in hub.repositories or "partition.json" not in hub.files("anna/mapped")
    files = hub.files("anna/index")
    assert not [path for path in files if path.startswith("data/")]
    commit = json.loads(files["partition.json"])["index"]["train"]["source"]["revision"]
    assert len(commit) == 40
    read = run_client(hub, read_index, tmp_path / "reader").value
    assert read["clients"] == pushed["clients"]
    assert read["two"] == {i: pushed["clients"][i] for i in ("2", "0")}
    assert "source= are not those that were cut" in read["refused"]


def push_splits():
    from datasets import Dataset

    from hf_federated import FederatedDataset, FederatedDatasetDict

    rows = Dataset.from_dict({"who": ["a", "b", "c"] * 4, "text": [f"text {number}" for number in range(12)]})
    both = FederatedDatasetDict(
        train=FederatedDataset.from_column(rows, "who"),
        test=FederatedDataset.from_column(rows.select(range(2)), "who"),
    )
    both.push_to_hub("anna/both", revision="v1")
    from datasets import load_dataset

    read = FederatedDatasetDict.from_hub("anna/both", clients=["b", "c"], revision="v1")
    return {
        "read": {split: {i: client["text"][:] for i, client in clients.items()} for split, clients in read.items()},
        "configs": {name: list(load_dataset("anna/both", name, revision="v1")) for name in ("a", "c", "default")},
    }


def test_splits_are_pushed_together_to_a_branch(hub, tmp_path):
    seen = run_client(hub, push_splits, tmp_path, token="hf_anna").value
    assert seen["read"]["train"] == {
        "b": [f"text {number}" for number in (1, 4, 7, 10)],
        "c": [f"text {number}" for number in (2, 5, 8, 11)],
    }
    assert seen["read"]["test"] == {"b": ["text 1"]}
    assert seen["configs"] == {"a": ["train", "test"], "c": ["train"], "default": ["train", "test"]}
    assert "partition.json" not in hub.files("anna/both")
    assert "partition.json" in hub.files("anna/both", revision="v1")


def read_offline():
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    from hf_federated import FederatedDataset

    return FederatedDataset.from_hub("anna/clients", clients=["no"])["no"]["text"][:]


def test_what_was_fetched_once_opens_without_a_network(hub, tmp_path):
    run_client(hub, push, tmp_path / "writer", token="hf_anna", arguments=push_arguments())
    run_client(hub, fetch, tmp_path / "reader", arguments={"repo_id": "anna/clients", "clients": ["no"]})
    hub.clear_log()
    assert run_client(hub, read_offline, tmp_path / "reader").value == [f"text {i}" for i in range(3, 40, 4)]
    assert not hub.log
