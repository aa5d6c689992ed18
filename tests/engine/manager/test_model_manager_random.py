"""Random calls of plain and LRU managers, direct and by request, compared with an oracle.

After every call, the states are compared with the oracle's, the invariants of the core and of the
arena are checked, and the logits of the mapped batch are compared with those of plain PyTorch.
"""

import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from loradock.engine.adapters import LoRARequest
from loradock.engine.errors import EngineError, NotResident
from loradock.engine.manager import (
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    WorkerLoRAManager,
)
from loradock.messages.errors import ErrorCode
from tests.support.engine.manager_examples import (
    CONTENTS,
    Content,
    RefilledBuffers,
    check_rows,
    forward,
    make_manager,
    mapping_of,
)
from tests.support.engine.manager_oracle import ManagerOracle, Refused

torch.set_num_threads(1)
IDS = range(1, 7)
ROWS_MAX = 5
ids = st.sampled_from(IDS)
contents = st.sampled_from(CONTENTS)
SETTINGS = settings(
    max_examples=8,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class ManagerMachine(RuleBasedStateMachine):
    """The direct calls of the plain manager."""

    manager_class: type[LoRAModelManager] = LoRAModelManager

    @initialize(slots=st.integers(1, 3), spare=st.integers(0, 2))
    def start(self, slots: int, spare: int) -> None:
        self.manager = make_manager(self.manager_class, slots, slots + spare)
        self.oracle = ManagerOracle(
            slots, slots + spare, self.manager_class is LRUCacheLoRAModelManager
        )
        self.mapped: tuple[int, ...] = ()
        tensors = RefilledBuffers(lambda rows: torch.zeros(rows, dtype=torch.int64), ROWS_MAX)
        arrays = RefilledBuffers(lambda rows: np.zeros(rows, dtype=np.int64), ROWS_MAX)
        self.mappings = {"list": mapping_of}
        self.mappings |= {"tensor": tensors.mapping_of, "array": arrays.mapping_of}

    def both(self, expected: Callable[[], object], found: Callable[[], object]) -> None:
        """Assert that both return the same result, or are refused alike."""
        codes: tuple[ErrorCode, ...] = ()
        try:
            result = expected()
        except Refused as refused:
            codes = refused.codes
        if not codes:
            assert found() == result
            return
        with pytest.raises(EngineError) as caught:
            found()
        assert caught.value.code in codes, str(caught.value)

    @rule(adapter_id=ids, content=contents)
    def add(self, adapter_id: int, content: Content) -> None:
        self.both(
            lambda: self.oracle.add(adapter_id, content),
            lambda: self.manager.add_adapter(content.model(adapter_id)),
        )

    @rule(adapter_id=ids)
    def activate(self, adapter_id: int) -> None:
        self.both(
            lambda: self.oracle.activate(adapter_id),
            lambda: self.manager.activate_adapter(adapter_id),
        )

    @rule(adapter_id=ids)
    def pin(self, adapter_id: int) -> None:
        self.both(lambda: self.oracle.pin(adapter_id), lambda: self.manager.pin_adapter(adapter_id))

    @rule(adapter_id=ids)
    def unpin(self, adapter_id: int) -> None:
        assert self.manager.unpin_adapter(adapter_id) == self.oracle.unpin(adapter_id)

    @rule(adapter_id=ids)
    def deactivate(self, adapter_id: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "adapter . was pinned")
            found = self.manager.deactivate_adapter(adapter_id)
        assert found == self.oracle.deactivate(adapter_id)

    @rule(adapter_id=ids)
    def remove(self, adapter_id: int) -> None:
        assert self.manager.remove_adapter(adapter_id) == self.oracle.remove(adapter_id)

    @rule()
    def remove_oldest(self) -> None:
        self.both(self.oracle.remove_oldest, self.manager.remove_oldest_adapter)

    @rule()
    def remove_all(self) -> None:
        had_any = bool(self.oracle.contents)
        for adapter_id in self.oracle.recency.copy():
            self.oracle.remove(adapter_id)
        assert self.manager.remove_all_adapters() == had_any

    @rule(
        rows=st.lists(st.sampled_from([0, *IDS]), min_size=1, max_size=ROWS_MAX),
        kind=st.sampled_from(["list", "tensor", "array"]),
    )
    def map_rows(self, rows: list[int], kind: str) -> None:
        make = self.mappings[kind]
        if {0, *self.oracle.active}.issuperset(rows):
            changed = self.manager.set_adapter_mapping(make(*rows))
            assert changed or self.mapped == tuple(rows)
            assert not self.manager.set_adapter_mapping(make(*rows))
            self.mapped = tuple(rows)
        else:
            self.both(
                lambda: self.refuse(ErrorCode.NOT_RESIDENT),
                lambda: self.manager.set_adapter_mapping(make(*rows)),
            )

    def refuse(self, code: ErrorCode) -> None:
        raise Refused(code)

    @invariant()
    def each_row_uses_the_weights_of_its_adapter(self) -> None:
        if not self.mapped:
            check_rows(self.manager, {}, 0)
        elif {0, *self.oracle.active}.issuperset(self.mapped):
            check_rows(self.manager, self.oracle.contents, *self.mapped)
        else:
            with pytest.raises(NotResident):
                forward(self.manager, len(self.mapped))

    @invariant()
    def adapters_are_where_the_oracle_has_them(self) -> None:
        manager, oracle = self.manager, self.oracle
        manager._engine.residency.arena.check()
        assert manager.list_adapters().keys() == oracle.contents.keys()
        in_slots = [adapter_id for adapter_id in manager.lora_index_to_id if adapter_id is not None]
        assert sorted(in_slots) == sorted(oracle.active)
        assert {adapter_id for adapter_id in IDS if manager.is_pinned(adapter_id)} == oracle.pinned
        assert len(manager) == len(oracle.contents)
        metrics = manager.get_lora_metrics()
        assert metrics["adapters"] == {
            "registered": len(oracle.contents),
            "active": len(oracle.active),
            "capacity": oracle.capacity,
            "utilization": len(oracle.active) / oracle.slots,
            "host_utilization": len(oracle.contents) / oracle.capacity,
        }
        assert metrics["performance"]["evictions"] == oracle.evictions
        assert metrics["memory"]["adapters"].keys() == oracle.contents.keys()

    @invariant()
    def memory_is_used_only_by_adapters_on_the_host(self) -> None:
        memory = self.manager.get_lora_metrics()["memory"]
        device = sum(sizes["device_bytes"] for sizes in memory["adapters"].values())
        assert device == memory["device"]["size_bytes"] - memory["device"]["free_bytes"]
        assert device == memory["tiers"]["device"]["size_bytes"]
        assert memory["tiers"]["pinned"]["size_bytes"] == sum(
            self.manager._engine.residency.host_adapters[key].weights.size_bytes
            for key in self.manager._engine.residency.host_adapters
        )

    @invariant()
    def weights_are_those_that_were_added(self) -> None:
        for adapter_id, content in self.oracle.contents.items():
            found = self.manager.get_adapter(adapter_id)
            assert found is not None
            assert found.loras.keys() == set(content.modules)
            for name, (a, b) in content.pairs().items():
                assert torch.equal(found.loras[name].lora_a, a)
                assert torch.equal(found.loras[name].lora_b, content.scaling * b)

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            self.manager.close()


class LRUMachine(ManagerMachine):
    """The calls of the LRU manager."""

    manager_class = LRUCacheLoRAModelManager


class WorkerMachine(ManagerMachine):
    """Batches by request, mixed with direct calls; each id has its own directory."""

    worker_class: type[WorkerLoRAManager] = WorkerLoRAManager

    @initialize(slots=st.integers(1, 3), spare=st.integers(0, 2))
    def start(self, slots: int, spare: int) -> None:
        super().start(slots, spare)
        self.worker = self.worker_class(self.manager)
        self.folder = Path(tempfile.mkdtemp())
        self.files: dict[int, Content] = {}
        # The contents of the files when they were read, by id; new bytes are a new object.
        self.read: dict[int, Content] = {}
        for adapter_id in IDS[:-1]:
            self.rewrite(adapter_id, CONTENTS[adapter_id % len(CONTENTS)])

    @rule(adapter_id=st.sampled_from(IDS[:-1]), content=contents)
    def rewrite(self, adapter_id: int, content: Content) -> None:
        """Replace the files of an id; the last id has none."""
        content.save(self.folder / str(adapter_id))
        self.files[adapter_id] = replace(content)

    def request(self, adapter_id: int, inplace: bool) -> LoRARequest:
        path = str(self.folder / str(adapter_id))
        return LoRARequest(f"name-{adapter_id}", adapter_id, path, load_inplace=inplace)

    def expect(self, wanted: dict[int, bool], only: bool) -> bool:
        """Update the oracle; return whether the files of an adapter are read."""
        there = self.oracle.contents
        codes = (
            [ErrorCode.NO_ROOM] if len({*wanted, *self.oracle.pinned}) > self.oracle.slots else []
        )
        for adapter_id, inplace in wanted.items():
            if adapter_id in there and adapter_id not in self.read and not inplace:
                codes.append(ErrorCode.CONFLICT)
            if adapter_id not in self.files and (inplace or adapter_id not in there):
                codes.append(ErrorCode.NOT_FOUND)
        if codes:
            raise Refused(*codes)
        stale = {
            adapter_id: self.files[adapter_id]
            for adapter_id, inplace in wanted.items()
            if adapter_id not in there
            or (inplace and self.read.get(adapter_id) is not self.files[adapter_id])
        }
        self.oracle.activate_batch(list(wanted), stale, only)
        self.read |= stale
        return bool(stale)

    @rule(wanted=st.dictionaries(ids, st.booleans(), max_size=4))
    def set_active(self, wanted: dict[int, bool]) -> None:
        only = self.worker_class is WorkerLoRAManager
        requested = [self.request(adapter_id, inplace) for adapter_id, inplace in wanted.items()]

        def expected() -> None:
            self.expect(wanted, only)
            self.mapped = (0, *wanted)

        mapping = mapping_of(0, *wanted)
        self.both(expected, lambda: self.worker.set_active_adapters(requested, mapping))

    @rule(adapter_id=ids, inplace=st.booleans())
    def add_by_request(self, adapter_id: int, inplace: bool) -> None:
        self.both(
            lambda: self.expect({adapter_id: inplace}, only=False),
            lambda: self.worker.add_adapter(self.request(adapter_id, inplace)),
        )

    @invariant()
    def the_worker_lists_what_is_there(self) -> None:
        # The files of a removed adapter don't count for the next one with its id.
        self.read = {a: content for a, content in self.read.items() if a in self.oracle.contents}
        assert self.worker.list_adapters() == set(self.oracle.contents)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class LRUWorkerMachine(WorkerMachine):
    """Batches by request on the LRU managers."""

    manager_class = LRUCacheLoRAModelManager
    worker_class = LRUCacheWorkerLoRAManager


TestPlainManager = ManagerMachine.TestCase
TestPlainManager.settings = SETTINGS
TestLRUManager = LRUMachine.TestCase
TestLRUManager.settings = SETTINGS
TestPlainWorker = WorkerMachine.TestCase
TestPlainWorker.settings = SETTINGS
TestLRUWorker = LRUWorkerMachine.TestCase
TestLRUWorker.settings = SETTINGS
