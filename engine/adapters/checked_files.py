"""Fingerprints of files that were checked, so that reading them again needs no second check."""

from collections import OrderedDict
from typing import Final

from engine.adapters.files.directory import AdapterFiles

BYTES_MIN: Final = 64 << 20
"""The size of weights from which a check is remembered.

A file system counts changes in ticks of some milliseconds. Checking this many bytes takes longer
than a tick, so no change after the check can have the time of a change before it.
"""

_FILES_MAX: Final = 1024


class CheckedFiles:
    """The fingerprints of files whose values were checked, by the files' identity.

    Threads may use it at the same time: each step is one call of the dictionary, and an entry that
    is lost only costs another check.
    """

    def __init__(self, bytes_min: int = BYTES_MIN) -> None:
        self._bytes_min = bytes_min
        self._fingerprints: OrderedDict[tuple[tuple[int, ...], ...], str] = OrderedDict()

    def fingerprint_of(self, files: AdapterFiles) -> str | None:
        """Return the fingerprint of files that have not changed since they were checked."""
        return self._fingerprints.get(files.identity)

    def remember(self, files: AdapterFiles, fingerprint: str) -> None:
        """Remember a check of files, which have not changed while it read them."""
        if fingerprint and files.weights_bytes >= self._bytes_min:
            self._fingerprints[files.identity] = fingerprint
            if len(self._fingerprints) > _FILES_MAX:
                self._fingerprints.popitem(last=False)
