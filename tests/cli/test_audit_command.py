"""The command `hf-federated audit`."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from causal import llama, pieces_tokenizer
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hf_federated.audits import LeakageAudit
from hf_federated.cli.main import main


COMMAND = (
    "audit model rows --output-dir out --head-blocks 0 --attackers nearest search --num-attacker-rows 5"
    " --num-victim-rows 4 --max-length 10 --gradient-rows 2 --num-candidates 4"
).split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [f"the {number}th of them saw {number * 7} ships" for number in range(12)]
    rows = Dataset.from_dict({"text": [*texts, "", None], "label": [0] * 14, "story": [texts[0]] * 14})
    rows.to_parquet(tmp_path / "rows" / "train.parquet")
    tokenizer = pieces_tokenizer(texts)
    tokenizer.save_pretrained(tmp_path / "model")
    llama(len(tokenizer)).save_pretrained(tmp_path / "model")
    return tmp_path


def test_audit_writes_result_report_plot_and_card_section(folder, capsys):
    (folder / "README.md").write_text("# A model\n\n## Versions\n\n- torch\n")
    assert main([*COMMAND, "--wire-dtypes", "float32", "int8", "--card", "README.md"]) == 0
    printed = capsys.readouterr().out
    assert "0 blocks before the cut, int8, search:" in printed
    assert "| 0 | float32 | nearest | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 |" in printed
    audit = LeakageAudit.load(folder / "out" / "audit.json")
    assert (audit.num_attacker_rows, audit.num_victim_rows, audit.model_name) == (5, 4, "model")
    assert audit.config.wire_dtypes == ["float32", "int8"] and audit.config.head_blocks == [0]
    report = (folder / "out" / "report.md").read_text()
    assert "(audit.png)" in report and str(folder) not in report + json.dumps(printed)
    assert (folder / "out" / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert "## What hidden states reveal" in (folder / "README.md").read_text()


def test_victim_model_can_differ_from_the_attacked_model(folder, capsys):
    assert main([*COMMAND, "--victim-model", "model"]) == 0
    assert not LeakageAudit.load(folder / "out" / "audit.json").shared_head
    capsys.readouterr()
    assert main([*COMMAND, "--victim-model", "none/at/all"]) == 2
    assert "none/at/all" in capsys.readouterr().err


def test_victim_model_can_be_an_adapter_with_safetensors_weights(folder, capsys):
    # The cut is after one block, because the adapter does not change the embedding.
    llama(LlamaForCausalLM.from_pretrained("model").config.vocab_size, num_layers=3).save_pretrained("model")
    command = [*COMMAND[: COMMAND.index("--head-blocks")], "--head-blocks", "1", *COMMAND[COMMAND.index("0") + 1 :]]
    config = LoraConfig(r=2, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained("model"), config)
    adapted.save_pretrained("adapter")
    adapted.merge_and_unload().save_pretrained("merged")
    inversions = {}
    for victim in ("model", "adapter", "merged"):
        assert main([*command, "--victim-model", victim]) == 0
        inversions[victim] = LeakageAudit.load(folder / "out" / "audit.json").inversions
    assert inversions["adapter"] == inversions["merged"] != inversions["model"]

    weights = load_file("adapter/adapter_model.safetensors")
    (folder / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(weights, "adapter/adapter_model.bin")
    capsys.readouterr()
    assert main([*command, "--victim-model", "adapter"]) == 2
    assert "adapter_model.safetensors" in capsys.readouterr().err

    prefix = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(LlamaForCausalLM.from_pretrained("model"), prefix).save_pretrained("prefix")
    assert main([*command, "--victim-model", "prefix"]) == 2
    assert "--victim-model prefix: prefix is an adapter with prefixes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--text-column", "body"],
            "--text-column body: rows has no text column with this name. Its text columns are: text",
        ),
        (["--text-column", "label"], "--text-column label: rows has no text column"),
        (
            ["--num-attacker-rows", "12"],
            "No example of a victim remains: the attacker has 12 examples, and none of the 0",
        ),
        (["--text-column", "story"], "No example of a victim remains"),
        (["--num-attacker-rows", "0"], "num_attacker_rows=0 is too small. Set it to at least 1"),
        (["--head-blocks", "0", "2"], "head_blocks=2 and tail_blocks=1 leave no block for the server"),
        (["--attackers", "guess"], "unknown values: guess. Choose from nearest, decoder, transformer, search"),
        (["--split", "test"], "rows has no split 'test'"),
        (["--card", "none.md"], "--card: the file none.md does not exist"),
        (["--device", "nowhere"], "--device nowhere:"),
        (["--output-dir", "rows/train.parquet"], "The output folder rows/train.parquet is a file. Choose another"),
    ],
)
def test_invalid_options_are_rejected_with_a_one_line_message(folder, options, message, capsys):
    assert main([*COMMAND, *options]) == 2
    # Progress bars of loading can precede the error.
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hf-federated: error:") and message in error and not (folder / "out").exists()


def test_former_name_of_the_output_folder_works_with_a_note(folder, capsys):
    command = [word.replace("--output-dir", "--output") for word in COMMAND]
    assert main([*command, "--card", "none.md"]) == 2
    note, error = capsys.readouterr().err.strip().splitlines()
    assert "`--output` is deprecated" in note and "Use `--output-dir`" in note and "none.md" in error


def test_help_lists_the_fields_of_the_audit_configuration(capsys):
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--head-blocks HEAD_BLOCK [HEAD_BLOCK ...]" in shown and "(default 0 1 2 4)" in shown
    assert "--learning-rate NUMBER" in shown and "(default nearest decoder search)" in shown


def test_all_missing_packages_are_named_in_one_error(folder, capsys, monkeypatch):
    for name in ("matplotlib", "rouge_score"):
        monkeypatch.setitem(sys.modules, name, None)  # the package cannot be imported
    assert main(COMMAND) == 2
    assert capsys.readouterr().err == (
        "hf-federated: error: audit: the command needs rouge-score and matplotlib. Install with: pip install"
        " 'hf-federated[metrics,plots]'\n"
    )
    monkeypatch.delitem(sys.modules, "matplotlib")
    assert main(COMMAND) == 2
    assert "needs rouge-score. Install with: pip install 'hf-federated[metrics]'" in capsys.readouterr().err
