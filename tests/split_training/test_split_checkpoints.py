"""Checkpoints of split training contain the part of each party, and resumed runs give identical results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from split_runs import LORA, PREFIX, STRATEGIES, clients_of, rows_of, split_trainer, trained_values, whole_model
from transformers import AutoModelForCausalLM, Seq2SeqTrainer

from hf_federated import SplitConfig, split_federate
from hf_federated.split import merge_parts
from hf_federated.split_training.saving import party_directory


def config_of(strategy: str) -> SplitConfig:
    return SplitConfig(strategy=strategy, average_every=None if strategy == "serial" else 2)


ADAPTERS = {"all": None, "lora": LORA, "prefix": PREFIX}


# Each strategy and each adapter once. The remaining combinations are slow and add little.
@pytest.mark.parametrize(
    ("strategy", "adapter"),
    [
        pytest.param(strategy, adapter, id=f"{strategy}-{name}", marks=[] if place == kind else pytest.mark.slow)
        for place, strategy in enumerate(STRATEGIES)
        for kind, (name, adapter) in enumerate(ADAPTERS.items())
    ],
)
def test_resumed_run_gives_identical_weights_and_logs(strategy, adapter, tmp_path):
    # With the serial strategy the checkpoint is between two turns.
    clients = clients_of(6 if strategy == "serial" else 8, 6)
    changes = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "warmup_steps": 2}
    model = {"model": whole_model(attention_dropout=0.2)}
    whole = split_trainer(tmp_path, clients, config_of(strategy), adapter, **changes, **model)
    whole.train()
    resumed = split_trainer(
        tmp_path, clients, config_of(strategy), adapter, **changes, model=whole_model(attention_dropout=0.2)
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected, resumed_values = trained_values(whole.model), trained_values(resumed.model)
    assert all(torch.equal(expected[name], resumed_values[name]) for name in expected)
    assert resumed.ledger.to_dict() == whole.ledger.to_dict()
    logs = [
        [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        for trainer in (whole, resumed)
    ]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all", "lora"])
def test_resuming_a_finished_run_gives_identical_weights(adapter, tmp_path):
    trainers = []
    for resume in (None, True):
        trainers.append(
            split_trainer(tmp_path, clients_of(2, 2), config_of("client_batch"), adapter, save_strategy="epoch")
        )
        trainers[-1].train(resume_from_checkpoint=resume)
    expected, resumed_values = (trained_values(trainer.model) for trainer in trainers)
    assert all(torch.equal(expected[name], resumed_values[name]) for name in expected)


def test_each_party_saves_its_part_with_block_numbers_of_whole_model(tmp_path):
    trainer = split_trainer(
        tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), save_strategy="steps", save_steps=1
    )
    trainer.train()
    checkpoint = tmp_path / "checkpoint-1"
    names = {
        party: set(load_file(party_directory(checkpoint, party) / "model.safetensors"))
        for party in ("client/client 0", "client/client 1", "server")
    }
    assert names["client/client 0"] == names["client/client 1"]
    blocks = {
        party: {name.split(".")[2] for name in parameter_names if ".layers." in name}
        for party, parameter_names in names.items()
    }
    assert blocks["client/client 0"] == {"0", "3"} and blocks["server"] == {"1", "2"}
    assert not any("embed" in name or "lm_head" in name for name in names["server"])
    merge_parts(
        [party_directory(checkpoint, "client/client 1"), party_directory(checkpoint, "server")], tmp_path / "merged"
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(
        merged.model.layers[3].mlp.up_proj.weight,
        load_file(party_directory(checkpoint, "client/client 1") / "model.safetensors")[
            "model.layers.3.mlp.up_proj.weight"
        ],
    )


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all", "lora"])
def test_parts_of_different_checkpoints_cannot_be_merged(adapter, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1}
    split_trainer(tmp_path, clients_of(4, 4), SplitConfig(), adapter, **changes).train()
    client, early, late = (
        party_directory(tmp_path / f"checkpoint-{step}", party)
        for step, party in ((2, "client/client 0"), (1, "server"), (2, "server"))
    )
    with pytest.raises(ValueError, match="different runs or steps"):
        merge_parts([client, early], tmp_path / "mixed")
    merge_parts([client, late], tmp_path / "merged")


@pytest.mark.parametrize(("adapter", "save_only_model"), [(None, False), (LORA, False), (LORA, True)])
def test_best_model_is_loaded_at_the_end_and_kept(adapter, save_only_model, tmp_path):
    name = "model.safetensors" if adapter is None else "adapter_model.safetensors"
    values = iter([1.0, 3.0, 2.0])
    trainer = split_trainer(
        tmp_path,
        clients_of(2, 2),
        SplitConfig(strategy="server_hierarchical"),
        adapter,
        eval_dataset=rows_of(5, 2),
        num_train_epochs=3,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="worth",
        greater_is_better=True,
        save_total_limit=1,
        save_only_model=save_only_model,
    )
    trainer.compute_metrics = lambda prediction: {"worth": next(values)}
    trainer.train()
    best = load_file(tmp_path / "checkpoint-2" / name)
    trainer.compute_metrics = None
    trainer.evaluate()
    trainer.save_model(str(tmp_path / "final"))
    final = load_file(tmp_path / "final" / name)
    assert all(torch.equal(best[name], final[name]) for name in best)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("damage", ["run", "party", "other clients", "other strategy"])
def test_checkpoint_of_other_run_or_with_missing_files_is_rejected(damage, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1}
    split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch"), LORA, **changes).train()
    checkpoint = tmp_path / "checkpoint-1"
    clients, config = clients_of(2, 2), SplitConfig(strategy="client_batch")
    if damage == "run":
        (checkpoint / "federated" / "split.safetensors").unlink()
        message = "is not a checkpoint of a split training run"
    elif damage == "party":
        path = party_directory(checkpoint, "server") / "training.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        message = "training.safetensors"
    elif damage == "other clients":
        clients = clients_of(2, 2, 2)
        message = "belongs to a run with clients"
    else:
        config = SplitConfig()
        message = "belongs to a run with config"
    with pytest.raises(ValueError, match=message):
        split_trainer(tmp_path, clients, config, LORA, **changes).train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.slow
def test_resume_after_kill_gives_identical_weights(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from pathlib import Path
            from split_runs import LORA, clients_of, split_trainer
            from transformers import TrainerCallback
            from hf_federated import SplitConfig

            out, kill = Path(sys.argv[1]), int(sys.argv[2])

            class Kill(TrainerCallback):
                def on_step_begin(self, args, state, control, **kwargs):
                    if state.global_step == kill:
                        os.kill(os.getpid(), signal.SIGKILL)

            config = SplitConfig(strategy="client_batch", average_every=3, encryption=True)
            trainer = split_trainer(out, clients_of(10, 8), config, LORA, save_strategy="steps", save_steps=2)
            trainer.add_callback(Kill())
            trainer.train(resume_from_checkpoint=True if list(out.glob("checkpoint-*")) else None)
            trainer.save_model(str(out / "final"))
            """
        )
    )
    adapters = []
    for name, kills in (("whole", []), ("killed", [3])):
        for kill in [*kills, -1]:
            process = subprocess.run(
                [sys.executable, script, tmp_path / name, str(kill)],
                env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path.cwd()}"},
                capture_output=True,
                check=False,
            )
            assert process.returncode == (0 if kill < 0 else -signal.SIGKILL), process.stderr[-2000:]
        adapters.append((tmp_path / name / "final" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


def test_saved_model_includes_split_config_and_ledger(tmp_path):
    trainer = split_trainer(tmp_path, clients_of(2, 2), SplitConfig(strategy="client_batch", average_every=1))
    trainer.train()
    trainer.save_model()
    assert SplitConfig.from_pretrained(tmp_path) == trainer.split
    assert len(json.loads((tmp_path / "federated_ledger.json").read_text())["rounds"]) >= 1


def test_split_federate_creates_class_of_other_trainers(tmp_path):
    trainer_class = split_federate(Seq2SeqTrainer)
    assert trainer_class.__name__ == "SplitFederatedSeq2SeqTrainer" and split_federate(Seq2SeqTrainer) is trainer_class
    with pytest.raises(TypeError, match="a split trainer already"):
        split_federate(trainer_class)
    with pytest.raises(TypeError, match="subclass of transformers.Trainer"):
        split_federate(int)
