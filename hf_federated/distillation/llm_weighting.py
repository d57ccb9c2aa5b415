"""`LLMWeighting`: a language model chooses the weights of the clients' predictions.

This is LLMWC of Xiao and Liu, Adaptive Federated Distillation for Multi-Domain Non-IID Textual Data (AdaFD). The
prompt contains each client's training loss, F1, logits and entropy. The reply is one number per client, separated by
commas. The prompt contains only a summary of the logits. The paper does not define how to handle an invalid reply.
Here, the model receives the error and is asked again. If all replies are invalid, ENWC computes the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import logging

from ..utils.arguments import require
from .client_reports import ClientReport
from .client_weights import enwc


logger = logging.get_logger(__name__)

# Both texts are quoted verbatim from the paper's appendix A.
INSTRUCTION = (
    "You are an expert in federated learning and federated distillation. Analyze and compute the optimal weight "
    "allocation for all clients based on the following data in a federated distillation scenario. Return only the "
    "numerical values separated by commas, without any explanation or calculation process."
)
REQUEST = (
    "Based on these factors, please compute and normalize the weight for each client to maximize the global model "
    "performance. Assign weights to each client and return the values separated by commas. Do not include any "
    "additional text or calculation details."
)

# Decimal numbers without a sign. Python's float() would also accept "nan", "1_0" and digits of other scripts.
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LONGEST_QUOTE = 200


class LLMWeighting:
    """
    Weights from the reply of a language model, or the weights of [`enwc`] if it returns no valid reply.

    A valid reply has exactly one finite number per client, in the order of the reports, separated by commas. No number
    is negative, and at least one is not 0. White space around the numbers and a full stop at the end are allowed. The
    numbers do not have to sum to 1. The prompt numbers the clients from 1 and does not contain their ids. A run is
    reproducible only if `generate` is deterministic.

    Args:
        generate (`Callable[[str], str]`):
            Maps a prompt to a reply. [`text_generation`] makes one from a local pipeline. An exception counts as an
            invalid reply.
        retries (`int`, *optional*, defaults to `2`):
            Number of times that the model is asked again. The new prompt ends with the error of the last reply,
            because a deterministic model would otherwise repeat it.
        beta (`float`, *optional*, defaults to `5.0`):
            `beta` of [`enwc`], if its weights are used.

    Attributes:
        weights (`dict[str, float]`): The returned weights of the last call. `None` before the first call.
        fell_back (`bool`): Whether the weights are those of ENWC. `None` before the first call.
        num_attempts (`int`): Number of times that the model was asked in the last call. `None` before the first call.
        prompt_length (`int`): Number of characters of the last prompt. `None` before the first call.

    Raises:
        ValueError: If `retries` is negative. When called, if [`enwc`] refuses the reports.

    Example:

    ```python
    >>> from hf_federated.distillation import ClientReport, LLMWeighting

    >>> weigh = LLMWeighting(lambda prompt: "3, 1")  # replaces a model in this example
    >>> weigh([ClientReport("north", 8, min_epoch_loss=0.2, f1=0.9), ClientReport("south", 8, 0.4, f1=0.7)])
    {'north': 0.75, 'south': 0.25}
    >>> weigh.fell_back, weigh.num_attempts
    (False, 1)
    ```
    """

    def __init__(self, generate: Callable[[str], str], retries: int = 2, beta: float = 5.0) -> None:
        require("retries", retries, retries >= 0, "0 or more")
        self.generate = generate
        self.retries = retries
        self.beta = beta
        self.weights: dict[str, float] | None = None
        self.fell_back: bool | None = None
        self.num_attempts: int | None = None
        self.prompt_length: int | None = None

    def __call__(self, reports: Sequence[ClientReport]) -> dict[str, float]:
        # Also checks the reports before the model is asked.
        fallback = enwc(reports, self.beta)
        prompt = weighting_prompt(reports)
        for attempt in range(1, self.retries + 2):
            self.num_attempts, self.prompt_length = attempt, len(prompt)
            values, refusal, quote = self._ask(prompt, len(reports))
            if values is not None:
                self.weights, self.fell_back = dict(zip(fallback, values, strict=True)), False
                return dict(self.weights)
            prompt = f"{weighting_prompt(reports)}\nYour last reply was refused: {refusal}."
        logger.warning(
            f"The language model gave no valid weights in {self.num_attempts} attempts. The weights of ENWC "
            f"(beta={self.beta}) are used instead. The last reply was refused: {refusal}. {quote}".rstrip()
        )
        self.weights, self.fell_back = fallback, True
        return dict(fallback)

    def _ask(self, prompt: str, num_clients: int) -> tuple[list[float] | None, str, str]:
        """Return the weights in the model's reply. If it is invalid, return the reason and a quotation for the log."""
        try:
            reply = self.generate(prompt)
        except Exception as error:  # a model, a pipeline or a connection may raise any exception
            return None, f"the model raised a {type(error).__name__}", _quoted("The error message is", str(error))
        if not isinstance(reply, str):
            return None, f"it was a {type(reply).__name__} and not a text", _quoted("It was", repr(reply))
        try:
            return parse_weights(reply, num_clients), "", ""
        except ValueError as error:
            return None, str(error), _quoted("It was", reply)


