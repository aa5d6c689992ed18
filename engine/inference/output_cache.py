"""Outputs of requests that have ended, for clients that lost their connection meanwhile.

What it is: the latest of them, bounded in number and bytes. What it is not: anything of a request
but its output. One rule: of one request the last output is kept, and the oldest request goes first.
"""

from typing import Final

from messages.ids import RequestId
from messages.reports import PrivateReport, TokensGenerated

KEPT_MAX: Final = 256
"""How many outputs are kept."""

KEPT_BYTES_MAX: Final = 64 << 20
"""How many bytes these may take together."""

_TOKEN_BYTES: Final = 8


class KeptOutputs:
    """What ended requests were given, each as one report that has all of it."""

    def __init__(self) -> None:
        self._outputs: dict[RequestId, PrivateReport] = {}
        self._size_bytes = 0

    def get(self, request_id: RequestId) -> PrivateReport | None:
        """A request's output, if it is still there."""
        return self._outputs.get(request_id)

    def keep(self, output: PrivateReport) -> None:
        """Keep an output, and let older ones go where there are too many now."""
        self._drop(output.request_id)
        self._outputs[output.request_id] = output
        self._size_bytes += _size_bytes(output)
        while self._size_bytes > KEPT_BYTES_MAX or len(self._outputs) > KEPT_MAX:
            self._drop(next(iter(self._outputs)))

    def _drop(self, request_id: RequestId) -> None:
        if request_id in self._outputs:
            self._size_bytes -= _size_bytes(self._outputs.pop(request_id))


def _size_bytes(output: PrivateReport) -> int:
    if isinstance(output, TokensGenerated):
        return _TOKEN_BYTES * len(output.tokens) + len(output.text)
    return sum(map(len, output.vectors))
