"""Fixture for the tests of stored federated datasets."""

from __future__ import annotations

import pytest
from stored_clients import rows

from hf_federated import FederatedDataset


@pytest.fixture
def clients() -> FederatedDataset:
    return FederatedDataset.from_column(rows(), "who")
