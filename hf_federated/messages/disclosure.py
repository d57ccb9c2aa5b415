"""`Disclosure`: a value that leaves a client, as data for the model card."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Disclosure:
    """
    A value that leaves a client in addition to parameters, predictions and the fields of an update. The model card
    lists it.

    Args:
        value (`str`): Noun phrase for the value.
        per (`str`): What one value belongs to, such as `"public example"` or `"client"`.
        recipient (`str`, *optional*, defaults to `"server"`): The party that receives it.
        dp_epsilon (`float`, *optional*): `ε` of the differential privacy of the value.
        dp_delta (`float`, *optional*): `δ` of the differential privacy of the value.

    Example:

    ```python
    >>> from hf_federated.messages import Disclosure

    >>> Disclosure("number of examples", per="class").recipient
    'server'
    ```
    """

    value: str
    per: str
    recipient: str = "server"
    dp_epsilon: float | None = None
    dp_delta: float | None = None
