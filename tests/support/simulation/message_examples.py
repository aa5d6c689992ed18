"""One written-out example of every message, and Hypothesis strategies for all others.

In an example every field has a value that is not its default, so that a lost field is detected.
"""

from types import UnionType
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from loradock.messages import commands, control, events, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import NAME_PATTERN, REQUEST_PATTERN
from loradock.messages.prompts import MultimodalPrompt, Sampling, Structure, Truncation
from loradock.messages.records import (
    ControllerStarted,
    EngineLost,
    GenerationRequested,
    Header,
    Input,
    InputSkipped,
    PayloadLost,
    PoolingRequested,
    Record,
    TimerFired,
)
from loradock.messages.views import (
    AdapterCounters,
    AdapterUse,
    AdapterView,
    Distribution,
    EngineStatistics,
    FailureView,
    Placement,
    TierView,
    TokenLogprob,
)

_COUNTERS = AdapterCounters(*range(101, 101 + len(AdapterCounters.__struct_fields__)))
_STATISTICS = EngineStatistics(
    kernels="cpu",
    steps=1,
    step_ns=2,
    prompt_tokens=3,
    output_tokens=4,
    waiting=5,
    running=6,
    preempted=7,
    queued=8,
    queue_ns=9,
    queue_counts=(1, 2, 5),
    slot_writes=10,
    slot_resets=11,
    kv_bytes=12,
    kv_bytes_max=13,
    arena_bytes=14,
    arena_bytes_max=15,
    host_bytes=16,
    pinned_bytes=17,
    allocated_bytes=18,
    kv_layout="paged",
    kv_blocks=19,
    kv_block_tokens=20,
    shares_prefixes=True,
    prefix_queries=21,
    prefix_hits=22,
    prefill=Distribution(23, (1, 2)),
    decode=Distribution(24, (3,)),
    inference=Distribution(25, (4,)),
    preemptions=Distribution(26, (5,)),
    computed_tokens=Distribution(27, (6,)),
    batching="single",
    batching_refusal="a padded row's results differ",
)
_VIEW = AdapterView(
    adapter="tenant-17",
    adapter_id=5,
    state="pinned",
    goal="gpu-slot",
    path="tenants/17",
    fingerprint="xxh3:0f0f",
    rank=16,
    slot=3,
    generation=9,
    held=True,
    retired=True,
    leases=2,
    waiting=1,
    host_bytes=4096,
    pinned_bytes=8192,
    device_bytes=16384,
    uses=100,
    loads=4,
    hits=96,
    evictions=3,
    failures=1,
    last_used_ns=1_700_000_000_000_000_001,
    counters=_COUNTERS,
    warnings=("layer 3 has no tensors", "tokenizer.json is not used"),
)
_HELD = reports.InventoryAdapter(
    adapter_id=5,
    adapter="tenant-17",
    path="tenants/17",
    fingerprint="xxh3:0f0f",
    rank=16,
    state="gpu-slot",
    slot=3,
    generation=9,
    host_bytes=4096,
    blob_bytes=8192,
    warnings=("layer 3 has no tensors",),
)
_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_CLIENT = "key-1"
_VALUES: tuple[Any, ...] = (
    *(64, 0.75, 40, 0.9, 12345, ("\n\n", "###")),
    *(0.05, 0.5, -0.25, 1.1, ((7, -3.5),), 2, (3, 4), True, True),
    *(5, 2, 3, Structure("choice", "[ab]", ("a", "b")), False),
)
_SAMPLING = Sampling(*_VALUES)
_LOGPROB = TokenLogprob(11, -0.5, 2, ((12, -0.25), (11, -0.5)))

_INPUTS = ("Grüße, 世界", (1, 2, 3))
_TRUNCATION = Truncation(16, "left")

_DETAILS = ("q_proj has A [8, 96]", "v_proj has A [8, 96]")
_FAILURE = FailureView(ErrorCode.DOES_NOT_FIT, "2 of its 2 modules differ", _DETAILS, 1500)

