"""Run the server and the clients of `network.yaml` on this machine, each as a process.

    python recipes/network/run.py --set model.name_or_path=outputs/quickstart-inputs/minilm

The script creates the certificates and passes its options to all parties. The output of the server appears here. The
output of a client is written to `outputs/network/<client>.log`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


RECIPE = Path(__file__).with_name("network.yaml")
INPUTS, OUTPUTS = Path("outputs/network-inputs"), Path("outputs/network")
CLIENTS = ("north", "south")


def main() -> None:
    command, tls = [sys.executable, "-m", "hf_federated.cli.main"], OUTPUTS / "tls"
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    if not tls.is_dir():
        clients = [part for name in CLIENTS for part in ("--client", name)]
        subprocess.run([*command, "certificates", str(tls), "--server", "localhost", *clients], check=True)
    shared = [str(RECIPE), "--certificates", str(tls), *sys.argv[1:]]
    # Ctrl-C reaches all processes. The server ends the run, and this script waits for all parties.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes = {"server": start([*command, "serve", *shared, "--overwrite"], None)}
    for name in CLIENTS:
        line = [*command, "join", *shared, "--client", name, "--examples", str(INPUTS / name)]
        processes[name] = start(line, OUTPUTS / f"{name}.log")
    codes = {name: process.wait() for name, process in processes.items()}
    print(f"Exit codes: {codes}")
    raise SystemExit(max(codes.values()))


def start(command: list[str], log: Path | None) -> subprocess.Popen[bytes]:
    """Start a party, which reacts to Ctrl-C. Its output is written to a file if there is one."""
    output = None if log is None else log.open("wb")

    def handle_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    return subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=handle_interrupts)


if __name__ == "__main__":
    main()
