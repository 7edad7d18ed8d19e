"""A replay without changes is the measurement; with one cause removed it is what a run without the cause takes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generated_traces import GEMM, GeneratedTrace, finish
from headway.explain.kineto import read_rank
from headway.explain.rank_view import RankView
from headway.explain.replay import Change
from headway.timeline import Kind

TRACES = Path(__file__).parents[2] / "shared" / "traces" / "kineto"
acts = st.lists(
    st.tuples(
        st.sampled_from(["launch", "launch", "launch", "work", "wait"]),
        st.integers(1, 400),
        st.integers(0, 2),
        st.booleans(),
    ),
    min_size=3,
    max_size=40,
)


def played(folder: Path, acts, slower: float = 1.0, waits: bool = True) -> RankView:
    """A trace of ``acts``, the host's work taking ``slower`` times as long."""
    trace = GeneratedTrace()
    trace.launch(GEMM, 10)
    for act, us, stream, after in acts:
        if act == "launch":
            trace.launch(GEMM, us, stream, after=(0, 1, 2) if after else ())
        elif act == "work":
            trace.work(us * slower)
        elif waits:
            trace.synchronise()
    finish(trace)
    (rank,) = read_rank(trace.write(folder / "trace.json"))
    return RankView(rank)


quick = settings(
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@quick
@given(acts)
def test_a_replay_without_changes_gives_the_measured_window_back(tmp_path, acts):
    view = played(tmp_path, acts)
    window = view.window[1] - view.window[0]
    assert view.graph.length_ns() == window
    assert view.graph.length_ns(pessimistic=True) == window


@quick
@given(acts)
def test_less_work_never_takes_longer_and_bounds_are_in_order(tmp_path, acts):
    view = played(tmp_path, acts)
    graph = view.graph
    change = Change(host_ns=np.maximum(graph.before, 0))
    assert graph.length_ns(change) <= graph.length_ns()
    assert graph.length_ns(change, pessimistic=True) <= graph.length_ns(pessimistic=True)
    gain = graph.gain(change)
    assert 0 <= gain.low_us <= gain.high_us <= view.window_us


@quick
@given(acts, st.sampled_from([2.0, 5.0]))
def test_the_bounds_hold_what_the_run_with_less_host_work_really_takes(tmp_path, acts, slower):
    """The same program, its host's work shortened: generated again and replayed."""
    slow = played(tmp_path, acts, slower)
    fast = played(tmp_path, acts)
    graph = slow.graph
    # Work lies between calls; launches and operators keep their time. The wait at the end may lie outside.
    slow_calls, fast_calls = (np.flatnonzero(~view.graph.on_device) for view in (slow, fast))
    count = min(len(slow_calls), len(fast_calls))
    less = np.zeros(len(graph), dtype=np.int64)
    less[slow_calls[:count]] = graph.before[slow_calls[:count]] - fast.graph.before[fast_calls[:count]]
    gain = graph.gain(Change(host_ns=less))
    really = slow.window_us - fast.window_us
    assert gain.low_us - 25 * len(acts) ** 0.5 <= really <= gain.high_us + 25 * len(acts) ** 0.5


@pytest.mark.skipif(not TRACES.exists(), reason="the public traces are not here")
@pytest.mark.parametrize("name", ["dlrm_8rank/worker7_step_12.pt.trace.json.gz", "vit_2of128/sampled_rank-0.json.gz"])
def test_public_traces_are_given_back_to_the_nanosecond(name):
    (trace,) = read_rank(TRACES / name)
    view = RankView(trace)
    assert view.graph.share_of_window == 1
    assert view.graph.length_ns() == view.graph.length_ns(pessimistic=True) == view.window[1] - view.window[0]


def test_a_call_that_waits_ends_with_what_it_waits_for(tmp_path):
    """The kernel shrinks: the host, which waited for it, goes on earlier."""
    trace = GeneratedTrace()
    trace.launch(GEMM, 5_000)
    trace.synchronise()
    trace.work(1_000)
    trace.launch(GEMM, 100)
    finish(trace)
    (rank,) = read_rank(trace.write(tmp_path / "trace.json"))
    view = RankView(rank)
    first = view.graph.places == view.device[0]
    gain = view.graph.gain(Change(device_ns=np.where(first, 4_000_000, 0)))
    assert gain.low_us == gain.high_us == pytest.approx(4_000)


def test_of_long_traces_whole_steps_are_replayed_and_gains_told_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr("headway.explain.replay.MOST_SPANS", 50)
    trace = GeneratedTrace()
    for number in range(10):
        with trace.step(number):
            for _ in range(20):
                trace.work(100)
                trace.launch(GEMM, 10)
    finish(trace)
    (rank,) = read_rank(trace.write(tmp_path / "trace.json"))
    view = RankView(rank)
    assert view.graph.on_device.sum() == 40
    assert view.graph.share_of_window == pytest.approx(0.2, abs=0.02)
    gain = view.graph.gain(Change(host_ns=np.where(view.graph.on_device, 0, np.minimum(view.graph.before, 50_000))))
    assert gain.low_us == pytest.approx(0.5 * view.window_us * 100 / 108, rel=0.05)
    assert view.timeline.kinds(Kind.COMPUTE).sum() == 200
