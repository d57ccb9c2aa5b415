"""The script with GRPO over three clients whose rewards differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from language import language_model, tokenizer


pytest.importorskip("trl", reason="needs the extra `trl`")
SCRIPT = Path(__file__).parents[2] / "examples" / "grpo_rewards.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_rewards", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_client_rewards_its_own_goal(script) -> None:
    asked = {name: rows[0] for name, rows in script.examples_of_clients().items()}
    goals = [asked[name]["goal"] for name in ("kitchen", "support", "school")]
    words = [asked[name]["words"] for name in ("kitchen", "support", "school")]
    assert words == ["flour milk eggs butter", "5", "5"]
    answers = {
        "Flour, and 2 eggs.": [0.5, 0.8, 0.0],
        "5 5 5 5 5 5 5": [0.0, 0.6, 1.0],
        "flour milk eggs butter 5": [1.0, 1.0, 1.0],
    }
    for answer, expected in answers.items():
        assert script.reward([answer] * 3, goals, words) == pytest.approx(expected)


@pytest.mark.slow
def test_script_prints_rewards_and_the_card(script, tmp_path, capsys) -> None:
    language_model().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    script.main(
        [
            *("--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "run")),
            *("--num-rounds", "2", "--local-steps", "2", "--max-completion-length", "4"),
        ]
    )
    printed = capsys.readouterr().out
    assert "| mean reward | round 1 | round 2 |" in printed
    assert all(f"| {client_id} | " in printed for client_id in ("kitchen", "school", "support"))
    assert "| Bytes from clients to server | " in printed
    assert "differs from the weighted mean of the clients' products by" in printed
