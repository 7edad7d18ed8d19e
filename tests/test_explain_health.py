"""A trace that can't be believed is said to be inconclusive, and why, before anything is concluded from it."""

import json
from pathlib import Path

import pytest

from generated_traces import GEMM, GeneratedTrace, finish, plain_step
from headway.explain import explain

TRACES = Path(__file__).parents[2] / "shared" / "traces" / "kineto"


def healthy(steps: int = 4, **options) -> GeneratedTrace:
    trace = GeneratedTrace(**options)
    for number in range(steps):
        plain_step(trace, number)
    finish(trace)
    return trace


def health(trace: GeneratedTrace, folder: Path) -> tuple[str, dict[str, str]]:
    report = explain([trace.write(folder / "trace.json")])
    return report.verdict, {message.id: message.severity.value for message in report.explained.health}


def kernels(trace: GeneratedTrace) -> list[dict]:
    return [event for event in trace.events if event["cat"] == "kernel"]


def test_a_healthy_trace_has_nothing_to_tell(tmp_path):
    assert health(healthy(), tmp_path) == ("sound", {})


@pytest.mark.parametrize(("lost", "verdict"), [(30, "inconclusive"), (2, "caveats"), (0, "sound")])
def test_launches_without_kernels(tmp_path, lost, verdict):
    trace = healthy(5)
    for event in kernels(trace)[:lost]:
        trace.events.remove(event)
    found, messages = health(trace, tmp_path)
    assert found == verdict
    assert ("missing-kernels" in messages) == (lost > 0)


@pytest.mark.parametrize(("queued", "expected"), [(30, "note"), (1_100, None)])
def test_launches_whose_kernels_come_after_the_recording_are_not_missing(tmp_path, queued, expected):
    """As many as a queue holds; of more the kernels are lost."""
    trace = healthy()
    for _ in range(queued):
        trace.launch(GEMM, 50)
        trace.events.pop()
    verdict, told = health(trace, tmp_path)
    assert told.get("launches-in-flight") == expected
    assert ("missing-kernels" in told) == (expected is None)
    assert (verdict == "sound") == (expected == "note")


def test_all_kernels_missing_is_not_a_trace_of_the_cpu(tmp_path):
    trace = healthy()
    trace.events = [event for event in trace.events if event["cat"] != "kernel"]
    assert health(trace, tmp_path) == ("inconclusive", {"missing-kernels": "failed"})


def test_kernels_without_times_are_left_out_and_told(tmp_path):
    trace = healthy()
    for event in kernels(trace)[5:7]:
        event |= {"ts": 0, "dur": 0}
    verdict, messages = health(trace, tmp_path)
    assert verdict == "inconclusive"
    assert messages["zero-timestamps"] == "failed"
    report = explain([tmp_path / "trace.json"])
    assert report.explained.ranks[0]["window_us"] == pytest.approx(40_000, abs=10)


def test_a_kernel_that_runs_over_several_others_of_its_stream_is_cut(tmp_path):
    trace = healthy()
    kernels(trace)[-5]["dur"] = 1_600_000
    assert health(trace, tmp_path) == ("caveats", {"overrunning-kernels": "warning"})
    report = explain([tmp_path / "trace.json"])
    assert report.explained.ranks[0]["window_us"] == pytest.approx(40_000, abs=10)


def test_one_kernel_that_begins_before_its_predecessor_ends_is_kept_as_it_is(tmp_path):
    trace = healthy()
    kernels(trace)[5]["dur"] += 20
    assert health(trace, tmp_path) == ("caveats", {"stream-overlaps": "warning"})
    assert explain([tmp_path / "trace.json"]).explained.ranks[0]["busy_us"] == pytest.approx(40_000, abs=10)


@pytest.mark.parametrize(("share", "severity"), [(0.5, "failed"), (0.02, "warning")])
def test_kernels_before_their_launch_are_clocks_that_disagree(tmp_path, share, severity):
    trace = healthy()
    for event in kernels(trace)[: int(share * 80)]:
        call = next(e for e in trace.events if e["args"].get("correlation") == event["args"]["correlation"])
        event["ts"] = call["ts"] - 3
        event["dur"] = 1
    assert health(trace, tmp_path)[1]["negative-launch-latency"] == severity


def test_a_step_of_which_half_is_missing_is_told(tmp_path):
    trace = GeneratedTrace()
    plain_step(trace, 0, kernels=4)
    for number in (1, 2, 3):
        plain_step(trace, number)
    finish(trace)
    assert health(trace, tmp_path)[1] == {"truncated-steps": "warning"}


