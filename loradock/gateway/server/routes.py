"""The table of endpoints."""

from collections.abc import Callable
from typing import Any, Final

from loradock.gateway.adapters.residency import (
    MoveAnswer,
    NoFields,
    PrefetchAnswer,
    PrefetchRequest,
    Residency,
)
from loradock.gateway.adapters.updates import (
    AdapterUpdates,
    LoadRequest,
    SglangAnswer,
    SglangLoadRequest,
    SglangUnloadRequest,
    UnloadRequest,
)
from loradock.gateway.adapters.views import AdapterCard, AdapterCards, ModelCard, ModelList
from loradock.gateway.http.endpoints import Endpoint, Handler
from loradock.gateway.inference import answers
from loradock.gateway.inference.anthropic import AnthropicAnswer, AnthropicMessages, TokenCount
from loradock.gateway.inference.anthropic_request import CountRequest, MessagesRequest
from loradock.gateway.inference.chat import ChatRequest, Chats
from loradock.gateway.inference.chat_prompt import ChatPrompts
from loradock.gateway.inference.completions import CompletionRequest, Completions
from loradock.gateway.inference.pooling import Pooling, PoolingRequest, RerankRequest, ScoreRequest
from loradock.gateway.inference.rendered import Rendered
from loradock.gateway.inference.responses import ResponseAnswer, Responses
from loradock.gateway.inference.responses_request import ResponsesRequest
from loradock.gateway.inference.tokens import DetokenizeRequest, TokenizeRequest, Tokens
from loradock.gateway.metrics.families import ControllerFamilies
from loradock.gateway.metrics.scrape import Families, Scrape
from loradock.gateway.metrics.vllm_families import VllmFamilies
from loradock.gateway.page.assets import Page
from loradock.gateway.page.history import History, Past
from loradock.gateway.server.gateway import Gateway
from loradock.gateway.server.health import Health, Info, Load, ServerInfo, Version

_INFERENCE: Final = (400, 404, 429, 503)
_CHANGES: Final = (400, 403, 404, 409, 429, 503)


def endpoints(gateway: Gateway) -> tuple[Endpoint, ...]:
    """Return every endpoint of a gateway."""
    return (
        *_completions(gateway),
        *_chats(gateway),
        *_pooling(gateway),
        *_tokens(gateway),
        *_models(gateway),
        *_updates(gateway),
        *_operation(gateway),
    )


def _post(path: str, handler: Any, body: Any, answer: Any, summary: str, **more: Any) -> Endpoint:
    return Endpoint(
        method="POST", path=path, handler=handler, body=body, answer=answer, summary=summary, **more
    )


def _get(path: str, handler: Any, answer: Any, summary: str, **more: Any) -> Endpoint:
    return Endpoint(
        method="GET", path=path, handler=handler, answer=answer, summary=summary, **more
    )


def _untraced(_: str, handler: Handler) -> Handler:
    return handler


def _traced_by(gateway: Gateway) -> Callable[[str, Handler], Handler]:
    return _untraced if gateway.traced is None else gateway.traced.handler


def _completions(gateway: Gateway) -> tuple[Endpoint, ...]:
    completions, traced = Completions(gateway.service), _traced_by(gateway)
    more: dict[str, Any] = {"errors": _INFERENCE}
    return (
        _post(
            "/v1/completions",
            traced("text_completion", completions.complete),
            CompletionRequest,
            answers.Completion,
            "Continue prompts",
            streams=True,
            **more,
        ),
        _post(
            "/v1/completions/render",
            completions.render,
            CompletionRequest,
            list[Rendered],
            "Token ids and parameters of completions",
            **more,
        ),
    )


