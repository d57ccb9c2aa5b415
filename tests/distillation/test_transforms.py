"""The warning about public datasets with a transform."""

from __future__ import annotations

import pytest
from distillation_setup import distillation_trainer
from tiny import rows
from transformers.testing_utils import CaptureLogger

from hf_federated.clients import participants


@pytest.mark.parametrize("with_transform", [False, True])
def test_public_dataset_with_a_transform_gives_a_warning(tmp_path, with_transform):
    """A checkpoint cannot compare examples that change when they are read."""
    public = rows(10, seed=5).remove_columns("labels")
    if with_transform:
        public = public.with_transform(lambda batch: {"input_ids": [ids[::-1] for ids in batch["input_ids"]]})
    with CaptureLogger(participants.logger) as logs:
        settings = {"federation": {"num_rounds": 1}, "args": {"save_strategy": "epoch"}}
        distillation_trainer(tmp_path, "dsfl", public_dataset=public, **settings).train()
    assert ("`public_dataset` has a transform" in logs.out) == with_transform
