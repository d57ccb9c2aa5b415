"""`DigitWeighting`: a language model weights the clients' predictions, with a valid reply by construction.

A small language model seldom writes one number for each client (`llm_weighting.py`). Here, the form of the reply is
fixed to one digit for each client, separated by commas, and the model only chooses among the digits: `p_kd` is the
probability that the model gives to the digit `d` at the place of client `k`, after the digits of the clients before
it. The weight of a client is the expected digit,

    w_k ∝ Σ_d d · p_kd,   Σ_d p_kd = 1,   d = 1, …, 9.

The paper (Xiao and Liu, AdaFD) lets GPT-4 write the weights. The digits have no 0, so no weight is below a ninth of
another weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .client_reports import ClientReport
from .llm_weighting import LLMWeighting


DIGITS = "123456789"
DIGIT_REQUEST = "Write each weight as one digit from 1 (smallest) to 9 (largest)."
# Maps a prompt, the beginning of a reply and its possible continuations to the log-probabilities of the continuations.
Score = Callable[[str, str, Sequence[str]], Sequence[float]]


class DigitWeighting(LLMWeighting):
    """
    Weights from the probabilities that a language model gives to digits, one digit for each client.

    Every model gives valid weights. The weights of [`enwc`] are used only if `score` raises an exception or returns
    values that are not log-probabilities. The prompt is that of [`LLMWeighting`] with the request to write digits.

    Args:
        score (`Callable[[str, str, Sequence[str]], Sequence[float]]`):
            `score(prompt, reply, candidates)`: the log-probability of each candidate as the continuation of a reply to
            the prompt. A constant may be added to all of them. [`candidate_scoring`] makes one from a local pipeline.
        beta (`float`, *optional*, defaults to `5.0`):
            `beta` of [`enwc`], if its weights are used.

    Attributes:
        weights, fell_back, num_attempts, prompt_length: As in [`LLMWeighting`].

    Raises:
        ValueError: When called, if [`enwc`] refuses the reports.

    Example:

    ```python
    >>> import math
    >>> from hf_federated.distillation import ClientReport, DigitWeighting

    >>> def score(prompt, reply, candidates):  # replaces a model in this example
    ...     favorite = "1" if reply else "3"
    ...     return [0.0 if candidate == favorite else -math.inf for candidate in candidates]

    >>> weigh = DigitWeighting(score)
    >>> weigh([ClientReport("north", 8, min_epoch_loss=0.2, f1=0.9), ClientReport("south", 8, 0.4, f1=0.7)])
    {'north': 0.75, 'south': 0.25}
    >>> weigh.fell_back
    False
    ```
    """

    def __init__(self, score: Score, beta: float = 5.0) -> None:
        super().__init__(self._reply, retries=0, beta=beta)
        self.score = score
        self._num_clients = 0

    def __call__(self, reports: Sequence[ClientReport]) -> dict[str, float]:
        self._num_clients = len(reports)
        return super().__call__(reports)

    def _reply(self, prompt: str) -> str:
        """Build a reply of expected digits, one for each client."""
        prompt = f"{prompt}\n{DIGIT_REQUEST}"
        digits, expected = "", []
        values = torch.arange(1, len(DIGITS) + 1, dtype=torch.float64)
        for _ in range(self._num_clients):
            scores = torch.as_tensor(self.score(prompt, digits, list(DIGITS)), dtype=torch.float64)
            probabilities = scores.softmax(0)
            if scores.shape != values.shape or not bool(probabilities.isfinite().all()):
                raise ValueError(
                    f"`score` returned {scores.tolist()} for {len(DIGITS)} candidates. It must return one "
                    "log-probability for each candidate, and at least one must be finite."
                )
            expected.append(float((values * probabilities).sum()))
            digits += f"{DIGITS[int(scores.argmax())]},"
        return ",".join(map(repr, expected))


def candidate_scoring(pipeline: Any) -> Score:
    """
    Make a function for [`DigitWeighting`] from a local `transformers` pipeline.

    The prompt is sent as by [`text_generation`]. The function runs one forward pass for each call, without sampling.

    Args:
        pipeline (`transformers.TextGenerationPipeline`): A pipeline from
            `transformers.pipeline("text-generation", ...)`.

    Returns:
        `Callable[[str, str, Sequence[str]], Sequence[float]]`: Maps a prompt, the beginning of a reply and candidates
        to the log-probabilities of the candidates. It raises a `ValueError` if the tokens of the candidates differ in
        more than the last token.
    """
    model, tokenizer = pipeline.model, pipeline.tokenizer

    def score(prompt: str, reply: str, candidates: Sequence[str]) -> list[float]:
        text, has_chat = _chat_text(tokenizer, prompt)
        # Tokenized apart, so that the candidates follow the same tokens.
        start = tokenizer(text, add_special_tokens=not has_chat)["input_ids"]
        parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (reply, *candidates) if part]
        start, ends = start + (parts.pop(0) if reply else []), parts
        shared = ends[0][:-1]
        if any(tokens[:-1] != shared or len(tokens) <= len(shared) for tokens in ends):
            raise ValueError(
                f"The tokens of the candidates {list(candidates)} are {ends}; they must differ in the last token "
                "only. Use the tokenizer of another model."
            )
        inputs = torch.tensor([start + shared], device=model.device)
        with torch.inference_mode():
            scores = model(input_ids=inputs).logits[0, -1].float().log_softmax(-1)
        return scores[[tokens[-1] for tokens in ends]].tolist()

    return score


def _chat_text(tokenizer: Any, prompt: str) -> tuple[str, bool]:
    """
    The text to which a language model replies, and whether a chat template made it.

    Without a chat template, the reply begins on the line after the prompt.
    """
    if tokenizer.chat_template is None:
        return f"{prompt}\n", False
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), True
