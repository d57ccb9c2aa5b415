"""The whole audit: its result, its file, its picture, and what a card says of it."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from attacked import texts, tiny, word_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_federated import SplitModel
from hf_federated.audits import AuditConfig, LeakageAudit, audit_leakage, plot_leakage
from hf_federated.cards import add_leakage, leakage_report, leakage_section
from hf_federated.split.messages import read_request


RESULTS = Path(__file__).parents[2] / "recipes"

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
    own = texts(8, seed=1)
    others = [own[0], *texts(9, seed=2)]
    return audit_leakage(tiny(), word_tokenizer(), own, others, CONFIG, model_name="tiny", data_name="words")


def test_as_many_rows_as_asked_for_are_taken_and_dropped_ones_counted(audit):
    assert (audit.num_attacker_rows, audit.num_victim_rows, audit.num_dropped) == (6, 5, 1)
    assert audit.num_victim_tokens == sum(len(text.split()) for text in texts(9, seed=2)[:5])
    assert audit.strongest(0).token_recall == audit.strongest(1).token_recall == 1
    assert audit.chance < 0.2 and {one.rule for one in audit.embedding} == {"nonzero"}
    assert [(one.targets, one.num_targets) for one in audit.targets] == [("last", 5), ("all", audit.num_victim_tokens)]


def test_the_same_seed_gives_the_same_result(audit):
    again = audit_leakage(tiny(), word_tokenizer(), texts(8, seed=1), [texts(8, seed=1)[0], *texts(9, seed=2)], CONFIG)
    assert dataclasses.replace(again, model_name="tiny", data_name="words") == audit


def test_it_is_saved_and_read_again(audit, tmp_path):
    audit.save(tmp_path / "audit.json")
    assert LeakageAudit.load(tmp_path / "audit.json") == audit
    # One of before targets were sought.
    older = json.loads((tmp_path / "audit.json").read_text())
    del older["targets"], older["config"]["tail_blocks"], older["config"]["target_rows"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert LeakageAudit.load(tmp_path / "older.json") == dataclasses.replace(audit, targets=[])
    (tmp_path / "other.json").write_text('{"config": {}}')
    with pytest.raises(ValueError, match="is no audit that hf-federated wrote"):
        LeakageAudit.load(tmp_path / "other.json")


def test_a_tail_that_does_not_fit_is_refused_before_anything_is_measured():
    found = []
    with pytest.raises(ValueError, match="the server needs at least one"):
        audit_leakage(
            tiny(),
            word_tokenizer(),
            texts(3, seed=1),
            texts(3, seed=2),
            dataclasses.replace(CONFIG, tail_blocks=4),
            on_result=found.append,
        )
    assert not found


def test_rows_that_do_not_fit_are_refused_before_anything_is_measured():
    found = []
    attack = functools.partial(audit_leakage, on_result=found.append)
    long, alone = [" ".join(texts(9, seed=3))], [text.split()[0] for text in texts(4, seed=5)]
    few = tiny()
    few.config.max_position_embeddings = 11
    with pytest.raises(ValueError, match="12 tokens, and the model 11 positions: set max_length=11"):
        attack(few, word_tokenizer(), long, texts(3, seed=2), CONFIG)
    small = tiny()
    small.resize_token_embeddings(3)
    with pytest.raises(ValueError, match="the model has 3: they do not belong together"):
        attack(small, word_tokenizer(), texts(3, seed=1), texts(3, seed=2), CONFIG)
    plain = word_tokenizer()
    plain.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ValueError, match="Rows of one token have no targets"):
        attack(tiny(), plain, texts(3, seed=1), alone, CONFIG)
    assert not found


def test_an_attacker_without_rows_is_refused():
    with pytest.raises(ValueError, match="The attacker has no rows"):
        audit_leakage(tiny(), word_tokenizer(), [], texts(3, seed=1), CONFIG)


def test_no_victim_left_is_refused():
    with pytest.raises(
        ValueError, match="No victim is left: 3 rows are the attacker's, and none of the other 2 differs"
    ):
        audit_leakage(tiny(), word_tokenizer(), texts(3, seed=1), texts(2, seed=1), CONFIG)


def test_the_section_claims_what_was_measured_and_no_more(audit):
    section = leakage_section(audit, head_blocks=1)
    assert section.startswith("## What hidden states reveal\n\nRaw text and labels stay with the client. Against an")
    assert "with 1 block before the cut, 100.0 % of the tokens" in section and "0 blocks" not in section
    assert "6 rows of its own of words" in section and "1 row that the attacker had or that came twice" in section
    assert "guarantees nothing without a stated bound of differential privacy" in section
    assert "reads which positions have a target and which token it is" in section
    without = dataclasses.replace(audit, targets=[])
    assert "Gradients at the second cut were not attacked" in leakage_section(without)
    assert "with 0 blocks before the cut" in leakage_section(audit)
    with pytest.raises(ValueError, match="after 3 blocks"):
        leakage_section(audit, head_blocks=3)


def test_what_lengths_and_target_counts_tell_is_said_beside_what_was_measured(audit):
    for text in (leakage_section(audit), leakage_report(audit)):
        assert text.count("Without any attack it knows how many tokens each row has") == 1
        assert 'with `strategy="client_batch"` how many target tokens each batch has' in text
        assert "it tells apart labels whose words are of different numbers of tokens" in text
        assert (
            text.index("Raw text and labels stay") < text.index("Without any attack") < text.index("The attacker had")
        )


def test_a_server_that_clients_meet_at_tells_answers_of_different_lengths_apart():
    split = SplitModel.from_model(tiny())
    seen: list[bytes] = []
    split.boundary.link.watch = lambda *pair: seen.append(pair[0])
    told = []
    for answer in (1, 3):
        row = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
        labels = row.clone()
        labels[:, :-answer] = -100
        split.boundary.begin_step(answer, answer)
        seen.clear()
        split(row, labels=labels).loss.backward()
        forward, backward = map(read_request, seen)
        told.append((len(forward.hidden["values"]), backward.num_targets))
    assert told == [(7, 1), (7, 3)]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/results/audit_*")), ids=lambda path: path.name)
def test_a_report_of_a_recipe_is_what_its_audit_gives(path):
    report = leakage_report(LeakageAudit.load(path / "audit.json"), "audit.png")
    assert report == (path / "report.md").read_text(encoding="utf-8")


def test_a_card_gets_the_section_once_before_its_versions(audit):
    card = "---\ntags: []\n---\n\n# A model\n\n## Data\n\nrows\n\n## Versions\n\n- torch 2\n"
    once = add_leakage(card, audit)
    assert once.index("## Data") < once.index("## What hidden states reveal") < once.index("## Versions")
    assert once.endswith("- torch 2\n") and once.startswith("---\ntags: []\n---\n\n# A model\n\n## Data\n\nrows\n\n##")
    assert add_leakage(once, audit) == once
    changed = add_leakage(once, audit, head_blocks=1)
    assert changed.count("## What hidden states reveal") == 1 and "with 0 blocks" not in changed
    bare = add_leakage("# A model\n", audit)
    assert bare.startswith("# A model\n\n## What hidden") and add_leakage(bare, audit) == bare


def test_the_report_has_every_attack_and_the_papers_numbers_with_their_setting(audit):
    report = leakage_report(audit, "audit.png")
    assert report.count("| float32 | nearest |") == 2 and "![Tokens recovered" in report
    assert "ChatGLM-6B, BoolQ" in report and "| embedding | linear | 33.29 | 7.053 | 26.732 | 28.57 |" in report
    assert "- search: runs what the others propose" in report and "- decoder" not in report
    assert "`nonzero` names" in report and "`sign`" not in report and "| `max_length` | 12 |" in report
    assert "and the head that the victims have" in report
    assert "the victims had trained theirs" in leakage_report(dataclasses.replace(audit, shared_head=False))
    frozen = leakage_report(dataclasses.replace(audit, embedding=[]))
    assert "The embedding is frozen" in frozen and "![" not in frozen
    left_out = dataclasses.replace(audit, config=dataclasses.replace(CONFIG, gradient_rows=0), embedding=[])
    assert "were not attacked" in leakage_report(left_out)


def test_the_picture_is_drawn(audit, tmp_path):
    pytest.importorskip("matplotlib")
    plot_leakage(audit, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
