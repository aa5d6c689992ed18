"""One generation from its start to its end: text, stops, limits, cancelling, resending."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from examples.tiny_recipe import BOS_ID
from loradock.engine.config import EngineConfig
from loradock.engine.errors import EngineError
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving import generations
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Prompt, Sampling
from loradock.messages.reports import GenerationEnded
from loradock.messages.requests import TokensStreamed
from tests.support.engine.engine_examples import CONTEXT_TOKENS_MAX, VOCABULARY
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, SIXTEEN, GenerationBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)


@pytest.fixture
def bench(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> GenerationBench:
    return GenerationBench(prepared_model, adapter_root, engine_config)


def test_text_equals_the_decoded_tokens(bench: GenerationBench, no_eos: None) -> None:
    prompt = "Grüße €"
    tokens, text = bench.alone("everything", prompt, Sampling(max_tokens=40))
    assert text == bytes(token for token in tokens if token < 256).decode(errors="replace")
    assert (tokens, text) == bench.alone(
        "everything", tuple(prompt.encode()), Sampling(max_tokens=40)
    )
    assert isinstance(end := bench.end(1), GenerationEnded)
    assert (end.prompt_tokens, end.output_tokens) == (len(prompt.encode()), 40)


def test_the_last_token_may_be_an_end_a_limit_or_neither(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "eos_ids", frozenset())
    tokens, _ = bench.alone(None, PROMPTS[0])
    assert bench.end(1) == GenerationEnded(1, "length", 3, 16)
    first = tokens.index(tokens[5])
    monkeypatch.setattr(bench.model, "eos_ids", frozenset({tokens[5], 3000}))
    assert bench.alone(None, PROMPTS[0])[0] == tokens[:first]
    assert bench.end(2) == GenerationEnded(2, "stop", 3, first)
    bench.alone(None, PROMPTS[0], Sampling(max_tokens=1))
    assert bench.end(3) == (
        GenerationEnded(3, "length", 3, 1) if first else GenerationEnded(3, "stop", 3, 0)
    )


def test_the_end_token_is_reported_apart_with_its_log_probability(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "eos_ids", frozenset())
    tokens, _ = bench.alone(None, PROMPTS[0])
    at = tokens.index(tokens[5])
    bench.reports.clear()
    monkeypatch.setattr(bench.model, "eos_ids", frozenset({tokens[5]}))
    op = bench.start(None, PROMPTS[0], Sampling(max_tokens=16, logprobs=1))
    bench.run()
    chunks = [one for one in bench.reports if isinstance(one, TokensStreamed)]
    assert [token for one in chunks for token in one.tokens] == tokens[:at]
    assert [one.end_token for one in chunks] == [None] * at + [tokens[5]]
    scored = [entry.token for one in chunks for entry in one.logprobs]
    assert scored == [*tokens[:at], tokens[5]]
    # A client that lost the stream gets the same again.
    bench.reports.clear()
    bench.scheduler.resend(str(op))
    [whole] = bench.reports
    assert (whole.end_token, len(whole.logprobs)) == (tokens[5], at + 1)


@pytest.mark.parametrize(
    ("option", "words"),
    [("logit_bias", "logit_bias must have"), ("stop_token_ids", "stop_token_ids must have")],
)
def test_tokens_outside_the_vocabulary_are_refused(
    bench: GenerationBench, option: str, words: str
) -> None:
    for token, is_known in ((VOCABULARY - 1, True), (VOCABULARY, False)):
        value = ((token, 1.0),) if option == "logit_bias" else (token,)
        sampling = Sampling(max_tokens=1, **{option: value})
        if is_known:
            bench.start(None, PROMPTS[0], sampling)
        else:
            with pytest.raises(EngineError, match=f"{words} .* 0 to {VOCABULARY - 1}, got {token}"):
                bench.start(None, PROMPTS[0], sampling)


class Letters:
    """A tokenizer for tests: every token is one character."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(chr(0x100 + token) for token in tokens)


EIGHT = Sampling(max_tokens=8)


def without_repetition(bench: GenerationBench) -> tuple[str, tuple[int, ...], str]:
    """Return an adapter, a prompt, and their output, which is eight different characters."""
    for name, prompt in REQUESTS:
        text = bench.alone(name, prompt, EIGHT)[1]
        if len(set(text)) == 8:
            bench.reports.clear()
            return name, prompt, text
    raise AssertionError("every output repeats a token; change the seed of the model")


