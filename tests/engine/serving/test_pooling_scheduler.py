"""The queue of embeddings and classifications: shared forward passes, failures and results."""

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import (
    Conflict,
    Malformed,
    ModelRefused,
    NotResident,
    NotServed,
    Overloaded,
)
from loradock.engine.kernels import choose_kernels
from loradock.engine.models import pooling_model
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.parallel import ParallelGroup
from loradock.engine.punica import PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.serving import generations, pooling
from loradock.engine.serving.pooling import PoolingScheduler
from loradock.engine.serving.queue import SlotTable
from loradock.messages.commands import StartGeneration, StartPooling
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Truncation
from loradock.messages.reports import OperationFailed, PoolingEnded, Report
from loradock.messages.requests import VectorsStreamed
from tests.support.engine.vectors import unpack_vector
from tests.support.models.pooling_examples import CLASSIFIERS, EMBEDDERS, TEXTS, VOCABULARY


class SchedulerBench:
    """A scheduler on the base model; slot 0 is listed as adapter 1's, but is empty."""

    def __init__(self, model: PoolingModel, **config: int) -> None:
        arena = Arena(1, model.shapes, 1 << 20, torch.float32, "cpu")
        punica = PunicaWrapper(model.device, 8, choose_kernels("cpu"))
        model.bind(arena, punica)
        self.model, self.op = model, 0
        self.reports: list[Report] = []
        self.residents: list[int | None] = [1]
        self.forwards: list[list[int]] = []
        self.memory_tokens: int | None = None
        self.scheduler = PoolingScheduler(
            model,
            punica,
            SlotTable(arena, self.residents),
            EngineConfig(Path(), **config),
            self.reports.append,
        )

    def start(self, *inputs: tuple[int, ...], **fields: object) -> int:
        self.op += 1
        given = {"adapter_id": 0, "slot": -1, "generation": 0, "task": "embed"} | fields
        given = {"request_id": f"r{self.op}", "inputs": inputs} | given
        self.scheduler.start(StartPooling(self.op, **given))
        return self.op

    def run(self) -> list[Report]:
        for _ in range(100):
            if self.scheduler.is_idle:
                break
            self.scheduler.step()
        assert self.scheduler.is_idle
        reports = self.reports.copy()
        self.reports.clear()
        return reports


@pytest.fixture(scope="module")
def model() -> PoolingModel:
    return PoolingModel(EMBEDDERS[0].make(), LoRAConfig())


@pytest.fixture
def bench(model: PoolingModel, monkeypatch: pytest.MonkeyPatch) -> SchedulerBench:
    monkeypatch.setattr(pooling, "BATCH_TOKENS_MAX", 40)
    made = SchedulerBench(model, max_num_seqs=4, queue_requests_max=3)
    forward = model.forward

    def counted(prompts: list[list[int]], starts: Sequence[int] = ()) -> Tensor:
        made.forwards.append([len(prompt) for prompt in prompts])
        if made.memory_tokens is not None and padded(prompts) > made.memory_tokens:
            raise torch.OutOfMemoryError("full")
        return forward(prompts, starts)

    monkeypatch.setattr(model, "forward", counted)
    return made


def padded(prompts: list[list[int]]) -> int:
    return len(prompts) * max(map(len, prompts))


def test_vectors_are_in_the_order_of_the_inputs(bench: SchedulerBench) -> None:
    op = bench.start(*TEXTS)
    vectors, ended = bench.run()
    assert ended == PoolingEnded(op, len(TEXTS), sum(map(len, TEXTS)))
    assert (vectors.request_id, vectors.offset, vectors.labels) == ("r1", 0, ())
    for text, vector in zip(TEXTS, vectors.vectors, strict=True):
        alone = bench.model.forward([text])[0]
        torch.testing.assert_close(torch.tensor(unpack_vector(vector)), alone, rtol=1e-5, atol=1e-6)


def test_inputs_of_similar_length_share_a_forward_across_requests(bench: SchedulerBench) -> None:
    bench.start(*[(7,) * length for length in (9, 2, 8, 1, 3)])
    bench.start((7,) * 4)
    bench.run()
    assert bench.forwards == [[1, 2, 3, 8], [4, 9]]


def test_a_model_without_a_head_has_no_scores_of_its_own(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "without_head", True)
    with pytest.raises(NotServed, match="name an adapter that contains one"):
        bench.start((5,))
    assert bench.scheduler.is_idle


