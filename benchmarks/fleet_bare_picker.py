"""A picker that names the same dock for every request: what the protocol costs without a choice.

`python -m benchmarks.fleet_bare_picker SOCKET ADDRESS`.
"""

import sys
from functools import partial

from loradock.fleet.envoy import RELAYED
from loradock.fleet.ext_proc import OVERWRITE_OR_ADD, ProcessingResponse, start
from loradock.fleet.processor import DESTINATION
from loradock.processes.event_loop import loop_runner


class Exchange:
    """Answers the first message of a request, without a look at it."""

    def __init__(self, answer: bytes) -> None:
        self.is_over = False
        self._answers = [answer]

    def on_message(self, _: bytes) -> list[bytes]:
        """Return the same answer."""
        self.is_over = True
        return self._answers


async def main(socket: str, address: str) -> None:
    """Serve until the process is ended."""
    header = {"key": DESTINATION, "raw_value": f"{RELAYED}{address}".encode()}
    change = {"set_headers": [{"header": header, "append_action": OVERWRITE_OR_ADD}]}
    answer = ProcessingResponse(request_headers={"response": {"header_mutation": change}})
    server = await start(f"unix:{socket}", partial(Exchange, answer.SerializeToString()))
    await server.wait_for_termination()


if __name__ == "__main__":
    loop_runner()(main(*sys.argv[1:]))
