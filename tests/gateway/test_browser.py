"""The page in a browser: adapters move, a lost connection heals, keys, the past, accessibility."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest

from loradock.gateway.rates import Rates, Sample
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.views import TierView
from tests.support.gateway.browser import browser, visit
from tests.support.gateway.served import serve_gateway
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import wait_until

CONNECTED = "document.getElementById('connection').textContent === 'connected'"


def tile_in(state: str, name: Any) -> str:
    return f"document.querySelector(`#tiles [data-id='{name}'][data-state='{state}']`)"


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    """A browser."""
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def site(running: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A visited page, with the gateway and the stand-in that it shows."""
    with (
        StandIn(tmp_path_factory.mktemp("gw")) as controller,
        serve_gateway(controller, allow_runtime_lora_updating=True) as gateway,
        visit(running, gateway.url, viewport={"width": 1200, "height": 900}) as visited,
    ):
        visited.wait_for(CONNECTED)
        shown: Any = visited
        shown.gateway = gateway
        yield shown


def publish(site: Any, *happened: Any) -> None:
    site.gateway.controller.publish(*happened)


def change(site: Any, name: Any, state: str, *happened: Any) -> None:
    """Change an adapter of the stand-in, and publish what happened."""
    site.gateway.controller.adapters[name] = view(name, state)
    publish(site, *happened)


def test_an_adapter_moves_between_the_states(site: Any) -> None:
    site.wait_for(tile_in("evicted", "reverse"))
    change(site, "reverse", "cpu-cached", ev.AdapterCached("reverse"))
    site.wait_for(tile_in("cpu-cached", "reverse"))
    change(site, "reverse", "gpu-slot", ev.AdapterActivated("reverse", 2, 1))
    site.wait_for(tile_in("gpu-slot", "reverse"))
    site.wait_for("document.querySelector('#tiles [data-id=reverse]').innerText.includes('slot 2')")
    site.wait_for("!!document.querySelector('#lanes [data-adapter=reverse]')")
    log = site.page.locator("#log")
    assert "AdapterActivated" in log.inner_text()
    site.page.fill("#search", "cached")
    site.wait_for("document.querySelectorAll('#log li').length === 1")
    site.page.fill("#search", "")


def test_a_new_adapter_with_a_hostile_name_stays_a_text(site: Any) -> None:
    name = "x.-_x"
    change(site, name, "cpu-cached", ev.AdapterAccepted(name, "<img src=x>", 8, 2048))
    publish(site, ev.AdapterCached(name))
    site.wait_for(tile_in("cpu-cached", name))
    site.wait_for("document.getElementById('log').textContent.includes('<img src=x>')")
    assert site.page.locator("#log img").count() == 0
    del site.gateway.controller.adapters[name]
    publish(site, ev.AdapterRemoved(name))
    site.wait_for(f"!{tile_in('cpu-cached', name)}")


@pytest.mark.parametrize("known", ["world.seq", "0"], ids=["continued", "with a new snapshot"])
def test_a_lost_connection_heals_without_a_gap(site: Any, known: str) -> None:
    # The page's own stream is aborted, as a network would do it, and its first read of the events
    # that the new snapshot skips.
    site.page.route("**/events/history*", lambda route: route.abort(), times=1)
    site.page.evaluate(f"world.seq = {known}; reading.abort()")
    site.wait_for("document.getElementById('connection').textContent.includes('lost')")
    publish(site, ev.AdapterHeld("upper"), ev.AdapterReleased("upper"), ev.AdapterHeld("upper"))
    site.wait_for(CONNECTED)
    expected = str([one.seq for one in site.gateway.controller.published]).replace(" ", "")
    site.wait_for(f"JSON.stringify(log.map(entry => entry.seq)) === '{expected}'")
    # The browser reports the aborted read, and nothing else.
    assert {*site.messages} <= {"Failed to load resource: net::ERR_FAILED"}
    site.messages.clear()


def test_details_and_changes_by_keyboard(site: Any) -> None:
    page = site.page
    site.wait_for(tile_in("gpu-slot", "upper"))
    page.locator("[data-id=upper]").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.wait_for_selector("#fields tr")
    assert "fingerprint" in page.locator("#fields").inner_text()
    page.locator("[data-move=hold]").focus()
    page.keyboard.press("Enter")
    wait_until(lambda: site.gateway.controller.requests(rq.HoldAdapter))
    site.wait_for("document.getElementById('details-message').textContent === 'done'")
    page.keyboard.press("Escape")
    site.wait_for("!document.querySelector('dialog').open")
    # The focus returns to where it was.
    site.wait_for("document.activeElement.dataset.id === 'upper'")


