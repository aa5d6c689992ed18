"""Which process holds a controller's directory, without taking part in its locks."""

import os
from pathlib import Path


def lock_holder(directory: Path) -> int:
    """Return the process that writes the log of a controller's directory; 0 for none."""
    try:
        status = os.stat(directory / "log")
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    # "1: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF"
    for line in lines:
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK":
            continue
        major, minor, inode = fields[5].split(":")
        device = os.makedev(int(major, 16), int(minor, 16))
        if (device, int(inode)) == (status.st_dev, status.st_ino) and fields[4].isdecimal():
            return int(fields[4])
    return 0
