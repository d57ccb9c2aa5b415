"""What the card of a networked client says: of its own part alone, and of what went through the server to others.

The fields are those of `crossing.py` and, beside them, of `hf_federated.split_training.messages`.
"""

from __future__ import annotations

from typing import Any

from .crossing import SplitView, client_values, passages, server_saw
from .sections import origin
from .tables import count, plural, size, table


MERGE = "hf-federated split-merge path/to/this/repository path/to/the/servers/part --output-dir whole"


class NetworkedClient(SplitView):
    """One client tells of its own part, rows and bytes, and of what it handed on."""

    who = "this client"
    log_of = (
        "this client's head and tail, as they were then, with the server's blocks",
        "this client's steps since the one before it",
    )

    @property
    def summary(self) -> str:
        split = self.record.split
        number = split["num_clients"]
        clients = "each client" if number is None else f"each of {plural(number, 'client')}"
        whole = "adapter" if self.record.model.adapter else "model"
        return (
            f"{origin(self.record.model)}, trained in parts with `hf_federated` in a networked run, and of it one"
            f" client's part alone: {clients} kept the first and last blocks, its text and its labels, and a server"
            f" that was reached over a link held the blocks between (split learning, strategy `{split['strategy']}`,"
            f" {plural(split['num_steps_run'], 'optimizer step')}). This client's process had"
            f" {count(self.record.model.num_parameters)} parameters, and none of the server's. `hf-federated"
            f" split-merge` joins what it trained with the server's part: then it is an ordinary {whole}."
        )

    @property
    def texts(self) -> dict[str, str]:
        usage = f"By itself the part cannot be loaded. With the server's:\n\n```bash\n{MERGE}\n```"
        heading = "Training rows are this client's; what other clients train on is not known here."
        return {"usage": usage, "data_heading": heading}

    def results(self, step: int, best_by: str | None) -> str:
        return f"With this client's head and tail and the server's blocks, after optimizer step {step}."

    @property
    def joined(self) -> str | None:
        split, network = self.record.split, self._network
        if not split["num_steps_run"] or split["num_clients"] in (None, 1):
            return None
        every = split["average_every"]
        if every is not None:
            way = f"averaged every {plural(every, 'optimizer step')}"
            if not network["is_finished"]:
                return f"{way}, until the run ended before its last step; saved is this client's own"
            return f"{way}, and at the end; saved is the mean"
        if split["strategy"] == "serial":
            way = "handed over to the next client"
            if not network["is_finished"]:
                return f"{way}, until the run ended before its last step; saved is this client's own"
            return f"{way}, and at the end to all; saved is what the last one trained"
        if not network["is_finished"]:
            return "never averaged, since the run ended before its last step; saved is this client's own"
        return "never averaged while they trained; saved is their mean"

    @property
    def encryption(self) -> str | None:
        sealed = {True: "AES-256-GCM between this client and the server", None: None}
        otherwise = "messages were not sealed on top of what their transport does"
        return sealed.get(self._network.get("is_sealed"), otherwise)

    @property
    def num_late(self) -> int | None:
        return self._network["num_late"] or None if self._network else None

    @property
    def left(self) -> str:
        exchanged, network = self.record.exchanged, self._network
        if not self.record.split["num_steps_run"]:
            return "No hidden states: no step was trained."
        added = "headers and envelopes"
        if network["is_sealed"]:
            added = "headers, envelopes and handshakes, what sealing adds"
        paragraphs = [
            passages(self.record),
            "Of the run it told the server, with its name: a digest of the settings that all must have alike, how many"
            " optimizer steps its rows make in an epoch, of which steps it has checkpoints, and public keys for other"
            " clients; at a step, how many batches and rows it takes and the squared norm of its gradients; and when"
            " it was done. It was told the names of all clients, their optimizer steps in an epoch and their public"
            " keys, and the norm of the gradients of all who share a step.",
            self._handed_on,
            f"In all, this client sent {size(exchanged['bytes_up'])} and received {size(exchanged['bytes_down'])},"
            f" with all {added}, and what it evaluated and generated before this card was written."
            " Not in these numbers is what a transport adds below its messages, and what it says to connect: a"
            " `GrpcLink` says who it is, and compares config and digests of the checkpoint, cut, adapter and"
            " settings.",
            "No message has a field for text, token ids, labels or a loss; one with another field is refused.",
        ]
        return "\n\n".join(paragraphs)

    @property
    def saw(self) -> str:
        split = self.record.split
        if not split["num_steps_run"]:
            return ""
        server: list[str] = [*server_saw(self.record), "the squared norm of this client's gradients"]
        own = [
            "of its own rows, hidden states behind the server's blocks and gradients by those that it sent",
            "the norm of the gradients of all who share a step",
        ]
        rows: list[tuple[str, list[str]]] = [("The server", server), ("This client", own)]
        if self._has_peers:
            server.append("envelopes for other clients, which it cannot read")
            own.append("names, public keys and optimizer steps in an epoch of all clients")
            trained = "trained parameters of head and tail, and how many rows they were trained on"
            if self.hands_over:
                rows.append(("The next client", [f"{trained}, of the one before it"]))
                rows.append(("All clients", [f"{trained}, of the last one at the end of the run"]))
            else:
                rows.append(("The first client", [f"{trained}, of every client when it averages"]))
                rows.append(("All clients", ["the mean of these parameters"]))
        cells = [[who, ", ".join(what)] for who, what in rows]
        if self._has_peers and self.record.exchanged["embedding_trained"]:
            cells[2][1] += ". The embedding is among them: how its rows changed can tell which tokens a text has"
        network = self._network
        sealed = ""
        if network["is_sealed"]:
            sealed = (
                " Messages between this client and the server were sealed, which hides what they hold from others on"
                " the way, and nothing from the server."
            )
        return (
            table(["Who", "Received"], cells)
            + "\n\nThe parties of this run were linked by these messages alone. One client wrote this card: it tells"
            f" what this client sent and for whom, not what others did with it.{sealed}"
        )

    @property
    def _network(self) -> dict[str, Any]:
        return self.record.network or {}

    @property
    def _has_peers(self) -> bool:
        number = self.record.split["num_clients"]
        return number is not None and number > 1

    @property
    def _handed_on(self) -> str:
        """What goes from client to client, through the server."""
        if not self._has_peers:
            return "There was no other client: parameters went nowhere."
        split, values = self.record.split, client_values(self.record)
        beside = "with its name, the optimizer step and how many rows it had trained on"
        if self.hands_over:
            way = (
                f"At the end of its turn a client sends the next one {values}, {beside}; at the end of the run the"
                " last one sends them to all others"
            )
        else:
            every = split["average_every"]
            when = "At" if every is None else f"Every {plural(every, 'optimizer step')} and at"
            way = (
                f"{when} the end of the run each client sends the first one {values}, {beside}, and receives the mean"
            )
        return (
            f"{way}. They travel through the server in envelopes: encrypted with AES-256-GCM under a key that is"
            " wrapped with RSA for the client that reads them, and signed by the one that writes. The server sees from"
            " whom to whom, at which step and how many bytes, and cannot read them, if each client was given the right"
            " fingerprints of the others and none of them works with the server."
        )
