"""Text about the exchange between clients and server: parameters, predictions, counts, and what they can reveal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .facts import DataFacts
from .run_record import RunRecord
from .secure_text import protection_text, sent_fields
from .tables import format_bytes, plural, table


# Statistics that every update contains in addition to the parameters. See `hf_federated.messages.ClientUpdate`.
UPDATE_FIELDS = (
    "its number of examples",
    "the number of tokens, steps and floating point operations of its training",
    "its mean loss",
    "its last gradient norm",
    "its learning rate",
)


def exchange_text(record: RunRecord) -> str:
    """
    Return the section "Exchanged information".

    Args:
        record ([`RunRecord`]):
            The run.
    """
    exchanged = record.exchanged
    if record.public_data is not None:
        return _prediction_exchange(record, record.public_data)
    kind = {
        "adapter": "the adapter's parameters",
        "trainable": "the trainable parameters",
        "all": "all parameters and buffers",
        "selected": "the selected parameters and buffers",
    }[exchanged["kind"]]
    sizes = f"{plural(exchanged['num_tensors'], 'tensor')} with {plural(exchanged['num_values'], 'value')}"
    parameters = f"{kind}: {sizes} in {', '.join(exchanged['dtypes'])}."
    if (secure := exchanged.get("secure_aggregation")) is not None:
        return _secure_exchange(record, secure, parameters)
    exchange = f"received and sent back {parameters}"
    if exchanged.get("update_content") == "changes":
        exchange = f"received {parameters} It sent back how training changed these parameters, and no parameters."
    return (
        f"In each round, a sampled client {exchange} With each update, the client also sent {_update_fields(record)}."
        " The byte counts above include the tensors that the algorithm sends in addition to the parameters. No message"
        f" has a field for dataset examples.{_local_tensors(record)} Parameters can still reveal information about the"
        f" examples that they were trained on.{_before_first_update(record)}{_disclosures(record)}"
        f"{_pseudo_samples(record)}"
    )


def _secure_exchange(record: RunRecord, secure: Mapping[str, Any], parameters: str) -> str:
    """Return the section for runs with secure aggregation."""
    return (
        f"{protection_text(secure)}\n\nIn each round, a sampled client received {parameters} {sent_fields(secure)}"
        f" No message has a field for dataset examples.{_local_tensors(record)} A sum can still reveal information"
        " about the examples of its clients."
        f"{_before_first_update(record)}{_disclosures(record)}"
    )


def _local_tensors(record: RunRecord) -> str:
    """Return how many values each client keeps."""
    number = record.exchanged.get("num_local_values")
    if not number:
        return ""
    return (
        f" Each client trained {plural(number, 'further value')} (`keep_local`), which it kept and did not send. This"
        " model has the initial values of these parameters."
    )


def _before_first_update(record: RunRecord) -> str:
    """Return what the server of a run over a network learns of a client when it joins."""
    announced, settings = record.exchanged.get("announced"), record.exchanged.get("compared_settings")
    if not announced:
        return ""
    compared = "the settings that the server compares"
    if settings:
        compared = f"{plural(len(settings), 'setting')}, which the server compared with its own"
    names = f": {', '.join(f'`{name}`' for name in settings)}" if settings else ""
    limits = " The announced numbers limit what the updates of the client could claim."
    if record.federation.get("secure_aggregation") is not None:
        limits = " The clients hid their numbers of examples."
    return (
        "\n\nThe clients were on other machines. Before its first update, the server learned of a client its name,"
        f" {', '.join(announced)} and {compared}{names}.{limits}"
    )


def _disclosures(record: RunRecord) -> str:
    """Return the table of the values that the server learns in addition to parameters, predictions and updates."""
    disclosures = record.exchanged.get("disclosures")
    if not disclosures:
        return ""
    rows = []
    for item in disclosures:
        privacy = "none"
        if item["dp_epsilon"] is not None:
            privacy = f"ε={item['dp_epsilon']} and δ={item['dp_delta']}, for this value alone"
        rows.append([item["value"], item["per"], item["recipient"], privacy])
    columns = ["Value", "One for each", "Recipient", "Differential privacy"]
    remedy = ""
    if any("word embeddings" in item["value"] for item in disclosures):
        remedy = (
            '\n\nFrozen embeddings (`freeze="embeddings"`) and adapters (LoRA) send no change of the word embeddings.'
            " Sufficient noise hides the change. Clipping, weight decay and narrower dtypes do not hide it."
        )
    whose = "of a client" if record.exchanged.get("secure_aggregation") is None else "of the clients in a sum"
    return f"\n\nThe server also learns these values {whose}:\n\n" + table(columns, rows) + remedy


def _update_fields(record: RunRecord, *method_fields: str) -> str:
    """List the fields that a client sends with an update in addition to parameters or predictions."""
    fields = [*UPDATE_FIELDS, *method_fields]
    if record.federation["evaluate_clients"]:
        fields.append("the metrics of its local evaluation")
    return f"{', '.join(fields[:-1])} and {fields[-1]}"


def _pseudo_samples(record: RunRecord) -> str:
    """Return the results of the audit of the pseudo-samples that the server generated from the clients' models."""
    if not record.pseudo_samples:
        return ""
    rows = [
        [client_id, *(overlap[name] for name in ("own", "others", "start", "moved"))]
        for client_id, overlap in record.pseudo_samples.items()
    ]
    columns = ["Client", "Own pseudo-samples", "Other clients' pseudo-samples", "Initial tokens", "Changed tokens"]
    overlaps = record.pseudo_samples.values()
    num_above = sum(overlap["own"] > max(overlap["others"], overlap["start"]) for overlap in overlaps)
    return (
        "\n\nThe server generated pseudo-samples with the gradients of the clients' models. The audit reads each"
        " position of a pseudo-sample as the token with the nearest word embedding. The table shows the share of these"
        " tokens that occur in the client's examples, for the client's own pseudo-samples, for the other clients'"
        " pseudo-samples and for the tokens from which the client's own pseudo-samples were initialized. The last"
        " two of these shares are the chance level. If the share of the own pseudo-samples is higher than both, the"
        f" pseudo-samples reveal information about the client's text. This is the case for {num_above or 'none'} of"
        f" {plural(len(overlaps), 'client')}. The last column shows the share of tokens that differ from the initial"
        " tokens.\n\n" + table(columns, rows, numeric=True)
    )


