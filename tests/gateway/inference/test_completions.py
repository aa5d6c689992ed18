"""Texts continued over HTTP: what is sent to the controller, what is answered, and streams."""

import json
from typing import Any

import msgspec
import pytest

from loradock.gateway.inference.sampling import Labels
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import Sampling, Structure
from loradock.messages.views import TokenLogprob
from tests.support.gateway.outputs import only_generation, refuse
from tests.support.gateway.served import Served, data_of
from tests.support.waiting import wait_until

PATH = "/v1/completions"
JSON = Structure("json_schema")


def test_a_completion(served: Served) -> None:
    body = {"model": "upper", "prompt": "hello", "max_tokens": 3, "temperature": 0, "user": "u"}
    answer = served.post(PATH, body).json()
    [choice] = answer["choices"]
    assert choice["text"] == "one"
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert answer["object"] == "text_completion"
    assert answer["model"] == "upper"
    request = only_generation(served)
    assert (request.adapter, request.prompt) == ("upper", "hello")
    assert request.sampling == Sampling(max_tokens=3)


def test_the_defaults_are_those_of_the_protocol(served: Served) -> None:
    served.post(PATH, {"prompt": "hello"})
    assert only_generation(served).sampling == Sampling(max_tokens=16, temperature=1.0)


def test_sampling_parameters_are_passed_on(served: Served) -> None:
    body = {"prompt": "p", "top_p": 0.5, "top_k": -1, "seed": -1, "stop": "x", "temperature": 2}
    served.post(PATH, {**body, "priority": -2})
    expected = Sampling(16, 2.0, 0, 0.5, 2**63 - 1, ("x",))
    request = only_generation(served)
    assert (request.sampling, request.priority) == (expected, -2)


@pytest.mark.parametrize("model", [None, "tiny-chat", "tiny-chat:", ""])
def test_the_base_model_is_named_or_left_out(served: Served, model: Any) -> None:
    status = served.post(PATH, {"prompt": "p", "model": model}).status_code
    if model == "tiny-chat:":
        assert status == 404
    else:
        assert only_generation(served).adapter is None


@pytest.mark.parametrize("model", ["upper", "tiny-chat:upper"])
def test_an_adapter_is_named_alone_or_with_the_base_model(served: Served, model: Any) -> None:
    assert served.post(PATH, {"prompt": "p", "model": model}).json()["model"] == "upper"
    assert only_generation(served).adapter == "upper"


@pytest.mark.parametrize("model", ["nope", "a b", "../x", "other:upper", "x" * 200])
def test_an_unknown_model_is_answered_with_404(served: Served, model: Any) -> None:
    response = served.post(PATH, {"prompt": "p", "model": model})
    error = response.json()["error"]
    assert response.status_code == error["code"] == 404
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert error["message"].startswith("L006")
    assert response.headers["x-loradock-code"] == "L006"
    assert served.controller.requests(rq.Generate) == []


def test_several_prompts_have_several_choices_each(served: Served) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "seed": 7, "echo": True}
    answer = served.post(PATH, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["aone", "aone", "bone", "bone"]
    # Both prompts count once.
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 12, "total_tokens": 20}
    requests = served.controller.requests(rq.Generate)
    sent = {(one.prompt, one.sampling.seed, one.sampling.n) for one in requests}
    assert sent == {("a", 7, 2), ("b", 7, 2)}


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [([1, 2], [(1, 2)]), ([[1], [2, 3]], [(1,), (2, 3)]), (["x"], ["x"]), ("", [""])],
)
def test_prompts_are_texts_or_token_ids(served: Served, prompt: Any, sent: Any) -> None:
    assert served.post(PATH, {"prompt": prompt}).status_code == 200
    assert [r.prompt for r in served.controller.requests(rq.Generate)] == sent


def test_special_tokens_may_be_left_out(served: Served) -> None:
    served.post(PATH, {"prompt": "ab", "add_special_tokens": False})
    assert only_generation(served).prompt == (97, 98)


