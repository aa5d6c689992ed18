"""What the processes of a fleet share: the address that others know them by, and their end."""

import asyncio
import os
import signal
import socket
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from loradock.fleet.config import FleetConfig


def advertised_host(host: str, fleet: FleetConfig) -> str:
    """Return the address of this machine for others: of the route to etcd, if `host` is any."""
    if host not in ("0.0.0.0", "::", "*", ""):  # noqa: S104 - it is compared
        return f"[{host}]" if ":" in host else host
    member = urlsplit(fleet.members[0])
    found = socket.getaddrinfo(member.hostname, member.port or 2379, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    # Nothing is sent: connecting a datagram socket chooses the route.
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own


async def until_stopped(work: Coroutine[Any, Any, None], parent_fd: int) -> None:
    """Run until SIGTERM, SIGINT or the end of the supervisor; raises what the work raises."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    if parent_fd >= 0:
        os.set_blocking(parent_fd, False)
        loop.add_reader(parent_fd, task.cancel)
    await asyncio.wait([task])
    if parent_fd >= 0:
        loop.remove_reader(parent_fd)
    if not task.cancelled():
        task.result()
