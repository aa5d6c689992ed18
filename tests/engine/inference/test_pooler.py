"""The queue of embeddings and classifications: who shares a forward, who fails, who gets what."""

import gc
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig, LoRAConfig
from engine.errors import (
    Conflict,
    EngineOverloaded,
    ModelRefused,
    NotResident,
    NotServed,
    RequestRefused,
)
from engine.inference import output_cache, pooler
from engine.inference.admission import Slots
from engine.inference.pooler import Pooler
from engine.inference.runner import require_task
from engine.kernels import choose_kernels
from engine.models import pooling_model
from engine.models.pooling_model import PooledModel
from engine.parallel import ParallelGroup
from engine.punica import PunicaWrapper
from engine.residency.arena import Arena
from messages.commands import StartGeneration, StartPooling
from messages.errors import ErrorCode
from messages.reports import OperationFailed, PoolingEnded, Report, VectorsComputed
from tests.support.models.pooling_examples import CLASSIFIERS, EMBEDDERS, TEXTS, VOCABULARY

LAST_TOKEN = VOCABULARY - 1


class Bench:
    """A pooler on the base model; slot 0 counts as adapter 1's, though nothing is in it."""

    def __init__(self, model: PooledModel, **config: int) -> None:
        arena = Arena(1, model.shapes, 1 << 20, torch.float32, "cpu")
        punica = PunicaWrapper(model.device, 8, choose_kernels("cpu"))
        model.bind(arena, punica)
        self.model, self.op = model, 0
        self.reports: list[Report] = []
        self.residents: list[int | None] = [1]
        self.forwards: list[list[int]] = []
        self.memory_tokens: int | None = None
        self.pooler = Pooler(
            model,
            punica,
            Slots(arena, self.residents),
            EngineConfig(Path(), **config),
            self.reports.append,
        )

    def start(self, *inputs: tuple[int, ...], **fields: object) -> int:
        self.op += 1
        given = {"adapter_id": 0, "slot": -1, "generation": 0, "task": "embed"} | fields
        given = {"request_id": f"r{self.op}", "inputs": inputs} | given
        self.pooler.start(StartPooling(self.op, **given))
        return self.op

    def run(self) -> list[Report]:
        for _ in range(100):
            if self.pooler.is_idle:
                break
            self.pooler.step()
        assert self.pooler.is_idle
        told = self.reports.copy()
        self.reports.clear()
        return told


@pytest.fixture(scope="module")
def model() -> PooledModel:
    return PooledModel(EMBEDDERS[0].make(), LoRAConfig())


@pytest.fixture
def bench(model: PooledModel, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(pooler, "BATCH_TOKENS_MAX", 40)
    made = Bench(model, max_num_seqs=4, queue_requests_max=3)
    forward = model.forward

    def counted(prompts: list[list[int]], firsts: Sequence[int] = ()) -> Tensor:
        made.forwards.append([len(prompt) for prompt in prompts])
        if made.memory_tokens is not None and padded(prompts) > made.memory_tokens:
            raise torch.OutOfMemoryError("full")
        return forward(prompts, firsts)

    monkeypatch.setattr(model, "forward", counted)
    return made


def padded(prompts: list[list[int]]) -> int:
    return len(prompts) * max(map(len, prompts))


def numbers(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // 4}f", vector))


def test_vectors_come_in_the_order_of_the_inputs(bench: Bench) -> None:
    op = bench.start(*TEXTS)
    vectors, ended = bench.run()
    assert ended == PoolingEnded(op, len(TEXTS), sum(map(len, TEXTS)))
    assert (vectors.request_id, vectors.offset, vectors.labels) == ("r1", 0, ())
    for text, vector in zip(TEXTS, vectors.vectors, strict=True):
        alone = bench.model.forward([text])[0]
        torch.testing.assert_close(torch.tensor(numbers(vector)), alone, rtol=1e-5, atol=1e-6)


def test_inputs_of_like_length_share_a_forward_and_requests_too(bench: Bench) -> None:
    bench.start(*[(7,) * length for length in (9, 2, 8, 1, 3)])
    bench.start((7,) * 4)
    bench.run()
    assert bench.forwards == [[1, 2, 3, 8], [4, 9]]


def test_a_model_without_a_head_has_no_scores_of_its_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "without_head", True)
    with pytest.raises(NotServed, match="name an adapter that brings one"):
        bench.start((5,))
    assert bench.pooler.is_idle


def test_requests_take_turns(bench: Bench) -> None:
    large = bench.start(*[(7,) * 2] * 10)
    small = [bench.start((5,)), bench.start((6,))]
    ends = [one.op for one in bench.run() if isinstance(one, PoolingEnded)]
    assert ends == [*small, large]
    assert bench.forwards == [[2, 2, 2, 2], [1, 1, 2, 2], [2, 2, 2, 2]]


def test_a_forward_is_bounded_in_tokens(bench: Bench) -> None:
    bench.start(*[(7,) * length for length in (12, 50, 13, 14)])
    bench.run()
    assert bench.forwards == [[12, 13], [14], [50]]


def test_a_request_whose_adapter_left_its_slot_fails_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, sound = bench.start((5, 6)), bench.start((5, 6))

    def check(command: StartPooling) -> None:
        if command.op == stale:
            raise NotResident("it is gone")

    monkeypatch.setattr(bench.pooler._slots, "check", check)
    failed, *others = bench.run()
    assert failed == OperationFailed(stale, ErrorCode.NOT_RESIDENT, "it is gone")
    assert others[-1] == PoolingEnded(sound, 1, 2)
    assert bench.forwards == [[2]]


def test_a_stale_request_is_not_taken(bench: Bench) -> None:
    op = bench.start((5, 6))
    with pytest.raises(NotResident, match="slot 0"):
        bench.start((5, 6), adapter_id=2, slot=0, generation=1)
    for slot, word in ((7, "slots are 0 to 0"), (0, "generation")):
        with pytest.raises(NotResident, match=word):
            bench.start((5, 6), adapter_id=1, slot=slot, generation=9)
    assert [type(report) for report in bench.run()] == [VectorsComputed, PoolingEnded]
    assert op == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "no tokenizer"),
        ((VOCABULARY,), f"token {VOCABULARY} .* 0 to {VOCABULARY - 1}"),
        ((5,) * 65, "a prompt of 65 tokens; the context takes 64"),
        ((), "empty"),
    ],
)
def test_what_can_not_be_run_is_refused_by_its_place(
    bench: Bench, text: object, words: str
) -> None:
    with pytest.raises(RequestRefused, match=f"input 1: .*{words}"):
        bench.start((5, 6), text)
    assert bench.pooler.is_idle


