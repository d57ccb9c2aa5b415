"""`FederatedConfig`: command line, files and invalid values."""

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


def test_command_line_without_options_gives_the_defaults():
    assert parse()[1] == FederatedConfig()


def test_config_parses_together_with_training_arguments():
    args, config = parse(
        *("--seed", "7", "--num_rounds", "5", "--clients_per_round", "0.5", "--local_steps", "3"),
        *("--max_rows_per_round", "250", "--balance", "min", "--max_examples_per_client", "900"),
        *("--aggregation", "fedopt", "--aggregation_kwargs", '{"server_lr": 0.1, "server_betas": [0.9, 0.99]}'),
        *("--client_optimizer_state", "carry", "--evaluate_clients", "--freeze", "embeddings+2"),
        *("--client_store", "disk", "--federation_seed", "11"),
        *("--exchange", "bert.*", "--keep_local", "head*", "*norm*"),
    )
    assert args.seed == 7
    assert config == FederatedConfig(
        num_rounds=5,
        clients_per_round=0.5,
        local_steps=3,
        max_rows_per_round=250,
        balance="min",
        max_examples_per_client=900,
        aggregation="fedopt",
        aggregation_kwargs={"server_lr": 0.1, "server_betas": [0.9, 0.99]},
        client_optimizer_state="carry",
        evaluate_clients=True,
        freeze="embeddings+2",
        client_store="disk",
        federation_seed=11,
        exchange="bert.*",
        keep_local=["head*", "*norm*"],
    )


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("10", 10), ("1.0", 1.0), ("0.25", 0.25), ("1e-1", 0.1), (".5", 0.5)]
)
def test_share_and_count_are_distinguished_by_the_decimal_point(text, expected):
    clients_per_round = parse("--clients_per_round", text)[1].clients_per_round
    assert (type(clients_per_round), clients_per_round) == (type(expected), expected)


def test_numbers_of_examples_of_each_client_survive_the_command_line_and_a_file(tmp_path):
    config = parse("--max_examples_per_client", '{"north": 40, "south": 700}')[1]
    assert config.max_examples_per_client == {"north": 40, "south": 700}
    config.save_pretrained(tmp_path)
    assert FederatedConfig.from_pretrained(tmp_path) == config


def test_every_field_has_help_and_is_parsed(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for item in dataclasses.fields(FederatedConfig):
        assert f"--{item.name}" in text
        # argparse breaks lines within words, so only the first words are compared.
        assert " ".join(item.metadata["help"].split()[:2]) in text


def test_config_parses_from_a_dictionary_and_a_json_file(tmp_path):
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


def test_config_shares_no_field_with_training_arguments():
    shared = {item.name for item in dataclasses.fields(FederatedConfig)} & {
        item.name for item in dataclasses.fields(TrainingArguments)
    }
    assert not shared


def test_config_survives_a_file(tmp_path):
    config = FederatedConfig(num_rounds=2, clients_per_round=3, aggregation="fedprox", freeze="1", federation_seed=5)
    config.save_pretrained(tmp_path / "new" / "directory")
    assert FederatedConfig.from_pretrained(tmp_path / "new" / "directory") == config
    values = json.loads((tmp_path / "new" / "directory" / FederatedConfig.file_name).read_text(encoding="utf-8"))
    assert list(values) == sorted(item.name for item in dataclasses.fields(FederatedConfig))


@pytest.mark.parametrize(
    ("exchange", "keep_local"), [("auto", None), ("bert.*", ["head*", "*norm*"]), (["a*", "b*"], "head")]
)
def test_selections_of_tensors_survive_a_file(tmp_path, exchange, keep_local):
    config = FederatedConfig(exchange=exchange, keep_local=keep_local)
    config.save_pretrained(tmp_path)
    loaded = FederatedConfig.from_pretrained(tmp_path)
    assert loaded == config and (loaded.exchange, loaded.keep_local) == (exchange, keep_local)
    assert FederatedConfig(exchange=[exchange] if isinstance(exchange, str) else exchange).exchange == exchange


def is_head(name, parameter):
    return name.startswith("head.")


@pytest.mark.parametrize("field", ["exchange", "keep_local"])
def test_function_is_saved_by_name_and_refused_when_it_is_loaded(tmp_path, field):
    config = FederatedConfig(**{field: is_head})
    assert config.to_dict()[field] == f"function {__name__}.is_head"
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"`{field}` is 'function .*is_head'.*Pass the function in code, or use patt"):
        FederatedConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("share", [1, 1.0, 7, 0.3])
def test_file_distinguishes_count_and_share(tmp_path, share):
    FederatedConfig(clients_per_round=share).save_pretrained(tmp_path)
    loaded = FederatedConfig.from_pretrained(tmp_path).clients_per_round
    assert (type(loaded), loaded) == (type(share), share)


