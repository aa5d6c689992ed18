"""Adapters: from files that somebody else wrote to weights that fit this model.

What it is: `read_adapter`, and the names under which its parts are imported. What it is not: a
keeper of adapters; whoever asks holds the answer. One rule: everything is checked before anything
is kept, and all that is wrong is told in one error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.compatibility import ModelSide, check_names, fit
from engine.adapters.files.directory import AdapterFiles, open_adapter
from engine.adapters.files.formats import open_weights
from engine.adapters.files.problems import Problems, shown
from engine.adapters.finite_values import check_values
from engine.adapters.lora_model import (
    LoRAModel,
)
from engine.adapters.peft_config import PEFTHelper, decode_config
from engine.adapters.tensor_names import sort_names
from engine.config import DEFAULT_BOUNDS, AdapterBounds
from engine.errors import EngineError
from engine.layout import blob_bytes


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that was read and checked.

    `fingerprint`: see `start_fingerprint`; empty where a follower read it. `model`: its weights as
    they were stored, under id 1, of sharded modules this process's part. `rank`: its highest.
    `host_bytes`: what the weights take; `blob_bytes`: what they will take staged, on the host and
    on the device alike. `stamp`: what all ranks have to find alike: the files, and these sizes.
    """

    fingerprint: str
    model: LoRAModel
    rank: int
    host_bytes: int
    blob_bytes: int
    stamp: str = ""


def read_adapter(  # noqa: PLR0913 - each is a fact that reading needs
    path: str,
    roots: Sequence[Path],
    model: ModelSide,
    bounds: AdapterBounds = DEFAULT_BOUNDS,
    adapter: str = "",
    *,
    allow_pickled: bool = False,
    is_follower: bool = False,
) -> LoadedAdapter:
    """Read the adapter at `path` (absolute, or relative to one of `roots`) and check it completely.

    Of sharded modules this process's part is kept. `adapter` is the name for texts; `allow_pickled`
    is `open_adapter`'s. A follower reads nothing but its parts, judges the values of these alone
    and makes no fingerprint: somebody else does. Values are looked at once all else is sound.
    Raises one `EngineError` that tells all that was found: `AdapterConfigRefused` before
    `AdapterDoesNotFit` before `NotFinite` where there is more than one kind; `PathNotAllowed`,
    `AdapterNotFound`, `Conflict` for a file that changes meanwhile, `HostOutOfMemory`.
    """
    try:
        with open_adapter(path, roots, allow_pickled=allow_pickled) as files:
            loaded = _read(files, model, bounds, is_follower)
            files.check_unchanged()
            return loaded
    except EngineError as error:
        raise type(error)(f"adapter {shown(adapter or path)}: {error}") from error


def _read(
    files: AdapterFiles, model: ModelSide, bounds: AdapterBounds, is_follower: bool
) -> LoadedAdapter:
    problems = Problems(bounds.problems_max)
    config, helper, reader = b"", None, None
    with problems.collecting():
        config = files.read_config(bounds)
        helper = PEFTHelper.read(decode_config(config, bounds), bounds, problems)
    with problems.collecting():
        reader = open_weights(files.weights, bounds)
        if helper is None:
            check_names(sort_names(reader.tensors, model.naming()), None, problems)
    if helper is None or reader is None:
        raise problems.error()
    with problems.collecting():
        fitted = fit(reader.tensors, helper, model.naming(), model, problems)
    problems.raise_if_any()
    wanted = fitted.parts(model.modules)
    found, fingerprint = (
        (reader.read(wanted), "") if is_follower else reader.read_all(wanted, config)
    )
    dtype = model.lora_config.dtype
    # What other ranks keep of the experts is theirs to judge.
    own = [pair for pair in fitted.stored() if pair.a in wanted]
    check_values(own, found.ranges, dtype, problems)
    problems.raise_if_any()
    shards = {name: shape.shard for name, shape in model.modules.items()}
    lora_model = LoRAModel.from_fitted(1, fitted, found.tensors, shards)
    ranks = {name: lora.rank for name, lora in lora_model.loras.items()}
    size_bytes = blob_bytes(ranks, list(model.modules.values()), dtype)
    host_bytes = lora_model.size_bytes
    stamp = f"{files.stamp} {host_bytes} {size_bytes}"
    return LoadedAdapter(fingerprint, lora_model, lora_model.rank, host_bytes, size_bytes, stamp)
