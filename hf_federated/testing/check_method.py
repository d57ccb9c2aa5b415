"""`check_method`: run a method on every engine, interrupted and isolated, and compare the bytes."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..aggregation import Aggregation
from ..codecs import Codec
from ..distillation import Distillation
from ..engines import Engine, LocalEngine, NetworkEngine, RankEngine
from ..postprocessing import Postprocessor
from ..secure_aggregation import SecureAggregation
from ..server import UpdateCollector
from ..utils.algorithm_names import import_reference
from ..utils.optional_packages import require_packages
from .checks import CHECKS, Check, Trials, check_refusal, refusal
from .processes import WorkerProcess
from .report import ConformanceError, ConformanceReport, Outcome
from .scenario import Scenario


# The engines of `check_method`, and how to build one to ask whether a method refuses it.
ENGINE_NAMES: Mapping[str, Callable[[], Engine]] = {
    "local": LocalEngine,
    "serialized": functools.partial(LocalEngine, serialize=True),
    "ranks": RankEngine,
    "network": lambda: NetworkEngine(["client"], address="127.0.0.1:0", insecure=True),
}
# Where a trainer gets the objects of each base class.
FAMILIES: Mapping[type, str] = {
    Aggregation: "aggregation",
    Distillation: "distillation",
    UpdateCollector: "collector",
    Postprocessor: "postprocessors",
    SecureAggregation: "secure_aggregation",
    Codec: "exchange_codec",
}


@functools.cache
def shared_worker() -> WorkerProcess:
    """Return the worker process that all checks of this process share."""
    return WorkerProcess()


def check_method(
    method: Any,
    arguments: Mapping[str, Any] | None = None,
    *,
    engines: Sequence[str] = tuple(ENGINE_NAMES),
    federation: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    verbose: bool = True,
    worker: WorkerProcess | None = None,
) -> ConformanceReport:
    """
    Check that a method gives the same bytes on every engine, isolated, killed and resumed.

    The method runs for three rounds in a federation of five clients with tiny BERT models, on the CPU and offline.
    Each run is a separate process. All runs must end in the bytes of the run on [`LocalEngine`]: weights, ledger,
    states of clients and logs.

    | check | finds |
    |---|---|
    | settings | a constructor argument that has no attribute of its name |
    | trains | an error, or an update that the server rejects |
    | messages | a message whose class is not in `messages`, or that changes when it is sent |
    | serialized | a message that shares objects with its receiver |
    | random numbers | random numbers from the global generators |
    | order of replies | a sum that depends on the order of the clients |
    | server weights | a local training that does not start from the received state |
    | separate clients | a client half that uses state of the server or of other clients |
    | memory | what a client half keeps outside its memory |
    | other clients | a client half that uses the examples of other clients |
    | estimate | messages whose bytes `hf-federated estimate` cannot know |
    | killed and resumed | state of the server that is not in `state_dict` |
    | 1 rank, 2 ranks, resumed on ranks | a result that depends on the number of processes |
    | network | a result that depends on the machine of a client |

    A method that does not support an engine lists it in `refused_engines`. The check is then that the constructor of
    the trainer raises the error.

    Args:
        method (`type` or `Any`): A subclass of [`Aggregation`], [`Distillation`],
            [`~hf_federated.server.collectors.UpdateCollector`], [`SecureAggregation`],
            [`~hf_federated.codecs.Codec`] or [`Postprocessor`], or an instance of another one than the last. The class
            must be in a module that other processes can import.
        arguments (`Mapping[str, Any]`, *optional*): Constructor arguments of a class, as JSON values.
        engines (`Sequence[str]`, *optional*, defaults to `("local", "serialized", "ranks", "network")`):
            The engines to check. The checks on `"local"` always run.
        federation (`Mapping[str, Any]`, *optional*): Fields of [`FederatedConfig`] that the method needs.
        training (`Mapping[str, Any]`, *optional*): Training arguments that the method needs.
        verbose (`bool`, *optional*, defaults to `True`): Whether to print the outcome of each check.
        worker ([`~hf_federated.testing.processes.WorkerProcess`], *optional*): The process that forks for each run.
            By default, all calls share one, because its start takes seconds.

    Returns:
        [`ConformanceReport`]: The outcomes of all checks.

    Raises:
        ConformanceError: If a check fails. The message names the first one, and what to change.
        ImportError: If `"network"` is in `engines` and the extra `network` is not installed.
        TypeError: If `method` is of another class.
        ValueError: If other processes cannot import the class, an argument is no JSON value, or an engine is unknown.

    Example:

    ```python
    from hf_federated.testing import check_method
    from my_package.averages import PartialAverage


    def test_partial_average():
        check_method(PartialAverage)
    ```
    """
    return check_scenario(scenario_of(method, arguments, federation, training), engines, verbose, worker)


def check_scenario(
    scenario: Scenario,
    engines: Sequence[str] = tuple(ENGINE_NAMES),
    verbose: bool = True,
    worker: WorkerProcess | None = None,
) -> ConformanceReport:
    """
    Check the method of a scenario, as [`check_method`].

    Args:
        scenario ([`~hf_federated.testing.scenario.Scenario`]): The federation with the method.
        engines, verbose, worker: As in [`check_method`].
    """
    if "network" in engines:
        require_packages("engines=['network']", {"network": {"grpc": "grpcio", "cryptography": "cryptography"}})
    unknown = [name for name in engines if name not in ENGINE_NAMES]
    if unknown:
        raise ValueError(f"`engines` contains {unknown[0]!r}; allowed are {', '.join(map(repr, ENGINE_NAMES))}.")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(scenario, Path(folder), worker or shared_worker(), sys.path)
        if verbose:
            print(scenario.title, flush=True)
        for check in checks_of(trials.method, engines):
            failed = [outcome.check for outcome in outcomes if outcome.problem]
            if failed in (["trains"], ["settings", "trains"]):
                outcome = Outcome(check.name, skipped="the run on LocalEngine failed")
            else:
                outcome = check.outcome(trials)
            outcomes.append(outcome)
            if verbose:
                print(outcome, flush=True)
    report = ConformanceReport(scenario.title, tuple(outcomes))
    if report.failures:
        raise ConformanceError(report)
    return report


def checks_of(method: Any, engines: Sequence[str]) -> list[Check]:
    """
    Return the checks of a method, in order.

    Args:
        method (`Any`): The method.
        engines (`Sequence[str]`): The engines to check.
    """
    selected = ["local", *(name for name in ENGINE_NAMES if name in engines and name != "local")]
    reasons = {name: refusal(method, ENGINE_NAMES[name]()) for name in selected}
    if reasons["local"]:
        raise ValueError(f"{method!r} refuses LocalEngine, with which the other engines are compared. Support it.")
    checks = [check for check in CHECKS if check.engine in selected and not reasons[check.engine]]
    if isinstance(method, SecureAggregation):
        # The secrets of a session exist in the memory of one process only.
        checks = [check for check in checks if check.name != "memory"]
    return checks + [check_refusal(name, reason) for name, reason in reasons.items() if reason]


def scenario_of(
    method: Any,
    arguments: Mapping[str, Any] | None = None,
    federation: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> Scenario:
    """
    Build the scenario of a class or an instance. The arguments are those of [`check_method`].

    Raises:
        TypeError, ValueError: As in [`check_method`].
    """
    cls = method if isinstance(method, type) else type(method)
    family = next((name for base, name in FAMILIES.items() if issubclass(cls, base)), None)
    if family is None or (family == "postprocessors" and not isinstance(method, type)):
        raise TypeError(
            f"`method` is {method!r}. Pass a subclass of Aggregation, Distillation, UpdateCollector, "
            "SecureAggregation, Codec or Postprocessor, or an instance of another one than the last."
        )
    if not isinstance(method, type):
        if arguments is not None:
            raise ValueError("`arguments` is set, but `method` is an instance. Pass the class.")
        arguments = method.non_default_settings()
    given = dict(arguments or {})
    try:
        sent = json.loads(json.dumps(given))
    except TypeError as error:
        raise ValueError(
            f"The arguments {given!r} cannot be sent to another process: {error}. Use numbers, texts, lists and "
            "dictionaries, or a subclass with other defaults."
        ) from error
    return Scenario(family, importable_reference(cls), sent, dict(federation or {}), dict(training or {}))


def importable_reference(cls: type) -> str:
    """
    Return the reference `module:Class` of a class that other processes can import.

    Raises:
        ValueError: If the class is in `__main__` or inside a function, or if its module does not contain it.
    """
    reference = f"{cls.__module__}:{cls.__qualname__}"
    if cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__:
        try:
            importlib.import_module(cls.__module__)
            if import_reference(reference) is cls:
                return reference
        except (ImportError, AttributeError):
            pass
    raise ValueError(
        f"{reference} cannot be imported by other processes, in which `check_method` runs it. Move the class to the "
        "top level of a module."
    )