def test_a_token_that_stands_for_an_image_is_refused_where_there_is_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "media_tokens", frozenset({9}))
    with pytest.raises(RequestRefused, match="input 1: token 9 in the prompt stands for an image"):
        bench.start((5, 6), (8, 9))


def test_the_queue_is_bounded_and_ids_are_told_apart(bench: Bench) -> None:
    for _ in range(3):
        bench.start((5,))
    with pytest.raises(EngineOverloaded, match="3 requests wait"):
        bench.start((5,))
    bench.run()
    bench.start((5,), request_id="same")
    with pytest.raises(Conflict, match="same"):
        bench.start((5,), request_id="same")


def test_a_stopped_request_ends_with_what_was_done(bench: Bench) -> None:
    op = bench.start(*[(7,) * 3] * 6)
    other = bench.start((5,))
    bench.pooler.step()
    assert set(bench.pooler.operations) == {op, other}
    bench.pooler.stop(op)
    assert bench.reports == [PoolingEnded(op, 4, 12)]
    bench.pooler.stop(op)
    assert [type(report) for report in bench.run()] == [PoolingEnded, VectorsComputed, PoolingEnded]


def test_ended_vectors_are_sent_again_while_they_are_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start((5, 6), request_id="first")
    [vectors, _] = bench.run()
    bench.pooler.resend("first")
    bench.pooler.resend("nobody's")
    assert bench.run() == [vectors]
    monkeypatch.setattr(output_cache, "KEPT_BYTES_MAX", 2 * len(vectors.vectors[0]))
    for request_id in ("second", "third"):
        bench.start((5, 6), request_id=request_id)
        bench.run()
    bench.pooler.resend("first")
    assert bench.run() == []
    bench.pooler.resend("third")
    assert [report.request_id for report in bench.run()] == ["third"]


def test_of_an_ended_request_only_its_vectors_are_kept(bench: Bench) -> None:
    bench.start((5, 6))
    [request] = map(weakref.ref, bench.pooler._waiting.values())
    bench.run()
    gc.collect()
    assert request() is None
    bench.pooler.resend("r1")
    assert [type(report) for report in bench.run()] == [VectorsComputed]


def test_an_output_that_is_not_finite_fails_its_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = bench.model.results

    def unsound(pooled: Tensor) -> Tensor:
        made = results(pooled).clone()
        made[0, 3] = torch.nan
        return made

    monkeypatch.setattr(bench.model, "results", unsound)
    first, second = bench.start((5,), (5, 6)), bench.start((5, 6, 7))
    failed, *others = bench.run()
    assert isinstance(failed, OperationFailed)
    assert (failed.op, failed.code) == (first, ErrorCode.NOT_FINITE)
    assert others[-1] == PoolingEnded(second, 1, 3)


def test_without_memory_smaller_batches_are_tried(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooler, "BATCH_TOKENS_GROWTH", 8)
    bench.memory_tokens = 20
    ops = [bench.start(*[(7,) * 8] * 4), bench.start(*[(7,) * 3] * 6)]
    told = bench.run()
    assert [report.op for report in told if isinstance(report, PoolingEnded)] == ops
    # Half as many after a failure; then it is seen, step by step, how many there may be.
    assert bench.forwards[:3] == [[8, 8, 8, 8], [8, 8], [3, 3, 3, 3]]
    assert bench.forwards[3:] == [[8, 8, 3, 3], [8, 8], [3, 3]]
    bench.memory_tokens = None
    bench.forwards.clear()
    bench.start(*[(7,) * 8] * 16)
    bench.run()
    assert bench.forwards[-1] == [8, 8, 8, 8]


