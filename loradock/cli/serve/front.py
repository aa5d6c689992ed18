"""`loradock fleet front`: Envoy and the picker as child processes, restarted if they end.

Either serves without the other for a while: Envoy takes docks in turn without the picker, and keeps
the last docks that it was told of.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from loradock.cli.serve.children import Child
from loradock.cli.serve.config import ServeOptions
from loradock.cli.serve.supervisor import Ended, Supervisor
from loradock.fleet.envoy import write_configuration, write_docks
from loradock.fleet.picker_process import PickerConfig
from loradock.processes import process_log
from loradock.processes.subprocesses import process_command

_LOG_LEVEL: Final = "warning"


def serve_front(config: PickerConfig, tls: tuple[str, str] | None) -> Ended:
    """Run both until a signal; return how they ended. `tls`: files of certificate and key.

    Raises `FileNotFoundError` if Envoy is not installed.
    """
    process_log.configure(config.log_format, "front")
    options = ServeOptions(log_format=config.log_format)
    program = envoy_program()
    parent_fd, write_fd = os.pipe()
    # Sockets and configuration, which only this user can enter.
    with tempfile.TemporaryDirectory(prefix="loradock-front-") as name:
        directory = Path(name)
        write_docks(directory, ())
        file = write_configuration(directory, config.host, config.port, tls)
        picker = msgspec.structs.replace(
            config,
            listen=f"unix:{directory}/picker.sock",
            directory=name,
            parent_fd=parent_fd,
        )
        try:
            supervisor = Supervisor(
                [
                    Child("picker", process_command("picker", picker), options=options),
                    Child("envoy", envoy_command(program, file), options=options),
                ],
                parent_fd,
            )
            return Ended(supervisor.run(), supervisor.reason)
        finally:
            os.close(write_fd)
            os.close(parent_fd)
            process_log.flush()


def envoy_program() -> Path:
    """Return Envoy, which the extra of the fleet installs; raises `FileNotFoundError`."""
    program = Path(sys.executable).with_name("envoy")
    if not program.is_file():
        raise FileNotFoundError(f"Envoy is not installed: {program} is missing")
    return program


def envoy_command(program: Path, file: Path) -> list[str]:
    """Return the command that runs Envoy, which ends with this process."""
    arguments = ["--config-path", str(file), "--use-dynamic-base-id", "--log-level", _LOG_LEVEL]
    return [*process_command("envoy"), str(os.getpid()), str(program), *arguments]
