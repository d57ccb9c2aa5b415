"""The checks of the conformance kit. Each check finds one kind of fault and names what to change."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..aggregation import Aggregation, FedAvg
from ..compatibility import Combination, check_combination
from ..engines import Engine
from ..messages import Disclosure
from ..methods import Method
from ..server import UpdateCollector
from ..utils.constructor_settings import ConstructorSettings
from .engines import ENGINES
from .processes import WorkerProcess
from .report import Outcome
from .results import RunResult, differences
from .runs import RUN_DIR, TIMEOUT, Request
from .scenario import Scenario, keeps_models


# Bytes by which the digits of a number can change the messages of a round.
ROUNDING = 16
# `Trainer` averages `train_loss` over the rounds since the resume.
RESUMED = ("train_loss",)


class SkippedCheckError(Exception):
    """A check does not apply to a method. The message is the reason."""


class CrashedRunError(Exception):
    """A run ended with an error. The message is the error."""

    def __init__(self, result: RunResult, codes: Sequence[int]) -> None:
        # A process with an error is the cause if other processes were killed while they waited for it.
        code = max(codes, key=lambda code: (code != 0, code))
        end = f"was killed by signal {-code} (it may take {TIMEOUT} seconds). Its last output" if code < 0 else ""
        error = result.last_error(codes.index(code)).rstrip(".")
        super().__init__(f"The run {end or 'ended with this error'}: {error}.")
        self.log = result.logs()


class Trials:
    """
    Runs a method and compares the runs with a reference, the run on [`LocalEngine`].

    Args:
        scenario ([`Scenario`]): The federation with the method.
        directory (`pathlib.Path`): Empty folder for the runs.
        worker ([`WorkerProcess`]): Forks for each run.
        path (`Sequence[str]`, *optional*): `sys.path`, from which the worker imports the method.
        engine (`str`, *optional*, defaults to `"recording"`): Engine of the run that is the reference.
    """

    def __init__(
        self,
        scenario: Scenario,
        directory: Path,
        worker: WorkerProcess,
        path: Sequence[str] = (),
        engine: str = "recording",
    ) -> None:
        self.scenario = scenario
        self.method = scenario.build_method()
        self._directory, self._worker, self._path, self._engine = directory, worker, path, engine
        self._num_runs = 0
        self._reference: RunResult | None = None

    def directory(self) -> Path:
        """Create the directory of a run."""
        self._num_runs += 1
        directory = self._directory / str(self._num_runs)
        directory.mkdir(parents=True)
        return directory

    def ask(self, engine: str, directory: Path | None = None, **options: Any) -> tuple[RunResult, list[int]]:
        """
        Run the method, and return the result and the exit codes of the processes.

        Args:
            engine (`str`): As in [`Request`].
            directory (`pathlib.Path`, *optional*): Directory of the run. Defaults to a new one.
            options (`Any`): Further fields of the [`Request`].
        """
        directory = self.directory() if directory is None else directory
        request = Request(str(directory), self.scenario.to_dict(), engine, path=self._path, **options)
        return RunResult(directory), self._worker.ask(dataclasses.asdict(request))["codes"]

    def run(self, engine: str, directory: Path | None = None, **options: Any) -> RunResult:
        """
        Run the method as in [`~Trials.ask`].

        Raises:
            CrashedRunError: If the run ends with an error.
        """
        result, codes = self.ask(engine, directory, **options)
        if any(codes):
            raise CrashedRunError(result, codes)
        return result

    @property
    def reference(self) -> RunResult:
        """The run on [`LocalEngine`], with a checkpoint after each round."""
        if self._reference is None:
            self._reference = self.run(self._engine, saves=True)
        return self._reference

    def compare(self, result: RunResult, num_processes: int = 1, **options: Any) -> str:
        """Describe the differences to the reference, as in [`differences`]. Empty if there are none."""
        found = differences(self.reference, result, num_processes, **options)
        return f"The run differs from the run on LocalEngine in {', '.join(found)}." if found else ""


def always(trials: Trials) -> str:
    """Return an empty text, because the check applies to every method."""
    return ""


@dataclass(frozen=True)
class Check:
    """
    A check of a method.

    Args:
        name (`str`): Name of the check.
        find (`Callable[[Trials], str]`): Returns what is wrong, or an empty text.
        remedy (`str`): What to change in the method.
        engine (`str`, *optional*, defaults to `"local"`): The engine of [`check_method`] that the check belongs to.
        applies (`Callable[[Trials], str]`, *optional*): Returns why the check does not apply, or an empty text.
    """

    name: str
    find: Callable[[Trials], str]
    remedy: str
    engine: str = "local"
    applies: Callable[[Trials], str] = always

    def outcome(self, trials: Trials) -> Outcome:
        """Run the check."""
        if reason := self.applies(trials):
            return Outcome(self.name, skipped=reason)
        try:
            problem = self.find(trials)
        except SkippedCheckError as error:
            return Outcome(self.name, skipped=str(error))
        except CrashedRunError as error:
            return Outcome(self.name, str(error), self.remedy, log=error.log)
        return Outcome(self.name, problem, self.remedy if problem else "")


def find_lost_settings(trials: Trials) -> str:
    """Find a constructor argument that no attribute of its name holds."""
    method = trials.method
    try:
        settings = method.settings()
    except AttributeError as error:
        return f"A constructor argument has no attribute of the same name: {error}."
    copied = type(method)(**settings).settings()
    if copied != settings:
        return f"A copy with the settings {settings} has the settings {copied}."
    if isinstance(method, Method) and not all(isinstance(each, Disclosure) for each in method.disclosures):
        return f"`disclosures` is {method.disclosures!r}; it must contain `Disclosure` objects."
    return ""


def find_failed_training(trials: Trials) -> str:
    """Find an error of the run on `LocalEngine`, or a client that the server rejected."""
    rejected = [(client, reason) for round in trials.reference.notes()["rejected"] for client, reason in round.items()]
    return f"The server rejected client {rejected[0][0]!r}: {rejected[0][1]}" if rejected else ""


def find_unreadable_messages(trials: Trials) -> str:
    """Find messages that another process could not read."""
    unreadable = trials.reference.notes()["unreadable"]
    return " ".join(f"{name} cannot be sent to another process: {reason}." for name, reason in unreadable.items())


def compared_with(engine: str, **options: Any) -> Callable[[Trials], str]:
    """Return a function that compares a run on another engine with the reference."""
    return lambda trials: trials.compare(trials.run(engine), **{"states": "none", **options})


def find_other_data(trials: Trials) -> str:
    """Find a client that sends other replies to the same messages if the other clients have other examples."""
    reference = trials.reference.notes()
    # The client that answers last in the first round, because the other clients can only influence what follows.
    client_id = [name for name in reference["cohorts"][0] if name in reference["transcript"]][-1]
    before = reference["transcript"][client_id]
    after = trials.run("recording", unchanged=client_id).notes()["transcript"][client_id]
    if before[0][0] != after[0][0]:
        raise SkippedCheckError(f"the first message to {client_id!r} depends on the examples of other clients")
    for number, ((request, reply), (other_request, other_reply)) in enumerate(zip(before, after, strict=False)):
        if request != other_request:
            break
        if reply != other_reply:
            return (
                f"With other examples of the other clients, client {client_id!r} sends another reply number "
                f"{number + 1} to the same messages."
            )
    return ""


def find_wrong_estimate(trials: Trials) -> str:
    """Find messages whose bytes dry rounds do not estimate."""
    result, codes = trials.ask("local", only_estimated=True)
    if any(codes):
        error = result.last_error()
        if "DryRoundError" in error:
            raise SkippedCheckError(error.partition("Error: ")[2])
        raise CrashedRunError(result, codes)
    estimated, measured = (each.notes()["ledger"]["rounds"] for each in (result, trials.reference))
    for number, clients in measured.items():
        for client_id, values in clients.items():
            expected = estimated[number].get(client_id, [0, 0])
            if max(abs(before - after) for before, after in zip(expected, values, strict=True)) > ROUNDING:
                return (
                    f"Round {int(number) + 1}, client {client_id!r}: dry rounds estimate {expected} bytes down and "
                    f"up, and the ledger of the run has {values}."
                )
    return ""


def find_lost_state(trials: Trials) -> str:
    """Find state that a run loses when its process is killed."""
    kill_round = 1 if trials.scenario.num_rounds > 1 else 0
    directory = trials.directory()
    result, codes = trials.ask("local", directory, saves=True, kill_round=kill_round)
    if codes != [-9]:
        raise CrashedRunError(result, codes) if any(codes) else RuntimeError("The run was not killed.")
    has_checkpoint = any((directory / RUN_DIR).glob("checkpoint-*"))
    resumed = trials.run("local", directory, saves=True, resume=has_checkpoint)
    return trials.compare(resumed, excluded=RESUMED)


def find_lost_state_elsewhere(trials: Trials) -> str:
    """Find state that a run loses when two processes resume it after its first round."""
    directory = trials.directory()
    checkpoint = Path(RUN_DIR, "checkpoint-1")
    # The run looks as if it had been stopped after its first round.
    shutil.copytree(trials.reference.directory / checkpoint, directory / checkpoint)
    resumed = trials.run("2 serialized ranks", directory, saves=True, resume=True)
    return trials.compare(resumed, 2, excluded=RESUMED)


def find_disagreement(trials: Trials) -> str:
    """Find a difference between two processes that train each client together."""
    result = trials.run("2 serialized ranks", federation={"parallelism": "data"})
    found = differences(result, result, 2, states="none")
    return f"The two processes differ in {', '.join(found)}." if found else ""


def find_rank_difference(engine: str, parallelism: str = "clients") -> Callable[[Trials], str]:
    """Return a function that compares a run of a launch with the reference, with the states of server and clients."""

    def find(trials: Trials) -> str:
        result = trials.run(engine, federation={"parallelism": parallelism}, saves=True)
        return trials.compare(result, ENGINES[engine][1])

    return find


def if_lists_settings(trials: Trials) -> str:
    """Return why the check of the settings does not apply."""
    return "" if isinstance(trials.method, ConstructorSettings) else "postprocessors do not list their settings"


def if_shared_model(trials: Trials) -> str:
    """Return why the check of the server's weights does not apply."""
    return "the clients keep their models" if keeps_models(trials.method) else ""


