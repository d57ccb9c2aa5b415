"""The progress of a round: lines in the log, a bar on a terminal, and a bar in a notebook."""

from __future__ import annotations

import importlib
import io
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transformers
from federations import CLIENTS, build_federation
from tiny import rows, same_weights, tiny_model
from transformers import ProgressCallback, Trainer, TrainerCallback

from hf_federated import ClientSpec, FederatedDataset
from hf_federated.engines import LocalEngine
from hf_federated.messages import Message
from hf_federated.server import progress


class Records(logging.Handler):
    """Keeps the messages of the log of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def starting_with(self, prefix: str) -> list[str]:
        return [message for message in self.messages if message.startswith(prefix)]


@pytest.fixture
def info_log() -> Iterator[Records]:
    """The log of transformers at the verbosity INFO."""
    records, verbosity = Records(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    transformers.logging.add_handler(records)
    yield records
    transformers.logging.remove_handler(records)
    transformers.logging.set_verbosity(verbosity)


# ---- Lines in the log


def test_log_has_one_line_for_each_client_and_round(tmp_path, info_log) -> None:
    trainer = build_federation(tmp_path, num_rounds=2, federation={"log_clients": True})
    trainer.train()
    lines = info_log.starting_with("round ")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    expected = [
        f"round {round + 1}/2, client {client_id} ({position}/3): loss {logs[round][f'client/{client_id}/loss']:.4g}, "
        f"{len(CLIENTS[client_id])} examples, {'1 step' if client_id == 'south' else '2 steps'}, "
        for round in range(2)
        for position, client_id in enumerate(CLIENTS, start=1)
    ]
    assert [re.sub(r"\d+\.\d s$", "", line) for line in lines] == expected


def test_no_line_is_written_below_the_verbosity_info(tmp_path, capfd) -> None:
    build_federation(tmp_path, num_rounds=1).train()
    assert "client" not in capfd.readouterr().err


class RepliesInReverse(LocalEngine):
    """Sends all messages before the first reply, and yields the replies in reverse order, as a network may do."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[Message] = []

    def _transmit(self, client_id, request) -> None:
        self._messages.append(self._dispatch(client_id, request))

    def _receive(self, clients, until) -> tuple[str, Message]:
        message = self._messages.pop()
        return message.client_id, self._deliver(message)


def test_lines_count_replies_that_arrive_in_any_order(tmp_path, info_log) -> None:
    build_federation(tmp_path, num_rounds=1, trainer={"engine": RepliesInReverse()}).train()
    lines = info_log.starting_with("round ")
    assert [line.partition(":")[0] for line in lines] == [
        f"round 1/1, client {client_id} ({position}/3)"
        for position, client_id in enumerate(reversed(CLIENTS), start=1)
    ]


# ---- The announcement of a training


class Speaks(Trainer):
    """Writes its own messages to the log of `Trainer` in every step of a client."""

    def compute_loss(self, model, inputs, **kwargs):
        logger = transformers.logging.get_logger("transformers.trainer")
        logger.info("a message at INFO")
        logger.warning("  Num examples: a message at WARNING")
        return super().compute_loss(model, inputs, **kwargs)


def test_client_does_not_announce_its_training_but_its_messages_are_shown(tmp_path, info_log) -> None:
    clients = FederatedDataset.from_dict(CLIENTS)
    trainer = build_federation(
        tmp_path,
        num_rounds=2,
        base=Speaks,
        federation={"evaluate_clients": True},
        trainer={"eval_dataset": clients},
        eval_strategy="epoch",
    )
    trainer.train()
    assert not info_log.starting_with("***** Running training *****")
    assert len(info_log.starting_with("***** Running federated training *****")) == 1
    assert len(info_log.starting_with("\n\nTraining completed.")) == 1
    # One evaluation of the global model in each round, and none of a client.
    assert len(info_log.starting_with("\n***** Running Evaluation *****")) == 2
    num_batches = 2 * (2 + 1 + 2)
    num_eval_batches = 2 * (5 + 2 + 1 + 2)
    for message in ("a message at INFO", "  Num examples: a message at WARNING"):
        assert info_log.messages.count(message) == num_batches + num_eval_batches


def test_announcement_of_plain_trainer_is_shown_after_a_federation(tmp_path, info_log) -> None:
    trainer = build_federation(tmp_path, num_rounds=1)
    trainer.train()
    Trainer(model=tiny_model(), args=trainer.args, train_dataset=rows(4)).train()
    assert len(info_log.starting_with("***** Running training *****")) == 1


