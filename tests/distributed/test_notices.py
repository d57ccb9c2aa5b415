"""`NoticeBoard`, with several processes' boards over one store of this process."""

from __future__ import annotations

import time

import torch.distributed as dist

from hf_federated.distributed.failure_store import NoticeBoard


def boards(number: int) -> list[NoticeBoard]:
    store = dist.HashStore()
    return [NoticeBoard(store, rank, number) for rank in range(number)]


def test_only_the_first_failure_is_kept() -> None:
    first, second, third = boards(3)
    assert third.failure() is None
    second.report("ValueError: mine")
    first.report("KeyError: later")
    assert first.failure() == second.failure() == third.failure() == {"rank": 1, "error": "ValueError: mine"}


def test_waiting_ends_when_all_others_said_one_thing_or_the_other() -> None:
    first, second, third = boards(3)
    second.say("ended")
    started = time.monotonic()
    assert first.wait_for_others("knows", "ended", seconds=0.1) == [2]
    assert time.monotonic() - started >= 0.1
    second.report("ValueError: mine")
    third.failure()  # Who reads it knows it.
    assert first.wait_for_others("knows", "ended", seconds=60) == []
    assert first.others_without("came") == [1, 2]


def test_a_watcher_sees_a_failure_while_its_process_does_something_else() -> None:
    first, second = boards(2)
    first.watch()
    assert first.known_failure is None
    second.report("ValueError: mine")
    assert second.wait_for_others("knows", seconds=60) == []
    assert first.known_failure == {"rank": 1, "error": "ValueError: mine"}
    first.close()


def test_a_store_that_is_gone_is_one_without_notices() -> None:
    class Gone(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Broken pipe")

        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    board = NoticeBoard(Gone(), 0, 2)
    board.say("came")
    assert board.failure() is None and board.others_without("came") == [1]
