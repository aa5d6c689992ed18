"""Structured outputs with `openai`: `response_format`, `.parse`, and the helper for streams."""

import json
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
NO_CHOICE = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
}


class Word(BaseModel, extra="forbid"):
    kind: Literal["noun", "verb", "greeting"]
    letters: int = Field(ge=1, le=9)


client = OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])

answer = client.chat.completions.create(response_format=NO_CHOICE, **CHAT)
assert json.loads(answer.choices[0].message.content).keys() == {"ok"}

parsed = client.chat.completions.parse(response_format=Word, **CHAT)
assert isinstance(parsed.choices[0].message.parsed, Word)

with client.chat.completions.stream(response_format=Word, **CHAT) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_completion()
assert {"content.delta", "content.done", "chunk"} <= kinds, kinds
assert isinstance(final.choices[0].message.parsed, Word)
