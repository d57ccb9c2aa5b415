"""`AnomalyReport`: norm, cosine and distance rank of every update, to find clients that differ from the others."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from ..aggregation.change_sketch import ChangeSketch
from ..aggregation.update_statistics import squared_norm
from ..distributed.process_group import process_group
from ..messages import ClientUpdate
from ..methods import Round
from ..utils.random import derived_seed
from ..utils.storage import write_private
from ..utils.untrusted_json import read_json
from .callbacks import FederatedCallback


ANOMALIES_NAME = "federated_anomalies.json"


class AnomalyReport(FederatedCallback):
    """
    Reports how far each client's update is from the updates of the other clients, for every averaging algorithm.

    For each update of a round, the report has

    - `norm`: the norm of the change, `‖x_i − x‖₂`, exact;
    - `cosine`: the cosine of the angle between the change of the client and the change of the global model;
    - `distance`: the distance of the two changes;
    - `distance_rank`: the rank of this distance in the round, from 1 (nearest).

    The report keeps a random projection of each update to 1021 numbers ([`ChangeSketch`]), so that memory does not
    grow with the model. Cosines therefore have an error of about 0.03 (a standard deviation of at most 0.044), and
    ranks of similar distances can be exchanged. A LoRA module counts by the product `B A`. Norms of clients that send
    a large change, the opposite of the other clients, or nothing at all are clearly visible; a change within the
    spread of the honest clients is not.

    An update that the server rejects because of its size has values too. `rejected` has the reason.

    The values are in the log as `client/<id>/update_norm`, `client/<id>/update_cosine` and
    `client/<id>/distance_rank`, and in `federated_anomalies.json` of the output directory, together with the rejected
    clients. The file is written with each checkpoint and at the end of the run.
    [`~hf_federated.reporting.anomaly_plots.plot_anomalies`] plots it. `report_anomalies=True` of [`FederatedConfig`]
    adds this callback.

    Args:
        log (`bool`, *optional*, defaults to `True`):
            Whether the log has the values.

    Example:

    ```python
    >>> from hf_federated import AnomalyReport

    >>> report = AnomalyReport(log=False)  # callbacks=[report] of the trainer
    >>> report.rounds
    {}
    ```
    """

    # The projection of this round.
    _sketch: ChangeSketch

    def __init__(self, log: bool = True) -> None:
        self.log = log
        # The report of each round, by round number from 0.
        self.rounds: dict[int, dict[str, Any]] = {}
        self._before: dict[str, Any] = {}
        # Norm and sketch of each client's change in this round.
        self._changes: dict[str, tuple[float, Any]] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rounds = {}
        path = os.path.join(args.output_dir or "", ANOMALIES_NAME)
        if state.global_step and os.path.exists(path):
            rounds = load_anomalies(args.output_dir or "")
            self.rounds = {number: values for number, values in rounds.items() if number < state.global_step}

    def on_round_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, round: Round, **kwargs: Any
    ) -> None:
        self._before, self._changes = round.state, {}
        self._sketch = ChangeSketch(round.state, derived_seed(args.seed, "anomalies", round.number))

    def on_client_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        update: ClientUpdate,
        **kwargs: Any,
    ) -> None:
        self._changes[update.client_id] = self._measure(update.state)

    def _measure(self, state: dict[str, Any]) -> tuple[float, Any]:
        return math.sqrt(squared_norm(state, self._before)), self._sketch(state)

    def on_distill(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, round: Round, **kwargs: Any
    ) -> None:
        global_norm, global_sketch = self._measure(round.state)
        own = {}
        for client_id, (norm, sketch) in self._changes.items():
            product = float(sketch @ global_sketch)
            cosine = product / (norm * global_norm) if norm and global_norm else math.nan
            square = norm**2 + global_norm**2 - 2 * product
            own[client_id] = {
                "norm": norm,
                "cosine": max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None,
                "distance": math.sqrt(max(square, 0.0)),
            }
        self._changes, self._before = {}, {}
        # With parallelism="clients", each process has measured its own clients.
        parts = process_group().gather(f"anomaly report, round {round.number}", own)
        found = {client_id: values for part in parts for client_id, values in part.items()}
        clients = {client_id: found[client_id] for client_id in round.cohort if client_id in found}
        nearest_first = sorted(clients, key=lambda client_id: clients[client_id]["distance"])
        for rank, client_id in enumerate(nearest_first, start=1):
            clients[client_id]["distance_rank"] = rank
        self.rounds[round.number] = {
            "global_norm": global_norm,
            "clients": clients,
            "rejected": dict(round.rejected),
        }
        if self.log:
            for client_id, values in clients.items():
                round.logs[f"client/{client_id}/update_norm"] = values["norm"]
                if values["cosine"] is not None:
                    round.logs[f"client/{client_id}/update_cosine"] = values["cosine"]
                round.logs[f"client/{client_id}/distance_rank"] = values["distance_rank"]

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and args.output_dir:
            os.makedirs(args.output_dir, exist_ok=True)
            self.save(args.output_dir)

    on_train_end = on_save

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `federated_anomalies.json` into a directory."""
        values = {"rounds": {str(number): values for number, values in sorted(self.rounds.items())}}
        write_private(Path(directory) / ANOMALIES_NAME, json.dumps(values).encode())


def load_anomalies(directory: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """
    Read `federated_anomalies.json` from a directory.

    Args:
        directory (`str`): The output directory of a run.

    Returns:
        `dict[int, dict[str, Any]]`: The report of each round: `global_norm`, `clients` by id, and `rejected` with the
        reason by client id.

    Raises:
        ValueError: If the file is damaged. The message names the file.
    """
    path = os.path.join(directory, ANOMALIES_NAME)
    try:
        rounds = {int(number): dict(values) for number, values in read_json(path)["rounds"].items()}
        for values in rounds.values():
            float(values["global_norm"])
            for client in values["clients"].values():
                float(client["norm"]), float(client["distance"]), int(client["distance_rank"])
                float(client["cosine"] or 0.0)
            dict(values["rejected"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{path} is not a report of anomalies: {type(error).__name__}: {error}. Delete the file to resume without "
            "the report of the earlier rounds."
        ) from error
    return rounds
