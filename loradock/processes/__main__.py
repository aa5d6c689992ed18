"""The entry points of our processes: `python -P .../loradock/processes NAME ARGUMENTS...`.

`loradock.processes.subprocesses` makes these command lines.
"""

# Each process imports its own modules only.
# ruff: noqa: PLC0415

import os
import sys
from pathlib import Path


def import_own_package() -> None:
    """Import `loradock` from the directory that contains this file's package.

    Its modules are then found through it. The directory does not stay on `sys.path`: it can be
    site-packages, which must not precede the standard library.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import loradock

    del sys.path[0], loradock
    # For the processes that a library can start.
    os.environ["PYTHONSAFEPATH"] = "1"


def main(name: str) -> int:
    """Run the process `name` with the arguments in `sys.argv`; return its exit status."""
    match name:
        case "controller":
            from loradock.controller.server.process import main as run
        case "engine":
            from loradock.engine.models.library.light_imports import import_transformers

            import_transformers()

            from loradock.engine.worker import process

            process.end(process.main())
        case "ranks":
            from loradock.engine.worker import torchrun

            torchrun.end(torchrun.main())
        case "gateway":
            from loradock.gateway.server.process import main as run
        case "member":
            from loradock.fleet.member import main as run
        case "picker":
            from loradock.fleet.picker_process import main as run
        case "envoy":
            from loradock.processes.parent import run_with

            run_with(int(sys.argv[1]), sys.argv[2:])
        case "templates":
            from loradock.gateway.inference.chat_template import main as run
        case "snapshotter":
            from loradock.controller.log.snapshotter import main as run
        case _:
            print(f"{name!r} is no process of LoRADock", file=sys.stderr)
            return 2
    return run()


if __name__ == "__main__":
    import_own_package()
    sys.exit(main(sys.argv.pop(1)))
