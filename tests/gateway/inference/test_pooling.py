"""Vectors, scores and labels over HTTP."""

import base64
import math
import struct
from typing import Any

import pytest

from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.gateway.outputs import refuse
from tests.support.gateway.served import Served


def test_embeddings_are_numbers_in_order(served: Served) -> None:
    body = {"model": "upper", "input": ["a", "b", "c"], "encoding_format": "float"}
    answer = served.post("/v1/embeddings", body).json()
    assert [item["embedding"] for item in answer["data"]] == [[0.0, 1.5], [1.0, 1.5], [2.0, 1.5]]
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 5
    assert answer["model"] == "upper"


def test_base64_stands_for_the_same_numbers(served: Served) -> None:
    body = {"input": "a", "encoding_format": "base64"}
    [item] = served.post("/v1/embeddings", body).json()["data"]
    assert struct.unpack("<2f", base64.b64decode(item["embedding"])) == (0.0, 1.5)


@pytest.mark.parametrize(
    ("given", "sent"), [("a", ("a",)), ([1, 2], ((1, 2),)), ([[1], [2]], ((1,), (2,)))]
)
def test_inputs_are_texts_or_token_ids(served: Served, given: Any, sent: Any) -> None:
    served.post("/v1/embeddings", {"input": given})
    [request] = served.controller.requests(rq.Embed)
    assert request.inputs == sent


def test_a_classification_has_labels_and_scores(served: Served) -> None:
    answer = served.post("/classify", {"input": ["a", "b"]}).json()
    assert answer["labels"] == ["good", "bad"]
    assert answer["data"][0] == {"index": 0, "label": "bad", "probs": [0.0, 1.5], "num_classes": 2}


def test_pooling_is_what_the_model_was_loaded_for(served: Served) -> None:
    assert served.post("/pooling", {"input": "a"}).json()["data"][0]["data"] == [0.0, 1.5]
    refuse(served, ErrorCode.NOT_SERVED, rq.Embed)
    assert served.post("/pooling", {"input": "a"}).json()["data"][0]["data"] == [0.0, 1.5]
    response = served.post("/v1/embeddings", {"input": "a"})
    assert response.status_code == 400
    assert response.headers["x-loradock-code"] == "L016"


def test_scores_are_cosines(served: Served) -> None:
    answer = served.post("/score", {"text_1": "a", "text_2": ["a", "b"]}).json()
    [same, other] = [item["score"] for item in answer["data"]]
    assert math.isclose(same, 1.0)
    # The stand-in's vectors are (0, 1.5) and (1, 1.5).
    assert math.isclose(other, 2.25 / (1.5 * math.sqrt(3.25)))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/classify", {"input": "a", "dimensions": 8}, "dimensions"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        (
            "/rerank",
            {"query": "a", "documents": "b", "max_tokens_per_doc": 3},
            "max_tokens_per_doc",
        ),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/classify", {"input": 5}, "input"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_field_is_refused_by_name(served: Served, path: Any, body: Any, param: Any) -> None:
    assert served.refused(path, body)["param"] == param


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ordered_by_their_similarity_to_the_query(served: Served, path: Any) -> None:
    body = {"query": "q", "documents": ["far", "q", "near"], "return_documents": True}
    answer = served.post(path, body).json()
    # The stand-in's vectors are (0, 1.5), (1, 1.5), (2, 1.5), in the order of the different texts.
    assert [one["index"] for one in answer["results"]] == [1, 0, 2]
    assert answer["results"][0]["document"]["text"] == "q"
    scores = [one["relevance_score"] for one in answer["results"]]
    assert math.isclose(scores[0], 1.0)
    assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["total_tokens"] == 5
    best = served.post(path, {**body, "top_n": 1}).json()["results"]
    assert best == answer["results"][:1]


def test_dimensions_are_the_engines(served: Served) -> None:
    assert served.post("/v1/embeddings", {"input": "a", "dimensions": 8}).status_code == 200
    [request] = served.controller.requests(rq.Embed)
    assert request.dimensions == 8
