"""The reader of adapters: from untrusted files to weights that fit this model.

Everything is checked before anything is kept, and all problems are reported in one error.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from loradock.engine.adapters.base_copies import comparisons_of
from loradock.engine.adapters.checked_files import CheckedFiles
from loradock.engine.adapters.compatibility import (
    AdapterTarget,
    check_expert_format,
    check_names,
    match_tensors,
)
from loradock.engine.adapters.files.directory import AdapterFiles, open_adapter
from loradock.engine.adapters.files.formats import open_weights
from loradock.engine.adapters.files.problems import Problems, shown
from loradock.engine.adapters.finite_values import check_values
from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel, settle
from loradock.engine.adapters.peft_config import PEFTHelper, decode_config
from loradock.engine.adapters.tensor_names import sort_names
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds
from loradock.engine.errors import AdapterNotFound, EngineError, bounded_details
from loradock.engine.layout import blob_bytes


def read_adapter(  # noqa: PLR0913 - each is needed for reading
    path: str,
    roots: Sequence[Path],
    model: AdapterTarget,
    bounds: AdapterBounds = DEFAULT_BOUNDS,
    adapter: str = "",
    *,
    allow_pickled: bool = False,
    is_follower: bool = False,
    is_3d_lora_weight: bool = False,
    checked: CheckedFiles | None = None,
    is_check: bool = False,
) -> LoadedAdapter:
    """Read the adapter at `path` (absolute, or relative to one of `roots`) and check it completely.

    For sharded modules only this process's part is kept. `adapter` is the name for error texts;
    `allow_pickled` is that of `open_adapter`. A follower reads and checks only its parts and
    computes no fingerprint, which the leader does. `is_3d_lora_weight`: expert tensors must be
    fused; False: as in the file. Values are checked after everything else; those of files that
    `checked` has seen for this model are not checked again. `is_check`: nothing is loaded yet, so
    `checked` keeps what was read for the next call, which returns it if the files are unchanged.
    Raises one `EngineError` for all problems, of the first class among `AdapterConfigRefused`,
    `AdapterDoesNotFit` and `NotFinite`; also `PathNotAllowed`, `AdapterNotFound`,
    `HostOutOfMemory`, and `Conflict` for a file that changes while it is read.
    """
    try:
        with open_adapter(path, roots, allow_pickled=allow_pickled) as files:
            if checked is not None and not is_check and (kept := checked.take(files)):
                return kept
            known = None if checked is None else checked.fingerprint_of(files)
            loaded = _read(files, model, bounds, is_follower, is_3d_lora_weight, known)
            if not is_follower and (is_check or checked is None):
                loaded = _with_tokenizer_checked(files, model, loaded)
            files.check_unchanged()
            if checked is not None:
                checked.remember(files, loaded, keeps=is_check)
            return loaded
    except EngineError as error:
        raise error.about(f"adapter {shown(adapter or path)}") from error
    except OSError as error:
        raise AdapterNotFound(
            f"adapter {shown(adapter or path)} can't be read: {error.strerror}"
        ) from error


def _with_tokenizer_checked(
    files: AdapterFiles, model: AdapterTarget, loaded: LoadedAdapter
) -> LoadedAdapter:
    """Add the warnings about the tokenizer beside the adapter."""
    found = () if model.tokenizer is None else model.tokenizer.warnings_about(files)
    return replace(loaded, warnings=bounded_details((*loaded.warnings, *found)))


def _read(
    files: AdapterFiles,
    model: AdapterTarget,
    bounds: AdapterBounds,
    is_follower: bool,
    is_3d_lora_weight: bool,
    known: str | None,
) -> LoadedAdapter:
    """`known`: the fingerprint of files whose values were checked."""
    problems = Problems(bounds.problems_max)
    config, helper, reader = b"", None, None
    with problems.collecting():
        config = files.read_config(bounds)
        helper = PEFTHelper.read(decode_config(config, bounds), bounds, problems)
    with problems.collecting():
        reader = open_weights(files.weights, bounds)
        if helper is None:
            check_names(sort_names(reader.tensors, model.path_resolver()), problems)
    if helper is None or reader is None:
        raise problems.error()
    with problems.collecting():
        matched = match_tensors(reader.tensors, helper, model.path_resolver(), model, problems)
        check_expert_format(is_3d_lora_weight, matched)
    problems.raise_if_any()
    wanted, compared = matched.submatrices(model.modules), comparisons_of(matched.copies)
    if is_follower or known is not None:
        is_checked, fingerprint = known is not None, known or ""
        found = reader.read(wanted, is_checked=is_checked, visitors=compared)
    else:
        found, fingerprint = reader.read_all(wanted, config, compared)
    matched = settle(matched, compared, found, reader, model, problems)
    dtype = model.lora_config.dtype
    # Experts of other ranks are checked by these.
    kept = [pair for pair in matched.stored() if pair.a in found.ranges]
    check_values(kept, found.ranges, dtype, problems)
    problems.raise_if_any()
    shards = {name: shape.shard for name, shape in model.modules.items()}
    lora_model = LoRAModel.from_matched(1, matched, found.tensors, shards, model.read_base)
    ranks = {name: lora.rank for name, lora in lora_model.loras.items()}
    size_bytes = blob_bytes(ranks, list(model.modules.values()), dtype)
    host_bytes = lora_model.size_bytes
    stamp = f"{files.stamp} {host_bytes} {size_bytes}"
    return LoadedAdapter(
        fingerprint,
        lora_model,
        lora_model.rank,
        host_bytes,
        size_bytes,
        stamp,
        matched.warnings,
    )
