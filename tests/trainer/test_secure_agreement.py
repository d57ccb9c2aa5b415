"""What a client agrees to under secure aggregation, before it joins."""

from __future__ import annotations

from typing import Any

import pytest
from federations import build_federation
from tiny import rows

from hf_federated.trainer.client_credentials import CredentialsError


FINGERPRINTS = {"south": f"sha256:{'1' * 64}", "east": f"sha256:{'2' * 64}"}


def client(directory: Any, **kwargs: Any) -> Any:
    secure = {"secure_aggregation": "secagg", "secure_aggregation_kwargs": {"max_weight": 16, **kwargs}}
    return build_federation(directory, {"north": rows(4)}, federation=secure)


def test_agreement_lists_the_protocol_its_requests_and_the_known_clients(tmp_path):
    agreement = client(tmp_path, num_colluding=1).agreement("north", fingerprints=FINGERPRINTS)
    assert "max_weight=16" in agreement["secure aggregation"] and "num_colluding=1" in agreement["secure aggregation"]
    assert agreement["sums of updates"].startswith("one in a round, of at least 3 clients")
    phases = "'secure_fit', 'share_keys', 'submit_masked', 'confirm_survivors', 'unmask' in this order"
    assert agreement["sessions of secure aggregation"].endswith(phases)
    known = f"east={FINGERPRINTS['east']}, south={FINGERPRINTS['south']}"
    assert agreement["fingerprints of other clients"] == known


def test_agreement_without_pins_states_that_each_certificate_is_accepted(tmp_path):
    agreement = client(tmp_path, pins="none").agreement("north", fingerprints=FINGERPRINTS)
    assert agreement["fingerprints of other clients"] == "any (pins='none')"


def test_client_without_secure_aggregation_refuses_fingerprints(tmp_path):
    plain = build_federation(tmp_path, {"north": rows(4)})
    with pytest.raises(CredentialsError, match="`fingerprints` has no use without `secure_aggregation`"):
        plain.agreement("north", fingerprints=FINGERPRINTS)
    assert "secure aggregation" not in plain.agreement("north")
