"""`POST /v1/embeddings`, `/classify`, `/pooling`, `/score` and `/rerank`, by the model's task."""

import base64
import math
import operator
import struct
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from loradock.client import NotServed
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import json_response
from loradock.gateway.inference.answers import (
    Classes,
    ClassItem,
    EmbeddingItem,
    Embeddings,
    Pooled,
    PoolingItem,
    RerankDocument,
    Reranked,
    RerankResult,
    ScoreItem,
    Scores,
    Usage,
)
from loradock.gateway.inference.completions import TokenIds, prompts_of
from loradock.gateway.inference.prompt_length import (
    Side,
    TruncatedTokens,
    check_length,
    truncation_of,
)
from loradock.gateway.inference.sampling import Labels, check_served
from loradock.gateway.inference.service import Service
from loradock.gateway.timestamps import unix_seconds
from loradock.messages.prompts import TextPrompt, Truncation

INPUTS_MAX: Final = 2048

Input = str | Annotated[list[str | int | TokenIds], Meta(min_length=1)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=INPUTS_MAX)]
Encoding = Literal["float", "base64"]


class PoolingRequest(Labels, kw_only=True, forbid_unknown_fields=True):
    """The body: one input or a list of them, each a text or token ids."""

    input: Input
    model: str | None = None
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    priority: int | None = None


class ScoreRequest(Labels, kw_only=True, forbid_unknown_fields=True):
    """One text and one or more to compare with it, or two lists of equal length."""

    text_1: Texts
    text_2: Texts
    model: str | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    priority: int | None = None


class RerankRequest(Labels, kw_only=True, forbid_unknown_fields=True):
    """A query and the documents to order; `top_n` 0: all. Answers always have the documents."""

    query: str
    documents: Texts
    top_n: Annotated[int, Meta(ge=0)] | None = None
    model: str | None = None
    return_documents: bool | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    priority: int | None = None


class Pooling:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, _: Request, body: PoolingRequest) -> Response:
        """Answer `POST /v1/embeddings`."""
        check_served(body)
        adapter = await self._service.models.find(body.model)
        found = await self._service.embed(
            self._inputs(body), adapter, _truncation(body), body.dimensions or 0
        )
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
        if body.dimensions is not None:
            raise HttpError(400, "dimensions are of embeddings; leave them out", "dimensions")
        adapter = await self._service.models.find(body.model)
        found = await self._service.classify(self._inputs(body), adapter, _truncation(body))
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
        inputs, truncation = self._inputs(body), _truncation(body)
        try:
            embedding = await self._service.embed(inputs, adapter, truncation, body.dimensions or 0)
            rows, tokens = embedding.vectors, embedding.input_tokens
        except NotServed:
            classification = await self._service.classify(inputs, adapter, truncation)
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
        scores, tokens = await self._scores(first, second, adapter, body)
        answer = Scores(
            id=self._service.new_id("score"),
            created=unix_seconds(),
            model=self._service.models.names.shown(adapter),
            data=[ScoreItem(index, score) for index, score in enumerate(scores)],
            usage=_usage(tokens),
        )
        return json_response(answer)

    async def rerank(self, _: Request, body: RerankRequest) -> Response:
        """Answer `POST /rerank` with the documents, the one closest to the query first."""
        check_served(body)
        documents = [body.documents] if isinstance(body.documents, str) else body.documents
        adapter = await self._service.models.find(body.model)
        queries = [body.query] * len(documents)
        scores, tokens = await self._scores(queries, documents, adapter, body)
        results = [
            RerankResult(index, RerankDocument(document), score)
            for index, (document, score) in enumerate(zip(documents, scores, strict=True))
        ]
        results.sort(key=lambda result: result.relevance_score, reverse=True)
        answer = Reranked(
            id=self._service.new_id("rerank"),
            model=self._service.models.names.shown(adapter),
            usage=_usage(tokens),
            results=results[: body.top_n or None],
        )
        return json_response(answer)

    async def _scores(
        self,
        first: list[str],
        second: list[str],
        adapter: str | None,
        body: ScoreRequest | RerankRequest,
    ) -> tuple[list[float], int]:
        """Return the cosine of each pair, and the number of tokens that were embedded."""
        # Each different text is embedded once.
        texts = list(dict.fromkeys((*first, *second)))
        names = ("text_1", "text_2") if isinstance(body, ScoreRequest) else ("query", "documents")
        if len(texts) > INPUTS_MAX:
            raise HttpError(400, f"{len(texts)} texts; {INPUTS_MAX} are allowed", names[1])
        for name, side in zip(names, (first, second), strict=True):
            for text in side:
                check_length(text, self._service.context, name)
        found = await self._service.embed(texts, adapter, _truncation(body))
        vectors = dict(zip(texts, found.vectors, strict=True))
        scores = [_cosine(vectors[a], vectors[b]) for a, b in zip(first, second, strict=True)]
        return scores, found.input_tokens

    def _inputs(self, body: PoolingRequest) -> list[TextPrompt]:
        prompts = prompts_of(body.input, "input")
        if len(prompts) > INPUTS_MAX:
            raise HttpError(400, f"{len(prompts)} inputs; {INPUTS_MAX} are allowed", "input")
        for prompt in prompts:
            check_length(prompt, self._service.context, "input")
        return [one if isinstance(one, str) else tuple(one) for one in prompts]


def _truncation(body: PoolingRequest | ScoreRequest | RerankRequest) -> Truncation | None:
    return truncation_of(body.truncate_prompt_tokens, body.truncation_side, "right")


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
