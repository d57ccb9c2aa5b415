"""The result of an estimate, and the time that follows from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_federated.cards.tables import plural
from hf_federated.experiments.estimate.sizes import EstimateOptions
from hf_federated.experiments.estimate.step_cost import StepCost
from hf_federated.experiments.text import aligned_rows


@dataclass(frozen=True)
class Exchange:
    """
    A message of the server and the reply of a client.

    Args:
        name (`str`): Name of the phase or of the messages.
        bytes_down (`int`): Size of the message.
        bytes_up (`int`): Size of the reply.
        count (`int`, *optional*, defaults to `1`): Number of such exchanges in a round.
    """

    name: str
    bytes_down: int
    bytes_up: int
    count: int = 1


def total_bytes(exchanges: Iterable[Exchange]) -> tuple[int, int]:
    """Return the bytes down and up of some exchanges."""
    found = list(exchanges)
    return sum(item.bytes_down * item.count for item in found), sum(item.bytes_up * item.count for item in found)


@dataclass(frozen=True)
class PartyEstimate:
    """
    Parameters and memory of a party in training.

    Args:
        name (`str`): Name of the party, such as `"client"`.
        num_parameters (`int`): Number of parameters. A shared parameter counts once.
        num_trainable (`int`): Number of trainable parameters.
        weights (`int`): Bytes of parameters and buffers.
        gradients (`int`): Bytes of gradients.
        optimizer_state (`int`, *optional*): Bytes of the state of the optimizer. `None` if it is not known.
        activations (`int`): Bytes of activations at the end of the forward pass.
        exchanged (`int`): Bytes of exchanged tensors that the party keeps, such as sums of updates.
        total (`int`): Largest number of bytes at the same time. It can be less than the sum, because gradients replace
            activations during the backward pass.
    """

    name: str
    num_parameters: int
    num_trainable: int
    weights: int
    gradients: int
    optimizer_state: int | None
    activations: int
    exchanged: int
    total: int

    @classmethod
    def training(cls, name: str, cost: StepCost, exchanged: int = 0) -> PartyEstimate:
        """
        Create the estimate of a party that takes training steps.

        Args:
            name (`str`): Name of the party.
            cost ([`StepCost`]): Cost of a step.
            exchanged (`int`, *optional*, defaults to `0`): Bytes of exchanged tensors that the party keeps.
        """
        shared = {field: value for field, value in vars(cost).items() if field in cls.__dataclass_fields__}
        return cls(name=name, **shared, exchanged=exchanged, total=cost.total + exchanged)


@dataclass(frozen=True)
class UnitTime:
    """
    Seconds of a round, an optimizer step or a generated token. A number is `None` if an option is missing.

    Args:
        client (`float`, *optional*): Computation on a client. Clients compute at the same time.
        server (`float`, *optional*): Computation on the server.
        transfer (`float`, *optional*): Transfer of the bytes of a client.
        waiting (`float`, *optional*): Waiting for round trips.
    """

    client: float | None
    server: float | None
    transfer: float | None
    waiting: float | None

    @property
    def known(self) -> dict[str, float]:
        """The known numbers by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def total(self) -> float | None:
        """The sum of the known numbers, or `None` if there are none."""
        return sum(self.known.values()) if self.known else None


@dataclass(frozen=True)
class UnitEstimate:
    """
    Messages and computation of a round, an optimizer step or a generated token.

    Args:
        name (`str`): `"round"`, `"optimizer step"`, `"prompt"` or `"generated token"`.
        num_clients (`int`): Number of clients that take part.
        exchanges (`list[Exchange]`): The exchanges of one client.
        bytes_down (`int`): Bytes from the server to all clients.
        bytes_up (`int`): Bytes from all clients to the server.
        round_trips (`int`): Number of exchanges of one client, one after the other.
        client_flops (`int`, *optional*): Floating point operations of a client.
        server_flops (`int`, *optional*): Floating point operations of the server, for all clients.
    """

    name: str
    num_clients: int
    exchanges: list[Exchange]
    bytes_down: int
    bytes_up: int
    round_trips: int
    client_flops: int | None = None
    server_flops: int | None = None

    def time(self, options: EstimateOptions) -> UnitTime:
        """
        Compute the time at a given speed of devices and connections.

        Each client has its own connection, and the server's connection is not a limit. A round trip takes twice the
        latency. Computation, transfer and waiting do not overlap.

        Args:
            options ([`EstimateOptions`]): Bandwidth, latency and throughput.
        """
        server_tflops = options.tflops if options.server_tflops is None else options.server_tflops
        waiting = None if options.latency_ms is None else self.round_trips * 2 * options.latency_ms / 1e3
        return UnitTime(
            _seconds(self.client_flops, options.tflops, 1e12),
            _seconds(self.server_flops, server_tflops, 1e12),
            _seconds(sum(total_bytes(self.exchanges)) * 8, options.bandwidth_mbit, 1e6),
            waiting,
        )


def _seconds(amount: int | None, speed: float | None, unit: float) -> float | None:
    return None if amount is None or speed is None else amount / (speed * unit)


