"""The cost of a client's training does not depend on the number of registered clients."""

from __future__ import annotations

import gc

from federations import build_federation
from tiny import rows

from hf_federated import FederatedCallback, FederatedDataset, IidPartitioner


# The log of a run has entries of at most 1000 clients.
NUM_CLIENTS = 1200


class LargeContainers(FederatedCallback):
    """Records the containers with an item for each client that a garbage collection reads during a round."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.num_clients = 0

    def on_client_end(self, args, state, control, **kwargs):
        self.num_clients += 1
        for each in gc.get_objects():
            if isinstance(each, (dict, frozenset, list, set, tuple)) and len(each) >= NUM_CLIENTS:
                self.found.append(f"{type(each).__name__} of {len(each)}: {[*each][:2]}")


def test_garbage_collections_of_a_round_read_no_container_of_all_clients(tmp_path):
    """`Trainer` collects garbage after each `train()`, and a collection reads each item of such a container."""
    clients = FederatedDataset.from_dataset(rows(NUM_CLIENTS), IidPartitioner(NUM_CLIENTS))
    callback = LargeContainers()
    gc.unfreeze()
    build_federation(
        tmp_path, clients, num_rounds=1, federation={"clients_per_round": 2}, trainer={"callbacks": [callback]}
    ).train()
    assert callback.num_clients == 2
    assert not callback.found
