"""The page of a report needs no network, draws all the time there is, and keeps what files say as text."""

import json
import re
from pathlib import Path

import pytest

from generated_traces import GEMM, POINTWISE, GeneratedTrace, finish
from headway.explain import explain, page, write_page
from headway.explain.drawn_lanes import COLOURS
from headway.explain.page import page_data

ROOT = Path(__file__).parent.parent


def trace(path: Path, rank: int = 0, world: int = 1, name: str = GEMM) -> Path:
    made = GeneratedTrace(rank=rank, world=world)
    for number in range(4):
        with made.step(number):
            with made.scope("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
                made.work(3_000)
            for _ in range(40):
                made.launch(name, 60)
                made.launch(POINTWISE, 20, stream=9)
            made.synchronise()
    finish(made)
    return made.write(path)


def covered(lane) -> int:
    return sum(end - start for start, end in zip(lane["start"], lane["end"], strict=True))


@pytest.mark.parametrize("most", [24_000, 100])
def test_lanes_cover_the_window_however_few_spans_they_are_drawn_with(monkeypatch, tmp_path, most):
    monkeypatch.setattr(page, "SPANS", most)
    report = explain([trace(tmp_path / "trace.json")])
    (rank,) = page_data(report)["lanes"]
    lanes = {lane["name"]: lane for lane in rank["lanes"]}
    assert list(lanes) == ["idle by", "stream 7", "stream 9"]
    budget = report.explained.ranks[0]
    assert rank["length_ns"] == pytest.approx(1000 * budget["window_us"])
    assert covered(lanes["stream 7"]) == pytest.approx(4 * 40 * 60_000, rel=0.01)
    assert covered(lanes["idle by"]) == pytest.approx(1000 * budget["idle_us"], rel=0.02)
    assert sum(lanes["stream 7"]["count"]) == 160
    drawn = sum(len(lane["start"]) for lane in lanes.values())
    assert drawn > 300 if most > 1_000 else drawn <= 200
    assert "data_wait" in {COLOURS[code] for code in lanes["idle by"]["colour"]}


def test_the_page_needs_nothing_else_and_keeps_names_as_text(tmp_path):
    report = explain([trace(tmp_path / "trace.json", name="gemm</script><b>x")])
    write_page(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "http://" not in text
    assert "https://" not in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert "gemm</script>" not in text
    data = json.loads(re.search(r"^const data = (.*);$", text, flags=re.M)[1])
    assert any(kernel["name"].startswith("gemm</script>") for kernel in data["kernels"])
    assert data["findings"][0]["id"] == "data-loader-stall"


def test_the_page_has_a_colour_for_everything_that_is_drawn():
    template = (ROOT / "src" / "headway" / "explain" / "page.html").read_text()
    for theme in template.split("prefers-color-scheme: dark")[:2]:
        assert {name for name in COLOURS if f"--{name}:" not in theme} == set()


def test_ranks_are_drawn_on_one_clock_and_the_first_ones_only(monkeypatch, tmp_path):
    monkeypatch.setattr(page, "RANKS_DRAWN", 2)
    for rank in range(3):
        trace(tmp_path / f"rank{rank}.json", rank, world=3)
    data = page_data(explain([tmp_path]))
    assert [rank["rank"] for rank in data["lanes"]] == [0, 1]
    assert len(data["ranks"]) == 3


def test_without_device_events_the_page_tells_why(tmp_path):
    made = GeneratedTrace()
    made.host("cpu_op", "aten::mm", 10)
    report = explain([made.write(tmp_path / "trace.json")])
    data = page_data(report)
    assert data["lanes"] == []
    assert data["health"]["verdict"] == "inconclusive"


def test_memory_is_drawn_with_its_highest_value_in_each_short_while(tmp_path):
    made = GeneratedTrace()
    with made.step(0):
        for _ in range(50):
            made.launch(GEMM, 100)
    begin = made.streams[7] - 5_000
    totals = [number * 7 % 1_000_003 for number in range(20_000)]
    for number, total in enumerate(totals):
        args = {"Total Allocated": total, "Device Type": 1, "Device Id": 0}
        made.events.append(
            {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": begin + number * 0.25, "args": args}
        )
    finish(made)
    (rank,) = page_data(explain([made.write(tmp_path / "trace.json")]))["lanes"]
    memory = rank["memory"]
    assert 500 < len(memory["at"]) <= 1_001
    assert max(memory["bytes"]) == max(totals)
    assert memory["at"] == sorted(memory["at"])
    assert not memory["on_host"]


def test_a_trace_without_memory_has_no_curve(tmp_path):
    (rank,) = page_data(explain([trace(tmp_path / "trace.json")]))["lanes"]
    assert rank["memory"] is None


def test_the_devices_of_an_nsight_export_have_lanes():
    data = page_data(explain([ROOT.parent / "shared" / "traces" / "nsys" / "h100_2gpu_1s.sqlite"]))
    assert [rank["rank"] for rank in data["lanes"]] == [rank["rank"] for rank in data["ranks"]]
    assert all(any("stream" in lane["name"] for lane in rank["lanes"]) for rank in data["lanes"])
