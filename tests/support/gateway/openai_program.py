"""What programs do with the `openai` client, blocking and with asyncio."""

import asyncio
import contextlib

import openai
import pytest

from tests.support.waiting import HANG_S

WORD, REVERSED = "hello", "olleh"
TEXT = {"model": "rev", "prompt": f"{WORD}>", "max_tokens": 16, "temperature": 0}
CHAT = {
    "model": "rev",
    "messages": [{"role": "user", "content": WORD}],
    "max_completion_tokens": 16,
    "temperature": 0,
}
# The adapter continues this without an end.
LONG = {"model": "upper", "prompt": "a" * 40, "max_tokens": 400, "temperature": 1.0}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def use_blocking(url: str, key: str) -> None:
    with openai.OpenAI(base_url=url, api_key=key, timeout=HANG_S, max_retries=0) as client:
        models = {model.id: model for model in client.models.list()}
        assert (models["rev"].parent, models["rev"].id) == ("model", "rev")
        assert client.models.retrieve("rev").id == "rev"
        check_text(client.completions.create(**TEXT))
        check_chat(client.chat.completions.create(**CHAT))
        check_texts(list(client.completions.create(**TEXT | STREAM)))
        check_chunks(list(client.chat.completions.create(**CHAT | STREAM)))
        with client.completions.create(**LONG, stream=True) as stream:
            assert next(iter(stream)).choices[0].finish_reason is None
        check_errors(client, url)


async def use_asyncio(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(
        base_url=url, api_key=key, timeout=HANG_S, max_retries=0
    ) as client:
        assert "rev" in [model.id async for model in client.models.list()]
        text, chat, texts, chunks = await asyncio.gather(
            client.completions.create(**TEXT),
            client.chat.completions.create(**CHAT),
            client.completions.create(**TEXT | STREAM),
            client.chat.completions.create(**CHAT | STREAM),
        )
        check_text(text)
        check_chat(chat)
        check_texts([chunk async for chunk in texts])
        check_chunks([chunk async for chunk in chunks])
        cancelled = asyncio.ensure_future(client.completions.create(**LONG))
        async with await client.completions.create(**LONG, stream=True) as stream:
            await anext(aiter(stream))
            cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.01).completions.create(**LONG)


def check_text(answer: object) -> None:
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (REVERSED, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)


def check_chat(answer: object) -> None:
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", REVERSED)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)


def check_texts(chunks: list) -> None:
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == REVERSED
    assert (last.choices, last.usage.completion_tokens) == ([], 6)


def check_chunks(chunks: list) -> None:
    *deltas, last = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == REVERSED
    assert deltas[-1].choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.total_tokens) == ([], 12)


def check_errors(client: openai.OpenAI, url: str) -> None:
    refused(openai.NotFoundError, "model", client.completions.create, model="nope", prompt="x")
    refused(openai.BadRequestError, "messages", client.chat.completions.create, **CHAT | NO_IMAGES)
    refused(openai.BadRequestError, None, client.embeddings.create, model="model", input="x")
    limited = client.with_options(timeout=0.01)
    refused(openai.APITimeoutError, None, limited.completions.create, **LONG)
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as other:
        refused(openai.AuthenticationError, None, other.models.list)


NO_IMAGES = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}],
        }
    ]
}


def refused(kind: type, param: str | None, request: object, **fields: object) -> None:
    """Check that a request is refused with this error, which names a field."""
    with pytest.raises(kind) as raised:
        request(**fields)
    assert getattr(raised.value, "param", None) == param
