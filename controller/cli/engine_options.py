"""`serve`'s options for the engine.

What it is: one table of help texts, and what makes options of it. What it is not: the engine's
configuration, which judges their values. One rule: every field of `EngineOptions` is an option,
with that record's default.
"""

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, Final

import msgspec
import typer

from controller.shell.engine_options import REPEATED, EngineOptions, option_name

_PANEL: Final = "Engine"

HELP: Final = {
    "max_lora_rank": "The widest adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512.",
    "lora_dtype": "Adapters' dtype: auto (the base model's), float16, bfloat16 or float32.",
    "target_modules": "Adapt only this module, a suffix or a full name; repeatable.",
    "fully_sharded_loras": "With several ranks, shard also the half that each would hold whole.",
    "default_mm_loras": "Adapter of requests that bring images and name none: image=PATH.",
    "enable_tower_connector_lora": "Adapters in a multimodal model's tower and connector too.",
    "specialize_active_lora": "Size kernels by a batch's adapters instead of by the slots.",
    "dual_stream": "Run adapters beside the base layer, on a second stream; CUDA only.",
    "batch_invariant": "Give a row the same bits in every batch.",
    "enable_mixed_moe_lora_format": "Serve 2-D and 3-D expert adapters side by side.",
    "allow_pickled_weights": "Read .bin and .pt weights where there are no others; tensors only.",
    "device": "A torch device, or auto: the first CUDA device where there is one.",
    "pin_memory": "Page-lock staged adapters; where it is not said, only for CUDA.",
    "file_threads": "Threads that read adapters, and as many that read images.",
    "max_num_seqs": "The most rows in a batch.",
    "queue_requests_max": "Requests that may wait in the engine.",
    "context_tokens_max": "Prompt and output together; 0 is the model's own limit.",
    "task": "What the model is for: generate, embed, classify, or auto: what its config says.",
    "pooling": "How tokens become one vector: mean, cls, last, or auto: as the model was saved.",
    "normalize": "Embeddings of length 1; where it is not said, as the model was saved.",
    "expert_parallel": "Each rank keeps some experts whole, not some columns of each.",
    "capture_steps": "Replay decode steps as CUDA graphs, where the model's can be; CUDA only.",
}

_METAVARS: Final = {
    "lora_dtype": "NAME",
    "target_modules": "MODULE",
    "default_mm_loras": "MODALITY=PATH",
    "device": "DEVICE",
    "task": "TASK",
    "pooling": "KIND",
}


_THREE_WAYS: Final = ("pin_memory", "normalize")
"""On, off, or not said."""


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with all these options, which it gets as one argument, `engine_options`."""
    fields = msgspec.structs.fields(EngineOptions)
    own = inspect.signature(command, eval_str=True)
    kept = [parameter for name, parameter in own.parameters.items() if name != "engine_options"]

    @functools.wraps(command)
    def run(*positional: Any, **given: Any) -> None:
        values = {field.name: given.pop(field.name) for field in fields}
        command(*positional, **given, engine_options=engine_options(values))

    options = [_parameter(field) for field in fields]
    # How a function tells what it takes is its signature; typer reads no other.
    run.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return run


def engine_options(values: dict[str, Any]) -> EngineOptions:
    """The record of what the options say."""
    return EngineOptions(**{name: _value(name, value) for name, value in values.items()})


def _value(name: str, value: Any) -> Any:
    return tuple(value or ()) if name in REPEATED else value


def _parameter(field: Any) -> Parameter:
    is_repeated = field.name in REPEATED
    is_number = field.type is int
    name = option_name(field.name)
    option = typer.Option(
        None if is_repeated else field.default,
        f"--{name}/--no-{name}" if field.name in _THREE_WAYS else f"--{name}",
        help=HELP[field.name],
        rich_help_panel=_PANEL,
        metavar=_METAVARS.get(field.name, "NUMBER" if is_number else None),
        min=0 if is_number else None,
    )
    kind = list[str] | None if is_repeated else field.type
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=option, annotation=kind)
