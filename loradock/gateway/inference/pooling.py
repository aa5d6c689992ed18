"""`POST /v1/embeddings`, `/classify`, `/pooling`, `/score` and `/rerank`, by the model's task."""

import base64
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from loradock.client import Classification, NotServed
from loradock.gateway.http.endpoint import INFERENCE, JsonResponse, post
from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference.completions import PROMPTS_MAX, IdList, prompts_of
from loradock.gateway.inference.sampling import (
    Labels,
    Side,
    TruncatedTokens,
    check_length,
    check_served,
    truncation_of,
)
from loradock.gateway.inference.service import Service, Usage, new_id
from loradock.gateway.recorder import unix_seconds
from loradock.messages.prompts import TextPrompt, Truncation

Input = str | Annotated[list[str | int | IdList], Meta(min_length=1)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=PROMPTS_MAX)]
Encoding = Literal["float", "base64"]
Row = tuple[float, ...]
"""The vector or the scores of an input."""


class _Fields(Labels, kw_only=True, forbid_unknown_fields=True):
    """The fields that all bodies have."""

    model: str | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    priority: int | None = None


class PoolingRequest(_Fields, kw_only=True, forbid_unknown_fields=True):
    """The body: an input or a list of inputs, each a string or token ids."""

    input: Input
    encoding_format: Encoding | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class ScoreRequest(_Fields, kw_only=True, forbid_unknown_fields=True):
    """One text and one or more to compare with it, or two lists of equal length."""

    text_1: Texts
    text_2: Texts


class RerankRequest(_Fields, kw_only=True, forbid_unknown_fields=True):
    """A query and the documents to order; `top_n` 0: all. Answers always have the documents."""

    query: str
    documents: Texts
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None


class PoolingAnswer(Struct, frozen=True, kw_only=True):
    """The beginning of an answer with one item per input, in `data`, its last field."""

    id: str
    object: str = "list"
    created: int
    model: str
    usage: Usage


class EmbeddingItem(Struct, frozen=True):
    """The vector of an input; Base64 stands for little-endian float32 numbers."""

    index: int
    embedding: tuple[float, ...] | str
    object: str = "embedding"


class Embeddings(PoolingAnswer, frozen=True, kw_only=True):
    """The answer to `POST /v1/embeddings`."""

    data: list[EmbeddingItem]


class ClassItem(Struct, frozen=True):
    """The label with the highest score, and the scores of all labels."""

    index: int
    label: str
    probs: tuple[float, ...]
    num_classes: int


class Classes(PoolingAnswer, frozen=True, kw_only=True):
    """The answer to `POST /classify`; `labels` are in the order of `probs`."""

    labels: tuple[str, ...]
    data: list[ClassItem]


class PoolingItem(Struct, frozen=True):
    """The vector or the scores of an input."""

    index: int
    data: tuple[float, ...] | str
    object: str = "pooling"


class Pooled(PoolingAnswer, frozen=True, kw_only=True):
    """The answer to `POST /pooling`."""

    data: list[PoolingItem]


class ScoreItem(Struct, frozen=True):
    """The similarity of one pair of texts."""

    index: int
    score: float
    object: str = "score"


class Scores(PoolingAnswer, frozen=True, kw_only=True):
    """The answer to `POST /score`."""

    data: list[ScoreItem]


class RerankDocument(Struct, frozen=True):
    """A document of the request; `multi_modal` is vLLM's field for one with images."""

    text: str
    multi_modal: None = None


class RerankResult(Struct, frozen=True):
    """The similarity of the document number `index` to the query."""

    index: int
    document: RerankDocument
    relevance_score: float


