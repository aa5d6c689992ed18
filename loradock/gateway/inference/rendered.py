"""What a generation would start from, under vLLM's names: the answers of the `render` endpoints."""

from typing import Any, cast

import msgspec
from msgspec import Struct

from loradock.client.arguments import SamplingOptions, check_arguments, generate_request
from loradock.gateway.inference.sampling import SamplingFields, StreamOptions
from loradock.messages.prompts import Sampling, Structure


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
    request_id: str, tokens: tuple[int, ...], sampling: dict[str, Any], body: SamplingFields
) -> Rendered:
    """Return what a generation would start from; `sampling`: the keywords of its start.

    Raises `LoradockError` for values that the start would refuse.
    """
    options = dict(sampling)
    priority = options.pop("priority", 0)
    request = generate_request(tokens, None, cast("SamplingOptions", options), priority)
    check_arguments(request)
    return Rendered(
        request_id=request_id,
        model=body.model,
        token_ids=tokens,
        sampling_params=_shown(request.sampling),
        stream=bool(body.stream),
        stream_options=body.stream_options if body.stream else None,
        priority=priority,
    )


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
