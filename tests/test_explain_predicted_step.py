"""A measured step beside the predicted one: a planted difference is named by cause and block, and all adds up."""

import json
from pathlib import Path

import pytest

from commands import run
from generated_traces import GEMM, GeneratedTrace, finish
from headway.explain import explain
from headway.explain.kineto import read_rank
from headway.explain.predicted_step import OUTSIDE, WAITING, beside_prediction, block_of
from headway.recipe import to_toml
from headway.timeline import MODULE_RANGE, PASSES_RANGE, Kind, Timeline, write_chrome_trace
from tiny_recipes import text_file, text_recipe

BLOCKS, STEPS = 20, 3
GEMM_US, GATHER_US, LATE_US = 2_000.0, 1_500.0, 17_750.0


def step_of(trace: GeneratedTrace, number: int, gathers_us: dict[int, float], arrives_late_us: float = 0.0) -> None:
    """Blocks that each gather, with nothing beside it, and compute."""
    with trace.step(number), trace.scope(PASSES_RANGE):
        for block in range(BLOCKS):
            with trace.scope(MODULE_RANGE + f"model.blocks.{block}"):
                begin = max(trace.streams.get(7, trace.now), trace.now + 13)
                with trace.scope(f"FSDP::all_gather (model.blocks.{block})"):
                    until = begin + gathers_us.get(block, GATHER_US)
                    trace.collective("all_gather", until + arrives_late_us, after=(7,))
                trace.launch(GEMM, GEMM_US, after=(20,))


def measured(folder: Path, gathers_us: dict[int, float], rank: int = 0, late_us: float = 0.0) -> Path:
    trace = GeneratedTrace(rank=rank, world=2)
    trace.facts["headway"] = {"device": "cuda", "axes": {"0": "dp_shard"}}
    for number in range(STEPS):
        step_of(trace, number, gathers_us, late_us)
    finish(trace)
    folder.mkdir(parents=True, exist_ok=True)
    return trace.write(folder / f"rank_{rank}.json")


def planned() -> Timeline:
    """The same blocks as a rehearsal has them: gather, then compute."""
    starts, durations, kinds, modules = [], [], [], []
    now = 0.0
    for block in range(BLOCKS):
        for kind, us in ((Kind.COMMUNICATION, GATHER_US), (Kind.COMPUTE, GEMM_US)):
            starts.append(round(1000 * now))
            durations.append(round(1000 * us))
            kinds.append(kind)
            modules.append(f"model.blocks.{block}.mlp")
            now += us
    return Timeline.of(
        kind=kinds,
        start_ns=starts,
        duration_ns=durations,
        lane=["communicator" if kind is Kind.COMMUNICATION else "compute" for kind in kinds],
        module=modules,
        phase="forward",
        axis=["dp_shard" if kind is Kind.COMMUNICATION else "" for kind in kinds],
        collective=["all_gather" if kind is Kind.COMMUNICATION else "" for kind in kinds],
        rank=0,
        correlation=list(range(len(kinds))),
    )


PLANNED_US = BLOCKS * (GEMM_US + GATHER_US)


def test_gathers_that_take_longer_are_named_with_their_blocks(tmp_path):
    late = {block: GATHER_US + LATE_US for block in range(12, 16)}
    found = beside_prediction(planned(), PLANNED_US, read_rank(measured(tmp_path, late)))
    first = found.causes[0]
    assert first.name == "exposed all gather (dp_shard)"
    assert first.change_us == pytest.approx(4 * LATE_US, rel=0.01)
    assert first.where == "model.blocks 12-15"
    assert found.text.startswith(
        f"planned 70 ms, measured {found.measured_us / 1000:.4g} ms: +71 ms exposed all gather"
    )
    assert "in model.blocks 12-15" in found.text
    assert found.measured_us == pytest.approx(sum(cause.measured_us for cause in found.causes))
    for cause in found.causes:
        assert sum(cause.blocks.values()) == pytest.approx(cause.change_us)


def test_a_run_as_planned_differs_by_the_launches_alone(tmp_path):
    found = beside_prediction(planned(), PLANNED_US, read_rank(measured(tmp_path, {})))
    assert found.planned_us == pytest.approx(PLANNED_US)
    assert found.measured_us == pytest.approx(PLANNED_US, rel=0.02)
    assert all(abs(cause.change_us) < 0.02 * PLANNED_US for cause in found.causes)
    assert found.text == f"planned 70 ms, measured {found.measured_us / 1000:.4g} ms"


