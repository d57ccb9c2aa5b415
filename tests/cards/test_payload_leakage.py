"""The section of a card on what payloads reveal."""

from __future__ import annotations

from hf_federated.audits import AttackResult, PayloadAudit
from hf_federated.cards.payload_leakage import add_payload_audit, payload_report, payload_table


RESULTS = {
    "full": [
        AttackResult("token_set", {"precision": 1.0, "recall": 1.0, "chance": 0.38}),
        AttackResult("lira", {"auc": 0.7, "tpr": 0.1}, {"auc": [0.6, 0.8], "tpr": [0.0, 0.2]}),
        AttackResult("canary", {"exposure": 5.0, "absent": 1.5, "largest": 6.0}),
    ],
    "LoRA": [AttackResult("token_set", {"recall": 0.38, "chance": 0.38}, note="The payload has no word embeddings.")],
}
AUDIT = PayloadAudit(RESULTS, model_name="tiny", data_name="reviews.csv")


def test_table_has_a_row_for_each_setting_with_intervals():
    full, lora = payload_table(AUDIT).splitlines()[2:]
    assert (
        full == "| full | 100.0 | 100.0 | 38.0 | – | – | – | 0.700 [0.600, 0.800] | 10.0 [0.0, 20.0] | 5.00 | 1.50 |"
    )
    assert lora == "| LoRA | – | 38.0 | 38.0 | – | – | – | – | – | – | – |"


def test_report_states_notes_and_what_was_not_tried():
    report = payload_report(AUDIT)
    assert "- LoRA, token_set: The payload has no word embeddings." in report and "Not tried:" in report
    assert report.startswith("# What a client's payload reveals: tiny\n")


def test_section_is_inserted_before_the_versions_and_replaced():
    card = "# A model\n\n## Data\n\nRows.\n\n## Versions\n\n- torch\n"
    once = add_payload_audit(card, AUDIT)
    assert once.index("## What a client's payload reveals") < once.index("## Versions")
    assert add_payload_audit(once, AUDIT) == once
    assert add_payload_audit("# A model\n", AUDIT).count("## What a client's payload reveals") == 1


def test_results_survive_saving(tmp_path):
    AUDIT.save(tmp_path / "audit.json")
    assert PayloadAudit.load(tmp_path / "audit.json") == AUDIT
