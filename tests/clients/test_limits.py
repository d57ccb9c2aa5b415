"""What an update may claim follows from the announced examples and from the arguments of the client."""

from __future__ import annotations

import dataclasses

import pytest
from distillation_setup import distillation_trainer
from federations import build_federation
from tiny import arguments, rows

from hf_federated import ClientSpec
from hf_federated.clients.limits import update_limits
from hf_federated.engines import LocalEngine
from hf_federated.messages.validation import UpdateLimits


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((100, 3, None, 8), UpdateLimits(100, 300, 2 * 300 * 16)),
        ((100, 3, 5, 8), UpdateLimits(100, 5, 2 * 40 * 16)),
        # The batches at the end of a stream are used in addition to those of an accumulated step.
        ((None, 1, 5, 8), UpdateLimits(80, 5, 2 * 80 * 16)),
    ],
    ids=["epochs", "steps", "stream"],
)
def test_limits_follow_from_the_announced_examples(settings, expected):
    assert update_limits(*settings, max_length=16) == expected
    assert update_limits(*settings).num_tokens is None


def test_client_with_a_larger_batch_claims_the_examples_that_it_trains_on(tmp_path):
    large = arguments(tmp_path / "b", per_device_train_batch_size=32)
    trainer = distillation_trainer(
        tmp_path,
        "dsfl",
        federation={"num_rounds": 1, "local_steps": 2},
        train_dataset={name: rows(64, seed=ord(name)).to_iterable_dataset() for name in "ab"},
        clients={"b": ClientSpec(args=large)},
    )
    trainer.train()
    # Two steps with batches of 4 and of 32 examples.
    assert trainer.state.log_history[0]["federated/num_failed"] == 0
    assert [trainer._federation.loop.context.fit.limits(name, None).num_examples for name in "ab"] == [16, 128]


def test_client_claims_at_most_the_examples_of_the_round(tmp_path):
    """The weight of an update is bounded by `max_rows_per_round`, also for a client with more examples."""

    class Claims(LocalEngine):
        def _deliver(self, message):
            reply = super()._deliver(message)
            return dataclasses.replace(reply, num_examples=4) if reply.client_id == "south" else reply

    trainer = build_federation(
        tmp_path, num_rounds=1, federation={"max_rows_per_round": 3}, trainer={"engine": Claims()}
    )
    trainer.train()
    assert [trainer._federation.loop.context.fit.limits(name, 3).num_examples for name in ("north", "south")] == [3, 3]
    assert trainer.state.log_history[0]["federated/num_failed"] == 1
