"""`SplitRecord`: the contents of the card of a split model, as plain JSON values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

from ..data import FederatedDataset
from ..messages.ledger import Ledger
from ..split import SplitModel
from ..split.cut import ROLES
from .card_record import CardArguments, CardRecord, CardRun, common_fields
from .log_history import logs_by_step, to_json_value, training_seconds


class SplitRun(CardRun, Protocol):
    """Trainer attributes that the card of a split model reads."""

    model: SplitModel
    split: Any  # a SplitConfig
    clients: FederatedDataset
    ledger: Ledger
    network: dict[str, Any] | None  # set by networked clients only


@dataclass(frozen=True)
class SplitRecord(CardRecord):
    """
    Record of the training of a split model. Its arguments are those of [`CardRecord`] and the following.

    Args:
        parts (`dict[str, dict[str, Any]]`):
            `"head"`, `"body"` and `"tail"`, each with `first_block`, `num_blocks`, `num_bytes` of its parameters and
            `num_trained` values. A tied matrix counts as part of the head. `num_bytes` and `num_trained` are `None`
            for parts that the process does not hold.
        split (`dict[str, Any]`):
            The fields of `SplitConfig`, with the actual wire dtype and seed, and the number of clients, steps and
            epochs.
        exchanged (`dict[str, Any]`):
            The total bytes of the run, and the message fields that depend on the model.
        steps (`list[dict[str, Any]]`):
            The logged values of each optimizer step.
        network (`dict[str, Any]`, *optional*):
            Set for a client of a networked run, whose record describes its own part, examples and bytes:
            `num_clients` of the run, `is_finished`, `num_late` (steps that continued without the client) and
            `is_sealed` (whether its messages to the server were encrypted). Empty before the client joins a run.

    Example:

    ```python
    >>> from hf_federated.cards import SplitRecord, render_split
    >>> record = SplitRecord.from_trainer(trainer)  # doctest: +SKIP
    >>> record.save("run_record.json")  # doctest: +SKIP
    >>> print(render_split(record))  # doctest: +SKIP

    ```
    """

    parts: dict[str, dict[str, Any]]
    split: dict[str, Any]
    exchanged: dict[str, Any]
    steps: list[dict[str, Any]]
    network: dict[str, Any] | None = None

    @classmethod
    def from_trainer(cls, trainer: SplitRun, *args: Any, **kwargs: Any) -> SplitRecord:
        """
        Create the record of a trainer's run.

        Args:
            trainer (`SplitRun`):
                A `SplitFederatedTrainer`. The record contains the values that were logged so far, also before or
                during training.
            args, kwargs:
                Arguments of `Trainer.create_model_card`. See [`CardArguments`].
        """
        common = common_fields(trainer, trainer.eval_dataset, "step", CardArguments(*args, **kwargs))
        if trainer.network is not None:
            # The client does not know the data of other clients, and `transformers` cannot load a part.
            own_data = dataclasses.replace(common["train_data"], num_clients=None, rows_per_client=None)
            part = dataclasses.replace(common["model"], library_name="hf_federated")
            common = {**common, "train_data": own_data, "model": part}
        return cls(
            **common,
            parts=_parts(trainer.model),
            split=_split(trainer),
            exchanged=_exchanged(trainer),
            steps=logs_by_step(trainer.state.log_history, "step", ("loss", "grad_norm", "learning_rate", "epoch")),
            network=trainer.network,
        )


def _parts(model: SplitModel) -> dict[str, dict[str, Any]]:
    sizes = model.part_bytes()
    counted: set[int] = set()
    parts: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        blocks = model.cut.blocks(role)
        parts[role] = {"first_block": blocks.start, "num_blocks": len(blocks), "num_bytes": None, "num_trained": None}
    for part in model.parts:
        trained = {id(value): value.numel() for value in part.parameters() if value.requires_grad}
        num_trained = sum(size for key, size in trained.items() if key not in counted)
        parts[part.role] |= {"num_bytes": sizes[part.role], "num_trained": num_trained}
        counted |= trained.keys()
    return parts


def _split(trainer: SplitRun) -> dict[str, Any]:
    config, state, args = trainer.split, trainer.state, trainer.run_args
    return {
        **to_json_value(config.to_dict()),
        "head_blocks": trainer.model.cut.head_blocks,
        "tail_blocks": trainer.model.cut.tail_blocks,
        "wire_dtype": trainer.model.boundary.wire.dtype,
        "split_seed": args.seed if config.split_seed is None else config.split_seed,
        "num_clients": len(trainer.clients) if trainer.network is None else trainer.network.get("num_clients"),
        "num_steps_run": state.global_step,
        "max_steps": state.max_steps,
        "num_epochs_run": to_json_value(state.epoch),
        "seconds": training_seconds(state.log_history),
    }


def _exchanged(trainer: SplitRun) -> dict[str, Any]:
    model, ledger = trainer.model, trainer.ledger
    return {
        "bytes_up": ledger.bytes_up,
        "bytes_down": ledger.bytes_down,
        # A serial run may end before all clients had a turn.
        "num_clients": len(ledger.clients()),
        # Some models compute positions from the context lengths, which clients then send to the server.
        "context_lengths": model.client_head.layout.runner is not None,
        # The change of the embedding rows can reveal the tokens of a text.
        "embedding_trained": any(value.requires_grad for value in model.get_input_embeddings().parameters()),
    }
