"""Leakage audits: results, file, plot, and the section and report that describe them."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from audit_inputs import texts, tiny, word_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_federated import SplitModel
from hf_federated.audits import AuditConfig, LeakageAudit, audit_leakage, plot_leakage
from hf_federated.cards import add_leakage, leakage_report, leakage_section
from hf_federated.split.messages import read_request


RECIPES = Path(__file__).parents[2] / "recipes"

CONFIG = AuditConfig(
    head_blocks=[0, 1],
    attackers=["nearest", "search"],
    num_attacker_rows=6,
    num_victim_rows=5,
    max_length=12,
    num_candidates=63,
    gradient_rows=2,
)


@pytest.fixture(scope="module")
def audit() -> LeakageAudit:
    attacker_texts = texts(8, seed=1)
    victim_texts = [attacker_texts[0], *texts(9, seed=2)]
    return audit_leakage(
        tiny(), word_tokenizer(), attacker_texts, victim_texts, CONFIG, model_name="tiny", data_name="words"
    )


def test_audit_uses_the_requested_number_of_examples_and_counts_removed_ones(audit):
    assert (audit.num_attacker_rows, audit.num_victim_rows, audit.num_dropped) == (6, 5, 1)
    assert audit.num_victim_tokens == sum(len(text.split()) for text in texts(9, seed=2)[:5])
    assert audit.strongest(0).token_recall == audit.strongest(1).token_recall == 1
    assert audit.chance < 0.2 and {recovery.rule for recovery in audit.embedding} == {"nonzero"}
    num_targets = [(recovery.targets, recovery.num_targets) for recovery in audit.targets]
    assert num_targets == [("last", 5), ("all", audit.num_victim_tokens)]


def test_same_seed_gives_same_result(audit):
    again = audit_leakage(tiny(), word_tokenizer(), texts(8, seed=1), [texts(8, seed=1)[0], *texts(9, seed=2)], CONFIG)
    assert dataclasses.replace(again, model_name="tiny", data_name="words") == audit


def test_save_and_load(audit, tmp_path):
    audit.save(tmp_path / "audit.json")
    assert LeakageAudit.load(tmp_path / "audit.json") == audit
    # A file of a version without the attack on targets.
    older = json.loads((tmp_path / "audit.json").read_text())
    del older["targets"], older["config"]["tail_blocks"], older["config"]["target_rows"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert LeakageAudit.load(tmp_path / "older.json") == dataclasses.replace(audit, targets=[])
    (tmp_path / "other.json").write_text('{"config": {}}')
    with pytest.raises(ValueError, match="does not contain the results of an audit"):
        LeakageAudit.load(tmp_path / "other.json")


def test_tail_that_does_not_fit_raises_before_any_attack():
    results = []
    with pytest.raises(ValueError, match="leave no block for the server"):
        audit_leakage(
            tiny(),
            word_tokenizer(),
            texts(3, seed=1),
            texts(3, seed=2),
            dataclasses.replace(CONFIG, tail_blocks=4),
            on_result=results.append,
        )
    assert not results


def test_examples_that_do_not_fit_raise_before_any_attack():
    results = []
    attack = functools.partial(audit_leakage, on_result=results.append)
    long_text, one_word_texts = [" ".join(texts(9, seed=3))], [text.split()[0] for text in texts(4, seed=5)]
    few_positions = tiny()
    few_positions.config.max_position_embeddings = 11
    with pytest.raises(ValueError, match="12 tokens, but the model has 11 positions. Set max_length=11"):
        attack(few_positions, word_tokenizer(), long_text, texts(3, seed=2), CONFIG)
    small_vocabulary = tiny()
    small_vocabulary.resize_token_embeddings(3)
    with pytest.raises(ValueError, match="the model has 3 token embeddings. Pass the tokenizer of the model"):
        attack(small_vocabulary, word_tokenizer(), texts(3, seed=1), texts(3, seed=2), CONFIG)
    plain = word_tokenizer()
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ValueError, match="examples of the victims have one token and therefore no targets"):
        attack(tiny(), plain, texts(3, seed=1), one_word_texts, CONFIG)
    assert not results


def test_attacker_without_examples_raises():
    with pytest.raises(ValueError, match="The attacker has no examples"):
        audit_leakage(tiny(), word_tokenizer(), [], texts(3, seed=1), CONFIG)


def test_no_remaining_victim_raises():
    with pytest.raises(
        ValueError,
        match="No example of a victim remains: the attacker has 3 examples, and none of the 2 examples of the victims",
    ):
        audit_leakage(tiny(), word_tokenizer(), texts(3, seed=1), texts(2, seed=1), CONFIG)


def test_section_claims_only_what_was_measured(audit):
    section = leakage_section(audit, head_blocks=1)
    assert section.startswith("## What hidden states reveal\n\nRaw text and labels stay with the client. However, the")
    assert "100.0% of the tokens with 1 block before the cut" in section and "0 blocks" not in section
    assert "The attacker had 6 examples of words" in section and "were left out (1 example)" in section
    assert "guarantees nothing without a stated differential privacy bound" in section
    assert "reads which positions have a target and which token each target is" in section
    without = dataclasses.replace(audit, targets=[])
    assert "Gradients at the second cut were not attacked" in leakage_section(without)
    assert "with 0 blocks before the cut" in leakage_section(audit)
    with pytest.raises(ValueError, match="after 3 blocks"):
        leakage_section(audit, head_blocks=3)


def test_section_and_report_describe_the_leakage_of_lengths_and_target_counts(audit):
    for text in (leakage_section(audit), leakage_report(audit)):
        assert text.count("Without any attack, the server knows the number of tokens of each example") == 1
        assert 'With `strategy="client_batch"`, it also knows the number of target tokens of each batch' in text
        assert "distinguish labels whose words have different numbers of tokens" in text
        assert (
            text.index("Raw text and labels stay") < text.index("Without any attack") < text.index("The attacker had")
        )


def test_server_can_distinguish_answers_of_different_lengths():
    split = SplitModel.from_model(tiny())
    requests: list[bytes] = []
    split.boundary.link.watch = lambda request, reply: requests.append(request)
    observed = []
    for answer in (1, 3):
        ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
        labels = ids.clone()
        labels[:, :-answer] = -100
        split.boundary.begin_step(answer, answer)
        requests.clear()
        split(ids, labels=labels).loss.backward()
        forward, backward = map(read_request, requests)
        observed.append((len(forward.hidden["values"]), backward.num_targets))
    assert observed == [(7, 1), (7, 3)]


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*/results/audit_*")), ids=lambda path: path.name)
def test_reports_of_recipes_equal_the_rendered_audits(path):
    report = leakage_report(LeakageAudit.load(path / "audit.json"), "audit.png")
    assert report == (path / "report.md").read_text(encoding="utf-8")


def test_card_gets_the_section_once_before_its_versions(audit):
    card = "---\ntags: []\n---\n\n# A model\n\n## Data\n\nrows\n\n## Versions\n\n- torch 2\n"
    once = add_leakage(card, audit)
    assert once.index("## Data") < once.index("## What hidden states reveal") < once.index("## Versions")
    assert once.endswith("- torch 2\n") and once.startswith("---\ntags: []\n---\n\n# A model\n\n## Data\n\nrows\n\n##")
    assert add_leakage(once, audit) == once
    changed = add_leakage(once, audit, head_blocks=1)
    assert changed.count("## What hidden states reveal") == 1 and "with 0 blocks" not in changed
    bare = add_leakage("# A model\n", audit)
    assert bare.startswith("# A model\n\n## What hidden") and add_leakage(bare, audit) == bare


def test_report_has_every_attack_and_the_numbers_of_the_paper(audit):
    report = leakage_report(audit, "audit.png")
    assert report.count("| float32 | nearest |") == 2 and "![Tokens recovered" in report
    assert "ChatGLM-6B, BoolQ" in report and "| embedding | linear | 33.29 | 7.053 | 26.732 | 28.57 |" in report
    assert "- search: runs the proposals of the other attackers" in report and "- decoder" not in report
    assert "`nonzero` selects" in report and "`sign`" not in report and "| `max_length` | 12 |" in report
    assert "and the same head as the victims" in report
    assert "the victims had trained their own" in leakage_report(dataclasses.replace(audit, shared_head=False))
    frozen = leakage_report(dataclasses.replace(audit, embedding=[]))
    assert "The embedding is frozen" in frozen and "![" not in frozen
    disabled = dataclasses.replace(audit, config=dataclasses.replace(CONFIG, gradient_rows=0), embedding=[])
    assert "were not attacked" in leakage_report(disabled)


def test_plot_is_written(audit, tmp_path):
    pytest.importorskip("matplotlib")
    plot_leakage(audit, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
