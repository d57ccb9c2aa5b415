"""Fields of configurations with a help text for the command line.

`transformers.hf_argparser.HfArg` declares such fields, too. Its import takes half a second, which is ten times as long
as the import of a configuration.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, **metadata: Any) -> Any:
    """
    Declare a field of a dataclass that `HfArgumentParser` parses.

    Args:
        default (`Any`): The default value, not a list or a dictionary.
        help (`str`): The help text.
        metadata: Further arguments of the option, such as `choices`.

    Example:

    ```python
    >>> from dataclasses import dataclass, fields
    >>> from hf_federated.utils.options import option

    >>> @dataclass
    ... class Settings:
    ...     device: str = option("cpu", "Device of the model.", choices=["cpu", "cuda"])

    >>> Settings(), fields(Settings)[0].metadata["help"]
    (Settings(device='cpu'), 'Device of the model.')
    ```
    """
    return field(default=default, metadata={"help": help, **metadata})
