"""Outputs that a stand-in generates, for tests of what a gateway makes of them."""

from typing import Any

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling, Structure
from loradock.messages.views import FinishReason
from tests.support.gateway.served import Served


def generate(
    served: Served, text: str, reason: FinishReason = "stop", *, characters: int = 3
) -> None:
    """Let every generation have this text, in tokens of some characters."""
    parts = [text[at : at + characters] for at in range(0, len(text), characters)]
    controller = served.controller
    controller.output = tuple((number, part) for number, part in enumerate(parts, 1))

    def done(request: rq.Generate) -> rq.GenerationDone:
        tokens = len(parts) * request.sampling.n
        return rq.GenerationDone(request.request_id, request.adapter, reason, 4, tokens)

    controller.answers[rq.Generate] = done


def refuse(
    served: Served, code: ErrorCode, kind: type = rq.Generate, *, after_one_token: bool = False
) -> None:
    """Let every request of a kind be refused, after one token if requested."""

    def answer(request: Any) -> rq.Refused:
        if after_one_token:
            token = rq.TokensStreamed(request.request_id, 0, (1,), "o")
            served.controller.extra_replies.append(token)
        return rq.Refused(request.request_id, code, "its process ended")

    served.controller.answers[kind] = answer


def only_generation(served: Served) -> rq.Generate:
    """Return the only generation that was requested."""
    request: rq.Generate
    [request] = served.controller.requests(rq.Generate)
    return request


def sampling(served: Served) -> Sampling:
    """Return the sampling parameters of the only generation."""
    return only_generation(served).sampling


def structure(served: Served) -> Structure:
    """Return the structure of the only generation's output."""
    found = sampling(served).structure
    assert found is not None
    return found


def prompt(served: Served) -> str:
    """Return the prompt of the only generation, whose tokens are bytes."""
    tokens = only_generation(served).prompt
    assert isinstance(tokens, tuple)
    return bytes(tokens).decode()
