"""The entry points of our processes: `python -P .../loradock/processes.py NAME ARGUMENTS...`.

`messages.own_processes` makes these command lines.
"""

# Each process imports its own modules only.
# ruff: noqa: PLC0415

import os
import sys
from pathlib import Path


def import_own_packages() -> None:
    """Import our top-level packages from the directory that contains this file's package.

    Submodules are then found through their packages. The directory does not stay on `sys.path`:
    it may be site-packages, which must not precede the standard library.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import controller
    import engine
    import gateway
    import loradock
    import messages

    del sys.path[0], controller, engine, gateway, loradock, messages
    # For the processes that a library may start.
    os.environ["PYTHONSAFEPATH"] = "1"


def main(name: str) -> int:
    """Run the process `name` with the arguments in `sys.argv`; return its exit status."""
    match name:
        case "controller":
            from controller.shell.process import main as run
        case "engine":
            from engine.models.library.light_imports import import_transformers

            import_transformers()

            from engine.worker import process

            process.end(process.main())
        case "ranks":
            from engine.worker import torchrun

            torchrun.end(torchrun.main())
        case "gateway":
            from gateway.server.process import main as run
        case "templates":
            from gateway.inference.template_process import main as run
        case "snapshotter":
            from controller.log.snapshotter import main as run
        case _:
            print(f"{name!r} is no process of LoRADock", file=sys.stderr)
            return 2
    return run()


if __name__ == "__main__":
    import_own_packages()
    sys.exit(main(sys.argv.pop(1)))
