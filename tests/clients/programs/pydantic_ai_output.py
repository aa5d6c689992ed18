"""pydantic-ai: text, streams, and typed output by its default (tools) and as a JSON schema."""

import asyncio
import os
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


class Word(BaseModel, extra="forbid"):
    kind: Literal["noun", "verb", "greeting"]
    letters: int = Field(ge=1, le=9)


provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
settings = ModelSettings(temperature=0, max_tokens=200)


async def main() -> None:
    plain = Agent(model, model_settings=settings)
    result = await plain.run("hello")
    assert result.output == "olleh"
    assert result.usage.output_tokens > 0
    async with plain.run_stream("hello") as stream:
        assert await stream.get_output() == "olleh"
    native = Agent(model, output_type=NativeOutput(Word), model_settings=settings)
    assert isinstance((await native.run("hello")).output, Word)
    by_tool = Agent(model, output_type=Word, model_settings=settings)
    assert isinstance((await by_tool.run("hello")).output, Word)


asyncio.run(main())
