"""The library's own generation: what a model is given for the next tokens of one row.

What a row keeps between two tokens is the model's business: a cache of any kind under any name, or
nothing. Names are found in signatures and in what a forward pass returns; none is known here.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

_CACHE: Final = "past_key_values"
_NO_TOKEN: Final = (1 << 31) - 1


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument of a model's forward that is a cache."""
    for forward in (model.forward, model.base_model.forward):
        for name, parameter in inspect.signature(forward).parameters.items():
            if "Cache" in str(parameter.annotation):
                return name
    return _CACHE


def next_inputs(
    model: PreTrainedModel,
    tokens: Tensor,
    state: Mapping[str, Any],
    new: int | None,
    *,
    with_positions: bool,
) -> dict[str, Any]:
    """Return the inputs of a forward for the last `new` of a row's tokens; None: for all of them.

    tokens: [1, tokens] int64, the whole row. `state`: of the tokens before; see `state_after`.
    `with_positions`: also `position_ids`, without which some models count for themselves.
    """
    mask = torch.ones_like(tokens)
    arguments: dict[str, Any] = {"use_cache": True, "attention_mask": mask}
    if with_positions:
        arguments |= _positions(model, tokens, mask)
    inputs: dict[str, Any] = model.prepare_inputs_for_generation(
        tokens, next_sequence_length=new, is_first_iteration=new is None, **arguments, **state
    )
    return inputs


def _positions(model: PreTrainedModel, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)
    if prepare is None:
        return {"position_ids": torch.arange(tokens.shape[1], device=tokens.device)[None]}
    positions = prepare(tokens, {"attention_mask": mask})
    return {} if positions is None else {"position_ids": positions}


def state_after(model: PreTrainedModel, output: Any) -> dict[str, Any]:
    """Return what a model keeps for a row's next tokens, by argument; empty if it keeps nothing."""
    update = getattr(model, "_update_model_kwargs_for_generation", None)
    return {} if update is None else dict(update(output, {}))


class _Forced:
    """A processor that makes `generate` choose the given tokens, one per step, and then token 0."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter([*tokens, 0])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores that leave one token; both are [1, ...]."""
        del input_ids
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, next(self._tokens)] = 0
        return chosen


def generated_logits(
    model: PreTrainedModel, prompt: Sequence[int], steps: Sequence[int], *, with_cache: bool = True
) -> Tensor:
    """Return the logits after a prompt and after each of `steps`, by the model's own `generate`.

    Returns [1 + steps, vocabulary], before any processing of scores. `with_cache` False: all tokens
    are computed at each step, which is what a cache is meant to save.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    output: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=[_Forced(steps)],
        max_new_tokens=len(steps) + 1,
        # No token is this one, so none of the steps ends the text.
        eos_token_id=_NO_TOKEN,
        do_sample=False,
        num_beams=1,
        use_cache=with_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(output.logits)


@contextmanager
def use_attention(configs: Sequence[PretrainedConfig], name: str) -> Iterator[None]:
    """Use a registered implementation in models with these configurations, without padding.

    `configs`: of a model, parents before their parts.
    """
    before = [config._attn_implementation for config in configs]
    padding = [vars(config).get("pad_token_id") for config in configs]
    for config in configs:
        config._attn_implementation = name
        # With one a model reads tokens on the host, to warn about a missing mask. Some classes
        # accept no None.
        vars(config)["pad_token_id"] = None
    try:
        yield
    finally:
        # A parent's assignment reaches its parts, which follow with their own values.
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        for config, token in zip(configs, padding, strict=True):
            vars(config)["pad_token_id"] = token
