"""A hostile server of secure aggregation with one real client on a connection.

The server works with all other clients: their sessions run in the process of the server, and it can read their keys.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from distillation_setup import Recorder
from federations import CLIENTS, build_federation, settings_of
from tiny import rows

from hf_federated import FedAvg
from hf_federated.distributed.process_group import process_group
from hf_federated.engines import EngineContext, NetworkEngine
from hf_federated.messages import KINDS, ClientFailure, Message
from hf_federated.messages.secure_aggregation import SECURE_MESSAGES, MaskedUpdate, SecureFit
from hf_federated.secure_aggregation import SecAgg
from hf_federated.secure_aggregation.client_session import ClientSession
from hf_federated.secure_aggregation.content import fit_digest
from hf_federated.secure_aggregation.credentials import Credentials
from hf_federated.secure_aggregation.server_session import ServerSession
from hf_federated.security.keys import Identity
from hf_federated.testing.processes import free_address


VICTIM = "north"
PEERS = ("east", "south", "south-east", "west")
SETTINGS: dict[str, Any] = {"max_weight": 100, "min_survivors": 3}
Change = Callable[[Any], Message]


@functools.cache
def peer_identity() -> Identity:
    """The certificate of all other clients, whose fingerprint the client knows."""
    return Identity.generate("peers", 2048)


def build(directory: Path, clients: dict[str, Any], **trainer: Any) -> Any:
    federation = {"secure_aggregation": "secagg", "secure_aggregation_kwargs": SETTINGS}
    return build_federation(directory, clients, federation=federation, trainer=trainer)


@functools.cache
def honest_requests() -> tuple[SecureFit, ...]:
    """The requests of local training of an honest server to the client, one for each round."""
    from tempfile import TemporaryDirectory

    recorder = Recorder()
    with TemporaryDirectory() as directory:
        others = {name: rows(4, seed=number) for number, name in enumerate(PEERS)}
        trainer = build(Path(directory), {VICTIM: CLIENTS[VICTIM], **others}, callbacks=[recorder])
        recorder.trainer = trainer
        trainer.train()
    requests = (request for request in recorder.sent if isinstance(request, SecureFit))
    return tuple(request for request in requests if request.client_id == VICTIM)


class SecureServer:
    """
    A server with one client on a connection, which runs in a thread.

    Args:
        directory: Folder of the client. A second server with the same folder has the same client after a restart.
        tls: Folder of certificates. By default, the connection has no TLS.
        refusals: Number of refusals after which the client leaves.
        num_known: Number of further clients whose fingerprints the client knows.
    """

    def __init__(self, directory: Path, tls: Path | None = None, refusals: int = 10**6, num_known: int = 0) -> None:
        self.protocol = SecAgg(**SETTINGS)
        self._directory, self._tls, self._refusals = directory, tls, refusals
        self.error: Exception | None = None
        # Why the server ends the run. Empty if the run is complete.
        self.end = "the server failed"
        self._num_sessions = 0
        self._known = (*PEERS, *(f"absent {number}" for number in range(num_known)))

    def __enter__(self) -> SecureServer:
        alone = build(self._directory, {VICTIM: CLIENTS[VICTIM]})
        connection: dict[str, Any] = {"insecure": True} if self._tls is None else {}
        self.engine = NetworkEngine(
            [VICTIM],
            None if self._tls is None else str(self._tls),
            address=(address := free_address()),
            join_timeout=20,
            rejoin_timeout=1,
            **connection,
        )

        def join() -> None:
            try:
                alone.join(
                    address,
                    client_id=VICTIM,
                    certificates=None if self._tls is None else str(self._tls),
                    connect_timeout=10,
                    refusals=self._refusals,
                    fingerprints=dict.fromkeys(self._known, peer_identity().fingerprint),
                    **connection,
                )
            except Exception as error:
                self.error = error

        self.client = threading.Thread(target=join, daemon=True)
        self.client.start()
        self.engine.connect(lambda: settings_of(alone, VICTIM), self._directory / "server", 2)
        kinds = {**KINDS, **{kind.kind: kind for kind in SECURE_MESSAGES}}
        self.engine.start(EngineContext(lambda: None, {}, "data", process_group(), kinds=kinds))
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop(self.end)
        self.client.join(20)
        assert not self.client.is_alive()

    def ask(self, request: Message, state: str | None = None) -> Message:
        """Send a request and return the reply. `state` is the name of the state to which the client returns."""
        if state is not None:
            self.engine.replay(request.round, {VICTIM: state})
        self.engine.send(VICTIM, lambda client_id: request, round=request.round)
        return next(iter(self.engine.replies()))

    def begin(self, round: int = 0, state: str | None = None, model: Any = None, **changes: Any) -> Session:
        """Begin a session with an honest request of a round, or with a changed one."""
        self._num_sessions += 1
        request = dataclasses.replace(honest_requests()[round], session=f"{id(self)} {self._num_sessions}", **changes)
        return Session(self, request if model is None else dataclasses.replace(request, state=model), state)


class Session:
    """
    A session of the server, the client and its peers. Each method sends one request, which a test can change.

    Args:
        server: The server.
        request: The request of local training.
        state: Name of the state to which the client returns.
    """

    def __init__(self, server: SecureServer, request: SecureFit, state: str | None = None) -> None:
        self.server, self.request = server, request
        encoding = server.protocol.encoding(FedAvg().accumulator(request.state), request.num_clients)
        self.encoding = encoding
        self.session = ServerSession(server.protocol, request.session, request.round, 2)
        credentials = Credentials(peer_identity(), None)
        self.peers = {
            name: ClientSession(
                server.protocol,
                dataclasses.replace(request, client_id=name),
                fit_digest(request),
                credentials,
                encoding.num_values,
                encoding.zeros,
                lambda survivors: None,
            )
            for name in PEERS
        }
        self.keys = server.ask(request, state)
        if not isinstance(self.keys, ClientFailure):
            self.session.add_keys({VICTIM: self.keys, **{name: peer.advertise() for name, peer in self.peers.items()}})

    def share(self, change: Change = lambda request: request) -> Message:
        """Exchange the shares."""
        reply = self.server.ask(change(self.session.share_keys(VICTIM)))
        if not isinstance(reply, ClientFailure):
            peers = {name: peer.answer(self.session.share_keys(name)) for name, peer in self.peers.items()}
            self.session.add_shares({VICTIM: reply, **peers})
        return reply

    def submit(self, change: Change = lambda request: request, lost: Sequence[str] = ()) -> Message:
        """Ask for the masked updates."""
        reply = self.server.ask(change(self.session.submit(VICTIM)))
        if isinstance(reply, MaskedUpdate):
            self.total = reply.masked.clone()
            for name in PEERS:
                if name not in lost:
                    self.encoding.add_(self.total, self.peers[name].answer(self.session.submit(name)).masked)
            self.session.set_survivors({VICTIM: None, **{name: "lost" if name in lost else None for name in PEERS}})
        return reply

    def confirm(self, change: Change = lambda request: request) -> Message:
        """Ask for the signatures."""
        reply = self.server.ask(change(self.session.confirm(VICTIM)))
        if not isinstance(reply, ClientFailure):
            names = [name for name in self.session.survivors if name != VICTIM]
            signatures = {name: self.peers[name].answer(self.session.confirm(name)) for name in names}
            self.session.add_signatures({VICTIM: reply, **signatures})
        return reply

    def unmask(self, change: Change = lambda request: request) -> Message:
        """Ask for the shares of the masks."""
        return self.server.ask(change(self.session.unmask(VICTIM)))

    def run(self, until: str = "unmask", lost: Sequence[str] = ()) -> Session:
        """Send honest requests up to and including a phase."""
        for phase in ("share", "submit", "confirm", "unmask"):
            reply = self.submit(lost=lost) if phase == "submit" else getattr(self, phase)()
            assert not isinstance(reply, ClientFailure), reply.error
            if phase == until:
                break
        self.last = reply
        return self

    def sum(self) -> torch.Tensor:
        """Return the sum of a session that ended: the update of the client, as those of the peers are zero."""
        peers = {name: self.peers[name].answer(self.session.unmask(name)) for name in PEERS[:-1]}
        self.session.remove_masks(self.total, {VICTIM: self.last, **peers})
        return self.total
