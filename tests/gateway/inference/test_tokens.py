"""Token ids of texts and chats, and back."""

import pytest
from msgspec import structs

from loradock.gateway.inference.chat import ChatRequest
from loradock.gateway.inference.prompts import PromptFields
from loradock.gateway.inference.tokens import TokenizeRequest


def test_tokens_and_their_text(served):
    answer = served.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "Ã", "©"],
    }
    assert served.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé"}


def test_tokens_of_a_chat(served):
    answer = served.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(answer["tokens"]) == b"<user>a<assistant>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {"tokens": [2**40]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
def test_wrong_bodies_are_refused(served, path, body):
    assert served.post(path, body).status_code == 400


def test_unknown_models_are_not_found(served):
    assert served.post("/tokenize", {"prompt": "a", "model": "nope"}).status_code == 404
    assert served.post("/detokenize", {"tokens": [1], "model": "nope"}).status_code == 404


def test_unknown_token_ids_have_no_text(served):
    assert served.post("/detokenize", {"tokens": [100_000]}).json() == {"prompt": ""}


def test_a_chat_has_the_same_fields_as_its_generation():
    """Structs can't have fields from two bases, so both list them."""
    names = set(PromptFields.__annotations__)
    chat, tokens = (
        {one.name: (one.type, one.default) for one in structs.fields(kind) if one.name in names}
        for kind in (ChatRequest, TokenizeRequest)
    )
    assert chat.keys() == tokens.keys() == names
    # One needs messages, and the other has them or a text.
    del chat["messages"], tokens["messages"]
    assert chat == tokens