def test_a_text_that_has_no_memory_alone_fails_its_request_alone(bench: Bench) -> None:
    bench.memory_tokens = 20
    first, large = bench.start((7,) * 8, (7,) * 8), bench.start((7,) * 9, (7,) * 21)
    third = bench.start((7,) * 8)
    ends = {one.op: one for one in bench.run() if not isinstance(one, VectorsComputed)}
    assert {op for op, end in ends.items() if isinstance(end, PoolingEnded)} == {first, third}
    failed = ends[large]
    assert isinstance(failed, OperationFailed)
    assert failed.code == ErrorCode.DEVICE_OUT_OF_MEMORY
    assert failed.message == "an input of 21 tokens: full"


def test_one_of_several_ranks_without_memory_can_not_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "group", ParallelGroup(0, 2))
    bench.memory_tokens = 1
    bench.start((7, 8))
    with pytest.raises(torch.OutOfMemoryError):
        bench.pooler.step()


def test_what_one_request_gets_is_bounded_in_bytes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooler, "VECTORS_BYTES_MAX", 3 * 32 * 4)
    with pytest.raises(RequestRefused, match=r"4 inputs, of 32 numbers each.*send 3 inputs at a"):
        bench.start(*TEXTS)
    bench.start(*TEXTS[:3])
    assert type(bench.run()[-1]) is PoolingEnded


def test_what_all_requests_get_together_is_bounded_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooler, "UNDER_WAY_BYTES_MAX", 5 * 32 * 4)
    bench.start(*TEXTS[:3])
    with pytest.raises(EngineOverloaded, match=r"384 bytes of vectors are under way.*are 384"):
        bench.start(*TEXTS[:3])
    bench.start(*TEXTS[:2])
    bench.run()
    bench.start(*TEXTS)


def test_a_model_whose_vectors_are_too_long_to_be_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooling_model, "VECTOR_NUMBERS_MAX", 2)
    with pytest.raises(ModelRefused, match="3 numbers for a text; at most 2"):
        PooledModel(CLASSIFIERS[0].make(), LoRAConfig(), task="classify")


def test_scores_add_up_to_one_and_have_labels() -> None:
    bench = Bench(PooledModel(CLASSIFIERS[0].make(), LoRAConfig(), task="classify"))
    bench.start(*TEXTS, task="classify")
    vectors, _ = bench.run()
    assert vectors.labels == ("good", "bad", "ugly")
    for vector in vectors.vectors:
        assert sum(numbers(vector)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("single_label_classification", torch.softmax(torch.tensor([1.0, -2.0, 0.0]), -1)),
        ("multi_label_classification", torch.sigmoid(torch.tensor([1.0, -2.0, 0.0]))),
        ("regression", torch.tensor([1.0, -2.0, 0.0])),
    ],
)
def test_the_problem_type_says_what_scores_are(kind: str, expected: Tensor) -> None:
    base = CLASSIFIERS[0].make()
    base.config.problem_type = kind
    model = PooledModel(base, LoRAConfig(), task="classify")
    torch.testing.assert_close(model.results(torch.tensor([[1.0, -2.0, 0.0]]))[0], expected)


@pytest.mark.parametrize("token", [None, -1, VOCABULARY])
def test_a_model_without_padding_is_told_one_that_ends_no_text_of_its_batch(
    token: int | None,
) -> None:
    base = CLASSIFIERS[2].make()
    base.config.pad_token_id = token
    model = PooledModel(base, LoRAConfig(), task="classify")
    texts = [(5, 6, 7), (9, 8, 7, 6, 0), (0, 0, 0), (4, 1), (3,) * 9]
    expected = torch.cat([model.forward([text]) for text in texts])
    torch.testing.assert_close(model.forward(texts), expected, rtol=1e-4, atol=1e-5)


def test_texts_that_end_in_every_token_there_is_do_not_share_one_forward() -> None:
    base = CLASSIFIERS[2].make()
    base.config.pad_token_id = None
    bench = Bench(PooledModel(base, LoRAConfig(), task="classify"), max_num_seqs=1000)
    bench.start(*[(5, token) for token in range(VOCABULARY)], task="classify")
    assert bench.run()[-1] == PoolingEnded(1, VOCABULARY, 2 * VOCABULARY)


def test_labels_without_names_are_numbers() -> None:
    base = CLASSIFIERS[0].make()
    base.config.id2label = {1: "bad", 2: "ugly", 3: "other"}
    model = PooledModel(base, LoRAConfig(), task="classify")
    assert model.labels == ("0", "bad", "ugly")


@pytest.mark.parametrize("served", ["generate", "embed", "classify"])
def test_an_engine_has_one_task(served: str) -> None:
    place = (1, "r", 0, -1, 0)
    asked = {
        "generate": StartGeneration(*place),
        "embed": StartPooling(*place, "embed"),
        "classify": StartPooling(*place, "classify"),
    }
    for task, command in asked.items():
        if task == served:
            require_task(served, command)
        else:
            with pytest.raises(NotServed, match=f"to {served}, not to {task}"):
                require_task(served, command)
