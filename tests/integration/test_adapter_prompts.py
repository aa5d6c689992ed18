"""Adapters that PEFT and `transformers` saved with a tokenizer, served and compared with both."""

import asyncio
import shutil

import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from loradock.client import Client
from tests.support.engine.serve_process import serve
from tests.support.parallel.processes import TINY
from tests.support.waiting import HANG_S, wait_until

MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "olleh"},
    {"role": "user", "content": "adapter"},
]
OF_MODEL = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
OWN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.content | upper }}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
TOKENS = 8


class Trained:
    """A base model, and adapters in directories beside it."""

    def __init__(self, directory):
        self.root, self.model = directory / "adapters", directory / "base"
        shutil.copytree(TINY / "model", self.model)
        self.tokenizer(OF_MODEL).save_pretrained(self.model)

    def tokenizer(self, template, **changes):
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        tokenizer.chat_template = template
        tokenizer.add_special_tokens(changes)
        return tokenizer

    def save(self, name, seed, tokenizer=None):
        """Save an adapter with random weights, and with a tokenizer, as a trainer does."""
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(self.model), config)
        model.save_pretrained(self.root / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(self.root / name)
        return self.root / name

    def answer(self, name, template):
        """Return what the library generates for the chat, with an adapter or without one."""
        model = AutoModelForCausalLM.from_pretrained(self.model)
        if name is not None:
            model = PeftModel.from_pretrained(model, self.root / name)
        tokenizer = self.tokenizer(template)
        inputs = tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        output = tokens[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(output, skip_special_tokens=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prompts")
    trained = Trained(directory)
    trained.save("own", 1, trained.tokenizer(OWN))
    trained.save("plain", 2)
    options = ("--max-loras", "2", "--max-lora-rank", "8", "--http", "127.0.0.1:0")
    options += ("--adapter-root", str(trained.root), "--allow-runtime-lora-updating")
    for name in ("own", "plain"):
        options += ("--lora-modules", f"{name}={trained.root / name}")
    with serve(directory / "d", *options, model=trained.model):
        log = directory / "d.log"
        wait_until(lambda: "the gateway serves" in log.read_text(), lambda: log.stat().st_size)
        [line] = [line for line in log.read_text().splitlines() if "the gateway serves" in line]
        trained.directory, trained.url = directory / "d", f"{line.partition('url=')[2].strip()}v1"
        yield trained


def client_of(served):
    return openai.AsyncOpenAI(base_url=served.url, api_key="none", timeout=HANG_S)


async def chat(client, model):
    answer = await client.chat.completions.create(
        model=model, messages=MESSAGES, max_completion_tokens=TOKENS, temperature=0
    )
    return answer.choices[0].message.content


def test_each_model_is_prompted_as_it_was_trained(served):
    expected = {
        "base": served.answer(None, OF_MODEL),
        "own": served.answer("own", OWN),
        "plain": served.answer("plain", OF_MODEL),
    }
    # Otherwise the wrong template could not be told from the right one.
    assert served.answer("own", OF_MODEL) != expected["own"]

    async def use():
        async with client_of(served) as client:
            models = await client.models.list()
            while len(models.data) < len(expected):
                models = await client.models.list()
            asked = [*expected] * 4
            return asked, await asyncio.gather(*(chat(client, model) for model in asked))

    asked, answers = asyncio.run(use())
    assert answers == [expected[model] for model in asked]


def test_an_adapter_that_is_replaced_has_its_new_template(served):
    served.save("changing", 3, served.tokenizer(OWN))
    path = str(served.root / "changing")

    async def load(client):
        body = {"lora_name": "changing", "lora_path": path, "load_inplace": True}
        await client.post("/load_lora_adapter", body=body, cast_to=str)

    async def use():
        async with client_of(served) as client:
            await load(client)
            first = await chat(client, "changing")
            assert first == served.answer("changing", OWN)
            served.save("changing", 4)
            await load(client)
            assert await chat(client, "changing") == served.answer("changing", OWN)
            served.tokenizer(OF_MODEL).save_pretrained(path)
            await load(client)
            assert await chat(client, "changing") == served.answer("changing", OF_MODEL)

    asyncio.run(use())


def test_an_output_ends_at_the_end_token_that_was_saved(served):
    tokenizer = served.tokenizer(OWN)
    # Some random weights end the output at once.
    for seed in range(5, 50):
        path = served.save("ended", seed, tokenizer)
        tokens = tokenizer.encode(served.answer("ended", OWN), add_special_tokens=False)
        if len(set(tokens)) > 1:
            break
    token = next(token for token in tokens if token != tokens[0])
    GenerationConfig(eos_token_id=[258, token]).save_pretrained(path)

    async def use():
        async with client_of(served) as client:
            body = {"lora_name": "ended", "lora_path": str(path)}
            await client.post("/load_lora_adapter", body=body, cast_to=str)
            return await client.chat.completions.create(
                model="ended", messages=MESSAGES, max_completion_tokens=TOKENS, temperature=0
            )

    [choice] = asyncio.run(use()).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == tokenizer.decode(tokens[: tokens.index(token)])


def test_added_tokens_that_the_model_lacks_are_named_where_the_adapter_is_shown(served):
    tokenizer = served.tokenizer(OWN, eos_token="<|im_end|>")
    path = served.save("added", 6, tokenizer)
    with Client(served.directory, timeout_s=HANG_S) as client:
        done = client.load("added", str(path))
        [warning] = done.warnings
        assert "'<|im_end|>'" in warning
        assert client.show("added").adapter.warnings == (warning,)
        assert client.show("own").adapter.warnings == ()
