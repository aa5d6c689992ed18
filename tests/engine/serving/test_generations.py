"""Several outputs of one prompt, log-probabilities, structures and priorities, in mixed batches."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jsonschema
import pytest
import torch
from msgspec import structs
from peft import PeftModel

from loradock.engine.config import EngineConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving.structured import LIMITS
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling, Structure
from loradock.messages.reports import GenerationEnded, OperationFailed
from loradock.messages.requests import TokensStreamed
from tests.support.engine.generation_bench import NAMES, PROMPTS, GenerationBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

SCORED = Sampling(max_tokens=8, logprobs=3, prompt_logprobs=2)
LONG_PROMPT = tuple((7 * at + 3) % 256 for at in range(70))


@pytest.fixture(params=[True, False], ids=["paged", "padded"])
def config(request: pytest.FixtureRequest, engine_config: EngineConfig) -> EngineConfig:
    return replace(engine_config, paged_attention=request.param)


@pytest.fixture
def bench(prepared_model: CausalModel, adapter_root: Path, config: EngineConfig) -> GenerationBench:
    return GenerationBench(prepared_model, adapter_root, config)


@pytest.fixture
def paged(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> GenerationBench:
    """A bench of the usual batch, for what happens before or after a forward pass."""
    return GenerationBench(prepared_model, adapter_root, engine_config)


def messages(bench: GenerationBench, op: int, index: int = 0) -> list[TokensStreamed]:
    return [
        report
        for report in bench.reports
        if isinstance(report, TokensStreamed)
        and (report.request_id, report.index) == (str(op), index)
    ]


def whole(bench: GenerationBench, op: int, index: int = 0) -> TokensStreamed:
    """Return one output as one message, which has to have arrived in order."""
    found = messages(bench, op, index)
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


def outputs(bench: GenerationBench, op: int, count: int) -> list[tuple[tuple[int, ...], str]]:
    found = [whole(bench, op, index) for index in range(count)]
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
    bench = GenerationBench(
        prepared_model, adapter_root, replace(config, max_num_batched_tokens=16)
    )
    # Their beginnings are in the cache already, but not their logits.
    for name in peft_models:
        bench.alone(name, LONG_PROMPT, Sampling(max_tokens=1))
    requests = [
        (name, prompt) for name in peft_models for prompt in (PROMPTS[0], LONG_PROMPT, (200,))
    ]
    ops = []
    for number, request in enumerate(requests):
        # Neither temperature nor penalties change what is reported.
        changes = {"temperature": 0.8, "seed": number, "repetition_penalty": 1.3}
        ops.append(bench.start(*request, structs.replace(SCORED, **changes)))
        bench.start(request[0], PROMPTS[1], Sampling(max_tokens=4))
    bench.run()
    for op, (name, prompt) in zip(ops, requests, strict=True):
        output = whole(bench, op)
        ids = torch.tensor([[*prompt, *output.tokens]])
        with torch.inference_mode():
            expected = peft_models[name](input_ids=ids).logits[0].log_softmax(-1)
        check_scores(output, prompt, expected)


def test_nothing_is_reported_that_was_not_requested(paged: GenerationBench) -> None:
    ops = [
        paged.start(None, PROMPTS[0], structs.replace(SCORED, **changes))
        for changes in (
            {"logprobs": None, "prompt_logprobs": None},
            {"logprobs": 0, "prompt_logprobs": None},
            {"logprobs": None, "prompt_logprobs": 0},
        )
    ]
    paged.run()
    nothing, chosen, prompt = (whole(paged, op) for op in ops)
    assert (nothing.logprobs, nothing.prompt_logprobs) == ((), ())
    assert chosen.prompt_logprobs == prompt.logprobs == ()
    assert [entry.token for entry in chosen.logprobs] == list(chosen.tokens)
    assert {entry.top for entry in chosen.logprobs} == {()}
    assert [entry and entry.token for entry in prompt.prompt_logprobs] == [None, *PROMPTS[0][1:]]


def test_outputs_of_one_prompt_equal_those_of_its_requests_alone(
    bench: GenerationBench, no_eos: None
) -> None:
    sampling = Sampling(max_tokens=8, temperature=1.2, seed=5, logprobs=1, n=4)
    alone = [
        structs.replace(sampling, n=1, seed=sampling.seed + index, logprobs=None)
        for index in range(4)
    ]
    expected = [bench.alone("mlp", PROMPTS[1], one) for one in alone]
    others = [bench.start(name, PROMPTS[0]) for name in (None, *NAMES)]
    op = bench.start("mlp", PROMPTS[1], sampling)
    bench.run()
    found = outputs(bench, op, 4)
    assert [(list(tokens), text) for tokens, text in found] == expected
    assert len(set(found)) == 4
    assert all(len(whole(bench, op, index).logprobs) == 8 for index in range(4))
    assert bench.end(op) == GenerationEnded(op, "length", len(PROMPTS[1]), 32)
    assert all(isinstance(bench.end(other), GenerationEnded) for other in others)
    # All outputs are kept, and are sent again from their first tokens.
    expected_messages = [whole(bench, op, index) for index in range(4)]
    bench.reports.clear()
    bench.scheduler.resend(str(op))
    assert bench.reports == expected_messages


def test_several_outputs_end_together_when_one_is_stopped_or_fails(
    bench: GenerationBench, no_eos: None
) -> None:
    sampling = Sampling(max_tokens=50, temperature=1.0, n=3)
    stopped, failed = (bench.start("everything", PROMPTS[0], sampling) for _ in range(2))
    going_on = bench.start(None, PROMPTS[0])
    bench.run(steps=6)
    bench.scheduler.stop(stopped)
    assert {messages(bench, stopped, index)[-1].finish_reason for index in range(3)} == {
        "cancelled"
    }
    tokens = sum(len(whole(bench, stopped, index).tokens) for index in range(3))
    assert bench.end(stopped) == GenerationEnded(stopped, "cancelled", len(PROMPTS[0]), tokens)
    # A stale slot ends the whole request, once.
    bench.residents[NAMES.index("everything")] = None
    bench.run()
    end = bench.end(failed)
    assert isinstance(end, OperationFailed)
    assert end.code is ErrorCode.NOT_RESIDENT
    assert isinstance(bench.end(going_on), GenerationEnded)
    assert bench.scheduler.operations == []


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
    bench: GenerationBench,
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
            ops[name, kind] = bench.start(name, PROMPTS[0], sampling)
        ops[name, "free"] = bench.start(name, PROMPTS[0], Sampling(max_tokens=12))
    bench.run()
    texts = {}
    for (name, kind), op in ops.items():
        output = whole(bench, op)
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
        free = bench.alone(name, PROMPTS[0], Sampling(max_tokens=12))
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
    paged: GenerationBench, structure: Structure, words: str
) -> None:
    other = paged.start("mlp", PROMPTS[0])
    op = paged.start("mlp", PROMPTS[0], Sampling(max_tokens=8, structure=structure))
    paged.run()
    end = paged.end(op)
    assert isinstance(end, OperationFailed)
    assert end.code is ErrorCode.MALFORMED
    assert words in end.message
    assert isinstance(paged.end(other), GenerationEnded)


def test_a_structure_that_takes_too_much_work_per_token_fails_alone(
    paged: GenerationBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "step_lexer_fuel", 1)
    monkeypatch.setattr("loradock.engine.serving.structured.probe_error", lambda *_: "")
    other = paged.start("mlp", PROMPTS[0])
    sampling = Sampling(max_tokens=8, structure=Structure("regex", "(ab|cd|e.*f)+x"))
    op = paged.start("mlp", PROMPTS[0], sampling)
    paged.run()
    end = paged.end(op)
    assert isinstance(end, OperationFailed)
    assert end.code is ErrorCode.MALFORMED
    assert "can't be followed" in end.message
    assert isinstance(paged.end(other), GenerationEnded)


def test_a_structure_and_min_tokens_exclude_each_other(paged: GenerationBench) -> None:
    sampling = Sampling(structure=Structure("regex", "a"), min_tokens=1)
    with pytest.raises(Exception, match="min_tokens") as refusal:
        paged.start(None, PROMPTS[0], sampling)
    assert refusal.value.code is ErrorCode.MALFORMED
    assert paged.scheduler.is_idle


def test_smaller_priorities_start_first(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig, no_eos: None
) -> None:
    bench = GenerationBench(prepared_model, adapter_root, replace(engine_config, max_num_seqs=1))
    priorities = [0, 5, -3, 0, -3, 5]
    names = [None, "mlp", "mlp", "output", None, None]
    ops = [
        bench.start(name, PROMPTS[0], Sampling(max_tokens=2), priority=priority)
        for name, priority in zip(names, priorities, strict=True)
    ]
    bench.run()
    ended = [report.op for report in bench.reports if isinstance(report, GenerationEnded)]
    order = [priorities[ops.index(op)] for op in ended]
    assert order == sorted(priorities)
