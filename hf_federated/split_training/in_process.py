"""Split training with all parties in one process.

Each client has its own head and tail, and a link to the server that transfers serialized messages only. The clients
share their frozen parameters. The server has one body, or with `"server_hierarchical"` one replica of the body per
client. The strategies differ in the clients that take part in a step and in how the server batches their requests.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..adapters.copying import copy_model
from ..aggregation import WeightedMean
from ..messages.ledger import Ledger
from ..security.encrypted_session import Identity
from ..split.body import BodyServer
from ..split.boundary import Boundary, Link, LocalLink
from ..split.client_batch import ClientBatchRunner
from ..split.model import SplitModel
from ..split.parts import Part
from ..utils.random import derived_seed, isolated_rng, seed_generators
from .checks import check_same_run
from .config import SplitConfig
from .link_wrappers import with_byte_counting, with_encryption
from .messages import PartParameters
from .optimization import JointOptimizer, Party, average_parties, averaging_weights


SERVER = "server"

# A function that trains one client on its batches of a step and returns the loss.
TrainClient = Callable[["ClientParty", Any], torch.Tensor]


def replica_of(body: Part, device: torch.device | None) -> Part:
    """
    Copy the server's body.

    Args:
        body ([`Part`]): The body. It is not changed.
        device (`torch.device`, *optional*): Device of the copy. A copy on another device than the body shares no
            parameters with it.
    """
    if device is None or all(parameter.device == device for parameter in body.parameters()):
        return copy_model(body)
    return copy.deepcopy(body).to(device)


def bodies_of_clients(body: Part, config: SplitConfig, client_ids: Sequence[str]) -> dict[str, Party]:
    """
    Return the server's body that processes the messages of each client, by client id.

    The body is the same for all clients, or a replica for each client with `"server_hierarchical"`.

    Args:
        body ([`Part`]): The body of the model.
        config ([`SplitConfig`]): The strategy, and the devices of the replicas.
        client_ids (`Sequence[str]`): The clients, in their order.
    """
    if config.strategy != "server_hierarchical":
        return dict.fromkeys(client_ids, Party(SERVER, body, None))
    return {
        client_id: Party(f"{SERVER}/{client_id}", replica_of(body, config.device_of_body(number)), None)
        for number, client_id in enumerate(client_ids)
    }


class ClientParty(Party):
    """
    A client with its head and tail.

    Args:
        client_id (`str`): Id of the client.
        model ([`SplitModel`]): The client's head, tail and link to the server, without a body.

    Attributes:
        num_examples (`int`): Number of examples trained since the last average of the client's parts.
    """

    def __init__(self, client_id: str, model: SplitModel) -> None:
        parts = nn.ModuleDict({"head": model.client_head, "tail": model.client_tail})
        super().__init__(f"client/{client_id}", parts, None)
        self.client_id = client_id
        self.model = model
        self.num_examples = 0


class Federation:
    """
    Base class of [`SplitFederation`] and [`~split_training.networked_client.NetworkedFederation`].

    Args:
        model ([`SplitModel`]): The model of the run.
        config ([`SplitConfig`]): Strategy, averaging and encryption.
        seed (`int`): Seed of the random numbers that the parties draw.
        ledger ([`Ledger`]): Records the transferred bytes, by optimizer step.

    Attributes:
        step (`int`): Number of completed optimizer steps.
    """

    def __init__(self, model: SplitModel, config: SplitConfig, seed: int, ledger: Ledger) -> None:
        self.model = model
        self.config = config
        self.seed = seed
        self.ledger = ledger
        self.step = 0

    def _record_bytes(self, client_id: str, bytes_up: int, bytes_down: int) -> None:
        self.ledger.record(self.step, client_id, bytes_down=bytes_down, bytes_up=bytes_up)

    def seed_micro_batch(self, client_id: str, micro_batch: int) -> None:
        """
        Seed the random numbers that a client draws for a micro-batch.

        Micro-batches have separate seeds, so that a networked client can compute them in another order.

        Args:
            client_id (`str`): The client.
            micro_batch (`int`): Number of the micro-batch in the step, from 0.
        """
        number = [micro_batch] if micro_batch else []
        seed_generators(derived_seed(self.seed, "client", client_id, self.step, *number))


class SplitFederation(Federation):
    """
    All parties of a run.

    Args:
        model ([`SplitModel`]): The initial model of all clients, which is also the model that is evaluated and saved.
            `"serial"` and `"client_batch"` train its body in place.
        client_ids (`Sequence[str]`): The clients.
        config ([`SplitConfig`]): Strategy, averaging and encryption.
        seed (`int`): Seed of the random numbers that the parties draw.
        ledger ([`Ledger`]): Records the transferred bytes, by optimizer step.
    """

    def __init__(
        self, model: SplitModel, client_ids: Sequence[str], config: SplitConfig, seed: int, ledger: Ledger
    ) -> None:
        super().__init__(model, config, seed, ledger)
        # The client that trained last. With `hands_over` the next client continues with the parts of this client.
        self.last_client: str | None = None
        self._identity = Identity.generate(SERVER) if config.encryption else None
        self._server_of = bodies_of_clients(model.require_server_body(), config, client_ids)
        self.servers = {server.name: server for server in self._server_of.values()}
        body_servers = {
            name: BodyServer(cast(Part, server.module), model.boundary.wire, seed, trusts_clients=True)
            for name, server in self.servers.items()
        }
        self._client_batch = ClientBatchRunner(body_servers[SERVER]) if config.strategy == "client_batch" else None
        self.clients = {
            client_id: ClientParty(client_id, self._client_model(client_id, body_servers[server.name]))
            for client_id, server in self._server_of.items()
        }

    def _client_model(self, client_id: str, server: BodyServer) -> SplitModel:
        """Copy the head and tail, and link the copies to the server."""
        # One copy of both parts, so that tied embeddings stay tied.
        head, tail = cast(Iterable[Part], copy_model(nn.ModuleList([self.model.client_head, self.model.client_tail])))
        link: Link = LocalLink(server) if self._client_batch is None else self._client_batch.link(client_id)
        if self._identity is not None:
            link = with_encryption(link, client_id, self._identity, self.config.rotate_keys_every)
        link = with_byte_counting(link, client_id, self._record_bytes)
        boundary = Boundary(link, self.model.boundary.wire, client_id, trusts_server=True)
        boundary.defers_backward = self._client_batch is not None
        client = SplitModel(self.model.config, head, tail, boundary)
        client.adapter_config = self.model.adapter_config
        client.generation_config = self.model.generation_config
        return client.train(self.model.training)

    @property
    def parties(self) -> dict[str, Party]:
        """All clients and servers, by name."""
        return {party.name: party for party in (*self.clients.values(), *self.servers.values())}

    def run_step(
        self,
        step: int,
        batches: Mapping[str, Any],
        num_examples: Mapping[str, int],
        num_targets: Mapping[str, int | None],
        train: TrainClient,
        optimizer: JointOptimizer,
    ) -> torch.Tensor:
        """
        Run the forward and backward passes of an optimizer step.

        Args:
            step (`int`): Number of optimizer steps before this one.
            batches (`Mapping[str, Any]`): Batches of each client that takes part. The server stacks the examples of
                the clients in this order.
            num_examples (`Mapping[str, int]`): Number of examples of each client.
            num_targets (`Mapping[str, int]`): Number of target tokens of each client in all its batches.
            train (`Callable`): Trains one client on its batches and returns its loss.
            optimizer ([`JointOptimizer`]): Receives the groups of parties that take the step.

        Returns:
            `torch.Tensor`: The mean of the clients' losses, weighted by their target tokens, or by their examples if
            the target tokens are not counted. A scalar.
        """
        self.step = step
        participants = [self.clients[client_id] for client_id in batches]
        if self.config.hands_over:
            self._transfer_parts_to(participants[0])
        for client in participants:
            total_targets = num_targets[client.client_id] if self._client_batch is not None else None
            client.model.boundary.begin_step(step, total_targets)

        tasks = {
            client.client_id: functools.partial(train, client, batches[client.client_id]) for client in participants
        }
        with isolated_rng(self.seed):
            if self._client_batch is not None:
                losses = self._client_batch.run(tasks)
                self._client_batch.server.average_gradients()
            else:
                losses = {client_id: task() for client_id, task in tasks.items()}
        for client in participants:
            client.num_examples += num_examples[client.client_id]
        optimizer.groups = self._clipping_groups(participants)
        # The loss of a client without target tokens is NaN.
        weights = averaging_weights(
            {name: num_examples[name] if (count := num_targets[name]) is None else count for name in losses}
        )
        total_weight = sum(weights.values())
        return torch.stack([losses[name] * (weight / total_weight) for name, weight in weights.items()]).sum()

    def run_micro_batches(self, functions: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """
        Run the forward and backward passes of the micro-batches of a client in a step, one after the other.

        Args:
            functions (`Sequence[Callable]`): The passes of each micro-batch.
        """
        return [function() for function in functions]

    def _clipping_groups(self, participants: Sequence[ClientParty]) -> list[list[str]]:
        """Return the groups of parties that clip by one norm: a server body and the clients that use this body."""
        groups: dict[str, list[str]] = {}
        for client in participants:
            server = self._server_of[client.client_id].name
            groups.setdefault(server, [server]).append(client.name)
        return list(groups.values())

    def _transfer_parts_to(self, client: ClientParty) -> None:
        if self.last_client is not None and self.last_client != client.client_id:
            previous = self.clients[self.last_client]
            message = PartParameters(previous.client_id, self.step, previous.num_examples, previous.state())
            blob = message.to_bytes()
            self._record_bytes(previous.client_id, len(blob), 0)
            self._record_bytes(client.client_id, 0, len(blob))
            client.load(PartParameters.from_bytes(blob).state)
        self.last_client = client.client_id

    def end_step(self, num_steps: int) -> None:
        """
        Average the clients' parts if the averaging period ends.

        Args:
            num_steps (`int`): Number of completed optimizer steps.
        """
        self.step = num_steps
        if self.config.ends_period(num_steps):
            self.average()

    def average(self) -> None:
        """Replace all clients' parts by their mean, weighted by the examples trained since the last average."""
        mean, weights = WeightedMean(), averaging_weights(self._num_examples())
        for client_id, num_examples in weights.items():
            blob = PartParameters(client_id, self.step, num_examples, self.clients[client_id].state()).to_bytes()
            self._record_bytes(client_id, len(blob), 0)
            received = PartParameters.from_bytes(blob)
            mean.add(received.state, received.num_rows)
        blob = PartParameters("", self.step, sum(weights.values()), mean.finalize()).to_bytes()
        if len(self.servers) > 1:
            # The average of the bodies is computed on the server and needs no transfer.
            mean_body = average_parties(self._server_of, self._num_examples())
            for server in self.servers.values():
                server.load(mean_body)
        for client_id, client in self.clients.items():
            self._record_bytes(client_id, 0, len(blob))
            client.load(PartParameters.from_bytes(blob).state)
            client.num_examples = 0

    def _num_examples(self) -> dict[str, int]:
        return {client_id: client.num_examples for client_id, client in self.clients.items()}

    def copy_into_model(self) -> None:
        """
        Copy the trained parameters into the model that is evaluated and saved.

        The copy has the parts of the client that trained last, or the mean of all parts. Training does not continue
        from the copy.
        """
        model = self.model
        clients = Party("model", nn.ModuleDict({"head": model.client_head, "tail": model.client_tail}), None)
        if not self.config.hands_over:
            clients.load(average_parties(self.clients, self._num_examples()))
        elif self.last_client is not None:
            clients.load(self.clients[self.last_client].state())
        body = model.require_server_body()
        if SERVER not in self.servers:
            Party("model", body, None).load(average_parties(self._server_of, self._num_examples()))

    def _run_identity(self) -> dict[str, Any]:
        """Return what identifies the run of a checkpoint."""
        return {"config": self.config.shared_settings(), "clients": list(self.clients)}

    def state(self) -> dict[str, Any]:
        """Return the state of the run for a checkpoint, in addition to the states of the parties."""
        return {**self._run_identity(), "holder": self.last_client, "num_rows": self._num_examples()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """
        Load the state of a checkpoint.

        Raises:
            ValueError: If the checkpoint belongs to a run with another configuration or other clients.
        """
        check_same_run(state, self._run_identity())
        self.last_client = state["holder"]
        for client_id, num_examples in state["num_rows"].items():
            self.clients[client_id].num_examples = num_examples