def if_synchronous(trials: Trials) -> str:
    """Return why a check of replies in another order does not apply."""
    method = trials.method
    is_asynchronous = isinstance(method, UpdateCollector) and method.holds_requests
    return "the updates of a round depend on the order in which replies arrive" if is_asynchronous else ""


def if_bytes_are_estimated(trials: Trials) -> str:
    """Return why the check of the estimate does not apply."""
    if trials.scenario.federation.get("evaluate_clients"):
        return "dry rounds do not count evaluations"
    return if_synchronous(trials)


def if_several_rounds(trials: Trials) -> str:
    """Return why a resume after the first round does not apply."""
    return "the run has one round" if trials.scenario.num_rounds == 1 else ""


def if_trained_together(trials: Trials) -> str:
    """Return why a check of `parallelism="data"` with two processes does not apply."""
    method = trials.method
    has_private = isinstance(method, Aggregation) and method.trains_private_models
    return "several processes cannot train private models together" if has_private else ""


STATE = (
    "Keep the values that the server half needs in later rounds in `state_dict`, and restore them. A postprocessor "
    "keeps them in the argument `memory`."
)
MESSAGES = "Put into messages what the halves share, and do not change the tensors of a message in place."
HALF = (
    "A client half may use the constructor arguments, the message, its client and its memory, but no object, class "
    "attribute or module variable that the server or another client changes."
)
SUMS = (
    "Add the updates to the means of `round.sums`, which do not depend on the order, and keep no other value of them."
)

