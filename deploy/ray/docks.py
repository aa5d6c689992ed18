"""Docks of a fleet, placed by Ray: each on a node with a free GPU, and anew if it or its node ends.

    python docks.py 4 loradock serve --model M --adapter-root A --join /etc/loradock/fleet.toml

starts four docks, on the Ray cluster of this machine or as a job of it, until it is stopped. Every
node needs LoRADock, the model, the adapters, and the files of the fleet. Ray places and restarts
docks; requests don't pass through it.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile

import ray

GPUS_PER_DOCK = float(os.environ.get("GPUS_PER_DOCK", "1"))
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let this process end when Ray ends the actor: its GPU is given to another one then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@ray.remote(num_gpus=GPUS_PER_DOCK, max_restarts=-1, max_task_retries=-1)
class Dock:
    """One dock: the command, at a free port of the node's address."""

    def serve(self, command: list[str]) -> None:
        """Serve until the dock ends, and with it the actor, which Ray then places anew."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory(prefix="loradock-") as directory:
            program, *arguments = command
            serve = [program, "--dir", directory, *arguments, "--http", f"{host}:{port}"]
            subprocess.run(serve, preexec_fn=end_with_parent, check=False)  # noqa: S603 - no shell
        os._exit(1)


if __name__ == "__main__":
    ray.init()
    docks = [Dock.remote() for _ in range(int(sys.argv[1]))]
    ray.get([dock.serve.remote(sys.argv[2:]) for dock in docks])
