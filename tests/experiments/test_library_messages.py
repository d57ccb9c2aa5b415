"""Messages of other libraries that require no action are hidden in the commands, and all others are shown."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
)
from transformers.utils import logging as transformers_logging

from hf_federated.cli.main import main
from hf_federated.experiments.library_messages import PIN_MEMORY, is_informative, without_idle_messages


def reports_of(load) -> list[logging.LogRecord]:
    """The load reports that transformers logs in a function."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        load()
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    return [record for record in records if "LOAD REPORT" in record.getMessage()]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    """A model with a head for pretraining, and an encoder that lacks a layer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    BertForMaskedLM(BertConfig(**sizes, num_hidden_layers=2)).save_pretrained(folder / "pretrained")
    BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder / "short")
    return folder


@pytest.mark.parametrize("cls", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
def test_report_of_a_new_head_is_hidden(checkpoints, cls) -> None:
    (report,) = reports_of(lambda: cls.from_pretrained(checkpoints / "pretrained"))
    assert ("bert.pooler" in report.getMessage()) == (cls is AutoModelForSequenceClassification)
    # The pooler of this checkpoint is missing, which is more than a new head.
    assert is_informative(report) == (cls is AutoModelForSequenceClassification)


def test_report_of_missing_layers_and_of_sizes_is_shown(checkpoints) -> None:
    load = AutoModel.from_pretrained
    (report,) = reports_of(lambda: load(checkpoints / "pretrained", num_hidden_layers=3, add_pooling_layer=False))
    assert is_informative(report) and "encoder.layer.2" in report.getMessage()
    sized = {"num_labels": 5, "ignore_mismatched_sizes": True}
    load = AutoModelForSequenceClassification.from_pretrained
    (report,) = reports_of(lambda: load(checkpoints / "short", **sized))
    assert is_informative(report)


def test_messages_are_hidden_inside_the_context_only(checkpoints, capsys) -> None:
    def load_and_read() -> str:
        AutoModelForTokenClassification.from_pretrained(checkpoints / "pretrained").save_pretrained(
            checkpoints / "new"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("default", append=True)
            warnings.warn(f"{PIN_MEMORY} no accelerator is found", stacklevel=1)
        return capsys.readouterr().err

    before = list(warnings.filters)
    with without_idle_messages():
        assert load_and_read() == ""
        warnings.warn("another message", stacklevel=1)
    assert warnings.filters == before
    assert transformers_logging.set_tqdm_hook(None) is None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        next(iter(torch.utils.data.DataLoader([1], pin_memory=True)))
    if not torch.accelerator.is_available():
        assert any(PIN_MEMORY in str(warning.message) for warning in seen)


def test_training_of_a_recipe_prints_no_idle_message(recipe_path, capfd) -> None:
    assert main(["train", str(recipe_path), "--set", "training.disable_tqdm=true"]) == 0
    error = capfd.readouterr().err
    assert all(words not in error for words in ("LOAD REPORT", "Writing model shards", "Loading weights", PIN_MEMORY))
