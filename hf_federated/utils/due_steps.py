"""Find `logging_steps`, `eval_steps` and `save_steps` that are never due, because they count rounds."""

from __future__ import annotations

import functools
import logging
from typing import Any


# Default of `logging_steps`, `eval_steps` and `save_steps` in `TrainingArguments`. With this value, a federation logs,
# evaluates or saves after every round.
DEFAULT_STEPS = 500

# What a run does if the steps of a kind are longer than the run. The loop evaluates and saves after its last step.
_EFFECTS = {
    "logging": "no loss is logged",
    "eval": "the model is evaluated after the last round only",
    "save": "the only checkpoint is that of the last round",
}


def describe_undue_steps(args: Any, num_rounds: int) -> str | None:
    """
    Describe the steps of the training arguments that are never due within the rounds of a run.

    Args:
        args (`Any`): The training arguments, or an object with their fields `logging_strategy`, `logging_steps`, …
        num_rounds (`int`): Number of rounds of the run.

    Returns:
        `str`, *optional*: A warning with the arithmetic and the values to set, or `None` if all steps are due.

    Example:

    ```python
    >>> from transformers import TrainingArguments
    >>> from hf_federated.utils.due_steps import describe_undue_steps

    >>> args = TrainingArguments(logging_steps=50, save_strategy="no")
    >>> print(describe_undue_steps(args, num_rounds=3))
    logging_steps=50 counts rounds, and the run has 3: no loss is logged. Set it to a number from 1 to 3, or to 500, \
which means every round.
    >>> describe_undue_steps(args, num_rounds=50) is None
    True

    ```
    """
    found: dict[str, float] = {}
    for kind in _EFFECTS:
        # Without `eval_steps`, an evaluation follows `logging_steps`.
        steps = getattr(args, f"{kind}_steps") or args.logging_steps
        is_first_logged = kind == "logging" and bool(args.logging_first_step)
        if getattr(args, f"{kind}_strategy") == "steps" and steps > num_rounds and steps != DEFAULT_STEPS:
            if not is_first_logged:
                found[kind] = steps
    if not found:
        return None
    names = [f"{kind}_steps={steps:g}" for kind, steps in found.items()]
    effects = [_EFFECTS[kind] for kind in found]
    if args.load_best_model_at_end and "eval" in found:
        effects.append("the best model is the last model")
    is_one = len(names) == 1
    allowed = "1" if num_rounds == 1 else f"a number from 1 to {num_rounds}"
    return (
        f"{_join(names)} {'counts' if is_one else 'count'} rounds, and the run has {num_rounds}: {_join(effects)}. "
        f"Set {'it' if is_one else 'them'} to {allowed}, or to {DEFAULT_STEPS}, which means every round."
    )


@functools.cache
def warn_once(text: str) -> None:
    """
    Log a warning. A process logs the same text once, also if the command line and a trainer both find it.

    Args:
        text (`str`): The warning.
    """
    logging.getLogger(__name__).warning(text)


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
