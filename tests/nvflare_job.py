"""Server and client objects of an NVFlare job that runs scenarios of `rank_worker.py`, one after the other.

NVFlare imports this file in the processes of the job, and reads the arguments from the configuration of the job.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from network_worker import KillInStep
from nvflare.collab import CollabCallError, collab
from rank_worker import scenario
from safetensors.torch import save_file
from tiny import arguments

from hf_federated import FederatedConfig, FederatedDataset, FederatedTrainer
from hf_federated.engines import NetworkEngine
from hf_federated.engines.nvflare import NVFlareClient, NVFlareServer
from hf_federated.testing.runs import RoundRecorder
from hf_federated.testing.scenario import NUM_ROUNDS
from hf_federated.transport.framing import frame


def site_name(client_id: str) -> str:
    """The id of a client of a scenario as the name of an NVFlare site, which has no spaces."""
    return client_id.replace(" ", "-")


def build(
    name: str, folder: str, party: str, differ: bool = False, num_clients: int | None = None, **options: Any
) -> FederatedTrainer:
    """
    Build the trainer of a party.

    Args:
        name (`str`): The scenario.
        folder (`str`): Folder of the job.
        party (`str`): `"server"`, `"local"` for all parties in one process, or the id of a client.
        differ (`bool`): Whether the learning rate differs.
        num_clients (`int`, *optional*): Number of clients. Defaults to all.
        options (`Any`): Further arguments of the trainer.
    """
    model, federation, args, trainer_args = scenario(name)
    federation.pop("parallelism", None)
    federation |= options.pop("federation", {})
    if differ:
        args["learning_rate"] = 0.5
    clients = trainer_args.pop("train_dataset")
    clients = {site_name(client_id): clients[client_id] for client_id in list(clients)[:num_clients]}
    if (build_model := trainer_args.get("client_model_init")) is not None:
        trainer_args["client_model_init"] = lambda client_id: build_model(client_id.replace("-", " "))
    if party == "local":
        trainer_args["train_dataset"] = FederatedDataset.from_dict(clients)
    elif party != "server":
        trainer_args["train_dataset"] = {party: clients[party]}
        trainer_args["clients"] = {
            name: spec for name, spec in trainer_args.get("clients", {}).items() if name == party
        }
    return FederatedTrainer(
        model=model,
        args=arguments(os.path.join(folder, name, party), save_strategy="steps", **args),
        federation=FederatedConfig(**{"num_rounds": NUM_ROUNDS, **federation}),
        callbacks=[] if trainer_args.get("train_dataset") and party != "local" else [RoundRecorder()],
        **trainer_args,
        **options,
    )


def train(trainer: FederatedTrainer) -> None:
    """Train, and write what the tests compare to the output directory."""
    folder = Path(trainer.args.output_dir)
    trainer.train()
    save_file(
        {name: value.contiguous().clone() for name, value in trainer.model.state_dict().items()},
        folder / "rank-0.safetensors",
    )
    recorder = next(each for each in trainer.callback_handler.callbacks if isinstance(each, RoundRecorder))
    notes = {"log": trainer.state.log_history, "ledger": trainer.ledger.to_dict(), "rejected": recorder.rejected}
    (folder / "rank-0.json").write_text(json.dumps(notes))


class Server(NVFlareServer):
    def __init__(
        self,
        clients: Sequence[str],
        scenarios: Sequence[str],
        folder: str,
        federation: dict[str, Any] | None = None,
        join_timeout: float = 60.0,
        rejoin_timeout: float = 30.0,
        call_timeout: float = 60.0,
    ) -> None:
        super().__init__(clients, join_timeout=join_timeout, rejoin_timeout=rejoin_timeout, call_timeout=call_timeout)
        self.scenarios = list(scenarios)
        self.folder = folder
        self.federation = federation or {}

    def build_trainer(self, engine: NetworkEngine) -> FederatedTrainer:
        return build(self.scenarios[0], self.folder, "server", engine=engine, federation=self.federation)

    def run(self, trainer: FederatedTrainer) -> None:
        for name in self.scenarios:
            try:
                if name != self.scenarios[0]:
                    trainer = build(
                        name, self.folder, "server", engine=self.build_engine(), federation=self.federation
                    )
                train(trainer)
            except Exception:
                (Path(self.folder) / name).mkdir(parents=True, exist_ok=True)
                (Path(self.folder) / name / "rank-0.log").write_text(traceback.format_exc())


class Client(NVFlareClient):
    def __init__(
        self,
        scenarios: Sequence[str],
        folder: str,
        federation: dict[str, Any] | None = None,
        killed: str = "",
        differs: str = "",
        spies: str = "",
    ) -> None:
        super().__init__()
        self.scenarios = list(scenarios)
        self.folder = folder
        self.federation = federation or {}
        self.killed = killed
        self.differs = differs
        self.spies = spies

    def build_trainer(self, client_id: str) -> FederatedTrainer:
        if client_id == self.spies:
            self.call_another_client()
        return self.build(self.scenarios[0], client_id)

    def call_another_client(self) -> None:
        """Call a client as the server does, and write what it answers."""
        request = frame({"kind": "join", "session": "", "name": "", "text": "", "seconds": 1.0})
        deadline, answer = time.monotonic() + 30, "No callback is registered"
        # The other client may still be setting up.
        while "No callback is registered" in answer and time.monotonic() < deadline:
            time.sleep(0.1)
            try:
                answer = str(collab.other_clients[0](timeout=10).handle(request))
            except CollabCallError as error:
                answer = str(error)
        (Path(self.folder) / "spy.log").write_text(answer)

    def build(self, name: str, client_id: str) -> FederatedTrainer:
        callbacks = [KillInStep(1)] if client_id == self.killed else []
        return build(
            name,
            self.folder,
            client_id,
            differ=client_id == self.differs,
            federation=self.federation,
            client_callbacks=callbacks,
        )

    def run(self, trainer: FederatedTrainer, connector: Any, client_id: str) -> None:
        for name in self.scenarios:
            if name != self.scenarios[0]:
                trainer = self.build(name, client_id)
            try:
                trainer.join_over(connector, client_id=client_id)
            except Exception as error:
                (Path(self.folder) / name / f"{client_id}.log").write_text(f"{type(error).__name__}: {error}")
                if client_id == self.differs:
                    raise