def test_the_past_is_a_fold_of_the_events(site: Any) -> None:
    page = site.page
    page.click("#pause")
    site.wait_for("document.getElementById('moment').textContent.startsWith('after event')")
    first = site.gateway.controller.published[0]
    assert first.event == ev.AdapterCached("reverse")
    page.locator("#scrub").fill("1")
    site.wait_for(tile_in("cpu-cached", "reverse"))
    page.locator("#scrub").fill("2")
    site.wait_for(tile_in("gpu-slot", "reverse"))
    assert page.locator("#past-banner").inner_text().startswith("The past: the state after event 2")
    assert page.url.endswith("#event=2")
    # What came later is not shown, and nothing can be changed.
    assert page.locator("#log li").count() == 2
    assert page.locator("#load").is_hidden()
    page.click("#pause")
    site.wait_for("document.getElementById('past-banner').hidden")


def test_an_address_names_a_moment_and_an_adapter(running: Any, site: Any) -> None:
    with visit(running, f"{site.gateway.url}#event=2&adapter=reverse") as visited:
        visited.wait_for("document.getElementById('past-banner').textContent.includes('event 2')")
        visited.page.wait_for_selector("dialog[open]")
        visited.wait_for("document.getElementById('fields').innerText.includes('gpu-slot')")
        assert visited.page.locator("#moves").is_hidden()
        # Only the present has more.
        assert visited.page.locator("#fields th").all_inner_texts() == ["state", "slot", "held"]


def test_an_address_of_nothing_is_told(running: Any, site: Any) -> None:
    newest = site.gateway.controller.published[-1].seq
    with visit(running, f"{site.gateway.url}#event=999999") as visited:
        banner = "document.getElementById('past-banner').textContent"
        visited.wait_for(f"{banner}.includes('event {newest},')")
    with visit(running, f"{site.gateway.url}#adapter=nosuch") as visited:
        told = "document.getElementById('details-message').textContent"
        visited.wait_for(f"{told} === 'no adapter has this name'")


def test_a_search_without_result_is_told(site: Any) -> None:
    page = site.page
    for box, shown in (
        ("#filter", "document.getElementById('more').textContent"),
        ("#search", "getComputedStyle(document.getElementById('log'), '::before').content"),
    ):
        page.fill(box, "no such text")
        site.wait_for(f"/^.?No (adapter|event) has/.test({shown})")
        page.fill(box, "")
        site.wait_for(f"!/^.?No/.test({shown})")


def test_the_log_says_what_waited_and_for_what(running: Any, tmp_path: Path) -> None:
    with StandIn(tmp_path) as controller, serve_gateway(controller) as gateway:
        controller.publish(
            ev.AdapterActivated("reverse", 2, 6),
            ev.AdapterDeactivated("reverse", 2),
            ev.AdapterActivated("upper", 2, 7, 0, 30_000_000_000),
            ev.GenerationFinished("upper", "stop", 5, 6, 31_000_000_000),
        )
        with visit(running, gateway.url) as visited:
            visited.wait_for("document.querySelector('#lanes rect[height=\"3\"]')")
            visited.page.locator('#lanes rect[height="3"]').hover()
            facts = visited.page.locator("#facts").inner_text()
            assert facts.startswith("requests waited 30 s for upper, until ")
            assert facts.endswith(", in whose slot reverse was")
            visited.page.click("[data-id=upper]")
            visited.wait_for("document.querySelectorAll('#history li').length === 2")
            ended, activated = visited.page.locator("#history li").all_inner_texts()
            assert ended.endswith("output_tokens=6 duration=31 s")
            assert activated.endswith("wait=30 s after=reverse")


