"""Parameters of generations: what a request sets, what the model recommends, what is served.

A parameter that the engine does not serve is refused by its name, unless its value is the one that
changes nothing. Here are also the structure of an output, under the names of OpenAI and of vLLM,
the length of prompts, and what a generation would start from.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from loradock.client.arguments import check_arguments
from loradock.client.calls import NO_ID
from loradock.gateway.http.errors import HttpError, prompt_too_long
from loradock.messages.prompts import (
    LOGPROBS_MAX,
    PROMPT_CHARACTERS_MAX,
    PROMPT_TOKENS_MAX,
    Priority,
    Sampling,
    Structure,
    Truncation,
)
from loradock.messages.requests import Generate

CHOICES_MAX: Final = 128
STOP_MAX: Final = 16

TEMPERATURE_DEFAULT: Final = 1.0
"""As in the OpenAI protocol; the model's generation_config.json precedes it, as in vLLM."""

Tokens = Annotated[int, Meta(ge=0, le=1_000_000)]
Logprobs = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
WHOLE_CONTEXT: Final = -1
"""The value of `truncate_prompt_tokens` for as many tokens as the context has space for."""

TruncatedTokens = Annotated[int, Meta(ge=WHOLE_CONTEXT, le=PROMPT_TOKENS_MAX)]
Side = Literal["left", "right"]


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """The schema of a `response_format`; it is always followed, whether `strict` or not."""

    name: str
    schema: msgspec.Raw | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """`text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the kinds of vLLM; a grammar and structural tags are not served."""

    json: msgspec.Raw | UnsetType = UNSET
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw | UnsetType = UNSET


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: in every chunk.

    `include_obfuscation` is not used: chunks have no padding against observers of their lengths.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False

    @property
    def is_continuous(self) -> bool:
        """Return whether every chunk has the usage until then, which needs `include_usage` too."""
        return bool(self.include_usage and self.continuous_usage_stats)


LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1024),
]
"""Token ids, written as strings, with what is added to their logits."""


Label = msgspec.Raw | UnsetType
"""Any JSON; it is not read."""


