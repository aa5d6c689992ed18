"""Outputs of generations: text, ends, stops, scores, structures, and outputs sent again."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from peft import PeftModel

from examples.tiny_recipe import BOS_ID
from loradock.engine.config import EngineConfig
from loradock.engine.errors import EngineError
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving import generations
from loradock.engine.serving.generations import OutputCache
from loradock.engine.serving.structured import LIMITS
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Prompt, Sampling, Structure
from loradock.messages.reports import GenerationEnded, OperationFailed, PrivateReport
from loradock.messages.requests import TokensStreamed, VectorsStreamed
from tests.support.engine.engine_examples import CONTEXT_TOKENS_MAX, VOCABULARY
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, SIXTEEN, GenerationBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)


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


STOPS = {
    "a stop string across tokens": (lambda text: ("never", text[3:6]), 8, None),
    "text that only began like one": (lambda text: (text[1:3] + "x", text[5:7] + "x"), 7, None),
    "text held back when the model ends": (lambda text: (text[3] + "x",), 8, 4),
}
"""The stop strings of a text, the most tokens, and the number of the token that ends the output."""

SHOWN = {
    "a stop string across tokens": ("stop", 6, lambda text: [*text[:3], "", "", ""]),
    "text that only began like one": (
        *("length", 7),
        lambda text: [text[0], "", "", text[1:4], text[4], "", text[5:7]],
    ),
    "text held back when the model ends": ("stop", 4, lambda text: [*text[:3], "", text[3]]),
}
"""The reason of the end, the tokens, and the text with each of them."""


@pytest.mark.parametrize("title", STOPS)
def test_text_is_held_back_while_it_may_be_a_stop_string(
    bench: GenerationBench, no_eos: None, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    monkeypatch.setattr(bench.model, "tokenizer", Letters())
    name, prompt, text = without_repetition(bench)
    stops, most, end = STOPS[title]
    if end is not None:
        monkeypatch.setattr(bench.model, "eos_ids", frozenset({ord(text[end]) - 0x100}))
    op = bench.start(name, prompt, Sampling(max_tokens=most, stop=stops(text)))
    other = bench.start(name, prompt, EIGHT)
    bench.run()
    reason, count, shown = SHOWN[title]
    assert bench.end(op) == GenerationEnded(op, reason, len(prompt), count)
    assert [r.text for r in bench.reports if getattr(r, "request_id", "") == str(op)] == shown(text)
    assert bench.output(other)[1] == text[:end]


def test_cancelling_ends_running_and_waiting_sequences_with_their_output(
    bench_of: Any, no_eos: None
) -> None:
    bench = bench_of(max_num_seqs=2)
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


def test_the_queue_is_bounded(bench_of: Any) -> None:
    bench = bench_of(max_num_seqs=1, queue_requests_max=2)
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


SCORED = Sampling(max_tokens=8, logprobs=3, prompt_logprobs=2)

LONG_PROMPT = tuple((7 * at + 3) % 256 for at in range(70))


@pytest.fixture(params=[True, False], ids=["paged", "padded"])
def config(request: pytest.FixtureRequest, engine_config: EngineConfig) -> EngineConfig:
    return replace(engine_config, paged_attention=request.param)


@pytest.fixture
def either(
    prepared_model: CausalModel, adapter_root: Path, config: EngineConfig
) -> GenerationBench:
    return GenerationBench(prepared_model, adapter_root, config)


def messages(either: GenerationBench, op: int, index: int = 0) -> list[TokensStreamed]:
    return [
        report
        for report in either.reports
        if isinstance(report, TokensStreamed)
        and (report.request_id, report.index) == (str(op), index)
    ]


def whole(either: GenerationBench, op: int, index: int = 0) -> TokensStreamed:
    """Return one output as one message, which has to have arrived in order."""
    found = messages(either, op, index)
    for before, after in pairwise(found):
        assert after.offset == before.offset + len(before.tokens)
        assert before.finish_reason is None
        assert after.prompt_logprobs == ()
    first, last = found[0], found[-1]
    assert first.offset == 0
    return structs.replace(
        last,
        offset=0,
        tokens=tuple(token for one in found for token in one.tokens),
        text="".join(one.text for one in found),
        logprobs=tuple(entry for one in found for entry in one.logprobs),
        prompt_logprobs=first.prompt_logprobs,
    )


def outputs(either: GenerationBench, op: int, count: int) -> list[tuple[tuple[int, ...], str]]:
    found = [whole(either, op, index) for index in range(count)]
    return [(one.tokens, one.text) for one in found]


def check_scores(output: TokensStreamed, prompt: tuple[int, ...], expected: torch.Tensor) -> None:
    """Compare all log-probabilities with those of a whole forward pass, [tokens, vocabulary]."""
    entries = (*output.prompt_logprobs, *output.logprobs)
    sequence = (*prompt, *output.tokens)
    assert len(output.prompt_logprobs) == len(prompt)
    assert len(output.logprobs) == len(output.tokens)
    assert entries[0] is None
    for at, entry in enumerate(entries[1:], start=1):
        row, token = expected[at - 1], sequence[at]
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        top = 2 if at < len(prompt) else 3
        best = row.topk(top)
        assert [one for one, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)


def test_log_probabilities_equal_those_of_transformers_with_peft(
    prepared_model: CausalModel,
    adapter_root: Path,
    config: EngineConfig,
    peft_models: dict[str, PeftModel],
    no_eos: None,
) -> None:
    # Chunks of 16 tokens, with rows of different lengths and some that request nothing.
    either = GenerationBench(
        prepared_model, adapter_root, replace(config, max_num_batched_tokens=16)
    )
    # Their beginnings are in the cache already, but not their logits.
    for name in peft_models:
        either.alone(name, LONG_PROMPT, Sampling(max_tokens=1))
    requests = [
        (name, prompt) for name in peft_models for prompt in (PROMPTS[0], LONG_PROMPT, (200,))
    ]
    ops = []
    for number, request in enumerate(requests):
        # Neither temperature nor penalties change what is reported.
        changes = {"temperature": 0.8, "seed": number, "repetition_penalty": 1.3}
        ops.append(either.start(*request, structs.replace(SCORED, **changes)))
        either.start(request[0], PROMPTS[1], Sampling(max_tokens=4))
    either.run()
    for op, (name, prompt) in zip(ops, requests, strict=True):
        output = whole(either, op)
        ids = torch.tensor([[*prompt, *output.tokens]])
        with torch.inference_mode():
            expected = peft_models[name](input_ids=ids).logits[0].log_softmax(-1)
        check_scores(output, prompt, expected)


def test_nothing_is_reported_that_was_not_requested(bench: GenerationBench) -> None:
    ops = [
        bench.start(None, PROMPTS[0], structs.replace(SCORED, **changes))
        for changes in (
            {"logprobs": None, "prompt_logprobs": None},
            {"logprobs": 0, "prompt_logprobs": None},
            {"logprobs": None, "prompt_logprobs": 0},
        )
    ]
    bench.run()
    nothing, chosen, prompt = (whole(bench, op) for op in ops)
    assert (nothing.logprobs, nothing.prompt_logprobs) == ((), ())
    assert chosen.prompt_logprobs == prompt.logprobs == ()
    assert [entry.token for entry in chosen.logprobs] == list(chosen.tokens)
    assert {entry.top for entry in chosen.logprobs} == {()}
    assert [entry and entry.token for entry in prompt.prompt_logprobs] == [None, *PROMPTS[0][1:]]


def test_outputs_of_one_prompt_equal_those_of_its_requests_alone(
    either: GenerationBench, no_eos: None
) -> None:
    sampling = Sampling(max_tokens=8, temperature=1.2, seed=5, logprobs=1, n=4)
    alone = [
        structs.replace(sampling, n=1, seed=sampling.seed + index, logprobs=None)
        for index in range(4)
    ]
    expected = [either.alone("mlp", PROMPTS[1], one) for one in alone]
    others = [either.start(name, PROMPTS[0]) for name in (None, *NAMES)]
    op = either.start("mlp", PROMPTS[1], sampling)
    either.run()
    found = outputs(either, op, 4)
    assert [(list(tokens), text) for tokens, text in found] == expected
    assert len(set(found)) == 4
    assert all(len(whole(either, op, index).logprobs) == 8 for index in range(4))
    assert either.end(op) == GenerationEnded(op, "length", len(PROMPTS[1]), 32)
    assert all(isinstance(either.end(other), GenerationEnded) for other in others)
    # All outputs are kept, and are sent again from their first tokens.
    expected_messages = [whole(either, op, index) for index in range(4)]
    either.reports.clear()
    either.scheduler.resend(str(op))
    assert either.reports == expected_messages


def test_several_outputs_end_together_when_one_is_stopped_or_fails(
    either: GenerationBench, no_eos: None
) -> None:
    sampling = Sampling(max_tokens=50, temperature=1.0, n=3)
    stopped, failed = (either.start("everything", PROMPTS[0], sampling) for _ in range(2))
    going_on = either.start(None, PROMPTS[0])
    either.run(steps=6)
    either.scheduler.stop(stopped)
    assert {messages(either, stopped, index)[-1].finish_reason for index in range(3)} == {
        "cancelled"
    }
    tokens = sum(len(whole(either, stopped, index).tokens) for index in range(3))
    assert either.end(stopped) == GenerationEnded(stopped, "cancelled", len(PROMPTS[0]), tokens)
    # A stale slot ends the whole request, once.
    either.residents[NAMES.index("everything")] = None
    either.run()
    end = either.end(failed)
    assert isinstance(end, OperationFailed)
    assert end.code is ErrorCode.NOT_RESIDENT
    assert isinstance(either.end(going_on), GenerationEnded)
    assert either.scheduler.operations == []


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "level": {"enum": ["low", "high"]},
        "counts": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "level", "counts"],
    "additionalProperties": False,
}


def test_structured_outputs_are_valid_for_every_adapter_of_a_mixed_batch(
    either: GenerationBench,
) -> None:
    structures = {
        "schema": Structure("json_schema", json.dumps(SCHEMA)),
        "regex": Structure("regex", "[0-9]{3}-(cat|dog)"),
        "choice": Structure("choice", choices=('a"b\\', "été (x)", "x y|z")),
    }
    ops = {}
    for number, name in enumerate((None, *NAMES)):
        for kind, structure in structures.items():
            sampling = Sampling(100, 0.9, seed=number, structure=structure, logprobs=0)
            ops[name, kind] = either.start(name, PROMPTS[0], sampling)
        ops[name, "free"] = either.start(name, PROMPTS[0], Sampling(max_tokens=12))
    either.run()
    texts = {}
    for (name, kind), op in ops.items():
        output = whole(either, op)
        texts[name, kind] = output.text
        if kind == "free":
            continue
        assert output.finish_reason == "stop", (name, kind, output.text)
        if kind == "schema":
            jsonschema.validate(json.loads(output.text), SCHEMA)
        elif kind == "regex":
            assert output.text[:3].isdigit()
            assert output.text[3:] in ("-cat", "-dog")
        else:
            assert output.text in structures["choice"].choices
    assert len({texts[name, "schema"] for name in (None, *NAMES)}) > 1
    for name in (None, *NAMES):
        free = either.alone(name, PROMPTS[0], Sampling(max_tokens=12))
        assert free[1] == texts[name, "free"]


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure("json_schema", "{"), "not JSON"),
        (Structure("json_schema", '{"type": "nonsense"}'), "nonsense"),
        (Structure("json_schema", '{"a":' * 70 + "1" + "}" * 70), "deeper than 64"),
        (Structure("json_schema", '{"multipleOf": 1234567, "type": "integer"}'), "takes more than"),
        (Structure("regex", "(a"), "unclosed"),
        (Structure("choice"), "no choices"),
    ],
)
def test_a_structure_that_cannot_be_used_is_refused_alone(
    bench: GenerationBench, structure: Structure, words: str
) -> None:
    other = bench.start("mlp", PROMPTS[0])
    op = bench.start("mlp", PROMPTS[0], Sampling(max_tokens=8, structure=structure))
    bench.run()
    end = bench.end(op)
    assert isinstance(end, OperationFailed)
    assert end.code is ErrorCode.MALFORMED
    assert words in end.message
    assert isinstance(bench.end(other), GenerationEnded)


def test_a_structure_that_takes_too_much_work_per_token_fails_alone(
    bench: GenerationBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "step_lexer_fuel", 1)
    monkeypatch.setattr("loradock.engine.serving.structured.probe_error", lambda *_: "")
    other = bench.start("mlp", PROMPTS[0])
    sampling = Sampling(max_tokens=8, structure=Structure("regex", "(ab|cd|e.*f)+x"))
    op = bench.start("mlp", PROMPTS[0], sampling)
    bench.run()
    end = bench.end(op)
    assert isinstance(end, OperationFailed)
    assert end.code is ErrorCode.MALFORMED
    assert "can't be followed" in end.message
    assert isinstance(bench.end(other), GenerationEnded)


def test_a_structure_and_min_tokens_exclude_each_other(bench: GenerationBench) -> None:
    sampling = Sampling(structure=Structure("regex", "a"), min_tokens=1)
    with pytest.raises(Exception, match="min_tokens") as refusal:
        bench.start(None, PROMPTS[0], sampling)
    assert refusal.value.code is ErrorCode.MALFORMED
    assert bench.scheduler.is_idle


def test_smaller_priorities_start_first(bench_of: Any, no_eos: None) -> None:
    either = bench_of(max_num_seqs=1)
    priorities = [0, 5, -3, 0, -3, 5]
    names = [None, "mlp", "mlp", "output", None, None]
    ops = [
        either.start(name, PROMPTS[0], Sampling(max_tokens=2), priority=priority)
        for name, priority in zip(names, priorities, strict=True)
    ]
    either.run()
    ended = [report.op for report in either.reports if isinstance(report, GenerationEnded)]
    order = [priorities[ops.index(op)] for op in ended]
    assert order == sorted(priorities)


COUNT_MAX, BYTES_MAX = 3, 100

IDS = ("a", "b", "c", "d", "e")

tokens = st.builds(
    lambda name, count, text: TokensStreamed(name, 0, (7,) * count, text),
    *(st.sampled_from(IDS), st.integers(0, 9), st.text("x", max_size=40)),
)

vectors = st.builds(
    lambda name, widths: VectorsStreamed(name, 0, tuple(bytes(width) for width in widths)),
    *(st.sampled_from(IDS), st.lists(st.integers(0, 60), max_size=3)),
)


def size_of(output: PrivateReport) -> int:
    if isinstance(output, TokensStreamed):
        return 8 * len(output.tokens) + len(output.text)
    return sum(len(vector) for vector in output.vectors)


@given(st.lists(tokens | vectors, max_size=12))
def test_the_cache_holds_the_latest_outputs_that_fit(outputs: list[PrivateReport]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(generations, "OUTPUTS_MAX", COUNT_MAX)
        patched.setattr(generations, "OUTPUTS_BYTES_MAX", BYTES_MAX)
        cache = OutputCache()
        expected: list[PrivateReport] = []
        for output in outputs:
            cache.put(output)
            expected = [one for one in expected if one.request_id != output.request_id]
            expected.append(output)
            while len(expected) > COUNT_MAX or sum(map(size_of, expected)) > BYTES_MAX:
                expected.pop(0)
            by_id = {one.request_id: (one,) for one in expected}
            assert {name: cache.get(name) for name in IDS} == {n: by_id.get(n, ()) for n in IDS}
