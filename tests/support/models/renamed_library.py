"""A process in which `transformers` has other names: a version that nobody has seen yet.

`install` renames arguments, layers and functions in the source of each of its modules, when that
is imported. `main` serves a saved model with it, and prints what was found as JSON.
"""

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

import msgspec

RENAMED: Final = {
    "arguments": ("past_key_values", "logits_to_keep"),
    "layers": (
        *("Cache", "CacheLayerMixin", "DummyLayer", "DynamicCache", "DynamicLayer"),
        *("DynamicIndexedLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "Conv1D"),
    ),
    "functions": (
        *("_prepare_position_ids_for_generation", "_update_model_kwargs_for_generation"),
        *("causal_mask_function", "get_model_conversion_mapping", "rename_source_key"),
        *("disable_progress_bar", "set_tqdm_hook", "AttentionInterface", "AttentionMaskInterface"),
    ),
}
"""Names of the library that the engine uses; each gets an ending."""

_PATTERN: Final = re.compile(
    rf"\b({'|'.join(name for names in RENAMED.values() for name in names)})\b"
)


class Served(msgspec.Struct):
    """What a model was served with, and its output."""

    batching: str
    refusal: str
    tokens: list[int]


class _Loader(SourceFileLoader):
    """Renames in the source, which is compiled at each import."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = _PATTERN.sub(r"\1_2", self.get_data(path).decode())
        return compile(source, path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find modules of the library as Python does, and load them renamed."""
        if fullname.partition(".")[0] != "transformers":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def main(model: Path, tokens: int) -> None:
    """Serve the model in `model`, and print `Served` for an output of this many tokens."""
    sys.meta_path.insert(0, _Finder())
    # After the finder is installed.
    # ruff: noqa: PLC0415
    from loradock.engine.config import EngineConfig, LoRAConfig
    from loradock.engine.models.loading import load_model
    from tests.support.engine.engine_bench import EngineBench

    config = EngineConfig(model, (model,), device="cpu", device_bytes_max=1 << 20)
    lora = LoRAConfig(max_lora_rank=16, max_loras=2)
    served = load_model(config, lora)
    bench = EngineBench(served, config, lora)
    op = bench.generate(0, -1, 0, tokens)
    bench.wait(op)
    statistics = bench.engine.statistics()
    found = Served(statistics.batching, statistics.batching_refusal, bench.tokens(op))
    bench.engine.close()
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
