"""The examples of three clients, and federated trainers of a tiny model.

```python
trainer = build_federation(tmp_path, federation={"aggregation": "fedopt"}, trainer={"callbacks": [recorder]})
```
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tiny import arguments, rows, tiny_model
from transformers import Trainer

from hf_federated import FederatedConfig, FederatedTrainer, federate
from hf_federated.trainer.network_settings import NetworkSettings
from hf_federated.trainer.setup import FederationSetup


# With the batch size of `arguments()`, an epoch of these clients has two steps, one step and two steps.
CLIENTS = {"north": rows(8), "south": rows(4, seed=1), "west": rows(6, seed=2)}


def build_federation(
    directory: str | os.PathLike[str],
    train_dataset: Any = None,
    *,
    num_rounds: int = 2,
    federation: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    base: type[Trainer] = Trainer,
    **kwargs: Any,
) -> FederatedTrainer:
    """
    Build the federated trainer of a tiny model.

    Args:
        directory (`str` or `os.PathLike`): Output directory of the trainer.
        train_dataset (`Any`, *optional*): Training examples. Defaults to `CLIENTS`.
        num_rounds (`int`, *optional*, defaults to `2`): Number of rounds.
        federation (`dict`, *optional*): Further fields of `FederatedConfig`.
        trainer (`dict`, *optional*): Further arguments of the trainer.
        base (`type`, *optional*, defaults to `Trainer`): The class to federate.
        kwargs (`Any`): Training arguments.
    """
    return federate(base)(
        **{"model": tiny_model(), "args": arguments(directory, **kwargs), **(trainer or {})},
        train_dataset=CLIENTS if train_dataset is None else train_dataset,
        federation=FederatedConfig(**{"num_rounds": num_rounds, **(federation or {})}),
    )


def setup_of(trainer: FederatedTrainer, **config: Any) -> FederationSetup:
    """The checked arguments of a trainer, with changed fields of the configuration."""
    setup = trainer._federation_setup
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, **config)) if config else setup


def settings_of(trainer: FederatedTrainer, client_id: str | None = None) -> NetworkSettings:
    """The settings that a party of a federation over a network compares, of the server by default."""
    return NetworkSettings.of(setup_of(trainer), trainer.args, client_id)
