"""A probe of a grammar in a separate process, which the system ends if it takes too long.

Run as a script: it reads a grammar and the limits of the library from standard input, compiles it
for tokens of one byte each, computes the first mask, and prints the library's error. It imports
nothing of the engine, so that it starts quickly.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

CPU_S_MAX: Final = 2
"""Bound on the processor time of a probe, in seconds."""

MASK_CPU_S_MAX: Final = 0.2
"""Bound on the processor time of its first mask, in seconds, for which a batch would wait."""

MEMORY_BYTES_MAX: Final = 2 << 30
"""Bound on the address space of a probe, in bytes."""

_WAIT_S: Final = 30.0
_REPORTED: Final = "error: "


def probe_error(grammar: str, limits: Mapping[str, Any]) -> str:
    """Return why a grammar can't be used; empty if it can."""
    command = [sys.executable, "-I", str(Path(__file__).resolve())]
    request = json.dumps({"grammar": grammar, "limits": dict(limits)})
    try:
        ended = subprocess.run(  # noqa: S603 - this file, by the interpreter that runs it
            command, input=request, capture_output=True, text=True, timeout=_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {_WAIT_S:g} s to compile"
    if ended.returncode == 0 and ended.stdout.startswith(_REPORTED):
        return ended.stdout.removeprefix(_REPORTED)
    return f"it takes more than {CPU_S_MAX} s or {MEMORY_BYTES_MAX >> 30} GiB to compile"


class _Bytes:
    """A vocabulary with a token per byte, and one that ends a text."""

    bos_token_id = None
    eos_token_id = 256
    tokens: Final = [*(bytes([value]) for value in range(256)), b"<end>"]
    special_token_ids: Final = (256,)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text."""
        return list(text)


def main() -> None:
    """Probe the grammar of standard input."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Only in this process, and only if the library is installed.
    from llguidance import (  # noqa: PLC0415
        LLMatcher,
        LLParserLimits,
        LLTokenizer,
        TokenizerWrapper,
    )

    request = json.load(sys.stdin)
    words = LLTokenizer(TokenizerWrapper(_Bytes()))
    limits = LLParserLimits(**request["limits"])
    matcher = LLMatcher(words, request["grammar"], log_level=0, limits=limits)
    started = time.process_time()
    matcher.compute_bitmask()
    seconds = time.process_time() - started
    slow = f"a token takes more than {MASK_CPU_S_MAX} s" if seconds > MASK_CPU_S_MAX else ""
    sys.stdout.write(_REPORTED + (matcher.get_error() or slow))


if __name__ == "__main__":
    main()
