"""The documents list the models, layers and adapters of the tables."""

import pytest
import torch
import transformers

from tests.matrix import MINORS, count_verdicts
from tests.support.models.causal_configs import NOT_BUILDABLE, build_model
from tests.support.models.causal_parity import Judgement, Outcome, Verdict
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


@pytest.mark.parametrize(
    ("manager", "server", "counts"),
    [
        ("equal", "equal", (1, 0, ())),
        ("equal", "refused", (0, 1, ())),
        ("equal", "differs", (0, 0, ("llama",))),
        ("equal", "fails", (0, 0, ("llama",))),
        ("differs", "equal", (1, 0, ("llama",))),
        ("fails", "refused", (0, 1, ("llama",))),
    ],
)
def test_the_matrix_names_every_wrong_architecture(
    manager: Verdict, server: Verdict, counts: tuple[int, int, tuple[str, ...]]
) -> None:
    """Also one that is wrong in process alone, or that raises."""
    wrong = Judgement("llama", manager=Outcome(manager, ""), server=Outcome(server, ""))
    assert count_verdicts([Judgement("gemma3n", missing="timm"), wrong]) == counts


def test_only_the_text_between_the_marks_is_replaced() -> None:
    fresh = with_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "new")
    assert fresh == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    with pytest.raises(ValueError, match="marks"):
        with_text("no marks", "new")
