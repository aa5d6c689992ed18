"""A session without sockets, with functions that start its calls and deliver its answers."""

from loradock.client.calls import NO_ID, Timing
from loradock.client.session import Session
from loradock.messages import requests as rq
from loradock.messages.prompts import Sampling
from loradock.messages.wire import REPLIES, REQUESTS

TIMING = Timing(retry_s_min=0.5, retry_s_max=5.0, slack_s=2.0, lost_tokens_s=10.0)


def session():
    return Session(b"c0ffeec0ffee", TIMING)


def sent(frames):
    """The requests of frames, in order."""
    return [request for frame in frames for request in REQUESTS.decode(frame).message]


def reply(message, epoch=1):
    return REPLIES.encode((message,), epoch, 0)


def load(client, now=0.0, timeout_s=10.0):
    return client.begin(rq.LoadAdapter(NO_ID, "upper"), now, timeout_s)


def done(call):
    return rq.AdapterDone(call.request_id, "upper", "cpu-cached")


def generate(client, attempts=1, now=0.0):
    request = rq.Generate(NO_ID, "upper", "p", Sampling(max_tokens=3))
    return client.begin(request, now, 60.0, attempts)


OUTPUT = [(1, "o"), (2, "n"), (3, "e")]


def tokens_streamed(request_id, start, output):
    tokens = tuple(token for token, _ in output)
    return rq.TokensStreamed(request_id, start, tokens, "".join(text for _, text in output))


def stream(client, call, now=0.0, start=0, end=3):
    client.receive(reply(tokens_streamed(call.request_id, start, OUTPUT[start:end])), now)


def finish(client, call, now=0.0, reason="length"):
    client.receive(reply(rq.GenerationDone(call.request_id, "upper", reason, 1, 3)), now)
