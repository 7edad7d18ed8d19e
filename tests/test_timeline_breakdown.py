"""The breakdown of a rank's time is exact, adds up, and is that of independent arithmetic on real traces."""

import gzip
import json
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.timeline import DEVICE_KINDS, Kind, Timeline, attributed_ns, breakdown, difference, read_chrome_trace

HERE = Path(__file__).parent
TRACES = HERE.parent.parent / "shared" / "traces"
EXPECTED = TRACES / "kineto" / "expected.json"
SMALL = HERE / "traces" / "dlrm_rank7of8.json.gz"
IN_FLOATS = {"v100_ns_resolution.json.gz"}
"""Its times since 1970 were added up in float64, which holds them to 0.25 us: the percentages are that exact."""

END = 30
instants = st.integers(0, END)
spans = st.lists(
    st.tuples(st.sampled_from([*DEVICE_KINDS, Kind.OPERATOR]), instants, instants, st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


def timeline_of(items, **columns) -> Timeline:
    return Timeline.of(
        kind=[kind for kind, *_ in items],
        start_ns=[min(a, b) for _, a, b, _ in items],
        duration_ns=[abs(b - a) for _, a, b, _ in items],
        lane=[f"stream {lane}" for *_, lane in items],
        **columns,
    )


def covered(items, *kinds) -> np.ndarray:
    instants = np.zeros(END, dtype=bool)
    for kind, a, b, _ in items:
        if kind in kinds:
            instants[min(a, b) : max(a, b)] = True
    return instants


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(spans)
def test_the_breakdown_agrees_with_counting_instants(items):
    found = breakdown(timeline_of(items), window=(0, END))
    compute, talk, memory = (covered(items, kind) for kind in DEVICE_KINDS)
    assert found.window_ns == END
    assert found.compute_ns == compute.sum()
    assert found.communication_ns == talk.sum()
    assert found.memory_ns == memory.sum()
    assert found.busy_ns == (compute | talk | memory).sum()
    assert found.idle_ns == END - found.busy_ns
    assert found.exposed_communication_ns == (talk & ~compute).sum()
    assert found.alone_communication_ns == (talk & ~compute & ~memory).sum()
    assert found.overlap_ns == (talk & compute).sum()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(spans, instants, instants)
def test_what_spans_stand_for_adds_up_to_the_busy_time_of_any_window(items, first, second):
    window = (min(first, second), max(first, second))
    timeline = timeline_of(items)
    shares = attributed_ns(timeline, window)
    whole = breakdown(timeline, window)
    assert (shares >= 0).all()
    assert shares.sum() == whole.busy_ns
    assert shares[timeline.kinds(Kind.COMPUTE)].sum() == whole.compute_ns
    assert shares[timeline.kinds(Kind.COMMUNICATION)].sum() == whole.alone_communication_ns
    assert (shares[~timeline.kinds(*DEVICE_KINDS)] == 0).all()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(spans, spans)
def test_the_changes_of_all_causes_add_up_to_the_change_of_the_window(before, after):
    first, second = (timeline_of(items, module="blocks.0", axis="dp") for items in (before, after))
    found = difference(first, second, by=("lane", "kind"), windows=((0, END), (0, END + 5)))
    assert found.change_ns == 5
    assert sum(cause.change_ns for cause in found.causes) == 5
    assert sum(cause.before_ns for cause in found.causes) == END
    backwards = difference(second, first, by=("lane", "kind"), windows=((0, END + 5), (0, END)))
    assert {c.key: c.change_ns for c in found.causes} == {c.key: -c.change_ns for c in backwards.causes}


def test_a_slower_collective_is_found_by_axis_and_module_as_far_as_it_is_exposed():
    def step(gather_ns: int) -> Timeline:
        return Timeline.of(
            kind=[Kind.COMPUTE, Kind.COMMUNICATION, Kind.COMPUTE],
            start_ns=[0, 50, 50 + gather_ns],
            duration_ns=[100, gather_ns, 40],
            lane=["compute", "dp_shard", "compute"],
            name=["mm", "all_gather", "mm"],
            module=["blocks.0", "blocks.1", "blocks.1"],
            axis=["", "dp_shard", ""],
        )

    found = difference(step(70), step(140), by=("kind", "axis", "module"))
    assert found.change_ns == 70
    worst, *others = found.causes
    assert worst.key == ("communication", "dp_shard", "blocks.1")
    assert (worst.before_ns, worst.after_ns) == (20, 90)
    assert all(cause.change_ns == 0 for cause in others)


def test_without_communication_there_is_no_overlap_to_show():
    found = breakdown(timeline_of([(Kind.COMPUTE, 3, 9, 0)]))
    assert found.overlap_percent is None
    assert found.percent_of_window(found.busy_ns) == 100


def test_a_timeline_of_two_ranks_or_of_none_has_no_breakdown():
    both = timeline_of([(Kind.COMPUTE, 0, 9, 0), (Kind.COMPUTE, 0, 5, 0)], rank=[0, 1])
    with pytest.raises(ValueError, match="holds 2: take of_rank"):
        breakdown(both)
    assert breakdown(both.of_rank(1)).busy_ns == 5
    with pytest.raises(ValueError, match="no spans"):
        breakdown(both.select(both.kinds(Kind.MEMORY)))


def trace_of_rank(key: str, rank: str) -> Path:
    path = TRACES / key
    if path.is_dir():
        path = next(file for file in path.glob("*.gz") if re.search(rf"(worker|rank-){rank}[._]", file.name))
    return path


def expected_breakdowns() -> list:
    if not EXPECTED.exists():
        return []
    table = json.loads(EXPECTED.read_text())
    return [(trace_of_rank(key, rank), answers) for key, ranks in table.items() for rank, answers in ranks.items()]


@pytest.mark.skipif(not EXPECTED.exists(), reason="the public traces are not beside the checkout")
@pytest.mark.parametrize(("path", "answers"), expected_breakdowns(), ids=lambda item: getattr(item, "name", ""))
def test_the_breakdown_of_public_traces_is_the_known_one(path, answers):
    trace = read_chrome_trace(path)
    assert not trace.truncated
    assert trace.left_out["malformed"] == 0
    found = breakdown(trace.timeline)
    percent = found.percent_of_window
    tolerance = 0.006 if path.name in IN_FLOATS else 0.001
    assert trace.timeline.kinds(*DEVICE_KINDS).sum() == answers["n_gpu"]
    assert percent(found.idle_ns) == pytest.approx(answers["idle_pct"], abs=tolerance)
    assert percent(found.compute_ns) == pytest.approx(answers["compute_pct"], abs=tolerance)
    assert found.overlap_percent == (
        None if answers["overlap_pct"] is None else pytest.approx(answers["overlap_pct"], abs=tolerance)
    )
    exposed = 100 * answers["exposed_comm_vs_comp_or_mem_us"] / answers["kernel_time_us"]
    assert percent(found.alone_communication_ns) == pytest.approx(exposed, abs=tolerance)
    steps = trace.timeline.step
    assert len(np.unique(steps[steps >= 0])) == answers["steps"]


def exact_union_us(events) -> Decimal:
    """Length of the union, in exact decimal arithmetic, one interval after the other."""
    total, reach = Decimal(0), None
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        begin = start if reach is None else max(start, reach)
        total += max(end - begin, Decimal(0))
        reach = end if reach is None else max(reach, end)
    return total


def nanosecond_traces() -> list[Path]:
    return [path for path in [TRACES / "kineto" / "v100_ns_resolution.json.gz"] if path.exists()]


@pytest.mark.parametrize("path", [SMALL, *nanosecond_traces()], ids=lambda path: path.name)
def test_unions_equal_decimal_arithmetic_to_the_nanosecond(path):
    text = gzip.decompress(path.read_bytes())
    events = json.loads(text, parse_float=Decimal, parse_int=Decimal)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    device = [event for event in complete if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    copies = [event for event in device if event["cat"] != "kernel"]
    talks = [event for event in device if event["name"].startswith("nccl")]
    found = breakdown(read_chrome_trace(path).timeline)
    assert found.busy_ns == 1000 * exact_union_us(device)
    assert found.memory_ns == 1000 * exact_union_us(copies)
    assert found.communication_ns == 1000 * exact_union_us(talks)
    assert found.window_ns == 1000 * (max(e["ts"] + e["dur"] for e in device) - min(e["ts"] for e in device))
