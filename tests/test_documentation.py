"""What CONTRIBUTING.md shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hf_federated.messages import ClientUpdate


ROOT = Path(__file__).parents[1]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_algorithm_of_the_contributing_guide_runs():
    names: dict = {}
    exec(compile(python_blocks("CONTRIBUTING.md")[0], "CONTRIBUTING.md", "exec"), names)
    algorithm = names["PartialAverage"](server_lr=0.25)
    assert algorithm.non_default_settings() == {"server_lr": 0.25}
    accumulator = algorithm.accumulator()
    for client_id, value, num_examples in [("a", 4.0, 1), ("b", 8.0, 3)]:
        state = {"weight": torch.tensor([value]), "steps": torch.tensor(7)}
        accumulator.add(ClientUpdate(0, client_id, state, num_examples=num_examples, num_tokens=0, num_steps=1))
    new = algorithm.aggregate(accumulator, {"weight": torch.tensor([3.0]), "steps": torch.tensor(0)})
    # The mean is (1·4 + 3·8) / 4 = 7; a quarter of the way from 3 to 7.
    assert new["weight"].item() == 4.0 and new["steps"].item() == 7
