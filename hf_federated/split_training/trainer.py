"""`SplitFederatedTrainer`, and `split_federate` for other trainer classes."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer

from .checks import check_trainer_class
from .trainer_mixin import SplitMixin


class SplitFederatedTrainer(SplitMixin, Trainer):
    """
    `transformers.Trainer` for clients that keep their text, their labels, and the first and last blocks of a language
    model. A server holds the other blocks (FL-GLM).

    The trainer accepts all arguments of `Trainer`. `train_dataset` is a [`FederatedDataset`], a mapping of client ids
    to datasets, or a plain dataset for a single client. A step is an optimizer step, as in `Trainer`. All parties run
    in this process. Messages between the parties are serialized as between separate machines.

    Every party has a separate optimizer. With `average_every` or `"server_hierarchical"` every party also has separate
    parameter values. All parties share one learning rate schedule. The evaluated and saved model is the full model in
    the standard format. If clients continue with the parts of the previous client, the saved model contains the parts
    of the client that trained last. Otherwise the saved model contains the mean of all parts. Checkpoints contain the
    parts of each party in `federated/parties`.

    During training `model` contains the clients' blocks of the last evaluation, checkpoint or end of an epoch. A
    callback that reads the model at another time must first call `trainer.sync_model()`. A callback that changes
    `model` does not change the clients' blocks. The `model` argument of `compute_loss` is the client's model, without
    the server's blocks.

    Args:
        model (`PreTrainedModel`, `PeftModel` or [`SplitModel`]): A decoder model, which the trainer splits as `split`
            defines, or a split model. If the parent class is TRL's `SFTTrainer`, also a directory or an id of a model
            on the Hub.
        split ([`SplitConfig`], *optional*): Strategy and cut of the model.
        peft_config (`PeftConfig`, *optional*): Config of adapters for the model, as in TRL's `SFTTrainer`. See
            `SplitModel.add_adapter`.

    Attributes:
        active_run ([`~split_training.in_process.SplitFederation`] or
            [`~split_training.networked_client.NetworkedFederation`], *optional*): The parties of the run in progress.
            `None` outside of `train`.
        networked_run ([`~split_training.networked_client.NetworkedFederation`], *optional*): The run that this client
            has joined, if the server is not in this process.
        envelopes ([`~hf_federated.security.peer_envelopes.PeerEnvelopes`], *optional*): Encrypts the parts of this
            client for the other clients of a networked run.

    Raises:
        ValueError: If an argument or a combination of arguments is not supported. The message names an alternative.

    Example:

    ```python
    >>> import tempfile
    >>> from datasets import Dataset
    >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    >>> from hf_federated import SplitConfig, SplitFederatedTrainer

    >>> rows = {"input_ids": [[1, 2, 3], [4, 5, 6]], "labels": [[1, 2, 3], [4, 5, 6]]}
    >>> config = LlamaConfig(
    ...     vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    ... )
    >>> trainer = SplitFederatedTrainer(
    ...     model=LlamaForCausalLM(config),
    ...     args=TrainingArguments(output_dir=tempfile.mkdtemp(), report_to=[], disable_tqdm=True, save_strategy="no"),
    ...     train_dataset={"north": Dataset.from_dict(rows), "south": Dataset.from_dict(rows)},
    ...     split=SplitConfig(strategy="client_batch", average_every=2),
    ... )
    >>> output = trainer.train()
    {'train_runtime': ...
    >>> output.global_step
    3
    ```
    """


@functools.cache
def split_federate(trainer_class: type[Trainer]) -> type[Any]:
    """
    Create the split class of a `Trainer` subclass that trains a causal language model.

    An example is `Seq2SeqTrainer` for tasks that are evaluated on generated text.

    Args:
        trainer_class (`type[transformers.Trainer]`): A trainer class, for example a custom class with its own
            `compute_loss`, or TRL's `SFTTrainer` (`trl>=1.16`). The dataset of each client is prepared (tokenized,
            packed) as in the constructor of this class.

    Returns:
        `type`: A subclass of `trainer_class` that accepts the arguments of [`SplitFederatedTrainer`]. Calls with the
        same class return the same result.

    Raises:
        TypeError: If the argument is not a `Trainer` class, is a split class, or is an unsupported trainer of TRL.
        ImportError: If the argument is TRL's `SFTTrainer` and TRL is older than 1.16.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"split_federate() got {trainer_class!r}, but needs a subclass of transformers.Trainer.")
    if issubclass(trainer_class, SplitMixin):
        raise TypeError(f"{trainer_class.__name__} is a split trainer already. Use it without split_federate().")
    check_trainer_class(trainer_class)
    if trainer_class is Trainer:
        return SplitFederatedTrainer
    return type(
        f"SplitFederated{trainer_class.__name__}",
        (SplitMixin, trainer_class),
        {"__doc__": SplitFederatedTrainer.__doc__},
    )