def _pooling(gateway: Gateway) -> tuple[Endpoint, ...]:
    pooling, traced = Pooling(gateway.service), _traced_by(gateway)
    score, rerank = traced("score", pooling.score), traced("rerank", pooling.rerank)
    more: dict[str, Any] = {"errors": _INFERENCE}
    return (
        _post(
            "/v1/embeddings",
            traced("embeddings", pooling.embeddings),
            PoolingRequest,
            answers.Embeddings,
            "Embed inputs",
            **more,
        ),
        _post(
            "/classify",
            traced("classify", pooling.classify),
            PoolingRequest,
            answers.Classes,
            "Classify inputs",
            **more,
        ),
        _post(
            "/pooling",
            traced("pooling", pooling.pooling),
            PoolingRequest,
            answers.Pooled,
            "Embed or classify",
            **more,
        ),
        *(
            _post(path, score, ScoreRequest, answers.Scores, "Compare texts", **more)
            for path in ("/score", "/v1/score")
        ),
        *(
            _post(path, rerank, RerankRequest, answers.Reranked, "Order documents", **more)
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
    )


def _chats(gateway: Gateway) -> tuple[Endpoint, ...]:
    service, traced = gateway.service, _traced_by(gateway)
    prompts = ChatPrompts(gateway.config.allowed_media_domains)
    chats = Chats(service, prompts)
    responses = Responses(service, chats)
    anthropic = AnthropicMessages(service, chats, prompts)
    more: dict[str, Any] = {"errors": _INFERENCE}
    return (
        _post(
            "/v1/chat/completions",
            traced("chat", chats.complete),
            ChatRequest,
            answers.ChatCompletion,
            "Continue a chat",
            streams=True,
            has_images=True,
            **more,
        ),
        _post(
            "/v1/chat/completions/render",
            chats.render,
            ChatRequest,
            Rendered,
            "Token ids and parameters of a chat",
            **more,
        ),
        _post(
            "/v1/responses",
            traced("chat", responses.create),
            ResponsesRequest,
            ResponseAnswer,
            "Continue a chat, as in the Responses protocol",
            streams=True,
            has_images=True,
            **more,
        ),
        _post(
            "/v1/messages",
            traced("chat", anthropic.create),
            MessagesRequest,
            AnthropicAnswer,
            "Continue a chat, as in Anthropic's protocol",
            streams=True,
            has_images=True,
            shape="anthropic",
            **more,
        ),
        _post(
            "/v1/messages/count_tokens",
            anthropic.count,
            CountRequest,
            TokenCount,
            "Tokens of a chat, as in Anthropic's protocol",
            shape="anthropic",
            **more,
        ),
    )


def _tokens(gateway: Gateway) -> tuple[Endpoint, ...]:
    tokens = Tokens(gateway.service, ChatPrompts(()))
    return (
        _post(
            "/tokenize",
            tokens.tokenize,
            TokenizeRequest,
            answers.Tokenized,
            "Token ids of a text or a chat",
            errors=_INFERENCE,
        ),
        _post(
            "/detokenize",
            tokens.detokenize,
            DetokenizeRequest,
            answers.Detokenized,
            "Text of token ids",
            errors=_INFERENCE,
        ),
        *(
            (_get("/tokenizer_info", tokens.info, dict[str, Any], "Tokenizer", errors=(400,)),)
            if gateway.config.enable_tokenizer_info_endpoint
            else ()
        ),
    )


def _models(gateway: Gateway) -> tuple[Endpoint, ...]:
    residency = _residency(gateway)
    return (
        _get("/v1/models", residency.models, ModelList, "The base model and all adapters"),
        _get("/v1/models/{model:path}", residency.model, ModelCard, "One model", errors=(404,)),
        _get(
            "/v1/lora_adapters",
            residency.adapters,
            AdapterCards,
            "State and counters of all adapters",
            errors=(503,),
        ),
        _get(
            "/v1/lora_adapters/{name}",
            residency.adapter,
            AdapterCard,
            "State and counters of an adapter",
            errors=(404, 503),
        ),
    )


def _residency(gateway: Gateway) -> Residency:
    return Residency(gateway.client, gateway.table, gateway.names, gateway.service.context)


def _updates(gateway: Gateway) -> tuple[Endpoint, ...]:
    updates = AdapterUpdates(gateway.client, gateway.table, gateway.names)
    residency = _residency(gateway)
    more: dict[str, Any] = {"access": "updating", "errors": _CHANGES}
    text: dict[str, Any] = {**more, "media_type": "text/plain"}
    moves = "/v1/lora_adapters/{name}"
    return (
        _post("/v1/load_lora_adapter", updates.load, LoadRequest, None, "Load an adapter", **text),
        _post(
            "/v1/unload_lora_adapter",
            updates.unload,
            UnloadRequest,
            None,
            "Remove an adapter",
            **text,
        ),
        _post(
            "/load_lora_adapter",
            updates.sglang_load,
            SglangLoadRequest,
            SglangAnswer,
            "Load an adapter, as in SGLang",
            failure=SglangAnswer,
            **more,
        ),
        _post(
            "/unload_lora_adapter",
            updates.sglang_unload,
            SglangUnloadRequest,
            SglangAnswer,
            "Remove an adapter, as in SGLang",
            failure=SglangAnswer,
            **more,
        ),
        _post(
            f"{moves}/hold", residency.hold, NoFields, MoveAnswer, "Exempt from eviction", **more
        ),
        _post(f"{moves}/release", residency.release, NoFields, MoveAnswer, "End a hold", **more),
        _post(f"{moves}/evict", residency.evict, NoFields, MoveAnswer, "Drop the weights", **more),
        _post(
            f"{moves}/prefetch",
            residency.prefetch,
            PrefetchRequest,
            PrefetchAnswer,
            "Move towards a slot",
            **more,
        ),
    )


def _operation(gateway: Gateway) -> tuple[Endpoint, ...]:
    health = Health(gateway.client, gateway.recorder)
    public: dict[str, Any] = {"access": "public"}
    return (
        *(
            _get(path, health.health, None, "Whether an engine serves", errors=(503,), **public)
            for path in ("/health", "/ping")
        ),
        _post(
            "/ping", health.health, None, None, "Whether an engine serves", errors=(503,), **public
        ),
        _get(
            "/server_info",
            Info(gateway.config).info,
            ServerInfo,
            "Configuration without keys",
            errors=(400,),
        ),
        _get("/version", health.version, Version, "The version", **public),
        _get("/load", health.load, Load, "Requests in progress", **public),
        _get(
            "/metrics",
            _scrape(gateway).metrics,
            None,
            "Metrics for Prometheus",
            media_type="text/plain",
            **public,
        ),
        _get("/", Page().page, None, "The page", media_type="text/html", **public),
        _get(
            "/events",
            gateway.live.events,
            None,
            "The life-cycle events as they happen",
            media_type="text/event-stream",
            errors=(429,),
        ),
        _get(
            "/events/history",
            Past(gateway.client).events,
            History,
            "Past life-cycle events",
            errors=(400, 503),
        ),
    )


def _scrape(gateway: Gateway) -> Scrape:
    config, table = gateway.config, gateway.table
    sources: list[Families] = [ControllerFamilies(table, config.metrics_adapters_max).families]
    if not config.disable_vllm_metrics:
        of_vllm = VllmFamilies(table, gateway.recorder, gateway.names, config.metrics_adapters_max)
        sources.append(of_vllm.families)
    return Scrape(gateway.follower, sources)
