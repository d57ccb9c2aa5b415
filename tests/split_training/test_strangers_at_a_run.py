"""A networked run over gRPC ends in the same bytes while strangers connect to its server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loopback import SESSION_CONFIG, certificates, join
from networked import Run
from split_runs import LORA, clients_of
from strangers import KINDS, strangers

from hf_federated import SplitConfig
from hf_federated.transport import GrpcServer, TlsCredentials


CLIENTS = ["client 0", "client 1"]


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls"), [*CLIENTS, "stranger"])


@contextlib.contextmanager
def networked_run(directory: Path, tls: Path, num_examples: int) -> Iterator[tuple[Run, GrpcServer]]:
    """A run whose clients reach the server over gRPC."""
    with contextlib.ExitStack() as stack:
        servers: list[GrpcServer] = []

        def link(training_server, client_id):
            if not servers:
                server = GrpcServer(
                    training_server.answer,
                    TlsCredentials.of_server(tls),
                    CLIENTS,
                    SESSION_CONFIG,
                    on_lost=training_server.client_lost,
                    on_left=training_server.client_lost,
                )
                servers.append(stack.enter_context(server))
            return stack.enter_context(join(tls, servers[0], client_id, answer_timeout=300.0, connect_timeout=60.0))

        split = SplitConfig(strategy="client_batch", average_every=2)
        data = clients_of(num_examples, num_examples)
        yield Run(directory, data, split, LORA, links=link, logging_strategy="no"), servers[0]


def check_same_bytes(directory: Path, tls: Path, number: int, num_examples: int) -> None:
    values = []
    for name in ("undisturbed", "disturbed"):
        with networked_run(directory / name, tls, num_examples) as (run, server), contextlib.ExitStack() as stack:
            if name == "disturbed":
                stack.enter_context(strangers(tls, server.address, number, KINDS))
            run.train(timeout=400.0)
        assert not run.errors and run.server.finished.is_set() and not run.server.state.removed
        values.append(run.values())
    for party, parameters in values[0].items():
        for name, value in parameters.items():
            assert torch.equal(value, values[1][party][name]), (party, name)


def test_run_ends_in_the_same_bytes_while_strangers_connect(tls, tmp_path):
    check_same_bytes(tmp_path, tls, number=12, num_examples=4)


@pytest.mark.slow
def test_run_ends_in_the_same_bytes_under_200_strangers_of_each_kind(tls, tmp_path):
    check_same_bytes(tmp_path, tls, number=200, num_examples=120)
