"""Modules and phases of kernels from a trace's ranges and autograd's numbers; a CPU's operators as a device's work."""

import json
from pathlib import Path

import pytest

from generated_traces import GEMM, POINTWISE, GeneratedTrace, finish
from headway.timeline import DATA_RANGE, MODULE_RANGE, PASSES_RANGE, Kind, Timeline, launches_of, read_chrome_trace
from headway.timeline.host_device import HANDS_OVER, RUNS, WAITS

NODE = "autograd::engine::evaluate_function: "


def forward(trace: GeneratedTrace, module: str, first: int) -> None:
    """Two operators that make nodes ``first`` and ``first + 1``, in a range of the module."""
    with trace.scope(MODULE_RANGE + module):
        for number in (first, first + 1):
            with trace.scope("aten::linear", "cpu_op"):
                trace.events[-1]["args"] = {"Sequence number": number, "Fwd thread id": 0}
                trace.launch(GEMM, 50)


def node(trace: GeneratedTrace, number: int, *, thread: int = 1) -> None:
    with trace.scope(NODE + "AddmmBackward0", "cpu_op"):
        trace.events[-1]["args"] = {"Sequence number": number, "Fwd thread id": thread}
        trace.launch(GEMM, 80)


def kernels(trace: GeneratedTrace, folder: Path) -> list[tuple[str, str]]:
    """Module and phase of each kernel in order."""
    timeline = read_chrome_trace(trace.write(folder / "trace.json")).timeline
    found = timeline.select(timeline.kinds(Kind.COMPUTE))
    return list(zip(found.text("module"), found.text("phase"), strict=True))


def test_kernels_of_the_backward_pass_belong_to_the_modules_that_made_their_nodes(tmp_path):
    trace = GeneratedTrace()
    with trace.step(0):
        with trace.scope(PASSES_RANGE):
            with trace.scope(MODULE_RANGE + "blocks"):
                forward(trace, "blocks.0", 10)
                trace.launch(POINTWISE, 5)
                forward(trace, "blocks.1", 12)
            trace.launch(POINTWISE, 5)
            for number in (13, 12, 11, 10):
                node(trace, number)
            with trace.scope(NODE + "torch::autograd::AccumulateGrad", "cpu_op"):
                trace.launch(POINTWISE, 5)
        with trace.scope("Optimizer.step#AdamW.step"):
            trace.launch(POINTWISE, 5)
        trace.launch(POINTWISE, 5)
    finish(trace)
    assert kernels(trace, tmp_path)[:13] == [
        ("blocks.0", "forward"), ("blocks.0", "forward"), ("blocks", "forward"), ("blocks.1", "forward"),
        ("blocks.1", "forward"), ("", "forward"), ("blocks.1", "backward"), ("blocks.1", "backward"),
        ("blocks.0", "backward"), ("blocks.0", "backward"), ("blocks.0", "backward"), ("", "optimizer"), ("", ""),
    ]  # fmt: skip


def test_what_a_checkpointed_block_repeats_is_recomputation_and_its_numbers_mislead_nobody(tmp_path):
    """It runs within a node of the backward pass; on a thread of autograd its numbers begin anew, here at 10."""
    trace = GeneratedTrace()
    with trace.scope(PASSES_RANGE):
        forward(trace, "blocks.0", 10)
        forward(trace, "blocks.1", 12)
        with trace.scope(NODE + "CheckpointFunctionBackward", "cpu_op"):
            trace.events[-1]["args"] = {"Sequence number": 13, "Fwd thread id": 1}
            forward(trace, "blocks.1.mlp", 10)
            trace.launch(GEMM, 80)
        node(trace, 10)
    finish(trace)
    assert kernels(trace, tmp_path)[4:8] == [
        ("blocks.1.mlp", "recompute"), ("blocks.1.mlp", "recompute"),
        ("blocks.1", "backward"), ("blocks.0", "backward"),
    ]  # fmt: skip


def test_a_gather_is_of_the_module_that_it_is_for_and_not_of_the_one_that_runs(tmp_path):
    trace = GeneratedTrace(world=2)
    with trace.scope(PASSES_RANGE), trace.scope(MODULE_RANGE + "blocks.0"):
        with trace.scope("FSDP::forward_prefetch for blocks.1"), trace.scope("FSDP::all_gather (blocks.1)"):
            trace.collective("all_gather", trace.now + 900)
        trace.launch(GEMM, 50)
    finish(trace)
    timeline = read_chrome_trace(trace.write(tmp_path / "trace.json")).timeline
    (gather,) = timeline.select(timeline.kinds(Kind.COMMUNICATION)).text("module")
    assert gather == "blocks.1"
    assert kernels(trace, tmp_path)[0] == ("blocks.0", "forward")


