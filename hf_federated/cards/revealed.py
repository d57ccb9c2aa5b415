"""What a card says of what left the clients: parameters, predictions, counts, and what a server could read in them."""

from __future__ import annotations

from .run_record import RunRecord
from .tables import plural, size, table


# Sent beside the parameters with every update: see `hf_federated.messages.ClientUpdate`.
UPDATE_FIELDS = (
    "how many rows it has, how many tokens, steps and floating point operations it took, its mean loss, its last"
    " gradient norm and its learning rate"
)


def what_left(record: RunRecord) -> str:
    """
    The section "What left the clients".

    Args:
        record ([`RunRecord`]): The run.
    """
    exchanged = record.exchanged
    if record.public_data is not None:
        return _revealed(record)
    kind = {
        "adapter": "the adapter's parameters",
        "trainable": "the trainable parameters",
        "all": "all parameters and buffers",
    }[exchanged["kind"]]
    numbers = f"{plural(exchanged['num_tensors'], 'tensor')} with {plural(exchanged['num_values'], 'value')}"
    what = f"{kind}: {numbers} in {', '.join(exchanged['dtypes'])}."
    evaluations = ", and the metrics of its own evaluation" if record.federation["evaluate_clients"] else ""
    crossed = f"received and sent back {what}"
    if exchanged.get("sends_back"):
        crossed = f"received {what} It sent back {exchanged['sends_back']}."
    return (
        f"In a round, a sampled client {crossed} With these it sent"
        f" {UPDATE_FIELDS}{_class_counts(record)}{evaluations}. What the algorithm sends beside the"
        " parameters is in the bytes above. No message has a field for rows of the data set. Parameters can still tell"
        f" something about the rows they were trained on.{_pseudo_samples(record)}"
    )


def _class_counts(record: RunRecord) -> str:
    return ", how many rows of each label it has" if record.exchanged.get("class_counts") else ""


def _pseudo_samples(record: RunRecord) -> str:
    """What was found of the inputs that the server made of the clients' models."""
    if not record.pseudo_samples:
        return ""
    rows = [
        [client_id, *(found[name] for name in ("own", "others", "start", "moved"))]
        for client_id, found in record.pseudo_samples.items()
    ]
    columns = ["Client", "Its own", "Other clients'", "Where they began", "Moved to another word"]
    above = [
        client_id
        for client_id, found in record.pseudo_samples.items()
        if found["own"] > max(found["others"], found["start"])
    ]
    whose = f"{len(above) or 'none'} of {plural(len(record.pseudo_samples), 'client')}"
    return (
        "\n\nThe server made inputs of its own by the gradients of the clients' models. Read as the words whose"
        " embeddings lie nearest, this share of them is in the client's rows. What other clients' inputs have, and"
        f" what they had where they began, is chance; more than both would tell of the client's text. It is more for"
        f" {whose}.\n\n" + table(columns, rows, numeric=True)
    )


def _revealed(record: RunRecord) -> str:
    """What left a client whose predictions travel."""
    exchanged, federation = record.exchanged, record.federation
    assert record.public_data is not None
    rows = plural(record.public_data.num_rows or 0, "public row")
    kept = "Parameters of the clients' models stayed with the clients."
    if exchanged["parameters_returned"]:
        kept = f"It also sent the parameters that it had trained, {plural(exchanged['num_values'], 'value')}."
    elif exchanged["parameters_sent"]:
        kept += f" They received those of the server's model, {plural(exchanged['num_values'], 'value')}."
    if exchanged.get("beside"):
        kept += f" Beside these it sent {exchanged['beside']}."
    evaluations = ", and the metrics of its own evaluation" if federation["evaluate_clients"] else ""
    passes = exchanged.get("public_passes", 1)
    in_passes = f", in each of {passes} passes over them" if passes > 1 else ""
    outside = ""
    if exchanged.get("told_outside"):
        outside = (
            " Clients were weighed by a function of the user's, which may call a service elsewhere. It was given"
            f" {exchanged['told_outside']}."
        )
    return (
        f"In a round, a sampled client sent its model's predictions of {rows}, which server and clients all"
        f" have{in_passes}."
        f" {kept} With these it sent {UPDATE_FIELDS}{_class_counts(record)}, and what the method asks for of its"
        f" training{evaluations}.{outside}"
        f" In {plural(federation['num_rounds_run'], 'round')} all clients together sent {size(exchanged['bytes_up'])}"
        f" and received {size(exchanged['bytes_down'])}. No message has a field for rows of the data set. Predictions"
        " can still tell something about the rows that a model was trained on."
    )
