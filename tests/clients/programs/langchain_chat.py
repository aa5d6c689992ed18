"""LangChain: invoke, stream, batch, structured output by its three methods, a long prompt."""

import asyncio
import os
from typing import Literal

from langchain_core.exceptions import ContextOverflowError
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Word(BaseModel, extra="forbid"):
    """A word that was looked at."""

    kind: Literal["noun", "verb", "greeting"]
    letters: int = Field(ge=1, le=9)


class Anything(BaseModel, extra="allow"):
    """Any object: this method leaves to the prompt which one is wanted."""


model = ChatOpenAI(
    model=os.environ["MODEL"],
    base_url=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    temperature=0,
    max_tokens=200,
    max_retries=0,
    stream_usage=True,
)

answer = model.invoke("hello")
assert answer.content == "olleh"
assert answer.usage_metadata["output_tokens"] > 0
assert answer.response_metadata["finish_reason"] == "stop"

chunks = list(model.stream("hello"))
assert len(chunks) > 1
total = sum(chunks[1:], chunks[0])
assert total.content == "olleh"
assert total.usage_metadata == answer.usage_metadata

words = ["hello", "adapter", "slots"]
assert [one.content for one in model.batch(words)] == [word[::-1] for word in words]
chain = ChatPromptTemplate.from_messages([("user", "{word}")]) | model
assert asyncio.run(chain.ainvoke({"word": "hello"})).content == "olleh"

try:
    model.invoke("a" * 600)
    raise AssertionError("a prompt that is longer than the context must be refused")
except ContextOverflowError:
    pass

for method in ("json_schema", "function_calling"):
    found = model.with_structured_output(Word, method=method).invoke("hello")
    assert isinstance(found, Word), method
anything = model.with_structured_output(Anything, method="json_mode").invoke("hello")
assert isinstance(anything, Anything)
