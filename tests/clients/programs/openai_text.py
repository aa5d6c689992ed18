"""Completions, chats and streams with `openai`, blocking and with asyncio."""

import asyncio
import os
from contextlib import suppress

import openai

MODEL = os.environ["MODEL"]
ADDRESS = {"base_url": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"]}
HELLO = [{"role": "user", "content": "hello"}]
OPTIONS = {"model": MODEL, "temperature": 0, "max_tokens": 16}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
LONG = OPTIONS | {"prompt": "a>", "max_tokens": 400, "extra_body": {"ignore_eos": True}}


def use_blocking() -> None:
    client = openai.OpenAI(**ADDRESS)
    assert MODEL in [model.id for model in client.models.list()]
    served = client.models.retrieve(MODEL)
    assert (served.id, served.parent) == (MODEL, "model")
    text = client.completions.create(prompt="hello>", **OPTIONS)
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("olleh", "stop")
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (6, 6)
    chat = client.chat.completions.create(messages=HELLO, **OPTIONS)
    assert chat.choices[0].message.content == "olleh"
    assert chat.choices[0].finish_reason == "stop"
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (6, 6)
    *texts, last = client.completions.create(prompt="hello>", **OPTIONS, **STREAMED)
    assert "".join(chunk.choices[0].text for chunk in texts) == "olleh"
    assert last.usage == text.usage
    with client.completions.create(**LONG, stream=True) as stream:
        assert next(iter(stream)).choices[0].finish_reason is None
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
    with suppress(openai.APITimeoutError):
        client.with_options(timeout=0.01, max_retries=0).completions.create(**LONG)
        raise AssertionError("400 tokens must take longer than the timeout")


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
        cancelled = asyncio.ensure_future(client.completions.create(**LONG))
        async with await client.completions.create(**LONG, stream=True) as stream:
            await anext(aiter(stream))
            cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
        with suppress(openai.APITimeoutError):
            await client.with_options(timeout=0.01, max_retries=0).completions.create(**LONG)
            raise AssertionError("400 tokens must take longer than the timeout")


use_blocking()
asyncio.run(use_asyncio())
