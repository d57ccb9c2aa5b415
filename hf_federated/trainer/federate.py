"""`federate()` and `FederatedTrainer`: the round, around any `Trainer`. Nothing here knows an algorithm."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer

from .mixin import FederatedMixin


class FederatedTrainer(FederatedMixin, Trainer):
    """
    `transformers.Trainer` over many clients whose rows never leave them.

    It takes everything that `Trainer` takes, with a step that is a round. `train_dataset` is a [`FederatedDataset`],
    a mapping of client ids to data sets, or a plain data set, which is one client. Without `federation` and with a
    plain data set it is `Trainer`. What a client's trainer assigns to itself stays with that client and is gone
    afterwards, as it would be on another machine. What it changes in place (a list on the trainer, the state of a
    collator of your own) is shared by the clients of a process and cannot be noticed: training must not depend on it,
    or it must follow from the step.

    Args:
        federation ([`FederatedConfig`], *optional*):
            The federation. With several clients and none given: `num_train_epochs` rounds of one local epoch.
        postprocessors (`Sequence[Postprocessor]`, *optional*):
            Steps between a client's training and the aggregate, in the order in which they leave the client.
        client_callbacks (`Sequence[TrainerCallback]`, *optional*):
            Callbacks that run inside clients, with a client's own steps.
        task ([`~hf_federated.tasks.Task`], *optional*):
            What encodes rows, which are then all raw: each client's with its own tokenizer, the server's with
            `processing_class`. It brings a collator and metrics where none are given.
        public_dataset (`datasets.Dataset`, *optional*):
            For distillation: rows that server and clients have. Labels in them are not read, but for the targets of
            [`~hf_federated.tasks.Seq2Seq`], which are text that everybody has. Tags and tokens are distilled from raw
            rows, with `task`.
        server_dataset (`datasets.Dataset`, *optional*):
            For distillation that asks for it: the server's own rows, with labels.
        clients (`Mapping[str, ClientSpec]`, *optional*):
            Clients with a model, tokenizer or training arguments of their own, by id; `model` is then the server's.
            For methods that exchange predictions.
        client_model_init (`Callable[[str], PreTrainedModel]`, *optional*):
            Makes the model of a client from its id, of those that `clients` says nothing of.

    Raises:
        ValueError: If an argument or a combination is not supported. The message names the alternative.

    Example:

    ```python
    >>> import tempfile
    >>> from datasets import Dataset
    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> from hf_federated import FederatedConfig, FederatedTrainer

    >>> rows = {"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]}
    >>> clients = {"north": Dataset.from_dict(rows), "south": Dataset.from_dict(rows)}
    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> trainer = FederatedTrainer(
    ...     model=BertForSequenceClassification(config),
    ...     args=TrainingArguments(output_dir=tempfile.mkdtemp(), report_to=[], disable_tqdm=True, save_strategy="no"),
    ...     train_dataset=clients,
    ...     federation=FederatedConfig(num_rounds=2, aggregation="fedavg"),
    ... )
    >>> output = trainer.train()
    {'loss': ...
    >>> output.global_step
    2
    ```
    """


@functools.cache
def federate(trainer_class: type[Trainer]) -> type[Any]:
    """
    The federated class of any `Trainer` subclass.

    Args:
        trainer_class (`type[transformers.Trainer]`): Also a user's own, with its own `compute_loss`.

    Returns:
        `type`: A subclass of `trainer_class` that takes what [`FederatedTrainer`] takes beside it. The same class for
        the same argument.

    Raises:
        TypeError: If it is no `Trainer` class, or federated already.

    Example:

    ```python
    >>> from transformers import Seq2SeqTrainer
    >>> from hf_federated import federate

    >>> federate(Seq2SeqTrainer).__name__
    'FederatedSeq2SeqTrainer'
    ```
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"federate() takes a subclass of transformers.Trainer, got {trainer_class!r}.")
    if issubclass(trainer_class, FederatedMixin):
        raise TypeError(f"{trainer_class.__name__} is federated already.")
    if trainer_class is Trainer:
        return FederatedTrainer
    return type(
        f"Federated{trainer_class.__name__}", (FederatedMixin, trainer_class), {"__doc__": FederatedTrainer.__doc__}
    )
