"""Whether two parties that hold different parts of a checkpoint hold parts of the same one.

A client opens the files of the first and last blocks, the server those of the others, so no hash of the whole model is
at hand on both sides. What both can know:

- `config.json`, without what changes whenever it is saved;
- which file holds which weight, which is in `model.safetensors.index.json`. Two revisions of one model mostly agree in
  both, so they tell the architecture alone;
- files that both have. A checkpoint in one file is such a file; of one in several, the file in which a block of the
  client's lies beside a block of the server's. A file is compared by its header and by samples of every tensor in it,
  which takes milliseconds, or if both wish by all its bytes;
- the commit, where the checkpoint is from the Hub. It stands for all files, also those that only one party has.

**Found**: other sizes, layers or vocabularies; other weights, if a tensor in a file that both have differs in one of
its samples, which training changes; another commit. **Not found**: a file that both have and whose samples are equal,
such as a few rows set in the middle of an embedding, unless `whole_files` is set; files that only one party has,
unless both know the commit; a party that lies, for nobody can prove here which weights it computes with; adapters and
whatever was trained since. Where the parties have no file in common and not both a commit, nothing is known, and they
are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from .comparison import HERE_AND_THERE, Names, differences, side_by_side


# What saving a config changes although the model is the same.
_VOLATILE = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "use_cache"})
# Read at the start, in the middle and at the end of every tensor.
SAMPLE_BYTES = 1024
# As safetensors' own limit of a header.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class ModelFingerprint:
    """
    What a party can say of the checkpoint that its parts are from. The module says what it finds and what not.

    Args:
        config (`dict[str, Any]`): Of `config.json`.
        weight_map (`str`): Digest of which file holds which weight.
        samples (`dict[str, str]`): By name of a file that is here, the digest of its header and samples.
        whole_files (`dict[str, str]`, *optional*): By name of a file that is here, its SHA-256.
        commit (`str`, *optional*): The revision.

    Example:

    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from hf_federated.split import ModelFingerprint

    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> model.save_pretrained("checkpoint")
    >>> before = ModelFingerprint.from_checkpoint("checkpoint")
    >>> model.model.norm.weight.data += 1
    >>> model.save_pretrained("checkpoint")
    >>> before.differences(ModelFingerprint.from_checkpoint("checkpoint"))
    ["the weights in 'model.safetensors': ... here, ... there"]
    ```
    """

    config: Mapping[str, Any]
    weight_map: str
    samples: Mapping[str, str]
    whole_files: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None

    @classmethod
    def from_checkpoint(
        cls, name: str | os.PathLike[str], *, whole_files: bool = False, commit: str | None = None, **kwargs: Any
    ) -> ModelFingerprint:
        """
        Of the files of a checkpoint that are on this machine. Nothing of its weights is downloaded, so load the parts
        first.

        Args:
            name (`str` or `os.PathLike`): A directory or a Hub id.
            whole_files (`bool`, *optional*, defaults to `False`): Whether to hash all bytes too, about a second for
                each GB. They count where the other party does the same.
            commit (`str`, *optional*): A name for the revision, where it is not from the Hub.
            kwargs: `revision`, `cache_dir`, … of a checkpoint on the Hub, as they were given to load it.

        Raises:
            ValueError: If there is no safetensors file of it here.
        """
        if os.path.isdir(name):
            folder = Path(name)
        else:
            found = cached_file(os.fspath(name), CONFIG_NAME, **kwargs)
            folder = Path(found).parent
            commit = commit or extract_commit_hash(found, None)
        places = _weight_map(folder)
        here = sorted(own for own in set(places.values()) if (folder / own).is_file())
        if not here:
            raise ValueError(f"No weights of {os.fspath(name)} are here. Load this party's parts first.")
        with open(folder / CONFIG_NAME, encoding="utf-8") as file:
            config = {key: value for key, value in json.load(file).items() if key not in _VOLATILE}
        return cls(
            config,
            hashlib.sha256(json.dumps(sorted(places.items())).encode()).hexdigest(),
            {own: _sample(folder / own) for own in here},
            {own: _hash(folder / own) for own in here} if whole_files else {},
            commit,
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Any) -> ModelFingerprint:
        """
        What `to_dict` gave.

        Raises:
            ValueError: If it is anything else.
        """
        kinds = {"config": dict, "weight_map": str, "samples": dict, "whole_files": dict, "commit": str}
        if not isinstance(found, dict) or found.keys() != kinds.keys():
            raise ValueError(f"A fingerprint has the fields {sorted(kinds)}.")
        for name, kind in kinds.items():
            if not (isinstance(found[name], kind) or (name == "commit" and found[name] is None)):
                raise ValueError(f"A fingerprint's {name} is a {kind.__name__}, got {type(found[name]).__name__}.")
        return cls(**found)

    def differences(self, other: ModelFingerprint, names: Names = HERE_AND_THERE) -> list[str]:
        """
        What the other party's checkpoint has otherwise, in words; empty where nothing was found.

        Args:
            other ([`ModelFingerprint`]): The other party's.
            names (`tuple[str, str]`, *optional*): Whose values are whose; by default `"here"` and `"there"`.
        """
        found = differences(self.config, other.config, "config.", names)
        if self.commit is not None and other.commit is not None and self.commit != other.commit:
            found.append(side_by_side("the revision", self.commit, other.commit, names))
        if found:
            return found
        if not self.samples.keys() & other.samples.keys():
            if self.commit is not None and self.commit == other.commit:
                return []
            found = [side_by_side("weight files", sorted(self.samples)[:3], sorted(other.samples)[:3], names)]
            advice = "none is at both, so nothing tells whether they are of one revision: give commit= a common name"
            return [f"{found[0]} ({advice})"]
        if self.weight_map != other.weight_map:
            return [side_by_side("where weights lie", self.weight_map[:12], other.weight_map[:12], names)]
        return _different_files(self.samples, other.samples, names) or _different_files(
            self.whole_files, other.whole_files, names
        )


def _different_files(mine: Mapping[str, str], theirs: Mapping[str, str], names: Names) -> list[str]:
    return [
        side_by_side(f"the weights in {name!r}", mine[name][:12], str(theirs[name])[:12], names)
        for name in sorted(mine.keys() & theirs.keys())
        if mine[name] != theirs[name]
    ]


def _weight_map(folder: Path) -> dict[str, str]:
    """Which file holds a weight; of a checkpoint in one file, `""`."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return {"": SAFE_WEIGHTS_NAME}
    with open(index, encoding="utf-8") as file:
        return dict(json.load(file)["weight_map"])


def _sample(path: Path) -> str:
    """Digest of a safetensors file's header and of bytes of every tensor."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file.")
        header = file.read(length)
        digest = hashlib.sha256(start + header)
        try:
            tensors = [own["data_offsets"] for name, own in json.loads(header).items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is no safetensors file.") from None
        for begin, end in sorted(tensors):
            middle = max(begin, (begin + end - SAMPLE_BYTES) // 2)
            for place in sorted({begin, middle, max(begin, end - SAMPLE_BYTES)}):
                digest.update(_read(file, 8 + length + place, min(SAMPLE_BYTES, end - place)))
    return digest.hexdigest()


def _read(file: BinaryIO, place: int, num_bytes: int) -> bytes:
    file.seek(place)
    return file.read(num_bytes)


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
