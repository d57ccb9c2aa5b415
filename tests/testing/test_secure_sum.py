"""The toy secure sum: the server gets exactly the sum of the contributions, and no single one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import build_federation
from secure_sum import UNIT, Question, SecureSum, SecureSumPart

from hf_federated import FederatedCallback, RoundFailedError
from hf_federated.messages import ClientUpdate, Fit
from hf_federated.methods import ClientContext


CLIENTS = ("north", "south", "west")
STATE = {"b": torch.tensor([0.5, -0.25]), "count": torch.tensor(3), "w": torch.ones(2, 2)}


def fixed_point_updates(method):
    """The updates of all clients, whose weighted changes are multiples of the unit of the fixed-point numbers."""
    parts = {name: SecureSumPart(ClientContext(name, None), method) for name in CLIENTS}
    keys = {name: part.answer(Question(0, name, "key")).value for name, part in parts.items()}
    updates = []
    for number, (name, part) in enumerate(parts.items()):
        part.receive(Fit(0, name, 0, STATE, keys))
        trained = {key: value + (number - 2) / 8 if key != "count" else value for key, value in STATE.items()}
        updates.append(part.send(ClientUpdate(0, name, trained, num_examples=1 + number, num_tokens=0, num_steps=1)))
    return updates


def test_sum_of_masked_values_is_exactly_the_plain_sum():
    method = SecureSum()
    accumulator = method.accumulator(STATE)
    for update in fixed_point_updates(method):
        accumulator.add(update)
    result = method.aggregate(accumulator, STATE)
    # The changes −2/8, −1/8 and 0 with the weights 1, 2 and 3 have the mean (−2 − 2) / 8 / 6 = −1/12.
    for name in ("b", "w"):
        expected = (STATE[name].double() + -4 / 8 / 6).float()
        assert torch.equal(result[name], expected)
    assert torch.equal(result["count"], STATE["count"])


def test_masked_update_shows_neither_the_change_nor_the_weight():
    method = SecureSum()
    update = fixed_point_updates(method)[0]
    assert all(torch.equal(update.state[name], STATE[name]) for name in STATE)
    low, high = (update.extra[name].numpy().astype(np.uint64) for name in ("low", "high"))
    values = (low + (high << np.uint64(32))).view(np.int64) * UNIT
    plain = np.array([1, *[-2 / 8] * 6])
    assert (np.abs(values - plain) > 1).all() and len(set(values)) == len(values)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_result_is_that_of_fedavg_up_to_the_unit(tmp_path, weighting):
    finals = []
    for number, algorithm in enumerate(("fedavg", "secure_sum:SecureSum")):
        federation = {"aggregation": algorithm, "aggregation_kwargs": {"weighting": weighting}}
        trainer = build_federation(tmp_path / str(number), num_rounds=1, federation=federation)
        trainer.train()
        finals.append(trainer.model.state_dict())
    for name, value in finals[0].items():
        # Each client rounds its sum by at most half a unit, and the result is rounded to float32.
        torch.testing.assert_close(finals[1][name], value, rtol=2**-23, atol=UNIT)


def test_failing_client_ends_the_round(tmp_path):
    class Fails(FederatedCallback):
        def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
            if len(train_dataloader.dataset) == 6:
                raise RuntimeError("no power")

    federation = {"aggregation": SecureSum()}
    trainer = build_federation(tmp_path, federation=federation, trainer={"client_callbacks": [Fails()]})
    with pytest.raises(RoundFailedError, match="a client failed, so the masks do not cancel"):
        trainer.train()
