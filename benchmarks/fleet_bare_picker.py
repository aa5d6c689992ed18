"""A picker that names the same dock for every request: what the protocol costs without a choice.

`python -m benchmarks.fleet_bare_picker SOCKET ADDRESS`.
"""

import asyncio
import sys

from loradock.fleet.envoy import RELAYED
from loradock.fleet.ext_proc import OVERWRITE_OR_ADD, ProcessingResponse, start
from loradock.fleet.processor import DESTINATION
from loradock.processes.event_loop import loop_runner


class Exchange:
    """Answers the first message of a request, without a look at it."""

    is_over = True

    def __init__(self, answer: bytes) -> None:
        self._answers = [answer]

    def on_message(self, _: bytes) -> list[bytes]:
        """Return the same answer."""
        return self._answers


async def main(socket: str, address: str) -> None:
    """Serve until the process is ended."""
    header = {"key": DESTINATION, "raw_value": f"{RELAYED}{address}".encode()}
    change = {"set_headers": [{"header": header, "append_action": OVERWRITE_OR_ADD}]}
    answer = ProcessingResponse(request_headers={"response": {"header_mutation": change}})
    exchange = Exchange(answer.SerializeToString())
    await start(f"unix:{socket}", lambda: exchange)
    await asyncio.Event().wait()


if __name__ == "__main__":
    loop_runner()(main(*sys.argv[1:]))
