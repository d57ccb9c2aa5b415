"""`FederatedTrainer`, and `federate()` for any other subclass of `transformers.Trainer`."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer

from .mixin import FederatedMixin


class FederatedTrainer(FederatedMixin, Trainer):
    """
    `transformers.Trainer` for training over many clients. The examples of a client never leave the client.

    The trainer takes all arguments of `Trainer`, and one step is one round. `train_dataset` is a [`FederatedDataset`],
    a mapping of client ids to datasets, or a plain dataset, which becomes one client. With a plain dataset and without
    `federation`, the trainer behaves as `Trainer`.

    A dataset is a `datasets.Dataset`, a map-style `torch.utils.data.Dataset` with a length, or a stream: an
    `IterableDataset` of `datasets` or torch. Streams need `local_steps`. A client continues in each round after the
    last example of its previous round, and a stream that ends starts again. The position is part of the client's state
    and of checkpoints. A stream of torch without `state_dict` and `load_state_dict`, and a stream of `datasets` with a
    shuffle buffer or with datasets before 5.2, are read from their start, and the examples before the position are
    skipped. Streams need `dataloader_num_workers=0`, and `parallelism="clients"` over several processes.

    With `local_steps`, a client continues in each round after its last batch, so that it reads every example once
    before its next epoch. The position is part of the client's state, too. A client that trains on a random part of
    its examples (`max_rows_per_round`, `balance`) shuffles this part anew in each round.

    Attributes that the trainer of a client sets on itself are dropped after the client's training, as if the client
    ran on another machine. Objects that the trainer of a client changes in place (a list on the trainer, the state
    of a custom collator) are shared by the clients of a process, and such changes cannot be detected. Training must
    not depend on such an object, unless its value depends on the step only.

    Args:
        optimizers (`tuple[Callable, Callable]`, *optional*, defaults to `(None, None)`):
            Functions that build the optimizer of a model, `model -> optimizer`, and its learning-rate schedule,
            `(optimizer, num_training_steps) -> scheduler`. Each may be `None`, as in `Trainer`. Every local training
            calls them. With `lr_schedule="global"`, the number of steps is the number of steps of a client in all
            rounds. One optimizer or schedule, as in `Trainer`, is accepted only without a federation.
        federation ([`FederatedConfig`], *optional*):
            The configuration of the federation. With several clients, the default is `num_train_epochs` rounds of one
            local epoch.
        engine ([`Engine`], *optional*):
            Where the clients run. By default the launch decides: [`LocalEngine`] in one process, [`RankEngine`] in
            several.
        postprocessors (`Sequence[Postprocessor]`, *optional*):
            Steps between a client's training and the aggregate, in the order in which a client applies them.
        client_callbacks (`Sequence[TrainerCallback]`, *optional*):
            Callbacks that run inside clients and receive the events of local steps.
        task ([`~hf_federated.tasks.Task`], *optional*):
            Encodes the examples, which must then all be raw. The examples of a client are encoded with the client's
            tokenizer, and the server's examples with `processing_class`. The task provides a data collator and metrics
            if none are given.
        public_dataset (`datasets.Dataset`, *optional*):
            For distillation: examples that the server and all clients have. Their labels are not read, except for the
            targets of [`~hf_federated.tasks.Seq2Seq`], which are public text. Distillation of tags and tokens needs
            raw examples and `task`.
        server_dataset (`datasets.Dataset`, *optional*):
            For distillation algorithms that need it: labeled examples of the server.
        clients (`Mapping[str, ClientSpec]`, *optional*):
            Clients with their own model, tokenizer or training arguments, by client id. `model` is then the server's
            model. Only for methods that exchange predictions.
        client_model_init (`Callable[[str], PreTrainedModel]`, *optional*):
            Builds the model of a client from the client id, for clients without an entry in `clients`.

    Raises:
        ValueError: If an argument or a combination is not supported. The message names the alternative.

    Example:

    ```python
    >>> import tempfile
    >>> from datasets import Dataset
    >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
    >>> from hf_federated import FederatedConfig, FederatedTrainer

    >>> examples = {"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]}
    >>> clients = {"north": Dataset.from_dict(examples), "south": Dataset.from_dict(examples)}
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
    Create the federated version of a `Trainer` subclass.

    Args:
        trainer_class (`type[transformers.Trainer]`): The subclass, which may also be a custom class that overrides
            methods such as `compute_loss`.

    Returns:
        `type`: A subclass of `trainer_class` that also takes the arguments of [`FederatedTrainer`]. Repeated calls
        with the same argument return the same class.

    Raises:
        TypeError: If `trainer_class` is not a subclass of `Trainer`, or if it is already federated.

    Example:

    ```python
    >>> from transformers import Seq2SeqTrainer
    >>> from hf_federated import federate

    >>> federate(Seq2SeqTrainer).__name__
    'FederatedSeq2SeqTrainer'
    ```
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"federate() got {trainer_class!r}. Pass a subclass of transformers.Trainer.")
    if issubclass(trainer_class, FederatedMixin):
        raise TypeError(f"{trainer_class.__name__} is already federated. Use the class directly.")
    if trainer_class is Trainer:
        return FederatedTrainer
    return type(
        f"Federated{trainer_class.__name__}", (FederatedMixin, trainer_class), {"__doc__": FederatedTrainer.__doc__}
    )
