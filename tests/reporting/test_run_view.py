"""What a reader sees of a run: from its log, from the status of a server, or from a checkpoint."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from run_files import SECONDS, START, write_run

from hf_federated.reporting.run_log import CLIENTS_NAME, LOG_NAME
from hf_federated.reporting.run_page import notebook_frame, run_page, write_run_page
from hf_federated.reporting.run_view import read_run
from hf_federated.utils.run_files import LOCK_FILE


HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e"


def test_time_left_is_the_median_round_times_the_rounds_left(tmp_path):
    write_run(tmp_path, num_rounds=3, total=10, ended=None)
    run = read_run(tmp_path)
    end = START + 3 * SECONDS
    assert run.seconds_per_round() == SECONDS
    assert run.seconds_left(end) == 7 * SECONDS
    assert run.seconds_left(end + 15) == 7 * SECONDS - 15
    # A round that takes longer than usual does not make the time left negative or shorter.
    assert run.seconds_left(end + 1000) == 6 * SECONDS


@pytest.mark.parametrize(
    "holder, state",
    [
        (f"process {2**22 - 3} on {socket.gethostname()}", "stopped"),
        (f"process 1 on {socket.gethostname()}", "running"),
        ("process 5 on another-host", "running"),
        ("", "stopped"),
    ],
)
def test_a_run_lasts_while_its_process_lives(tmp_path, holder, state):
    write_run(tmp_path, ended=None, total=9)
    (tmp_path / LOCK_FILE).write_text(holder)
    assert read_run(tmp_path).state == state


def test_the_server_names_absent_late_and_expelled_clients(tmp_path):
    write_run(tmp_path, ended=None, total=9, num_clients=5)
    states = ["working", "late", "absent", "expelled", "waiting"]
    clients = {f"site-{number}": {"state": state} for number, state in enumerate(states)}
    (tmp_path / "network").mkdir()
    status = {"clients": clients, "updated_at": START + 50}
    (tmp_path / "network" / "status.json").write_text(json.dumps(status))
    run = read_run(tmp_path)
    assert [client.state for client in run.clients.values()] == ["training", "late", "absent", "expelled", "done"]
    assert run.counts() == {"expelled": 1, "late": 1, "training": 1, "absent": 1, "done": 1}
    assert read_run(tmp_path).clients["site-1"].bytes_down == 3000
    # The status of a server that ran before this run.
    (tmp_path / "network" / "status.json").write_text(json.dumps({**status, "updated_at": START - 50}))
    assert read_run(tmp_path).counts() == {"done": 5}


def test_clients_of_a_killed_run_do_not_train(tmp_path):
    write_run(tmp_path, ended=None, total=9)
    path = tmp_path / CLIENTS_NAME
    path.write_text(path.read_text().replace('"done"', '"training"'))
    assert read_run(tmp_path).counts() == {"training": 4}
    (tmp_path / LOCK_FILE).unlink()
    assert read_run(tmp_path).counts() == {"waiting": 4}


def test_a_run_without_a_log_is_read_from_its_last_checkpoint(tmp_path):
    for number in (2, 10):
        checkpoint = tmp_path / f"checkpoint-{number}"
        checkpoint.mkdir()
        history = [
            {
                "step": step,
                "epoch": step,
                "loss": 1 / step,
                "federated/num_clients": 3,
                "federated/bytes_up": 10 * step,
            }
            for step in range(1, number + 1)
        ]
        state = {"log_history": history, "max_steps": 12}
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    run = read_run(tmp_path)
    assert (run.state, run.num_finished, run.start.num_rounds, run.step_name) == ("saved", 10, 12, "round")
    assert run.curve("loss") == [(step, 1 / step) for step in range(1, 11)]
    assert (run.bytes_up, run.rounds[0].num_done) == (100, 3)


@pytest.mark.parametrize(
    "content",
    [
        "[1]\n",
        '{"kind": "round", "number": 1, "time": 1}\n',
        '{"kind": "run"}\n',
        '{"kind": "run", "time": "now", "num_rounds": 1, "num_clients": 1, "method": "x"}\n',
        '{"kind": "run", "time": 1, "num_rounds": -1, "num_clients": 1, "method": "x"}\n',
        '{"kind": "other"}\n',
        "not json\n",
    ],
)
def test_a_damaged_log_is_refused_with_its_name(tmp_path, content):
    (tmp_path / LOG_NAME).write_text(content)
    with pytest.raises(ValueError, match=f"{LOG_NAME}.*is damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", '{"clients": {"a": []}}', '{"time": 1, "round": 1, "fields": ["state"], "clients": {"a": [5]}}']
)
def test_a_damaged_table_of_clients_is_refused_with_its_name(tmp_path, content):
    write_run(tmp_path)
    (tmp_path / CLIENTS_NAME).write_text(content)
    with pytest.raises(ValueError, match=f"{CLIENTS_NAME}.*is damaged"):
        read_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="contains no run"):
        read_run(tmp_path)


def test_a_page_shows_names_of_clients_as_text(tmp_path):
    write_run(tmp_path, names=[HOSTILE])
    content = run_page(read_run(tmp_path))
    assert "<img" not in content and not {"\x1b", "\u202e"} & set(content)
    assert "&lt;img src=x onerror=alert(1)&gt;\\x1b[2J\\u202e" in content


def test_a_page_is_read_again_only_while_the_run_lasts(tmp_path):
    write_run(tmp_path / "a", ended=None, total=9)
    write_run(tmp_path / "b")
    assert 'http-equiv="refresh"' in run_page(read_run(tmp_path / "a"))
    assert 'http-equiv="refresh"' not in run_page(read_run(tmp_path / "b"))
    # A notebook that reads a frame again would show it empty.
    assert "http-equiv=&quot;refresh" not in notebook_frame(read_run(tmp_path / "a"))


def test_a_notebook_shows_the_page_in_a_frame_without_scripts(tmp_path):
    write_run(tmp_path, names=[HOSTILE])
    frame = notebook_frame(read_run(tmp_path))
    assert frame.startswith("<iframe srcdoc=") and frame.count("<") == 2 and 'sandbox=""' in frame


def test_a_page_of_many_clients_and_rounds_is_small(tmp_path):
    write_run(tmp_path, num_rounds=100, num_clients=500, total=200, ended=None)
    write_run_page(read_run(tmp_path), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 200_000
    assert (tmp_path / "page.html").stat().st_mode & 0o777 == 0o600


def test_readers_import_no_library():
    code = "import sys; import hf_federated.cli.watch, hf_federated.cli.compare; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    assert {"hf_federated.reporting.run_page", "hf_federated.reporting.comparison"} <= loaded
    assert not {"torch", "transformers", "datasets", "numpy", "matplotlib"} & loaded
