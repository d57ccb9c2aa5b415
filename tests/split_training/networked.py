"""A server and clients of a networked run, each with its own parts, in threads of one process."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from split_runs import arguments, whole_model

from hf_federated import SplitConfig, SplitFederatedTrainer, SplitModel
from hf_federated.adapters.copying import copy_model
from hf_federated.security.encryption import ClientSession, ServerSession
from hf_federated.security.envelope import PeerEnvelopes
from hf_federated.security.keys import Identity
from hf_federated.security.sealed import SealedLink, SealedServer
from hf_federated.split.boundary import Boundary
from hf_federated.split_training.config import run_digest
from hf_federated.split_training.server import TrainingServer
from hf_federated.split_training.server_model import ServerBodies


IDENTITIES: dict[str, Identity] = {}
LOADING = threading.Lock()


def identity(name: str) -> Identity:
    """Made once in a session: keys take time."""
    if name not in IDENTITIES:
        IDENTITIES[name] = Identity.generate(name, 2048)
    return IDENTITIES[name]


class Direct:
    """A link to a server in the same process."""

    def __init__(self, server: TrainingServer, client_id: str, watch: Callable[[bytes], None] | None = None) -> None:
        self.server = server
        self.client_id = client_id
        self.watch = watch

    def exchange(self, blob: bytes) -> bytes:
        if self.watch is not None:
            self.watch(blob)
        return self.server.answer(self.client_id, blob)

    def end_step(self) -> None:
        pass


class Carried:
    """Carries a sealed link's messages, and counts their bytes."""

    def __init__(self, server: SealedServer) -> None:
        self.server = server
        self.up = self.down = 0

    def hello(self, hello: bytes) -> bytes:
        reply = self.server.hello(hello)
        self.up, self.down = self.up + len(hello), self.down + len(reply)
        return reply

    def finish(self, finish: bytes) -> None:
        self.server.finish(finish)
        self.up += len(finish)

    def exchange(self, sealed: bytes) -> bytes:
        answer = self.server.exchange(sealed)
        self.up, self.down = self.up + len(sealed), self.down + len(answer)
        return answer

    def check_size(self, num_bytes: int) -> None:
        self.server.check_size(num_bytes)


def sealed(server: TrainingServer, client_id: str) -> SealedLink:
    """A link to a server in the same process, with keys that are made anew at every step."""
    own, center = identity(client_id), identity("server")
    there = ServerSession(center, client_id, own.fingerprint, rotate_every=1, rsa_bits=2048)
    here = ClientSession(own, "server", center.fingerprint, rotate_every=1, rsa_bits=2048)
    return SealedLink(here, Carried(SealedServer(there, functools.partial(server.answer, client_id))))


class Run:
    """
    A networked run.

    Args:
        directory (`Path`): Parties write below it.
        clients (`Mapping[str, Any]`): Rows by client.
        split ([`SplitConfig`]): Strategy.
        adapter (`PeftConfig`, *optional*): What all parts get.
        deadline (`float`, *optional*): As of [`TrainingServer`].
        model (`PreTrainedModel`, *optional*): What all start from.
        eval_dataset (`datasets.Dataset`, *optional*): Of every client.
        changes: Of the training arguments.
    """

    def __init__(
        self,
        directory: Path,
        clients: Mapping[str, Any],
        split: SplitConfig,
        adapter: PeftConfig | None = None,
        deadline: float | None = None,
        links: Callable[[TrainingServer, str], Any] = Direct,
        model: Any = None,
        eval_dataset: Any = None,
        **changes: Any,
    ) -> None:
        model = SplitModel.from_model(whole_model() if model is None else model, split.head_blocks, split.tail_blocks)
        if adapter is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model.add_adapter(copy.deepcopy(adapter))
        args = arguments(directory / "server", **changes)
        digest = run_digest(model.config, split, args, model.adapter_config)
        wire = model.boundary.wire
        body = copy_model(model.server_body)
        bodies = ServerBodies(body, model.config, wire, split, args, list(clients), model.adapter_config)
        self.server = TrainingServer(bodies, digest, deadline)
        self.trainers: dict[str, SplitFederatedTrainer] = {}
        fingerprints = {own: identity(own).fingerprint for own in clients}
        for client_id, rows in clients.items():
            parts = copy_model(torch.nn.ModuleList([model.client_head, model.client_tail]))
            boundary = Boundary(links(self.server, client_id), wire, client_id)
            own = SplitModel(model.config, *parts, boundary)
            own.adapter_config = model.adapter_config
            self.trainers[client_id] = SplitFederatedTrainer(
                own,
                arguments(directory / client_id, **changes),
                train_dataset=rows,
                eval_dataset=eval_dataset,
                split=split,
                envelopes=PeerEnvelopes(identity(client_id), fingerprints, 2048),
            )
        self.errors: dict[str, Exception] = {}

    def train(self, resume: bool = False, timeout: float = 60.0) -> None:
        """Everybody trains; errors are kept by client, and a client that fails is gone."""

        def work(client_id: str, trainer: SplitFederatedTrainer) -> None:
            load = trainer._load_rng_state

            def load_alone(checkpoint: Any) -> None:
                # `torch.load` is told what it may load for the whole process, which is one party's otherwise.
                with LOADING:
                    load(checkpoint)

            trainer._load_rng_state = load_alone
            try:
                trainer.train(resume_from_checkpoint=resume or None)
                trainer.leave()
            except Exception as error:
                self.errors[client_id] = error
                self.server.client_lost(client_id)

        threads = [threading.Thread(target=work, args=own, daemon=True) for own in self.trainers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        assert not any(thread.is_alive() for thread in threads), "a party waits for ever"

    def values(self) -> dict[str, dict[str, torch.Tensor]]:
        """What every party trained."""
        found = {own: dict(trainer.model.named_parameters()) for own, trainer in self.trainers.items()}
        bodies = {own: party.state() for own, party in self.server.bodies.parties.items()}
        return {
            own: {name: value.detach().clone() for name, value in values.items()}
            for own, values in {**found, **bodies}.items()
        }
