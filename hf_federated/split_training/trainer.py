"""`SplitFederatedTrainer`, and the split class of any other trainer."""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer

from .checks import check_trainer_class
from .trainer_mixin import SplitMixin


class SplitFederatedTrainer(SplitMixin, Trainer):
    """
    `transformers.Trainer` over clients that keep the first and last blocks of a language model, their text and labels;
    a server holds the blocks between (FL-GLM).

    It takes everything that `Trainer` takes. `train_dataset` is a [`FederatedDataset`], a mapping of client ids to
    data sets, or a plain data set, which is one client. Here a step is an optimizer step, as in `Trainer`. All parties
    run in this process, and what crosses between them is serialised as between machines.

    Every party has an optimizer and, with `average_every` or `"server_hierarchical"`, values of its own; the schedule
    is one. What is evaluated and saved is the ordinary whole model: of clients that hand over, what the last of them
    trained, otherwise the mean of all. Checkpoints hold each party's own part under `federated/parties`. Between
    evaluations, checkpoints and ends of epochs `model` has the clients' blocks of the last of these: a callback that
    looks at it then calls `trainer.catch_up()` before, and what it writes there is not trained. The `model` that
    `compute_loss` is given is a client's own, without the server's blocks.

    Args:
        model (`PreTrainedModel`, `PeftModel` or [`SplitModel`]): A decoder model, which is cut as `split` says; one
            that is cut already stays as it is. Where TRL's `SFTTrainer` is the parent also a directory or a Hub id.
        split ([`SplitConfig`], *optional*): Who trains when, and where the model is cut.
        peft_config (`PeftConfig`, *optional*): Adapters for the model, as TRL's `SFTTrainer` takes it:
            `SplitModel.add_adapter`.

    Raises:
        ValueError: If an argument or a combination is not supported. The message names the alternative.

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
    The split class of any `Trainer` subclass that trains a causal language model, such as `Seq2SeqTrainer` for tasks
    that are evaluated on generated text.

    Args:
        trainer_class (`type[transformers.Trainer]`): Also a user's own, with its own `compute_loss`, and TRL's
            `SFTTrainer`. What its constructor does to rows (tokenizing, packing) it does to each client's.

    Returns:
        `type`: A subclass of `trainer_class` that takes what [`SplitFederatedTrainer`] takes. The same class for the
        same argument.

    Raises:
        TypeError: If it is no `Trainer` class, split already, or another trainer of TRL.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"split_federate() takes a subclass of transformers.Trainer, got {trainer_class!r}.")
    if issubclass(trainer_class, SplitMixin):
        raise TypeError(f"{trainer_class.__name__} is split already.")
    check_trainer_class(trainer_class)
    if trainer_class is Trainer:
        return SplitFederatedTrainer
    return type(
        f"SplitFederated{trainer_class.__name__}",
        (SplitMixin, trainer_class),
        {"__doc__": SplitFederatedTrainer.__doc__},
    )
