"""Tests of `warm_start.py` of the FedDRS recipes, which joins two encoders to an encoder-decoder."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer


SCRIPT = str(Path(__file__).parents[2] / "recipes" / "feddrs" / "warm_start.py")


def test_script_writes_an_encoder_decoder_with_the_encoders_word_embeddings(model_dir, tmp_path, monkeypatch):
    texts = [" ".join(["bright film and a warm plot not dull"] * 3), "film"]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    output = tmp_path / "out"
    options = {"--encoder": model_dir, "--texts": tmp_path / "texts", "--output-dir": output, "--num-steps": 2}
    monkeypatch.setattr(sys, "argv", [SCRIPT, *(str(part) for pair in options.items() for part in pair)])
    runpy.run_path(SCRIPT, run_name="__main__")
    model, encoder = AutoModelForSeq2SeqLM.from_pretrained(output), AutoModel.from_pretrained(model_dir)
    words = encoder.get_input_embeddings().weight
    assert torch.equal(model.encoder.get_input_embeddings().weight, words)
    assert torch.equal(model.decoder.get_input_embeddings().weight, words)
    name = "encoder.layer.0.output.dense.weight"
    assert not torch.equal(model.encoder.get_parameter(name), encoder.get_parameter(name))
    assert model.config.decoder_start_token_id == AutoTokenizer.from_pretrained(output).cls_token_id


def test_windows_start_anywhere_and_targets_are_their_first_words():
    cut_windows = runpy.run_path(SCRIPT)["cut_windows"]
    texts = Dataset.from_dict({"text": [" ".join(map(str, range(40))), "too short"]})
    windows = cut_windows(texts, "text", 200, seed=0)
    starts = {source.split()[0] for source in windows["source"]}
    assert len(starts) > 20 and all(8 <= len(source.split()) <= 24 for source in windows["source"])
    assert all(source.startswith(target) for source, target in zip(windows["source"], windows["target"], strict=True))
    assert {len(target.split()) for target in windows["target"]} == {6}
