"""Flower's Krum, trimmed mean and median as aggregations of this library, for comparison."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common import Array
from flwr.serverapp.strategy import FedMedian, FedTrimmedAvg, MultiKrum
from flwr.supercore.task_identity import TaskIdentity

from hf_federated.aggregation import CoordinateMedian, Krum, RobustAggregation, TrimmedMean, UpdateCollection
from hf_federated.aggregation.update_statistics import squared_norm
from hf_federated.utils.weighted_mean import State


logging.getLogger("flwr").setLevel(logging.ERROR)
# Flower's messages need the identity of a running task.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


class FlowerRule(RobustAggregation):
    """
    Aggregate with a strategy of Flower, and compare the result with this library's result for the same updates.

    Args:
        rule (`str`): `"median"`, `"trimmed_mean"`, `"krum"` or `"multi_krum"`.
        num_hostile (`int`): Number of hostile clients that the rule tolerates.
        num_clients (`int`): Number of clients of a cohort.

    Attributes:
        differences (`list[float]`): For each round, the distance of the two results over the norm of the change.
    """

    def __init__(self, rule: str, num_hostile: int, num_clients: int) -> None:
        super().__init__()
        self.rule, self.num_hostile, self.num_clients = rule, num_hostile, num_clients
        selected = num_clients - num_hostile - 2 if rule == "multi_krum" else 1
        self.differences: list[float] = []
        if rule == "median":
            self._flower, self._own = FedMedian(), CoordinateMedian()
        elif rule == "trimmed_mean":
            self._flower, self._own = FedTrimmedAvg(beta=num_hostile / num_clients), TrimmedMean(num_hostile)
        else:
            self._flower = MultiKrum(num_malicious_nodes=num_hostile, num_nodes_to_select=selected)
            self._own = Krum(num_hostile, selected)

    def estimate(self, updates: UpdateCollection) -> State:
        own = self._own.estimate(updates)
        replies = [self._reply(updates, client_id) for client_id in updates.client_ids]
        arrays, _ = self._flower.aggregate_train(1, replies)
        result = {name: torch.from_numpy(array.numpy().copy()) for name, array in arrays.items()}
        change = squared_norm(own, updates.reference) ** 0.5
        self.differences.append(squared_norm(result, own) ** 0.5 / max(change, 1e-30))
        return result

    def _reply(self, updates: UpdateCollection, client_id: str) -> Any:
        arrays = {name: Array(np.asarray(updates.read(client_id, name))) for name in updates.floating_names}
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 1})})
        request = Message(RecordDict(), dst_node_id=1, message_type="train")
        return Message(content, reply_to=request)
