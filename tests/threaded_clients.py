"""A server of a federation over a network with clients in threads that reply without training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tiny import arguments, rows, tiny_model

from hf_federated import FederatedCallback, FederatedConfig, FederatedTrainer, NetworkEngine
from hf_federated.messages import Announcement, ClientUpdate, Evaluate, Message, Metrics, read_message
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.transport import GrpcConnection, LinkError
from hf_federated.transport.framing import unframe


Reply = Callable[[Message], Message]

ANNOUNCED = Announcement(8, 8, num_eval_examples=4, examples_per_step=4, class_counts=[3, 5])


class Rejections(FederatedCallback):
    """Records the rejected clients of each round."""

    def __init__(self) -> None:
        self.rejected: list[dict[str, str]] = []

    def on_round_end(self, args, state, control, round, **kwargs) -> None:
        self.rejected.append(dict(round.rejected))


def honest(request: Message) -> Message:
    """Reply with a state that differs by 0.01 from the received one, or with metrics."""
    where = {"round": request.round, "client_id": request.client_id, "nonce": request.nonce}
    if isinstance(request, Evaluate):
        return Metrics(**where, num_examples=4, metrics={"eval_loss": 0.5})
    state = {name: value + 0.01 for name, value in request.state.items()}
    metrics = {"loss": 0.5, "class_count_0": 3.0, "class_count_1": 5.0}
    return ClientUpdate(**where, state=state, num_examples=8, num_tokens=8, num_steps=2, metrics=metrics)


def changed(**fields: Any) -> Reply:
    """Change fields of the update."""

    def reply(request: Message) -> Message:
        answer = honest(request)
        return dataclasses.replace(answer, **fields) if isinstance(answer, ClientUpdate) else answer

    return reply


def serve_replies(
    engine: NetworkEngine,
    settings: NetworkSettings,
    name: str,
    announced: Announcement,
    reply: Reply,
    errors: dict[str, Exception],
) -> None:
    answer: bytes | None = None
    try:
        with GrpcConnection(
            engine.transport.address, None, name, settings, announced.to_bytes(), insecure=True, connect_timeout=10
        ) as connection:
            while (blob := connection.receive(answer)) is not None:
                _, content = unframe(blob, state=str, keep=list, num_clients=int)
                answer = reply(read_message(bytes(content))).to_bytes()
    except LinkError as error:
        errors[name] = error


def run_with_threads(
    directory: Path,
    replies: Mapping[str, Reply],
    announced: Mapping[str, Announcement],
    errors: dict[str, Exception] | None = None,
    late: Mapping[str, Callable[[], object]] = MappingProxyType({}),
    resume_from: Path | None = None,
    **federation: Any,
) -> tuple[FederatedTrainer, list[dict[str, str]]]:
    """
    Run two rounds with clients in threads. Return the trainer and the rejected clients of each round.

    `errors` collects the clients whose connection ended. The clients of `late` join when their function has returned.
    `resume_from` is a checkpoint.
    """
    errors = {} if errors is None else errors
    num_to_start = len(replies) - len(late)
    options = {"join_timeout": 20, "num_to_start": num_to_start, "rejoin_timeout": 60 if resume_from is None else 0.1}
    engine = NetworkEngine(list(replies), address="127.0.0.1:0", insecure=True, **options)
    rejections = Rejections()
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(
            directory,
            eval_strategy="epoch" if federation.get("evaluate_clients") else "no",
            save_strategy="epoch",
        ),
        eval_dataset=rows(4),
        engine=engine,
        federation=FederatedConfig(num_rounds=2, min_clients=1, **federation),
        callbacks=[rejections],
    )
    start = engine.transport.start

    def start_with_clients(client_ids, settings) -> None:
        start(client_ids, settings)
        for name, reply in replies.items():
            options = (engine, settings, name, announced.get(name, ANNOUNCED), reply, errors)
            threading.Thread(target=join, args=[late.get(name), *options], daemon=True).start()

    def join(wait: Callable[[], object] | None, *options: Any) -> None:
        if wait is not None:
            wait()
        serve_replies(*options)

    engine.transport.start = start_with_clients
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return trainer, rejections.rejected
