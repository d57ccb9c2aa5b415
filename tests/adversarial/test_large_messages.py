"""A large message of any content costs its own memory, and does not stop the threads that answer heartbeats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SIZE_MIB = 128
# The imports of the first round of a client take some of this time.
LONGEST_PAUSE = 1.0
# Memory of gRPC's buffers and of a parsed header.
MORE_MIB = 160
CONTENTS = ["escaped values", "values at the limits", "one tensor at an odd address"]


@pytest.mark.parametrize("receiver", ["server", "client"])
def test_large_message_costs_its_own_memory_and_loses_no_client(tmp_path, receiver):
    path = tmp_path / "numbers.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "large_messages.py"), "--size-mb", str(SIZE_MIB)]
    subprocess.run(
        [*script, "--receivers", receiver, "--contents", *CONTENTS, "--output", str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        check=True,
        timeout=300,
    )
    results = json.loads(path.read_text())
    assert [result["content"] for result in results] == CONTENTS
    for result in results:
        assert SIZE_MIB < result["mib"] < SIZE_MIB + MORE_MIB, result
        assert result["lock_seconds"] < LONGEST_PAUSE and not result["lost"], result
