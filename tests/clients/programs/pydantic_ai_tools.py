"""pydantic-ai: an agent whose model calls a tool and repeats what it returned."""

import asyncio
import os
from typing import Literal

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

provider = OpenAIProvider(base_url=os.environ["TOOLS_BASE_URL"], api_key=os.environ["API_KEY"])
settings = ModelSettings(temperature=0, max_tokens=200)
words: list[str] = []


async def main() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        words.clear()
        agent = Agent(kind("caller", provider=provider), model_settings=settings)

        @agent.tool_plain
        def reverse(word: Literal["hello", "adapter"]) -> str:
            words.append(word)
            return word[::-1]

        assert (await agent.run("hello")).output == "olleh"
        async with agent.run_stream("hello") as stream:
            assert await stream.get_output() == "olleh"
        assert words == ["hello", "hello"]


asyncio.run(main())
