"""Prompts and inputs of clients, and the sampling of tokens.

Prompts and inputs are never logged.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta

from loradock.messages.base import Value

PROMPT_CHARACTERS_MAX: Final = 1_000_000
"""Bound on the text of a prompt, in characters."""

PROMPT_TOKENS_MAX: Final = 262_144
"""Bound on the token ids of a prompt."""

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, Meta(max_length=PROMPT_CHARACTERS_MAX)]
TextPrompt = Text | Annotated[tuple[TokenId, ...], Meta(max_length=PROMPT_TOKENS_MAX)]
Inputs = Annotated[tuple[TextPrompt, ...], Meta(min_length=1, max_length=2048)]

Dimensions = Annotated[int, Meta(ge=0, le=1 << 20)]
"""The length of an embedding's vector; 0: the model's own."""

IMAGE_BYTES_MAX: Final = 8 << 20
"""Bound on the size of an image file, in bytes: a camera's photograph fits."""

IMAGES_MAX: Final = 16
"""Bound on the number of images of a prompt."""

IMAGES_BYTES_MAX: Final = 32 << 20
"""Bound on the size of all images of a prompt together, in bytes."""

Image = Annotated[bytes, Meta(min_length=1, max_length=IMAGE_BYTES_MAX)]
"""The bytes of an image file (PNG, JPEG, ...); the engine decides which formats it reads."""


class MultimodalPrompt(Value, frozen=True, array_like=False):
    """A text with images: `text` has the model's placeholder once per image, in their order."""

    # Encoded as a map, to distinguish it from token ids, which are an array.
    text: Text
    images: Annotated[tuple[Image, ...], Meta(min_length=1, max_length=IMAGES_MAX)]


Prompt = TextPrompt | MultimodalPrompt


class Truncation(Value, frozen=True):
    """Cut a prompt of more than `tokens` tokens on this side; 0: of more than the context has."""

    tokens: Annotated[int, Meta(ge=0, le=PROMPT_TOKENS_MAX)] = 0
    side: Literal["left", "right"] = "right"

    def cut(self, tokens: list[int], content: list[int], tokens_max: int) -> list[int]:
        """Return at most `tokens_max` tokens.

        `content`: the tokens without those that the tokenizer adds to every text. The added ones
        are kept if they leave space for a token of the content.
        """
        if len(tokens) <= tokens_max:
            return tokens
        first = _place(content, tokens)
        before, after = tokens[:first], tokens[first + len(content) :]
        space = tokens_max - len(before) - len(after)
        if space < 1:
            before, content, after, space = [], tokens, [], tokens_max
        kept = content[-space:] if self.side == "left" else content[:space]
        return [*before, *kept, *after]


def _place(content: list[int], tokens: list[int]) -> int:
    """Return where `content` begins in `tokens`; 0 if it is not a part of them."""
    added = len(tokens) - len(content)
    places = range(1, added + 1)
    return next((one for one in places if tokens[one : one + len(content)] == content), 0)


MAX_TOKENS_DEFAULT: Final = 128

TokenBias = tuple[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]]
"""A token, and what is added to its logit."""


STRUCTURE_TEXT_MAX: Final = 65_536
"""Bound on a schema or a regular expression, in characters."""

CHOICES_MAX: Final = 1024
"""Bound on the number of texts of a `Structure` of kind `choice`."""

LOGPROBS_MAX: Final = 20
"""Bound on the number of most likely tokens that are reported per token."""

N_MAX: Final = 128
"""Bound on the number of outputs of one request."""

Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
"""A request's priority, 0 unless set; smaller numbers are served first."""


class Structure(Value, frozen=True):
    """Constraint on the whole output: the only tokens that are chosen are those that lead to it.

    `text` is a JSON schema or a regular expression (of the whole output, without look-around); an
    empty schema allows any JSON object. A `choice` is one of `choices`. An output that `max_tokens`
    ends can be incomplete.
    """

    kind: Literal["json_schema", "regex", "choice"]
    text: Annotated[str, Meta(max_length=STRUCTURE_TEXT_MAX)] = ""
    choices: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=4096)], ...],
        Meta(max_length=CHOICES_MAX),
    ] = ()


class Sampling(Value, frozen=True):
    """Sampling parameters; temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 do not filter.

    `max_tokens` 0: `MAX_TOKENS_DEFAULT`, or fewer if the model's context has no space for more.

    Penalties of 0 (`repetition_penalty`: 1) change nothing. `min_tokens`: tokens before the output
    may end. `stop_token_ids` end the output as the model's own end tokens do, which `ignore_eos`
    disables. `include_stop`: the stop string is part of the text. `logprobs` (of the output) and
    `prompt_logprobs`: log-probabilities are reported, with that number of most likely tokens. `n`:
    outputs of the prompt; output number i is sampled with `seed` + i. `skip_special_tokens`: no
    special token has a text.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)
    ] = ()
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    logit_bias: Annotated[tuple[TokenBias, ...], Meta(max_length=1024)] = ()
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=256)] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    n: Annotated[int, Meta(ge=1, le=N_MAX)] = 1
    structure: Structure | None = None
    skip_special_tokens: bool = True
