"""Several processes of one script, as torchrun would start them, and what they said."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import nanolearn

ROOT = Path(nanolearn.__file__).parents[1]


def run_ranks(script: Path, world: int, *arguments: str, timeout: float = 150, **variables: str) -> list[str]:
    """Run `script` in `world` processes that form a group; each one's output, by rank. Fails if one of them does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    usual = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    usual |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(script), *arguments]
    ranks = [
        subprocess.Popen(
            command,
            env={**usual, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = []
    try:
        for process in ranks:
            out, error = process.communicate(timeout=timeout)
            assert process.returncode == 0, error
            said.append(out)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return said
