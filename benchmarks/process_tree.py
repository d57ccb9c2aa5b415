"""Runs a command and samples the memory of its whole process tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil


# Parts of the command lines of Ray's own processes: scheduler and object store, control store, monitors, idle workers.
RAY_PROCESSES = ("raylet", "gcs_server", "/ray/_private/", "/ray/dashboard/", "runtime_env", "ray::IDLE")


def run_watched(
    command: list[str], env: dict[str, str], output: Path, result: Path, watch: bool, interval: float = 0.25
) -> dict[str, float]:
    """
    Run a command to its end.

    Args:
        command (`list[str]`): The command.
        env (`dict[str, str]`): Its environment.
        output (`pathlib.Path`): Where its output goes.
        result (`pathlib.Path`): The file that it must have written.
        watch (`bool`): Whether to sample its memory.
        interval (`float`): Seconds between samples.

    Returns:
        `dict[str, float]`: Peaks in megabytes: `peak_pss_mb` and `peak_uss_mb` of the tree (shared pages split among
        their owners, and left out), `peak_pss_without_ray_mb` of the tree less Ray's own processes.

    Raises:
        RuntimeError: If it failed or wrote no result. The message has the end of its output.
    """
    peaks = {"peak_pss_mb": 0.0, "peak_uss_mb": 0.0, "peak_pss_without_ray_mb": 0.0}
    with output.open("w") as stream:
        process = subprocess.Popen(command, env=env, stdout=stream, stderr=subprocess.STDOUT)
        while True:
            try:
                process.wait(interval if watch else None)
                break
            except subprocess.TimeoutExpired:
                for key, value in _tree_memory(process.pid).items():
                    peaks[key] = max(peaks[key], value)
    if process.returncode or not result.exists():
        tail = "\n".join(output.read_text().splitlines()[-30:])
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
    return peaks


def _tree_memory(pid: int) -> dict[str, float]:
    totals = {"peak_pss_mb": 0.0, "peak_uss_mb": 0.0, "peak_pss_without_ray_mb": 0.0}
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return totals
    for process in processes:
        try:
            memory = process.memory_full_info()
            command = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        totals["peak_pss_mb"] += memory.pss / 1e6
        totals["peak_uss_mb"] += memory.uss / 1e6
        if not any(part in command for part in RAY_PROCESSES):
            totals["peak_pss_without_ray_mb"] += memory.pss / 1e6
    return totals