def test_waiting_for_a_rank_is_no_longer_transfer(tmp_path):
    """Rank 1 comes 3 ms late to every gather, in which rank 0 sits: its gathers take as long as planned."""
    slow = GeneratedTrace(rank=1, world=2)
    for number in range(STEPS):
        with slow.step(number), slow.scope(PASSES_RANGE):
            for _ in range(BLOCKS):
                slow.launch(GEMM, 3_000)
                begin = max(slow.streams[7], slow.now + 13)
                slow.collective("all_gather", begin + GATHER_US, after=(7,))
                slow.launch(GEMM, GEMM_US, after=(20,))
    finish(slow)
    fast = measured(tmp_path, {}, late_us=3_000.0)
    traces = [*read_rank(fast), *read_rank(slow.write(tmp_path / "rank_1.json"))]
    found = beside_prediction(planned(), PLANNED_US, traces)
    by_name = {cause.name: cause for cause in found.causes}
    assert found.waits_apart
    assert by_name[WAITING].change_us == pytest.approx(BLOCKS * 3_000, rel=0.05)
    assert abs(by_name["exposed all gather (dp_shard)"].change_us) < 0.05 * PLANNED_US


def test_without_a_rank_in_both_there_is_nothing_to_say(tmp_path):
    other = measured(tmp_path, {}, rank=1)
    assert beside_prediction(planned(), PLANNED_US, read_rank(other)) is None


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("transformer.blocks.12.attn.to_q", "transformer.blocks.12"),
        ("lm_head", "lm_head"),
        ("", OUTSIDE),
        ("model.embed_tokens", "model.embed_tokens"),
    ],
)
def test_a_module_is_of_its_block(module, block):
    assert block_of(module) == block


def run_directory(folder: Path, low: float, high: float) -> Path:
    """What ``headway train --cluster --profile`` leaves, of a run whose steps took 70 ms."""
    own = text_recipe(text_file(folder / "text.jsonl"), folder / "run")
    directory = folder / "run"
    directory.mkdir()
    (directory / "recipe.toml").write_text(to_toml(own))
    lines = [{"step": step, "loss": 1.0, "step_time_s": 0.071, "data_wait_s": 0.0} for step in range(30)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"kind": "started", "step": 0, "ranks": 2}, {"kind": "predicted", "step": 0}]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    time = {"value": PLANNED_US / 1e6, "low": low, "high": high}
    (directory / "prediction.json").write_text(json.dumps({"prediction": {"step_time_s": time}}))
    write_chrome_trace(planned(), directory / "predicted_step.json.gz")
    measured(directory / "traces", {})
    return directory


@pytest.mark.parametrize(("low", "high", "is_found"), [(0.06, 0.08, False), (0.06, 0.0705, True), (0.072, 0.08, True)])
def test_a_step_outside_of_its_range_is_a_finding_that_names_the_calibration(tmp_path, low, high, is_found):
    directory = run_directory(tmp_path, low, high)
    report = explain([directory])
    (told,) = report.as_json()["planned"]
    assert told["planned_us"] == pytest.approx(PLANNED_US)
    found = [finding for finding in report.explained.findings if finding.id == "not-as-predicted"]
    assert bool(found) == is_found
    if found:
        assert f"--calibrate-from {directory}" in found[0].fix.text


def test_a_prediction_of_an_earlier_session_is_not_held_against_this_one(tmp_path):
    directory = run_directory(tmp_path, 0.06, 0.08)
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "resumed", "step": 3, "ranks": 2}) + "\n")
    assert "planned" not in explain([directory]).as_json()


@pytest.mark.parametrize("damage", ["{}", '{"prediction": 3}', "["])
def test_a_damaged_prediction_is_told_and_the_rest_explained(tmp_path, damage):
    directory = run_directory(tmp_path, 0.06, 0.08)
    (directory / "prediction.json").write_text(damage)
    report = explain([directory])
    assert report.explained.ranks
    assert any("prediction.json" in message.text for message in report.explained.health)


def test_the_terminal_shows_both(monkeypatch, capsys, tmp_path):
    code, out, err = run(monkeypatch, capsys, "explain", str(run_directory(tmp_path, 0.06, 0.0705)))
    assert (code, err) == (0, "")
    assert "planned 70 ms" in out
    assert "exposed all gather (dp_shard)" in out


def test_on_a_cpu_what_python_takes_before_an_operator_is_the_operator_s(tmp_path):
    """As in a cluster's times of operators, which are measured with it."""
    events = [{"cat": "user_annotation", "name": "ProfilerStep#0", "ts": 0, "dur": 10_000}]
    for number in range(10):
        at = 1_000 * number
        events.append({"cat": "user_annotation", "name": f"{MODULE_RANGE}blocks.{number}", "ts": at, "dur": 1_000})
        events.append({"cat": "cpu_op", "name": "aten::linear", "ts": at + 400, "dur": 600})
    written = [{"ph": "X", "pid": 1, "tid": 1, "args": {}, **event} for event in events]
    facts = {"distributedInfo": {"rank": 0}, "headway": {"device": "cpu"}}
    (tmp_path / "rank_0.json").write_text(json.dumps({**facts, "traceEvents": written}))
    found = beside_prediction(planned(), PLANNED_US, read_rank(tmp_path / "rank_0.json"))
    by_name = {cause.name: cause for cause in found.causes}
    assert by_name["forward"].measured_us == pytest.approx(9_600), "all but what came before the first operator"
    assert by_name["forward"].blocks["blocks.3"] == pytest.approx(1_000)
    assert "host between operators" not in by_name
