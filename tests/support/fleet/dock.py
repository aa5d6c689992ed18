"""A dock without an engine: a real gateway and a real membership, before a stand-in controller.

`python -m tests.support.fleet.dock HOST PORT FLEET DIRECTORY`. Every output is the dock's port, so
that an answer says who gave it. An adapter is in a slot from its first request on. While the file
DIRECTORY/silent exists, generations are not answered, and while DIRECTORY/refuses does, they are
refused with the code that is in it; DIRECTORY/asked says that there is one.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

from loradock.fleet.member import MemberConfig
from loradock.gateway.address import open_listener
from loradock.gateway.options import GatewayConfig
from loradock.gateway.server.process import serve
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.processes.subprocesses import process_command
from tests.support.simulation.standin_controller import StandIn, view

ADAPTERS = tuple(f"adapter-{number}" for number in range(6))


def main() -> None:
    """Serve until the process is ended."""
    host, port, fleet, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    controller = StandIn(directory, output=((1, str(port)),))
    controller.adapters = {name: view(name, "evicted") for name in ADAPTERS}
    usual = controller._generate

    def generate(request: rq.Generate) -> rq.Reply | None:
        known = controller.adapters.get(request.adapter)
        if known is not None and known.slot < 0:
            controller.adapters[known.adapter] = view(known.adapter)
            controller.publish(ev.AdapterActivated(known.adapter, 2, 5))
        (directory / "asked").touch()
        if (directory / "silent").exists():
            return None
        if (directory / "refuses").exists():
            code = ErrorCode((directory / "refuses").read_text())
            return rq.Refused(request.request_id, code, "as the test wants")
        return usual(request)

    controller.answers[rq.Generate] = generate
    member = MemberConfig(fleet=fleet, host=host, port=port, slots=4, directory=str(directory))
    config = GatewayConfig(directory=str(directory), host=host, port=port, fleet=fleet)
    with controller, open_listener("0.0.0.0", port) as listener:
        process = subprocess.Popen(process_command("member", member))
        try:
            asyncio.run(serve(config, listener))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
