"""Chats over HTTP: the prompt that the template makes of messages, answers, and streams."""

import base64
import json
from typing import Any

import pytest

from loradock.messages import requests as rq
from loradock.messages.prompts import MultimodalPrompt
from tests.support.gateway.outputs import only_generation, prompt, sampling
from tests.support.gateway.served import Served, data_of

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ARRAY = {"type": "array"}
PNG = "data:image/png;base64," + base64.b64encode(b"png bytes").decode()


def test_a_chat(served: Served) -> None:
    answer = served.post(PATH, {"model": "upper", "messages": HELLO}).json()
    [choice] = answer["choices"]
    assert choice["message"]["content"] == "one"
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["total_tokens"] == 7
    assert prompt(served) == "<user>hi<assistant>"


def test_the_answer_may_fill_the_context(served: Served) -> None:
    served.post(PATH, {"messages": HELLO})
    assert sampling(served).max_tokens == 512 - len("<user>hi<assistant>")


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_length_is_limited_under_both_names(served: Served, field: Any) -> None:
    served.post(PATH, {"messages": HELLO, field: 2})
    assert sampling(served).max_tokens == 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"add_generation_prompt": False}, "<user>hi"),
        (
            {"tools": TOOLS, "tool_choice": "none"},
            f"<user>hi<tools>{json.dumps(TOOLS)}<assistant>",
        ),
        ({"tool_choice": "auto"}, "<user>hi<assistant>"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "<user>hi<assistant>"),
        ({"reasoning_effort": "low", "documents": None}, "<user>hi<assistant>"),
        ({"continue_final_message": True}, "<user>hi"),
    ],
)
def test_the_template_reads_the_request(served: Served, more: Any, expected: Any) -> None:
    assert served.post(PATH, {"messages": HELLO, **more}).status_code == 200
    assert prompt(served) == expected


def test_a_stream_begins_with_the_role(served: Served) -> None:
    options = {"include_usage": True}
    body = {"messages": HELLO, "stream": True, "stream_options": options}
    chunks = data_of(served.events(PATH, body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta.get("content") for delta in deltas[1:]] == ["o", "n", "e"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_each_choice_has_a_role_and_an_end(served: Served) -> None:
    chunks = data_of(served.events(PATH, {"messages": HELLO, "stream": True, "n": 3}))
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "one"
        assert own[-1]["finish_reason"] == "length"


def test_an_answer_can_be_sent_back(served: Served) -> None:
    message = served.post(PATH, {"messages": HELLO}).json()["choices"][0]["message"]
    served.controller.received.clear()
    assert served.post(PATH, {"messages": [*HELLO, message, *HELLO]}).status_code == 200
    assert prompt(served) == "<user>hi<assistant>one<user>hi<assistant>"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages"),
        ({"tools": "all"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": ARRAY}}]},
            "tools",
        ),
        # The template shows no format of calls.
        ({"tools": TOOLS}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"echo": True}, "echo"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(served: Served, more: Any, param: Any) -> None:
    assert served.refused(PATH, {"messages": HELLO, **more})["param"] == param
    assert served.controller.requests(rq.Generate) == []


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/a.png", "http://169.254.169.254/latest", "file:///etc/passwd"),
        *("http://localhost:80/", "ftp://x/y", "http://[::1]/", "http://example.org/a.png"),
        *("data:image/png;base64,!!!", "data:image/png;base64,", "data:", "http://[", "x"),
    ],
)
def test_no_other_image_is_read(served: Served, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    assert (
        served.refused(PATH, {"messages": [{"role": "user", "content": [part]}]})["param"]
        == "messages"
    )


def test_tools_that_are_nested_too_deeply_are_refused(served: Served) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": {deep}}}'
    headers = {"content-type": "application/json"}
    assert served.http.post(PATH, content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_message(served: Served, stream: bool) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "n": 2}
    if stream:
        chunks = data_of(served.events(PATH, {**body, "stream": True}))
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        choices = served.post(PATH, body).json()["choices"]
    for index in range(2):
        own = [choice["logprobs"] for choice in choices if choice["index"] == index]
        content = [entry for scores in own if scores for entry in scores["content"]]
        assert [entry["logprob"] for entry in content] == [-1.5, -1.5]
        assert all(entry["bytes"] == [*entry["token"].encode()] for entry in content)
        assert [len(entry["top_logprobs"]) for entry in content] == [1, 1]
    assert (sampling(served).logprobs, sampling(served).n) == (1, 2)


def test_log_probabilities_of_the_prompt_are_in_one_chunk_of_a_stream(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 1}
    whole = served.post(PATH, body).json()["prompt_logprobs"]
    chunks = data_of(served.events(PATH, {**body, "stream": True}))
    assert [one["prompt_logprobs"] for one in chunks if "prompt_logprobs" in one] == [whole]
    assert whole[0] is None


def test_marks_for_the_caches_of_other_servers_are_accepted_in_parts(served: Served) -> None:
    mark = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [
        {"type": "text", "text": "a", **mark},
        {"type": "image_url", "image_url": {"url": PNG}, **mark},
    ]
    response = served.post(PATH, {"messages": [{"role": "user", "content": parts, **mark}]})
    assert response.status_code == 200
    found = only_generation(served).prompt
    assert isinstance(found, MultimodalPrompt)
    assert found.text == "<user>a<image><assistant>"


def test_a_chat_has_the_ids_of_its_tokens_on_request(served: Served) -> None:
    body = {"messages": HELLO, "return_token_ids": True}
    expected = list(b"<user>hi<assistant>")
    answer = served.post(PATH, body).json()
    assert answer["prompt_token_ids"] == expected
    assert answer["choices"][0]["token_ids"] == [1, 2, 3]
    first, *rest = data_of(served.events(PATH, {**body, "stream": True}))
    assert first["prompt_token_ids"] == expected
    assert not any("prompt_token_ids" in chunk for chunk in rest)
    ids = [token for chunk in rest for token in chunk["choices"][0]["token_ids"]]
    assert ids == [1, 2, 3]
    assert "token_ids" not in served.post(PATH, {"messages": HELLO}).json()["choices"][0]


def test_the_most_likely_tokens_begin_with_the_chosen_one(served: Served) -> None:
    # In the stand-in's entries the chosen token is the second most likely one.
    for count in (1, 2):
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": count}
        for entry in served.post(PATH, body).json()["choices"][0]["logprobs"]["content"]:
            best = entry["top_logprobs"]
            assert len(best) == count
            assert (best[0]["token"], best[0]["logprob"]) == (entry["token"], entry["logprob"])


def test_a_rendered_chat_is_what_would_be_sent(served: Served) -> None:
    item = served.post(f"{PATH}/render", {"messages": HELLO}).json()
    assert served.controller.requests(rq.Generate) == []
    served.post(PATH, {"messages": HELLO})
    [request] = served.controller.requests(rq.Generate)
    assert tuple(item["token_ids"]) == request.prompt
    assert item["sampling_params"]["max_tokens"] == request.sampling.max_tokens
    parts = [{"type": "image_url", "image_url": {"url": PNG}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert served.post(f"{PATH}/render", body).status_code == 400
