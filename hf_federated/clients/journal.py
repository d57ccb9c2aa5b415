"""`ClientJournal`: what a client has agreed to for good, in a file that no server can set back.

The server chooses the state to which a client returns ([`~hf_federated.clients.state_history.StateHistory`]). A client
that kept its consents in this state could be made to forget them, so the journal is outside of the states, and entries
are only appended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any

from ..utils.errors import UserError
from ..utils.fields import Constraint, Count, PositiveCount, ShortText, check_fields, check_values, describe
from ..utils.journal import Journal


JOURNAL_FILE = "journal.jsonl"
# Name of the class of an entry in the file.
_KIND = "kind"


class ConsentError(ValueError):
    """A client is asked to agree to a second sum of the updates of a round."""


class JournalError(UserError, ValueError):
    """The journal of a client is damaged. The message names the file and what to do."""


class _Sha256(Constraint):
    """A SHA-256 digest in hexadecimal."""

    def problem(self, value: Any) -> str | None:
        if re.fullmatch(r"[0-9a-f]{64}", value):
            return None
        return f"is {describe(value)}, expected a SHA-256 digest of 64 hexadecimal digits"


Sha256 = Annotated[str, _Sha256()]


@dataclass(frozen=True)
class FitNoted:
    """
    A client has answered a request of local training with keys of secure aggregation.

    Args:
        client_id (`str`): Id of the client.
        run (`str`): Id of the run.
        round (`int`): The round, from 0.
        fit_digest (`str`): SHA-256 of the request, without what differs between clients.
    """

    client_id: ShortText
    run: ShortText
    round: Count
    fit_digest: Sha256


@dataclass(frozen=True)
class Consent:
    """
    A client has agreed that the updates of a set of clients are summed, and has signed the set.

    Args:
        client_id (`str`): Id of the client.
        round (`int`): The round, from 0.
        fit_digest (`str`): SHA-256 of the request of local training, without what differs between clients.
        survivors_digest (`str`): SHA-256 of the ids of the clients in the sum.
        num_survivors (`int`): Number of these clients.
    """

    client_id: ShortText
    round: Count
    fit_digest: Sha256
    survivors_digest: Sha256
    num_survivors: PositiveCount


# The classes of entries, by their names in the file. A later class adds its line here.
_ENTRIES: dict[str, type[FitNoted] | type[Consent]] = {"fit": FitNoted, "consent": Consent}
_NAMES = {cls: name for name, cls in _ENTRIES.items()}


class ClientJournal:
    """
    What clients have agreed to. An entry is on disk when the method that adds it returns.

    The consents of all runs count, because a server may call a run, a round or a session what it likes. The digest of
    a request identifies what was summed: it covers the round, the settings and the parameters.

    The noted requests are those of one run. The client chooses the id of a run (`RequestRecord.run`), so the server
    cannot change it. A run has a new id after a complete run, with another agreement, and if the owner of the client
    deletes `requests.jsonl` to agree to a new run. The settings cannot be the id, because a second run with the same
    settings may train again.

    Args:
        folder (`pathlib.Path`, *optional*): Folder of the file, `state_dir` of the client. By default, the journal is
            in memory, as for simulated clients. One journal may have the entries of several clients.
        run (`str`, *optional*): Id of the run.
        writes (`bool`, *optional*, defaults to `True`): Whether this process writes the file.
        saved (`list[dict[str, Any]]`, *optional*): Entries of the file ([`read_journal`]), so that all processes
            decide alike. By default, the process reads the file.

    Attributes:
        run (`str`): Id of the run. It may be set once the record of requests is open.

    Raises:
        JournalError: If the file is damaged.

    Example:

    ```python
    >>> from hf_federated.clients.journal import ClientJournal

    >>> journal = ClientJournal()
    >>> journal.add_consent("north", round=0, fit_digest="0" * 64, survivors_digest="1" * 64, num_survivors=5)
    >>> journal.add_consent("north", round=0, fit_digest="0" * 64, survivors_digest="2" * 64, num_survivors=4)
    Traceback (most recent call last):
    ...
    hf_federated.clients.journal.ConsentError: Round 1: client 'north' has agreed to the sum of 5 clients, ...
    ```
    """

    def __init__(
        self,
        folder: Path | None = None,
        run: str = "",
        writes: bool = True,
        saved: list[dict[str, Any]] | None = None,
    ) -> None:
        self._journal = None if folder is None else Journal(folder / JOURNAL_FILE)
        self.run, self._writes = run, writes
        # The requests of local training by run, client and round, and the consents by client and request.
        self._fits: dict[tuple[str, str, int], str] = {}
        self._consents: dict[tuple[str, str], Consent] = {}
        if folder is not None:
            for entry in _entries(folder, read_journal(folder) if saved is None else saved):
                self._keep(entry)

    def note_fit(self, client_id: str, round: int, fit_digest: str) -> None:
        """
        Note a request of local training before the client answers it with keys.

        Args:
            client_id (`str`): Id of the client.
            round (`int`): The round, from 0.
            fit_digest (`str`): SHA-256 of the request, without what differs between clients.

        Raises:
            ConsentError: If the client has answered another request in this round of the run.
        """
        earlier = self.fit_digest(client_id, round)
        if earlier is None:
            self._add(FitNoted(client_id, self.run, round, fit_digest))
        elif earlier != fit_digest:
            raise ConsentError(
                f"Round {round + 1}: client {client_id!r} has answered a request of local training with other content "
                "in this run. A client trains once in a round. Resume the run with the same settings, or start a new "
                "run."
            )

    def fit_digest(self, client_id: str, round: int) -> str | None:
        """
        Return the digest of the noted request of a round of this run.

        Args:
            client_id (`str`): Id of the client.
            round (`int`): The round, from 0.
        """
        return self._fits.get((self.run, client_id, round))

    def add_consent(
        self, client_id: str, round: int, fit_digest: str, survivors_digest: str, num_survivors: int
    ) -> None:
        """
        Add a consent before the client signs it. The same consent may be given again.

        Args:
            client_id, round, fit_digest, survivors_digest, num_survivors: See [`Consent`].

        Raises:
            ConsentError: If the client has agreed to the sum of other clients for the same request.
        """
        consent = Consent(client_id, round, fit_digest, survivors_digest, num_survivors)
        earlier = self.consent(client_id, fit_digest)
        if earlier is None:
            self._add(consent)
        elif earlier != consent:
            raise ConsentError(
                f"Round {round + 1}: client {client_id!r} has agreed to the sum of {earlier.num_survivors} clients, "
                f"and refuses a second sum, of {num_survivors} clients, because the difference of two sums can be one "
                "update. Start a new run with another `federation_seed`."
            )

    def consent(self, client_id: str, fit_digest: str) -> Consent | None:
        """
        Return the consent of a client to a sum of updates, from any run.

        Args:
            client_id (`str`): Id of the client.
            fit_digest (`str`): SHA-256 of the request of local training.
        """
        return self._consents.get((client_id, fit_digest))

    def _add(self, entry: FitNoted | Consent) -> None:
        check_fields(entry, f"Journal of client {entry.client_id!r}: ")
        if self._journal is not None and self._writes:
            self._journal.append([{_KIND: _NAMES[type(entry)], **asdict(entry)}])
        self._keep(entry)

    def _keep(self, entry: FitNoted | Consent) -> None:
        if isinstance(entry, Consent):
            self._consents.setdefault((entry.client_id, entry.fit_digest), entry)
        else:
            self._fits.setdefault((entry.run, entry.client_id, entry.round), entry.fit_digest)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """
    Read the entries of a journal as they are in the file. An incomplete last line is ignored.

    Args:
        folder (`pathlib.Path`): Folder of the file. It need not exist.

    Raises:
        JournalError: If the file is damaged.
    """
    try:
        return Journal(folder / JOURNAL_FILE).read()
    except ValueError as error:
        raise _damaged(str(error)) from error


def _entries(folder: Path, saved: Iterable[Mapping[str, Any]]) -> Iterable[FitNoted | Consent]:
    where = f"{str(folder / JOURNAL_FILE)!r} is damaged: "
    for fields in saved:
        values = dict(fields)
        cls = _ENTRIES.get(str(values.pop(_KIND, None)))
        if cls is None:
            kind = describe(fields.get(_KIND))
            raise _damaged(
                f"{where}an entry has the kind {kind}; known are {', '.join(_ENTRIES)}. A later version of the "
                "library may have written it; then use this version."
            )
        if values.keys() != {field.name for field in dataclass_fields(cls)}:
            raise _damaged(f"{where}an entry of the kind {_NAMES[cls]!r} has the fields {describe(values)}.")
        try:
            check_values(cls, values, where)
        except ValueError as error:
            raise _damaged(str(error)) from error
        yield cls(**values)


def _damaged(reason: str) -> JournalError:
    return JournalError(
        f"{reason} The file contains the sums of updates that this client has agreed to. Restore the file from a "
        "backup. Without a backup, use another `state_dir`, and join only runs with another `federation_seed`."
    )
