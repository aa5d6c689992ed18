"""Tests of life-cycle commands and queries: one request each, and its answer."""

import re

import pytest

from loradock.messages import requests as rq
from tests.support.simulation.command_runs import run, run_json

REQUESTS = [
    (["load", "upper", "--path", "a/b", "--replace"], rq.LoadAdapter("", "upper", "a/b", True)),
    (["stage", "upper", "--path", "a/b"], rq.StageAdapter("", "upper", "a/b")),
    (["activate", "upper"], rq.ActivateAdapter("", "upper")),
    (["activate", "upper", "reverse"], rq.ActivateBatch("", ("upper", "reverse"))),
    (["deactivate", "upper"], rq.DeactivateAdapter("", "upper")),
    (["hold", "upper"], rq.HoldAdapter("", "upper")),
    (["release", "upper"], rq.ReleaseAdapter("", "upper")),
    (["evict", "upper"], rq.EvictAdapter("", "upper")),
    (["remove", "upper", "--force"], rq.RemoveAdapter("", "upper", True)),
    (["list"], rq.ListAdapters("", limit=rq.LIST_PAGE_ADAPTERS_MAX)),
    (["show", "upper"], rq.ShowAdapter("", "upper")),
    (["status"], rq.ShowStatus("")),
]


@pytest.mark.parametrize(("arguments", "expected"), REQUESTS, ids=lambda v: str(v)[:30])
def test_each_command_is_one_request_and_prints_its_answer(controller, arguments, expected):
    person = run(*arguments, "--timeout", "7", directory=controller.directory)
    assert person.exit_code == 0, person.output
    assert person.stdout.strip()
    (document,) = run_json(*arguments, "--timeout", "7", directory=controller.directory)
    first, second = controller.received
    assert document["type"]
    assert document["request_id"] == second.request_id
    for sent in (first, second):
        changes = {"request_id": sent.request_id}
        if hasattr(expected, "timeout_ms"):
            changes["timeout_ms"] = 7000
        assert sent == type(expected)(**(fields_of(expected) | changes))


def fields_of(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_answers_as_lines_and_tables(controller):
    def lines(*arguments):
        return run(*arguments, directory=controller.directory).stdout.split("\n")

    assert lines("activate", "upper")[0] == "upper: gpu-slot 2 (generation 5)"
    assert lines("load", "reverse")[0] == "reverse: evicted"
    table = "\n".join(lines("list"))
    assert re.search(r"reverse +evicted +- ", table)
    assert re.search(r"upper +gpu-slot +2 +8 +4 KiB +3 +\d+d ago", table)
    shown = "\n".join(lines("show", "upper"))
    assert re.search(r"fingerprint +(ab){16}\n", shown)
    assert re.search(r"held +no\n", shown)
    status = "\n".join(lines("status"))
    assert re.search(r"engine +e1 \(pid 4242\)\n", status)
    assert re.search(r"device +1 of 8 +4 KiB of 1 GiB", status)


def test_the_list_as_json_has_every_field(controller):
    (document,) = run_json("list", directory=controller.directory)
    assert [view["adapter"] for view in document["adapters"]] == ["reverse", "upper"]
    assert set(document["adapters"][0]) == set(rq.AdapterView.__struct_fields__)