def test_requests_for_another_task_are_refused(bench: SchedulerBench) -> None:
    with pytest.raises(NotServed, match="to embed, not to classify"):
        bench.start((5,), task="classify")
    with pytest.raises(NotServed, match="to embed, not to generate"):
        bench.scheduler.start(StartGeneration(1, "r", 0, -1, 0))
    assert bench.scheduler.is_idle


def test_requests_take_turns(bench: SchedulerBench) -> None:
    large = bench.start(*[(7,) * 2] * 10)
    small = [bench.start((5,)), bench.start((6,))]
    ends = [one.op for one in bench.run() if isinstance(one, PoolingEnded)]
    assert ends == [*small, large]
    assert bench.forwards == [[2, 2, 2, 2], [1, 1, 2, 2], [2, 2, 2, 2]]


def test_clients_take_turns(bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of one client delays the request of another one by one forward pass."""
    monkeypatch.setattr(bench.scheduler, "_waiting_max", 20)
    monkeypatch.setattr(bench.scheduler, "_tokens_max", 20)
    monkeypatch.setattr(pooling, "BATCH_TOKENS_MAX", 20)
    flood = [bench.start((7,) * 10, (8,) * 10, request_id=f"a:{number}") for number in range(20)]
    bench.scheduler.step()
    other = bench.start((9,) * 10, request_id="b:1")
    for _ in range(2):
        bench.scheduler.step()
    ended = [one.op for one in bench.reports if isinstance(one, PoolingEnded)]
    assert other in ended
    assert len(ended) < len(flood)


def test_a_forward_is_bounded_in_tokens(bench: SchedulerBench) -> None:
    bench.start(*[(7,) * length for length in (12, 50, 13, 14)])
    bench.run()
    assert bench.forwards == [[12, 13], [14], [50]]


def test_a_request_whose_adapter_was_evicted_fails_alone(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, sound = bench.start((5, 6)), bench.start((5, 6))

    def check(command: StartPooling) -> None:
        if command.op == stale:
            raise NotResident("evicted")

    monkeypatch.setattr(bench.scheduler._slots, "check", check)
    failed, *others = bench.run()
    assert failed == OperationFailed(stale, ErrorCode.NOT_RESIDENT, "evicted")
    assert others[-1] == PoolingEnded(sound, 1, 2)
    assert bench.forwards == [[2]]


def test_a_stale_request_is_refused(bench: SchedulerBench) -> None:
    op = bench.start((5, 6))
    with pytest.raises(NotResident, match="slot 0"):
        bench.start((5, 6), adapter_id=2, slot=0, generation=1)
    for slot, word in ((7, "slot 7 was named; this engine has 0 to 0"), (0, "generation")):
        with pytest.raises(NotResident, match=word):
            bench.start((5, 6), adapter_id=1, slot=slot, generation=9)
    assert [type(report) for report in bench.run()] == [VectorsStreamed, PoolingEnded]
    assert op == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello", "no tokenizer"),
        ((VOCABULARY,), f"token {VOCABULARY} .* 0 to {VOCABULARY - 1}"),
        (
            (5,) * 65,
            "context length is 64 tokens, and the prompt is too long: 65 tokens > 64 maximum",
        ),
        ((), "empty"),
    ],
)
def test_an_invalid_input_is_refused_with_its_index(
    bench: SchedulerBench, text: object, words: str
) -> None:
    with pytest.raises(Malformed, match=f"input 1: .*{words}"):
        bench.start((5, 6), text)
    assert bench.scheduler.is_idle


def test_a_token_that_stands_for_an_image_is_refused_where_there_is_none(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "media_tokens", frozenset({9}))
    with pytest.raises(Malformed, match="input 1: token 9 in the prompt stands for an image"):
        bench.start((5, 6), (8, 9))


def test_the_queue_is_bounded_and_running_ids_are_unique(bench: SchedulerBench) -> None:
    for _ in range(3):
        bench.start((5,))
    with pytest.raises(Overloaded, match="3 requests wait"):
        bench.start((5,))
    bench.run()
    bench.start((5,), request_id="same")
    with pytest.raises(Conflict, match="same"):
        bench.start((5,), request_id="same")


def test_a_stopped_request_ends_with_the_count_of_computed_vectors(bench: SchedulerBench) -> None:
    op = bench.start(*[(7,) * 3] * 6)
    other = bench.start((5,))
    bench.scheduler.step()
    assert set(bench.scheduler.operations) == {op, other}
    bench.scheduler.stop(op)
    assert bench.reports == [PoolingEnded(op, 4, 12)]
    bench.scheduler.stop(op)
    assert [type(report) for report in bench.run()] == [PoolingEnded, VectorsStreamed, PoolingEnded]


def test_vectors_of_an_ended_request_are_resent_while_cached(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start((5, 6), request_id="first")
    [vectors, _] = bench.run()
    bench.scheduler.resend("first")
    bench.scheduler.resend("unknown")
    assert bench.run() == [vectors]
    monkeypatch.setattr(generations, "OUTPUTS_BYTES_MAX", 2 * len(vectors.vectors[0]))
    for request_id in ("second", "third"):
        bench.start((5, 6), request_id=request_id)
        bench.run()
    bench.scheduler.resend("first")
    assert bench.run() == []
    bench.scheduler.resend("third")
    assert [report.request_id for report in bench.run()] == ["third"]


def test_an_ended_request_is_released_except_for_its_vectors(bench: SchedulerBench) -> None:
    bench.start((5, 6))
    [request] = map(weakref.ref, bench.scheduler._waiting.values())
    bench.run()
    gc.collect()
    assert request() is None
    bench.scheduler.resend("r1")
    assert [type(report) for report in bench.run()] == [VectorsStreamed]


def test_an_output_that_is_not_finite_fails_its_request(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = bench.model.results

    def not_finite(pooled: Tensor) -> Tensor:
        made = results(pooled).clone()
        made[0, 3] = torch.nan
        return made

    monkeypatch.setattr(bench.model, "results", not_finite)
    first, second = bench.start((5,), (5, 6)), bench.start((5, 6, 7))
    failed, *others = bench.run()
    assert isinstance(failed, OperationFailed)
    assert (failed.op, failed.code) == (first, ErrorCode.NOT_FINITE)
    assert others[-1] == PoolingEnded(second, 1, 3)


def test_without_memory_smaller_batches_are_tried(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "BATCH_TOKENS_GROWTH", 8)
    bench.memory_tokens = 20
    ops = [bench.start(*[(7,) * 8] * 4), bench.start(*[(7,) * 3] * 6)]
    reports = bench.run()
    assert [report.op for report in reports if isinstance(report, PoolingEnded)] == ops
    # The bound is halved after a failure and then rises with every step.
    assert bench.forwards[:3] == [[8, 8, 8, 8], [8, 8], [3, 3, 3, 3]]
    assert bench.forwards[3:] == [[8, 8, 3, 3], [8, 8], [3, 3]]
    bench.memory_tokens = None
    bench.forwards.clear()
    bench.start(*[(7,) * 8] * 16)
    bench.run()
    assert bench.forwards[-1] == [8, 8, 8, 8]


def test_a_text_that_runs_out_of_memory_alone_fails_its_request_alone(
    bench: SchedulerBench,
) -> None:
    bench.memory_tokens = 20
    first, large = bench.start((7,) * 8, (7,) * 8), bench.start((7,) * 9, (7,) * 21)
    third = bench.start((7,) * 8)
    ends = {one.op: one for one in bench.run() if not isinstance(one, VectorsStreamed)}
    assert {op for op, end in ends.items() if isinstance(end, PoolingEnded)} == {first, third}
    failed = ends[large]
    assert isinstance(failed, OperationFailed)
    assert failed.code == ErrorCode.DEVICE_OUT_OF_MEMORY
    assert failed.message == "an input of 21 tokens: full"


def test_a_rank_without_memory_among_several_ends_the_engine(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "group", ParallelGroup(0, 2))
    bench.memory_tokens = 1
    bench.start((7, 8))
    with pytest.raises(torch.OutOfMemoryError):
        bench.scheduler.step()


def test_the_vectors_of_one_request_are_bounded_in_bytes(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "VECTORS_BYTES_MAX", 3 * 32 * 4)
    with pytest.raises(Malformed, match=r"4 inputs, of 32 numbers each.*send 3 inputs at a"):
        bench.start(*TEXTS)
    bench.start(*TEXTS[:3])
    assert type(bench.run()[-1]) is PoolingEnded


def test_the_vectors_of_all_requests_are_bounded_in_bytes(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "PENDING_BYTES_MAX", 5 * 32 * 4)
    bench.start(*TEXTS[:3])
    with pytest.raises(Overloaded, match=r"384 bytes of vectors are pending.*are 384"):
        bench.start(*TEXTS[:3])
    bench.start(*TEXTS[:2])
    bench.run()
    bench.start(*TEXTS)


def test_a_model_whose_vectors_are_too_long_to_be_sent_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pooling_model, "VECTOR_NUMBERS_MAX", 2)
    with pytest.raises(ModelRefused, match="embedding dimension 3 exceeds the limit of 2"):
        PoolingModel(CLASSIFIERS[0].make(), LoRAConfig(), task="classify")


def test_scores_add_up_to_one_and_have_labels() -> None:
    bench = SchedulerBench(PoolingModel(CLASSIFIERS[0].make(), LoRAConfig(), task="classify"))
    bench.start(*TEXTS, task="classify")
    vectors, _ = bench.run()
    assert vectors.labels == ("good", "bad", "ugly")
    for vector in vectors.vectors:
        assert sum(unpack_vector(vector)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("single_label_classification", torch.softmax(torch.tensor([1.0, -2.0, 0.0]), -1)),
        ("multi_label_classification", torch.sigmoid(torch.tensor([1.0, -2.0, 0.0]))),
        ("regression", torch.tensor([1.0, -2.0, 0.0])),
    ],
)
def test_the_problem_type_specifies_the_scores(kind: str, expected: Tensor) -> None:
    base = CLASSIFIERS[0].make()
    base.config.problem_type = kind
    model = PoolingModel(base, LoRAConfig(), task="classify")
    torch.testing.assert_close(model.results(torch.tensor([[1.0, -2.0, 0.0]]))[0], expected)


@pytest.mark.parametrize("token", [None, -1, VOCABULARY])
def test_a_model_without_padding_uses_a_token_that_ends_no_text_of_its_batch(
    token: int | None,
) -> None:
    base = CLASSIFIERS[2].make()
    base.config.pad_token_id = token
    model = PoolingModel(base, LoRAConfig(), task="classify")
    texts = [(5, 6, 7), (9, 8, 7, 6, 0), (0, 0, 0), (4, 1), (3,) * 9]
    expected = torch.cat([model.forward([text]) for text in texts])
    torch.testing.assert_close(model.forward(texts), expected, rtol=1e-4, atol=1e-5)


def test_texts_that_end_in_all_possible_tokens_do_not_share_one_forward() -> None:
    base = CLASSIFIERS[2].make()
    base.config.pad_token_id = None
    bench = SchedulerBench(PoolingModel(base, LoRAConfig(), task="classify"), max_num_seqs=1000)
    bench.start(*[(5, token) for token in range(VOCABULARY)], task="classify")
    assert bench.run()[-1] == PoolingEnded(1, VOCABULARY, 2 * VOCABULARY)


def test_labels_without_names_are_numbers() -> None:
    base = CLASSIFIERS[0].make()
    base.config.id2label = {1: "bad", 2: "ugly", 3: "other"}
    model = PoolingModel(base, LoRAConfig(), task="classify")
    assert model.labels == ("0", "bad", "ugly")


def test_an_input_is_shortened_on_request(bench: SchedulerBench) -> None:
    tokens = tuple(range(1, 30)) * 3
    for truncation, read in (
        (Truncation(5, "right"), tokens[:5]),
        (Truncation(5, "left"), tokens[-5:]),
        (Truncation(0, "right"), tokens[:64]),
        (Truncation(999, "right"), tokens[:64]),
    ):
        bench.forwards.clear()
        short, long = bench.start(read), bench.start(tokens, truncation=truncation)
        reports = bench.run()
        vectors = [one.vectors[0] for one in reports if isinstance(one, VectorsStreamed)]
        first, second = (torch.tensor(unpack_vector(one)) for one in vectors)
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
        assert PoolingEnded(long, 1, len(read)) in reports
        assert PoolingEnded(short, 1, len(read)) in reports


def test_vectors_are_shorter_only_if_the_model_was_trained_for_it(
    bench: SchedulerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Malformed, match="was not trained for shorter vectors"):
        bench.start((5, 6), dimensions=8)
    config = bench.model.model.config
    monkeypatch.setattr(config, "matryoshka_dimensions", [8, 16], raising=False)
    with pytest.raises(Malformed, match=r"one of \[8, 16\] for this model, got 9"):
        bench.start((5, 6), dimensions=9)
    bench.start((5, 6))
    bench.start((5, 6), dimensions=8)
    whole, short = (
        torch.tensor(unpack_vector(one.vectors[0]))
        for one in bench.run()
        if isinstance(one, VectorsStreamed)
    )
    expected = whole[:8]
    if bench.model._normalize:
        expected = torch.nn.functional.normalize(expected, dim=0)
    torch.testing.assert_close(short, expected)
