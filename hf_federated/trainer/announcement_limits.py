"""`AnnouncementLimits`: the largest numbers of examples that clients on other machines may announce.

A number of examples is the weight of an update in a mean, of a prediction in an ensemble, and of a metric.
The announcement of a client limits the numbers of all its messages ([`ClaimLimits`]). It is itself limited by
`max_examples_per_client` of [`FederatedConfig`], or by the announcements of the other clients. Nothing is clipped: an
announcement is accepted as it is, or refused by name.

With `secure_aggregation`, clients hide their numbers, and `max_weight` of the protocol limits the weights. Each client
still compares its own numbers with `max_examples_per_client`.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..clients.limits import update_limits
from ..clients.sampling import limit_examples
from ..messages import Announcement
from ..utils.errors import UserError
from .setup import FederationSetup


# Largest ratio of an announced number to the median of the other clients.
MAX_RATIO = 10
# Number of clients of a federation from which their announcements are compared.
MIN_CLIENTS = 3
# Number of clients that an error names.
_MAX_SHOWN = 3

FIELD = "max_examples_per_client"


class AnnouncementError(UserError, ValueError):
    """A client announced more examples than the settings, or the numbers of the other clients, allow."""


class AnnouncedNumber(NamedTuple):
    """
    A number that a client announces.

    Args:
        text (`str`): The number with its name, for an error.
        number (`int`): The number of examples.
        weight (`float`): What is compared between clients. 0 if nothing is compared.
    """

    text: str
    number: int
    weight: float


class AnnouncementLimits:
    """
    Decides which announcements of clients on other machines are refused.

    A client that has been accepted stays accepted, so that a client that joins later cannot exclude it.

    Args:
        setup ([`FederationSetup`]): The arguments of the server's trainer.
    """

    def __init__(self, setup: FederationSetup) -> None:
        self._setup = setup
        self._accepted: dict[str, Announcement] = {}
        self._has_started = False

    def refused(self, announced: Mapping[str, Announcement], client_id: str) -> dict[str, str]:
        """
        Return the clients to refuse when a client has joined, with the reasons.

        Before [`~AnnouncementLimits.start`], a client is compared with `max_examples_per_client` only.

        Args:
            announced (`Mapping[str, Announcement]`): The announcements of all clients.
            client_id (`str`): Id of the client that has joined.
        """
        own = announced[client_id]
        problem = _visibility_problem(self._setup, client_id, own) or agreed_problem(self._setup, client_id, own)
        if problem is not None:
            return {client_id: problem}
        if not self._has_started:
            return {}
        outliers = self._outliers(announced, new=[client_id])
        self._accept({name: value for name, value in announced.items() if name not in outliers})
        return {name: f"{problem} {self._remedy(announced)}" for name, problem in outliers.items()}

    def start(self, announced: Mapping[str, Announcement]) -> None:
        """
        Compare the announcements of all clients before the first round.

        Args:
            announced (`Mapping[str, Announcement]`): The announcements.

        Raises:
            AnnouncementError: If a number is much larger than those of the other clients. The message names the
                clients, the numbers, and the field that allows them.
        """
        if outliers := self._outliers(announced, new=announced):
            shown = " ".join(list(outliers.values())[:_MAX_SHOWN])
            more = f" So did {len(outliers) - _MAX_SHOWN} more clients." if len(outliers) > _MAX_SHOWN else ""
            raise AnnouncementError(f"{shown}{more} {self._remedy(announced)}")
        self._accept(announced)
        self._has_started = True

    def state_dict(self) -> dict[str, Any]:
        """Return the accepted announcements, for a checkpoint."""
        return {client_id: dict(vars(announced)) for client_id, announced in self._accepted.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the accepted announcements. A client that announces the same numbers again stays accepted."""
        self._accepted = {client_id: Announcement(**fields) for client_id, fields in state.items()}

    def _accept(self, announced: Mapping[str, Announcement]) -> None:
        """Accept clients. Without two other clients, a client is compared again when further clients join."""
        if _is_number(self._setup) or len({*self._accepted, *announced}) >= MIN_CLIENTS:
            self._accepted |= announced

    def _outliers(self, announced: Mapping[str, Announcement], new: Collection[str]) -> dict[str, str]:
        """The clients with a much larger number than the other clients, and a sentence about each of them."""
        if self._setup.hides_counts or _is_number(self._setup) or len(self._setup.clients) < MIN_CLIENTS:
            return {}
        known = {**self._accepted, **announced}
        numbers = {client_id: announced_numbers(self._setup, known[client_id]) for client_id in known}
        outliers: dict[str, str] = {}
        for client_id in announced:
            # The number of dropped examples is no weight. Earlier checkpoints do not have it.
            both = (self._accepted.get(client_id), announced[client_id])
            before, now = (each and replace(each, num_dropped_examples=None) for each in both)
            if before == now:
                continue
            # One other client is not enough to refuse a client that has taken part.
            min_others = 1 if client_id in new else MIN_CLIENTS - 1
            for field, own in numbers[client_id].items():
                others = [
                    found[field].weight
                    for name, found in numbers.items()
                    if name != client_id and field in found and found[field].weight > 0
                ]
                if len(others) >= min_others and own.weight > MAX_RATIO * (median := statistics.median(others)):
                    outliers.setdefault(
                        client_id,
                        f"Client {client_id!r} announced {own.text}, which is more than {MAX_RATIO} times "
                        f"the median of the other clients, {median:g}.",
                    )
        return outliers

    def _remedy(self, announced: Mapping[str, Announcement]) -> str:
        """What to do about a number that is much larger than those of the other clients."""
        numbers = (announced_numbers(self._setup, value).values() for value in announced.values())
        largest = max(each.number for found in numbers for each in found)
        return (
            f"If the number is right, set {FIELD}={largest} in the FederatedConfig of all parties. Otherwise, run "
            "without this client."
        )


