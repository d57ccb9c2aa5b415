"""`RecordedOutcomes`: which clients replied to each request of a run, so that a resumed run uses the same replies.

A client answers a request of an earlier round again only if the request has the same content. A deadline or a lost
connection decides which updates a round contains, and so the content of all later requests. A resumed run must
therefore repeat these decisions.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..utils.fields import Count, check_values
from ..utils.journal import Journal
from .requests import OpenRequest


logger = logging.get_logger(__name__)

FILE_NAME = "outcomes.jsonl"


@dataclass(frozen=True)
class Outcome:
    """
    What became of a request.

    Args:
        round (`int`): Round of the request, from 0.
        client_id (`str`): Id of the client.
        failure (`str`, *optional*): Why the round did not use a reply of the client. `None` if the client replied.
    """

    round: Count
    client_id: str
    failure: str | None = None


class RecordedOutcomes:
    """
    The outcomes of the requests of a run, in the order in which the server used them.

    An outcome is written before the next request is sent. The outcomes of a round that fails are therefore not
    repeated, because no client received a consequence of them.

    Args:
        folder (`pathlib.Path`, *optional*): Folder of the file. By default, nothing is written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._journal = None if folder is None else Journal(folder / FILE_NAME)
        # The outcomes of the interrupted run that are not yet repeated, and the outcomes that are not yet written.
        self._recorded: deque[Outcome] = deque()
        self._new: list[Outcome] = []
        self._is_resumed = False
        # Number of outcomes that the run has used.
        self.num_used = 0

    def resume(self, num_used: int) -> None:
        """
        Read the outcomes of the interrupted run. Without this call, a run starts with an empty file.

        Args:
            num_used (`int`): `num_used` when the checkpoint was written.

        Raises:
            ValueError: If the file is damaged.
        """
        self._is_resumed = True
        self.num_used = num_used
        self._recorded.extend(self._read()[num_used:])

    def skip(self, round: int) -> None:
        """
        Count the recorded outcomes of a round as used. A resumed run does not ask the clients of the round again.

        Args:
            round (`int`): Round number, from 0.
        """
        num_before = len(self._recorded)
        self._recorded = deque(each for each in self._recorded if each.round != round)
        self.num_used += num_before - len(self._recorded)

    def next_client(self) -> str | None:
        """Return the client whose outcome the interrupted run used next, `None` after its last outcome."""
        return self._recorded[0].client_id if self._recorded else None

    def recorded(self, round: int, client_id: str) -> Outcome | None:
        """
        Return the recorded outcome of a request that is now repeated.

        Args:
            round (`int`): Round of the request, from 0.
            client_id (`str`): Id of the client.
        """
        return next((each for each in self._recorded if (each.round, each.client_id) == (round, client_id)), None)

    def failure(self, round: int, client_id: str) -> str | None:
        """Return why the interrupted run did not use a reply to a request that is now repeated."""
        outcome = self.recorded(round, client_id)
        return None if outcome is None else outcome.failure

    def awaits(self, requests: Mapping[str, OpenRequest]) -> bool:
        """
        Whether the interrupted run used the reply to one of the open requests.

        Args:
            requests (`Mapping[str, OpenRequest]`): The open requests, by client id.
        """
        replied = [each for each in self._recorded if each.failure is None and each.client_id in requests]
        return any(requests[each.client_id].round == each.round for each in replied)

    def add(self, outcome: Outcome) -> None:
        """
        Add the outcome of a request. If it differs from the recorded one, the other recorded outcomes are dropped.

        Args:
            outcome ([`Outcome`]): The outcome.
        """
        self.num_used += 1
        earlier = self.recorded(outcome.round, outcome.client_id)
        if earlier is None:
            self._new.append(outcome)
            return
        if (earlier.failure is None) == (outcome.failure is None):
            self._recorded.remove(earlier)
            return
        logger.warning(
            f"Round {outcome.round + 1} differs from the interrupted run: {_described(earlier)} then, and "
            f"{_described(outcome)} now. Clients refuse requests of later rounds that they have answered with other "
            "values."
        )
        # The last outcomes of the file are the recorded ones, in another order within a round.
        dropped, kept = Counter(self._recorded), list[Outcome]()
        for each in reversed(self._read()):
            if dropped[each]:
                dropped[each] -= 1
            else:
                kept.append(each)
        self._recorded.clear()
        self._new = [*reversed(kept), *self._new, outcome]
        self._is_resumed = False

    def write(self) -> None:
        """Write the new outcomes to the file. When the method returns, they are on disk."""
        if self._journal is None:
            return
        if self._is_resumed and self._new:
            self._journal.append(map(asdict, self._new))
        elif not self._is_resumed and (self._new or self._journal.path.exists()):
            self._journal.replace(map(asdict, self._new))
        self._new.clear()
        self._is_resumed = True

    def _read(self) -> list[Outcome]:
        journal = self._journal
        return [] if journal is None else [_outcome_of(entry, journal.path) for entry in journal.read()]


def _described(outcome: Outcome) -> str:
    name = f"client {outcome.client_id!r}"
    return f"{name} replied" if outcome.failure is None else f"the round did not use {name} ({outcome.failure})"


def _outcome_of(entry: dict[str, Any], path: Path) -> Outcome:
    where = f"{str(path)!r} is damaged: "
    if entry.keys() != {"round", "client_id", "failure"}:
        raise ValueError(f"{where}{entry} is not an outcome. Start a new run.")
    check_values(Outcome, entry, where)
    return Outcome(**entry)