def test_one_wrong_time_is_not_a_long_window(tmp_path):
    trace = healthy()
    kernels(trace)[-1]["ts"] += 1e9
    assert health(trace, tmp_path)[1]["lone-events"] == "failed"


def test_the_profiler_s_own_time_is_told_and_shown_as_its_own(tmp_path):
    trace = healthy()
    trace.host("overhead", "Activity Buffer Request", 8_000)
    trace.work(8_000)
    plain_step(trace, 9)
    finish(trace)
    assert health(trace, tmp_path)[1]["profiler-overhead"] == "warning"
    report = explain([tmp_path / "trace.json"])
    assert report.explained.ranks[0]["idle_by_cause_us"]["profiler"] == pytest.approx(8_000, abs=10)
    assert "profiler-artefact" in {finding.id for finding in report.explained.findings}


def test_one_rank_of_several_can_not_tell_waiting_from_transfer(tmp_path):
    trace = healthy(world=4)
    trace.collective("all_reduce", trace.now + 5_000)
    finish(trace)
    assert health(trace, tmp_path)[1] == {"single-rank": "warning"}


def test_traces_of_different_runs_are_not_laid_side_by_side(tmp_path):
    for rank, world in ((0, 2), (1, 4)):
        trace = healthy(world=world, rank=rank)
        trace.collective("all_reduce", trace.now + 5_000)
        finish(trace)
        trace.write(tmp_path / f"rank{rank}.json")
    report = explain([tmp_path])
    assert report.verdict == "inconclusive"
    assert [message.id for message in report.explained.health] == ["mixed-runs"]
    assert "collectives" not in report.explained.details


def test_a_run_of_several_ranks_without_communication_is_told(tmp_path):
    assert health(healthy(world=4), tmp_path)[1]["no-communication"] == "warning"


@pytest.mark.parametrize("late_us", [9_000, 0])
def test_lateness_before_the_first_collective_may_be_the_profiler_s_start(tmp_path, late_us):
    for rank in range(3):
        trace = GeneratedTrace(rank=rank, world=3)
        for number in range(4):
            with trace.step(number):
                trace.launch(GEMM, 500)
                trace.synchronise()
                trace.work(late_us if (rank, number) == (1, 0) else 5 * rank)
                end = 1_000_000 + 20_000 * (number + 1)
                trace.collective("all_reduce", end)
                trace.wait_for(end)
        trace.write(tmp_path / f"rank{rank}.json")
    messages = {message.id: message.severity.value for message in explain([tmp_path]).explained.health}
    assert messages == ({"late-before-the-first": "note"} if late_us else {})


def test_kernels_of_unknown_names_are_a_caveat(tmp_path):
    trace = healthy()
    trace.launch("my_secret_transport", 5_000, stream=30)
    finish(trace)
    assert health(trace, tmp_path) == ("caveats", {"unclassified-kernels": "warning"})


def test_a_file_that_ends_in_the_middle_concludes_nothing(tmp_path):
    trace = healthy()
    path = trace.write(tmp_path / "trace.json")
    whole = path.read_text()
    for kept in (len(whole) - 3_000, 2_000):
        path.write_text(whole[:kept])
        report = explain([path])
        assert report.verdict == "inconclusive"
        assert "truncated-file" in {message.id for message in report.explained.health}
        assert "cpu-only" not in {message.id for message in report.explained.health}
        assert not report.explained.findings


@pytest.mark.parametrize(
    ("name", "message"), [("odd_cpu_only", "cpu-only"), ("odd_rank_unavailable", "cpu-only"), ("odd_amd_mi250", None)]
)
def test_odd_public_traces_get_an_honest_message(name, message):
    report = explain([TRACES / f"{name}.json.gz"])
    ids = {one.id for one in report.explained.health}
    assert message is None or message in ids
    assert (report.verdict == "inconclusive") == (message is not None)
    json.dumps(report.as_json())


def test_without_steps_the_window_is_told_alone(tmp_path):
    trace = GeneratedTrace()
    for _ in range(9):
        trace.launch(GEMM, 500)
    finish(trace)
    assert health(trace, tmp_path) == ("sound", {"no-steps": "note"})


@pytest.mark.parametrize(("with_profiler", "expected"), [(1.02, "note"), (1.4, "warning"), (None, None)])
def test_what_the_profiler_adds_to_a_step_is_told_where_the_run_measured_it(tmp_path, with_profiler, expected):
    trace = healthy()
    if with_profiler is not None:
        trace.facts["headway"] = {"step_ns": [5e8 * with_profiler] * 3, "unprofiled_step_ns": [5e8, 4.9e8, 5.1e8]}
    _, told = health(trace, tmp_path)
    assert told.get("profiled-steps") == expected
