"""`Announcement`: what the server learns of a client on another machine when it joins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..utils.fields import MAX_METRICS, Count, MaxEntries
from .base import Serializable
from .validation import MAX_SHOWN_LENGTH


@dataclass(frozen=True)
class Announcement(Serializable):
    """
    What a client announces when it joins. The numbers limit what its later messages may claim.

    Args:
        num_examples (`int`, *optional*): Number of training examples. `None` for a stream, and if it is hidden.
        num_encoded_examples (`int`, *optional*): Number of training examples after encoding. It differs from
            `num_examples` if the encoding packs examples, or cuts them in parts. `None` for a stream, and if it is
            hidden.
        num_eval_examples (`int`): Number of encoded evaluation examples. 0 if it is hidden.
        examples_per_step (`int`): Largest number of examples in an optimizer step.
        class_counts (`list[int]`, *optional*): Number of training examples of each class, if clients send these
            numbers with their updates. [`FedKD`] and [`FedDRS`] need them.
        hides_counts (`bool`, *optional*, defaults to `False`): Whether the client hides its numbers of examples, as
            with `secure_aggregation`.
        num_dropped_examples (`int`, *optional*): Number of training examples that the trainer of the client has
            dropped, for example because they are too long for `max_length`. `None` if it dropped none, and if it is
            hidden.

    Example:

    ```python
    >>> from hf_federated.messages import Announcement

    >>> announcement = Announcement(
    ...     num_examples=90, num_encoded_examples=90, num_eval_examples=10, examples_per_step=8, class_counts=[40, 50]
    ... )
    >>> Announcement.from_bytes(announcement.to_bytes()) == announcement
    True
    ```
    """

    kind: ClassVar[str] = "announcement"

    num_examples: Count | None
    num_encoded_examples: Count | None
    num_eval_examples: Count
    examples_per_step: Count
    class_counts: Annotated[list[Count], MaxEntries(MAX_METRICS)] | None = None
    hides_counts: bool = False
    num_dropped_examples: Count | None = None

    def describe(self, first: Announcement) -> str:
        """
        Describe the announcement for a log.

        Args:
            first ([`Announcement`]): The first announcement of the client, which counts.
        """
        if first == self and self.hides_counts:
            return "hidden numbers of examples"
        if first == self:
            dropped = f", of which it dropped {self.num_dropped_examples}" if self.num_dropped_examples else ""
            return "a stream" if self.num_examples is None else f"{self.num_examples} examples{dropped}"
        changes = [
            f"{name}={value!r} (before: {getattr(first, name)!r})"
            for name, value in vars(self).items()
            if value != getattr(first, name)
        ]
        return f"{', '.join(changes)[:MAX_SHOWN_LENGTH]}, but its first announcement counts"

    def shown_counts(self) -> str:
        """Return the numbers of examples of the announcement as text, without those of a step."""
        counts = {"num_examples": self.num_examples, "num_encoded_examples": self.num_encoded_examples}
        counts |= {"num_eval_examples": self.num_eval_examples or None}
        counts |= {"num_dropped_examples": self.num_dropped_examples}
        shown = [f"{name}={number}" for name, number in counts.items() if number is not None]
        return ", ".join(shown + ["class_counts"] * (self.class_counts is not None))

    @classmethod
    def from_bytes(cls, blob: bytes | memoryview) -> Announcement:
        """
        Read an announcement.

        Args:
            blob (`bytes` or `memoryview`): What a client sent. It is untrusted input.

        Raises:
            ValueError: If the blob is no announcement, or if its numbers contradict each other.
        """
        announcement = super().from_bytes(blob)
        num_encoded, counts = announcement.num_encoded_examples, announcement.class_counts
        if (announcement.num_examples is None) != (num_encoded is None):
            raise ValueError(
                f"`num_examples` is {announcement.num_examples} and `num_encoded_examples` is {num_encoded}; both or "
                "none must be a number."
            )
        if counts is not None and sum(counts) > (num_encoded or 0):
            raise ValueError(f"`class_counts` has {sum(counts)} examples, but the client announces {num_encoded}.")
        num_dropped, num_raw = announcement.num_dropped_examples, announcement.num_examples
        if not announcement.hides_counts and num_dropped and num_dropped > (num_raw or 0) - (num_encoded or 0):
            raise ValueError(
                f"`num_dropped_examples` is {num_dropped}, but the client announces num_examples={num_raw} and "
                f"num_encoded_examples={num_encoded}."
            )
        if announcement.hides_counts and (shown := announcement.shown_counts()):
            raise ValueError(f"`hides_counts` is True, but the client announces {shown}.")
        return announcement


# The values of an announcement as noun phrases, for the model card.
ANNOUNCED_VALUES: dict[str, str] = {
    "num_examples": "its number of training examples",
    "num_encoded_examples": "its number of training examples after encoding",
    "num_eval_examples": "its number of evaluation examples",
    "examples_per_step": "its number of examples in an optimizer step",
    "class_counts": "its number of training examples of each class",
    "num_dropped_examples": "its number of training examples that its trainer dropped",
}
