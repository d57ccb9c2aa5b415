"""Client and server of a split model compare their settings before they exchange hidden states."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from decoders import decoder
from loopback import certificates, join, serve
from peft import LoraConfig, PrefixTuningConfig

from hf_federated import SplitModel
from hf_federated.split import Cut, ModelFingerprint, SplitSessionConfig, Wire
from hf_federated.split.fingerprint import SAMPLE_BYTES
from hf_federated.split.session_config import describe_adapter
from hf_federated.transport import ClientRefusedError


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"), ["north"])


def save(folder: Path, seed: int = 0, **settings: str) -> Path:
    """Save a checkpoint. `max_shard_size` splits it into several files."""
    decoder("llama", seed).save_pretrained(folder, **settings)
    return folder


def fingerprint(folder: Path, **settings: object) -> ModelFingerprint:
    return ModelFingerprint.from_checkpoint(folder, **settings)


def without(folder: Path, *names: str) -> Path:
    """Copy a checkpoint without some files, as a party that did not download them has it."""
    copy = Path(tempfile.mkdtemp(dir=folder.parent)) / folder.name
    shutil.copytree(folder, copy)
    for name in names:
        (copy / name).unlink()
    return copy


def weight_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_copies_of_a_checkpoint_have_the_same_fingerprint(tmp_path):
    original = save(tmp_path / "original")
    copy = shutil.copytree(original, tmp_path / "copy")
    assert fingerprint(original) == fingerprint(copy)
    restored = ModelFingerprint.from_dict(json.loads(json.dumps(fingerprint(copy).to_dict())))
    assert restored == fingerprint(original) and not restored.differences(fingerprint(original))


def test_different_weights_in_an_unsharded_checkpoint_are_detected(tmp_path):
    (difference,) = fingerprint(save(tmp_path / "a")).differences(fingerprint(save(tmp_path / "b", seed=1)))
    assert difference.startswith("the weights in 'model.safetensors'")


def test_different_weights_are_detected_with_one_file_in_common(tmp_path):
    """Each party has only the files of its blocks, so the parties share only one file."""
    a, b = (save(tmp_path / name, seed, max_shard_size="20KB") for seed, name in enumerate("ab"))
    first, *middle, last = weight_files(a)
    assert len(middle) >= 2 and weight_files(b) == weight_files(a)
    client, server, other_server = without(a, *middle[1:]), without(a, first, last), without(b, first, last)
    assert not fingerprint(client).differences(fingerprint(server))
    assert fingerprint(client).samples.keys() & fingerprint(server).samples.keys() == {middle[0]}
    (difference,) = fingerprint(client).differences(fingerprint(other_server))
    assert difference.startswith(f"the weights in '{middle[0]}'")


def test_parties_without_a_file_in_common_need_a_commit(tmp_path):
    full = save(tmp_path / "full", max_shard_size="20KB")
    first, *rest = weight_files(full)
    client, server = without(full, *rest), without(full, first)
    (difference,) = fingerprint(client).differences(fingerprint(server))
    assert "the parties have no file in common" in difference
    assert "pass the same commit= on both sides" in difference
    assert not fingerprint(client, commit="v1").differences(fingerprint(server, commit="v1"))
    (difference,) = fingerprint(client, commit="v1").differences(fingerprint(server, commit="v2"))
    assert difference == "the revision: v1 locally, v2 remotely"


@pytest.mark.parametrize("row", [0, -1])
def test_samples_detect_changes_at_tensor_edges_and_whole_files_detect_all_changes(tmp_path, row):
    model = decoder("llama")
    weight = model.model.embed_tokens.weight
    assert weight.nbytes > 3 * SAMPLE_BYTES
    model.save_pretrained(tmp_path / "a")
    with torch.no_grad():
        weight[row] += 1
    model.save_pretrained(tmp_path / "b")
    assert fingerprint(tmp_path / "a").differences(fingerprint(tmp_path / "b"))
    with torch.no_grad():
        weight[row] -= 1
        # A quarter of the tensor: after the first sample and before the sample in the middle.
        weight[len(weight) // 4] += 1
    model.save_pretrained(tmp_path / "c")
    sampled = [fingerprint(tmp_path / name) for name in "bc"]
    full_model = [fingerprint(tmp_path / name, whole_files=True) for name in "bc"]
    assert full_model[0].whole_files != full_model[1].whole_files and sampled[0].samples != sampled[1].samples
    with torch.no_grad():
        weight[len(weight) // 4] += 1
    model.save_pretrained(tmp_path / "d")
    c, d = (fingerprint(tmp_path / name) for name in "cd")
    assert not c.differences(d)
    c, d = (fingerprint(tmp_path / name, whole_files=True) for name in "cd")
    assert c.differences(d)
    # If only one party hashed whole files, only the samples are compared.
    assert not c.differences(fingerprint(tmp_path / "d"))


def test_config_differences_are_named_and_settings_changed_by_saving_are_ignored(tmp_path):
    folder = save(tmp_path / "a")
    before = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0", "dtype": "bfloat16"}))
    assert not before.differences(fingerprint(folder))
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "sliding_window": 4}))
    assert before.differences(fingerprint(folder)) == [
        "config.num_attention_heads: 4 locally, 2 remotely",
        "config.sliding_window: not given locally, 4 remotely",
    ]


def test_fingerprint_of_a_folder_without_weights_raises_error(tmp_path):
    folder = save(tmp_path / "a")
    # Too short for a header, and lengths of a header that the file does not have.
    for damaged in (
        b"no safetensors",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2**62) + b'{"a":{"data_offsets":[0,4]}}',
    ):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
            fingerprint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="Load this party's parts first"):
        fingerprint(folder)


@pytest.mark.parametrize("content", ["9", "[]", "null"])
def test_config_that_is_no_object_is_refused(content, tmp_path):
    folder = save(tmp_path)
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json must contain a JSON object"):
        fingerprint(folder)


@pytest.mark.parametrize("content", ["9", "{}", '{"weight_map": 9}', '{"weight_map": {"lm_head.weight": 9}}'])
def test_index_that_names_no_files_is_refused(content, tmp_path):
    folder = save(tmp_path, max_shard_size="20KB")
    (folder / "model.safetensors.index.json").write_text(content)
    for read in (fingerprint, lambda folder: SplitModel.from_model(str(folder), 1, 2)):
        with pytest.raises(ValueError, match="must contain a JSON object|does not name the file of each weight"):
            read(folder)


@pytest.mark.parametrize("offsets", [[-8, 0], [0, 10**9], [10**30, 10**30], [8, 0], ["0", 8], [0.5, 8], [8], 8])
def test_weights_with_other_offsets_than_their_bytes_are_refused(offsets, tmp_path):
    folder = save(tmp_path)
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match="is not a safetensors file"):
        fingerprint(folder)


def test_fingerprint_of_a_hub_checkpoint_contains_the_commit(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / commit
    save(snapshot)
    refs = tmp_path / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    assert ModelFingerprint.from_checkpoint("org/tiny", cache_dir=tmp_path).commit == commit


def test_adapter_configs_are_compared_without_the_path_of_the_base_model():
    first = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], base_model_name_or_path="/one/place")
    second = LoraConfig(r=4, target_modules={"v_proj", "q_proj"}, base_model_name_or_path="/another")
    model = ModelFingerprint({}, "", {}, commit="a1b2")

    def session_config(adapter: object) -> SplitSessionConfig:
        return SplitSessionConfig(model, Cut(5), Wire(), adapter)

    assert not session_config(first).differences(session_config(second).to_dict())
    assert describe_adapter(first) != describe_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    prefix_config = session_config(PrefixTuningConfig(num_virtual_tokens=3))
    (difference,) = session_config(None).differences(prefix_config.to_dict())[:1]
    assert difference.startswith("adapter")


@pytest.mark.parametrize("damage", [None, {}, {"model": 1}, "model", "config", "commit"])
def test_malformed_session_config_raises_error(damage):
    config = SplitSessionConfig(ModelFingerprint({}, "", {}, commit="a1b2"), Cut(5), Wire())
    received = config.to_dict() if isinstance(damage, str) else damage
    if damage == "model":
        received["model"] = []
    elif isinstance(damage, str):
        received["model"][damage] = 3
    with pytest.raises(ValueError, match="must be a dictionary with the fields|of a fingerprint must be"):
        config.differences(received)


def test_client_with_different_settings_is_rejected_when_it_connects(tls, tmp_path, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr("hf_federated.transport.service.logger.warning", warnings.append)
    a, b = (fingerprint(save(tmp_path / name, seed)) for seed, name in enumerate("ab"))
    config = SplitSessionConfig(a, Cut(5), Wire(), LoraConfig(r=4), {"strategy": "serial"})
    answered: list[bytes] = []
    connected: list[str] = []
    settings = {"clients": ["north"], "session_config": config, "on_connected": connected.append}
    with serve(tls, lambda client_id, blob: answered.append(blob) or blob, **settings) as server:
        changes = {
            r"the weights in 'model\.safetensors': \w{12} at the server, \w{12} at the client": {"model": b},
            "cut.head_blocks: 1 at the server, 2 at the client": {"cut": Cut(5, head_blocks=2)},
            "wire.dtype: 'float32' at the server, 'int8' at the client": {"wire": Wire("int8")},
            "adapter.r: 4 at the server, 16 at the client": {"adapter": LoraConfig(r=16)},
            "more.strategy: 'serial' at the server, 'client_batch' at the": {"more": {"strategy": "client_batch"}},
        }
        for message, change in changes.items():
            with pytest.raises(ClientRefusedError, match=message):
                join(tls, server, session_config=dataclasses.replace(config, **change))
        assert not connected and not server.is_alive("north")
        # The other clients wait for the rejected client, so the server logs the reason.
        assert len(warnings) == len(changes) and all("Client 'north'" in warning for warning in warnings)
        with join(tls, server, session_config=dataclasses.replace(config)) as link:
            assert link.exchange(b"1") == b"1"
    assert answered == [b"1"]
