"""The parties of a split training run in one process: who they are, what a step is, how parts are averaged.

Each client has a head and a tail of its own, which share with the others' what does not train, and a link that only
bytes cross. The server has one body, or with `"server_hierarchical"` one a client. Strategies differ in who takes part
in a step and in how they meet; everything else is the same for all three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..adapters.copying import copy_model
from ..aggregation import WeightedMean
from ..messages.ledger import Ledger
from ..security.encryption import Identity
from ..split.body import BodyServer
from ..split.boundary import Boundary, Link, LocalLink
from ..split.meeting import Meeting
from ..split.model import SplitModel
from ..split.parts import Part
from ..utils.random import derived_seed, own_draws, seed_generators
from .config import SplitConfig
from .link_wrappers import counted, sealed
from .messages import PartParameters
from .optimization import JointOptimizer, Party


SERVER = "server"

# What trains one client on its batches of a step: its loss.
TrainClient = Callable[["ClientParty", Any], torch.Tensor]


class ClientParty(Party):
    """
    A client with its head and tail.

    Args:
        client_id (`str`): Who.
        model ([`SplitModel`]): Its head and tail, and its link; no body.

    Attributes:
        num_rows (`int`): Rows trained since its parts were averaged last.
    """

    def __init__(self, client_id: str, model: SplitModel) -> None:
        parts = nn.ModuleDict({"head": model.client_head, "tail": model.client_tail})
        super().__init__(f"client/{client_id}", parts, None)
        self.client_id = client_id
        self.model = model
        self.num_rows = 0


class SplitFederation:
    """
    All parties of a run.

    Args:
        model ([`SplitModel`]): The model that all start from, and that is evaluated and saved. The body of `"serial"`
            and `"client_batch"` is its own.
        client_ids (`Sequence[str]`): Who takes part.
        config ([`SplitConfig`]): How.
        seed (`int`): Of what parties draw.
        ledger ([`Ledger`]): Counts what crosses, by optimizer step.
    """

    def __init__(
        self, model: SplitModel, client_ids: Sequence[str], config: SplitConfig, seed: int, ledger: Ledger
    ) -> None:
        self.model = model
        self.config = config
        self.seed = seed
        self.ledger = ledger
        self.step = 0
        # Who trained last, whose parts the next client takes over.
        self.holder: str | None = None
        assert model.server_body is not None
        wire = model.boundary.wire
        self.clients: dict[str, ClientParty] = {}
        self.servers: dict[str, Party] = {}
        self._bodies: dict[str, BodyServer] = {}
        self._server_of: dict[str, str] = {}
        self._meeting: Meeting | None = None
        self._identity = Identity.generate(SERVER) if config.encryption else None
        for client_id in client_ids:
            name = f"{SERVER}/{client_id}" if config.strategy == "server_hierarchical" else SERVER
            if name not in self.servers:
                body = model.server_body if name == SERVER else copy_model(model.server_body)
                self.servers[name] = Party(name, body, None)
                self._bodies[name] = BodyServer(body, wire, seed)
            self._server_of[client_id] = name
            if config.strategy == "client_batch" and self._meeting is None:
                self._meeting = Meeting(self._bodies[name])
            self.clients[client_id] = ClientParty(client_id, self._client_model(client_id, self._bodies[name]))

    def _client_model(self, client_id: str, server: BodyServer) -> SplitModel:
        """A model around copies of head and tail, with a link to the server."""
        parts = copy_model(nn.ModuleList([self.model.client_head, self.model.client_tail]))
        head, tail = parts
        assert isinstance(head, Part) and isinstance(tail, Part)
        link: Link = LocalLink(server) if self._meeting is None else self._meeting.link(client_id)
        if self._identity is not None:
            link = sealed(link, client_id, self._identity, self.config.rotate_keys_every)
        boundary = Boundary(counted(link, client_id, self._count), self.model.boundary.wire, client_id)
        boundary.defers_backward = self._meeting is not None
        client = SplitModel(self.model.config, head, tail, boundary)
        client.adapter_config = self.model.adapter_config
        client.generation_config = self.model.generation_config
        return client.train(self.model.training)

    def _count(self, client_id: str, bytes_up: int, bytes_down: int) -> None:
        self.ledger.record(self.step, client_id, bytes_down=bytes_down, bytes_up=bytes_up)

    @property
    def parties(self) -> dict[str, Party]:
        """Everybody, by name."""
        return {party.name: party for party in (*self.clients.values(), *self.servers.values())}

    def run_step(
        self,
        step: int,
        batches: Mapping[str, Any],
        num_rows: Mapping[str, int],
        num_targets: Mapping[str, int | None],
        train: TrainClient,
        optimizer: JointOptimizer,
    ) -> torch.Tensor:
        """
        Everybody's forward and backward passes of an optimizer step.

        Args:
            step (`int`): Optimizer steps done before.
            batches (`Mapping[str, Any]`): Of each client that takes part, in the order in which rows are stacked.
            num_rows (`Mapping[str, int]`): Rows of each.
            num_targets (`Mapping[str, int]`): Target tokens of each, of all its batches.
            train (`Callable`): Trains one client on its batches.
            optimizer ([`JointOptimizer`]): Is told who steps then.

        Returns:
            `torch.Tensor`: The loss: the mean of the clients', weighted by what they are means over.
        """
        self.step = step
        taking_part = [self.clients[client_id] for client_id in batches]
        if self.config.hands_over:
            self._hand_over_to(taking_part[0])
        for client in taking_part:
            total = num_targets[client.client_id] if self._meeting is not None else None
            client.model.boundary.begin_step(step, total)

        def work(client: ClientParty) -> Callable[[], torch.Tensor]:
            def train_it() -> torch.Tensor:
                seed_generators(derived_seed(self.seed, "client", client.client_id, step))
                return train(client, batches[client.client_id])

            return train_it

        with own_draws(self.seed):
            if self._meeting is not None:
                losses = self._meeting.run({client.client_id: work(client) for client in taking_part})
                self._meeting.server.average_gradients()
            else:
                losses = {client.client_id: work(client)() for client in taking_part}
        for client in taking_part:
            client.num_rows += num_rows[client.client_id]
        optimizer.groups = self._stepping(taking_part)
        weights = {own: num_rows[own] if num_targets[own] is None else num_targets[own] for own in losses}
        # The loss of no target tokens is no number.
        counted = {own: weight for own, weight in weights.items() if weight} or dict.fromkeys(losses, 1)
        total_weight = sum(counted.values())
        return torch.stack([losses[own] * (weight / total_weight) for own, weight in counted.items()]).sum()

    def _stepping(self, taking_part: Sequence[ClientParty]) -> list[list[str]]:
        """Who clips by one norm: all that one body answers."""
        groups: dict[str, list[str]] = {}
        for client in taking_part:
            server = self._server_of[client.client_id]
            groups.setdefault(server, [server]).append(client.name)
        return list(groups.values())

    def _hand_over_to(self, client: ClientParty) -> None:
        if self.holder is not None and self.holder != client.client_id:
            giver = self.clients[self.holder]
            message = PartParameters(giver.client_id, self.step, giver.num_rows, giver.state())
            blob = message.to_bytes()
            self._count(giver.client_id, len(blob), 0)
            self._count(client.client_id, 0, len(blob))
            client.load(PartParameters.from_bytes(blob).state)
        self.holder = client.client_id

    def end_step(self, num_steps: int) -> None:
        """
        Average, where it is time.

        Args:
            num_steps (`int`): Optimizer steps done by now.
        """
        self.step = num_steps
        every = self.config.average_every
        if every is not None and num_steps % every == 0:
            self.average()

    def average(self) -> None:
        """Everybody's parts become their mean, weighted by the rows trained since the last time."""
        mean, weights = WeightedMean(), self._weights()
        for client_id, num_rows in weights.items():
            blob = PartParameters(client_id, self.step, num_rows, self.clients[client_id].state()).to_bytes()
            self._count(client_id, len(blob), 0)
            received = PartParameters.from_bytes(blob)
            mean.add(received.state, received.num_rows)
        blob = PartParameters("", self.step, sum(weights.values()), mean.finalize()).to_bytes()
        if len(self.servers) > 1:
            # Bodies do not leave the server.
            bodies = self._mean_of(self._server_by_client())
            for server in self.servers.values():
                server.load(bodies)
        for client_id, client in self.clients.items():
            self._count(client_id, 0, len(blob))
            client.load(PartParameters.from_bytes(blob).state)
            client.num_rows = 0

    def _weights(self) -> dict[str, int]:
        """Rows trained since the last average, of the clients that trained any; where none did, one each."""
        trained = {client_id: client.num_rows for client_id, client in self.clients.items() if client.num_rows}
        return trained or dict.fromkeys(self.clients, 1)

    def _server_by_client(self) -> dict[str, Party]:
        return {client_id: self.servers[name] for client_id, name in self._server_of.items()}

    def _mean_of(self, parties: Mapping[str, Party]) -> dict[str, torch.Tensor]:
        """The mean of what clients, or the bodies that answer them, train."""
        mean = WeightedMean()
        for client_id, num_rows in self._weights().items():
            mean.add(parties[client_id].state(), num_rows)
        return mean.finalize()

    def copy_into_model(self) -> None:
        """
        Let the model that is evaluated and saved be what was trained: the parts of the client that holds them, or the
        mean of all. Nobody goes on from it.
        """
        own = self.model
        clients = Party("model", nn.ModuleDict({"head": own.client_head, "tail": own.client_tail}), None)
        if not self.config.hands_over:
            clients.load(self._mean_of(self.clients))
        elif self.holder is not None:
            clients.load(self.clients[self.holder].state())
        if own.server_body is not next(iter(self.servers.values())).module:
            assert own.server_body is not None
            Party("model", own.server_body, None).load(self._mean_of(self._server_by_client()))

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the parties' own states."""
        return {
            "config": self.config.to_dict(),
            "clients": list(self.clients),
            "holder": self.holder,
            "num_rows": {client_id: client.num_rows for client_id, client in self.clients.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: If the run was another one.
        """
        for name, own in (("config", self.config.to_dict()), ("clients", list(self.clients))):
            if state[name] != own:
                raise ValueError(f"The checkpoint is of a run with {name}={state[name]}, this one has {own}.")
        self.holder = state["holder"]
        for client_id, num_rows in state["num_rows"].items():
            self.clients[client_id].num_rows = num_rows
