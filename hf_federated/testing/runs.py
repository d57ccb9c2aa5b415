"""The runs of a scenario, in the processes that the worker forks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback

from ..adapters.shards import values_here
from ..config import FederatedConfig
from ..data import FederatedDataset
from ..engines import Engine, NetworkEngine
from ..experiments.estimate.dry_round import dry_round
from ..messages import ClientUpdate
from ..methods import Round
from ..server import FederatedCallback
from ..trainer import FederatedTrainer
from ..trainer.mixin import FederatedMixin
from .engines import ENGINES, PROBES, RecordingEngine
from .scenario import CLIENTS, Scenario
from .tiny import tiny_arguments


# Folder of the checkpoints and the final model.
RUN_DIR = "run"
# Seconds after which the processes of a run are killed.
TIMEOUT = 150
# Seconds that the parties of a networked run wait for each other.
JOIN_TIMEOUT = 60.0


class RoundRecorder(FederatedCallback):
    """Records the cohorts, the trained clients and the rejected clients of a process."""

    def __init__(self) -> None:
        self.trained: list[list[Any]] = []
        self.cohorts: list[list[str]] = []
        self.rejected: list[dict[str, str]] = []

    def on_round_begin(self, *args: Any, round: Round, **kwargs: Any) -> None:
        self.cohorts.append(list(round.cohort))

    def on_client_end(
        self, args: Any, state: Any, control: Any, update: ClientUpdate, *, round: Round, **kwargs: Any
    ) -> None:
        self.trained.append([round.number, update.client_id])

    def on_aggregate(self, *args: Any, round: Round, **kwargs: Any) -> None:
        self.rejected.append(round.rejected)


class KillInRound(FederatedCallback):
    """
    Kills the process in a round, when an update or the sum of all updates was accepted.

    Args:
        round (`int`): Number of the round, from 0.
    """

    def __init__(self, round: int) -> None:
        self.round = round

    def on_client_end(self, *args: Any, round: Round, **kwargs: Any) -> None:
        if round.number == self.round:
            os.kill(os.getpid(), signal.SIGKILL)

    # Under secure aggregation, the server has no update of a single client.
    on_aggregate = on_client_end


@dataclass
class Request:
    """
    A run of a scenario.

    Args:
        directory (`str`): Directory of the run.
        scenario (`dict[str, Any]`): The fields of the [`Scenario`].
        engine (`str`): Name in `ENGINES` or `PROBES`, or `"network"`.
        federation (`dict[str, Any]`, *optional*): Fields of [`FederatedConfig`] for this run.
        saves (`bool`, *optional*, defaults to `False`): Whether the run saves a checkpoint after each round.
        resume (`bool`, *optional*, defaults to `False`): Whether the run resumes from the last checkpoint.
        kill_round (`int`, *optional*): Round in which the process kills itself.
        unchanged (`str`, *optional*): As in [`Scenario.build`].
        only_built (`bool`, *optional*, defaults to `False`): Whether to build the trainer and not to train.
        only_estimated (`bool`, *optional*, defaults to `False`): Whether to run dry rounds in place of a training.
        path (`Sequence[str]`, *optional*): `sys.path` of the process that checks the method.
    """

    directory: str
    scenario: dict[str, Any]
    engine: str
    federation: dict[str, Any] | None = None
    saves: bool = False
    resume: bool = False
    kill_round: int | None = None
    unchanged: str | None = None
    only_built: bool = False
    only_estimated: bool = False
    path: Sequence[str] = ()

    @property
    def num_processes(self) -> int:
        """Number of processes of the launch."""
        return ENGINES[self.engine][1] if self.engine in ENGINES else 1


def run_rank(rank: int, request: Request) -> None:
    """
    Run a scenario in the current directory, and write the result of this rank.

    Args:
        rank (`int`): The rank.
        request ([`Request`]): What to run.
    """
    factory = ENGINES[request.engine][0] if request.engine in ENGINES else PROBES[request.engine]
    trainer, recorder = build_trainer(request, RUN_DIR, factory())
    if request.only_estimated:
        ledger = dry_round(trainer, Scenario(**request.scenario).num_rounds)
        Path(f"rank-{rank}.json").write_text(json.dumps({"ledger": ledger.to_dict()}), encoding="utf-8")
    elif not request.only_built:
        trainer.train(resume_from_checkpoint=request.resume)
        write_result(rank, trainer, recorder)


def run_party(number: int, request: Request, address: str, certificates: str) -> None:
    """
    Run a party of a networked federation in the current directory. The server writes the result.

    Args:
        number (`int`): 0 for the server, or the position of the client, from 1.
        request ([`Request`]): What to run.
        address (`str`): Address of the server.
        certificates (`str`): Folder of the certificates of all parties.
    """
    if number == 0:
        engine = NetworkEngine(CLIENTS, certificates, address=address, join_timeout=JOIN_TIMEOUT)
        trainer, recorder = build_trainer(request, RUN_DIR, engine)
        if not request.only_built:
            trainer.train()
            write_result(0, trainer, recorder)
        return
    client_id = CLIENTS[number - 1]
    trainer, _ = build_trainer(request, f"client-{number}", client_id=client_id)
    trainer.join(address, client_id=client_id, certificates=certificates, connect_timeout=JOIN_TIMEOUT)


def build_trainer(
    request: Request, output_dir: str, engine: Engine | None = None, client_id: str | None = None
) -> tuple[FederatedTrainer, RoundRecorder]:
    """
    Build the trainer of a run.

    Args:
        request ([`Request`]): What to run.
        output_dir (`str`): Output directory of the trainer.
        engine ([`Engine`], *optional*): The engine. A server with clients on other machines gets no examples.
        client_id (`str`, *optional*): The client, for the trainer of one client of a networked federation.
    """
    scenario = Scenario(**request.scenario)
    model, federation, training, others = scenario.build(request.unchanged)
    federation = {"num_rounds": scenario.num_rounds, **federation, **(request.federation or {})}
    if isinstance(engine, NetworkEngine) or client_id is not None:
        federation.pop("parallelism")
        clients, evaluated = others.pop("train_dataset"), others["eval_dataset"]
        if isinstance(evaluated, FederatedDataset):
            own = evaluated.pooled_examples() if client_id is None else evaluated.select_clients([client_id])
            others["eval_dataset"] = own
        if client_id is not None:
            others["train_dataset"] = {client_id: clients[client_id]}
            others["clients"] = {name: spec for name, spec in others.get("clients", {}).items() if name == client_id}
            others.pop("server_dataset", None)
    recorder = RoundRecorder()
    callbacks: list[TrainerCallback] = [] if client_id is not None else [recorder]
    if request.kill_round is not None:
        callbacks.append(KillInRound(request.kill_round))
    strategy = "steps" if request.saves else "no"
    trainer = FederatedTrainer(
        model=model,
        args=tiny_arguments(output_dir, **{"save_strategy": strategy, **training}),
        federation=FederatedConfig(**federation),
        engine=engine,
        callbacks=callbacks,
        **others,
    )
    return trainer, recorder


def write_result(rank: int, trainer: Trainer, recorder: RoundRecorder, **notes: Any) -> None:
    """
    Write the model, the log and the ledger of a process. With FSDP2, the model has the shards of the process.

    Args:
        rank (`int`): The rank.
        trainer (`transformers.Trainer`): The trainer, after the training.
        recorder ([`RoundRecorder`]): The recorder of this process.
        notes (`Any`): Further values for the notes, in JSON.
    """
    trainer.save_model("final")
    state = {name: values_here(value).contiguous().clone() for name, value in trainer.model.state_dict().items()}
    save_file(state, f"rank-{rank}.safetensors")
    content = {
        "log": trainer.state.log_history,
        "total_flos": trainer.state.total_flos,
        "trained": recorder.trained,
        "cohorts": recorder.cohorts,
        "rejected": recorder.rejected,
        "ledger": trainer.ledger.to_dict() if isinstance(trainer, FederatedMixin) else None,
        **notes,
    }
    if isinstance(trainer, FederatedMixin) and isinstance(trainer.engine, RecordingEngine):
        content |= {"transcript": trainer.engine.transcript, "unreadable": trainer.engine.unreadable}
    Path(f"rank-{rank}.json").write_text(json.dumps(content), encoding="utf-8")
