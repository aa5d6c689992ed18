"""litellm as a library: both of its providers for such servers, streams, errors, fallbacks."""

import asyncio
import os

import litellm

MODEL, API_KEY = os.environ["MODEL"], os.environ["API_KEY"]
ADDRESS = {"api_base": os.environ["BASE_URL"], "api_key": API_KEY}
SHORT = {"api_base": os.environ["SHORT_BASE_URL"], "api_key": API_KEY}
HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "a" * 100}]
OPTIONS = {"temperature": 0, "max_tokens": 16}


def use_provider(provider: str) -> None:
    model = f"{provider}/{MODEL}"
    answer = litellm.completion(model=model, messages=HELLO, **OPTIONS, **ADDRESS)
    assert answer.choices[0].message.content == "olleh"
    chunks = litellm.completion(model=model, messages=HELLO, stream=True, **OPTIONS, **ADDRESS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "olleh"
    text = litellm.text_completion(model=model, prompt="hello>", **OPTIONS, **ADDRESS)
    assert text.choices[0].text == "olleh"
    try:
        litellm.completion(model=model, messages=LONG, **OPTIONS, **SHORT)
        raise AssertionError("a prompt that is longer than the context must be refused")
    except litellm.ContextWindowExceededError as error:
        assert error.status_code == 400
    try:
        litellm.completion(model=f"{provider}/missing", messages=HELLO, **ADDRESS)
        raise AssertionError("an unknown model must be refused")
    except litellm.NotFoundError:
        pass


def check_fallbacks() -> None:
    """A prompt that a short context refuses is answered by the model with a longer one."""
    router = litellm.Router(
        model_list=[
            {"model_name": "short", "litellm_params": {"model": f"openai/{MODEL}", **SHORT}},
            {"model_name": "long", "litellm_params": {"model": f"openai/{MODEL}", **ADDRESS}},
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    answer = router.completion(model="short", messages=LONG, **OPTIONS)
    assert answer.usage.prompt_tokens > len(LONG[0]["content"])
    answer = asyncio.run(router.acompletion(model="short", messages=LONG, **OPTIONS))
    assert answer.usage.prompt_tokens > len(LONG[0]["content"])


for provider in ("openai", "hosted_vllm"):
    use_provider(provider)
check_fallbacks()
