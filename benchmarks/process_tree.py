"""Run a command and sample the memory of its process tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil


# Parts of the command lines of Ray's processes: scheduler and object store, control store, monitors, idle workers.
RAY_PROCESSES = ("raylet", "gcs_server", "/ray/_private/", "/ray/dashboard/", "runtime_env", "ray::IDLE")


def run_watched(
    command: list[str], env: dict[str, str], output: Path, result: Path, watch: bool, interval: float = 0.25
) -> dict[str, float]:
    """
    Run a command until it exits.

    Args:
        command (`list[str]`): The command.
        env (`dict[str, str]`): Environment variables of the command.
        output (`pathlib.Path`): File for the output of the command.
        result (`pathlib.Path`): File that the command must write.
        watch (`bool`): Whether to sample the memory of the process tree.
        interval (`float`): Seconds between samples.

    Returns:
        `dict[str, float]`: Peaks in megabytes. `peak_pss_mb` is the proportional set size of the tree, which divides
        shared pages among the processes that use them. `peak_uss_mb` is the unique set size, which excludes shared
        pages. `peak_pss_without_ray_mb` is the proportional set size without Ray's processes.

    Raises:
        RuntimeError: If the command failed or wrote no result. The message contains the end of its output.
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
        raise RuntimeError(
            f"{' '.join(command)} exited with {process.returncode} and wrote no result. Its output ends with:\n{tail}"
        )
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
