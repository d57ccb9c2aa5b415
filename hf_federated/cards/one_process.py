"""What the card of a split model says where all parties were in one process, which simulates them.

The fields are those of `hf_federated.split.messages` and `hf_federated.split_training.messages`.
"""

from __future__ import annotations

from .crossing import SplitView, client_values, passages, server_saw
from .sections import origin
from .tables import count, plural, size, table


class OneProcess(SplitView):
    """All parties are known, and the parts are joined."""

    who = "clients"
    log_of = ("the whole model", "the steps since the one before it")

    @property
    def summary(self) -> str:
        record, split = self.record, self.record.split
        clients, steps = plural(split["num_clients"], "client"), plural(split["num_steps_run"], "optimizer step")
        return (
            f"{origin(record.model)}, trained in parts with `hf_federated`: {clients} kept the first and last blocks,"
            f" their text and their labels, and a server held the blocks between (split learning, strategy"
            f" `{split['strategy']}`, {steps}). It has {count(record.model.num_parameters)} parameters. The parts are"
            f" joined: it is an ordinary {'adapter' if record.model.adapter else 'model'} again."
        )

    def results(self, step: int, best_by: str | None) -> str:
        if best_by:
            return (
                f"The whole model of optimizer step {step}, the best by `{best_by}`; its weights are the ones saved."
            )
        return f"The whole model after optimizer step {step}."

    @property
    def joined(self) -> str | None:
        split = self.record.split
        every = split["average_every"]
        if every is not None:
            times = split["num_steps_run"] // every
            bodies = ", as are the server's bodies" if split["strategy"] == "server_hierarchical" else ""
            return f"averaged every {plural(every, 'optimizer step')}{bodies}: {plural(times, 'time')} in this run"
        if split["num_clients"] == 1:
            return None
        if split["strategy"] == "serial":
            return "handed over to the next client; saved is what the last one trained"
        return "never averaged while they trained; saved is their mean"

    @property
    def encryption(self) -> str:
        split = self.record.split
        if not split["encryption"]:
            return "none: messages were not sealed"
        keys = plural(split["rotate_keys_every"], "optimizer step")
        return f"AES-256-GCM between each client and the server, under keys that last {keys} of a client"

    @property
    def left(self) -> str:
        record, exchanged = self.record, self.record.exchanged
        if not record.split["num_steps_run"]:
            return "Nothing: no step was trained."
        paragraphs = [
            passages(record),
            self._handed_on,
            f"In all, clients sent {size(exchanged['bytes_up'])} and received {size(exchanged['bytes_down'])} in"
            f" training, with all headers, handshakes and parameters. {self._not_sent}",
            "No message has a field for text, token ids, labels or a loss; one with another field is refused.",
        ]
        return "\n\n".join(paragraphs)

    @property
    def saw(self) -> str:
        split = self.record.split
        if not split["num_steps_run"]:
            return ""
        own = "of its own rows, hidden states behind the server's blocks and gradients by those that it sent"
        rows = [["The server", ", ".join(server_saw(self.record))], ["A client", own]]
        trained = "trained parameters of head and tail, and how many rows they were trained on"
        if self._is_handed_over:
            rows.append(["The next client", f"{trained}, of the one before it"])
        elif self._num_averages:
            rows.append(["Whoever averages", f"{trained}, of every client"])
        if len(rows) > 2:
            rows[-1][1] += (
                ". Not for the server that holds the body, which could read that client's hidden states better"
            )
            if self.record.exchanged["embedding_trained"]:
                rows[-1][1] += ". The embedding is among them: how its rows changed can tell which tokens a text has"
        sealed = ""
        if split["encryption"]:
            sealed = (
                " Messages between a client and the server were sealed, which hides what they hold from others on the"
                " way, and nothing from the server."
            )
            if len(rows) > 2:
                sealed += " Parameters that went elsewhere were not."
        return (
            table(["Who", "Received"], rows)
            + "\n\nThis run had all parties in one process, which simulates them: the table says for whom the"
            f" messages were.{sealed}"
        )

    @property
    def _is_handed_over(self) -> bool:
        return self.hands_over and self.record.exchanged["num_clients"] > 1

    @property
    def _num_averages(self) -> int:
        every = self.record.split["average_every"]
        return 0 if every is None else self.record.split["num_steps_run"] // every

    @property
    def _handed_on(self) -> str:
        """What went from client to client, or to whoever averages."""
        beside = "with its name, the step and how many rows it had trained on"
        if self._is_handed_over:
            return f"At the end of its turn a client handed {client_values(self.record)} to the next one, {beside}."
        if self._num_averages:
            return (
                f"{plural(self._num_averages, 'time')} each client sent {client_values(self.record)} to whoever"
                f" averages, {beside} since the last time, and received the mean."
            )
        return "No client sent parameters to another, or to anybody who averages."

    @property
    def _not_sent(self) -> str:
        """What the parties of one process share without a message."""
        shared = ["what the last client trained" if self.hands_over else "the mean of what the clients trained"]
        shared[0] += ", which became the model that was evaluated and saved"
        if self.record.arguments["max_grad_norm"]:
            shared.append("the norm of the gradients of all who share a step, by which each clips its own")
        return (
            "Not in these numbers, since all parties were in one process: evaluation and generation;"
            f" {'; '.join(shared)}."
        )
