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
from hf_federated.messages.serialization import packed_kind
from hf_federated.security.encrypted_link import EncryptedLink, EncryptedServer
from hf_federated.security.encrypted_session import ClientSession, ServerSession
from hf_federated.security.keys import Identity
from hf_federated.security.peer_envelopes import PeerEnvelopes
from hf_federated.split.boundary import Boundary
from hf_federated.split_training.config import run_digest
from hf_federated.split_training.messages import Bundle, as_bytes
from hf_federated.split_training.server import TrainingServer
from hf_federated.split_training.server_model import ServerModel


IDENTITIES: dict[str, Identity] = {}
LOAD_LOCK = threading.Lock()


def identity(name: str) -> Identity:
    """Identity of a party, created once per session because the creation of keys is slow."""
    if name not in IDENTITIES:
        IDENTITIES[name] = Identity.generate(name, 2048)
    return IDENTITIES[name]


def unbundled(blob: bytes) -> list[bytes]:
    """The messages that travel in one exchange."""
    if packed_kind(blob) != Bundle.kind:
        return [blob]
    return [as_bytes(message) for message in Bundle.from_bytes(blob).messages]


class DirectLink:
    """Link to a server in the same process."""

    def __init__(self, server: TrainingServer, client_id: str, watch: Callable[[bytes], None] | None = None) -> None:
        self.server = server
        self.client_id = client_id
        self.watch = watch

    def exchange(self, blob: bytes) -> bytes:
        if self.watch is not None:
            for message in unbundled(blob):
                self.watch(message)
        return self.server.answer(self.client_id, blob)

    def end_step(self) -> None:
        pass


class CountingServer:
    """Server side of an encrypted link that counts the bytes of the messages."""

    def __init__(self, server: EncryptedServer) -> None:
        self.server = server
        self.up = self.down = 0

    def hello(self, hello: bytes) -> bytes:
        reply = self.server.hello(hello)
        self.up, self.down = self.up + len(hello), self.down + len(reply)
        return reply

    def finish(self, finish: bytes) -> None:
        self.server.finish(finish)
        self.up += len(finish)

    def exchange(self, encrypted: bytes) -> bytes:
        answer = self.server.exchange(encrypted)
        self.up, self.down = self.up + len(encrypted), self.down + len(answer)
        return answer

    def check_size(self, num_bytes: int) -> None:
        self.server.check_size(num_bytes)


def encrypted_link(server: TrainingServer, client_id: str) -> EncryptedLink:
    """Encrypted link to a server in the same process, with new keys at every step."""
    client, host = identity(client_id), identity("server")
    server_session = ServerSession(host, client_id, client.fingerprint, rotate_every=1, rsa_bits=2048)
    client_session = ClientSession(client, "server", host.fingerprint, rotate_every=1, rsa_bits=2048)
    carrier = CountingServer(EncryptedServer(server_session, functools.partial(server.answer, client_id)))
    return EncryptedLink(client_session, carrier)


class Run:
    """
    A networked run.

    Args:
        directory (`Path`): Parent of the output directories of the parties.
        clients (`Mapping[str, Any]`): Dataset of each client, by client id.
        split ([`SplitConfig`]): Strategy.
        adapter (`PeftConfig`, *optional*): Config of the adapters of all parts.
        deadline (`float`, *optional*): As in [`TrainingServer`].
        links (`Callable`, *optional*): Creates the link of a client from the server and the client id.
        model (`PreTrainedModel`, *optional*): Initial model.
        eval_dataset (`datasets.Dataset`, *optional*): Evaluation dataset of every client.
        changes: Further training arguments.
    """

    def __init__(
        self,
        directory: Path,
        clients: Mapping[str, Any],
        split: SplitConfig,
        adapter: PeftConfig | None = None,
        deadline: float | None = None,
        links: Callable[[TrainingServer, str], Any] = DirectLink,
        model: Any = None,
        eval_dataset: Any = None,
        **changes: Any,
    ) -> None:
        model = SplitModel.from_model(
            whole_model() if model is None else model,
            split.head_blocks,
            split.tail_blocks,
            wire_dtype=split.wire_dtype,
        )
        if adapter is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                model.add_adapter(copy.deepcopy(adapter))
        args = arguments(directory / "server", **changes)
        digest = run_digest(model.config, split, args, model.adapter_config)
        wire = model.boundary.wire
        body = copy_model(model.server_body)
        server_model = ServerModel(body, model.config, wire, split, args, list(clients), model.adapter_config)
        self.server = TrainingServer(server_model, digest, deadline)
        self.trainers: dict[str, SplitFederatedTrainer] = {}
        fingerprints = {split_model: identity(split_model).fingerprint for split_model in clients}
        for client_id, dataset in clients.items():
            parts = copy_model(torch.nn.ModuleList([model.client_head, model.client_tail]))
            boundary = Boundary(links(self.server, client_id), wire, client_id)
            split_model = SplitModel(model.config, *parts, boundary)
            split_model.adapter_config = model.adapter_config
            self.trainers[client_id] = SplitFederatedTrainer(
                split_model,
                arguments(directory / client_id, **changes),
                train_dataset=dataset,
                eval_dataset=eval_dataset,
                split=split,
                envelopes=PeerEnvelopes(identity(client_id), fingerprints, 2048),
            )
        self.errors: dict[str, Exception] = {}

    def train(self, resume: bool = False, timeout: float = 60.0) -> None:
        """Train all parties. Errors are stored by client, and a client with an error disconnects."""

        def work(client_id: str, trainer: SplitFederatedTrainer) -> None:
            load = trainer._load_rng_state

            def load_with_lock(checkpoint: Any) -> None:
                # The list of types that `torch.load` accepts is global. Normally each party has its own process.
                with LOAD_LOCK:
                    load(checkpoint)

            trainer._load_rng_state = load_with_lock
            try:
                trainer.train(resume_from_checkpoint=resume or None)
                trainer.leave()
            except Exception as error:
                self.errors[client_id] = error
                self.server.client_lost(client_id)

        threads = [threading.Thread(target=work, args=item, daemon=True) for item in self.trainers.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        assert not any(thread.is_alive() for thread in threads), "a party did not stop waiting"

    def values(self) -> dict[str, dict[str, torch.Tensor]]:
        """Parameters of every party."""
        client_values = {name: dict(trainer.model.named_parameters()) for name, trainer in self.trainers.items()}
        server_values = {name: party.state() for name, party in self.server.server_model.parties.items()}
        return {
            name: {name: value.detach().clone() for name, value in values.items()}
            for name, values in {**client_values, **server_values}.items()
        }
