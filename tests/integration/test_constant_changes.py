"""Outputs while adapters are loaded, evicted and replaced, and requests preempted and cancelled.

The adapters are trained, so each output is known without another run: it is right, or it comes from
other weights, another prompt or another version.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

import examples
from examples.tiny_recipe import EOS_ID
from examples.transformations import TRANSFORMATIONS, answer_of, held_out_words, prompt_of
from loradock.controller.core.limits import Limits
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.messages import requests
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.served_bench import ServedBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

TINY = Path(examples.__file__).parent / "tiny"
REPLACED, VERSIONS = "replaced", ("reverse", "spell", "upper", "caesar")
"""A name whose files change while it is served."""

CHANGES = ("evict", "load", "prefetch", "replace", "cancel", "preempt")

BASE = "the base model"
NAMES = (BASE, REPLACED, *TRANSFORMATIONS)
REQUESTS = 50
OUTSTANDING = 14
BLOCK_BYTES = 32 << 10
WORDS_SEED = 11
"""As in the demo: every adapter is right for all of these words."""


@pytest.fixture
def bench() -> Iterator[ServedBench]:
    """Three slots for ten names, and blocks for fewer rows than the engine would run."""
    config = EngineConfig(
        TINY / "model",
        (TINY / "adapters",),
        device="cpu",
        device_bytes_max=8 << 20,
        max_num_seqs=12,
        max_model_len=48,
        kv_cache_bytes=5 * BLOCK_BYTES,
    )
    lora_config = LoRAConfig(max_lora_rank=64, max_loras=3)
    engine = EngineBench(load_model(config, lora_config), config, lora_config)
    limits = Limits(
        max_loras=3,
        max_cpu_loras=6,
        host_bytes_max=32 << 20,
        pinned_bytes_max=32 << 20,
        device_bytes_max=8 << 20,
    )
    yield ServedBench(engine, limits)
    engine.engine.close()


class Changes:
    """Requests of all names, and changes of adapters and requests between the steps."""

    def __init__(self, bench: ServedBench, random: Random) -> None:
        self.bench, self.random = bench, random
        self.made: Counter[str] = Counter()
        self.whole = self.preempted = 0
        self.sent: dict[str, tuple[str, str, int]] = {}
        self._words = held_out_words(REQUESTS, seed=WORDS_SEED)
        self._cancelled: set[str] = set()
        self._replacements: list[str] = []
        self.replace()

    @property
    def open(self) -> list[str]:
        """The requests without an answer that was checked."""
        return list(self.sent)

    @property
    def are_sent(self) -> bool:
        """Whether all requests were sent."""
        return not self._words

    def send(self) -> None:
        """Send a request of any name."""
        name, word = self.random.choice(NAMES), self._words.pop()
        adapter = None if name == BASE else name
        request_id = self.bench.generate(adapter, 24, tuple(prompt_of(word).encode()))
        self.sent[request_id] = (name, word, self._version())

    def _version(self) -> int:
        """The number of the last replacement that was answered."""
        done = [
            number
            for number, request_id in enumerate(self._replacements)
            if isinstance(self.bench.replies.get(request_id), requests.AdapterDone)
        ]
        return max(done, default=0)

    def change(self) -> None:
        """Change an adapter, or cancel a request."""
        name = self.random.choice(list(TRANSFORMATIONS))
        kind = CHANGES[self.made.total() % len(CHANGES)]
        self.made[kind] += 1
        match kind:
            case "evict":
                self.bench.send(requests.EvictAdapter, name)
            case "load":
                self.bench.send(requests.LoadAdapter, f"{name} {self.made[kind]}", name)
            case "prefetch":
                self.bench.send(requests.PrefetchAdapter, name)
            case "replace":
                self.replace()
            case "cancel" if self.sent:
                chosen = self.random.choice(self.open)
                self._cancelled.add(chosen)
                self.bench.send(requests.CancelGeneration, chosen)

            case "preempt":
                self._preempt()

    def _preempt(self) -> None:
        """Let any sequence give up its memory, as if it lacked for another one."""
        scheduler = self.bench.engine._inference
        if running := [one for one in scheduler.batch.running if one.can_resume]:
            chosen = self.random.choice(running)
            scheduler.batch.keep(lambda one: one is not chosen)
            scheduler.on_preemption([chosen])
            self.preempted += 1

    def replace(self) -> None:
        """Give the replaced name the files of its next version."""
        path = VERSIONS[len(self._replacements) % len(VERSIONS)]
        self._replacements.append(self.bench.send(requests.LoadAdapter, REPLACED, path, True))

    def check_answers(self) -> None:
        """Check the outputs of all requests that were answered."""
        for request_id in [one for one in self.sent if one in self.bench.replies]:
            reply, right = self.bench.replies[request_id], self._right_outputs(request_id)
            assert isinstance(reply, requests.GenerationDone), reply
            output = bytes(t for t in self.bench.tokens[request_id] if t < EOS_ID).decode()
            if reply.finish_reason == "cancelled":
                assert request_id in self._cancelled
                assert any(one.startswith(output) for one in right), (output, right)
            else:
                assert output in right
                self.whole += 1
            del self.sent[request_id]

    def _right_outputs(self, request_id: str) -> set[str]:
        """Return the right output; of the replaced name, one for each version since the request."""
        name, word, version = self.sent[request_id]
        if name == BASE:
            return {word}
        if name != REPLACED:
            return {answer_of(name, word)}
        numbers = range(version, len(self._replacements))
        return {answer_of(VERSIONS[number % len(VERSIONS)], word) for number in numbers}


def test_outputs_are_those_of_each_request_alone(bench: ServedBench) -> None:
    seed = torch.seed() % 2**32
    print(f"seed {seed}")
    for name in TRANSFORMATIONS:
        bench.request(requests.LoadAdapter, name)
    changes = Changes(bench, Random(seed))
    while changes.sent or not changes.are_sent:
        while len(changes.sent) < OUTSTANDING and not changes.are_sent:
            changes.send()
        if changes.random.random() < 0.5:
            changes.change()
        bench.step()
        changes.check_answers()
    assert changes.whole >= REQUESTS // 2
    assert min(changes.made[kind] for kind in CHANGES) > 0
    assert changes.preempted > 0
    assert bench.world.totals.evictions > 0
