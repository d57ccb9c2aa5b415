"""Settings that the client and the server of a split model must share. The server compares them on connection."""

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


# Fields of an adapter config that contain paths and versions, which may differ between parties.
_PARTY_SPECIFIC = frozenset({"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"})


@dataclass(frozen=True)
class SplitSessionConfig:
    """
    Settings that both parties of a session must share. A comparison by value lets errors name each difference.

    Args:
        model ([`ModelFingerprint`]): Fingerprint of the checkpoint from which the parts were loaded.
        cut ([`~split.Cut`]): The cuts of the model.
        wire ([`~split.Wire`]): The wire format of hidden states and gradients.
        adapter (`PeftConfig`, *optional*): The config of the parts' adapters.
        more (`Mapping[str, Any]`, *optional*):
            Further settings that must agree, such as training settings. The values must be JSON values.

    Example:

    ```python
    >>> from peft import LoraConfig
    >>> from hf_federated.split import Cut, Wire
    >>> from hf_federated.split import ModelFingerprint, SplitSessionConfig

    >>> model = ModelFingerprint({"hidden_size": 16}, weight_map="", samples={}, commit="a1b2")
    >>> server = SplitSessionConfig(model, Cut(4), Wire("float32"), LoraConfig(r=8), {"strategy": "serial"})
    >>> client = SplitSessionConfig(model, Cut(4), Wire("bfloat16"), LoraConfig(r=16), {"strategy": "serial"})
    >>> server.differences(client.to_dict())
    ['adapter.r: not given at the server, 16 at the client', "wire.dtype: 'float32' at the server, ... at the client"]
    ```
    """

    model: ModelFingerprint
    cut: Cut
    wire: Wire
    adapter: PeftConfig | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert the settings to JSON values."""
        described = {
            "model": self.model.to_dict(),
            "cut": asdict(self.cut),
            "wire": asdict(self.wire),
            "adapter": None if self.adapter is None else describe_adapter(self.adapter),
            "more": dict(self.more),
        }
        return dict(json.loads(json.dumps(described, default=as_json)))

    def differences(self, theirs: Any, is_client: bool = False) -> list[str]:
        """
        List the settings in which the client differs from the server, one message per setting.

        Args:
            theirs (`dict[str, Any]`): The other party's `to_dict()`. It is untrusted input.
            is_client (`bool`, *optional*, defaults to `False`): Whether this party is the client.

        Raises:
            ValueError: If `theirs` is not the output of `to_dict()`.
        """
        settings = self.to_dict()
        if not isinstance(theirs, dict) or theirs.keys() != settings.keys():
            raise ValueError(f"A session config must be a dictionary with the fields {sorted(settings)}.")
        names = ("at the client", "at the server") if is_client else ("at the server", "at the client")
        found = self.model.differences(ModelFingerprint.from_dict(theirs["model"]), names)
        ours, others = ({**values, "model": None} for values in (settings, theirs))
        return found + differences(ours, others, "", names)


def describe_adapter(config: PeftConfig) -> dict[str, Any]:
    """
    Return the fields of an adapter config that differ from their defaults.

    Fields with default values are left out, so that configs of different PEFT versions agree even if one version has
    additional fields.

    Args:
        config (`PeftConfig`): The adapter config.
    """
    default = type(config)().to_dict()
    given = {key: value for key, value in config.to_dict().items() if key not in _PARTY_SPECIFIC}
    return {"peft_type": config.peft_type, **{key: value for key, value in given.items() if value != default.get(key)}}


def as_json(value: Any) -> Any:
    """Convert a value that JSON does not support. Sets are sorted, so that a digest is reproducible."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
