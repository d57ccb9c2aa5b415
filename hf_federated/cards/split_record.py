"""`SplitRecord`: everything a card says about the training of a split model, as plain JSON values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

from ..data import FederatedDataset
from ..messages.ledger import Ledger
from ..split import SplitModel
from ..split.cut import ROLES
from .logged import plain, rows_by_step, training_seconds
from .record import CardArguments, CardRecord, CardRun, common_fields


class SplitRun(CardRun, Protocol):
    """What a card reads of a trainer."""

    model: SplitModel
    split: Any  # a SplitConfig
    clients: FederatedDataset
    ledger: Ledger
    network: dict[str, Any] | None  # of a networked client


@dataclass(frozen=True)
class SplitRecord(CardRecord):
    """
    The training of a split model, as a card tells it. The arguments of [`CardRecord`], and

    Args:
        parts (`dict[str, dict[str, Any]]`): `"head"`, `"body"` and `"tail"`, each with `first_block`, `num_blocks`,
            `num_bytes` of its parameters and `num_trained` values; a tied matrix counts with the head. Both numbers
            are `None` of a part that is elsewhere.
        split (`dict[str, Any]`): The fields of `SplitConfig`, with the wire dtype and the seed as they were, and how
            many clients, steps and epochs there were.
        exchanged (`dict[str, Any]`): All bytes of the run, and what the messages held that depends on the model.
        steps (`list[dict[str, Any]]`): What was logged, by optimizer step.
        network (`dict[str, Any]`, *optional*): Of a client of a networked run, which tells of its own part, rows and
            bytes: `num_clients` of the run, `is_finished`, `num_late` steps that went on without it, and `is_sealed`,
            whether its messages to the server were. Empty before it joined one.

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
        Reads a trainer.

        Args:
            trainer (`SplitRun`): A `SplitFederatedTrainer`, trained or not: the record says what was logged so far.
            args, kwargs: Those of `Trainer.create_model_card`: see [`CardArguments`].
        """
        common = common_fields(trainer, trainer.eval_dataset, "step", CardArguments(*args, **kwargs))
        if trainer.network is not None:
            # Others' rows are not known here, and `transformers` does not load a part.
            alone = dataclasses.replace(common["train_data"], num_clients=None, rows_per_client=None)
            part = dataclasses.replace(common["model"], library_name="hf_federated")
            common = {**common, "train_data": alone, "model": part}
        return cls(
            **common,
            parts=_parts(trainer.model),
            split=_split(trainer),
            exchanged=_exchanged(trainer),
            steps=rows_by_step(trainer.state.log_history, "step", ("loss", "grad_norm", "learning_rate", "epoch")),
            network=trainer.network,
        )


def _parts(model: SplitModel) -> dict[str, dict[str, Any]]:
    sizes = model.part_bytes()
    counted: set[int] = set()
    parts: dict[str, dict[str, Any]] = {}
    for part in model.parts:
        trained = {id(own): own.numel() for own in part.parameters() if own.requires_grad}
        parts[part.role] = {
            "first_block": part.blocks.start,
            "num_blocks": len(part.blocks),
            "num_bytes": sizes[part.role],
            "num_trained": sum(size for name, size in trained.items() if name not in counted),
        }
        counted |= trained.keys()
    for role in ROLES:
        blocks = model.cut.blocks(role)
        elsewhere = {"first_block": blocks.start, "num_blocks": len(blocks), "num_bytes": None, "num_trained": None}
        parts.setdefault(role, elsewhere)
    return {role: parts[role] for role in ROLES}


def _split(trainer: SplitRun) -> dict[str, Any]:
    config, state, args = trainer.split, trainer.state, trainer.run_args
    return {
        **plain(config.to_dict()),
        "head_blocks": trainer.model.cut.head_blocks,
        "tail_blocks": trainer.model.cut.tail_blocks,
        "wire_dtype": trainer.model.boundary.wire.dtype,
        "split_seed": args.seed if config.split_seed is None else config.split_seed,
        "num_clients": len(trainer.clients) if trainer.network is None else trainer.network.get("num_clients"),
        "num_steps_run": state.global_step,
        "max_steps": state.max_steps,
        "num_epochs_run": plain(state.epoch),
        "seconds": training_seconds(state.log_history),
    }


def _exchanged(trainer: SplitRun) -> dict[str, Any]:
    model, ledger = trainer.model, trainer.ledger
    return {
        "bytes_up": ledger.bytes_up,
        "bytes_down": ledger.bytes_down,
        # A run may end before everybody's turn.
        "num_clients": len(ledger.clients()),
        # Some models count positions by their tokens, and then tell the server.
        "context_lengths": model.client_head.layout.runner is not None,
        # How its rows change can tell which tokens a text has.
        "embedding_trained": any(own.requires_grad for own in model.get_input_embeddings().parameters()),
    }
