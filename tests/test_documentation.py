"""The code examples of CONTRIBUTING.md run."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tiny import arguments, rows, same_weights, tiny_model

from hf_federated import FederatedConfig, FederatedTrainer
from hf_federated.messages import ClientUpdate


ROOT = Path(__file__).parents[1]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_aggregation_example_of_contributing_guide_runs():
    namespace: dict = {}
    exec(compile(python_blocks("CONTRIBUTING.md")[0], "CONTRIBUTING.md", "exec"), namespace)
    algorithm = namespace["PartialAverage"](server_lr=0.25)
    assert algorithm.non_default_settings() == {"server_lr": 0.25}
    state = {"weight": torch.tensor([3.0]), "steps": torch.tensor(0)}
    accumulator = algorithm.accumulator(state)
    for client_id, value, num_examples in [("a", 4.0, 1), ("b", 8.0, 3)]:
        trained = {"weight": torch.tensor([value]), "steps": torch.tensor(7)}
        accumulator.add(ClientUpdate(0, client_id, trained, num_examples=num_examples, num_tokens=0, num_steps=1))
    new = algorithm.aggregate(accumulator, state)
    # The mean is (1·4 + 3·8) / 4 = 7. With server_lr=0.25 the value moves from 3 to 3 + 0.25 · (7 − 3) = 4.
    assert new["weight"].item() == 4.0 and new["steps"].item() == 7


def test_distillation_example_of_contributing_guide_runs(tmp_path):
    # `dataclass` looks up the types of fields in the module named `__name__`.
    namespace: dict = {"__name__": __name__}
    exec(compile(python_blocks("CONTRIBUTING.md")[1], "CONTRIBUTING.md", "exec"), namespace)
    majority = namespace["Majority"](server_epochs=2)
    logits = {client_id: torch.tensor([[0.0, logit]]) for client_id, logit in (("a", 1.0), ("b", 2.0), ("c", -9.0))}
    assert majority.ensemble(logits, None).tolist() == [[0.0, 1.0]]
    trainer = FederatedTrainer(
        model=tiny_model(),
        args=arguments(tmp_path),
        train_dataset={"a": rows(4), "b": rows(4, seed=1)},
        public_dataset=rows(6, seed=2).remove_columns("labels"),
        federation=FederatedConfig(num_rounds=1, distillation=majority),
    )
    trainer.train()
    assert not same_weights(trainer.model, tiny_model())
