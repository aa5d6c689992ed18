"""Outputs that a stand-in generates, for tests of what a gateway makes of them."""

from loradock.messages import requests as rq


def generate(served, text, reason="stop", *, characters=3):
    """Let every generation have this text, in tokens of some characters."""
    parts = [text[at : at + characters] for at in range(0, len(text), characters)]
    controller = served.controller
    controller.output = tuple((number, part) for number, part in enumerate(parts, 1))

    def done(request):
        tokens = len(parts) * request.sampling.n
        return rq.GenerationDone(request.request_id, request.adapter, reason, 4, tokens)

    controller.answers[rq.Generate] = done


def sampling(served):
    """Return the sampling parameters of the only generation."""
    [request] = served.controller.requests(rq.Generate)
    return request.sampling


def prompt(served):
    """Return the prompt of the only generation, whose tokens are bytes."""
    [request] = served.controller.requests(rq.Generate)
    return bytes(request.prompt).decode()
