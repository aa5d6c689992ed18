"""LangChain: tools bound to a model, whose calls are executed, whole and as a stream."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def reverse(word: Literal["hello", "adapter"]) -> str:
    """Read a word backwards."""
    return word[::-1]


ADDRESS = {"base_url": os.environ["TOOLS_BASE_URL"], "api_key": os.environ["API_KEY"]}
OPTIONS = {"model": "caller", "temperature": 0, "max_tokens": 200, "max_retries": 0}

for uses_responses in (False, True):
    model = ChatOpenAI(**ADDRESS, **OPTIONS, use_responses_api=uses_responses)
    bound = model.bind_tools([reverse])
    messages = [HumanMessage("hello")]
    answer = bound.invoke(messages)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("reverse", {"word": "hello"})
    messages += [answer, reverse.invoke(call)]
    assert messages[-1].content == "olleh"
    assert bound.invoke(messages).text == "olleh"
    chunks = list(bound.stream("hello"))
    total = sum(chunks[1:], chunks[0])
    assert [one["args"] for one in total.tool_calls] == [{"word": "hello"}]
    for choice in ("any", "reverse"):
        forced = model.bind_tools([reverse], tool_choice=choice, parallel_tool_calls=False)
        [call] = forced.invoke("hello").tool_calls
        assert reverse.invoke(call).content in ("olleh", "retpada")
