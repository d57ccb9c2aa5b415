"""`FederatedConfig`: on a command line, in a file, and with bad values."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_federated import AGGREGATIONS, FedAvg, FederatedConfig, FedOpt
from hf_federated.aggregation import build_aggregation


def parse(*arguments: str) -> tuple[TrainingArguments, FederatedConfig]:
    parser = HfArgumentParser((TrainingArguments, FederatedConfig))
    return parser.parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu", "True", *arguments])


def test_a_command_line_without_its_options_gives_the_defaults():
    assert parse()[1] == FederatedConfig()


def test_it_parses_beside_training_arguments():
    args, config = parse(
        *("--seed", "7", "--num_rounds", "5", "--clients_per_round", "0.5", "--local_steps", "3"),
        *("--max_rows_per_round", "250", "--balance", "min"),
        *("--aggregation", "fedopt", "--aggregation_kwargs", '{"server_lr": 0.1, "server_betas": [0.9, 0.99]}'),
        *("--client_optimizer_state", "carry", "--evaluate_clients", "--freeze", "embeddings+2"),
        *("--client_store", "disk", "--federation_seed", "11"),
    )
    assert args.seed == 7
    assert config == FederatedConfig(
        num_rounds=5,
        clients_per_round=0.5,
        local_steps=3,
        max_rows_per_round=250,
        balance="min",
        aggregation="fedopt",
        aggregation_kwargs={"server_lr": 0.1, "server_betas": [0.9, 0.99]},
        client_optimizer_state="carry",
        evaluate_clients=True,
        freeze="embeddings+2",
        client_store="disk",
        federation_seed=11,
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("10", 10), ("1.0", 1.0), ("0.25", 0.25), ("1e-1", 0.1), (".5", 0.5)]
)
def test_a_share_is_told_from_a_count_by_its_point(text, expected):
    clients_per_round = parse("--clients_per_round", text)[1].clients_per_round
    assert (type(clients_per_round), clients_per_round) == (type(expected), expected)


def test_every_field_has_help_and_is_parsed(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for item in dataclasses.fields(FederatedConfig):
        assert f"--{item.name}" in text
        # argparse breaks lines within words; the first words are enough.
        assert " ".join(item.metadata["help"].split()[:2]) in text


def test_it_parses_from_a_dictionary_and_a_json_file(tmp_path):
    values = {
        "output_dir": "out",
        "num_rounds": 3,
        "clients_per_round": 2,
        "aggregation_kwargs": {"weighting": "uniform"},
    }
    (tmp_path / "arguments.json").write_text(json.dumps(values))
    parser = HfArgumentParser((TrainingArguments, FederatedConfig))
    expected = FederatedConfig(num_rounds=3, clients_per_round=2, aggregation_kwargs={"weighting": "uniform"})
    assert parser.parse_dict(values)[1] == expected
    assert parser.parse_json_file(tmp_path / "arguments.json")[1] == expected


def test_it_leaves_training_arguments_alone():
    shared = {item.name for item in dataclasses.fields(FederatedConfig)} & {
        item.name for item in dataclasses.fields(TrainingArguments)
    }
    assert not shared


def test_it_survives_a_file(tmp_path):
    config = FederatedConfig(num_rounds=2, clients_per_round=3, aggregation="fedprox", freeze="1", federation_seed=5)
    config.save_pretrained(tmp_path / "new" / "directory")
    assert FederatedConfig.from_pretrained(tmp_path / "new" / "directory") == config
    values = json.loads((tmp_path / "new" / "directory" / FederatedConfig.file_name).read_text(encoding="utf-8"))
    assert list(values) == sorted(item.name for item in dataclasses.fields(FederatedConfig))


@pytest.mark.parametrize("share", [1, 1.0, 7, 0.3])
def test_a_file_keeps_count_and_share_apart(tmp_path, share):
    FederatedConfig(clients_per_round=share).save_pretrained(tmp_path)
    loaded = FederatedConfig.from_pretrained(tmp_path).clients_per_round
    assert (type(loaded), loaded) == (type(share), share)


def test_an_instance_is_saved_by_name_and_settings(tmp_path):
    algorithm = FedOpt("adam", server_lr=0.1, server_betas=(0.5, 0.6))
    FederatedConfig(aggregation=algorithm).save_pretrained(tmp_path)
    loaded = FederatedConfig.from_pretrained(tmp_path)
    assert loaded.aggregation == "fedopt"
    rebuilt = build_aggregation(loaded.aggregation, loaded.aggregation_kwargs)
    assert isinstance(rebuilt, FedOpt) and rebuilt.settings() == algorithm.settings()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_rounds", 0, "`num_rounds` is 0; it must be at least 1"),
        ("clients_per_round", 0.0, "`clients_per_round` is 0.0; a share lies in (0, 1]"),
        ("clients_per_round", 1.5, "`clients_per_round` is 1.5; a share lies in (0, 1]. A count is an integer"),
        ("clients_per_round", float("nan"), "`clients_per_round` is nan; a share lies in (0, 1]"),
        ("clients_per_round", 0, "`clients_per_round` is 0; sample at least one client"),
        ("clients_per_round", -3, "`clients_per_round` is -3; sample at least one client"),
        ("clients_per_round", True, "`clients_per_round` is True; give a count (10) or a share (0.1)"),
        ("clients_per_round", "half", "`clients_per_round` is 'half'; give a count (10) or a share (0.1)"),
        ("local_epochs", 0, "`local_epochs` is 0; give a whole number of at least 1, or use `local_steps`"),
        ("local_epochs", 1.5, "`local_epochs` is 1.5; give a whole number of at least 1, or use `local_steps`"),
        ("local_steps", 0, "`local_steps` is 0; it must be at least 1"),
        ("max_rows_per_round", 0, "`max_rows_per_round` is 0; it must be at least 1. Leave it out for all rows"),
        ("balance", "max", "`balance` is 'max'; allowed are 'min'"),
        ("min_clients", 0, "`min_clients` is 0; a round needs at least one update"),
        ("exchange", "everything", "`exchange` is 'everything'; allowed are 'auto', 'trainable', 'adapter', 'all'"),
        ("client_optimizer_state", "keep", "`client_optimizer_state` is 'keep'; allowed are 'reset', 'carry'"),
        ("lr_schedule", "local", "`lr_schedule` is 'local'; allowed are 'global', 'round'"),
        ("parallelism", "gpu", "`parallelism` is 'gpu'; allowed are 'data', 'clients'"),
        ("client_store", "cloud", "`client_store` is 'cloud'; allowed are 'memory', 'disk'"),
        ("aggregation_kwargs", "{lr: 1}", "`aggregation_kwargs` is not JSON"),
        ("aggregation_kwargs", "[1]", "`aggregation_kwargs` must be a dictionary, got list"),
        ("aggregation_kwargs", 3, "`aggregation_kwargs` must be a dictionary, got int"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(field, value, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        FederatedConfig(**{field: value})


def test_an_unknown_field_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"Unknown fields \['rounds'\] of FederatedConfig; .*'num_rounds'"):
        FederatedConfig.from_dict({"rounds": 3})


def test_numbers_of_layers_to_freeze_become_text():
    assert FederatedConfig(freeze=2).freeze == "2"  # type: ignore[arg-type]


# ---- The names of algorithms


def test_every_name_builds_its_algorithm():
    for name, algorithm in AGGREGATIONS.items():
        built = build_aggregation(name)
        assert type(built) is algorithm and algorithm.name == name


def test_an_unknown_algorithm_is_refused_with_the_names():
    with pytest.raises(ValueError) as error:
        build_aggregation("fedsgd")
    assert "'fedsgd'" in str(error.value) and all(name in str(error.value) for name in AGGREGATIONS)


def test_an_argument_that_does_not_fit_is_refused_with_the_allowed_ones():
    with pytest.raises(
        ValueError, match=r"aggregation_kwargs.*'fedprox'.*mu.*Allowed are \['proximal_weight', 'weigh"
    ):
        build_aggregation("fedprox", {"mu": 1})


def test_an_instance_is_taken_as_it_is_and_without_arguments():
    algorithm = FedAvg("uniform")
    assert build_aggregation(algorithm) is algorithm
    with pytest.raises(ValueError, match="give them to the instance instead"):
        build_aggregation(algorithm, {"weighting": "examples"})
