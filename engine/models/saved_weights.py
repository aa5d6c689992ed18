"""The weights of a saved model: a directory that `save_pretrained` of `transformers` wrote.

`transformers` loads the saved tensors: it renames and stacks them, and indexes each one once, which
reads it. What a rank does not hold is never read.
"""

import copy
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any, Final, Literal, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from loradock.engine.models.library.names import (
    Concatenate,
    GenerationConfig,
    MergeModulelist,
    NameAbsent,
    PreTrainedConfig,
    PreTrainedModel,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    get_model_conversion_mapping,
    rename_source_key,
    set_tqdm_hook,
)
from loradock.engine.models.sharding import Sharding
from loradock.engine.parallel import WHOLE_PARAMETER, ParameterShard

_WHOLE_FILE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


class NotInParts(Exception):  # noqa: N818 - named by what was found, as the engine's errors
    """This saved model can't be read in parts; it has to be read whole."""


class SavedTensor:
    """A tensor in a file, of which `shard` is read when it is indexed."""

    def __init__(self, source: Any) -> None:
        """`source`: a slice of `safetensors`."""
        self._source = source
        self.shape: list[int] = source.get_shape()
        self.shard = WHOLE_PARAMETER

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        found: torch.dtype = self._source[0:0].dtype if self.shape else self._source[...].dtype
        return found

    def is_floating_point(self) -> bool:
        """Return whether its dtype is one of floating point."""
        return self.dtype.is_floating_point

    def __getitem__(self, index: EllipsisType) -> Tensor:
        """Read the shard."""
        if self.shard.is_zero:
            return torch.zeros(self.shape, dtype=self.dtype)
        if self.shard.ranges is None:
            whole: Tensor = self._source[...]
            return whole
        parts = [self._source[index] for index in self.shard.indices(len(self.shape))]
        return torch.cat(parts, dim=self.shard.dimension)


