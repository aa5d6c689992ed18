"""Outputs of ended requests, for clients that lost their connection in the meantime.

The cache is bounded in outputs and bytes, and the oldest output is evicted first.
"""

from typing import Final

from loradock.messages.ids import RequestId
from loradock.messages.reports import PrivateReport
from loradock.messages.requests import TokensStreamed

OUTPUTS_MAX: Final = 256
"""The most outputs in the cache."""

OUTPUTS_BYTES_MAX: Final = 64 << 20
"""The most bytes of all outputs in the cache."""

_TOKEN_BYTES: Final = 8
_ENTRY_BYTES: Final = 128
"""Of a token with its log-probability, as objects in memory."""


class OutputCache:
    """Whole outputs by request id, one report per output of a request."""

    def __init__(self) -> None:
        self._outputs: dict[RequestId, tuple[PrivateReport, ...]] = {}
        self._size_bytes = 0

    def get(self, request_id: RequestId) -> tuple[PrivateReport, ...]:
        """Return a request's outputs; none where they are not in the cache."""
        return self._outputs.get(request_id, ())

    def put(self, *outputs: PrivateReport) -> None:
        """Store all outputs of a request in place of older ones, and evict down to the bounds.

        Outputs that exceed the bounds on their own are evicted at once.
        """
        request_id = outputs[0].request_id
        self._remove(request_id)
        self._outputs[request_id] = outputs
        self._size_bytes += sum(map(_size_bytes, outputs))
        while self._size_bytes > OUTPUTS_BYTES_MAX or len(self._outputs) > OUTPUTS_MAX:
            self._remove(next(iter(self._outputs)))

    def _remove(self, request_id: RequestId) -> None:
        if request_id in self._outputs:
            self._size_bytes -= sum(map(_size_bytes, self._outputs.pop(request_id)))


def _size_bytes(output: PrivateReport) -> int:
    if isinstance(output, TokensStreamed):
        scored = (*output.logprobs, *output.prompt_logprobs)
        entries = sum(1 + len(entry.top) for entry in scored if entry is not None)
        return _TOKEN_BYTES * len(output.tokens) + len(output.text) + _ENTRY_BYTES * entries
    return sum(map(len, output.vectors))