def test_without_ranges_of_modules_nothing_is_said(tmp_path):
    trace = GeneratedTrace()
    node(trace, 3)
    finish(trace)
    assert set(kernels(trace, tmp_path)) == {("", "")}


def on_cpu(events: list[tuple[str, str, int, float, float]], folder: Path, **told) -> Timeline:
    """Events (category, name, thread, start us, duration us) of rank 0 of two on CPUs."""
    file = folder / "trace.json"
    written = [
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": long, "args": {}}
        for cat, name, thread, start, long in events
    ]
    facts = {"distributedInfo": {"rank": 0, "world_size": 2}, "headway": {"device": "cpu", **told}}
    file.write_text(json.dumps({**facts, "traceEvents": written}))
    return read_chrome_trace(file).timeline


EVENTS = [
    ("user_annotation", "ProfilerStep#3", 1, 0, 1000),
    ("user_annotation", "FSDP::pre_forward (blocks.0)", 1, 60, 20),
    ("cpu_op", "aten::linear", 1, 100, 100),
    ("cpu_op", "aten::addmm", 1, 110, 80),
    ("cpu_op", NODE + "AddmmBackward0", 1, 250, 100),
    ("cpu_op", "AddmmBackward0", 1, 255, 90),
    ("cpu_op", "aten::mm", 1, 260, 80),
    ("cpu_op", "c10d::_reduce_scatter_base_", 1, 400, 10),
    ("user_annotation", "gloo:all_reduce", 2, 430, 170),
    ("cpu_op", "aten::copy_", 2, 440, 50),
    ("cpu_op", "aten::add_", 1, 610, 40),
    ("user_annotation", DATA_RANGE, 1, 700, 100),
    ("cpu_op", "aten::stack", 1, 710, 80),
]


def test_on_a_cpu_outermost_operators_compute_and_the_host_waits_for_gloo(tmp_path):
    timeline = on_cpu(EVENTS, tmp_path, axes={"7": "dp_shard"})
    device = timeline.kinds(Kind.COMPUTE, Kind.COMMUNICATION)
    found = timeline.select(device)
    times = zip(found.text("name"), found.start_ns.tolist(), found.duration_ns.tolist(), strict=True)
    assert sorted(times, key=lambda one: one[1]) == [
        ("aten::linear", 100_000, 100_000), ("aten::mm", 260_000, 80_000), ("gloo:all_reduce", 430_000, 170_000),
        ("aten::add_", 610_000, 40_000),
    ]  # fmt: skip
    assert set(found.step.tolist()) == {3}
    launches = launches_of(timeline)[device]
    names = [timeline.text("name")[call] for call in launches.tolist()]
    assert sorted(names) == sorted([RUNS, RUNS, RUNS, HANDS_OVER])
    (reduced,) = timeline.select(timeline.kinds(Kind.COMMUNICATION)).text("collective")
    assert reduced == "reduce_scatter", "as it was asked for; gloo makes it an all-reduce"
    (axis,) = timeline.select(timeline.kinds(Kind.COMMUNICATION)).text("axis")
    assert axis == "dp_shard"
    waits = timeline.select(timeline.matching("name", [WAITS]))
    assert (waits.start_ns.tolist(), waits.end_ns.tolist()) == ([410_000], [600_000])


@pytest.mark.parametrize("axes", [{"7": "dp_shard", "8": "tp"}, {}, None, [1], {"7": 3}])
def test_of_several_axes_gloo_does_not_say_which(tmp_path, axes):
    timeline = on_cpu(EVENTS, tmp_path, axes=axes)
    assert timeline.select(timeline.kinds(Kind.COMMUNICATION)).text("axis") == [""]


def test_the_trace_of_a_cpu_beside_which_nobody_says_so_has_no_device(tmp_path):
    for told in ({"headway": 3}, {}):
        file = tmp_path / "trace.json"
        file.write_text(
            json.dumps({**told, "traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2}]})
        )
        assert not read_chrome_trace(file).timeline.kinds(Kind.COMPUTE).any()
