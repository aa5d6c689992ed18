"""The source of a model's weights: a directory that `save_pretrained` of `transformers` wrote."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import torch

from loradock.engine.models.library.registry import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from loradock.engine.models.library.stand_ins import NameAbsent
from loradock.engine.models.weights.saved_shards import NotInParts, SavedShards
from loradock.engine.parallel import ParameterShard

LOCAL: Final[Mapping[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every load: no network, no code from the directory."""

_OPTIONS: Final = {
    "use_safetensors": True,
    "output_loading_info": True,
    **LOCAL,
}


class Split(Protocol):
    """A model that was split, of which this process holds a part."""

    def shards(self) -> Mapping[str, ParameterShard]:
        """Return this rank's part of each parameter that is not whole, by its name."""

    def absent(self) -> Collection[str]:
        """Return the names of the whole model's parameters that this rank lacks."""

    def finish(self, bytes_read: int) -> None:
        """Complete the model once its weights are read."""


S = TypeVar("S", bound=Split)


class WeightsSource(NamedTuple):
    """A saved model: its directory, the class of `transformers` that loads it, and its config.

    `dtype`: of the loaded model; "auto" is the one that it was saved in.
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

    def read_parts(self, split: Callable[[PreTrainedModel], S]) -> tuple[S, Iterable[str]]:
        """Read one rank's part of the model; of files that are converted in unusual ways, all.

        `split` splits a model, and is called before its weights are read where that is possible.
        """
        try:
            return self._read_parts(split)
        except (NotInParts, NameAbsent):
            model, missing = self.read()
            return split(model), missing

    def _read_parts(self, split: Callable[[PreTrainedModel], S]) -> tuple[S, Iterable[str]]:
        saved, shardings = SavedShards(self.directory), []
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
        shardings[0].finish(saved.bytes_read)
        return shardings[0], report["missing_keys"]

    def _generation_config(self) -> GenerationConfig | None:
        """Return the directory's own settings of generation; the model's config has some too."""
        if not (self.directory / "generation_config.json").is_file():
            return None
        return GenerationConfig.from_pretrained(self.directory, **LOCAL)
