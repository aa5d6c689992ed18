"""What each right allows, and that a limited key meets only adapters whose names match."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.core.views import AdapterPages
from loradock.controller.server.access import OWN_ENGINE, RIGHT_OF, Access
from loradock.controller.server.keys import AllowedKey, KeyStore, new_pair
from loradock.messages import control, events
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.simulation.core_bench import CoreBench

KEY = {name: new_pair().public for name in ("reader", "user", "admin", "engine", "acme", "globex")}
KEYS = (
    AllowedKey("reader", KEY["reader"], "read"),
    AllowedKey("user", KEY["user"], "operate"),
    AllowedKey("admin", KEY["admin"], "administrate"),
    AllowedKey("engine", KEY["engine"], "engine"),
    AllowedKey("acme", KEY["acme"], "administrate", ("acme-*", "shared")),
)

EXAMPLES: dict[type, Any] = {
    rq.ListAdapters: rq.ListAdapters("r"),
    rq.ShowAdapter: rq.ShowAdapter("r", "a"),
    rq.ShowStatus: rq.ShowStatus("r"),
    rq.FetchEvents: rq.FetchEvents("r", 1),
    rq.LoadAdapter: rq.LoadAdapter("r", "a"),
    rq.StageAdapter: rq.StageAdapter("r", "a"),
    rq.ActivateAdapter: rq.ActivateAdapter("r", "a"),
    rq.ActivateBatch: rq.ActivateBatch("r", ("a",)),
    rq.HoldAdapter: rq.HoldAdapter("r", "a"),
    rq.PrefetchAdapter: rq.PrefetchAdapter("r", "a"),
    rq.ReleaseAdapter: rq.ReleaseAdapter("r", "a"),
    rq.DeactivateAdapter: rq.DeactivateAdapter("r", "a"),
    rq.EvictAdapter: rq.EvictAdapter("r", "a"),
    rq.RemoveAdapter: rq.RemoveAdapter("r", "a"),
    rq.Generate: rq.Generate("r", "a", "p"),
    rq.Embed: rq.Embed("r", "a", ("p",)),
    rq.Classify: rq.Classify("r", "a", ("p",)),
    rq.CancelGeneration: rq.CancelGeneration("r", "other"),
    control.ListRequests: control.ListRequests("r"),
    control.ListSlow: control.ListSlow("r"),
    control.ShowSettings: control.ShowSettings("r"),
    control.CancelRequest: control.CancelRequest("r", "c:other"),
    control.ChangeSettings: control.ChangeSettings("r", {"rest_ms": 1}),
    control.StopServer: control.StopServer("r"),
}
LOADING = (rq.LoadAdapter, rq.StageAdapter, rq.ActivateAdapter, rq.HoldAdapter, rq.PrefetchAdapter)


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    found = KeyStore(tmp_path)
    for key in KEYS:
        found.allow(key)
    return found


@pytest.fixture
def access(store: KeyStore) -> Access:
    return Access(store)


def named(message: Any, name: str) -> Any:
    if isinstance(message, rq.ActivateBatch):
        return msgspec.structs.replace(message, adapters=("acme-1", name))
    return msgspec.structs.replace(message, adapter=name)


def code_of(access: Access, user: str, message: Any) -> ErrorCode | None:
    refusal = access.refusal(user, message)
    return None if refusal is None else refusal.code


def test_every_request_has_a_right_and_an_example() -> None:
    assert {*RIGHT_OF} == {*EXAMPLES} == {*get_args(rq.Request)}


@pytest.mark.parametrize("kind", RIGHT_OF, ids=lambda kind: kind.__name__)
def test_a_key_may_send_what_its_right_includes(access: Access, kind: type) -> None:
    level = ("read", "operate", "administrate").index(RIGHT_OF[kind])
    for place, user in enumerate(("reader", "user", "admin")):
        expected = None if place >= level else ErrorCode.NOT_ALLOWED
        assert code_of(access, user, EXAMPLES[kind]) is expected, user
    assert access.refusal("", EXAMPLES[kind]) is None
    for unknown in ("engine", "nobody", "(own engine)"):
        assert code_of(access, unknown, EXAMPLES[kind]) is ErrorCode.NOT_ALLOWED


@pytest.mark.parametrize(
    "kind", [control.ListRequests, control.ListSlow, *get_args(control.ServerCommand)]
)
def test_a_limited_key_may_not_act_on_the_whole_server(access: Access, kind: type) -> None:
    refusal = access.refusal("acme", EXAMPLES[kind])
    assert refusal is not None
    assert refusal.code is ErrorCode.NOT_ALLOWED
    assert "limited to acme-*, shared" in refusal.message


def test_replacing_an_adapter_needs_more_than_loading_one(access: Access) -> None:
    replacing = rq.LoadAdapter("r", "a", replace=True)
    assert code_of(access, "user", replacing) is ErrorCode.NOT_ALLOWED
    assert access.refusal("admin", replacing) is None


@pytest.mark.parametrize("kind", RIGHT_OF, ids=lambda kind: kind.__name__)
def test_a_foreign_name_is_answered_as_an_unknown_one(access: Access, kind: type) -> None:
    if not {"adapter", "adapters"} & {*kind.__struct_fields__}:
        return
    core = CoreBench()
    core.activate("a")
    for own in ("acme-1", "shared"):
        assert access.refusal("acme", named(EXAMPLES[kind], own)) is None
    for foreign in ("a", "not-there", "acme", "shared2", "xacme-1"):
        refusal = access.refusal("acme", named(EXAMPLES[kind], foreign))
        assert refusal is not None
        if kind in LOADING:
            assert refusal.code is ErrorCode.NOT_ALLOWED
            continue
        expected = f"adapter '{foreign}' is not known; load it first"
        assert (refusal.code, refusal.message) == (ErrorCode.UNKNOWN_ADAPTER, expected)
    if kind in (rq.ReleaseAdapter, rq.EvictAdapter, rq.DeactivateAdapter, rq.RemoveAdapter):
        unknown = core.request(kind, "not-there")
        ours = access.refusal("acme", named(EXAMPLES[kind], "not-there"))
        assert ours is not None
        assert (ours.code, ours.message) == (unknown.code, unknown.message)


def test_the_base_model_is_for_all(access: Access) -> None:
    for kind in (rq.Generate, rq.Embed, rq.Classify):
        assert access.refusal("acme", msgspec.structs.replace(EXAMPLES[kind], adapter=None)) is None


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("", True), ("acme-1", True), ("acme-1/v2", True), ("shared/../x", False),
        ("./acme-1", True), ("globex-1", False), ("/roots/acme-1", False), ("../acme-1", False),
        ("acme-1/../globex-1", False), (".", False), ("globex/acme-1", False),
    ],
)  # fmt: skip
def test_a_limited_key_loads_from_its_own_directories(
    access: Access, path: str, is_allowed: bool
) -> None:
    for kind in LOADING:
        message = kind("r", "acme-1", path)
        assert code_of(access, "acme", message) is (None if is_allowed else ErrorCode.NOT_ALLOWED)
        assert access.refusal("admin", message) is None


@pytest.mark.parametrize(
    ("path", "known", "confined"),
    [
        ("", "", "acme-1/."), ("acme-1", "", "acme-1/."), ("acme-1/v2", "", "acme-1/./v2"),
        ("acme-1/a/./b", "", "acme-1/./a/b"), ("", "acme-1/./v2", ""),
        ("acme-1/v2", "acme-1/v2", "acme-1/v2"), ("acme-1/v3", "acme-1/v2", "acme-1/./v3"),
    ],
)  # fmt: skip
def test_links_of_a_limited_key_stay_in_its_own_directory(
    access: Access, path: str, known: str, confined: str
) -> None:
    for kind in LOADING:
        message = kind("r", "acme-1", path)
        assert access.confined("acme", message, known) == kind("r", "acme-1", confined)
        assert access.confined("admin", message, known) is message


def test_a_limited_key_is_told_no_path_of_the_server(access: Access) -> None:
    text = "no directory 'acme-1/x' below the adapter root /srv/a; loaded from '/srv/a/acme-1'"
    hidden = (
        "no directory 'acme-1/x' below the adapter root (a directory of the server); "
        "loaded from '(a directory of the server)'"
    )
    refused = rq.Refused("r", ErrorCode.NOT_FOUND, text, details=(text,))
    assert access.shown("acme", refused) == rq.Refused("r", refused.code, hidden, details=(hidden,))
    assert access.shown("admin", refused) is refused


def test_a_limited_key_fetches_only_its_own_events(access: Access) -> None:
    core = CoreBench()
    published = [
        events.AdapterCached("acme-1"),
        events.AdapterCached("globex-1"),
        events.GenerationFinished("", "stop", 1, 1),
        events.ReportRefused(1, "about globex-1"),
        events.OperationOverdue(1, "load", "globex-1"),
        events.ControllerResumed(1),
        events.EngineAttached("e", "m"),
        events.EngineDetached("e", "gone"),
        events.PolicyFailed("least-used", "raised KeyError"),
    ]
    fetched = rq.EventsFetched(
        "r", tuple(events.Published(n, 5, e) for n, e in enumerate(published)), 9
    )
    shown: Any = access.shown("acme", fetched)
    assert [one.seq for one in shown.events] == [*range(9)]
    hidden = [isinstance(one.event, events.EventWithheld) for one in shown.events]
    assert hidden == [False, *[True] * 4, *[False] * 4]
    assert shown.last_seq == 9
    for user in ("", "admin", "reader"):
        assert access.shown(user, fetched) is fetched
    of_none: Any = access.shown("nobody", fetched)
    assert {type(one.event) for one in of_none.events} == {events.EventWithheld}
    assert core.world.epoch


NAMES = st.lists(st.sampled_from(["acme-1", "acme-2", "b", "globex", "shared", "z"]), unique=True)


@given(NAMES, st.integers(1, 4))
def test_the_pages_of_a_limited_key_list_exactly_its_own_adapters(
    names: list[str], limit: int
) -> None:
    core = CoreBench(known_adapters_max=10)
    for name in names:
        core.send(rq.LoadAdapter, name, "a")
    pages = AdapterPages(core.world)

    def sees(name: str) -> bool:
        return name.startswith("acme-") or name == "shared"

    listed, after, more = [], ("", 0), True
    while more:
        page: Any = pages.answer(rq.ListAdapters("l", *after, limit), sees)
        assert len(page.adapters) <= limit
        listed += [view.adapter for view in page.adapters]
        more = page.more
        after = (page.adapters[-1].adapter, page.adapters[-1].adapter_id) if more else after
    assert listed == sorted(filter(sees, names))
    whole: Any = pages.answer(rq.ListAdapters("l"), sees)
    assert [view.adapter for view in whole.adapters] == listed


def test_each_socket_admits_its_own_keys(access: Access) -> None:
    domains = ("requests", "events", "engine", "", "other")
    admitted = {
        name: [d for d in domains if access.user_of(d, public) == name]
        for name, public in KEY.items()
    }
    # Events are the same for all subscribers, so a limited key fetches them by request.
    assert admitted.pop("acme") == ["requests", "", "other"]
    assert admitted.pop("globex") == []
    assert admitted.pop("engine") == ["engine"]
    assert set(map(tuple, admitted.values())) == {("requests", "events", "", "other")}
    assert access.clients == 4


def test_a_change_of_the_list_applies_at_the_next_refresh(store: KeyStore, access: Access) -> None:
    assert access.revocations == 0
    store.allow(AllowedKey("globex", KEY["globex"], "read"))
    assert access.user_of("requests", KEY["globex"]) == "globex"
    assert access.revocations == 0
    store.revoke("user")
    access.refresh()
    assert access.revocations == 1
    assert access.user_of("requests", KEY["user"]) is None
    assert code_of(access, "user", rq.ShowStatus("r")) is ErrorCode.NOT_ALLOWED
    # The same key with less rights counts as revoked.
    store.revoke("admin")
    store.allow(AllowedKey("admin", KEY["admin"], "read"))
    access.refresh()
    assert access.revocations == 2
    assert code_of(access, "admin", EXAMPLES[rq.EvictAdapter]) is ErrorCode.NOT_ALLOWED


def test_a_damaged_list_admits_the_own_engine_alone(store: KeyStore) -> None:
    own = new_pair().public
    access = Access(store, (AllowedKey(OWN_ENGINE, own, "engine"),))
    (store.directory / "allowed.json").write_text("[{]")
    access.refresh()
    assert [access.user_of("requests", KEY[name]) for name in ("reader", "admin")] == [None, None]
    assert access.user_of("engine", own) == OWN_ENGINE
    assert access.is_engine(OWN_ENGINE)
