"""The answers of the OpenAI protocol."""

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loradock.gateway.inference.logprobs import ChatLogprobs, CompletionLogprobs, PromptLogprobs

TokenIds = tuple[int, ...] | UnsetType | None
"""Token ids, for requests with `return_token_ids`; those of a prompt with images are null."""


class Usage(Struct, frozen=True):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class CompletionChoice(Struct, frozen=True):
    """One text; `finish_reason` is null before its end."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to `POST /v1/completions`, and a chunk of its stream.

    `usage` is null in chunks before the last one of a stream that has it, and absent without.
    """

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CalledFunction(Struct, frozen=True, omit_defaults=True):
    """The function of a call; a chunk has its name, or a piece of its arguments."""

    name: str | None = None
    arguments: str = msgspec.field(default_factory=str)


class AnsweredCall(Struct, frozen=True):
    """A call of a tool."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(Struct, frozen=True):
    """The assistant's message; `content` is null where it consists of calls."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: tuple[AnsweredCall, ...] = ()


class ChatChoice(Struct, frozen=True):
    """One message."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """The answer to `POST /v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: TokenIds = UNSET


class CallDelta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to the call at place `index`; the first one has its id and name."""

    index: int
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    tool_calls: tuple[CallDelta, ...] = ()


class ChunkChoice(Struct, frozen=True):
    """What a chunk adds to a choice."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """A chunk of a stream of `POST /v1/chat/completions`.

    `prompt_logprobs` are in the first one with tokens, if they are requested, and
    `prompt_token_ids` in the first one.
    """

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET


class _List(Struct, frozen=True, kw_only=True):
    """The beginning of an answer with one item per input."""

    id: str
    object: str = "list"
    created: int
    model: str


class EmbeddingItem(Struct, frozen=True):
    """The vector of an input; Base64 stands for little-endian float32 numbers."""

    index: int
    embedding: tuple[float, ...] | str
    object: str = "embedding"


class Embeddings(_List, frozen=True, kw_only=True):
    """The answer to `POST /v1/embeddings`."""

    data: list[EmbeddingItem]
    usage: Usage


class ClassItem(Struct, frozen=True):
    """The label with the highest score, and the scores of all labels."""

    index: int
    label: str
    probs: tuple[float, ...]
    num_classes: int


class Classes(_List, frozen=True, kw_only=True):
    """The answer to `POST /classify`; `labels` are in the order of `probs`."""

    data: list[ClassItem]
    labels: tuple[str, ...]
    usage: Usage


class PoolingItem(Struct, frozen=True):
    """The vector or the scores of an input."""

    index: int
    data: tuple[float, ...] | str
    object: str = "pooling"


class Pooled(_List, frozen=True, kw_only=True):
    """The answer to `POST /pooling`."""

    data: list[PoolingItem]
    usage: Usage


class ScoreItem(Struct, frozen=True):
    """The similarity of one pair of texts."""

    index: int
    score: float
    object: str = "score"


class Scores(_List, frozen=True, kw_only=True):
    """The answer to `POST /score`."""

    data: list[ScoreItem]
    usage: Usage


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


class Tokenized(Struct, frozen=True):
    """The answer to `POST /tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    """The answer to `POST /detokenize`."""

    prompt: str