def test_a_stop_string_across_tokens_ends_the_text_before_it(
    bench: GenerationBench, no_eos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "tokenizer", Letters())
    name, prompt, text = without_repetition(bench)
    op = bench.start(name, prompt, Sampling(max_tokens=8, stop=("never", text[3:6])))
    other = bench.start(name, prompt, EIGHT)
    bench.run()
    tokens, shown = bench.output(op)
    assert shown == text[:3]
    assert len(tokens) == 6
    assert bench.end(op) == GenerationEnded(op, "stop", len(prompt), 6)
    pieces = [r.text for r in bench.reports if getattr(r, "request_id", "") == str(op)]
    assert pieces == [*text[:3], "", "", ""]
    assert bench.output(other)[1] == text


def test_text_that_only_began_like_a_stop_string_is_shown_later(
    bench: GenerationBench, no_eos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "tokenizer", Letters())
    name, prompt, text = without_repetition(bench)
    stops = (text[1:3] + "x", text[5:7] + "x")
    op = bench.start(name, prompt, Sampling(max_tokens=7, stop=stops))
    bench.run()
    pieces = [r.text for r in bench.reports if isinstance(r, TokensStreamed)]
    assert pieces == [text[0], "", "", text[1:4], text[4], "", text[5:7]]
    assert bench.end(op) == GenerationEnded(op, "length", len(prompt), 7)


def test_text_held_back_is_shown_when_the_model_ends(
    bench: GenerationBench, no_eos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.model, "tokenizer", Letters())
    name, prompt, text = without_repetition(bench)
    monkeypatch.setattr(bench.model, "eos_ids", frozenset({ord(text[4]) - 0x100}))
    op = bench.start(name, prompt, Sampling(max_tokens=8, stop=(text[3] + "x",)))
    bench.run()
    pieces = [r.text for r in bench.reports if isinstance(r, TokensStreamed)]
    assert pieces == [*text[:3], "", text[3]]
    assert bench.end(op) == GenerationEnded(op, "stop", len(prompt), 4)


def test_cancelling_ends_running_and_waiting_sequences_with_their_output(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig, no_eos: None
) -> None:
    bench = GenerationBench(prepared_model, adapter_root, replace(engine_config, max_num_seqs=2))
    expected = [bench.alone(name, PROMPTS[0]) for name in NAMES[:2]]
    ops = [bench.start(name, PROMPTS[0]) for name in NAMES[:3]]
    bench.run(steps=3)
    bench.scheduler.stop(ops[0])
    bench.scheduler.stop(ops[2])
    bench.scheduler.stop(12345)
    bench.run()
    bench.scheduler.stop(ops[1])
    assert bench.end(ops[0]) == GenerationEnded(ops[0], "cancelled", 3, 3)
    assert bench.output(ops[0])[0] == expected[0][0][:3]
    assert bench.end(ops[2]) == GenerationEnded(ops[2], "cancelled", 3, 0)
    assert bench.output(ops[1]) == expected[1]


def test_cancelling_shows_the_incomplete_character(bench: GenerationBench, no_eos: None) -> None:
    op = bench.start(None, PROMPTS[0], Sampling(max_tokens=60, stop=tuple(map(chr, range(1, 16)))))
    while bench.output(op)[1] == bytes(bench.output(op)[0]).decode(errors="replace"):
        assert not bench.scheduler.is_idle, "no byte of the output is held back; change the prompt"
        bench.scheduler.step()
    bench.scheduler.stop(op)
    tokens, text = bench.output(op)
    assert text == bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ((), Sampling(max_tokens=127), None),
        ("", Sampling(max_tokens=127), None),
        ("", Sampling(max_tokens=128), "128 tokens.*max_tokens 128.*1 tokens.*127"),
        ((VOCABULARY,), Sampling(), f"token {VOCABULARY}.*0 to {VOCABULARY - 1}"),
        (
            (1,) * 100,
            Sampling(max_tokens=29),
            f"{CONTEXT_TOKENS_MAX} tokens.*max_tokens 29.*100 tokens.*28",
        ),
        (
            "a" * 100,
            Sampling(max_tokens=29),
            f"{CONTEXT_TOKENS_MAX} tokens.*max_tokens 29.*100 tokens.*28",
        ),
        ((1,) * 100, Sampling(max_tokens=28), None),
        ("a" * 100_000, Sampling(), "100000 characters"),
        ("a", Sampling(max_tokens=10**6), f"{CONTEXT_TOKENS_MAX}"),
    ],
)
def test_requests_beyond_the_models_limits_are_refused_with_the_numbers(
    bench: GenerationBench, prompt: Prompt, sampling: Sampling, words: str | None
) -> None:
    if words is None:
        bench.start(None, prompt, sampling)
        bench.run()
        assert isinstance(bench.end(1), GenerationEnded)
        return
    with pytest.raises(EngineError, match=words) as caught:
        bench.start(None, prompt, sampling)
    expected = ErrorCode.MALFORMED if words.startswith("token") else ErrorCode.CONTEXT_EXCEEDED
    assert caught.value.code is expected
    assert bench.scheduler.is_idle


