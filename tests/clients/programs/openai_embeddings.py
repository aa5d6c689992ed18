"""Embeddings with `openai`, which asks for base64 unless told otherwise."""

import math
import os

from openai import BadRequestError, OpenAI

client = OpenAI(base_url=os.environ["EMBED_BASE_URL"], api_key=os.environ["API_KEY"])
model = client.models.list().data[0].id
texts = ["hello", "adapter", "hello"]

packed = client.embeddings.create(model=model, input=texts)
plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
assert [item.index for item in packed.data] == [0, 1, 2]
for one, other in zip(packed.data, plain.data, strict=True):
    assert all(map(math.isclose, one.embedding, other.embedding))
assert packed.data[0].embedding == packed.data[2].embedding != packed.data[1].embedding
assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0

generating = OpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
try:
    generating.embeddings.create(model=os.environ["MODEL"], input="hello")
    raise AssertionError("a model that generates must refuse embeddings")
except BadRequestError:
    pass