def test_instance_is_saved_as_name_and_settings(tmp_path):
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
        ("clients_per_round", 0.0, "`clients_per_round` is 0.0; a share must be in (0, 1]"),
        (
            "clients_per_round",
            1.5,
            "`clients_per_round` is 1.5; a share must be in (0, 1]. Set an integer for a count",
        ),
        ("clients_per_round", float("nan"), "`clients_per_round` is nan; a share must be in (0, 1]"),
        ("clients_per_round", 0, "`clients_per_round` is 0; it must be at least 1"),
        ("clients_per_round", -3, "`clients_per_round` is -3; it must be at least 1"),
        ("clients_per_round", True, "`clients_per_round` is True; set a count (10) or a share (0.1)"),
        ("clients_per_round", "half", "`clients_per_round` is 'half'; set a count (10) or a share (0.1)"),
        ("local_epochs", 0, "`local_epochs` is 0; it must be an integer of at least 1. Use `local_steps` for less"),
        (
            "local_epochs",
            1.5,
            "`local_epochs` is 1.5; it must be an integer of at least 1. Use `local_steps` for less",
        ),
        ("local_steps", 0, "`local_steps` is 0; it must be at least 1"),
        (
            "max_rows_per_round",
            0,
            "`max_rows_per_round` is 0; it must be at least 1, or None for all examples",
        ),
        ("max_examples_per_client", 0, "`max_examples_per_client` is 0; it must be an integer of at least 1, or such"),
        ("max_examples_per_client", "many", "`max_examples_per_client` is 'many'; it must be an integer"),
        ("max_examples_per_client", {"north": 2.5}, "`max_examples_per_client` is {'north': 2.5}; it must be"),
        ("max_examples_per_client", {}, "`max_examples_per_client` is {}; it must be"),
        ("balance", "max", "`balance` is 'max'; allowed are 'min'"),
        ("min_clients", 0, "`min_clients` is 0; it must be at least 1"),
        ("exchange", "everything", "`exchange` is 'everything'; allowed are 'auto', 'trainable', 'adapter', 'all'"),
        ("exchange", [], "`exchange` is []; set a pattern such as 'classifier*', a list of patterns, or a function"),
        ("keep_local", "", "`keep_local` is ''; set a pattern"),
        ("keep_local", ["head*", 3], "`keep_local` is ['head*', 3]; set a pattern"),
        ("client_optimizer_state", "keep", "`client_optimizer_state` is 'keep'; allowed are 'reset', 'carry'"),
        ("lr_schedule", "local", "`lr_schedule` is 'local'; allowed are 'global', 'round'"),
        ("parallelism", "gpu", "`parallelism` is 'gpu'; allowed are 'data', 'clients'"),
        ("client_store", "cloud", "`client_store` is 'cloud'; allowed are 'memory', 'disk'"),
        ("aggregation_kwargs", "{lr: 1}", "`aggregation_kwargs` is not valid JSON"),
        ("aggregation_kwargs", "[1]", "`aggregation_kwargs` must be a dictionary, got list"),
        ("aggregation_kwargs", 3, "`aggregation_kwargs` must be a dictionary, got int"),
    ],
)
def test_invalid_value_raises_an_error_with_the_allowed_values(field, value, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        FederatedConfig(**{field: value})


def test_unknown_field_raises_an_error_with_the_known_fields():
    with pytest.raises(ValueError, match=r"Unknown fields \['rounds'\] of FederatedConfig; .*'num_rounds'"):
        FederatedConfig.from_dict({"rounds": 3})


def test_number_of_frozen_layers_becomes_text():
    assert FederatedConfig(freeze=2).freeze == "2"  # type: ignore[arg-type]


# ---- Names of algorithms


def test_every_name_builds_its_algorithm():
    for name, algorithm in AGGREGATIONS.items():
        built = build_aggregation(name)
        assert type(built) is algorithm and algorithm.name == name


def test_unknown_algorithm_raises_an_error_with_the_known_names():
    with pytest.raises(ValueError) as error:
        build_aggregation("fedsgd")
    assert "'fedsgd'" in str(error.value) and all(name in str(error.value) for name in AGGREGATIONS)


def test_unknown_argument_raises_an_error_with_the_allowed_arguments():
    with pytest.raises(
        ValueError,
        match=r"aggregation_kwargs.*'fedprox'.*eta.*Allowed arguments are \['mu', 'proximal_weight', 'weigh",
    ):
        build_aggregation("fedprox", {"eta": 1})


def test_instance_is_returned_unchanged_and_accepts_no_arguments():
    algorithm = FedAvg("uniform")
    assert build_aggregation(algorithm) is algorithm
    with pytest.raises(ValueError, match="pass the arguments to the constructor of the instance"):
        build_aggregation(algorithm, {"weighting": "examples"})


def test_to_dict_does_not_change_the_configuration() -> None:
    config = FederatedConfig(num_rounds=1, aggregation=FedOpt(server_lr=0.5))
    assert config.to_dict()["aggregation_kwargs"] == {"server_lr": 0.5}
    assert config.aggregation_kwargs == {}
