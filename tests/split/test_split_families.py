"""The table of families in the documentation contains what is measured."""

from __future__ import annotations

import pytest
from family_table import NAMES, PAGE, TOLERANCE, Row, families, measure, page_table
from test_split_adapters import NO_PREFIX
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_federated.split import LAYOUTS


def page_rows() -> dict[str, Row]:
    """Read the rows of the page by family."""
    rows = {}
    for line in page_table().splitlines()[2:]:
        family, model_class, logits, gradients, *words = [cell.strip() for cell in line.strip("|").split("|")]
        rows[family] = Row(family, model_class.strip("`"), float(logits), float(gradients), *words)
    return rows


def test_table_has_a_row_for_each_layout_with_its_class():
    rows = page_rows()
    assert rows.keys() == {NAMES[key] for key in LAYOUTS} and len(rows) == len(LAYOUTS) >= 20
    for key in LAYOUTS:
        if key in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            assert rows[NAMES[key]].model_class == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[key]
    assert all(max(row.logits, row.gradients) <= TOLERANCE for row in rows.values())
    assert all(row.generation == "yes" for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(LAYOUTS))
def test_family_is_as_exact_as_the_table_says(key):
    if key not in families() and not key.startswith("chatglm"):
        pytest.skip("The installed version of transformers lacks this model type.")
    if set(families().get(key, [])) & set(NO_PREFIX) - {"falcon"}:
        pytest.skip("The installed version of PEFT does not support prefixes of this family.")
    row, expected = measure(key), page_rows()[NAMES[key]]
    # Other machines round differently.
    assert max(row.logits, row.gradients) <= TOLERANCE, f"Run tests/split/family_table.py to update {PAGE}."
    words = [(found.model_class, found.lora, found.prefixes, found.generation) for found in (row, expected)]
    assert words[0] == words[1], f"Run tests/split/family_table.py to update {PAGE}."
