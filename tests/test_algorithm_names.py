"""Algorithms by name: built-in names, a researcher's own classes, and classes of installed packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from federations import build_federation
from tiny import arguments, rows, same_weights, tiny_model
from transformers.utils import logging

from hf_federated import (
    AGGREGATIONS,
    DISTILLATIONS,
    DSFL,
    Aggregation,
    FedAvg,
    FederatedConfig,
    FederatedTrainer,
    FedProx,
)
from hf_federated.aggregation import build_aggregation
from hf_federated.aggregation.validation import check_aggregate
from hf_federated.cards import RunRecord, render
from hf_federated.distillation import build_distillation
from hf_federated.trainer.launch_consistency import describe_setup
from hf_federated.utils import algorithm_names


MODULE = '''
"""Algorithms of a researcher."""

from dataclasses import dataclass

from hf_federated import Aggregation, Distillation


class Halfway(Aggregation):
    """The server moves a share of the way to the mean of the clients."""

    def __init__(self, share: float = 0.5, weighting: str = "examples") -> None:
        super().__init__(weighting)
        self.share = share
        self.num_rounds = 0

    def aggregate(self, accumulator, state):
        mean = accumulator.mean.finalize()
        self.num_rounds += 1
        return {name: value.lerp(mean[name], self.share) for name, value in state.items()}

    def state_dict(self):
        return {"num_rounds": self.num_rounds}

    def load_state_dict(self, state):
        self.num_rounds = state["num_rounds"]


@dataclass(kw_only=True, repr=False, eq=False)
class First(Distillation):
    """The server learns the predictions of the first client."""

    scale: float = 1.0

    def ensemble(self, predictions, cohort):
        return self.scale * next(iter(predictions.values()))


class Unrelated:
    pass
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that is importable and not part of the package."""
    folder = tmp_path / "own" / "my_research"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "methods.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder.parent))
    for name in ("my_research", "my_research.methods"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "my_research.methods"


def publish(folder: Path, group: str, *lines: str) -> None:
    """Write the metadata of an installed package with entry points."""
    info = folder / "research_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: research-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


# ---- Built-in names


def test_mappings_contain_every_built_in_class_under_its_name():
    for mapping in (AGGREGATIONS, DISTILLATIONS):
        assert {name: cls.name for name, cls in mapping.items()} == {name: name for name in mapping}
        with pytest.raises(TypeError):  # a name that is added to the mapping would not be found
            mapping["mine"] = FedAvg


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("aggregation", "fedporx", ["`aggregation` is 'fedporx'; did you mean 'fedprox'? Allowed", *AGGREGATIONS]),
        ("aggregation", "FedAvgM", ["did you mean 'fedavg'?", "my_package.module:MyClass"]),
        ("aggregation", "bulyan", ["`aggregation` is 'bulyan'; allowed are 'fedavg'", "`Aggregation` subclass"]),
        ("aggregation", FedProx, ["is the class FedProx", "FedProx()"]),
        ("distillation", "feddff", ["did you mean 'feddf'?", *DISTILLATIONS, "a `Distillation` subclass"]),
        ("distillation", "a:b:c", ["`distillation` is 'a:b:c'"]),
    ],
)
def test_unknown_name_is_refused_when_the_configuration_is_built(field, value, words):
    with pytest.raises(ValueError) as caught:
        FederatedConfig(**{field: value})
    for word in words:
        assert word in str(caught.value)


def test_configuration_checks_names_without_importing_torch():
    code = (
        "import importlib.util, sys\n"
        "package = importlib.util.find_spec('hf_federated').submodule_search_locations[0]\n"
        "sys.modules['hf_federated'] = module = type(sys)('hf_federated')\n"  # without the public names
        "module.__path__ = [package]\n"
        "from hf_federated.config import FederatedConfig\n"
        "FederatedConfig(aggregation='scaffold', distillation='my.module:Own')\n"
        "try: FederatedConfig(aggregation='scafold')\n"
        "except ValueError as error: print(error)\n"
        "print(*({'torch', 'transformers'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    error, imported = result.stdout.splitlines()
    assert "did you mean 'scaffold'?" in error and imported == ""


# ---- A researcher's own classes


def test_own_aggregation_is_built_from_its_reference(own_module):
    algorithm = build_aggregation(f"{own_module}:Halfway", {"share": 0.25})
    assert (algorithm.settings(), algorithm.name) == ({"share": 0.25, "weighting": "examples"}, "Halfway")
    with pytest.raises(ValueError, match=r"Invalid `aggregation_kwargs`.*step.*\['share', 'weighting'\]"):
        build_aggregation(f"{own_module}:Halfway", {"step": 1})


def test_own_distillation_is_built_from_its_reference(own_module):
    algorithm = build_distillation(f"{own_module}:First", {"scale": 2.0, "server_epochs": 3})
    assert (algorithm.scale, algorithm.server_epochs, algorithm.name) == (2.0, 3, "First")
    with pytest.raises(ValueError, match="Invalid `distillation_kwargs`.*scala.*'client_epochs'.*'scale'"):
        build_distillation(f"{own_module}:First", {"scala": 2.0})


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_package.module:Mine", ["the module 'no_such_package.module' cannot be imported", "from the folder"]),
        ("my_research.methods:Halfwy", ["has no class 'Halfwy'", "methods.py", "subclasses are Halfway."]),
        ("my_research.methods:Unrelated", ["is the class Unrelated", "subclass of `hf_federated.Aggregation`"]),
        ("my_research.methods:First", ["is the class First", "subclass of `hf_federated.Aggregation`"]),
        ("my_research.methods:__doc__", ["of type str", "subclass of `hf_federated.Aggregation`"]),
    ],
)
def test_reference_to_no_aggregation_is_refused_by_name(own_module, reference, words):
    config = FederatedConfig(aggregation=reference)  # the class may be missing where a configuration is read
    with pytest.raises(ValueError) as caught:
        build_aggregation(config.aggregation)
    for word in [f"`aggregation` is {reference!r}", *words]:
        assert word in str(caught.value)


