"""`POST /v1/embeddings`, `/classify`, `/pooling` and `/score`, where the model's task is theirs."""

import base64
import math
import operator
import struct
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from controller.client import NotServed
from gateway.http.errors import HttpError
from gateway.http.streams import json_response
from gateway.inference.answers import (
    Classes,
    ClassItem,
    EmbeddingItem,
    Embeddings,
    Pooled,
    PoolingItem,
    ScoreItem,
    Scores,
    Usage,
)
from gateway.inference.completions import TokenIds, prompts_of
from gateway.inference.sampling import check_served
from gateway.inference.service import Service
from gateway.timestamps import unix_seconds
from messages.prompts import TextPrompt

INPUTS_MAX: Final = 2048

Text = Annotated[str, Meta(max_length=1_000_000)]
Input = Text | Annotated[list[Text | int | TokenIds], Meta(min_length=1)]
Encoding = Literal["float", "base64"]


class PoolingRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body: one input or a list of them, each a text or token ids."""

    input: Input
    model: str | None = None
    encoding_format: Encoding | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    user: str | None = None


class ScoreRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """One text and one or more to compare with it, or two lists of equal length."""

    text_1: Text | Annotated[list[Text], Meta(min_length=1, max_length=INPUTS_MAX)]
    text_2: Text | Annotated[list[Text], Meta(min_length=1, max_length=INPUTS_MAX)]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    user: str | None = None


class Pooling:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, _: Request, body: PoolingRequest) -> Response:
        """Answer `POST /v1/embeddings`."""
        check_served(body)
        adapter = await self._service.models.find(body.model)
        found = await self._service.embed(_inputs(body.input), adapter)
        encoded = [_encoded(vector, body.encoding_format) for vector in found.vectors]
        answer = Embeddings(
            id=self._service.new_id("embd"),
            created=unix_seconds(),
            model=self._service.models.names.shown(adapter),
            data=[EmbeddingItem(index, vector) for index, vector in enumerate(encoded)],
            usage=_usage(found.input_tokens),
        )
        return json_response(answer)

    async def classify(self, _: Request, body: PoolingRequest) -> Response:
        """Answer `POST /classify`."""
        check_served(body)
        adapter = await self._service.models.find(body.model)
        found = await self._service.classify(_inputs(body.input), adapter)
        items = [
            ClassItem(index, label, row, len(row))
            for index, (label, row) in enumerate(zip(found.best, found.scores, strict=True))
        ]
        answer = Classes(
            id=self._service.new_id("classify"),
            created=unix_seconds(),
            model=self._service.models.names.shown(adapter),
            data=items,
            labels=found.labels,
            usage=_usage(found.input_tokens),
        )
        return json_response(answer)

    async def pooling(self, _: Request, body: PoolingRequest) -> Response:
        """Answer `POST /pooling` with vectors or scores, by the model's task."""
        check_served(body)
        adapter = await self._service.models.find(body.model)
        inputs = _inputs(body.input)
        try:
            embedding = await self._service.embed(inputs, adapter)
            rows, tokens = embedding.vectors, embedding.input_tokens
        except NotServed:
            classification = await self._service.classify(inputs, adapter)
            rows, tokens = classification.scores, classification.input_tokens
        encoded = [_encoded(row, body.encoding_format) for row in rows]
        answer = Pooled(
            id=self._service.new_id("pool"),
            created=unix_seconds(),
            model=self._service.models.names.shown(adapter),
            data=[PoolingItem(index, row) for index, row in enumerate(encoded)],
            usage=_usage(tokens),
        )
        return json_response(answer)

    async def score(self, _: Request, body: ScoreRequest) -> Response:
        """Answer `POST /score` with the cosine of the embeddings of each pair."""
        check_served(body)
        first, second = _pairs(body)
        adapter = await self._service.models.find(body.model)
        # Each different text is embedded once.
        texts = list(dict.fromkeys((*first, *second)))
        if len(texts) > INPUTS_MAX:
            raise HttpError(400, f"{len(texts)} texts; {INPUTS_MAX} are allowed", "text_2")
        found = await self._service.embed(texts, adapter)
        vectors = dict(zip(texts, found.vectors, strict=True))
        scores = [_cosine(vectors[a], vectors[b]) for a, b in zip(first, second, strict=True)]
        answer = Scores(
            id=self._service.new_id("score"),
            created=unix_seconds(),
            model=self._service.models.names.shown(adapter),
            data=[ScoreItem(index, score) for index, score in enumerate(scores)],
            usage=_usage(found.input_tokens),
        )
        return json_response(answer)


def _inputs(given: str | list[str | int | list[int]]) -> list[TextPrompt]:
    prompts = prompts_of(given, "input")
    if len(prompts) > INPUTS_MAX:
        raise HttpError(400, f"{len(prompts)} inputs; {INPUTS_MAX} are allowed", "input")
    return [one if isinstance(one, str) else tuple(one) for one in prompts]


def _pairs(body: ScoreRequest) -> tuple[list[str], list[str]]:
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = (
            f"{len(first)} and {len(second)} texts; one and several, or equally many are needed"
        )
        raise HttpError(400, message, "text_2")
    return first, second


def _encoded(row: tuple[float, ...], encoding: Encoding | None) -> tuple[float, ...] | str:
    if encoding != "base64":
        return row
    return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    product = math.sqrt(_dot(first, first) * _dot(second, second))
    return _dot(first, second) / product if product else 0.0


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return math.fsum(map(operator.mul, first, second))


def _usage(tokens: int) -> Usage:
    return Usage(tokens, tokens)