def test_a_click_lights_up_an_adapter_in_the_lanes(site: Any) -> None:
    bar = site.page.locator("#lanes rect[data-adapter=reverse]").last
    bar.click()
    site.wait_for("document.getElementById('lanes').classList.contains('has-lit')")
    assert "reverse in slot 2" in site.page.locator("#facts").inner_text()
    bar.click()
    site.wait_for("!document.getElementById('lanes').classList.contains('has-lit')")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_tiles_open_under_load(running: Any, tmp_path: Path, width: int, motion: Any) -> None:
    """While all adapters change places without a pause, each press on a tile opens its card."""
    names = [f"adapter-{number}" for number in range(8)]
    with (
        StandIn(tmp_path) as controller,
        serve_gateway(controller) as gateway,
        visit(
            running, gateway.url, viewport={"width": width, "height": 900}, reduced_motion=motion
        ) as visited,
    ):
        for name in names:
            controller.adapters[name] = view(name, "pinned")
        visited.wait_for(CONNECTED)
        with _turns(controller, names):
            visited.wait_for(f"document.querySelectorAll('#tiles button').length >= {len(names)}")
            # More than fifty in all four cases.
            pressed = [*names, *names[:5]]
            assert [_opened(visited.page, name) for name in pressed] == pressed


def _opened(page: Any, name: str) -> str:
    """Press on a tile for longer than a redraw takes, and return the name on the card."""
    tile = page.locator(f"[data-id={name}]")
    tile.scroll_into_view_if_needed()
    box = tile.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.wait_for_timeout(300)
    page.mouse.up()
    shown = page.evaluate("document.querySelector('dialog').open ? shown : ''")
    page.evaluate("document.querySelector('dialog').close()")
    return str(shown)


@contextmanager
def _turns(controller: StandIn, names: list[str]) -> Iterator[None]:
    """Move the adapters between three slots, until the context ends."""
    ended = Event()

    def turn() -> None:
        for number in count():
            name, old = names[number % len(names)], names[(number - 3) % len(names)]
            controller.publish(
                ev.AdapterDeactivated(old, number % 3),
                ev.AdapterActivated(name, number % 3, number),
            )
            if ended.wait(0.02):
                return

    thread = Thread(target=turn)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_page_is_quiet_and_stays_with_its_host(site: Any) -> None:
    assert site.messages == []
    assert {address.rpartition(":")[2].partition("/")[0] for address in site.addresses} <= {
        str(site.gateway.port),
        ",",
    }


