"""Facts about processes of this machine, from /proc."""

import os
from pathlib import Path


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 for one that is not on this machine."""
    if pid <= 0:
        return 0
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
