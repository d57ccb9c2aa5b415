"""What a card says of the boundary in a split model: what crossed it, who saw it, and what can be read in it.

The fields are those of `hf_federated.split.messages` and `hf_federated.split_training.transfer`.
"""

from __future__ import annotations

from typing import Any

from .split_record import SplitRecord
from .tables import count, plural, size, table


NOT_MEASURED = "No measurement was made for this model: `hf-federated audit` makes one."


def what_left(record: SplitRecord) -> str:
    """
    The messages between clients and server, field by field.

    Args:
        record ([`SplitRecord`]): The run.
    """
    exchanged = record.exchanged
    if not record.split["num_steps_run"]:
        return "Nothing: no step was trained."
    paragraphs = [
        passages(record),
        _handed_on(record),
        f"In all, clients sent {size(exchanged['bytes_up'])} and received {size(exchanged['bytes_down'])} in training,"
        f" with all headers, handshakes and parameters. {_not_sent(record)}",
        "No message has a field for text, token ids, labels or a loss; one with another field is refused.",
    ]
    return "\n\n".join(paragraphs)


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


def _is_handed_over(record: SplitRecord) -> bool:
    hands_over = record.split["strategy"] == "serial" and record.split["average_every"] is None
    return hands_over and record.exchanged["num_clients"] > 1


def _num_averages(split: dict[str, Any]) -> int:
    every = split["average_every"]
    return 0 if every is None else split["num_steps_run"] // every


def _handed_on(record: SplitRecord) -> str:
    """What went from client to client, or to whoever averages."""
    split = record.split
    beside = "with its name, the step and how many rows it had trained on"
    if _is_handed_over(record):
        return f"At the end of its turn a client handed {client_values(record)} to the next one, {beside}."
    times = _num_averages(split)
    if times:
        return (
            f"{plural(times, 'time')} each client sent {client_values(record)} to whoever averages, {beside} since"
            " the last time, and received the mean."
        )
    return "No client sent parameters to another, or to anybody who averages."


def _not_sent(record: SplitRecord) -> str:
    """What the parties of one process share without a message."""
    split = record.split
    hands_over = split["strategy"] == "serial" and split["average_every"] is None
    shared = ["what the last client trained" if hands_over else "the mean of what the clients trained"]
    shared[0] += ", which became the model that was evaluated and saved"
    if record.arguments["max_grad_norm"]:
        shared.append("the norm of the gradients of all who share a step, by which each clips its own")
    return (
        f"Not in these numbers, since all parties were in one process: evaluation and generation; {'; '.join(shared)}."
    )


def who_saw_what(record: SplitRecord) -> str:
    """
    A table of who received what, and what this is taken from.

    Args:
        record ([`SplitRecord`]): The run.
    """
    split = record.split
    if not split["num_steps_run"]:
        return ""
    rows = [
        ["The server", ", ".join(server_saw(record))],
        ["A client", "of its own rows, hidden states behind the server's blocks and gradients by those that it sent"],
    ]
    trained = "trained parameters of head and tail, and how many rows they were trained on"
    if _is_handed_over(record):
        rows.append(["The next client", f"{trained}, of the one before it"])
    elif _num_averages(split):
        rows.append(["Whoever averages", f"{trained}, of every client"])
    if len(rows) > 2:
        rows[-1][1] += ". Not for the server that holds the body, which could read that client's hidden states better"
        if record.exchanged["embedding_trained"]:
            rows[-1][1] += ". The embedding is among them: how its rows changed can tell which tokens a text has"
    sealed = ""
    if split["encryption"]:
        sealed = (
            " Messages between a client and the server were sealed, which hides what they hold from others on the way,"
            " and nothing from the server."
        )
        if len(rows) > 2:
            sealed += " Parameters that went elsewhere were not."
    return (
        table(["Who", "Received"], rows)
        + f"\n\nThis run had all parties in one process, which simulates them: the table says for whom the messages"
        f" were.{sealed}"
    )


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
    What can be read in what crossed: the claim, and what was measured.

    Args:
        record ([`SplitRecord`]): The run.
    """
    claim = (
        "Raw text and labels stay with the client. Against an honest-but-curious server that knows the pretrained"
        " weights, the hidden states and gradients that it receives can still reveal text. Noise on what is sent"
        " guarantees nothing without a stated bound of differential privacy. A server that departs from the protocol"
        " was not considered."
    )
    if not record.split["head_blocks"]:
        claim += (
            " Here no block lies before the cut: the server received the embeddings of the tokens, from which whoever"
            " has the embedding matrix reads the text."
        )
    return f"{claim}\n\n{record.leakage or NOT_MEASURED}"
