"""Cases for two ranks about images: the same output as one rank, even where one reads slowly."""

import time
from pathlib import Path
from typing import Any

from loradock.engine.jobs import CollectiveJobs, ThreadedJobs
from loradock.engine.parallel import ParallelGroup
from loradock.messages.prompts import Sampling
from tests.support.engine.image_bench import ROWS, ImageBench
from tests.support.models.image_examples import image_prompt, picture

EIGHT = Sampling(max_tokens=8)
LATE_S = 0.2


def same_output(group: ParallelGroup, kind: str, directory: str) -> dict[str, Any]:
    """Return what all ranks generate from the rows, and what this rank alone generates."""
    whole, bench = ImageBench(kind, Path(directory)), ImageBench(kind, Path(directory), group=group)
    alone = whole.driver()
    expected = [alone.alone(row.adapter, whole.prompt(row), EIGHT)[0] for row in ROWS]
    jobs = CollectiveJobs(ThreadedJobs(1, lambda: None), group, lambda _: "")
    driver = bench.driver(jobs)
    ops = [driver.start(row.adapter, bench.prompt(row), EIGHT) for row in ROWS]
    bad = driver.start(None, image_prompt(kind, "a cat", picture(8, 8)))
    while driver.scheduler.is_reading or not driver.scheduler.is_idle:
        if not group.is_leader and driver.scheduler.is_reading:
            time.sleep(LATE_S / len(ROWS))
        driver.scheduler.collect()
        if not driver.scheduler.is_idle:
            driver.scheduler.step()
    jobs.close()
    return {
        "expected": expected,
        "found": [driver.output(op)[0] for op in ops],
        "failed": driver.end(bad).message,
        "kinds": sorted({type(layer).__name__ for layer in bench.model.layers.values()}),
    }
