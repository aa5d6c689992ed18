"""instructor: its modes for tools and for JSON, blocking, with asyncio and as a stream."""

import asyncio
import os
from typing import Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

ADDRESS = {"base_url": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"]}
CHAT = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "hello"}],
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
}


class Word(BaseModel, extra="forbid"):
    kind: Literal["noun", "verb", "greeting"]
    letters: int = Field(ge=1, le=9)


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(OpenAI(**ADDRESS), mode=mode)
    assert isinstance(client.chat.completions.create(response_model=Word, **CHAT), Word), mode
    *_, last = client.chat.completions.create_partial(response_model=Word, **CHAT)
    assert Word.model_validate(last.model_dump()), mode


async def use_asyncio() -> None:
    client = instructor.from_openai(AsyncOpenAI(**ADDRESS), mode=instructor.Mode.TOOLS)
    found = await asyncio.gather(
        *(client.chat.completions.create(response_model=Word, **CHAT) for _ in range(3))
    )
    assert all(isinstance(word, Word) for word in found)


asyncio.run(use_asyncio())