EXAMPLES: dict[type, Any] = {
    type(message): message
    for message in (
        requests.LoadAdapter("r-1", "tenant-17", "tenants/17", True, 1500),
        requests.StageAdapter("r-2", "tenant-17", "tenants/17", 1500),
        requests.ActivateAdapter("r-3", "tenant-17", "tenants/17", 1500),
        requests.HoldAdapter("r-4", "tenant-17", "tenants/17", 1500),
        requests.ReleaseAdapter("r-5", "tenant-17"),
        requests.DeactivateAdapter("r-6", "tenant-17", 1500),
        requests.EvictAdapter("r-7", "tenant-17", 1500),
        requests.RemoveAdapter("r-8", "tenant-17", True, 1500),
        requests.ActivateBatch("r-9", ("tenant-17", "b.2", "_c"), 1500),
        requests.Generate(
            "r-10", "tenant-17", "Grüße, 世界", _SAMPLING, 60_000, -1, _TRACE, _CLIENT
        ),
        requests.CancelGeneration("r-11", "r-10"),
        requests.Embed("r-16", "tenant-17", _INPUTS, 60_000, _TRACE, _TRUNCATION, 256, _CLIENT),
        requests.Classify("r-17", "tenant-17", _INPUTS, 60_000, _TRACE, _TRUNCATION, _CLIENT),
        requests.ListAdapters("r-12", "tenant-17", 5, 50),
        requests.ShowAdapter("r-13", "tenant-17"),
        requests.ShowStatus("r-14", True),
        requests.FetchEvents("r-15", 77, 16, True),
        requests.AdapterDone("r-1", "tenant-17", "gpu-slot", 3, 9, ("layer 3 has no tensors",)),
        requests.BatchDone("r-9", (Placement("tenant-17", 3, 9),)),
        requests.TokensStreamed(
            *("r-10", 0, (11,), "ab", 1, "stop", "b", (_LOGPROB,), (None, _LOGPROB), 2)
        ),
        requests.GenerationDone("r-10", "tenant-17", "length", 5, 64),
        requests.VectorsStreamed("r-17", 1, (b"\0\0\x80?\0\0\0@",), ("good", "bad")),
        requests.PoolingDone("r-16", "tenant-17", "embed", 2, 9),
        requests.CancelDone("r-11", "r-10", True),
        requests.Refused("r-3", ErrorCode.NO_ROOM, "all 4 slots are held", 1500, _DETAILS),
        requests.AdaptersListed("r-12", (_VIEW,), 78),
        requests.AdaptersPage("r-12", (_VIEW,), 78, True),
        requests.AdapterShown("r-13", _VIEW, (_VIEW,), _FAILURE, "single", "a padded row differs"),
        requests.StatusShown(
            request_id="r-14",
            epoch=3,
            seq=99,
            digest="d1",
            policy="lru",
            engine_id="e-1",
            engine_pid=4242,
            model="tiny",
            adapters=1,
            requests=2,
            operations=3,
            answered=4,
            refused=5,
            tiers=(TierView("device", 1, 4, 8192, 65536),),
            events_seq=78,
            controller_pid=4141,
            snapshot_seq=90,
            snapshot_age_ms=12_000,
            log_bytes=1 << 20,
            version="0.2.0",
            uptime_ms=61_000,
            memory_bytes=1 << 26,
            engine_memory_bytes=1 << 30,
            device="cuda:0",
            dtype="bfloat16",
            stopping=True,
            counters=_COUNTERS,
            engine=_STATISTICS,
            running=31,
            queued=32,
            waiting=33,
            states=(("pinned", 34),),
            held=35,
            uses=(AdapterUse("tenant-17", 3, 36, 37, 38, 39, 40),),
            log_error="full",
            disk_free_bytes=41,
            unready="the log",
        ),
        requests.PrefetchAdapter("r-19", "tenant-17", "tenants/17", "pinned"),
        requests.PrefetchAccepted("r-19", "tenant-17", "evicted", "pinned"),
        control.ListRequests("r-20", 10),
        control.ListSlow("r-21"),
        control.ShowSettings("r-22"),
        control.CancelRequest("r-23", "c:r-10"),
        control.ChangeSettings("r-24", {"host_adapters_max": 128}, "none"),
        control.StopServer("r-25", 30_000),
        control.RequestsListed(
            "r-20", (control.RequestView("c:r-10", "generate", "tenant-17", "running", 5, 7),), 2
        ),
        control.SlowListed(
            "r-21",
            (control.SlowView("load", "tenant-17", 900, 60_000, "done"),),
            (control.SlowView("generate", "tenant-17", 1900, 61_000, "L011"),),
        ),
        control.SettingsShown("r-22", {"host_adapters_max": 128}, "none", ("slots_max",)),
        control.ServerStopping("r-25", 3),
        requests.EventsFetched(
            "r-15", (events.Published(77, 17, events.AdapterCached("tenant-17")),), 78
        ),
        requests.EventsTooOld("r-15", 76, 78),
        requests.SnapshotFetched("r-15", (_VIEW,), 78, True),
        commands.CheckAdapter(1, 5, "tenant-17", "tenants/17"),
        commands.LoadWeights(2, 5, "tenant-17", "tenants/17", "xxh3:0f0f"),
        commands.StageWeights(3, 5),
        commands.UnstageWeights(4, 5),
        commands.WriteSlot(5, 5, 3, 9),
        commands.ResetSlot(6, 3, 9),
        commands.DropWeights(7, 5),
        commands.StartGeneration(9, "r-10", 5, 3, 9, (1, 2, 3), _SAMPLING, -1, _TRACE, _CLIENT),
        commands.StartPooling(
            *(11, "r-17", 5, 3, 9, "classify", _INPUTS, _TRACE, _TRUNCATION, 256, _CLIENT)
        ),
        commands.StopGeneration(10, 9),
        commands.PreemptSlot(12, 3, 9, 16),
        commands.ResendTokens("r-10"),
        commands.RequestInventory(41),
        commands.ControllerBeat(42),
        reports.AdapterChecked(1, "xxh3:0f0f", 16, 4096, 8192, ("layer 3 has no tensors",)),
        reports.WeightsLoaded(2),
        reports.WeightsStaged(3),
        reports.WeightsUnstaged(4),
        reports.SlotWritten(5),
        reports.SlotReset(6),
        reports.WeightsDropped(7),
        reports.GenerationEnded(9, "stop", 5, 64, 4, 31_000_000),
        reports.PoolingEnded(11, 2, 9),
        reports.OperationFailed(2, ErrorCode.NOT_FOUND, "no adapter_config.json", _DETAILS),
        reports.EngineInventory(
            *("e-1", 4242, "tiny", 4, 65536, 10, (9,), (_HELD,), 44, "cuda:0", "bfloat16", (9,))
        ),
        reports.EngineBeat("e-1", 10, "loading", _STATISTICS, (9, 11)),
        events.AdapterAccepted("tenant-17", "xxh3:0f0f", 16, 8192, 71),
        events.AdapterCached("tenant-17", 72),
        events.AdapterPinned("tenant-17", 73),
        events.AdapterActivated("tenant-17", 3, 9, 74, 93),
        events.AdapterDeactivated("tenant-17", 3),
        events.AdapterUnpinned("tenant-17"),
        events.AdapterEvicted("tenant-17", "policy"),
        events.AdapterRemoved("tenant-17"),
        events.AdapterReplaced("tenant-17", "xxh3:0f0f"),
        events.AdapterRetired("tenant-17", "xxh3:0f0f"),
        events.AdapterHeld("tenant-17"),
        events.AdapterReleased("tenant-17"),
        events.AdapterFailed("tenant-17", "cpu-cached", ErrorCode.NOT_FINITE, "NaN in q_proj.A"),
        events.OperationOverdue(5, "WriteSlot", "tenant-17"),
        events.PolicyFailed("least-used", "raised KeyError"),
        events.GenerationFinished("tenant-17", "stop", 5, 64, 812),
        events.PoolingFinished("tenant-17", "embed", "done", 2, 9, 17),
        events.ReportRefused(5, "slot 3 is not being written"),
        events.ControllerResumed(3),
        events.EngineAttached("e-1", "tiny"),
        events.EngineDetached("e-1", "its process ended"),
        events.EventWithheld(),
        GenerationRequested("r-10", "tenant-17", 60_000),
        PoolingRequested("r-16", "tenant-17", "embed", 60_000),
        PayloadLost("r-10"),
        ControllerStarted(3, 1_700_000_000_000_000_002),
        EngineLost("e-1", "its process ended"),
        TimerFired(),
        InputSkipped(98, "r-10"),
        Header(1, 2, "lru", {"slots_max": 4, "host_adapters_max": 16}, 1),
        Record(1_700_000_000_000_000_001, TimerFired(), "d1", 2**63 + 5, 7),
    )
}

