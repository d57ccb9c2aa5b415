"""Limits of what an update of a client may claim: examples, optimizer steps and tokens."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from ..messages.validation import UpdateLimits


# A tokenizer without a limit has a `model_max_length` above this value.
_MAX_LENGTH = 10**9
# Number of sequences of an example: an example of a preference dataset has two.
_MAX_SEQUENCES = 2


def update_limits(
    num_examples: int | None,
    local_epochs: int,
    local_steps: int | None,
    examples_per_step: int,
    max_length: int | None = None,
    num_repeats: int = 1,
) -> UpdateLimits:
    """
    Compute the limits of a client from the examples that it announced and the settings of the federation.

    Args:
        num_examples (`int`, *optional*): Number of training examples of the client. `None` for a stream.
        local_epochs (`int`): Passes over the examples in a round.
        local_steps (`int`, *optional*): Optimizer steps in a round. It replaces `local_epochs`.
        examples_per_step (`int`): Largest number of examples in an optimizer step.
        max_length (`int`, *optional*): Largest number of tokens of a sequence. An example has up to two sequences. By
            default, tokens have no limit.
        num_repeats (`int`, *optional*, defaults to `1`): How often a pass reads each example.

    Returns:
        [`~hf_federated.messages.validation.UpdateLimits`]: The limits.

    Example:

    ```python
    >>> from hf_federated.clients.limits import update_limits

    >>> update_limits(100, local_epochs=2, local_steps=None, examples_per_step=8, max_length=512)
    UpdateLimits(num_examples=100, num_steps=200, num_tokens=204800, class_counts=None)
    ```
    """
    num_seen: int | None
    if local_steps is None:
        num_seen = None if num_examples is None else num_examples * local_epochs * num_repeats
    elif num_examples is not None:
        num_seen = local_steps * examples_per_step
    else:
        # A stream counts each example that it reads. If it ends in the middle of an accumulated step, `Trainer` uses
        # these batches in addition to those of the next step.
        num_examples = num_seen = 2 * local_steps * examples_per_step
    # A step has at least one example.
    num_steps = num_seen if local_steps is None else local_steps
    num_tokens = None if num_seen is None or max_length is None else num_seen * _MAX_SEQUENCES * max_length
    return UpdateLimits(num_examples, num_steps, num_tokens)


def examples_per_step(args: TrainingArguments, num_processes: int) -> int:
    """
    Return the largest number of examples in an optimizer step.

    Args:
        args (`TrainingArguments`): The training arguments of the client.
        num_processes (`int`): Number of processes that train the client together.
    """
    return args.train_batch_size * args.gradient_accumulation_steps * num_processes


def max_input_length(trainer: Any) -> int | None:
    """
    Return the largest number of tokens of a sequence that the model and the tokenizer of a trainer support.

    Args:
        trainer (`transformers.Trainer`): The trainer.

    Returns:
        `int`, *optional*: The larger of the numbers of positions of the model, of the tokenizer and of the training
            arguments (`max_length`). `None` if neither the model nor the tokenizer has a limit.
    """
    config, tokenizer = getattr(trainer.model, "config", None), trainer.processing_class
    known = [
        getattr(config, "max_position_embeddings", None),
        getattr(tokenizer, "model_max_length", None),
    ]
    limits = [limit for limit in known if isinstance(limit, int) and 0 < limit <= _MAX_LENGTH]
    if not limits:
        return None
    own = getattr(trainer.args, "max_length", None)
    return max([*limits, own] if isinstance(own, int) else limits)
