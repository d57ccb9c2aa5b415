"""Rows that change when they are read."""

from __future__ import annotations

import pytest
from distilled import distilled
from tiny import rows
from transformers.testing_utils import CaptureLogger

from hf_federated.clients import participants as client_models


@pytest.mark.parametrize("with_transform", [False, True])
def test_a_transform_which_no_checkpoint_can_compare_is_said(tmp_path, with_transform):
    public = rows(10, seed=5).remove_columns("labels")
    if with_transform:
        public = public.with_transform(lambda batch: {"input_ids": [ids[::-1] for ids in batch["input_ids"]]})
    with CaptureLogger(client_models.logger) as said:
        settings = {"federation": {"num_rounds": 1}, "args": {"save_strategy": "epoch"}}
        distilled(tmp_path, "dsfl", public_dataset=public, **settings).train()
    assert ("`public_dataset` has a transform" in said.out) == with_transform