def _is_number(setup: FederationSetup) -> bool:
    """Whether the parties agreed to one number, which replaces the comparison of the clients."""
    return isinstance(setup.config.max_examples_per_client, int)


def _visibility_problem(setup: FederationSetup, client_id: str, announced: Announcement) -> str | None:
    """Return why a client is refused that hides its numbers, or does not, unlike the settings of the server."""
    if announced.hides_counts == setup.hides_counts:
        return None
    if setup.hides_counts:
        found = f"announced {announced.shown_counts() or 'a stream'}, but with `secure_aggregation` clients hide it"
    else:
        found = "hides its numbers of examples, but the server uses no `secure_aggregation`"
    return f"Client {client_id!r} {found}. Set `secure_aggregation` to the same value for all parties."


def announced_numbers(setup: FederationSetup, announced: Announcement) -> dict[str, AnnouncedNumber]:
    """
    Return the numbers of an announcement that become weights, by field.

    The number of examples of a class is limited by `num_encoded_examples`. The examples of a round are the weight of a
    stream, and limit the tokens of an update if `local_steps` is set. A limit of the examples of a round also limits
    the weights. Numbers of the examples of each client (`partition.json`) leave open how many examples the encoding
    makes of one, so this ratio is then compared.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        announced ([`Announcement`]): What the client announces.
    """
    config, steps = setup.config, setup.config.local_steps
    num_raw, num_encoded, per_step = (
        announced.num_examples,
        announced.num_encoded_examples,
        announced.examples_per_step,
    )
    # With `balance`, a buffer of updates can contain those of several cohorts.
    is_balanced = config.balance is not None and not setup.collector.holds_requests
    found: dict[str, AnnouncedNumber] = {}
    if num_raw is not None and num_encoded is not None:
        for field, number in (("num_examples", num_raw), ("num_encoded_examples", num_encoded)):
            weight = 0 if is_balanced else limit_examples(number, config.max_rows_per_round)
            found[field] = AnnouncedNumber(f"{field}={number}", number, weight)
        if isinstance(config.max_examples_per_client, dict):
            ratio = 0.0 if is_balanced else num_encoded / max(num_raw, 1)
            text = f"num_encoded_examples={num_encoded} for num_examples={num_raw}, a ratio of {ratio:g}"
            found["num_examples"] = found["num_examples"]._replace(weight=0)
            found["num_encoded_examples"] = AnnouncedNumber(text, num_encoded, ratio)
    elif steps is not None:
        number = update_limits(None, config.local_epochs, steps, per_step).num_examples or 0
        text = f"examples_per_step={per_step} of a stream, and thereby up to {number} examples in local_steps={steps}"
        found["num_encoded_examples"] = AnnouncedNumber(text, number, number)
    if setup.aggregation.weighting == "tokens" and steps is not None:
        number = steps * per_step
        text = f"examples_per_step={per_step}, and thereby {number} examples in local_steps={steps}"
        found["examples_per_step"] = AnnouncedNumber(text, number, number)
    if config.evaluate_clients:
        number = announced.num_eval_examples
        found["num_eval_examples"] = AnnouncedNumber(f"num_eval_examples={number}", number, number)
    return found


def agreed_problem(setup: FederationSetup, client_id: str, announced: Announcement) -> str | None:
    """
    Compare an announcement with `max_examples_per_client`, which all parties know.

    Args:
        setup ([`FederationSetup`]): The arguments of the trainer.
        client_id (`str`): Id of the client.
        announced ([`Announcement`]): What the client announces.

    Returns:
        `str`, *optional*: Why the client is refused.
    """
    limit: Any = setup.config.max_examples_per_client
    if limit is None or announced.hides_counts:
        return None
    numbers = announced_numbers(setup, announced)
    if not isinstance(limit, dict):
        too_large = [each for each in numbers.values() if each.number > limit]
        if not too_large:
            return None
        largest = max(each.number for each in too_large)
        return (
            f"Client {client_id!r} announced {too_large[0].text}, but {FIELD}={limit}. If the number is right, set "
            f"{FIELD} to at least {largest} for all parties."
        )
    allowed, number = limit.get(client_id), announced.num_examples
    if allowed is not None and number is not None and number <= allowed:
        return None
    found = "a stream" if number is None else f"num_examples={number}"
    listed = "does not list the client" if allowed is None else f"lists {allowed} examples of the client"
    return (
        f"Client {client_id!r} announced {found}, but {FIELD} {listed}. Correct {FIELD} for all parties, or set it to "
        "one number for all clients."
    )
