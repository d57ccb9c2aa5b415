"""Text of split model cards that a networked client writes about its own part.

The texts describe the fields of the messages in `hf_federated.split.messages` and
`hf_federated.split_training.messages`.
"""

from __future__ import annotations

from typing import Any

from .sections import model_origin
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


MERGE_COMMAND = "hf-federated split-merge path/to/this/repository path/to/the/servers/part --output-dir whole"


class NetworkedSplitText(SplitCardText):
    """Texts for one client of a networked run: its own part, examples, bytes and sent parameters."""

    party = "this client"
    log_sources = (
        "this client's current head and tail with the server's blocks",
        "this client's steps since the previous log",
    )

    def summary(self) -> str:
        """Describe the saved model and how it was trained."""
        split = self.record.split
        num_clients = split["num_clients"]
        clients = "Each client" if num_clients is None else f"Each of {plural(num_clients, 'client')}"
        whole = "adapter" if self.record.model.adapter else "model"
        return (
            f"{model_origin(self.record.model)}, trained with split learning over a network (`hf_federated`, strategy"
            f" `{split['strategy']}`, {plural(split['num_steps_run'], 'optimizer step')}). It contains the part of one"
            f" client only. {clients} kept the first and last blocks, its text and its labels, and a server, reached"
            " over a link, held the blocks in between. The process of this client had"
            f" {format_count(self.record.model.num_parameters)} parameters and no parameters of the server."
            f" `hf-federated split-merge` joins the trained part with the server's part into an ordinary {whole}."
        )

    def template_fields(self) -> dict[str, str]:
        usage = (
            "The part of a single client cannot be loaded on its own. Merge it with the server's part first:"
            f"\n\n```bash\n{MERGE_COMMAND}\n```"
        )
        heading = (
            "The training examples are those of this client. The training data of the other clients is not known to"
            " this client."
        )
        return {"usage": usage, "data_heading": heading}

    def results_heading(self) -> str:
        """Return the sentence that introduces the results, with the step."""
        step = self.record.results["step"]
        return f"Results of this client's head and tail with the server's blocks, after optimizer step {step}."

    def combination(self) -> str | None:
        """Describe how the trained parts of the clients were combined. `None` if there was nothing to combine."""
        split, network = self.record.split, self._network
        if not split["num_steps_run"] or split["num_clients"] in (None, 1):
            return None
        every = split["average_every"]
        own_part = "the run ended before its last step; the saved part is this client's own"
        if every is not None:
            during = f"averaged every {plural(every, 'optimizer step')}"
            end = "and at the end; the saved part is the mean"
        elif split["strategy"] == "serial":
            during = "passed on to the next client"
            end = "and at the end to all clients; the saved part is that of the last client"
        elif network["is_finished"]:
            return "not averaged during training; the saved part is the mean of all clients"
        else:
            return f"never averaged, because {own_part}"
        return f"{during}, {end}" if network["is_finished"] else f"{during}, until {own_part}"

    def encryption(self) -> str | None:
        """Describe how messages were encrypted."""
        descriptions = {True: "AES-256-GCM between this client and the server", None: None}
        unencrypted = "none in addition to the encryption of the transport, if any"
        return descriptions.get(self._network.get("is_sealed"), unencrypted)

    def num_late(self) -> int | None:
        return self._network["num_late"] or None if self._network else None

    def messages(self) -> str:
        """Describe the messages between clients and server, including each field."""
        exchanged, network = self.record.exchanged, self._network
        if not self.record.split["num_steps_run"]:
            return "No hidden states were exchanged, because no training step was run."
        overhead = "headers and envelopes"
        if network["is_sealed"]:
            overhead = "headers, envelopes and handshakes, the overhead of encryption"
        paragraphs = [
            batch_messages(self.record),
            "To coordinate the run, this client sent the server, with its name: a digest of the settings that must be"
            " identical for all parties, its number of optimizer steps per epoch, the steps of its checkpoints and its"
            " public keys for other clients. In each step, it sent its number of batches and examples and the squared"
            " norm of its gradients. At the end, it sent a message that it was done. This client received the names of"
            " all clients, their numbers of optimizer steps per epoch and their public keys, and the gradient norm"
            " over all participants of a step.",
            self._parameter_transfer(),
            f"In total, this client sent {format_bytes(exchanged['bytes_up'])} and received"
            f" {format_bytes(exchanged['bytes_down'])}, including all {overhead}, and the evaluation and generation"
            " before this card was written. These numbers do not include the overhead of the transport and the"
            " messages that open a connection. To connect, a `GrpcLink` sends the identity of the client, and compares"
            " the config and digests of the checkpoint, cut, adapter and settings.",
            "No message has a field for text, token ids, labels or a loss. Messages with other fields are rejected.",
        ]
        return "\n\n".join(paragraphs)

    def receivers(self) -> str:
        """Return the table of the information that each party received, followed by notes."""
        split = self.record.split
        if not split["num_steps_run"]:
            return ""
        server: list[str] = [*received_by_server(self.record), "the squared norm of this client's gradients"]
        client = [RECEIVED_BY_CLIENT, "the gradient norm over all participants of a step"]
        rows: list[tuple[str, list[str]]] = [("The server", server), ("This client", client)]
        if self._has_peers:
            server.append("envelopes for other clients, which it cannot read")
            client.append("names, public keys and numbers of optimizer steps per epoch of all clients")
            if self.hands_over:
                rows.append(("The next client", [f"{SENT_PARAMETERS} from the previous client"]))
                rows.append(("All clients", [f"{SENT_PARAMETERS} from the last client at the end of the run"]))
            else:
                rows.append(("The first client", [f"{SENT_PARAMETERS} from every client when it averages"]))
                rows.append(("All clients", ["the mean of these parameters"]))
        cells = [[party, "; ".join(received)] for party, received in rows]
        if self._has_peers and self.record.exchanged["embedding_trained"]:
            cells[2][1] += EMBEDDING_NOTE
        encryption = ENCRYPTION_NOTE.format("this client") if self._network["is_sealed"] else ""
        return (
            table(["Party", "Received"], cells) + "\n\nThese messages were the only link between the parties of this"
            " run. This card was written by one client. It describes what this client sent and to whom, not how"
            f" other parties used it.{encryption}"
        )

    @property
    def _network(self) -> dict[str, Any]:
        return self.record.network or {}

    @property
    def _has_peers(self) -> bool:
        num_clients = self.record.split["num_clients"]
        return num_clients is not None and num_clients > 1

    def _parameter_transfer(self) -> str:
        """Describe the parameters that clients send to other clients through the server."""
        if not self._has_peers:
            return "There was no other client. No parameters were sent."
        split, values = self.record.split, trained_values(self.record)
        metadata = "with its name, the optimizer step and the number of examples it had trained on"
        if self.hands_over:
            transfer = (
                f"At the end of its turn, a client sends {values} to the next client, {metadata}. At the end of the"
                " run, the last client sends them to all other clients."
            )
        else:
            every = split["average_every"]
            times = "At" if every is None else f"Every {plural(every, 'optimizer step')} and at"
            transfer = (
                f"{times} the end of the run, each client sends {values} to the first client, {metadata}, and receives"
                " the mean."
            )
        return (
            f"{transfer} The parameters are sent through the server in envelopes. An envelope is encrypted with"
            " AES-256-GCM under a key that is wrapped with RSA for the receiving client, and it is signed by the"
            " sending client. The server sees the sender, the receiver, the step, the number of bytes, and whether the"
            " parameters are for all other clients. If a client was removed from the run, the server names it to the"
            " clients that wait for it. It cannot"
            " read the parameters if each client was given the correct fingerprints of the other clients and no client"
            " colludes with the server."
        )