def weighting_prompt(reports: Sequence[ClientReport]) -> str:
    """
    The prompt of AdaFD's appendix A as one string: the instruction, one line per client, and the request.

    A line contains the fields that the report has: training loss, F1, logits (mean and standard deviation of each
    class) and logits entropy. Each number has four significant digits.

    Args:
        reports (`Sequence[ClientReport]`): One report for each client. The reply must have the same order.
    """
    lines = []
    for number, report in enumerate(reports, start=1):
        values = {
            "training loss": report.min_epoch_loss,
            "F1": report.f1,
            "mean logits per class": report.mean_logits,
            "standard deviation of logits per class": report.std_logits,
            "logits entropy": report.mean_entropy,
        }
        known = [f"{name}={_rounded(value)}" for name, value in values.items() if value is not None]
        lines.append(f"Client {number}: {', '.join(known)}")
    return "\n".join([INSTRUCTION, "", *lines, "", REQUEST])


def parse_weights(reply: str, num_clients: int) -> list[float]:
    """
    Read the weights from a reply and normalize them to a sum of 1.

    Args:
        reply (`str`): The model's reply.
        num_clients (`int`): Expected number of weights.

    Raises:
        ValueError: If the reply is not a list of this many numbers. The message states the error.
    """
    pieces = [piece.strip() for piece in reply.strip().removesuffix(".").split(",")]
    if len(pieces) != num_clients:
        raise ValueError(f"expected {num_clients} numbers separated by commas, got {len(pieces)} pieces")
    for place, piece in enumerate(pieces, start=1):
        if not NUMBER.fullmatch(piece) or not math.isfinite(float(piece)):
            raise ValueError(f"piece {place} is not a finite decimal number without a sign")
    values = [float(piece) for piece in pieces]
    largest = max(values)
    if largest == 0:
        raise ValueError("all numbers are 0")
    # Divided by the largest value first, because the sum of finite numbers may overflow.
    shares = [value / largest for value in values]
    total = math.fsum(shares)
    return [share / total for share in shares]


def text_generation(pipeline: Any, **generate_kwargs: Any) -> Callable[[str], str]:
    """
    Make a function for [`LLMWeighting`] from a local `transformers` pipeline.

    If the tokenizer has a chat template, the prompt is sent as a user's message. Otherwise, the prompt is sent
    unchanged. By default, decoding is greedy and ends after 256 tokens, so the same prompt gives the same reply.

    Args:
        pipeline (`transformers.TextGenerationPipeline`): A pipeline from
            `transformers.pipeline("text-generation", ...)`.
        generate_kwargs (`Any`): Arguments of the pipeline's call: `max_new_tokens`, `do_sample`, …

    Returns:
        `Callable[[str], str]`: Maps a prompt to the generated text, without the prompt.
    """
    arguments = {"do_sample": False, "max_new_tokens": 256, **generate_kwargs, "return_full_text": False}

    def generate(prompt: str) -> str:
        has_chat = pipeline.tokenizer.chat_template is not None
        outputs = pipeline([{"role": "user", "content": prompt}] if has_chat else prompt, **arguments)
        return outputs[0]["generated_text"]

    return generate


def _rounded(value: float | Sequence[float]) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else f"[{', '.join(map(_rounded, value))}]"


def _quoted(introduction: str, text: str) -> str:
    """A sentence for the log that quotes a text on one line, shortened to `LONGEST_QUOTE` characters."""
    return f"{introduction} {text[:LONGEST_QUOTE]!r}{'…' if len(text) > LONGEST_QUOTE else ''}"