def test_the_page_is_accessible_on_a_phone(running: Any, site: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    viewport = {"width": 390, "height": 800}
    with visit(running, site.gateway.url, bypass_csp=True, viewport=viewport) as visited:
        visited.wait_for(CONNECTED)
        for scheme in ("light", "dark"):
            visited.page.emulate_media(color_scheme=scheme)
            found = axe.Axe().run(visited.page).response["violations"]
            assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
            visited.keep_picture(f"phone-{scheme}")
        # A phone shows the page without sideways scrolling.
        assert visited.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


PICTURED = [f"tenant-{number:02}" for number in range(12)]


def busy_minutes(controller: StandIn) -> None:
    """Publish four minutes in which twelve adapters shared three slots, up to now."""
    events: list[tuple[int, ev.Event]] = []
    begin_ns = time.time_ns() - 240_000_000_000
    in_slots: dict[int, str] = {}
    for turn in range(60):
        name, slot, at_ns = PICTURED[(turn * 5) % 12], turn % 3, begin_ns + turn * 4_000_000_000
        if turn < 12:
            events += [(at_ns, ev.AdapterAccepted(name, "f", 8, 3 << 20))]
            events += [(at_ns, ev.AdapterCached(name, 40_000_000)), (at_ns, ev.AdapterPinned(name))]
        if slot in in_slots:
            events.append((at_ns, ev.AdapterDeactivated(in_slots[slot], slot)))
        events.append((at_ns + 200_000_000, ev.AdapterActivated(name, slot, turn + 1)))
        in_slots[slot] = name
    controller.published += [ev.Published(n, t, e) for n, (t, e) in enumerate(events, 1)]
    by_name = {name: slot for slot, name in in_slots.items()}
    controller.adapters = {
        name: msgspec.structs.replace(
            view(name, "gpu-slot" if name in by_name else "pinned"),
            slot=by_name.get(name, -1),
            leases=2 * (name in by_name),
            waiting=int(name in PICTURED[:2]),
        )
        for name in PICTURED
    }


def busy_samples() -> list[Sample]:
    """Return a sample for every five seconds of these minutes."""
    now_ms, waves = 1000 * int(time.time()), [math.sin(number / 5) for number in range(48)]
    return [
        Sample(
            time_ms=now_ms - 5000 * (len(waves) - number),
            requests_per_s=6 + 2 * wave,
            tokens_per_s=180 + 60 * wave,
            first_token_p50_s=0.08 - 0.02 * wave,
            first_token_p99_s=0.3 - 0.1 * wave,
            running=6,
            waiting=round(2 + 2 * wave),
            hit_share=0.7 + 0.1 * wave,
            load_s=0.04,
            step_s=0.012 + 0.002 * wave,
            cache_share=0.5 + 0.2 * wave,
        )
        for number, wave in enumerate(waves)
    ]


DEGRADED: dict[str, dict[str, Any]] = {
    "no-engine": {"engine_id": "", "model": "", "unready": "no engine is attached"},
    "log-not-writable": {
        "unready": "the log can't be written",
        "log_error": "/srv/loradock/log: no space is left on the disk",
    },
    "stopping": {"unready": "the server is stopping"},
}


@pytest.mark.parametrize("reason", DEGRADED)
def test_the_page_says_why_no_new_work_is_taken(running: Any, tmp_path: Path, reason: Any) -> None:
    with (
        StandIn(tmp_path) as controller,
        serve_gateway(controller) as gateway,
        visit(running, gateway.url) as visited,
    ):
        visited.wait_for(CONNECTED)
        assert visited.page.locator("#alarm").is_hidden()
        controller.status_changes = DEGRADED[reason]
        words = DEGRADED[reason].get("log_error", DEGRADED[reason]["unready"])
        visited.wait_for(f"document.getElementById('alarm').innerText.includes({words!r})")
        controller.status_changes = {}
        visited.wait_for("document.getElementById('alarm').hidden")


def test_pictures_of_five_states(
    running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CI keeps them; a person looks at them."""

    async def fill(rates: Rates) -> None:
        rates._samples.extend(busy_samples())
        rates.count = len(rates._samples)

    def keep(name: str, url: str, seen: str, width: int = 1280, height: int = 1500) -> None:
        with visit(running, url, viewport={"width": width, "height": height}) as visited:
            visited.wait_for(CONNECTED)
            visited.wait_for(seen)
            for scheme in ("light", "dark"):
                visited.page.emulate_media(color_scheme=scheme)
                visited.wait_for("document.querySelectorAll('#rates .chart').length > 0")
                visited.keep_picture(f"page-{name}-{scheme}")
            assert visited.messages == []

    with StandIn(tmp_path / "empty") as controller:
        controller.adapters = {}
        controller.status_changes = {"adapters": 0, "answered": 0}
        with serve_gateway(controller) as gateway:
            keep("empty", gateway.url, "document.getElementById('more').innerText !== ''")
    monkeypatch.setattr(Rates, "run", fill)
    with StandIn(tmp_path / "busy") as controller:
        busy_minutes(controller)
        host = TierView("host", 12, 64, 0, 1 << 30)
        pinned = TierView("pinned", 12, 0, 36 << 20, 1 << 30)
        device = TierView("device", 3, 3, 9 << 20, 1 << 30)
        controller.status_changes = {"tiers": (host, pinned, device)}
        with serve_gateway(controller, allow_runtime_lora_updating=True) as gateway:
            # On a slow machine the other bars are older than the minute that is shown.
            bars = "document.querySelectorAll('#lanes .bar').length >= 3"
            keep("busy", gateway.url, bars)
            keep("phone", gateway.url, bars, 390, 2600)
            banner = "document.getElementById('past-banner').innerText.includes('event 60')"
            keep("past", f"{gateway.url}#event=60", banner)
            controller.status_changes |= DEGRADED["log-not-writable"]
            keep("degraded", gateway.url, "!document.getElementById('alarm').hidden")


def test_a_key_is_requested_and_kept(running: Any, tmp_path: Path) -> None:
    with (
        StandIn(tmp_path) as controller,
        serve_gateway(controller, api_keys=("secret",)) as gateway,
        visit(running, gateway.url) as visited,
    ):
        visited.wait_for("document.getElementById('connection').textContent.includes('key')")
        visited.page.fill("#key", "wrong")
        visited.page.keyboard.press("Enter")
        refused = "document.getElementById('connection').textContent === 'this key is refused'"
        visited.wait_for(refused)
        visited.page.fill("#key", "secret")
        visited.page.keyboard.press("Enter")
        visited.wait_for(CONNECTED)
        visited.page.reload()
        visited.wait_for(CONNECTED)
