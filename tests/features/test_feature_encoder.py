"""Features of a frozen model: the pooled hidden states in evaluation mode, computed once for each text."""

from __future__ import annotations

import shutil

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, BertModel

from hf_federated import FederatedDataset
from hf_federated.features import FrozenEncoder
from hf_federated.tasks import TextClassification


TEXTS = ["a dull film", "a bright plot and a warm film and a cold plot", "warm", "not a film", "bright"]


@pytest.fixture
def forward_calls(monkeypatch):
    """The number of calls of the model. The wrapped method is a method of transformers."""
    calls = []
    forward = BertModel.forward
    monkeypatch.setattr(BertModel, "forward", lambda self, **inputs: calls.append(1) or forward(self, **inputs))
    return calls


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_features_are_pooled_hidden_states_of_each_text(model_dir, pooling):
    model, tokenizer = AutoModel.from_pretrained(model_dir).eval(), AutoTokenizer.from_pretrained(model_dir)
    features = torch.tensor(FrozenEncoder(model_dir, pooling=pooling)(TEXTS)["features"])
    for text, found in zip(TEXTS, features, strict=True):
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]  # no padding, no batch
        torch.testing.assert_close(found, hidden.mean(0) if pooling == "mean" else hidden[0])


def test_text_pairs_and_the_maximum_length_change_the_features(model_dir):
    encoder = FrozenEncoder(model_dir)
    single, short = encoder(TEXTS)["features"], encoder(TEXTS, max_length=4)["features"]
    pair, swapped = encoder(TEXTS, TEXTS[::-1])["features"], encoder(TEXTS[::-1], TEXTS)["features"]
    assert not (single[1] == short[1]).all() and torch.equal(torch.tensor(single[2]), torch.tensor(short[2]))
    assert not (pair[0] == swapped[0]).all() and (pair[0] == swapped[4]).all()


def test_features_of_a_text_do_not_depend_on_the_other_texts(model_dir, monkeypatch, tmp_path):
    """Two jobs that encode different parts first must end in the same features."""
    together = FrozenEncoder(model_dir)(TEXTS)["features"]
    monkeypatch.setenv("HF_FEDERATED_CACHE", str(tmp_path / "other"))
    alone = [FrozenEncoder(model_dir)([text])["features"][0] for text in reversed(TEXTS)]
    assert all((first == second).all() for first, second in zip(together, reversed(alone), strict=True))


def test_second_run_does_not_load_the_model(model_dir, forward_calls, monkeypatch, tmp_path):
    first = FrozenEncoder(model_dir)(TEXTS)["features"]
    num_calls = len(forward_calls)
    assert num_calls == 2  # one batch for texts of at most 8 tokens, and one for the longer text
    other = shutil.copytree(model_dir, tmp_path / "copy")  # the path of a model is no part of the key
    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    assert (FrozenEncoder(other)(TEXTS[::-1])["features"][::-1] == first).all()
    assert len(forward_calls) == num_calls


def test_only_new_texts_are_encoded(model_dir, forward_calls):
    FrozenEncoder(model_dir)(TEXTS)
    num_calls = len(forward_calls)
    FrozenEncoder(model_dir)([*TEXTS, "a warm plot"])
    assert len(forward_calls) == num_calls + 1


def test_other_weights_config_or_tokenizer_have_other_features(model_dir, tmp_path):
    original = FrozenEncoder(model_dir)
    model, tokenizer = AutoModel.from_pretrained(model_dir), AutoTokenizer.from_pretrained(model_dir)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[0] += 1e-3
    digests = {original.digest, FrozenEncoder(model_dir, pooling="cls").digest}
    digests |= {FrozenEncoder(model_dir, num_hidden_layers=2).digest}
    for name, changed in (("weights", model), ("config", model), ("tokenizer", model)):
        if name == "config":
            changed.config.layer_norm_eps = 1e-3
        if name == "tokenizer":
            tokenizer.add_tokens(["dullness"])
        changed.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        digests.add(FrozenEncoder(tmp_path / name).digest)
    assert len(digests) == 6


def test_task_encodes_clients_with_features_in_place_of_tokens(model_dir):
    rows = Dataset.from_dict({"text": TEXTS, "label": [0, 1, 1, 0, 1], "site": list("ababa")})
    task, encoder = TextClassification(label_names=["dull", "bright"]), FrozenEncoder(model_dir)
    clients = task.prepare(FederatedDataset.from_column(rows, "site"), encoder)
    assert clients["b"].column_names == ["features", "labels"] and clients["b"]["labels"][:] == [1, 0]
    expected = torch.tensor(encoder(TEXTS[1::2])["features"])
    assert torch.equal(torch.tensor(clients["b"]["features"][:]), expected)
    batch = task.data_collator(encoder)([clients["b"][0], clients["b"][1]])
    assert torch.equal(batch["features"], expected) and batch["labels"].tolist() == [1, 0]


def test_model_without_safetensors_is_refused(model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="has no file model.safetensors"):
        FrozenEncoder(folder)(TEXTS)


def test_unknown_pooling_is_refused(model_dir):
    with pytest.raises(ValueError, match="`pooling` is 'max'; allowed are 'mean', 'cls'"):
        FrozenEncoder(model_dir, pooling="max")


def test_no_texts_give_no_features(model_dir):
    assert FrozenEncoder(model_dir)([])["features"].shape == (0, 16)