class Labels(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that clients send along and that change no answer of this server.

    Names of users, requests and conversations; hints for the caches, queues and stores of OpenAI;
    an expected output (`prediction`), which makes its generation faster there; and hints for the
    routing of OpenRouter, which a server of one model has none of.
    """

    user: Label = UNSET
    metadata: Label = UNSET
    request_id: Label = UNSET
    session_id: Label = UNSET
    safety_identifier: Label = UNSET
    service_tier: Label = UNSET
    store: Label = UNSET
    cache_salt: Label = UNSET
    cache_control: Label = UNSET
    prompt_cache_key: Label = UNSET
    prompt_cache_options: Label = UNSET
    prompt_cache_retention: Label = UNSET
    prediction: Label = UNSET
    models: Label = UNSET
    provider: Label = UNSET
    route: Label = UNSET
    trace: Label = UNSET
    usage: Label = UNSET


class SamplingFields(Labels, kw_only=True, forbid_unknown_fields=True):
    """The parameters that texts and chats have in common.

    Parameters below `seed` are served if the engine serves them, or accepted with values that
    change nothing.
    """

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=STOP_MAX)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: Side | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    priority: Priority | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw | UnsetType = UNSET
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    logits_processors: msgspec.Raw | UnsetType = UNSET
    kv_transfer_params: msgspec.Raw | UnsetType = UNSET
    vllm_xargs: msgspec.Raw | UnsetType = UNSET


UNCHANGED: Final[dict[str, tuple[Any, ...]]] = {
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "guided_grammar": (),
    "logits_processors": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
    "instruction": ("",),
}
"""Parameter -> its values that change nothing; null is one of them for every parameter."""

PASSED_ON: Final = (
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop_token_ids", "ignore_eos", "min_tokens", "prompt_logprobs", "n", "priority"),
    "skip_special_tokens",
)
"""Parameters that mean the same to the engine, under the same name."""

_NULL: Final = b"null"


class SamplingDefaults(Struct, frozen=True):
    """Values for parameters that a request leaves out, under their names in generation_config.json.

    `max_new_tokens`: of a chat; None: as many as the context leaves. `stop_token_ids`: tokens that
    end an output besides the tokens of the model and of the request, unless it ignores end tokens.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = TEMPERATURE_DEFAULT
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    stop_token_ids: tuple[int, ...] = ()


_NO_DEFAULTS: Final = SamplingDefaults()


def check_served(body: Struct) -> None:
    """Raise `HttpError` for the first parameter with a value that is not served."""
    for name, unchanged in UNCHANGED.items():
        value = getattr(body, name, None)
        if value is None or value is UNSET or value in unchanged:
            continue
        if not isinstance(value, msgspec.Raw) or bytes(value).strip() != _NULL:
            raise HttpError(400, f"{name} is not served; leave it out", name)


def sampling_of(
    body: SamplingFields, defaults: SamplingDefaults, max_tokens: int | None
) -> dict[str, Any]:
    """Return the keywords of `AsyncClient.generate`; None as `max_tokens` is its own default."""
    check_served(body)
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options needs stream: true", "stream_options")
    top_k = defaults.top_k if body.top_k is None else body.top_k
    sampling: dict[str, Any] = {
        "temperature": defaults.temperature if body.temperature is None else body.temperature,
        "top_p": defaults.top_p if body.top_p is None else body.top_p,
        # -1 means no bound in vLLM.
        "top_k": max(0, top_k),
        "stop": _stop_of(body.stop),
    }
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    structure = structure_of(body)
    if structure is not None:
        sampling["structure"] = structure
    if body.seed is not None:
        sampling["seed"] = body.seed % 2**63
    if body.logit_bias:
        sampling["logit_bias"] = tuple((int(t), bias) for t, bias in body.logit_bias.items())
    if body.include_stop_str_in_output is not None:
        sampling["include_stop"] = body.include_stop_str_in_output
    passed_on = {name: getattr(body, name) for name in PASSED_ON}
    sampling |= {name: value for name, value in passed_on.items() if value is not None}
    return sampling if defaults == _NO_DEFAULTS else _with_further(defaults, sampling)


def _with_further(defaults: SamplingDefaults, sampling: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of parameters that few models recommend."""
    further = {"min_p": defaults.min_p, "repetition_penalty": defaults.repetition_penalty}
    further = {n: value for n, value in further.items() if value != getattr(_NO_DEFAULTS, n)}
    if defaults.stop_token_ids and not sampling.get("ignore_eos"):
        ids = (*sampling.get("stop_token_ids", ()), *defaults.stop_token_ids)
        return further | sampling | {"stop_token_ids": ids}
    return further | sampling


def _stop_of(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


_fields: Final = attrgetter(
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
)
_NONE: Final = (None, None, UNSET, None, None)
_ANY_OBJECT: Final = Structure("json_schema")


def structure_of(body: Any) -> Structure | None:
    """Return the structure that a request has; raises `HttpError` for more than one."""
    if _fields(body) == _NONE:
        return None
    found = {name: one for name, one in _structures(body).items() if one is not None}
    if len(found) > 1:
        names = " and ".join(sorted(found))
        raise HttpError(400, f"{names} exclude each other", sorted(found)[0])
    return next(iter(found.values()), None)


def _structures(body: Any) -> dict[str, Structure | None]:
    outputs: StructuredOutputs = body.structured_outputs or StructuredOutputs()
    if outputs.grammar is not None or outputs.structural_tag is not UNSET:
        message = "structured_outputs with a grammar or structural tags are not served"
        raise HttpError(400, message, "structured_outputs")
    return {
        "response_format": _of_response_format(body.response_format),
        "structured_outputs.json": _schema(outputs.json),
        "structured_outputs.regex": _regex(outputs.regex),
        "structured_outputs.choice": _choice(outputs.choice),
        "structured_outputs.json_object": _ANY_OBJECT if outputs.json_object else None,
        "guided_json": _schema(body.guided_json),
        "guided_regex": _regex(body.guided_regex),
        "guided_choice": _choice(body.guided_choice),
    }


def _of_response_format(wanted: ResponseFormat | None) -> Structure | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _ANY_OBJECT
    if wanted.type != "json_schema":
        message = (
            f"response_format {wanted.type!r} is not served; text, json_object and json_schema are"
        )
        raise HttpError(400, message, "response_format")
    if wanted.json_schema is None or wanted.json_schema.schema is UNSET:
        raise HttpError(
            400, "response_format json_schema needs json_schema.schema", "response_format"
        )
    return _schema(wanted.json_schema.schema)


def _schema(raw: msgspec.Raw | UnsetType) -> Structure | None:
    """Return the structure of a schema, which can be JSON within a string."""
    if raw is UNSET:
        return None
    text = bytes(raw).decode().strip()
    if text == "null":
        return None
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return Structure("json_schema", text)


def _regex(pattern: str | None) -> Structure | None:
    return None if pattern is None else Structure("regex", pattern)


def _choice(choices: list[str] | None) -> Structure | None:
    return None if choices is None else Structure("choice", choices=tuple(choices))


def check_length(prompt: str | Sequence[Any], context: int | None, param: str) -> None:
    """Raise `HttpError` for a prompt that is too long to be sent; `context` None: unknown."""
    unit, most = "tokens", PROMPT_TOKENS_MAX
    if isinstance(prompt, str):
        unit, most = "characters", PROMPT_CHARACTERS_MAX
    if len(prompt) > most:
        raise prompt_too_long(f"{len(prompt)} {unit} > {most} maximum", context, param)


def truncation_of(tokens: int | None, side: Side | None, default: Side) -> Truncation | None:
    """Return the truncation that a request asks for; raises `HttpError`.

    `default`: the side that is cut without `truncation_side`.
    """
    if tokens is None:
        return None
    if tokens == 0:
        message = "truncate_prompt_tokens must be -1 (the model's context) or at least 1, got 0"
        raise HttpError(400, message, "truncate_prompt_tokens")
    return Truncation(max(0, tokens), side or default)


def truncated(
    truncation: Truncation,
    tokens: list[int],
    content: list[int],
    space: int | None,
) -> list[int]:
    """Return the tokens of a prompt after truncation; raises `HttpError`.

    `content`: the tokens without special tokens. `space`: the tokens of the context that the output
    does not need; None if the context is unknown.
    """
    limit = truncation.tokens or space
    if limit is None:
        message = (
            "truncate_prompt_tokens -1 needs the context of the model, which has none in its "
            "config.json; name a number of tokens, or start the gateway with --max-model-len"
        )
        raise HttpError(400, message, "truncate_prompt_tokens")
    return truncation.cut(tokens, content, max(1, limit))


class RenderedSampling(Struct, frozen=True, kw_only=True):
    """The sampling parameters after defaults; `logit_bias` by token id."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    ignore_eos: bool
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float] | None
    logprobs: int | None
    prompt_logprobs: int | None
    structured_outputs: dict[str, Any] | None


class Rendered(Struct, frozen=True, kw_only=True):
    """The token ids of one prompt, and how it would be continued."""

    request_id: str
    model: str | None
    token_ids: tuple[int, ...]
    sampling_params: RenderedSampling
    stream: bool
    stream_options: StreamOptions | None
    priority: int


def rendered(
    prompts: Mapping[str, tuple[int, ...]], sampling: dict[str, Any], body: SamplingFields
) -> list[Rendered]:
    """Return what generations would start from, by their request ids.

    `sampling`: the keywords of their start. Raises `LoradockError` for values that it would refuse.
    """
    options = dict(sampling)
    priority = options.pop("priority", 0)
    request = Generate(NO_ID, None, (), Sampling(**options), priority=priority)
    check_arguments(request)
    shown = _shown(request.sampling)
    return [
        Rendered(
            request_id=request_id,
            model=body.model,
            token_ids=tokens,
            sampling_params=shown,
            stream=bool(body.stream),
            stream_options=body.stream_options if body.stream else None,
            priority=priority,
        )
        for request_id, tokens in prompts.items()
    ]


def _shown(sampling: Sampling) -> RenderedSampling:
    """Return sampling parameters under their names in vLLM."""
    values = msgspec.structs.asdict(sampling) | {
        "include_stop_str_in_output": sampling.include_stop,
        "logit_bias": dict(sampling.logit_bias) or None,
        "structured_outputs": _outputs(sampling.structure),
    }
    return RenderedSampling(**{name: values[name] for name in RenderedSampling.__struct_fields__})


def _outputs(structure: Structure | None) -> dict[str, Any] | None:
    match structure:
        case None:
            return None
        case Structure(kind="regex", text=text):
            return {"regex": text}
        case Structure(kind="choice", choices=choices):
            return {"choice": choices}
        case Structure(text=""):
            return {"json_object": True}
    return {"json": structure.text}
