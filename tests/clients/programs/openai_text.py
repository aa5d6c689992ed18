"""Completions, chats and streams with `openai`, blocking and with asyncio."""

import asyncio
import os

import openai

MODEL = os.environ["MODEL"]
ADDRESS = {"base_url": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"]}
HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = {"model": MODEL, "temperature": 0, "max_tokens": 16}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def use_blocking() -> None:
    client = openai.OpenAI(**ADDRESS)
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL
    text = client.completions.create(prompt="hello>", **OPTIONS)
    assert text.choices[0].text == "olleh"
    chat = client.chat.completions.create(messages=HELLO, **OPTIONS)
    assert chat.choices[0].message.content == "olleh"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    *texts, last = client.completions.create(prompt="hello>", **OPTIONS, **STREAMED)
    assert "".join(chunk.choices[0].text for chunk in texts) == "olleh"
    assert last.usage == text.usage
    check_errors(client)


def check_errors(client: openai.OpenAI) -> None:
    try:
        client.chat.completions.create(model="missing", messages=HELLO)
        raise AssertionError("an unknown model must be refused")
    except openai.NotFoundError as error:
        assert error.param == "model"
    try:
        long = [{"role": "user", "content": "a" * 600}]
        client.chat.completions.create(model=MODEL, messages=long)
        raise AssertionError("a prompt that is longer than the context must be refused")
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error.body
        assert "maximum context length is 512 tokens" in error.message
    try:
        openai.OpenAI(**ADDRESS | {"api_key": "wrong"}).models.list()
        raise AssertionError("another key must be refused")
    except openai.AuthenticationError:
        pass


async def use_asyncio() -> None:
    async with openai.AsyncOpenAI(**ADDRESS) as client:
        words = ("hello", "adapter", "slots")
        chats = [[{"role": "user", "content": word}] for word in words]
        answers = await asyncio.gather(
            *(client.chat.completions.create(messages=chat, **OPTIONS) for chat in chats)
        )
        texts = [answer.choices[0].message.content for answer in answers]
        assert texts == [word[::-1] for word in words]
        stream = await client.chat.completions.create(messages=HELLO, **OPTIONS, **STREAMED)
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "olleh"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert last.usage.completion_tokens == answers[0].usage.completion_tokens


use_blocking()
asyncio.run(use_asyncio())