def test_announcement_describes_the_federation(tmp_path, info_log) -> None:
    """North has 8 examples, south 4 and west 6. A step has 2 batches of 2 examples."""
    trainer = build_federation(
        tmp_path, num_rounds=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        federation={"clients_per_round": 2, "local_epochs": 2}, save_strategy="steps",
    )  # fmt: skip
    trainer.train()
    cohort = trainer._federation_setup.sampler(0)
    num_steps = {2 * -(-len(CLIENTS[client_id]) // 4) for client_id in cohort}
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    start = info_log.messages.index("***** Running federated training *****")
    assert info_log.messages[start + 1 : start + 13] == [
        "  Num rounds = 3",
        "  Num clients = 3",
        "  Num clients per round = 2",
        "  Num examples of all clients = 18",
        f"  Num examples of the clients of round 1 = {sum(len(CLIENTS[client_id]) for client_id in cohort)}",
        "  Num local epochs = 2",
        f"  Num local steps = {' to '.join(str(number) for number in sorted(num_steps))}",
        "  Instantaneous batch size per device = 2",
        "  Total train batch size of a client (w. parallel, distributed & accumulation) = 4",
        "  Gradient Accumulation steps = 2",
        f"  Number of trainable parameters = {num_parameters:,}",
        f"  Number of exchanged values = {num_parameters:,}",
    ]


def test_announcement_of_a_resumed_training_names_the_finished_rounds(tmp_path, info_log) -> None:
    federation = {"local_steps": 3, "max_rows_per_round": 5}
    build_federation(tmp_path, num_rounds=2, federation=federation, save_strategy="steps").train()
    info_log.messages.clear()
    trainer = build_federation(tmp_path, num_rounds=3, federation=federation, save_strategy="steps")
    trainer.train(resume_from_checkpoint=True)
    assert "  Resuming after round 2" in info_log.messages
    assert "  Num local steps = 3" in info_log.messages
    # North and west draw 5 examples each, and south has 4.
    assert "  Num examples of the clients of round 3 = 14" in info_log.messages
    assert not info_log.starting_with("  Resuming training from checkpoint")
    assert not info_log.starting_with("  Fast-forwarding")


# ---- Bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def draw_always(monkeypatch) -> None:
    for bar in (progress._TerminalBar, progress._NotebookBar):
        monkeypatch.setattr(bar, "interval", 0.0)


@pytest.fixture
def open_terminal(monkeypatch, draw_always) -> Callable[[], Terminal]:
    """Call `open_terminal()` in the test, because pytest sets `sys.stderr` after the fixtures."""

    def open_terminal() -> Terminal:
        output = Terminal()
        monkeypatch.setattr(sys, "stderr", output)
        monkeypatch.setenv("COLUMNS", "200")
        return output

    return open_terminal


def bar_texts(output: Terminal) -> list[str]:
    """The texts of the bar of the clients, in order."""
    return [match.strip() for match in re.findall(r"\r(round [^|]*)\|", output.getvalue())]


def test_terminal_shows_clients_and_steps_below_the_bar_of_the_trainer(tmp_path, open_terminal, info_log) -> None:
    terminal = open_terminal()
    build_federation(tmp_path, num_rounds=1, disable_tqdm=False).train()
    assert bar_texts(terminal) == [
        "round 1: 0/3 clients",
        "round 1: 0/3 clients · north",
        "round 1: 0/3 clients · north · step 1/2",
        "round 1: 0/3 clients · north · step 2/2",
        "round 1: 1/3 clients · south",
        "round 1: 1/3 clients · south · step 1/1",
        "round 1: 2/3 clients · west",
        "round 1: 2/3 clients · west · step 1/2",
        "round 1: 2/3 clients · west · step 2/2",
    ]
    assert "| 1/1 [" in terminal.getvalue()
    assert not info_log.starting_with("round ")


def test_terminal_shows_the_evaluation_of_clients_and_long_ids_are_shortened(tmp_path, open_terminal) -> None:
    terminal = open_terminal()
    clients = {"a" * 50: rows(4), "b": rows(4, seed=1)}
    trainer = build_federation(
        tmp_path,
        clients,
        num_rounds=1,
        federation={"evaluate_clients": True},
        trainer={"eval_dataset": FederatedDataset.from_dict(clients)},
        disable_tqdm=False,
        eval_strategy="epoch",
    )
    trainer.train()
    short = "a" * 29 + "…"
    assert f"round 1: 0/2 clients · {short} · step 1/1" in bar_texts(terminal)
    assert [text for text in bar_texts(terminal) if "evaluation" in text] == [
        "round 1, evaluation: 0/2 clients",
        f"round 1, evaluation: 0/2 clients · {short}",
        "round 1, evaluation: 1/2 clients · b",
    ]


def test_terminal_shows_the_predictions_of_a_distillation(tmp_path, open_terminal) -> None:
    terminal = open_terminal()
    trainer = build_federation(
        tmp_path,
        num_rounds=1,
        federation={"distillation": "dsfl"},
        trainer={"public_dataset": rows(4, seed=3).remove_columns("labels")},
        disable_tqdm=False,
    )
    trainer.train()
    texts = [text for text in bar_texts(terminal) if "prediction" in text]
    names = ["", *(f" · {client_id}" for client_id in CLIENTS)]
    assert texts == [f"round 1, prediction: {max(number - 1, 0)}/3 clients{name}" for number, name in enumerate(names)]


class FailsInSouth(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.max_steps == 1:
            raise OSError("the disk is full")


def test_failed_client_counts_as_done_and_replies_may_arrive_in_any_order(tmp_path, open_terminal) -> None:
    terminal = open_terminal()
    trainer = build_federation(
        tmp_path,
        num_rounds=1,
        trainer={"engine": RepliesInReverse(), "client_callbacks": [FailsInSouth()]},
        disable_tqdm=False,
    )
    trainer.train()
    # All messages are sent first. The bar names the client that has waited longest.
    counted = [text for text in bar_texts(terminal) if "step" not in text]
    assert counted == ["round 1: 0/3 clients", *(f"round 1: {number}/3 clients · north" for number in (0, 0, 0, 1, 2))]


@pytest.mark.parametrize("case", ["file", "no bar"])
def test_output_without_a_bar_has_lines(tmp_path, monkeypatch, info_log, case) -> None:
    """A file is no terminal, and a user can remove the bar of the trainer."""
    output = io.StringIO() if case == "file" else Terminal()
    monkeypatch.setattr(sys, "stderr", output)
    trainer = build_federation(tmp_path, num_rounds=1, disable_tqdm=False)
    if case == "no bar":
        trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert len(info_log.starting_with("round 1/1, client ")) == 3
    assert "clients" not in output.getvalue()


@pytest.mark.parametrize("num_clients", [1, 3])
def test_bar_does_not_change_the_weights(tmp_path, open_terminal, num_clients) -> None:
    terminal = open_terminal()
    clients = dict(list(CLIENTS.items())[:num_clients])
    with_bar = build_federation(tmp_path / "a", clients, disable_tqdm=False)
    with_bar.train()
    without = build_federation(tmp_path / "b", clients)
    without.train()
    assert bar_texts(terminal)
    assert same_weights(with_bar.model, without.model)


# ---- Notebooks


class Output:
    """The output of a notebook cell: the last HTML of each display."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, html: Any, display_id: bool = False) -> Output:
        self.update(html)
        return self

    def update(self, html: Any) -> None:
        self.shown.append(" ".join(html.split()))


@pytest.fixture
def notebook(monkeypatch, draw_always) -> Iterator[tuple[Output, type[TrainerCallback]]]:
    """The output of a notebook and the callback of transformers that writes to it, without IPython or a browser."""
    output = Output()
    display = types.ModuleType("IPython.display")
    display.display, display.HTML = output.display, str
    package = types.ModuleType("IPython")
    package.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.delitem(sys.modules, "transformers.utils.notebook", raising=False)
    module = importlib.import_module("transformers.utils.notebook")
    yield output, module.NotebookProgressCallback
    sys.modules.pop("transformers.utils.notebook", None)


def test_notebook_shows_clients_and_steps_below_the_table(tmp_path, notebook, info_log) -> None:
    output, callback = notebook
    trainer = build_federation(
        tmp_path,
        num_rounds=2,
        trainer={"eval_dataset": rows(8), "callbacks": [callback]},
        eval_strategy="epoch",
    )
    trainer.train()
    bars = [html for html in output.shown if "round " in html]
    counted = [re.search(r"(round \d), clients <progress value='(\d)' max='3'.*\[(.*)\]", html) for html in bars]
    assert [(match[1], match[2], match[3].rpartition(", ")[2]) for match in counted if match] == [
        (f"round {round}", str(number), text)
        for round in (1, 2)
        for number, text in [
            (0, "north"), (0, "north · step 1/2"), (0, "north · step 2/2"), (1, "south"), (1, "south · step 1/1"),
            (2, "west"), (2, "west · step 1/2"), (2, "west · step 2/2"),
        ]
    ]  # fmt: skip
    assert "None" not in "".join(output.shown)
    # After a round, the table of metrics is shown without the bar.
    assert "round " not in output.shown[-1] and "Validation Loss" in output.shown[-1]
    assert not info_log.starting_with("round ")


def test_client_with_its_own_arguments_is_counted(tmp_path, info_log) -> None:
    trainer = build_federation(tmp_path, num_rounds=1)
    args = trainer.args
    trainer = build_federation(
        tmp_path,
        num_rounds=1,
        federation={"distillation": "dsfl"},
        trainer={
            "public_dataset": rows(4, seed=3).remove_columns("labels"),
            "clients": {"north": ClientSpec(args=args)},
        },
    )
    trainer.train()
    assert "  Num clients with their own training arguments = 1" in info_log.messages
    assert not info_log.starting_with("  Number of exchanged values")
