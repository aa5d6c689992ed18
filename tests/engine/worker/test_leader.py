"""The digest by which ranks notice that operations ended differently."""

from loradock.engine.worker.leader import OutcomeDigest
from loradock.messages import reports as rp
from loradock.messages import requests
from loradock.messages.errors import ErrorCode


def test_digests_differ_where_operations_ended_differently() -> None:
    def digest(*reports: rp.Report) -> int:
        outcomes = OutcomeDigest()
        for report in reports:
            outcomes.add(report)
        return outcomes.value

    done = rp.SlotReset(1)
    failed = rp.OperationFailed(1, ErrorCode.CONFLICT, "here")
    assert digest(done) != digest(failed)
    assert digest(done, rp.SlotReset(2)) != digest(rp.SlotReset(2), done)
    # Texts and private reports may differ between ranks, so they are left out.
    assert digest(failed) == digest(rp.OperationFailed(1, ErrorCode.CONFLICT, "there"))
    assert digest(done) == digest(done, requests.TokensStreamed("r", 0, (1,), "x"))
