"""The queue of embeddings and classifications: who shares a forward, who fails, who gets what."""

import gc
import struct
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import pooler
from engine.arena import Arena
from engine.config import EngineConfig, LoRAConfig
from engine.errors import Conflict, EngineOverloaded, NotResident, NotServed, RequestRefused
from engine.inference import require_task
from engine.kernels import choose_kernels
from engine.pooled_model import PooledModel
from engine.pooler import Pooler
from engine.punica import PunicaWrapper
from messages.commands import StartGeneration, StartPooling
from messages.errors import ErrorCode
from messages.reports import OperationFailed, PoolingEnded, Report, VectorsComputed
from tests.pooling_examples import CLASSIFIERS, EMBEDDERS, PADDING, TEXTS, VOCABULARY

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
        self.pooler = Pooler(
            model,
            punica,
            arena,
            self.residents,
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
    made = Bench(model, max_num_seqs=4, queue_requests_max=3)
    forward = model.forward

    def counted(prompts: list[list[int]]) -> Tensor:
        made.forwards.append([len(prompt) for prompt in prompts])
        return forward(prompts)

    monkeypatch.setattr(model, "forward", counted)
    return made


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
    assert bench.forwards == [[1, 2, 3, 8], [9, 4]]


def test_a_forward_is_bounded_in_tokens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooler, "BATCH_TOKENS_MAX", 12)
    bench.start(*[(7,) * length for length in (3, 20, 4, 5)])
    bench.run()
    assert bench.forwards == [[3, 4], [5], [20]]


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
    assert bench.pooler.operations == [op, other]
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
    monkeypatch.setattr(pooler, "KEPT_BYTES_MAX", 2 * len(vectors.vectors[0]))
    for request_id in ("second", "third"):
        bench.start((5, 6), request_id=request_id)
        bench.run()
    bench.pooler.resend("first")
    assert bench.run() == []
    bench.pooler.resend("third")
    assert [report.request_id for report in bench.run()] == ["third"]


def test_of_an_ended_request_only_its_vectors_are_kept(bench: Bench) -> None:
    bench.start((5, 6))
    [request] = map(weakref.ref, bench.pooler._waiting)
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


def test_no_memory_fails_those_of_the_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_prompts: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patched:
        patched.setattr(bench.model, "forward", full)
        bench.start((5,))
        [failed] = bench.run()
    assert failed.code == ErrorCode.DEVICE_OUT_OF_MEMORY
    bench.start((5,))
    assert type(bench.run()[-1]) is PoolingEnded


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


def test_a_text_that_ends_like_padding_is_refused_where_a_model_can_not_tell() -> None:
    base = CLASSIFIERS[2].make()
    assert PooledModel(CLASSIFIERS[2].make(), LoRAConfig(), task="classify").foreign_token is None
    base.config.pad_token_id = None
    bench = Bench(PooledModel(base, LoRAConfig(), task="classify"))
    with pytest.raises(RequestRefused, match="input 0 ends with token 0"):
        bench.start((5, 0), task="classify")
    bench.start((0, 5), (PADDING, 5, 6), task="classify")
    assert type(bench.run()[-1]) is PoolingEnded


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_padding_token_that_is_not_embedded_is_none(token: int) -> None:
    base = CLASSIFIERS[2].make()
    base.config.pad_token_id = token
    model = PooledModel(base, LoRAConfig(), task="classify")
    assert model.foreign_token == 0
    texts = [(5, 6, 7), (9, 8, 7, 6, 5)]
    expected = torch.cat([model.forward([text]) for text in texts])
    torch.testing.assert_close(model.forward(texts), expected, rtol=1e-4, atol=1e-5)


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
