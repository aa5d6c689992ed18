"""What two ranks are asked about images: the same output as one rank, whoever reads slowly."""

import time
from pathlib import Path
from typing import Any

from engine.jobs import WorkPool
from engine.parallel import ParallelGroup
from engine.worker.collective_jobs import AgreedJobs
from messages.requests import Sampling
from tests.support.engine.image_bench import Bench, Row
from tests.support.models.image_examples import illustrated, picture
from tests.support.parallel.ranks import serve

ROWS = (
    Row("one", "a @ cat", (picture(20, 12, 1),)),
    Row(None, "what is this? it is a cat and a dog"),
    Row("two", "@ is a dog and @ is it", (picture(9, 30, 2), picture(16, 16, 3))),
    Row("two", "the mat"),
    Row(None, "@ a", (picture(31, 17, 4),)),
)
EIGHT = Sampling(max_tokens=8)
LATE_S = 0.2


def same_output(group: ParallelGroup, kind: str, directory: str) -> dict[str, Any]:
    """What is generated from rows together by all ranks, and from each alone by this one."""
    whole, bench = Bench(kind, Path(directory)), Bench(kind, Path(directory), group=group)
    alone = whole.driver()
    expected = [alone.alone(row.adapter, whole.prompt(row), EIGHT)[0] for row in ROWS]
    jobs = AgreedJobs(WorkPool(1, lambda: None), group, lambda _: "")
    driver = bench.driver(jobs)
    ops = [driver.start(row.adapter, bench.prompt(row), EIGHT) for row in ROWS]
    bad = driver.start(None, illustrated(kind, "a cat", picture(8, 8)))
    while driver.generator.is_reading or not driver.generator.is_idle:
        if not group.leads and driver.generator.is_reading:
            time.sleep(LATE_S / len(ROWS))
        driver.generator.collect()
        if not driver.generator.is_idle:
            driver.generator.step()
    jobs.close()
    return {
        "expected": expected,
        "found": [driver.output(op)[0] for op in ops],
        "failed": driver.end(bad).message,
        "kinds": sorted({type(layer).__name__ for layer in bench.model.layers.values()}),
    }


CASES = {case.__name__: case for case in (same_output,)}

if __name__ == "__main__":
    serve(CASES)