CHECKS = (
    Check(
        "settings",
        find_lost_settings,
        "Store each constructor argument in an attribute of the same name.",
        applies=if_lists_settings,
    ),
    Check(
        "trains",
        find_failed_training,
        "The method must train without an error, and the server must accept the update of each client. Memories and "
        "`state_dict` may contain tensors, numbers, texts, `None`, and lists, tuples and dictionaries of these.",
    ),
    Check(
        "messages",
        find_unreadable_messages,
        "List the classes of all requests and replies in `messages`. Their fields are numbers, texts, tensors, and "
        "dictionaries of these.",
    ),
    Check(
        "random numbers",
        compared_with("disturbed generators"),
        "Draw random numbers from a generator whose seed is that of the message or of the run, not from the global "
        "generators, and read no clock.",
    ),
    Check("serialized", compared_with("serialized"), MESSAGES, "serialized"),
    Check("order of replies", compared_with("reversed replies"), SUMS, applies=if_synchronous),
    Check(
        "server weights",
        compared_with("overwritten model"),
        "Local training must start from the state of the message.",
        applies=if_shared_model,
    ),
    Check("separate clients", compared_with("separate clients"), HALF),
    Check(
        "memory",
        compared_with("renewed clients", states="clients"),
        "Keep the values that a client half needs in later messages in `self.memory`, by assigning to its keys. A "
        "postprocessor keeps them in the argument `memory`.",
    ),
    Check("other clients", find_other_data, HALF),
    Check(
        "estimate",
        find_wrong_estimate,
        "The sizes of messages may depend on names, shapes and dtypes, but not on the values of tensors.",
        applies=if_bytes_are_estimated,
    ),
    Check("killed and resumed", find_lost_state, STATE),
    Check("1 rank", find_rank_difference("1 rank"), SUMS, "ranks"),
    Check("1 rank, data", find_rank_difference("1 rank", "data"), SUMS, "ranks"),
    Check("2 ranks", find_rank_difference("2 serialized ranks"), SUMS, "ranks"),
    Check("2 ranks, data", find_disagreement, SUMS, "ranks", if_trained_together),
    Check("resumed on ranks", find_lost_state_elsewhere, STATE, "ranks", if_several_rounds),
    Check("network", compared_with("network", states="clients"), HALF, "network", if_synchronous),
)


def refusal(method: Any, engine: Engine) -> str:
    """Return why a method refuses an engine, or an empty text."""
    if isinstance(method, Method):
        return method.refused_engines.get(type(engine).__name__, "")
    if isinstance(method, UpdateCollector):
        try:
            check_combination(Combination(collector=method, engine=engine))
            method.check(engine, [FedAvg()])
        except ValueError as error:
            return str(error)
    return ""


def check_refusal(engine: str, reason: str) -> Check:
    """Return the check that the constructor of the trainer refuses an engine."""

    def find(trials: Trials) -> str:
        result, codes = trials.ask("1 rank" if engine == "ranks" else engine, only_built=True)
        error = result.last_error() if codes[0] else "no error"
        return "" if error.startswith("ValueError: ") and reason in error else f"The constructor raised {error}."

    return Check(f"refuses {engine}", find, f"It must raise a ValueError that contains {reason!r}.", engine)