def test_a_stream_has_chunks_and_an_end(served: Served) -> None:
    chunks = data_of(served.events(PATH, {"prompt": "p", "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_a_stream_ends_with_its_usage_if_requested(served: Served) -> None:
    body = {"prompt": "p", "stream": True, "stream_options": {"include_usage": True}}
    chunks = data_of(served.events(PATH, body))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 3
    assert chunks[-1]["choices"] == []
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert chunks[-1]["usage"] == usage


def test_continuous_usage_grows_with_every_chunk(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "stream": True, "stream_options": options}
    chunks = data_of(served.events(PATH, body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert chunks[0]["usage"]["prompt_tokens"] == 3


def test_the_choices_of_a_stream_are_each_whole(served: Served) -> None:
    chunks = data_of(served.events(PATH, {"prompt": ["a", "b"], "stream": True, "echo": True}))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "aone", 1: "bone"}


def test_an_error_before_the_first_token_has_a_status(served: Served) -> None:
    refuse(served, ErrorCode.OVERLOADED)
    for stream in (False, True):
        response = served.post(PATH, {"prompt": "p", "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["type"] == "RateLimitError"


def test_an_error_within_a_stream_is_an_event_of_it(served: Served) -> None:
    refuse(served, ErrorCode.ENGINE_GONE, after_one_token=True)
    first, error = data_of(served.events(PATH, {"prompt": "p", "stream": True}))
    assert first["choices"][0]["text"] == "o"
    assert error["error"]["code"] == 503
    assert error["error"]["message"].startswith("L011")


@pytest.mark.parametrize(
    ("field", "value", "unchanged"),
    [
        ("logprobs", 21, None),
        ("max_tokens", 0, None),
        ("best_of", 2, 1),
        ("use_beam_search", True, False),
        ("suffix", "x", ""),
        ("structured_outputs", {"grammar": "x"}, None),
        ("guided_grammar", "x", None),
        ("response_format", {"type": "json_schema"}, {"type": "text"}),
        ("stream_options", {"include_usage": True}, None),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    served: Served, field: Any, value: Any, unchanged: Any
) -> None:
    response = served.post(PATH, {"prompt": "p", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert field in response.json()["error"]["message"]
    assert served.post(PATH, {"prompt": "p", field: unchanged}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "option", "expected"),
    [
        ("min_p", 0.5, "min_p", 0.5),
        ("repetition_penalty", 1.25, "repetition_penalty", 1.25),
        ("presence_penalty", 1, "presence_penalty", 1.0),
        ("frequency_penalty", -0.5, "frequency_penalty", -0.5),
        ("logit_bias", {"5": 1, "7": -2.5}, "logit_bias", ((5, 1.0), (7, -2.5))),
        ("stop_token_ids", [1, 2], "stop_token_ids", (1, 2)),
        ("ignore_eos", True, "ignore_eos", True),
        ("min_tokens", 3, "min_tokens", 3),
        ("include_stop_str_in_output", True, "include_stop", True),
        ("skip_special_tokens", False, "skip_special_tokens", False),
        ("logprobs", 2, "logprobs", 2),
        ("prompt_logprobs", 2, "prompt_logprobs", 2),
        ("response_format", {"type": "json_object"}, "structure", JSON),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}},
            "structure",
            Structure("json_schema", '{"a":1}'),
        ),
        ("structured_outputs", {"json": {}}, "structure", Structure("json_schema", "{}")),
        ("structured_outputs", {"json_object": True}, "structure", JSON),
        ("structured_outputs", {"regex": "a"}, "structure", Structure("regex", "a")),
        ("guided_json", '{"b": 2}', "structure", Structure("json_schema", '{"b": 2}')),
        ("guided_regex", "a+", "structure", Structure("regex", "a+")),
        ("guided_choice", ["a"], "structure", Structure("choice", choices=("a",))),
    ],
)
def test_what_the_engine_serves_is_passed_on(
    served: Served, field: Any, value: Any, option: Any, expected: Any
) -> None:
    assert served.post(PATH, {"prompt": "p", field: value}).status_code == 200
    assert getattr(only_generation(served).sampling, option) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", 2.0), ("logit_bias", {"a": 1}), ("min_tokens", -1), ("presence_penalty", 3)],
)
def test_values_out_of_bounds_are_refused(served: Served, field: Any, value: Any) -> None:
    assert served.post(PATH, {"prompt": "p", field: value}).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, None),
        ({"prompt": "p", "unknown": 1}, "unknown"),
        ({"prompt": "p", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "p", "top_p": 0}, "top_p"),
        ({"prompt": "p", "n": 0}, "n"),
        ({"prompt": "p", "n": 1000}, "n"),
        ({"prompt": "p", "stop": [""]}, "stop"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ],
)
def test_a_wrong_field_is_refused_by_name(served: Served, body: Any, param: Any) -> None:
    error = served.refused(PATH, body)
    assert (error["param"], error["type"], error["code"]) == (param, "BadRequestError", 400)


def test_a_client_that_leaves_cancels_its_generation(served: Served) -> None:
    served.controller.answers[rq.Generate] = lambda request: None
    for stream in (False, True):
        served.controller.received.clear()
        body = json.dumps({"prompt": "p", "stream": stream}).encode()
        with served.connect() as connection:
            head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            wait_until(lambda: served.controller.requests(rq.Generate))
        [request] = served.controller.requests(rq.Generate)
        wait_until(lambda: served.controller.requests(rq.CancelGeneration))
        [cancel] = served.controller.requests(rq.CancelGeneration)
        assert cancel.target == request.request_id
        wait_until(lambda: served.get("/load").json() == {"server_load": 0})


def test_log_probabilities_of_a_text(served: Served) -> None:
    answer = served.post(PATH, {"prompt": "abcd", "max_tokens": 2, "logprobs": 2}).json()
    (choice,) = answer["choices"]
    scores = choice["logprobs"]
    assert scores["token_logprobs"] == [-1.5, -1.5]
    assert [len(best) for best in scores["top_logprobs"]] == [2, 2]
    assert scores["text_offset"] == [0, len(scores["tokens"][0])]
    assert choice["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_log_probabilities_begins_with_those_of_the_prompt(
    served: Served, stream: bool
) -> None:
    body = {"prompt": "abcd", "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
    if stream:
        chunks = data_of(served.events(PATH, {**body, "stream": True}))
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["index"] for choice in choices] == [0, 1]
    else:
        choices = served.post(PATH, body).json()["choices"]
    for choice in choices:
        assert (choice["text"], choice["finish_reason"]) == ("abcd", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"c": -0.25, "b": -1.5}]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    request = only_generation(served)
    assert (request.sampling.max_tokens, request.sampling.prompt_logprobs) == (1, 1)


def test_log_probabilities_of_the_prompt_as_in_vllm(served: Served) -> None:
    body = {"prompt": "abcd", "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = served.post(PATH, body).json()["choices"]
    first, second, *_ = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "99": {"logprob": -0.25, "rank": 1, "decoded_token": "token_id:99"},
        "98": {"logprob": -1.5, "rank": 2, "decoded_token": "token_id:98"},
    }
    events = served.events(PATH, {**body, "stream": True, "n": 2})
    chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
    firsts = [next(one for one in chunks if one["index"] == index) for index in range(2)]
    assert [one["prompt_logprobs"] for one in firsts] == [choice["prompt_logprobs"]] * 2
    assert [one for one in chunks if one["prompt_logprobs"]] == firsts


def test_two_structures_exclude_each_other(served: Served) -> None:
    assert (
        served.refused(PATH, {"prompt": "p", "guided_regex": "a", "guided_choice": ["b"]})["param"]
        == "guided_choice"
    )


END = 101


@pytest.fixture
def ended(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gateway whose generations have one token, "o", and are ended by another one."""

    def generate(request: Any) -> Any:
        name = request.request_id
        chunks: Any = (
            rq.TokensStreamed(name, 0, (1,), "o"),
            rq.TokensStreamed(name, 1, (), finish_reason="stop", end_token=END),
        )
        if request.sampling.logprobs is not None:
            entries = ((TokenLogprob(1, -1.5, 2),), (TokenLogprob(END, -0.1, 1),))
            chunks = map(
                lambda chunk, entry: msgspec.structs.replace(chunk, logprobs=entry), chunks, entries
            )
        served.controller.extra_replies += chunks
        return rq.GenerationDone(name, request.adapter, "stop", 4, 1)

    monkeypatch.setattr(served.controller, "output", ())
    served.controller.answers[rq.Generate] = generate
    return served


def test_the_end_token_counts_in_the_usage(ended: Served) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert ended.post(PATH, {"prompt": "p"}).json()["usage"] == usage
    options = {"include_usage": True}
    body = {"prompt": "p", "stream": True, "stream_options": options}
    assert data_of(ended.events(PATH, body))[-1]["usage"] == usage


def test_the_end_token_has_a_log_probability_and_an_id(ended: Served) -> None:
    body = {"prompt": "p", "logprobs": 0, "return_token_ids": True}
    [choice] = ended.post(PATH, body).json()["choices"]
    assert choice["text"] == "o"
    assert choice["logprobs"]["token_logprobs"] == [-1.5, -0.1]
    assert choice["token_ids"] == [1, END]
    assert choice["prompt_token_ids"] == [ord("p")]


def test_a_stream_has_the_ids_of_each_chunk_and_of_the_prompt_once(ended: Served) -> None:
    body = {"prompt": ["p", "qr"], "stream": True, "return_token_ids": True}
    choices = [chunk["choices"][0] for chunk in data_of(ended.events(PATH, body))]
    for index, prompt in enumerate([[112], [113, 114]]):
        own = [one for one in choices if one["index"] == index]
        assert [one["token_ids"] for one in own] == [[1], [END]]
        assert [one.get("prompt_token_ids") for one in own] == [prompt, None]


def test_ids_are_left_out_unless_requested(served: Served) -> None:
    [choice] = served.post(PATH, {"prompt": "p"}).json()["choices"]
    assert not {"token_ids", "prompt_token_ids"}.intersection(choice)
    body = {"prompt": "p", "echo": True, "return_token_ids": True}
    assert served.post(PATH, body).json()["choices"][0]["text"] == "pone"


def test_continuous_usage_needs_include_usage(served: Served) -> None:
    options = {"continuous_usage_stats": True}
    body = {"prompt": "abc", "stream": True, "stream_options": options}
    assert not any("usage" in chunk for chunk in data_of(served.events(PATH, body)))


@pytest.mark.parametrize("key", ["a", "-1", "1.5", "", "99999999999"])
def test_a_bias_of_no_token_is_refused_by_the_field(served: Served, key: Any) -> None:
    assert served.refused(PATH, {"prompt": "p", "logit_bias": {key: 1}})["param"] == "logit_bias"


@pytest.mark.parametrize("field", Labels.__struct_fields__)
@pytest.mark.parametrize("value", [None, "x", True, {"a": [1]}, []])
def test_labels_are_accepted_and_change_nothing(served: Served, field: Any, value: Any) -> None:
    assert served.post(PATH, {"prompt": "p", field: value}).status_code == 200
    assert only_generation(served).sampling == Sampling(max_tokens=16, temperature=1.0)


def test_a_rendered_prompt_is_what_would_be_sent(served: Served) -> None:
    body = {"prompt": "ab", "model": "upper", "seed": 3, "stop": "x", "priority": 2}
    body |= {"logit_bias": {"5": 1}, "guided_regex": "a+", "stream": True}
    [item] = served.post(f"{PATH}/render", body).json()
    assert served.controller.requests(rq.Generate) == []
    served.events(PATH, body)
    request = only_generation(served)
    assert (item["model"], item["token_ids"], item["stream"]) == ("upper", [97, 98], True)
    assert item["priority"] == request.priority == 2
    shown, sent = item["sampling_params"], request.sampling
    for name in ("max_tokens", "temperature", "seed", "top_p", "top_k", "n"):
        assert shown[name] == getattr(sent, name)
    assert (shown["stop"], shown["logit_bias"]) == (["x"], {"5": 1.0})
    assert shown["structured_outputs"] == {"regex": "a+"}


def test_several_prompts_are_rendered_with_ids_of_their_own(served: Served) -> None:
    items = served.post(f"{PATH}/render", {"prompt": ["a", "b"]}).json()
    assert [item["token_ids"] for item in items] == [[97], [98]]
    assert len({item["request_id"] for item in items}) == 2
    assert all(item["request_id"].startswith("cmpl-") for item in items)


@pytest.mark.parametrize("more", [{"min_p": 2.0}, {"model": "nope"}, {"best_of": 2}])
def test_what_would_be_refused_is_not_rendered(served: Served, more: Any) -> None:
    statuses = [
        served.post(p, {"prompt": "a", **more}).status_code for p in (PATH, f"{PATH}/render")
    ]
    assert statuses[0] == statuses[1] != 200
