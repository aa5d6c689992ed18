"""Requests that clients send at random."""

import random
from collections.abc import Callable
from typing import Any, Final

from loradock.messages import requests
from loradock.messages.views import PrefetchTarget
from tests.support.campaign.client_process import ClientProcess
from tests.support.campaign.machine import MS
from tests.support.campaign.simulation import NAMES, Simulation
from tests.support.simulation.engine_records import Content

_CALLS_MAX: Final = 8
"""Bound on the calls of a client in flight."""

_TARGETS: Final[tuple[PrefetchTarget, ...]] = ("cpu-cached", "pinned", "gpu-slot")

_PAUSES_NS: Final = (0, MS // 2, 5 * MS, 50 * MS, 1_000 * MS)


def _choose_name(rng: random.Random) -> str:
    return rng.choice(NAMES)


def _generate(rng: random.Random) -> requests.Request:
    adapter = None if rng.random() < 0.15 else _choose_name(rng)
    return requests.Generate("", adapter, f"prompt {rng.randrange(1000)}")


def _embed(rng: random.Random) -> requests.Request:
    adapter = None if rng.random() < 0.15 else _choose_name(rng)
    return requests.Embed("", adapter, (f"text {rng.randrange(1000)}", "another"))


def _batch(rng: random.Random) -> requests.Request:
    return requests.ActivateBatch("", tuple(rng.choices(NAMES, k=rng.randint(1, 3))))


def _prefetch(rng: random.Random) -> requests.Request:
    return requests.PrefetchAdapter("", _choose_name(rng), "", rng.choice(_TARGETS))


def _of_adapter(kind: Callable[..., requests.Request]) -> Callable[[random.Random], Any]:
    return lambda rng: kind("", _choose_name(rng))


_REQUESTS: Final[tuple[tuple[int, Callable[[random.Random], Any]], ...]] = (
    (8, _of_adapter(requests.LoadAdapter)),
    (2, _of_adapter(requests.StageAdapter)),
    (5, _of_adapter(requests.ActivateAdapter)),
    (2, _of_adapter(requests.HoldAdapter)),
    (3, _of_adapter(requests.ReleaseAdapter)),
    (2, _of_adapter(requests.DeactivateAdapter)),
    (2, _of_adapter(requests.EvictAdapter)),
    (14, _generate),
    (5, _embed),
    (4, _batch),
    (3, _prefetch),
    (1, lambda _: requests.ListAdapters("")),
    (1, lambda _: requests.ShowStatus("")),
)
_WEIGHTS: Final = [weight for weight, _ in _REQUESTS]
_KINDS: Final = [kind for _, kind in _REQUESTS]


class Workload:
    """One client's requests: bursts, and pauses up to a second."""

    def __init__(self, simulation: Simulation, client: ClientProcess) -> None:
        self._simulation = simulation
        self._client = client
        self.is_stopped = False
        count = len(NAMES) if simulation.limits.turn_tokens else 3
        for name in simulation.rng.sample(NAMES, count):
            client.begin(requests.LoadAdapter("", name))
        self._begin()

    def _begin(self) -> None:
        simulation, rng, client = self._simulation, self._simulation.rng, self._client
        if self.is_stopped or not client.is_running:
            return
        if len(client.calls) < _CALLS_MAX:
            client.begin(self._next(rng))
        simulation.scheduler.after(rng.choice(_PAUSES_NS), self._begin)

    def _next(self, rng: random.Random) -> requests.Request:
        if self._simulation.limits.turn_tokens and rng.random() < 0.5:
            # Enough of them that adapters wait for slots.
            return requests.Generate("", _choose_name(rng), f"prompt {rng.randrange(1000)}")
        draw = rng.random()
        if draw < 0.03:
            return self._replace(rng)
        if draw < 0.06:
            name = _choose_name(rng)
            self._simulation.changed_names.add(name)
            return requests.RemoveAdapter("", name, rng.random() < 0.5)
        if draw < 0.1 and self._client.calls:
            target = rng.choice(self._client.calls).request_id
            return requests.CancelGeneration("", target)
        [kind] = rng.choices(_KINDS, _WEIGHTS)
        request: requests.Request = kind(rng)
        return request

    def _replace(self, rng: random.Random) -> requests.Request:
        name = _choose_name(rng)
        simulation = self._simulation
        simulation.changed_names.add(name)
        path = rng.choice((name, f"{name}-2"))
        old = simulation.files.get(name, Content(f"content of {name}", 10, 10))
        content = Content(f"{old.fingerprint}'", old.load_bytes, old.blob_bytes)
        simulation.files[path] = content
        simulation.history.fingerprints[name].add(content.fingerprint)
        return requests.LoadAdapter("", name, path, True)
