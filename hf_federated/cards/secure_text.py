"""Text about secure aggregation: against whom it protects, what it hides, and what the server learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .tables import plural


# Sums that the server learns in addition to those of the parameters. See `RingEncoding`.
SUMMED_FIELDS = (
    "the weights",
    "the numbers of examples, tokens, steps and floating point operations",
    "the losses",
    "the numbers of clipped values",
)


def sent_fields(secure: Mapping[str, Any]) -> str:
    """
    Return what a client sends in place of an update.

    Args:
        secure (`Mapping[str, Any]`):
            The protocol, as `exchanged["secure_aggregation"]` of the record.
    """
    keys = ""
    if secure["masks"]:
        keys = (
            " In addition, each client sent public keys, signatures, shares of its secrets that are encrypted for"
            " other clients, and the shares with which the server removes the masks from the sum."
        )
    masked = " and masks" if secure["masks"] else ""
    return (
        f"It sent the weighted change of these parameters as integers of {secure['bits']} bits{masked}. The server"
        f" added these integers, and learned the sum of the changes and the sums of {_listed(SUMMED_FIELDS)}.{keys}"
    )


def protection_text(secure: Mapping[str, Any]) -> str:
    """
    Return the three sentences of a card: against whom, what is hidden, and what is not.

    Args:
        secure (`Mapping[str, Any]`):
            The protocol, as `exchanged["secure_aggregation"]` of the record.
    """
    shown = (
        "the names of the clients, the times and sizes of messages, and which clients took part; sums of nearly equal"
        " rounds with different clients can be compared, which only differential privacy answers."
    )
    if not secure["masks"]:
        return (
            f"The run used {secure['title']} without masks (`masks=False`), for a simulation. It protected against"
            f" no server. It did not hide the updates, {shown}"
        )
    return (
        f"{_opponent(secure)} The messages hid each client's update, its loss and its counts. They did not hide the"
        f" sum of at least {secure['min_survivors']} updates, {shown}"
    )


def _opponent(secure: Mapping[str, Any]) -> str:
    """Return the sentence that states against whom the protocol protects."""
    protocol = f"Secure aggregation ({secure['title']})"
    if secure["is_simulated"]:
        return f"{protocol} protected against no server, because one launch simulated the server and all clients."
    colluding = f"at most {plural(secure['num_colluding'], 'client')}" if secure["num_colluding"] else "no client"
    if secure["pins"] == "none":
        return (
            f"{protocol} protected against a server that follows the protocol and works with {colluding}; the keys of"
            " the clients were not pinned, so a dishonest server could take the place of clients."
        )
    return (
        f"{protocol} protected against a dishonest server that works with {colluding}; the keys of the clients were"
        " pinned."
    )


def _listed(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"
