"""What a client and a server of a split model must have alike, compared when they connect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from peft import PeftConfig

from .comparison import differences
from .cut import Cut
from .fingerprint import ModelFingerprint
from .wire import Wire


# Of an adapter's config, what names places and versions.
_OF_ONE_PARTY = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"})


@dataclass(frozen=True)
class Terms:
    """
    What both parties must have alike. They are compared by value, so that an error can name what differs.

    Args:
        model ([`ModelFingerprint`]): The checkpoint that the parts are from.
        cut ([`~split.Cut`]): Where it is cut.
        wire ([`~split.Wire`]): How states travel.
        adapter (`PeftConfig`, *optional*): What the parts' adapters were made from.
        more (`Mapping[str, Any]`, *optional*): Whatever else has to agree, such as settings of the training, as JSON
            holds it.

    Example:

    ```python
    >>> from peft import LoraConfig
    >>> from hf_federated.split import Cut, Wire
    >>> from hf_federated.split import ModelFingerprint, Terms

    >>> model = ModelFingerprint({"hidden_size": 16}, weight_map="", samples={}, commit="a1b2")
    >>> here = Terms(model, Cut(4), Wire("float32"), LoraConfig(r=8), {"strategy": "serial"})
    >>> there = Terms(model, Cut(4), Wire("bfloat16"), LoraConfig(r=16), {"strategy": "serial"})
    >>> here.differences(there.to_dict())
    ['adapter.r: not given at the server, 16 at the client', "wire.dtype: 'float32' at the server, ... at the client"]
    ```
    """

    model: ModelFingerprint
    cut: Cut
    wire: Wire
    adapter: PeftConfig | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        described = {
            "model": self.model.to_dict(),
            "cut": asdict(self.cut),
            "wire": asdict(self.wire),
            "adapter": None if self.adapter is None else describe_adapter(self.adapter),
            "more": dict(self.more),
        }
        return dict(json.loads(json.dumps(described, default=_as_json)))

    def differences(self, theirs: Any) -> list[str]:
        """
        What a client has otherwise, in words.

        Args:
            theirs (`dict[str, Any]`): What its `to_dict` gave. It is not trusted.

        Raises:
            ValueError: If it is no such thing.
        """
        mine = self.to_dict()
        if not isinstance(theirs, dict) or theirs.keys() != mine.keys():
            raise ValueError(f"Terms have the fields {sorted(mine)}.")
        names = ("at the server", "at the client")
        found = self.model.differences(ModelFingerprint.from_dict(theirs["model"]), names)
        others = [key for key in mine if key != "model"]
        return found + differences({key: mine[key] for key in others}, {key: theirs[key] for key in others}, "", names)


def describe_adapter(config: PeftConfig) -> dict[str, Any]:
    """
    The fields of an adapter's config that are not their defaults, so that versions of PEFT that know more of them
    agree.

    Args:
        config (`PeftConfig`): The config.
    """
    default = type(config)().to_dict()
    given = {key: value for key, value in config.to_dict().items() if key not in _OF_ONE_PARTY}
    return {"peft_type": config.peft_type, **{key: own for key, own in given.items() if own != default.get(key)}}


def _as_json(value: Any) -> Any:
    """What JSON has no form for."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
