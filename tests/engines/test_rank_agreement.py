"""Processes with different setups raise an error before training."""

from __future__ import annotations

from pathlib import Path

import pytest
from federations import build_federation
from launches import logs, same_bits, weights
from tiny import arguments, rows

from hf_federated.trainer.launch_consistency import describe_setup


@pytest.mark.parametrize(
    "setting, line",
    [
        ("seed", "TrainingArguments.seed: 42 in processes 0, 1; 7 in process 2"),
        ("learning rate", "TrainingArguments.learning_rate: 0.001 in processes 0, 1; 0.5 in process 2"),
        ("parallelism", "FederatedConfig.parallelism: 'clients' in processes 0, 1; 'data' in process 2"),
        ("aggregation", "aggregation: FedAvg in processes 0, 1; FedOpt in process 2"),
        ("names", "ids of the clients: client 0, client 1"),
        ("rows", "examples of the clients: "),
    ],
)
def test_different_setting_is_named_in_every_process(launch, tmp_path: Path, setting: str, line: str) -> None:
    answer = launch(tmp_path, "fedavg", 3, differ=setting)
    assert answer["codes"] == [1, 1, 1], logs(tmp_path)
    for rank in range(3):
        log = (tmp_path / f"rank-{rank}.log").read_text()
        assert "DisagreementError: The processes of this launch are set up differently:" in log
        assert any(printed.startswith(f"  {line}") for printed in log.splitlines())


@pytest.mark.parametrize("setting", ["place", "fingerprints"])
def test_settings_without_effect_on_the_result_may_differ(launch, finished, tmp_path: Path, setting: str) -> None:
    answer = launch(tmp_path, "fedavg", 2, differ=setting)
    assert answer["codes"] == [0, 0], logs(tmp_path)
    assert same_bits(weights(finished("fedavg", 2)), weights(tmp_path))


def test_secrets_are_not_described(tmp_path) -> None:
    args = arguments("run", hub_token="hf_secret", optim_args="https://me:secret@host")
    args.lr_scheduler_kwargs = {"api_key": "secret", "num_cycles": 2}
    trainer = build_federation(tmp_path)
    lines = describe_setup(trainer._federation_setup, args, {"clients": trainer.clients})
    assert lines["TrainingArguments.lr_scheduler_kwargs.num_cycles"] == "2"
    assert not any("secret" in text for text in lines.values())


def test_equal_setups_have_equal_descriptions(tmp_path) -> None:
    def lines(seed: int) -> dict[str, str]:
        trainer = build_federation(tmp_path, {"a": rows(2), "b": rows(3, seed=1)})
        return describe_setup(trainer._federation_setup, arguments("run", seed=seed), {"clients": trainer.clients})

    assert lines(1) == lines(1)
    assert {name for name, text in lines(1).items() if text != lines(2)[name]} == {"TrainingArguments.seed"}
