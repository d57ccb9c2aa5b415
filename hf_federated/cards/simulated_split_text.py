"""Text of split model cards for runs that simulate all parties in one process.

The texts describe the fields of the messages in `hf_federated.split.messages` and
`hf_federated.split_training.messages`.
"""

from __future__ import annotations

from .sections import model_origin, results_heading
from .split_text import (
    EMBEDDING_NOTE,
    ENCRYPTION_NOTE,
    RECEIVED_BY_CLIENT,
    SENT_PARAMETERS,
    SplitCardText,
    batch_messages,
    received_by_server,
    trained_values,
)
from .tables import format_bytes, format_count, plural, table


class SimulatedSplitText(SplitCardText):
    """Texts for a run in one process: all parties are known, and the parts are joined."""

    party = "clients"
    log_sources = ("the full model", "the steps since the previous log")

    def summary(self) -> str:
        """Describe the saved model and how it was trained."""
        record, split = self.record, self.record.split
        clients, steps = plural(split["num_clients"], "client"), plural(split["num_steps_run"], "optimizer step")
        return (
            f"{model_origin(record.model)}, trained with split learning (`hf_federated`, strategy"
            f" `{split['strategy']}`, {steps}). The first and last blocks, the text and the labels stayed with"
            f" {clients}, and a server held the blocks in between. The model has"
            f" {format_count(record.model.num_parameters)} parameters. The parts are joined into an ordinary"
            f" {'adapter' if record.model.adapter else 'model'}."
        )

    def results_heading(self) -> str:
        """Return the sentence that introduces the results, with the step and the metric that selected the model."""
        return results_heading(self.record.results, "full model", "optimizer step")

    def combination(self) -> str | None:
        """Describe how the trained parts of the clients were combined. `None` if there was nothing to combine."""
        split = self.record.split
        every = split["average_every"]
        if every is not None:
            bodies = ", together with the server's bodies" if split["strategy"] == "server_hierarchical" else ""
            times = plural(self._num_averages, "time")
            return f"averaged every {plural(every, 'optimizer step')}{bodies}: {times} in this run"
        if split["num_clients"] == 1:
            return None
        if split["strategy"] == "serial":
            return "passed on to the next client; the saved parts are those of the last client"
        return "not averaged during training; the saved parts are the mean of all clients"

    def encryption(self) -> str:
        """Describe how messages were encrypted."""
        split = self.record.split
        if not split["encryption"]:
            return "none: messages were not encrypted"
        rotation = plural(split["rotate_keys_every"], "optimizer step")
        return f"AES-256-GCM between each client and the server; each key is used for {rotation} of the client"

    def messages(self) -> str:
        """Describe the messages between clients and server, including each field."""
        record, exchanged = self.record, self.record.exchanged
        if not record.split["num_steps_run"]:
            return "Nothing was exchanged, because no training step was run."
        paragraphs = [
            batch_messages(record),
            self._parameter_transfer(),
            f"During training, clients sent {format_bytes(exchanged['bytes_up'])} and received"
            f" {format_bytes(exchanged['bytes_down'])} in total, including all headers, handshakes and parameters."
            f" {self._uncounted()}",
            "No message has a field for text, token ids, labels or a loss. Messages with other fields are rejected.",
        ]
        return "\n\n".join(paragraphs)

    def receivers(self) -> str:
        """Return the table of the information that each party received, followed by notes."""
        split = self.record.split
        if not split["num_steps_run"]:
            return ""
        rows = [["The server", "; ".join(received_by_server(self.record))], ["A client", RECEIVED_BY_CLIENT]]
        if self._is_handed_over:
            rows.append(["The next client", f"{SENT_PARAMETERS} from the previous client"])
        elif self._num_averages:
            rows.append(["The aggregator", f"{SENT_PARAMETERS} from every client"])
        if len(rows) > 2:
            rows[-1][1] += (
                ". They are not intended for the server that holds the body, because this server could use them to"
                " read the client's hidden states better"
            )
            if self.record.exchanged["embedding_trained"]:
                rows[-1][1] += EMBEDDING_NOTE
        encryption = ""
        if split["encryption"]:
            encryption = ENCRYPTION_NOTE.format("a client")
            if len(rows) > 2:
                encryption += " Parameters that were sent to other parties were not encrypted."
        return (
            table(["Party", "Received"], rows)
            + "\n\nThis run simulated all parties in one process. The table lists the"
            f" intended receivers of the messages.{encryption}"
        )

    @property
    def _is_handed_over(self) -> bool:
        return self.hands_over and self.record.exchanged["num_clients"] > 1

    @property
    def _num_averages(self) -> int:
        every = self.record.split["average_every"]
        return 0 if every is None else self.record.split["num_steps_run"] // every

    def _parameter_transfer(self) -> str:
        """Describe the parameters that clients sent to other clients or to the aggregator."""
        metadata = "with its name, the step and the number of examples it had trained on"
        values = trained_values(self.record)
        if self._is_handed_over:
            return f"At the end of its turn, a client sent {values} to the next client, {metadata}."
        if self._num_averages:
            return (
                f"Each client sent {values} to the aggregator {plural(self._num_averages, 'time')}, {metadata} since"
                " the previous average, and received the mean."
            )
        return "No client sent parameters to another client or to an aggregator."

    def _uncounted(self) -> str:
        """List the information that the simulated parties share without a message."""
        shared = ["the parts of the last client" if self.hands_over else "the mean of the clients' trained parts"]
        shared[0] += ", which became the evaluated and saved model"
        if self.record.arguments["max_grad_norm"]:
            shared.append(
                "the gradient norm over all participants of a step, which each of them uses to clip gradients"
            )
        return (
            "Because all parties ran in one process, these numbers do not include: evaluation and generation;"
            f" {'; '.join(shared)}."
        )
