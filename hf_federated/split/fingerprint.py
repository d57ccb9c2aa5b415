"""Fingerprint of a checkpoint, which shows whether two parties hold parts of the same checkpoint.

A client opens the files of the first and last blocks, and the server opens the files of the other blocks. Neither
party has all files, so they cannot compare a hash of the full model. They compare:

- `config.json`, without the settings that change when a config is saved;
- the weight map from `model.safetensors.index.json`, which lists the file of each weight. Two revisions of a model
  usually have the same config and the same weight map, so these two identify only the architecture;
- the files that both parties have: the only file of an unsharded checkpoint, or the shards that contain both client
  blocks and server blocks. A file is compared by its header and by samples of every tensor in it, which takes
  milliseconds. If both parties request it, all bytes of the file are compared;
- the commit of a checkpoint from the Hub. It identifies all files, including the files that only one party has.

**Detected**:

- different sizes, layers or vocabularies;
- different weights, if a tensor in a shared file differs in one of its samples, as it does after training;
- a different commit.

**Not detected**:

- changes in a shared file that leave the samples equal, such as a few changed rows in the middle of an embedding,
  unless `whole_files` is set;
- changes in files that only one party has, unless both parties know the commit;
- a dishonest party, because a fingerprint does not prove which weights the party uses;
- adapters, and training after the checkpoint was saved.

If the parties have no file in common and at least one party has no commit, the checkpoints cannot be compared, and the
comparison reports a difference.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from ..utils.file_hash import sha256_of_file
from ..utils.untrusted_json import MAX_FILE_VALUES, parse_json, read_json_object
from .comparison import LOCAL_AND_REMOTE, PartyNames, differences, format_difference
from .loading import read_weight_index


# Settings that change when a config is saved, although the model is the same.
_VOLATILE = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "use_cache"})
# Number of bytes to read at the start, in the middle and at the end of every tensor.
SAMPLE_BYTES = 1024
# The maximum header size of the safetensors format.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class ModelFingerprint:
    """
    Fingerprint of the checkpoint from which a party loaded its parts.

    The module docstring of `fingerprint.py` lists the differences that a comparison detects.

    Args:
        config (`dict[str, Any]`): Settings of `config.json`.
        weight_map (`str`): Digest of the map from weight names to file names.
        samples (`dict[str, str]`): Digest of the header and the samples of each local file, by file name.
        whole_files (`dict[str, str]`, *optional*): SHA-256 of each local file, by file name.
        commit (`str`, *optional*): The revision of the checkpoint.

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
    ["the weights in 'model.safetensors': ... locally, ... remotely"]
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
        Compute the fingerprint from the files of a checkpoint that are on this machine.

        This method does not download weights. Load the party's parts first.

        Args:
            name (`str` or `os.PathLike`): A directory or a Hub id.
            whole_files (`bool`, *optional*, defaults to `False`):
                Whether to also hash all bytes of the files, which takes about one second per GB. The hashes are
                compared only if both parties set `whole_files`.
            commit (`str`, *optional*): A name for the revision of a checkpoint that is not from the Hub.
            kwargs: `revision`, `cache_dir`, … with the values that were used to load the checkpoint from the Hub.

        Raises:
            ValueError: If this machine has no safetensors file of the checkpoint, or a file is damaged.
        """
        if os.path.isdir(name):
            folder = Path(name)
        else:
            config_file = cached_file(os.fspath(name), CONFIG_NAME, **kwargs)
            folder = Path(config_file).parent
            commit = commit or extract_commit_hash(config_file, None)
        weight_map = _weight_map(folder)
        local_files = sorted(file_name for file_name in set(weight_map.values()) if (folder / file_name).is_file())
        if not local_files:
            raise ValueError(f"This machine has no weights of {os.fspath(name)}. Load this party's parts first.")
        config = read_json_object(folder / CONFIG_NAME)
        return cls(
            {key: value for key, value in config.items() if key not in _VOLATILE},
            hashlib.sha256(json.dumps(sorted(weight_map.items())).encode()).hexdigest(),
            {file_name: _sample(folder / file_name) for file_name in local_files},
            {file_name: sha256_of_file(folder / file_name) for file_name in local_files} if whole_files else {},
            commit,
        )

    def to_dict(self) -> dict[str, Any]:
        """Convert the fingerprint to JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> ModelFingerprint:
        """
        Restore a fingerprint from the output of `to_dict`.

        Raises:
            ValueError: If `values` is not the output of `to_dict`.
        """
        kinds = {"config": dict, "weight_map": str, "samples": dict, "whole_files": dict, "commit": str}
        if not isinstance(values, dict) or values.keys() != kinds.keys():
            raise ValueError(f"A fingerprint must be a dictionary with the fields {sorted(kinds)}.")
        for name, kind in kinds.items():
            if not (isinstance(values[name], kind) or (name == "commit" and values[name] is None)):
                raise ValueError(
                    f"{name} of a fingerprint must be {kind.__name__}, but is {type(values[name]).__name__}."
                )
        return cls(**values)

    def differences(self, other: ModelFingerprint, names: PartyNames = LOCAL_AND_REMOTE) -> list[str]:
        """
        List the detected differences between this party's and the other party's checkpoint.

        Args:
            other ([`ModelFingerprint`]): The other party's fingerprint.
            names (`tuple[str, str]`, *optional*, defaults to `("locally", "remotely")`):
                The words that follow this party's values and the other party's values.
        """
        found = differences(self.config, other.config, "config.", names)
        if self.commit is not None and other.commit is not None and self.commit != other.commit:
            found.append(format_difference("the revision", self.commit, other.commit, names))
        if found:
            return found
        if not self.samples.keys() & other.samples.keys():
            if self.commit is not None and self.commit == other.commit:
                return []
            files = format_difference("weight files", sorted(self.samples)[:3], sorted(other.samples)[:3], names)
            return [
                f"{files} (the parties have no file in common, so their revisions cannot be compared: pass the same "
                "commit= on both sides)"
            ]
        if self.weight_map != other.weight_map:
            return [format_difference("the weight map", self.weight_map[:12], other.weight_map[:12], names)]
        return _different_files(self.samples, other.samples, names) or _different_files(
            self.whole_files, other.whole_files, names
        )