class SavedShards(dict[str, Any]):
    """The tensors of a saved model by name; an instance is the `state_dict` of `from_pretrained`.

    Raises `NotInParts` for a directory without safetensors files of the usual names.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        for name in _files(directory):
            # The slices keep the file open until they are dropped.
            file: Any = safe_open(directory / name, framework="pt")
            self.update({key: SavedTensor(file.get_slice(key)) for key in file.keys()})  # noqa: SIM118

    def select(
        self, model: PreTrainedModel, shards: Mapping[str, ParameterShard], absent: Collection[str]
    ) -> None:
        """Keep what `model`, already split, holds: `shards` by the names of its parameters.

        `absent`: parameters of the whole model that this rank lacks. Raises `NotInParts` if files
        are converted to sharded parameters in another way than by stacking.
        """
        names = _Names(model, absent)
        found: dict[str, list[str]] = {}
        stacked: dict[str, dict[str, list[str]]] = {}
        for key in sorted(self, key=dot_natural_key):
            name, pattern = names.of(key)
            if name in absent:
                del self[key]
                continue
            found.setdefault(name, []).append(key)
            if pattern is None:
                self[key].shard = shards.get(name, WHOLE_PARAMETER)
            else:
                stacked.setdefault(name, {}).setdefault(pattern, []).append(key)
        for name, sources in stacked.items():
            converter = names.converters[next(iter(sources))]
            if any(target in shards for target in _targets(converter, name)):
                self._select_stacked(converter, shards.get(name, WHOLE_PARAMETER), sources)
        self._drop_tied(model, shards, found)

    def _select_stacked(
        self,
        converter: WeightConverter,
        shard: ParameterShard,
        sources: Mapping[str, Sequence[str]],
    ) -> None:
        """Set the shards of tensors [a, b] that are stacked to [count, a, b] and concatenated."""
        concatenated = _concatenated_dimension(converter)
        if shard.ranges is None:
            raise NotInParts("several parameters are made of one tensor")
        offset = 0
        for pattern in converter.source_patterns:
            keys = sources.get(pattern, ())
            if shard.dimension == 0:
                kept = {number for part in shard.ranges for number in part}
                for number, key in enumerate(keys):
                    if number not in kept:
                        del self[key]
                continue
            for key in keys:
                ranges = shard.ranges
                if concatenated == shard.dimension:
                    width = self[key].shape[shard.dimension - 1]
                    ranges = _within(ranges, offset, width)
                self[key].shard = ParameterShard(shard.dimension - 1, ranges)
            if keys and concatenated == shard.dimension:
                offset += width

    def _drop_tied(
        self,
        model: PreTrainedModel,
        shards: Mapping[str, ParameterShard],
        found: Mapping[str, Sequence[str]],
    ) -> None:
        """Drop tied parameters that are saved twice if their shards differ."""
        for target, source in model.all_tied_weights_keys.items():
            if shards.get(target) == shards.get(source):
                continue
            if source in shards or source not in found:
                raise NotInParts(f"{target} is tied to {source}, of which a rank has another part")
            for key in found.get(target, ()):
                del self[key]


class _Names:
    """The names of a model's parameters by those in its files, as `transformers` converts them."""

    def __init__(self, model: PreTrainedModel, absent: Collection[str]) -> None:
        """`absent`: parameters of the files that the model lacks."""
        transforms = get_model_conversion_mapping(model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self.converters = {
            pattern: one for one in self._converters for pattern in one.source_patterns
        }
        self._prefix = model.base_model_prefix
        meta = torch.empty(0, device="meta")
        self._parameters = model.state_dict() | dict.fromkeys(absent, meta)

    def of(self, key: str) -> tuple[str, str | None]:
        """Return the parameter of a key and the pattern of its converter, if it has one."""
        name, pattern = self._renamed(key, self._renamings, self._converters)
        if name not in self._parameters and key in self._parameters:
            name, pattern = self._renamed(key, [], [])
        return name, pattern

    def _renamed(
        self, key: str, renamings: list[WeightRenaming], converters: list[WeightConverter]
    ) -> tuple[str, str | None]:
        found: tuple[str, str | None] = rename_source_key(
            key, renamings, converters, self._prefix, self._parameters
        )
        return found


def _files(directory: Path) -> list[str]:
    """Return the names of the files with a model's tensors."""
    if (directory / _WHOLE_FILE).is_file():
        return [_WHOLE_FILE]
    try:
        index = msgspec.json.decode((directory / _INDEX).read_bytes(), type=_Index)
    except OSError as error:
        raise NotInParts(f"{directory} has neither {_WHOLE_FILE} nor {_INDEX}") from error
    return sorted(set(index.weight_map.values()))


class _Index(msgspec.Struct):
    """The file that names the file of each tensor."""

    weight_map: dict[str, str]


def _targets(converter: WeightConverter, name: str) -> list[str]:
    """Return the parameters that a converter makes; `name` is the first of them."""
    first, *others = converter.target_patterns
    return [name, *(name.replace(first, other) for other in others)]


def _concatenated_dimension(converter: WeightConverter) -> int | None:
    """Return the dimension in which stacked tensors are concatenated, None if they are not."""
    match converter.operations:
        case [MergeModulelist(dim=0)]:
            return None
        case [MergeModulelist(dim=0), Concatenate(dim=dimension)] if dimension > 0:
            return int(dimension)
    names = [type(operation).__name__ for operation in converter.operations]
    raise NotInParts(f"tensors are converted by {', '.join(names)}")


def _within(ranges: Sequence[range], offset: int, width: int) -> tuple[range, ...]:
    """Return the parts of ranges in the columns [offset, offset + width), counted from there."""
    parts = (range(max(part.start - offset, 0), min(part.stop - offset, width)) for part in ranges)
    return tuple(part for part in parts if part)


LOCAL: Final[Mapping[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every load: no network, no code from the directory."""

_OPTIONS: Final = {
    "use_safetensors": True,
    "output_loading_info": True,
    **LOCAL,
}


class WeightsSource(NamedTuple):
    """A saved model: its directory, the class of `transformers` that loads it, and its config.

    `dtype`: of the loaded model; "auto" is the dtype that it was saved in.
    """

    directory: Path
    loader: Any
    config: PreTrainedConfig
    dtype: torch.dtype | Literal["auto"] = "auto"

    def read(self, **options: Any) -> tuple[PreTrainedModel, Iterable[str]]:
        """Return the whole model and the names of weights that it lacks."""
        model, report = self.loader.from_pretrained(
            self.directory, dtype=self.dtype, **_OPTIONS, **options
        )
        return model, report["missing_keys"]

    def read_parts(
        self, split: Callable[[PreTrainedModel], Sharding]
    ) -> tuple[Sharding, Iterable[str]]:
        """Read one rank's part of the model; of files that are converted in unusual ways, all.

        `split` splits a model, and is called before its weights are read if that is possible.
        """
        try:
            return self._read_parts(split)
        except (NotInParts, NameAbsent):
            model, missing = self.read()
            return split(model), missing

    def _read_parts(
        self, split: Callable[[PreTrainedModel], Sharding]
    ) -> tuple[Sharding, Iterable[str]]:
        saved, shardings = SavedShards(self.directory), list[Sharding]()
        with torch.device("meta"):
            example = self.loader.from_config(copy.deepcopy(self.config))
        whole_class = type(example)

        def initialize(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
            """Build the model, without weights, and split it before they are read."""
            whole_class.__init__(model, *arguments, **options)
            sharding = split(model)
            saved.select(model, sharding.shards(), sharding.absent())
            shardings.append(sharding)

        # `transformers` selects conversions of weights by these two names.
        members = {"__init__": initialize, "__module__": whole_class.__module__}
        split_class: Any = type(whole_class.__name__, (whole_class,), members)
        config = (
            self.config if isinstance(self.config, whole_class.config_class) else example.config
        )
        model, report = split_class.from_pretrained(
            None,
            config=config,
            state_dict=saved,
            generation_config=self._generation_config(),
            dtype=self.dtype,
            **_OPTIONS,
        )
        model.__class__ = whole_class
        shardings[0].finish()
        return shardings[0], report["missing_keys"]

    def _generation_config(self) -> GenerationConfig | None:
        """Return the directory's own settings of generation; the model's config has some too."""
        if not (self.directory / "generation_config.json").is_file():
            return None
        return GenerationConfig.from_pretrained(self.directory, **LOCAL)


INTERVAL_S: Final = 5.0
"""The time between two reports."""

Report = Callable[[int, int], None]
"""Receives the numbers of loaded tensors and of all tensors."""

_LOADING: Final = "Loading weights"
"""The title of the progress bar of `transformers`."""


@contextmanager
def reporting(report: Report, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Call `report` from time to time while a model is loaded, and at the end of its tensors."""

    def bar_of(
        make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if options.get("desc") != _LOADING or len(arguments) != 1:
            return make(*arguments, **options)
        return _reported(arguments[0], report, clock)

    previous = set_tqdm_hook(bar_of)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _reported(tensors: Any, report: Report, clock: Callable[[], float]) -> Iterator[Any]:
    total, due = len(tensors), clock() + INTERVAL_S
    for done, tensor in enumerate(tensors):
        if clock() >= due:
            report(done, total)
            due = clock() + INTERVAL_S
        yield tensor
    report(total, total)
