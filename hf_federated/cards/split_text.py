"""Text of split model cards that does not depend on whether the parties are simulated or networked.

The texts describe the fields of the messages in `hf_federated.split.messages`. [`SplitCardText`] is the base class of
the texts that depend on where the parties ran.
"""

from __future__ import annotations

from typing import ClassVar

from .split_record import SplitRecord
from .tables import format_count


RECEIVED_BY_CLIENT = (
    "for its own examples: hidden states after the server's blocks, and gradients with respect to the hidden states"
    " that it sent"
)
SENT_PARAMETERS = "trained parameters of the head and tail, and the number of examples they were trained on,"
EMBEDDING_NOTE = ". The parameters include the embedding. The change of its rows can reveal which tokens a text has"
# `{}` is the client.
ENCRYPTION_NOTE = (
    " Messages between {} and the server were encrypted. Encryption hides their content from third parties in transit,"
    " but hides nothing from the server."
)
NOT_MEASURED = "No measurement is available for this model. Run `hf-federated audit` to measure the leakage."


class SplitCardText:
    """
    Base class of the texts that depend on whether all parties ran in one process or one networked client writes the
    card.

    Args:
        record ([`SplitRecord`]):
            The run.

    Attributes:
        party (`str`): The party whose bytes are counted.
        log_sources (`tuple[str, str]`): The evaluated model, and the steps over which logged losses are averaged.
    """

    party: ClassVar[str]
    log_sources: ClassVar[tuple[str, str]]

    def __init__(self, record: SplitRecord) -> None:
        self.record = record

    @property
    def hands_over(self) -> bool:
        """Whether each client passes its parts on to the next client, and parts are never averaged."""
        return self.record.split["strategy"] == "serial" and self.record.split["average_every"] is None

    def template_fields(self) -> dict[str, str]:
        """Return additional fields of the template."""
        return {}

    def num_late(self) -> int | None:
        """Return the number of steps that continued without the client that writes the card."""
        return None


def batch_messages(record: SplitRecord) -> str:
    """Describe each field of the messages that are exchanged for a batch."""
    split, exchanged = record.split, record.exchanged
    context = (
        " the context length of each example (which this model requires)," if exchanged["context_lengths"] else ""
    )
    num_targets = ""
    if split["strategy"] == "client_batch":
        num_targets = " Together with the gradient, it sent the number of target tokens."
    return (
        "For each of its batches, a client sent hidden states and received the hidden states after the server's"
        " blocks. The client then sent the gradient of its loss with respect to the received hidden states, and"
        " received the gradient with respect to the sent hidden states. All of these tensors were sent as"
        f" {split['wire_dtype']}. Together with the hidden states, the client sent the number of examples, the"
        " attention mask as bits (if an example was padded), the position ids (if they do not follow from the"
        f" mask),{context} and whether dropout, gradients and autocast were enabled.{num_targets} Each message"
        " contains the name of the client, the optimizer step and the index of the batch within the step. During"
        " generation, messages also contain the number of a key/value cache, the number of positions in the cache and,"
        " with beam search, the beam that each sequence continues."
    )


def trained_values(record: SplitRecord) -> str:
    """Describe the number of values that a client trains."""
    num_trained = record.parts["head"]["num_trained"] + record.parts["tail"]["num_trained"]
    return f"the {format_count(num_trained)} trained values of its head and tail"


def received_by_server(record: SplitRecord) -> list[str]:
    """List the information that the server receives from a client."""
    split = record.split
    received = [
        "hidden states after the client's first blocks" if split["head_blocks"] else "token embeddings",
        "gradients with respect to the hidden states that it returned",
        "the length of each example",
    ]
    if record.exchanged["context_lengths"]:
        received.append("the context length of each example")
    if split["strategy"] == "client_batch":
        received.append("target token counts")
    received.append("which client participated in each step and with how many examples")
    return received


def leakage_claim(record: SplitRecord) -> str:
    """
    Describe what the server can read from the exchanged tensors. [`add_leakage`] replaces this text with measurements.

    Args:
        record ([`SplitRecord`]):
            The run.
    """
    claim = (
        "Raw text and labels stay with the client. However, the hidden states and gradients that the server receives"
        " can still reveal text to an honest-but-curious server that knows the pretrained weights, and the gradients"
        " can reveal labels. From the gradients, the server can read which positions have a target. With the weights"
        " of the client's last blocks, it can also read which token each target is. Adding noise to the sent tensors"
        " guarantees nothing without a stated differential privacy bound. A server that deviates from the protocol was"
        " not considered."
    )
    if not record.split["head_blocks"]:
        claim += (
            " In this run, the client kept no block before the cut. The server received the token embeddings, and any"
            " party with the embedding matrix can read the text from them."
        )
    return f"{claim}\n\n{NOT_MEASURED}"
