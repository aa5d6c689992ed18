"""Outputs of ended requests, for clients that lost their connection in the meantime.

The cache is bounded in outputs and bytes, and the oldest output is evicted first.
"""

from typing import Final

from messages.ids import RequestId
from messages.reports import PrivateReport
from messages.requests import TokensStreamed

OUTPUTS_MAX: Final = 256
"""The most outputs in the cache."""

OUTPUTS_BYTES_MAX: Final = 64 << 20
"""The most bytes of all outputs in the cache."""

_TOKEN_BYTES: Final = 8


class OutputCache:
    """Whole outputs by request id, one report each."""

    def __init__(self) -> None:
        self._outputs: dict[RequestId, PrivateReport] = {}
        self._size_bytes = 0

    def get(self, request_id: RequestId) -> PrivateReport | None:
        """Return a request's output, or None where it is not in the cache."""
        return self._outputs.get(request_id)

    def put(self, output: PrivateReport) -> None:
        """Store an output in place of any older one of its request, and evict down to the bounds.

        An output that exceeds the bounds on its own is evicted at once.
        """
        self._remove(output.request_id)
        self._outputs[output.request_id] = output
        self._size_bytes += _size_bytes(output)
        while self._size_bytes > OUTPUTS_BYTES_MAX or len(self._outputs) > OUTPUTS_MAX:
            self._remove(next(iter(self._outputs)))

    def _remove(self, request_id: RequestId) -> None:
        if request_id in self._outputs:
            self._size_bytes -= _size_bytes(self._outputs.pop(request_id))


def _size_bytes(output: PrivateReport) -> int:
    if isinstance(output, TokensStreamed):
        return _TOKEN_BYTES * len(output.tokens) + len(output.text)
    return sum(map(len, output.vectors))
