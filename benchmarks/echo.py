"""The yardstick of the control plane: a bare ZeroMQ and msgspec echo.

It batches, encodes and syncs exactly as the controller does: a ROUTER that decodes each request,
writes the requests of one poll with one write and one sync (if a log is given), and replies to
each client in one frame.
"""

import os
import sys

import zmq

from loradock.messages.records import Record
from loradock.messages.requests import AdapterDone, Request
from loradock.messages.wire import BATCH_MAX, REPLIES, REQUESTS

FRAMES_PER_GROUP = 512


def main() -> None:
    """Run `python -m benchmarks.echo ADDRESS LOG_FILE|-`: serve until killed."""
    import msgspec  # noqa: PLC0415 - the module is one command

    address, file = sys.argv[1:]
    fd = -1 if file == "-" else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    encode = msgspec.msgpack.Encoder().encode
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(address)
    while True:
        socket.poll()
        group: dict[bytes, list[Request]] = {}
        for _ in range(FRAMES_PER_GROUP):
            try:
                client, frame = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            group.setdefault(client, []).extend(REQUESTS.decode(frame).message)
        if fd >= 0:
            batch = [message for messages in group.values() for message in messages]
            os.write(fd, b"".join([encode(Record(1, message)) for message in batch]))
            os.fdatasync(fd)
        for client, messages in group.items():
            for first in range(0, len(messages), BATCH_MAX):
                replies = [
                    AdapterDone(message.request_id, "upper", "gpu-slot", 0, 1)
                    for message in messages[first : first + BATCH_MAX]
                ]
                socket.send_multipart((client, REPLIES.encode(tuple(replies))))


if __name__ == "__main__":
    main()
