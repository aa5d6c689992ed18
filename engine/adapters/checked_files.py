"""What is known of files that were checked, so that a load after a check does not repeat it."""

from collections import OrderedDict
from threading import Lock, Timer
from typing import Final, NamedTuple

from loradock.engine.adapters.files.directory import AdapterFiles
from loradock.engine.adapters.lora_model import LoadedAdapter

BYTES_MIN: Final = 64 << 20
"""The size of weights from which a check is remembered.

A file system counts changes in ticks of some milliseconds. Checking this many bytes takes longer
than a tick, so no change after the check can have the time of a change before it.
"""

KEPT_S: Final = 2.0
"""How long the adapter of the last check is kept; a load that has room follows at once."""

_FILES_MAX: Final = 1024

_Identity = tuple[tuple[int, ...], ...]


class _KeptAdapter(NamedTuple):
    identity: _Identity
    adapter: LoadedAdapter
    timer: Timer


class CheckedFiles:
    """The fingerprints of files whose values were checked, by the files' identity.

    The adapter that was checked last is kept for `kept_s` seconds as well, for one load. Threads
    may use it at the same time.
    """

    def __init__(self, bytes_min: int = BYTES_MIN, kept_s: float = KEPT_S) -> None:
        self._bytes_min = bytes_min
        self._kept_s = kept_s
        self._lock = Lock()
        self._fingerprints: OrderedDict[_Identity, str] = OrderedDict()
        self._kept: _KeptAdapter | None = None

    def fingerprint_of(self, files: AdapterFiles) -> str | None:
        """Return the fingerprint of files that have not changed since they were checked."""
        with self._lock:
            return self._fingerprints.get(files.identity)

    def take(self, files: AdapterFiles) -> LoadedAdapter | None:
        """Return the adapter that was checked last, once, if these are its files, unchanged."""
        with self._lock:
            kept = self._kept
            if kept is None or kept.identity != files.identity:
                return None
            self._replace_kept(None)
            return kept.adapter

    def remember(self, files: AdapterFiles, loaded: LoadedAdapter, *, keeps: bool) -> None:
        """Remember a check of files that have not changed meanwhile; `keeps`: its adapter too."""
        if files.weights_bytes < self._bytes_min:
            return
        with self._lock:
            # A follower has none.
            if loaded.fingerprint:
                self._fingerprints[files.identity] = loaded.fingerprint
                if len(self._fingerprints) > _FILES_MAX:
                    self._fingerprints.popitem(last=False)
            if keeps:
                # An idle process would not look at a deadline.
                timer = Timer(self._kept_s, self._free_kept)
                timer.daemon = True
                timer.start()
                self._replace_kept(_KeptAdapter(files.identity, loaded, timer))

    def _replace_kept(self, kept: _KeptAdapter | None) -> None:
        if self._kept is not None:
            self._kept.timer.cancel()
        self._kept = kept

    def _free_kept(self) -> None:
        with self._lock:
            self._kept = None
