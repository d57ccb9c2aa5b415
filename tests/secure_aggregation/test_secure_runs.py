"""Runs with secure aggregation in one process: the masks change no byte of the model."""

from __future__ import annotations

from typing import Any

import pytest
from federations import build_federation
from tiny import same_weights, tiny_model

from hf_federated import FederatedTrainer
from hf_federated.engines import LocalEngine


@pytest.mark.parametrize("protocol", ["secagg", "secagg+", "lightsecagg"])
def test_masks_change_no_byte_of_the_model(tmp_path, protocol):
    def trained(masks: bool) -> FederatedTrainer:
        settings: dict[str, Any] = {"max_weight": 10, "masks": masks}
        federation = {"secure_aggregation": protocol, "secure_aggregation_kwargs": settings}
        engine = LocalEngine(serialize=True)
        trainer = build_federation(tmp_path, federation=federation, trainer={"engine": engine})
        trainer.train()
        return trainer

    masked, plain = trained(True), trained(False)
    assert same_weights(masked.model, plain.model)
    assert not same_weights(masked.model, tiny_model())