@dataclass(frozen=True)
class Estimate:
    """
    The estimate of a recipe.

    Args:
        family (`str`): `"averaging"`, `"distillation"` or `"split"`.
        method (`str`): The algorithm or the strategy.
        parties (`list[PartyEstimate]`): The parties.
        units (`list[UnitEstimate]`): The round, or the optimizer step and the generated token. The first one is what
            training repeats.
        num_clients (`int`, *optional*): Number of clients.
        num_units (`int`, *optional*): Number of rounds or optimizer steps of the run.
        run_bytes_down (`int`, *optional*): Bytes from the server to all clients in the run.
        run_bytes_up (`int`, *optional*): Bytes from all clients to the server in the run.
        average_bytes (`int`, *optional*): For a split model: size of the parameters that a client sends and receives
            for an average or a handover.
        notes (`list[str]`): What the numbers assume.
    """

    family: str
    method: str
    parties: list[PartyEstimate]
    units: list[UnitEstimate]
    num_clients: int | None
    num_units: int | None
    run_bytes_down: int | None = None
    run_bytes_up: int | None = None
    average_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    def run_seconds(self, options: EstimateOptions) -> float | None:
        """
        Compute the seconds of all rounds or optimizer steps of the run, or `None` if a number is missing.

        Args:
            options ([`EstimateOptions`]): Bandwidth, latency and throughput.
        """
        seconds = self.units[0].time(options).total
        return None if self.num_units is None or seconds is None else self.num_units * seconds

    def to_dict(self, options: EstimateOptions) -> dict[str, Any]:
        """
        Return all numbers as JSON values.

        Args:
            options ([`EstimateOptions`]): Bandwidth, latency and throughput.
        """
        values = dataclasses.asdict(self)
        for unit, estimated in zip(values["units"], self.units, strict=True):
            time = estimated.time(options)
            unit["seconds"] = {**dataclasses.asdict(time), "total": time.total}
        return {**values, "run_seconds": self.run_seconds(options), "options": dataclasses.asdict(options)}


def describe(estimate: Estimate, options: EstimateOptions) -> list[str]:
    """
    Describe an estimate as tables of text.

    Args:
        estimate ([`Estimate`]): The estimate.
        options ([`EstimateOptions`]): Bandwidth, latency and throughput.
    """
    clients = "" if estimate.num_clients is None else f", {plural(estimate.num_clients, 'client')}"
    lines = [f"{estimate.family}: {estimate.method}{clients}", "", "Memory in training"]
    header = ("", "parameters", "trained", "weights", "gradients", "optimizer", "activations", "exchanged", "total")
    rows = []
    for party in estimate.parties:
        name, num_parameters, num_trainable, *sizes = dataclasses.astuple(party)
        rows.append((name, _number(num_parameters), _number(num_trainable), *map(_size, sizes)))
    lines += [*aligned_rows([header, *rows], has_numbers=True), ""]
    for unit in estimate.units:
        lines += [*_describe_unit(unit, options), ""]
    lines += _describe_run(estimate, options)
    return lines + [f"- {note}" for note in estimate.notes]


def _describe_unit(unit: UnitEstimate, options: EstimateOptions) -> list[str]:
    lines = [f"One {unit.name}, {plural(unit.num_clients, 'client')}"]
    rows = []
    for name in dict.fromkeys(item.name for item in unit.exchanges):
        items = [item for item in unit.exchanges if item.name == name]
        rows.append((name, str(sum(item.count for item in items)), *map(_size, total_bytes(items))))
    down, up = total_bytes(unit.exchanges)
    rows.append(("a client", str(unit.round_trips), _size(down), _size(up)))
    if unit.num_clients > 1:
        rows.append(("all clients", "", _size(unit.bytes_down), _size(unit.bytes_up)))
    lines += aligned_rows([("", "round trips", "to the client", "to the server"), *rows], has_numbers=True)
    flops = [
        f"{name} {value / 1e12:.3g}"
        for name, value in (("client", unit.client_flops), ("server", unit.server_flops))
        if value is not None
    ]
    if flops:
        lines.append(f"Computation in 10¹² floating point operations: {', '.join(flops)}")
    time = unit.time(options)
    if time.total is not None:
        known = [f"{name} {_duration(seconds)}" for name, seconds in time.known.items()]
        lines.append(f"Time: {_duration(time.total)} ({', '.join(known)})")
    return lines


def _describe_run(estimate: Estimate, options: EstimateOptions) -> list[str]:
    unit = estimate.units[0].name
    lines = []
    if estimate.average_bytes is not None:
        lines.append(f"Parameters of a client in an average or a handover: {_size(estimate.average_bytes)}")
    if estimate.num_units is not None:
        line = f"The run: {plural(estimate.num_units, unit)}"
        if estimate.run_bytes_down is not None and estimate.run_bytes_up is not None:
            line += f", {_size(estimate.run_bytes_down)} to clients, {_size(estimate.run_bytes_up)} to the server"
        seconds = estimate.run_seconds(options)
        lines.append(line + ("" if seconds is None else f", {_duration(seconds)}"))
    return [*lines, ""] if lines else []


def _scaled(value: float, units: Sequence[tuple[str, float]], spec: str = ".2f") -> str | None:
    """Format a value in the largest unit that is not larger, or return `None` if there is none."""
    return next((f"{value / size:{spec}} {unit}" for unit, size in units if value >= size), None)


def _number(value: int) -> str:
    return _scaled(value, (("B", 1e9), ("M", 1e6), ("k", 1e3))) or str(value)


def _size(value: int | None) -> str:
    if value is None:
        return "unknown"
    return _scaled(value, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))) or f"{value} B"


def _duration(seconds: float) -> str:
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    return _scaled(seconds, units, ".3g") or f"{1e3 * seconds:.3g} ms"