def _different_files(local: Mapping[str, str], remote: Mapping[str, str], names: PartyNames) -> list[str]:
    return [
        format_difference(f"the weights in {name!r}", local[name][:12], str(remote[name])[:12], names)
        for name in sorted(local.keys() & remote.keys())
        if local[name] != remote[name]
    ]


def _weight_map(folder: Path) -> dict[str, str]:
    """Map weight names to file names. An unsharded checkpoint has the single key `""`."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return {"": SAFE_WEIGHTS_NAME}
    return read_weight_index(index)


def _sample(path: Path) -> str:
    """Compute the digest of a safetensors file's header and of sampled bytes of every tensor."""
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        # A file of another format can start with any number. Do not read more than a header.
        header = file.read(length) if length <= _MAX_HEADER_BYTES else b""
        digest = hashlib.sha256(start + header)
        num_bytes = os.fstat(file.fileno()).st_size - 8 - length
        try:
            entries = parse_json(header, _MAX_HEADER_BYTES, MAX_FILE_VALUES).items()
            tensors = sorted(_offsets(entry, num_bytes) for name, entry in entries if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path} is not a safetensors file. Save the model again with save_pretrained.") from None
        for begin, end in tensors:
            middle = max(begin, (begin + end - SAMPLE_BYTES) // 2)
            for offset in sorted({begin, middle, max(begin, end - SAMPLE_BYTES)}):
                file.seek(8 + length + offset)
                digest.update(file.read(min(SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()


def _offsets(entry: Any, num_bytes: int) -> tuple[int, int]:
    """The first byte of a tensor and the byte after its last one, of `num_bytes` bytes of tensors in the file."""
    begin, end = map(operator.index, entry["data_offsets"])
    if not 0 <= begin <= end <= num_bytes:
        raise ValueError("a tensor does not lie in the file")
    return begin, end
