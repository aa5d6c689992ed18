"""What an engine can be told beyond its limits, as `loradock serve` passes it on.

What it is: one record, and the words of a command line. What it is not: a judge of values; the
engine is, and ends with a word for a wrong one. One rule: names, types and defaults are those of
the engine's own configurations, which the controller does not import; a test holds them equal.
"""

from typing import Final

import msgspec
from msgspec import Struct


class EngineOptions(Struct, frozen=True):
    """The fields of `engine.config`'s records that are neither a limit nor a path of `serve`."""

    max_lora_rank: int = 16
    lora_dtype: str = "auto"
    target_modules: tuple[str, ...] = ()
    fully_sharded_loras: bool = False
    default_mm_loras: tuple[str, ...] = ()
    enable_tower_connector_lora: bool = False
    specialize_active_lora: bool = False
    dual_stream: bool = False
    batch_invariant: bool = False
    enable_mixed_moe_lora_format: bool = False
    allow_pickled_weights: bool = False
    device: str = "auto"
    pin_memory: bool | None = None
    file_threads: int = 2
    max_num_seqs: int = 64
    queue_requests_max: int = 1024
    context_tokens_max: int = 0
    task: str = "auto"
    pooling: str = "auto"
    normalize: bool | None = None
    expert_parallel: bool = False
    capture_steps: bool = False

    def command_line(self) -> list[str]:
        """The engine's options for everything that is not at its default."""
        words: list[str] = []
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words += _words(field.name, value)
        return words


REPEATED: Final = {"target_modules": "target-module", "default_mm_loras": "default-mm-lora"}
"""Fields of several values: their option is given once for each."""


def option_name(field: str) -> str:
    """The option of a field, without its dashes."""
    return REPEATED.get(field) or field.replace("_", "-")


def _words(field: str, value: object) -> list[str]:
    name = option_name(field)
    match value:
        case bool():
            return [f"--{name}" if value else f"--no-{name}"]
        case tuple():
            # One word each, so that a value may begin with a dash.
            return [f"--{name}={one}" for one in value]
        case _:
            return [f"--{name}={value}"]
