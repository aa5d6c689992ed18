"""The reader of adapters: from untrusted files to weights that fit this model.

The way: open, config, header, names, shapes, values, adapter. Everything is checked before anything
is kept, and all problems are reported in one error.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Final

from loradock.engine.adapters.directory import AdapterFiles, open_adapter
from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.adapters.matching import (
    CopyComparisons,
    check_expert_format,
    check_names,
    match_tensors,
)
from loradock.engine.adapters.pairs import check_values
from loradock.engine.adapters.peft_config import PEFTHelper, decode_config
from loradock.engine.adapters.problems import Problems, shown
from loradock.engine.adapters.reader_process import ReaderProcess, ReadRequest
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.adapters.tensor_names import sort_names
from loradock.engine.adapters.weights import (
    Allocate,
    TensorQuery,
    open_weights,
)
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds
from loradock.engine.errors import AdapterNotFound, EngineError, bounded_details
from loradock.engine.layout import blob_bytes
from loradock.engine.memory import allocate_host

KNOWN_BYTES_MIN: Final = 64 << 20
"""The size of weights from which their fingerprint is remembered.

A file system counts changes in ticks of some milliseconds. Checking this many bytes takes longer
than a tick, so no change after the check can have the time of a change before it.
"""

_FILES_MAX: Final = 1024

_Identity = tuple[tuple[int, ...], ...]


class KnownFiles:
    """The fingerprints of large files whose values were checked, by the files' identity.

    While they are unchanged, a reload after an eviction reads them without digest and value ranges.
    Threads may use it at the same time.
    """

    def __init__(self, bytes_min: int = KNOWN_BYTES_MIN) -> None:
        self._bytes_min = bytes_min
        self._lock = Lock()
        self._fingerprints: OrderedDict[_Identity, str] = OrderedDict()

    def fingerprint_of(self, files: AdapterFiles) -> str | None:
        """Return the fingerprint of files that have not changed since they were checked."""
        with self._lock:
            return self._fingerprints.get(files.identity)

    def add(self, files: AdapterFiles, fingerprint: str) -> None:
        """Remember files that were checked, if they are large; a follower has no fingerprint."""
        if fingerprint and files.weights_bytes >= self._bytes_min:
            with self._lock:
                self._fingerprints[files.identity] = fingerprint
                if len(self._fingerprints) > _FILES_MAX:
                    self._fingerprints.popitem(last=False)


def read_adapter(  # noqa: PLR0913 - each is needed for reading
    path: str,
    roots: Sequence[Path],
    model: AdapterTarget,
    adapter: str = "",
    *,
    bounds: AdapterBounds = DEFAULT_BOUNDS,
    allow_pickled: bool = False,
    is_follower: bool = False,
    is_3d_lora_weight: bool = False,
    known_files: KnownFiles | None = None,
    compares_tokenizer: bool = True,
    reader_process: ReaderProcess | None = None,
) -> LoadedAdapter:
    """Read the adapter at `path` (absolute, or relative to one of `roots`) and check it completely.

    For sharded modules only this process's part is kept. `adapter` is the name for error texts;
    `allow_pickled` is that of `open_adapter`. A follower reads and checks only its parts and
    computes no fingerprint, which the leader does. `is_3d_lora_weight`: expert tensors must be
    fused; False: as in the file. Values are checked after everything else, except those of
    `known_files`, whose fingerprint is known for this model. `reader_process`: reads instead of
    this process, with the model and bounds that it was made with.
    Raises one `EngineError` for all problems, of the first class among `AdapterConfigRefused`,
    `AdapterDoesNotFit` and `NotFinite`; also `PathNotAllowed`, `AdapterNotFound`,
    `HostOutOfMemory`, and `Conflict` for a file that changes while it is read.
    """
    bounds = model.bounded(bounds)
    try:
        with open_adapter(path, roots, allow_pickled=allow_pickled, bounds=bounds) as files:
            known = None if known_files is None else known_files.fingerprint_of(files)
            request = ReadRequest(is_follower, is_3d_lora_weight, known, compares_tokenizer)
            if reader_process is None:
                loaded = read_opened(files, model, bounds, request)
            else:
                loaded = reader_process.read(files, request)
            files.check_unchanged()
            if known_files is not None:
                known_files.add(files, loaded.fingerprint)
            return loaded
    except EngineError as error:
        raise error.about(f"adapter {shown(adapter or path)}") from error
    except OSError as error:
        raise AdapterNotFound(
            f"adapter {shown(adapter or path)} can't be read: {error.strerror}"
        ) from error


def read_opened(
    files: AdapterFiles,
    model: AdapterTarget,
    bounds: AdapterBounds,
    request: ReadRequest,
    allocate: Allocate = allocate_host,
) -> LoadedAdapter:
    """Read and check open files; `allocate` returns the memory of the weights."""
    known, is_follower = request.fingerprint, request.is_follower
    problems = Problems(bounds.problems_max)
    config, helper, reader = b"", None, None
    with problems.collecting():
        config = files.read_config(bounds)
        helper = PEFTHelper.read(decode_config(config, bounds), bounds, problems)
    with problems.collecting():
        reader = open_weights(files.weights, bounds, allocate)
        if helper is None:
            check_names(sort_names(reader.tensors, model.path_resolver()), problems)
    if helper is None or reader is None:
        raise problems.error()
    with problems.collecting():
        matched = match_tensors(reader.tensors, helper, model.path_resolver(), model, problems)
        check_expert_format(request.is_3d_lora_weight, matched)
    problems.raise_if_any()
    compared = CopyComparisons(matched)
    digested = config if known is None and not is_follower else None
    wanted = matched.submatrices(model.modules)
    found = reader.read(TensorQuery(wanted, compared.inspectors, digested, known is None))
    matched = compared.settle(found, model, problems)
    dtype = model.lora_config.dtype
    # Experts of other ranks are checked by these.
    measured = [pair for pair in matched.stored() if pair.a in found.ranges]
    check_values(measured, found.ranges, dtype, problems)
    problems.raise_if_any()
    shards = {name: shape.shard for name, shape in model.modules.items()}
    lora_model = LoRAModel.from_matched(1, matched, found.tensors, shards, model.read_base)
    ranks = {name: lora.rank for name, lora in lora_model.loras.items()}
    size_bytes = blob_bytes(ranks, list(model.modules.values()), dtype)
    host_bytes = lora_model.size_bytes
    stamp = f"{files.stamp} {host_bytes} {size_bytes}"
    warnings = matched.warnings
    if request.compares_tokenizer and not is_follower and model.tokenizer is not None:
        warnings = bounded_details((*warnings, *model.tokenizer.warnings_about(files)))
    return LoadedAdapter(
        known or found.fingerprint,
        lora_model,
        lora_model.rank,
        host_bytes,
        size_bytes,
        stamp,
        warnings,
    )
