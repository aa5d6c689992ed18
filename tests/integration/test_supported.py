"""The documents list the models, layers and adapters of the tables."""

import pytest
import torch
import transformers

from tests.matrix import MINORS
from tests.support.models.causal_configs import NOT_BUILDABLE, build_model
from tests.supported import BEGIN, END, ROOT, full, short, with_text

needs_newest = pytest.mark.skipif(
    not transformers.__version__.startswith(f"{MINORS[-1]}."),
    reason=f"the documents are those of transformers {MINORS[-1]}",
)


@needs_newest
@pytest.mark.parametrize(("name", "text"), [("SUPPORTED.md", full), ("README.md", short)])
def test_the_documents_are_up_to_date(name: str, text: object) -> None:
    document = (ROOT / name).read_text()
    assert with_text(document, text()) == document, "run `make supported`"


@pytest.mark.parametrize("model_type", NOT_BUILDABLE)
def test_models_that_are_not_built_can_not_be_built(model_type: str) -> None:
    """Or, from 5.24 on, they are built and can't generate."""
    with pytest.raises((ImportError, ValueError), match=r"timm|layer types|get_seq_length"):
        build_model(model_type).generate(torch.arange(5)[None], max_new_tokens=2)


def test_only_the_text_between_the_marks_is_replaced() -> None:
    fresh = with_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "new")
    assert fresh == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="marks"):
        with_text("no marks", "new")
