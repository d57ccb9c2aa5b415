"""Client and server of a split model compare what they have to have alike before anything crosses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from decoders import decoder
from loopback import certificates, join, serve
from peft import LoraConfig, PrefixTuningConfig

from hf_federated.split import Cut, ModelFingerprint, Terms, Wire
from hf_federated.split.fingerprint import SAMPLE_BYTES
from hf_federated.split.terms import describe_adapter
from hf_federated.transport import ClientRefusedError


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"), ["north"])


def save(folder: Path, seed: int = 0, **settings: str) -> Path:
    """A checkpoint; `max_shard_size` makes several files of it."""
    decoder("llama", seed).save_pretrained(folder, **settings)
    return folder


def fingerprint(folder: Path, **settings: object) -> ModelFingerprint:
    return ModelFingerprint.from_checkpoint(folder, **settings)


def without(folder: Path, *names: str) -> Path:
    """The checkpoint as a party has it that never downloaded these files."""
    copy = Path(tempfile.mkdtemp(dir=folder.parent)) / folder.name
    shutil.copytree(folder, copy)
    for name in names:
        (copy / name).unlink()
    return copy


def weight_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_the_same_checkpoint_has_the_same_fingerprint_wherever_it_lies(tmp_path):
    here = save(tmp_path / "here")
    there = shutil.copytree(here, tmp_path / "there")
    assert fingerprint(here) == fingerprint(there)
    found = ModelFingerprint.from_dict(json.loads(json.dumps(fingerprint(there).to_dict())))
    assert found == fingerprint(here) and not found.differences(fingerprint(here))


def test_another_revision_of_the_weights_is_found_in_one_file(tmp_path):
    (difference,) = fingerprint(save(tmp_path / "a")).differences(fingerprint(save(tmp_path / "b", seed=1)))
    assert difference.startswith("the weights in 'model.safetensors'")


def test_another_revision_is_found_by_parties_that_have_different_files(tmp_path):
    """All but one of the files are only at one party, as where each opened those of its own blocks."""
    a, b = (save(tmp_path / name, seed, max_shard_size="20KB") for seed, name in enumerate("ab"))
    first, *middle, last = weight_files(a)
    assert len(middle) >= 2 and weight_files(b) == weight_files(a)
    client, server, other_server = without(a, *middle[1:]), without(a, first, last), without(b, first, last)
    assert not fingerprint(client).differences(fingerprint(server))
    assert fingerprint(client).samples.keys() & fingerprint(server).samples.keys() == {middle[0]}
    (difference,) = fingerprint(client).differences(fingerprint(other_server))
    assert difference.startswith(f"the weights in '{middle[0]}'")


def test_parties_without_a_file_in_common_need_a_name_for_the_revision(tmp_path):
    whole = save(tmp_path / "whole", max_shard_size="20KB")
    first, *others = weight_files(whole)
    client, server = without(whole, *others), without(whole, first)
    (difference,) = fingerprint(client).differences(fingerprint(server))
    assert "none is at both" in difference and "give commit= a common name" in difference
    assert not fingerprint(client, commit="v1").differences(fingerprint(server, commit="v1"))
    (difference,) = fingerprint(client, commit="v1").differences(fingerprint(server, commit="v2"))
    assert difference == "the revision: v1 here, v2 there"


@pytest.mark.parametrize("row", [0, -1])
def test_a_change_at_the_edge_of_a_tensor_is_found_and_one_between_samples_by_whole_files(tmp_path, row):
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
        # A quarter in: behind the first sample and before the one in the middle.
        weight[len(weight) // 4] += 1
    model.save_pretrained(tmp_path / "c")
    sampled = [fingerprint(tmp_path / name) for name in "bc"]
    whole = [fingerprint(tmp_path / name, whole_files=True) for name in "bc"]
    assert whole[0].whole_files != whole[1].whole_files and sampled[0].samples != sampled[1].samples
    with torch.no_grad():
        weight[len(weight) // 4] += 1
    model.save_pretrained(tmp_path / "d")
    c, d = (fingerprint(tmp_path / name) for name in "cd")
    assert not c.differences(d)
    c, d = (fingerprint(tmp_path / name, whole_files=True) for name in "cd")
    assert c.differences(d)
    # Where one party alone hashed whole files, samples are what both have.
    assert not c.differences(fingerprint(tmp_path / "d"))


def test_another_config_is_named_field_by_field_and_what_saving_changes_is_none(tmp_path):
    folder = save(tmp_path / "a")
    before = fingerprint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_version": "0", "dtype": "bfloat16"}))
    assert not before.differences(fingerprint(folder))
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "sliding_window": 4}))
    assert before.differences(fingerprint(folder)) == [
        "config.num_attention_heads: 4 here, 2 there",
        "config.sliding_window: not given here, 4 there",
    ]


def test_a_folder_without_weights_has_no_fingerprint(tmp_path):
    folder = save(tmp_path / "a")
    (folder / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        fingerprint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="Load this party's parts first"):
        fingerprint(folder)


def test_a_checkpoint_of_the_hub_brings_its_commit(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / commit
    save(snapshot)
    refs = tmp_path / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    assert ModelFingerprint.from_checkpoint("org/tiny", cache_dir=tmp_path).commit == commit


def test_adapters_agree_whatever_names_the_base_model_and_are_compared_otherwise():
    ours = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], base_model_name_or_path="/one/place")
    theirs = LoraConfig(r=4, target_modules={"v_proj", "q_proj"}, base_model_name_or_path="/another")
    model = ModelFingerprint({}, "", {}, commit="a1b2")

    def terms(adapter: object) -> Terms:
        return Terms(model, Cut(5), Wire(), adapter)

    assert not terms(ours).differences(terms(theirs).to_dict())
    assert describe_adapter(ours) != describe_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    (difference,) = terms(None).differences(terms(PrefixTuningConfig(num_virtual_tokens=3)).to_dict())[:1]
    assert difference.startswith("adapter")


@pytest.mark.parametrize("damage", [None, {}, {"model": 1}, "model", "config", "commit"])
def test_terms_of_another_form_are_refused(damage):
    terms = Terms(ModelFingerprint({}, "", {}, commit="a1b2"), Cut(5), Wire())
    theirs = terms.to_dict() if isinstance(damage, str) else damage
    if damage == "model":
        theirs["model"] = []
    elif isinstance(damage, str):
        theirs["model"][damage] = 3
    with pytest.raises(ValueError, match="has the fields|have the fields|A fingerprint's"):
        terms.differences(theirs)


def test_a_client_with_another_revision_is_refused_when_it_connects(tls, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("hf_federated.transport.service.logger.warning", told.append)
    a, b = (fingerprint(save(tmp_path / name, seed)) for seed, name in enumerate("ab"))
    terms = Terms(a, Cut(5), Wire(), LoraConfig(r=4), {"strategy": "serial"})
    answered: list[bytes] = []
    connected: list[str] = []
    settings = {"clients": ["north"], "terms": terms, "on_connected": connected.append}
    with serve(tls, lambda client_id, blob: answered.append(blob) or blob, **settings) as server:
        others = {
            r"the weights in 'model\.safetensors': \w{12} at the server, \w{12} at the client": {"model": b},
            "cut.head_blocks: 1 at the server, 2 at the client": {"cut": Cut(5, head_blocks=2)},
            "wire.dtype: 'float32' at the server, 'int8' at the client": {"wire": Wire("int8")},
            "adapter.r: 4 at the server, 16 at the client": {"adapter": LoraConfig(r=16)},
            "more.strategy: 'serial' at the server, 'client_batch' at the": {"more": {"strategy": "client_batch"}},
        }
        for message, change in others.items():
            with pytest.raises(ClientRefusedError, match=message):
                join(tls, server, terms=dataclasses.replace(terms, **change))
        assert not connected and not server.is_alive("north")
        # Others wait for it, and who looks after the server finds the reason there.
        assert len(told) == len(others) and all("Client 'north'" in own for own in told)
        with join(tls, server, terms=dataclasses.replace(terms)) as link:
            assert link.exchange(b"1") == b"1"
    assert answered == [b"1"]
