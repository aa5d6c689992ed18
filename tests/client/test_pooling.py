"""Tests of embeddings and classifications: complete and in order, regardless of losses."""

import asyncio
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.client import (
    AsyncClient,
    Classification,
    Client,
    Embedding,
    EngineGone,
)
from loradock.client.arguments import inputs_of
from loradock.client.calls import PoolingCall
from loradock.client.session import answer_of
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.simulation.client_examples import FAST, TIMING, reply, session
from tests.support.waiting import HANG_S

TEXTS = ["one", (1, 2), "three"]
VECTORS = ((0.0, 1.5), (1.0, 1.5), (2.0, 1.5))


def begin(client, attempts=1):
    return client.begin(rq.Embed("", "upper", tuple(TEXTS)), 0.0, 60.0, attempts)


def stream_vectors(client, call, indices, now=0.0):
    for index in indices:
        packed = (struct.pack("<2f", *VECTORS[index]),)
        client.receive(reply(rq.VectorsStreamed(call.request_id, index, packed)), now)


def finish(client, call, now=0.0):
    done = rq.PoolingDone(call.request_id, "upper", "embed", 3, 7)
    client.receive(reply(done), now)


def result_of(call):
    return call.embedding(answer_of(call, rq.PoolingDone))


@given(st.permutations(["final", 0, 1, 2, 1]))
def test_final_reply_and_vectors_settle_a_call_in_any_order(order):
    client = session()
    call = begin(client)
    for count, step in enumerate(order, 1):
        assert call.settled == ({"final", 0, 1, 2} <= set(order[: count - 1]))
        if call.settled:
            break
        if step == "final":
            finish(client, call)
        else:
            stream_vectors(client, call, [step])
    assert result_of(call) == Embedding("upper", VECTORS, 7)


def test_lost_vectors_are_requested_until_they_are_overdue():
    client = session()
    call = begin(client)
    client.due(0.0)
    stream_vectors(client, call, [0, 2], now=1.0)
    finish(client, call, now=2.0)
    sendings = 0
    while not call.settled:
        now = client.wake_at()
        for _ in client.due(now):
            sendings += 1
            finish(client, call, now)
    assert sendings > 2
    assert 0.0 <= now - (2.0 + TIMING.lost_tokens_s) <= TIMING.retry_s_max
    with pytest.raises(EngineGone, match=r"3 inputs were done and only 2 of their vectors arrived"):
        result_of(call)


def test_an_attempt_after_a_retryable_failure_keeps_no_vectors():
    client = session()
    call = begin(client, attempts=2)
    client.due(0.0)
    first = call.request_id
    stream_vectors(client, call, [0, 1, 2])
    client.receive(reply(rq.Refused(first, ErrorCode.ENGINE_GONE, "killed")), 1.0)
    assert not call.settled
    assert call.request_id != first
    finish(client, call, now=2.0)
    assert not call.settled
    stream_vectors(client, call, [0, 1, 2], now=3.0)
    assert result_of(call).vectors == VECTORS


def test_a_single_text_is_not_a_sequence():
    assert inputs_of("hello") == inputs_of(["hello"]) == ("hello",)


@pytest.mark.parametrize("loss", ["nothing", "chunks", "answers", "final first"])
def test_the_blocking_client_gets_all_vectors(controller, loss):
    controller.lose_chunks = 2 if loss == "chunks" else 0
    controller.lose = 2 if loss == "answers" else 0
    controller.done_first = loss == "final first"
    with Client(controller.directory, timeout_s=HANG_S, timing=FAST) as client:
        assert client.embed(TEXTS, "upper") == Embedding("upper", VECTORS, 5)
        scored = client.classify(TEXTS)
    assert scored == Classification(None, ("good", "bad"), VECTORS, 5)
    assert scored.best == ("bad", "bad", "good")


def test_a_loop_serves_others_while_vectors_are_unpacked(controller, monkeypatch):
    threads = []

    def unpacked(self, final):
        threads.append(threading.current_thread())
        return rows(self, final)

    rows = PoolingCall._rows
    monkeypatch.setattr(PoolingCall, "_rows", unpacked)

    async def ask():
        async with AsyncClient(controller.directory, timeout_s=HANG_S, timing=FAST) as client:
            return await client.embed(TEXTS, "upper"), await client.classify(TEXTS)

    embedding, classification = asyncio.run(ask())
    assert embedding.vectors == classification.scores == VECTORS
    assert len(threads) == 2
    assert threading.main_thread() not in threads
