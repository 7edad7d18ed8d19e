"""Traces that are cut, flipped or of wrong types never end in a traceback: a message, and nothing concluded."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from generated_traces import GEMM, POINTWISE, GeneratedTrace, finish
from headway.errors import UserError
from headway.explain import explain
from soak import soak

ODD: list[Any] = [None, True, -1, 0, 1e300, float("nan"), float("inf"), 2**70, "x", "-", [], {}, [1], {"a": []}, ""]


def trace() -> dict[str, Any]:
    """A trace with something of everything that is looked at."""
    made = GeneratedTrace(world=2)
    for number in range(3):
        with made.step(number):
            with made.scope("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                made.work(2_000)
            made.launch("Memcpy HtoD (Pageable -> Device)", 50, operator="aten::copy_")
            for _ in range(3):
                made.launch(GEMM, 300, operator="aten::mm")
                made.launch(POINTWISE, 80, operator="aten::add")
            with made.scope("aten::item", "cpu_op"):
                made.launch("Memcpy DtoH (Device -> Pageable)", 1, operator="aten::_local_scalar_dense")
                made.synchronise()
            made.collective("all_gather", made.now + 400)
            with made.scope("Optimizer.step#AdamW.step"):
                made.launch(POINTWISE, 5, operator="aten::addcmul_")
            made.host("overhead", "Activity Buffer Request", 20)
            made.host("python_function", "Python GC", 20)
    finish(made)
    return {**made.facts, "traceEvents": made.events}


def mutated(members: dict[str, Any], chance: random.Random) -> bytes:
    """The trace with some values of events or facts exchanged, events lost, its text cut or flipped."""
    events = members["traceEvents"]
    for _ in range(chance.randint(0, 6)):
        event = chance.choice(events)
        if not isinstance(event, dict):
            continue
        way = chance.randrange(6)
        if way == 0:
            event[chance.choice(list(event) or ["ts"])] = chance.choice(ODD)
        elif way == 1 and isinstance(event.get("args"), dict):
            event["args"][chance.choice([*event["args"], "correlation", "External id", "Seq"])] = chance.choice(ODD)
        elif way == 2:
            event.pop(chance.choice(list(event) or ["ts"]), None)
        elif way == 3:
            events[chance.randrange(len(events))] = chance.choice(ODD)
        elif way == 4:
            members[chance.choice(["deviceProperties", "distributedInfo", "schemaVersion"])] = chance.choice(ODD)
        elif isinstance(event.get("ts"), float | int):
            event["ts"] = chance.choice([-1, 1, 1000, 1e12]) * event["ts"]
    text = bytearray(json.dumps(members).encode())
    if chance.random() < 0.5:
        for _ in range(chance.randint(1, 8)):
            text[chance.randrange(len(text))] = chance.randrange(256)
    if chance.random() < 0.3:
        del text[chance.randrange(len(text)) :]
    return bytes(text)


@pytest.mark.parametrize(("seed", "cases"), [(1, 150), soak(2, 10_000)])
def test_a_mutated_trace_is_a_report_or_a_line(tmp_path, seed, cases):
    path = tmp_path / "trace.json"
    chance = random.Random(seed)
    plain = json.dumps(trace())
    for case in range(cases):
        path.write_bytes(mutated(json.loads(plain), chance))
        refused = ""
        try:
            report = explain([path])
        except UserError as error:
            refused = str(error)
        if refused:
            assert len(refused.splitlines()) == 1, case
            continue
        result = report.as_json()
        json.dumps(result, allow_nan=False)
        for rank in result["ranks"]:
            assert 0 <= rank["busy_us"] <= rank["window_us"], case
            assert abs(sum(rank["idle_by_cause_us"].values()) - rank["idle_us"]) < 1e-3, case
        if report.verdict == "inconclusive":
            assert not report.explained.findings, case


def test_two_ranks_of_which_one_is_mutated(tmp_path):
    """What compares ranks holds with one that is broken."""
    chance = random.Random(7)
    plain = json.dumps(trace())
    (tmp_path / "rank0.json").write_text(plain)
    other: Path = tmp_path / "rank1.json"
    for _ in range(10):
        members = json.loads(plain)
        members["distributedInfo"]["rank"] = 1
        other.write_bytes(mutated(members, chance))
        json.dumps(explain([tmp_path]).as_json(), allow_nan=False)