_ILLUSTRATED = MultimodalPrompt("<image> Grüße <image>", (b"\x89PNG\r\n", b"\xff\xd8"))
VARIANTS: dict[str, Any] = {
    "request/Generate with images": requests.Generate(
        "r-18", "tenant-17", _ILLUSTRATED, _SAMPLING, 60_000, -1
    ),
    "command/StartGeneration with images": commands.StartGeneration(
        12, "r-18", 5, 3, 9, _ILLUSTRATED, _SAMPLING, -1
    ),
}
"""Messages with another form than in `EXAMPLES`."""

_NAME_LETTERS = "ABCXYZabcxyz0189._-"


def members(union: UnionType) -> tuple[type, ...]:
    """The Structs of a union, in its order."""
    return get_args(union)


def example_of(member: type) -> Any:
    """Return a message's example; a failure names the file to write one in."""
    assert member in EXAMPLES, f"write an example of {member.__name__} in message_examples.py"
    return EXAMPLES[member]


def input_examples() -> list[Any]:
    """Return one input of every kind."""
    return [example_of(member) for member in members(Input)]


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Values that `kind` (a Struct, or a union of them) allows; sequences are short."""
    return _strategy(msgspec.inspect.type_info(kind))


def _text(info: Any) -> st.SearchStrategy[str]:
    if info.pattern is None:
        return st.text(min_size=info.min_length or 0, max_size=min(30, info.max_length or 30))
    if info.pattern == REQUEST_PATTERN:
        return st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30)
    assert info.pattern == NAME_PATTERN, f"no strategy for the pattern {info.pattern}"
    names = st.text(_NAME_LETTERS, min_size=1, max_size=128)
    return names.filter(lambda name: ".." not in name and name != ".")


def _integers(info: Any) -> st.SearchStrategy[int]:
    low, high = info.ge, info.le
    return st.integers(-(2**63) if low is None else low, 2**63 - 1 if high is None else high)


def _floats(info: Any) -> st.SearchStrategy[float]:
    low = info.gt if info.ge is None else info.ge
    return st.floats(low, info.le, exclude_min=info.gt is not None, allow_nan=False)


def _tuples(info: Any) -> st.SearchStrategy[Any]:
    items = _strategy(info.item_type)
    return st.lists(items, min_size=info.min_length or 0, max_size=4).map(tuple)


def _structs(info: Any) -> st.SearchStrategy[Any]:
    if info.cls is AdapterCounters:
        # One draw instead of one per field, of which every view of an adapter has many.
        edges = st.sampled_from((0, 1, 2**31, 2**63 - 1))
        return st.builds(
            lambda most: AdapterCounters(*(most >> n for n in range(len(info.fields)))), edges
        )
    return st.builds(info.cls, **{field.name: _strategy(field.type) for field in info.fields})


_STRATEGIES: dict[type, Any] = {
    msgspec.inspect.StrType: _text,
    msgspec.inspect.IntType: _integers,
    msgspec.inspect.FloatType: _floats,
    msgspec.inspect.VarTupleType: _tuples,
    msgspec.inspect.TupleType: lambda info: st.tuples(*map(_strategy, info.item_types)),
    msgspec.inspect.StructType: _structs,
    msgspec.inspect.BytesType: lambda info: st.binary(min_size=info.min_length or 0, max_size=30),
    msgspec.inspect.BoolType: lambda info: st.booleans(),
    msgspec.inspect.NoneType: lambda info: st.none(),
    msgspec.inspect.LiteralType: lambda info: st.sampled_from(info.values),
    msgspec.inspect.EnumType: lambda info: st.sampled_from(info.cls),
    msgspec.inspect.UnionType: lambda info: st.one_of(*map(_strategy, info.types)),
    msgspec.inspect.DictType: lambda info: st.dictionaries(
        _strategy(info.key_type), _strategy(info.value_type), max_size=4
    ),
}


def _strategy(info: Any) -> st.SearchStrategy[Any]:
    found: st.SearchStrategy[Any] = _STRATEGIES[type(info)](info)
    return found
