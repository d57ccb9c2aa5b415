"""`FailureStore`: the stores of several processes over one key-value store in this process."""

from __future__ import annotations

import time

import torch.distributed as dist

from hf_federated.distributed.failure_store import FailureStore


def failure_stores(world_size: int) -> list[FailureStore]:
    store = dist.HashStore()
    return [FailureStore(store, rank, world_size) for rank in range(world_size)]


def test_store_keeps_only_the_first_failure() -> None:
    first, second, third = failure_stores(3)
    assert third.get_failure() is None
    second.report_failure("ValueError: mine")
    first.report_failure("KeyError: later")
    expected = {"rank": 1, "error": "ValueError: mine"}
    assert first.get_failure() == second.get_failure() == third.get_failure() == expected


def test_waiting_ends_when_each_peer_posted_one_of_the_events() -> None:
    first, second, third = failure_stores(3)
    second.post("finished")
    started = time.monotonic()
    assert first.wait_for_peers("acknowledged", "finished", seconds=0.1) == [2]
    assert time.monotonic() - started >= 0.1
    second.report_failure("ValueError: mine")
    third.get_failure()  # Reading the failure posts "acknowledged".
    assert first.wait_for_peers("acknowledged", "finished", seconds=60) == []
    assert first.ranks_without("joined") == [1, 2]


def test_watcher_reads_a_failure_while_its_process_is_busy() -> None:
    first, second = failure_stores(2)
    first.start_watching()
    assert first.known_failure is None
    second.report_failure("ValueError: mine")
    assert second.wait_for_peers("acknowledged", seconds=60) == []
    assert first.known_failure == {"rank": 1, "error": "ValueError: mine"}
    first.close()


def test_unreachable_store_behaves_like_an_empty_store() -> None:
    class UnreachableStore(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Broken pipe")

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    store = FailureStore(UnreachableStore(), 0, 2)
    store.post("joined")
    assert store.get_failure() is None and store.ranks_without("joined") == [1]
