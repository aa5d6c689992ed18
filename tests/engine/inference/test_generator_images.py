"""Rows with images join, run and leave among rows of text, each with its own adapter."""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs
from torch import Tensor

from engine.errors import Conflict, EngineOverloaded, RequestRefused
from engine.inference import generator
from engine.inference.decode import FixedSteps
from engine.inference.image_prefetch import AHEAD_MAX
from engine.jobs import Finished
from messages.errors import ErrorCode
from messages.ids import OpId
from messages.reports import GenerationEnded, OperationFailed
from messages.requests import Sampling
from tests.support.engine.image_bench import EVERY_KIND, Bench, Row, Yardstick
from tests.support.models.image_examples import illustrated, picture

ROWS = (
    Row("one", "a @ cat", (picture(20, 12, 1),)),
    Row(None, "what is this? it is a cat and a dog"),
    Row("two", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    Row(None, "@ a", (picture(31, 17, 4),)),
    Row("two", "the mat"),
    Row("one", "a cat and @", (picture(8, 8, 5),)),
)
TWELVE = Sampling(max_tokens=12)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_rows_that_join_while_others_run_get_what_transformers_generates(
    kind: str, tmp_path: Path
) -> None:
    _check_rows_that_join(Yardstick(kind, tmp_path), Bench(kind, tmp_path))


def _check_rows_that_join(yardstick: Yardstick, bench: Bench) -> None:
    driver = bench.driver(max_num_seqs=4)
    ops = []
    for row in ROWS:
        ops.append(driver.start(row.adapter, bench.prompt(row), TWELVE))
        driver.run(steps=3)
    driver.run()
    for op, row in zip(ops, ROWS, strict=True):
        assert driver.output(op)[0] == yardstick.greedy(row, 12), row.text
        assert isinstance(end := driver.end(op), GenerationEnded)
        assert end.prompt_tokens == len(bench.read(row).tokens)


class AtOnce:
    """Runs every step by itself, as if it had been captured."""

    failure = ""

    def run(self, step: Callable[[], Tensor], shape: object) -> Tensor:
        return step()

    def forget(self) -> None:
        """Nothing was kept."""


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_rows_with_images_go_on_over_fixed_places(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = partial(FixedSteps, runner=AtOnce())
    monkeypatch.setattr(generator, "choose_steps", lambda model, *_: steps(model))
    _check_rows_that_join(Yardstick(kind, tmp_path), Bench(kind, tmp_path))


class SlowJobs:
    """Does what was asked for only when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[OpId, object]] = []
        self._finished: list[Finished[OpId]] = []

    def start(self, tag: OpId, job: object) -> None:
        self.asked.append((tag, job))

    def do(self, count: int) -> None:
        for tag, job in self.asked[:count]:
            future: Future[object] = Future()
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
            self._finished.append(Finished(tag, future))
        del self.asked[:count]

    def take(self) -> list[Finished[OpId]]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        self.asked.clear()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tmp_path_factory.mktemp("qwen2_vl")
    Yardstick("qwen2_vl", directory)
    return Bench("qwen2_vl", directory)


def test_text_goes_on_while_images_are_read(bench: Bench) -> None:
    jobs = SlowJobs()
    driver = bench.driver(jobs)
    image = driver.start("one", bench.prompt(ROWS[0]), TWELVE)
    text = driver.start("two", "the mat", TWELVE)
    driver.run()
    assert isinstance(driver.end(text), GenerationEnded)
    assert driver.generator.is_reading
    assert driver.generator.operations == [image]
    jobs.do(1)
    driver.run()
    assert driver.output(image) == bench.driver().alone("one", bench.prompt(ROWS[0]), TWELVE)
    assert not driver.generator.is_reading


def test_what_is_cancelled_while_it_is_read_never_runs(bench: Bench) -> None:
    jobs = SlowJobs()
    driver = bench.driver(jobs)
    ops = [driver.start("one", bench.prompt(ROWS[0]), TWELVE) for _ in range(AHEAD_MAX + 2)]
    for op in (ops[0], ops[-1]):
        driver.generator.stop(op)
        assert driver.end(op) == GenerationEnded(op, "cancelled", 0, 0)
    jobs.do(AHEAD_MAX)
    driver.run(steps=100)
    jobs.do(AHEAD_MAX)
    driver.run()
    kept = [driver.output(op) for op in ops[1:-1]]
    assert kept[0][0]
    assert kept.count(kept[0]) == AHEAD_MAX
    assert driver.output(ops[0]) == driver.output(ops[-1]) == ([], "")


def test_few_images_are_read_before_there_is_a_place_for_them(bench: Bench) -> None:
    jobs = SlowJobs()
    driver = bench.driver(jobs, max_num_seqs=1, queue_requests_max=AHEAD_MAX + 2)
    for _ in range(AHEAD_MAX + 2):
        driver.start(None, bench.prompt(ROWS[0]), TWELVE)
    assert len(jobs.asked) == AHEAD_MAX
    with pytest.raises(EngineOverloaded, match=str(AHEAD_MAX + 2)):
        driver.start(None, "the mat")
    jobs.do(AHEAD_MAX)
    driver.generator.collect()
    assert not jobs.asked
    driver.generator.step()
    driver.generator.collect()
    assert len(jobs.asked) == 1


def test_files_are_let_go_when_they_are_read(bench: Bench) -> None:
    driver, prompt = bench.driver(), bench.prompt(ROWS[0])
    before = sys.getrefcount(prompt)
    driver.start("one", prompt, TWELVE)
    assert sys.getrefcount(prompt) > before
    driver.run(steps=1)
    assert not driver.generator.is_idle
    assert sys.getrefcount(prompt) == before


def test_a_prompt_that_can_not_be_read_fails_alone(bench: Bench) -> None:
    driver = bench.driver()
    good = driver.start("one", bench.prompt(ROWS[0]), TWELVE)
    prompt = illustrated("qwen2_vl", "a @", picture(8, 8))
    bad = driver.start("one", structs.replace(prompt, images=(b"no image",)))
    driver.run()
    assert isinstance(driver.end(good), GenerationEnded)
    assert isinstance(end := driver.end(bad), OperationFailed)
    assert end.code == ErrorCode.MALFORMED
    assert "image 1" in end.message


def test_a_request_id_is_taken_while_its_images_are_read(bench: Bench) -> None:
    driver = bench.driver(SlowJobs())
    driver.start(None, bench.prompt(ROWS[0]), request_id="same")
    with pytest.raises(Conflict, match="same"):
        driver.start(None, "the mat", request_id="same")


def test_images_that_the_model_can_not_take_fail_their_row_alone(tmp_path: Path) -> None:
    # Where black is zero, a black tile is taken for none, and the tokens have one too many.
    Yardstick("idefics3", tmp_path, do_normalize=False)
    bench = Bench("idefics3", tmp_path)
    assert bench.model.reader is not None, bench.model.without_images
    good = Row(None, "a @", (picture(9, 9, 1),))
    bad = Row(None, "a @", (picture(9, 9, 1).point(lambda value: 0),))
    text = Row(None, "the mat")
    driver = bench.driver()
    expected = {row.text: driver.alone(None, bench.prompt(row), TWELVE) for row in (good, text)}
    running = driver.start(None, text.text, TWELVE)
    driver.run(steps=2)
    ops = [driver.start(None, bench.prompt(row), TWELVE) for row in (good, bad, text, good)]
    driver.run()
    assert isinstance(end := driver.end(ops[1]), OperationFailed)
    assert end.code == ErrorCode.MALFORMED
    assert "the model can't take these images" in end.message
    assert [driver.output(op) for op in (running, ops[0], ops[2], ops[3])] == [
        expected[row.text] for row in (text, good, text, good)
    ]


def test_a_model_without_a_processor_refuses_images_and_says_why(tmp_path: Path) -> None:
    Yardstick("llava", tmp_path)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").unlink()
    bench = Bench("llava", tmp_path)
    driver = bench.driver()
    with pytest.raises(RequestRefused, match="preprocessor_config"):
        driver.start(None, illustrated("llava", "@", picture(8, 8)))
    assert driver.alone(None, "the mat", TWELVE)[0]