def test_an_empty_prompt_is_the_begin_of_sequence_token(bench: GenerationBench) -> None:
    assert bench.alone(None, "") == bench.alone(None, ()) == bench.alone(None, (BOS_ID,))


def test_without_a_tokenizer_only_token_ids_are_accepted(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _ = bench.alone(None, PROMPTS[0])
    monkeypatch.setattr(bench.model, "tokenizer", None)
    assert bench.alone(None, PROMPTS[0]) == (tokens, "")
    for prompt, sampling in [("a", SIXTEEN), ((1,), Sampling(stop=("a",))), ((), SIXTEEN)]:
        with pytest.raises(EngineError) as caught:
            bench.start(None, prompt, sampling)
        assert caught.value.code == ErrorCode.MALFORMED


def test_the_queue_is_bounded(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> None:
    config = replace(engine_config, max_num_seqs=1, queue_requests_max=2)
    bench = GenerationBench(prepared_model, adapter_root, config)
    for _ in range(2):
        bench.start(None, PROMPTS[0])
    with pytest.raises(EngineError, match="2 requests wait") as caught:
        bench.start(None, PROMPTS[0])
    assert caught.value.code == ErrorCode.OVERLOADED
    bench.run()
    bench.alone(None, PROMPTS[0])


def test_a_request_id_that_is_running_is_refused(bench: GenerationBench) -> None:
    bench.start(None, PROMPTS[0], request_id="twin")
    with pytest.raises(EngineError, match="twin") as caught:
        bench.start(None, PROMPTS[0], request_id="twin")
    assert caught.value.code == ErrorCode.CONFLICT


def test_an_output_can_be_resent_while_it_runs_and_after(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch, no_eos: None
) -> None:
    monkeypatch.setattr(generations, "OUTPUTS_MAX", 2)
    pieces = defaultdict(list)
    op = bench.start("output", PROMPTS[0])
    bench.run(steps=5)
    for moment in ("running", "ended"):
        before = bench.output(op)
        bench.reports.clear()
        bench.scheduler.resend(str(op))
        reason = "length" if moment == "ended" else None
        whole = TokensStreamed(str(op), 0, tuple(before[0]), before[1], finish_reason=reason)
        assert bench.reports == [whole]
        bench.reports.clear()
        bench.reports.append(TokensStreamed(str(op), 0, tuple(before[0]), before[1]))
        pieces[moment] = before[0]
        bench.run()
    assert len(pieces["running"]) == 5
    assert len(pieces["ended"]) == 16
    bench.reports.clear()
    for _ in range(2):
        bench.alone(None, PROMPTS[0], Sampling(max_tokens=1))
    bench.reports.clear()
    bench.scheduler.resend(str(op))
    bench.scheduler.resend("unknown")
    assert bench.reports == []


def test_a_reused_request_id_is_not_evicted_with_its_first_output(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch, no_eos: None
) -> None:
    monkeypatch.setattr(generations, "OUTPUTS_MAX", 2)
    one = Sampling(max_tokens=1)
    for request_id in ("again", "other", "again", "third"):
        bench.start(None, PROMPTS[0], one, request_id=request_id)
        bench.run()
    bench.reports.clear()
    bench.scheduler.resend("again")
    assert len(bench.reports) == 1


def test_operations_are_listed_until_they_end(bench: GenerationBench, no_eos: None) -> None:
    ops = [bench.start(None, PROMPTS[0], Sampling(max_tokens=count)) for count in (2, 5)]
    assert sorted(bench.scheduler.operations) == ops
    bench.run(steps=2)
    assert bench.scheduler.operations == ops[1:]
    bench.run()
    assert bench.scheduler.operations == []
