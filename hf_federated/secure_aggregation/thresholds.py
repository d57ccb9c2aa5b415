"""Thresholds of protocols in which all clients share their secrets with each other."""

from __future__ import annotations


def threshold_for(num_clients: int, threshold: int | None, num_colluding: int) -> int:
    """
    Return the number of survivors that the server needs to remove the masks.

    A threshold above `(num_clients + num_colluding) / 2` gives any two sets of survivors an honest client in common.
    An honest client signs one set, so a dishonest server cannot obtain signatures for two sets.

    Args:
        num_clients (`int`): Number of clients.
        threshold (`int`, *optional*): The setting of a protocol. Defaults to `⌊2m/3⌋ + 1` of `m` clients, or more if
            `num_colluding` needs more.
        num_colluding (`int`): Number of clients that may work with a dishonest server.

    Raises:
        ValueError: If there are too few clients for the settings.
    """
    # The clients that work with the server subtract their own updates from the sum. At least two others remain.
    smallest = max((num_clients + num_colluding) // 2, num_colluding + 1) + 1
    if threshold is None:
        threshold = max(2 * num_clients // 3 + 1, smallest)
    if threshold > num_clients:
        raise ValueError(
            f"threshold={threshold} is above the {num_clients} clients that share secrets. Use more clients, "
            "or lower `threshold` or `num_colluding`."
        )
    if threshold < smallest:
        raise ValueError(
            f"threshold={threshold} of {num_clients} clients does not protect against a dishonest server with "
            f"num_colluding={num_colluding} clients. Set `threshold` to at least {smallest}, or lower "
            "`num_colluding`."
        )
    return threshold