def test_wrong_base_class_of_a_distillation_is_refused_by_name(own_module):
    with pytest.raises(ValueError, match="`distillation` is .* the class Halfway.*`hf_federated.Distillation`"):
        build_distillation(f"{own_module}:Halfway")


def test_training_with_a_reference_equals_training_with_the_instance(own_module, tmp_path):
    named = {"aggregation": f"{own_module}:Halfway", "aggregation_kwargs": {"share": 0.25}}
    by_name = build_federation(tmp_path / "a", federation=named)
    by_instance = build_federation(tmp_path / "b", federation={"aggregation": build_aggregation(*named.values())})
    average = build_federation(tmp_path / "c")
    for trainer in (by_name, by_instance, average):
        trainer.train()
    assert same_weights(by_name.model, by_instance.model)
    assert not same_weights(by_name.model, average.model)


@pytest.mark.parametrize("as_instance", [False, True])
def test_saved_configuration_contains_the_reference_and_builds_the_class(own_module, tmp_path, as_instance):
    algorithm = build_aggregation(f"{own_module}:Halfway", {"share": 0.25})
    reference, kwargs = f"{own_module}:Halfway", {"share": 0.25}
    config = (
        FederatedConfig(aggregation=algorithm)
        if as_instance
        else FederatedConfig(aggregation=reference, aggregation_kwargs=kwargs)
    )
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / FederatedConfig.file_name).read_text())
    assert (values["aggregation"], values["aggregation_kwargs"]) == (reference, kwargs)
    loaded = FederatedConfig.from_pretrained(tmp_path)
    rebuilt = build_aggregation(loaded.aggregation, loaded.aggregation_kwargs)
    assert type(rebuilt) is type(algorithm) and rebuilt.settings() == algorithm.settings()


def test_instance_of_a_local_class_is_saved_and_refused_when_it_is_built(tmp_path):
    class Local(Aggregation):
        pass

    FederatedConfig(aggregation=Local()).save_pretrained(tmp_path)
    loaded = FederatedConfig.from_pretrained(tmp_path)
    assert loaded.aggregation.endswith(".<locals>.Local")
    with pytest.raises(ValueError, match="has no class"):
        build_aggregation(loaded.aggregation)


