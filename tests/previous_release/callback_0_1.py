"""A callback as a user wrote it for version 0.1. This file must not change."""

from __future__ import annotations

from hf_federated import FederatedCallback, ServerState


class Observer(FederatedCallback):
    """Records what the server knows, and halves the weights of the last round."""

    def __init__(self):
        self.seen = []

    def on_round_begin(self, args, state, control, *, server, **kwargs):
        assert isinstance(server, ServerState)
        self.seen.append(("begin", server.round, server.cohort, server.client_ids, server.num_rounds))

    def on_client_end(self, args, state, control, update, *, server, **kwargs):
        assert update.state.keys() == server.weights.keys()

    def on_aggregate(self, args, state, control, *, server, **kwargs):
        self.seen.append(("aggregate", list(server.rejected), sorted(server.client_metrics)))
        assert server.accumulators[0].num_updates == len(server.client_metrics)
        server.logs["federated/num_seen"] = float(len(server.client_metrics))

    def on_distill(self, args, state, control, *, server, **kwargs):
        if server.round == server.num_rounds - 1:
            server.weights = {name: value / 2 for name, value in server.weights.items()}