def _prediction_exchange(record: RunRecord, public_data: DataFacts) -> str:
    """Return the section for runs in which the clients send predictions."""
    exchanged, federation = record.exchanged, record.federation
    examples = plural(public_data.num_rows or 0, "public example")
    num_values = plural(exchanged["num_values"], "value")
    parameters = "The parameters of the clients' models stayed with the clients."
    if exchanged["parameters_returned"]:
        parameters = f"It also sent the parameters that it had trained, {num_values}."
    elif exchanged["parameters_sent"]:
        parameters += f" The clients received the parameters of the server's model, {num_values}."
    num_passes = exchanged.get("public_passes", 1)
    passes = f", in each of {num_passes} passes over these examples" if num_passes > 1 else ""
    external = ""
    if any(item["recipient"] != "server" for item in exchanged.get("disclosures", ())):
        external = (
            " A function that the user provided computed the weights of the clients. This function may call an"
            " external service. The table below lists its inputs."
        )
    return (
        f"In each round, a sampled client sent the predictions of its model on {examples}, which the server and all"
        f" clients have{passes}. {parameters} With each update, the client also sent"
        f" {_update_fields(record, 'the training statistics that the method requires')}.{external}"
        f" In {plural(federation['num_rounds_run'], 'round')}, all clients together sent"
        f" {format_bytes(exchanged['bytes_up'])} and received {format_bytes(exchanged['bytes_down'])}. No message has"
        " a field for dataset examples. Predictions can still reveal information about the examples that a"
        f" model was trained on.{_before_first_update(record)}{_disclosures(record)}"
    )
