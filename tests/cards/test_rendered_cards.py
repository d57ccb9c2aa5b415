"""The cards in `model_cards/` equal the rendered records in the same folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_federated.cards import render_saved


FOLDER = Path(__file__).parents[2] / "model_cards"
AUDIT_SUFFIX = ".audit.json"
RECORDS = sorted(path for path in FOLDER.glob("*.json") if not path.name.endswith(AUDIT_SUFFIX))


def rendered(path):
    audit = path.with_suffix(AUDIT_SUFFIX)
    return render_saved(path, audit if audit.exists() else None)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_record_renders_to_its_card(path):
    assert path.with_suffix(".md").read_text(encoding="utf-8") == rendered(path)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_metadata_of_the_card_is_valid(path):
    data = ModelCard.load(path.with_suffix(".md")).data
    assert data.library_name in ("transformers", "peft")
    assert "federated-learning" in data.tags


def test_every_card_has_a_record():
    cards = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert cards == {path.stem for path in RECORDS}
