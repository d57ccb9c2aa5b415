"""What a card says of the boundary in a split model, wherever its parties are: what crosses it, and what it tells.

The fields are those of `hf_federated.split.messages`. What hangs on where the parties were is a [`SplitView`].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from .split_record import SplitRecord
from .tables import count


NOT_MEASURED = "No measurement was made for this model: `hf-federated audit` makes one."


class SplitView(ABC):
    """
    What one who was there can tell of a run: all parties in one process, or a client of a networked one.

    Args:
        record ([`SplitRecord`]): The run.

    Attributes:
        who (`str`): Whose bytes are counted.
        log_of (`tuple[str, str]`): What was evaluated for the log, and over which steps its losses are means.
    """

    who: ClassVar[str]
    log_of: ClassVar[tuple[str, str]]

    def __init__(self, record: SplitRecord) -> None:
        self.record = record

    @property
    def hands_over(self) -> bool:
        """Whether a client's parts go to the next one, and are never averaged."""
        return self.record.split["strategy"] == "serial" and self.record.split["average_every"] is None

    @property
    def texts(self) -> dict[str, str]:
        """Further fields of the template."""
        return {}

    @property
    @abstractmethod
    def summary(self) -> str:
        """What was saved, and how it was trained."""

    @abstractmethod
    def results(self, step: int, best_by: str | None) -> str:
        """
        Of which model the results are.

        Args:
            step (`int`): The optimizer step after which it was evaluated.
            best_by (`str`, *optional*): The metric by which it was chosen.
        """

    @property
    @abstractmethod
    def joined(self) -> str | None:
        """How what clients trained became one model; `None` if there was nothing to join."""

    @property
    @abstractmethod
    def encryption(self) -> str | None:
        """How messages were sealed."""

    @property
    def num_late(self) -> int | None:
        """Steps that went on without the client that tells."""
        return None

    @property
    @abstractmethod
    def left(self) -> str:
        """The messages between clients and server, field by field."""

    @property
    @abstractmethod
    def saw(self) -> str:
        """A table of who received what, and what this is taken from."""


def passages(record: SplitRecord) -> str:
    """What crosses for each batch, field by field."""
    split, exchanged = record.split, record.exchanged
    context = ", the length of each row's context, which this model asks for" if exchanged["context_lengths"] else ""
    targets = ""
    if split["strategy"] == "client_batch":
        targets = ", and with the gradient how many target tokens it is of"
    positions = "the numbers of positions where they do not follow from the mask"
    return (
        f"For each of its batches a client sent hidden states, and received those behind the server's blocks; it sent"
        f" the gradient of its loss by these, and received the gradient by its own. All travelled as"
        f" {split['wire_dtype']}. With the hidden states it sent the number of rows, the mask as bits where a row was"
        f" padded, {positions}{context}, and whether dropout, gradients and autocast were on{targets}. Each message"
        " names the client, the optimizer step and the batch within it. In generation there are the number of a"
        " key/value cache and how many positions it holds."
    )


def client_values(record: SplitRecord) -> str:
    """How much a client trains."""
    number = record.parts["head"]["num_trained"] + record.parts["tail"]["num_trained"]
    return f"the {count(number)} values that it trains of its head and tail"


def server_saw(record: SplitRecord) -> list[str]:
    """What the server receives of a client."""
    split = record.split
    server = [
        "hidden states behind the client's first blocks" if split["head_blocks"] else "embeddings of the tokens",
        "gradients by the hidden states that it returned",
        "the length of each row",
    ]
    if record.exchanged["context_lengths"]:
        server.append("the length of each row's context")
    if split["strategy"] == "client_batch":
        server.append("target counts")
    server.append("which client took part in which step, with how many rows")
    return server


def what_is_revealed(record: SplitRecord) -> str:
    """
    What can be read in what crossed: the claim. What is measured takes its place ([`add_leakage`]).

    Args:
        record ([`SplitRecord`]): The run.
    """
    claim = (
        "Raw text and labels stay with the client. Against an honest-but-curious server that knows the pretrained"
        " weights, the hidden states and gradients that it receives can still reveal text, and the gradients labels:"
        " from them it reads which positions have a target, and with the weights of the client's last blocks which"
        " token that is. Noise on what is sent guarantees nothing without a stated bound of differential privacy. A"
        " server that departs from the protocol was not considered."
    )
    if not record.split["head_blocks"]:
        claim += (
            " Here no block lies before the cut: the server received the embeddings of the tokens, from which whoever"
            " has the embedding matrix reads the text."
        )
    return f"{claim}\n\n{NOT_MEASURED}"
