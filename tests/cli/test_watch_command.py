"""`hf-federated watch` shows a run in a terminal and writes its page."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from run_files import SECONDS, START, write_run

from hf_federated.cli.main import main
from hf_federated.cli.watch import describe
from hf_federated.reporting.run_log import LOG_NAME, RunEnd, to_line
from hf_federated.reporting.run_view import read_run
from hf_federated.utils.journal import Journal
from hf_federated.utils.run_files import LOCK_FILE


HOSTILE = "\x1b[2J\x07\r\nsouth"


def test_once_prints_the_run_and_its_state_is_the_exit_code(tmp_path, capsys):
    write_run(tmp_path, num_rounds=2, num_clients=3, names=["north"])
    assert main(["watch", str(tmp_path), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        f"{tmp_path.name}: complete",
        "FedAvg, 3 clients, round 2 of 2 is over.",
        "[##############################] 100 %, 40.0 s a round",
        "bytes: 6.0 kB to clients, 3.0 kB from clients",
        "clients: 3 done",
    ]
    assert [line.split() for line in lines[6:9]] == [
        ["round", "training", "loss", "accuracy", "evaluation", "loss", "clients", "failed", "seconds", "bytes"],
        ["1", "2.0000", "0.5000", "1.0000", "3", "0", "40.0", "4.5", "kB"],
        ["2", "1.0000", "0.6667", "0.5000", "3", "0", "40.0", "4.5", "kB"],
    ]
    assert lines[11].split() == ["north", "done", "0.5000", "2", "2.0", "kB", "1.0", "kB"]
    write_run(tmp_path, ended="failed: RoundFailedError: too few")
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert "failed: RoundFailedError: too few" in capsys.readouterr().out


def test_names_and_errors_of_clients_send_no_control_characters(tmp_path, capsys):
    write_run(tmp_path, names=[HOSTILE], ended=f"failed: {HOSTILE}", logs={f"eval_{HOSTILE}": 1.0})
    main(["watch", str(tmp_path), "--once"])
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\r"} & set(shown)
    assert sum("south" in line for line in shown.splitlines()) == 3  # No name begins another line.


def test_a_small_screen_shows_the_last_rounds_and_the_first_clients(tmp_path):
    write_run(tmp_path, num_rounds=100, num_clients=500, total=200, ended=None)
    lines = describe(read_run(tmp_path), max_lines=24, now=START + 100 * SECONDS + 10)
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert lines[2].endswith("50 %, 40.0 s a round, about 1 h 6 min left")
    assert lines[3] == "last change 10.0 s ago"
    assert any(line.startswith("100 ") for line in lines) and not any(line.startswith("1 ") for line in lines)
    assert lines[-1] == "and 494 more clients"


def test_a_run_of_several_parties_is_found_in_the_folder_of_the_server(tmp_path, capsys):
    write_run(tmp_path / "server")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "server: complete" in capsys.readouterr().out


def test_output_writes_the_page(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert main(["watch", str(tmp_path / "run"), "--once", "--output", str(tmp_path / "page.html")]) == 0
    assert "<title>run: complete</title>" in (tmp_path / "page.html").read_text()
    assert main(["watch", str(tmp_path / "run"), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "--output" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, text", [([], "contains no run"), (["--interval", "0"], "--interval is 0.0, but must be more than 0")]
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, text):
    assert main(["watch", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error and error.count("\n") == 1


def test_a_damaged_log_is_one_line(tmp_path, capsys):
    (tmp_path / LOG_NAME).write_text("{}\n")
    assert main(["watch", str(tmp_path)]) == 2
    assert "is damaged" in capsys.readouterr().err


def continue_run(folder: Path) -> None:
    """Finish two more rounds and then the run, while a reader watches it."""
    for number in (4, 5):
        time.sleep(0.15)
        write_run(folder, num_rounds=number, total=5, ended=None)
    Journal(folder / LOG_NAME).append([to_line(RunEnd(START + 5 * SECONDS, "complete"))])
    (folder / LOCK_FILE).unlink()


def test_lines_follow_the_run_until_it_ends(tmp_path, capsys):
    write_run(tmp_path, num_rounds=3, total=5, ended=None)
    thread = threading.Thread(target=continue_run, args=[tmp_path])
    thread.start()
    assert main(["watch", str(tmp_path), "--interval", "0.02"]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [f"round {number} of 5" for number in range(1, 6)]
    assert lines[0] == "round 1 of 5: loss=2 eval_accuracy=0.5 eval_loss=1 clients=4 failed=0"
    assert lines[-1].endswith(": complete")


def test_a_killed_run_ends_the_view(tmp_path, capsys):
    """A killed process writes nothing, and its lock file remains."""
    write_run(tmp_path, num_rounds=3, total=5, ended=None)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    lock = tmp_path / LOCK_FILE
    lock.write_text(lock.read_text().replace(f"process {os.getpid()}", f"process {process.pid}"))
    threading.Timer(0.2, lambda: (process.kill(), process.wait())).start()
    assert main(["watch", str(tmp_path), "--interval", "0.02"]) == 1
    assert capsys.readouterr().out.endswith(": stopped\n")


def test_a_terminal_is_redrawn_from_its_top(tmp_path):
    pty = pytest.importorskip("pty", reason="Windows has no pseudo terminal")
    write_run(tmp_path, num_rounds=3, total=5, ended=None)
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "hf_federated.cli.main", "watch", str(tmp_path), "--interval", "0.05"]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while b"round 3 of 5" not in shown:
        shown += os.read(controller, 65536)
    continue_run(tmp_path)
    while b": complete\x1b[K" not in shown:
        shown += os.read(controller, 65536)
    assert process.wait() == 0
    screens = shown.split(b"\x1b[H")
    assert len(screens) > 2 and b"round 3 of 5 is over" in screens[1]