class Reranked(Struct, frozen=True):
    """The answer to `POST /rerank`, the most similar document first."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]


class PoolingEndpoints:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @post("/v1/embeddings", answer=Embeddings, errors=INFERENCE, span="embeddings")
    async def embeddings(self, body: PoolingRequest) -> JsonResponse:
        """Embed inputs."""
        check_served(body)
        adapter = await self._service.models.find(body.model)
        found = await self._service.embed(
            self._inputs(body), adapter, _truncation(body), body.dimensions or 0
        )
        answer = Embeddings(**self._head("embd", adapter, found.input_tokens), data=[])
        items = (
            EmbeddingItem(index, _encoded(row, body.encoding_format))
            for index, row in enumerate(found.vectors)
        )
        return await self._response(answer, found.vectors, items)

    @post("/classify", answer=Classes, errors=INFERENCE, span="classify")
    async def classify(self, body: PoolingRequest) -> JsonResponse:
        """Classify inputs."""
        check_served(body)
        if body.dimensions is not None:
            raise HttpError(400, "dimensions are of embeddings; leave them out", "dimensions")
        adapter = await self._service.models.find(body.model)
        found = await self._service.classify(self._inputs(body), adapter, _truncation(body))
        head = self._head("classify", adapter, found.input_tokens)
        answer = Classes(**head, labels=found.labels, data=[])
        return await self._response(answer, found.scores, _class_items(found))

    @post("/pooling", answer=Pooled, errors=INFERENCE, span="pooling")
    async def pooling(self, body: PoolingRequest) -> JsonResponse:
        """Embed or classify.

        The answer has vectors or scores, by the model's task.
        """
        check_served(body)
        adapter = await self._service.models.find(body.model)
        inputs, truncation = self._inputs(body), _truncation(body)
        try:
            embedding = await self._service.embed(inputs, adapter, truncation, body.dimensions or 0)
            rows, tokens = embedding.vectors, embedding.input_tokens
        except NotServed:
            classification = await self._service.classify(inputs, adapter, truncation)
            rows, tokens = classification.scores, classification.input_tokens
        answer = Pooled(**self._head("pool", adapter, tokens), data=[])
        items = (
            PoolingItem(index, _encoded(row, body.encoding_format))
            for index, row in enumerate(rows)
        )
        return await self._response(answer, rows, items)

    @post("/score", "/v1/score", errors=INFERENCE, span="score")
    async def score(self, body: ScoreRequest) -> Scores:
        """Compare texts.

        The score of a pair is the cosine of its embeddings.
        """
        check_served(body)
        first, second = _pairs(body)
        adapter = await self._service.models.find(body.model)
        scores, tokens = await self._scores(first, second, adapter, body)
        return Scores(
            **self._head("score", adapter, tokens),
            data=[ScoreItem(index, score) for index, score in enumerate(scores)],
        )

    @post("/rerank", "/v1/rerank", "/v2/rerank", errors=INFERENCE, span="rerank")
    async def rerank(self, body: RerankRequest) -> Reranked:
        """Order documents.

        The document closest to the query is the first one.
        """
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
        return Reranked(
            id=new_id("rerank"),
            model=self._service.models.names.shown(adapter),
            usage=Usage(tokens, tokens),
            results=results[: body.top_n or None],
        )

    def _head(self, prefix: str, adapter: str | None, tokens: int) -> dict[str, Any]:
        """Return the fields that answers of all kinds have."""
        model = self._service.models.names.shown(adapter)
        head = {"id": new_id(prefix), "created": unix_seconds(), "model": model}
        return {**head, "usage": Usage(tokens, tokens)}

    async def _response(
        self, answer: PoolingAnswer, rows: Sequence[Row], items: Iterable[Struct]
    ) -> JsonResponse:
        """Return an answer, whose `data` is empty, with the items that are made of these rows."""
        size = sum(map(len, rows)) + len(rows)
        return JsonResponse(
            await self._service.workers.run(size, partial(_json, answer, items)), 200
        )

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
        if len(texts) > PROMPTS_MAX:
            raise HttpError(
                400, f"a request can have at most {PROMPTS_MAX} texts, got {len(texts)}", names[1]
            )
        for name, side in zip(names, (first, second), strict=True):
            for text in side:
                check_length(text, self._service.context, name)
        found = await self._service.embed(texts, adapter, _truncation(body))
        vectors = dict(zip(texts, found.vectors, strict=True))
        size = (len(first) + len(texts)) * len(found.vectors[0])
        cosines = partial(_cosines, vectors, first, second)
        return await self._service.workers.run(size, cosines), found.input_tokens

    def _inputs(self, body: PoolingRequest) -> list[TextPrompt]:
        prompts = prompts_of(body.input, self._service.context, "input")
        return [one if isinstance(one, str) else tuple(one) for one in prompts]


def _truncation(body: _Fields) -> Truncation | None:
    return truncation_of(body.truncate_prompt_tokens, body.truncation_side, "right")


def _pairs(body: ScoreRequest) -> tuple[list[str], list[str]]:
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = (
            f"text_1 must have one text or as many as text_2, got {len(first)} and {len(second)}"
        )
        raise HttpError(400, message, "text_2")
    return first, second


def _class_items(found: Classification) -> Iterator[ClassItem]:
    for index, (label, row) in enumerate(zip(found.best, found.scores, strict=True)):
        yield ClassItem(index, label, row, len(row))


def _json(answer: PoolingAnswer, items: Iterable[Struct]) -> bytes:
    """Return an answer as JSON, with these items, at least one, in its empty `data`.

    Other threads run between two items, and while all are joined.
    """
    parts = [msgspec.json.encode(answer).removesuffix(b"]}")]
    for item in items:
        parts += (msgspec.json.encode(item), b",")
    parts[-1] = b"]}"
    return b"".join(parts)


def _encoded(row: Row, encoding: Encoding | None) -> Row | str:
    if encoding != "base64":
        return row
    return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()


def _cosines(vectors: Mapping[str, Row], first: list[str], second: list[str]) -> list[float]:
    """Return the cosine of the vectors of each pair of texts; 0 for a vector of zeros."""
    squares = {text: _dot(vector, vector) for text, vector in vectors.items()}
    lengths = [math.sqrt(squares[a] * squares[b]) for a, b in zip(first, second, strict=True)]
    return [
        _dot(vectors[a], vectors[b]) / length if length else 0.0
        for a, b, length in zip(first, second, lengths, strict=True)
    ]


def _dot(first: Row, second: Row) -> float:
    return math.fsum(map(operator.mul, first, second))
