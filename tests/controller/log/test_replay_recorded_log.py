"""A log that the demo wrote at the first milestone replays to the digests that it had then.

It has 720 generations on eight adapters and three slots, a controller and an engine that were
killed, and the header of format 1 and rules 1. It is kept for ever: a change that can't read it, or
replays it differently, needs a new number.
"""

from pathlib import Path

from controller.log.replay import replay
from tests.support.sources import ROOT

RECORDED = ROOT / "tests" / "golden" / "demo-log"
DIGESTS = {2353: "36d6efe9e8c81981eb761c0820c9ea13", 2354: "d7931a5c9f891b64258b1fd12e44a16b"}


def test_the_recorded_log_replays_to_the_digests_of_its_time() -> None:
    for seq, digest in DIGESTS.items():
        result = replay(Path(RECORDED), until=seq, checked=True)
        assert result.divergence is None
        assert result.digests_compared == 2
        assert result.digest == digest
