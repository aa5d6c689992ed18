"""The table of vLLM's metric families is what a gateway serves."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.documented_metrics import ADDED, BEGIN, END, METRICS, text
from tests.support.documents import between_marks

DOCUMENT = Path(__file__).parents[3] / "docs" / "from-vllm.md"


def families(served):
    served.post("/v1/completions", {"model": "upper", "prompt": "p"})
    found = text_string_to_metric_families(served.get("/metrics").text)
    return {family.name: family for family in found if family.name.startswith("vllm:")}


def test_what_is_served_is_in_the_table_and_nothing_else(served):
    expected = {f"vllm:{one.name}" for one in METRICS if one.scope}
    assert set(families(served)) == expected | {f"vllm:{name}" for name in ADDED}


def test_types_and_labels_are_those_of_the_table(served):
    found = families(served)
    for one in METRICS:
        if one.scope:
            family = found[f"vllm:{one.name}"]
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            assert (family.type, labels) == (one.kind, {*one.common, *one.labels}), one.name


def test_what_is_not_served_has_a_reason_and_no_family_is_listed_twice():
    assert all(one.note for one in METRICS if not one.scope)
    assert len({one.name for one in METRICS}) == len(METRICS)


def test_the_document_is_up_to_date():
    document = DOCUMENT.read_text()
    written = between_marks(document, BEGIN, END, text())
    assert written == document, "run python -m tests.documented_metrics docs/from-vllm.md"
