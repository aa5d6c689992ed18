"""Counts the calls of our functions in a process that finds this file on `PYTHONPATH`.

A datagram to the socket `$LORADOCK_WALK/<pid>.sock` is answered when `$LORADOCK_WALK/answer.json`
has all counts so far: `calls` has file, function and number, `published` the functions that were
called from a report's arrival until its events were encoded, once for each such way.

Python imports this file before anything else, so every thread is counted.
"""

import json
import os
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

ROOT = str(Path(__file__).parents[3]) + os.sep
FOLDERS = ("loradock", "controller", "engine", "messages")
OURS = tuple(f"{ROOT}{folder}{os.sep}" for folder in FOLDERS)


class Profile:
    """The calls of a process."""

    def __init__(self) -> None:
        self._calls: Counter[CodeType] = Counter()
        self._since_report: dict[CodeType, None] | None = None
        self._published: list[list[CodeType]] = []

    def count(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count a call; Python calls this for each."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(OURS):
            return
        self._calls[code] += 1
        channel = code.co_name in ("decode", "encode") and frame.f_locals.get("self")
        name = getattr(channel, "name", "")
        if code.co_name == "decode" and name == "report":
            self._since_report = {}
        if self._since_report is not None:
            self._since_report[code] = None
            if code.co_name == "encode" and name == "event batch" and _argument_of(frame):
                self._published.append(list(self._since_report))
                self._since_report = None

    def answer(self, server: socket.socket, target: Path) -> None:
        """Write the counts whenever they are asked for."""
        while True:
            _, address = server.recvfrom(1)
            calls = [(*_names(code), count) for code, count in self._calls.copy().items()]
            published = [[_names(code) for code in way] for way in self._published]
            target.write_text(json.dumps({"calls": calls, "published": published}))
            server.sendto(b".", address)


def _argument_of(frame: FrameType) -> object:
    """Return the first argument after `self`: an empty batch of events is a heartbeat."""
    return frame.f_locals[frame.f_code.co_varnames[1]]


def _names(code: CodeType) -> tuple[str, str]:
    """Return a function's file, without a link that led to it, and its name."""
    parts = Path(code.co_filename.removeprefix(ROOT)).parts
    is_linked = parts[0] == "loradock" and parts[1] in FOLDERS
    return "/".join(parts[1:] if is_linked else parts), code.co_qualname


def _start(directory: Path) -> None:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind(str(directory / f"{os.getpid()}.sock"))
    profile = Profile()
    arguments = (server, directory / "answer.json")
    # Started before the profile is set: an answer is not a part of any walk.
    threading.Thread(target=profile.answer, args=arguments, daemon=True).start()
    threading.setprofile(profile.count)
    sys.setprofile(profile.count)


if "LORADOCK_WALK" in os.environ:
    _start(Path(os.environ["LORADOCK_WALK"]))