def test_run_with_a_reference_resumes_and_its_card_names_the_class(own_module, tmp_path):
    named = {"aggregation": f"{own_module}:Halfway", "aggregation_kwargs": {"share": 0.25}}
    whole = build_federation(tmp_path / "whole", federation=named, num_rounds=3)
    whole.train()
    cut = build_federation(tmp_path / "cut", federation=named, num_rounds=3, save_strategy="steps", save_steps=1)
    cut.train()
    resumed = build_federation(tmp_path / "cut", federation=named, num_rounds=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-1"))
    assert same_weights(resumed.model, whole.model) and resumed.aggregation.num_rounds == 3
    other = build_federation(tmp_path / "cut", federation={**named, "aggregation_kwargs": {"share": 0.5}})
    with pytest.raises(ValueError, match=r"aggregation: 'Halfway\(\)' in this run, 'Halfway\(share=0.25\)' in the"):
        other.train(resume_from_checkpoint=True)
    assert "Halfway(share=0.25)" in render(RunRecord.from_trainer(whole))


def test_processes_compare_the_classes_and_settings_of_references(own_module, tmp_path):
    def lines(share: float) -> dict[str, str]:
        federation = {"aggregation": f"{own_module}:Halfway", "aggregation_kwargs": {"share": share}}
        trainer = build_federation(tmp_path, federation=federation)
        return describe_setup(trainer._federation_setup, trainer.args, {"clients": trainer.clients})

    quarter = lines(0.25)
    assert quarter["FederatedConfig.aggregation"] == f"'{own_module}:Halfway'" and quarter["aggregation"] == "Halfway"
    assert {name for name, text in lines(0.5).items() if text != quarter[name]} == {
        "FederatedConfig.aggregation_kwargs.share",
        "aggregation.share",
    }


def test_subclass_of_fedavg_is_not_silently_replaced_by_a_distillation(tmp_path):
    class OwnAverage(FedAvg):
        pass

    with pytest.raises(ValueError, match="aggregation='OwnAverage' does not work with.*there is nothing to average"):
        FederatedTrainer(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset={"a": rows(4), "b": rows(4, seed=1)},
            public_dataset=rows(4, seed=2).remove_columns("labels"),
            federation=FederatedConfig(num_rounds=1, aggregation=OwnAverage(), distillation=DSFL()),
        )


# ---- Entry points of installed packages


def test_entry_point_of_an_installed_package_is_found_by_its_name(own_module, tmp_path):
    publish(tmp_path / "own", "hf_federated.aggregations", f"halfway = {own_module}:Halfway")
    config = FederatedConfig(aggregation="halfway", aggregation_kwargs={"share": 0.75})
    assert build_aggregation(config.aggregation, config.aggregation_kwargs).share == 0.75
    with pytest.raises(ValueError, match=r"did you mean 'halfway'\? Allowed are 'fedavg',.*'halfway', a reference"):
        FederatedConfig(aggregation="halfwy")
    with pytest.raises(ValueError, match="`distillation` is 'halfway'"):
        FederatedConfig(distillation="halfway")


def test_distillation_of_an_installed_package_is_found_by_its_name(own_module, tmp_path):
    publish(tmp_path / "own", "hf_federated.distillations", f"first = {own_module}:First")
    assert type(build_distillation(FederatedConfig(distillation="first").distillation)).__name__ == "First"


def test_built_in_name_has_precedence_over_an_entry_point_with_a_warning(own_module, tmp_path, monkeypatch):
    publish(tmp_path / "own", "hf_federated.aggregations", f"fedavg = {own_module}:Halfway")
    messages: list[str] = []
    logger = logging.get_logger("hf_federated.utils.algorithm_names")
    monkeypatch.setattr(logger, "warning", lambda message, *args, **kwargs: messages.append(message))
    algorithm_names.warn_if_published.cache_clear()
    assert type(build_aggregation("fedavg")) is FedAvg
    assert type(build_aggregation("fedavg")) is FedAvg and len(messages) == 1
    assert re.search(rf"'fedavg' is the built-in algorithm.*{own_module}:Halfway.*same name", messages[0])


def test_entry_point_that_cannot_be_imported_is_named(own_module, tmp_path):
    publish(tmp_path / "own", "hf_federated.aggregations", f"gone = {own_module}:Gone")
    with pytest.raises(ValueError, match=f"`aggregation` is 'gone'.*'{own_module}:Gone'.*Reinstall the package"):
        build_aggregation("gone")


# ---- State of an own algorithm


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (lambda state: None, "`Wrong.aggregate` returned NoneType; it must return a dictionary"),
        (
            lambda state: {name: value for name, value in state.items() if name != "bias"},
            "returned a state with no value for bias. It must return",
        ),
        (lambda state: {**state, "extra": state["bias"]}, "returned a state with the unknown names extra."),
        (
            lambda state: {**state, "bias": state["bias"][:1]},
            "wrong values: bias is a tensor of shape [1] instead of a tensor of shape [2]",
        ),
        (lambda state: {**state, "bias": 0.5}, "bias is float instead of a tensor of shape [2]"),
        (lambda state: {}, "no value for weight.0, weight.1, weight.2, weight.3, weight.4 and 2 more"),
    ],
)
def test_aggregate_with_a_wrong_result_names_the_algorithm_and_the_tensors(aggregate, message):
    class Wrong(Aggregation):
        def aggregate(self, accumulator, state):
            return aggregate(state)

    state = {**{f"weight.{number}": torch.zeros(3) for number in range(6)}, "bias": torch.zeros(2)}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        check_aggregate(Wrong(), Wrong().aggregate(None, state), state)


def test_training_stops_if_aggregate_returns_wrong_names(tmp_path):
    class WithoutBiases(Aggregation):
        def aggregate(self, accumulator, state):
            mean = super().aggregate(accumulator, state)
            return {name: value for name, value in mean.items() if not name.endswith("bias")}

    trainer = build_federation(tmp_path, federation={"aggregation": WithoutBiases()})
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(ValueError, match="`WithoutBiases.aggregate` returned a state with no value for .*bias"):
        trainer.train()
    # The failed round leaves the model as it was.
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
