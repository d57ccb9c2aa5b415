"""`LLMWeighting`: a language model says what each client's predictions weigh.

LLMWC of Xiao and Liu, Adaptive Federated Distillation for Multi-Domain Non-IID Textual Data (AdaFD): a prompt with
each client's training loss, F1, logits and their entropy; the reply is one number per client, separated by commas. Of
the logits only a summary goes into the prompt. The paper does not say what to do with any other reply; here the model
is told what was wrong and asked again, and in the end ENWC takes its place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import logging

from .client_weights import ClientReport, enwc


logger = logging.get_logger(__name__)

# Both are the paper's appendix A, word for word, as they are the method.
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

# Plain decimals without a sign: Python's float() also reads "nan", "1_0" and digits of other scripts.
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LONGEST_QUOTE = 200


class LLMWeighting:
    """
    Weights from the reply of a language model, or those of [`enwc`] where it gives none.

    A reply counts if it is exactly one finite number per client, in the order of the reports, none negative and not
    all 0, separated by commas; white space around the numbers and a full stop at the end are let pass. It need not be
    normalized. In the prompt clients are numbered from 1; their ids are not told. A run can be repeated only if
    `generate` is deterministic.

    After each call the attributes hold what the log needs: `weights` (`dict[str, float]`, those returned),
    `fell_back` (`bool`, whether they are ENWC's), `num_attempts` (`int`, how often the model was asked) and
    `prompt_length` (`int`, characters of the last prompt). Before the first call they are `None`.

    Args:
        generate (`Callable[[str], str]`):
            From a prompt to the reply; [`text_generation`] makes one of a local pipeline. What it raises counts as a
            refused reply.
        retries (`int`, *optional*, defaults to `2`):
            How often to ask again. The prompt then ends in what was wrong with the last reply, since a deterministic
            model would otherwise repeat it.
        beta (`float`, *optional*, defaults to `5.0`):
            Of [`enwc`], where weights fall back to it.

    Raises:
        ValueError: If `retries` is negative. When called, whatever [`enwc`] refuses in the reports.

    Example:

    ```python
    >>> from hf_federated.distillation import ClientReport, LLMWeighting

    >>> weigh = LLMWeighting(lambda prompt: "3, 1")  # stands for a model
    >>> weigh([ClientReport("north", 8, min_epoch_loss=0.2, f1=0.9), ClientReport("south", 8, 0.4, f1=0.7)])
    {'north': 0.75, 'south': 0.25}
    >>> weigh.fell_back, weigh.num_attempts
    (False, 1)
    ```
    """

    def __init__(self, generate: Callable[[str], str], retries: int = 2, beta: float = 5.0) -> None:
        if retries < 0:
            raise ValueError(f"`retries` is {retries}; it must be 0 or more.")
        self.generate = generate
        self.retries = retries
        self.beta = beta
        self.weights: dict[str, float] | None = None
        self.fell_back: bool | None = None
        self.num_attempts: int | None = None
        self.prompt_length: int | None = None

    def __call__(self, reports: Sequence[ClientReport]) -> dict[str, float]:
        # Also what refuses reports that no weighting by loss can use, before the model is asked.
        fallback = enwc(reports, self.beta)
        prompt = weighting_prompt(reports)
        for attempt in range(1, self.retries + 2):
            self.num_attempts, self.prompt_length = attempt, len(prompt)
            values, refusal, quote = self._ask(prompt, len(reports))
            if values is not None:
                self.weights = dict(zip(fallback, values, strict=True))
                self.fell_back = False
                return dict(self.weights)
            prompt = f"{weighting_prompt(reports)}\nYour last reply was refused: {refusal}."
        logger.warning(
            f"The language model gave no weights in {self.num_attempts} attempts, so ENWC's (beta={self.beta}) are "
            f"used. Its last reply was refused: {refusal}. {quote}".rstrip()
        )
        self.weights, self.fell_back = fallback, True
        return dict(fallback)

    def _ask(self, prompt: str, num_clients: int) -> tuple[list[float] | None, str, str]:
        """The weights that the model replies; else what is wrong with the reply, and the reply quoted for the log."""
        try:
            reply = self.generate(prompt)
        except Exception as error:  # whatever a model, a pipeline or a connection may raise
            return None, f"there was none, but a {type(error).__name__}", _quoted("It says", str(error))
        if not isinstance(reply, str):
            return None, f"it was a {type(reply).__name__} and no text", _quoted("It was", repr(reply))
        try:
            return parse_weights(reply, num_clients), "", ""
        except ValueError as error:
            return None, str(error), _quoted("It was", reply)


def weighting_prompt(reports: Sequence[ClientReport]) -> str:
    """
    The prompt of AdaFD's appendix A, in one piece: instruction, a line per client, request.

    A line holds what the report has of: training loss, F1, logits (mean and standard deviation of each class) and
    logits entropy, each with four significant digits.

    Args:
        reports (`Sequence[ClientReport]`): One of each client, in the order in which the reply is to name them.
    """
    lines = []
    for number, report in enumerate(reports, start=1):
        parts = [f"training loss={report.min_epoch_loss:.4g}"]
        if report.f1 is not None:
            parts.append(f"F1={report.f1:.4g}")
        if report.mean_logits is not None:
            parts.append(f"mean logits per class={_rounded(report.mean_logits)}")
        if report.std_logits is not None:
            parts.append(f"standard deviation of logits per class={_rounded(report.std_logits)}")
        if report.mean_entropy is not None:
            parts.append(f"logits entropy={report.mean_entropy:.4g}")
        lines.append(f"Client {number}: {', '.join(parts)}")
    return "\n".join([INSTRUCTION, "", *lines, "", REQUEST])


def parse_weights(reply: str, num_clients: int) -> list[float]:
    """
    The weights in a reply, normalized to a sum of 1.

    Args:
        reply (`str`): What the model said.
        num_clients (`int`): How many weights it must hold.

    Raises:
        ValueError: If it is anything but so many numbers; the text says what is wrong.
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
    # Divided by the largest first, as the sum of finite numbers may overflow.
    shares = [value / largest for value in values]
    total = math.fsum(shares)
    return [share / total for share in shares]


def text_generation(pipeline: Any, **generate_kwargs: Any) -> Callable[[str], str]:
    """
    What [`LLMWeighting`] calls, from a local `transformers` pipeline.

    The prompt goes in as a user's message if the tokenizer has a chat template, else as it is. Decoding is greedy and
    ends after 256 tokens unless told otherwise, so that the same prompt has the same reply.

    Args:
        pipeline (`transformers.TextGenerationPipeline`): As `transformers.pipeline("text-generation", ...)` makes it.
        generate_kwargs (`Any`): For the pipeline's call: `max_new_tokens`, `do_sample`, …

    Returns:
        `Callable[[str], str]`: From a prompt to the new text alone.
    """
    arguments = {"do_sample": False, "max_new_tokens": 256, **generate_kwargs, "return_full_text": False}

    def generate(prompt: str) -> str:
        has_chat = pipeline.tokenizer.chat_template is not None
        outputs = pipeline([{"role": "user", "content": prompt}] if has_chat else prompt, **arguments)
        return outputs[0]["generated_text"]

    return generate


def _rounded(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:.4g}' for value in values)}]"


def _quoted(introduction: str, text: str) -> str:
    """A sentence that quotes a text for the log, on one line and not all of a long one."""
    return f"{introduction} {text[:LONGEST_QUOTE]!r}{'…' if len(text) > LONGEST_QUOTE else ''}"
