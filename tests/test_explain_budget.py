"""Budgets of ranks and steps are exact, add up, and say why the device was idle."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generated_traces import GEMM, POINTWISE, GeneratedTrace, finish, plain_step
from headway.explain.budget import budget_json
from headway.explain.idle import CAUSES, idle_by_cause
from headway.explain.kineto import read_rank
from headway.explain.rank_view import RankView
from headway.timeline import DEVICE_KINDS, Kind, Timeline, launches_of

TRACES = Path(__file__).parents[2] / "shared" / "traces" / "kineto"
EXPECTED = json.loads((TRACES / "expected.json").read_text()) if TRACES.exists() else {}
SMALL = ("dlrm_8rank/", "vit_2of128/", "a100_nccl_args_rank0of2.json.gz")
"""The other sets are held by the breakdown's own tests; the budget is the same arithmetic."""


def view_of(path: Path) -> RankView:
    (trace,) = read_rank(path)
    return RankView(trace)


def files_of(name: str) -> list[Path]:
    place = TRACES / name
    return sorted(place.glob("*.json.gz")) if place.is_dir() else [place]


@pytest.mark.skipif(not EXPECTED, reason="the public traces are not here")
@pytest.mark.parametrize("name", SMALL)
def test_budgets_of_public_traces_are_those_of_independent_arithmetic(name):
    for path in files_of(name):
        found = budget_json(view_of(path))
        expected = EXPECTED[f"kineto/{name}"][str(found["rank"])]
        window = expected["kernel_time_us"]
        for key, mine in (
            ("busy_us", "busy_us"),
            ("idle_us", "idle_us"),
            ("compute_us", "compute_us"),
            ("comm_us", "communication_us"),
            ("exposed_comm_us", "exposed_communication_us"),
            ("exposed_comm_vs_comp_or_mem_us", "exposed_communication_versus_compute_or_memory_us"),
            ("mem_us", "memory_us"),
        ):
            assert 100 * abs(found[mine] - expected[key]) / window < 0.001, (path.name, key)
        assert abs(found["overlap_percent"] - expected["overlap_pct"]) < 0.001
        assert sum(found["idle_by_cause_us"].values()) == pytest.approx(found["idle_us"], abs=1e-6)
        assert len(found["steps"]) == expected["steps"]
        assert sum(step["busy_us"] for step in found["steps"]) <= found["busy_us"] + 1e-6


instants = st.integers(0, 40)
spans = st.lists(
    st.tuples(
        st.sampled_from([*DEVICE_KINDS, Kind.RUNTIME, Kind.OPERATOR, Kind.ANNOTATION, Kind.OVERHEAD]),
        st.sampled_from(
            ["cudaStreamSynchronize", "cudaLaunchKernel", "enumerate(DataLoader)#x.__next__", "gc.collect"]
        ),
        instants,
        instants,
        st.integers(-1, 5),
    ),
    min_size=1,
    max_size=14,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(spans)
def test_causes_of_idle_time_are_disjoint_and_add_up_whatever_is_in_the_trace(items):
    timeline = Timeline.of(
        kind=[kind for kind, *_ in items],
        name=[name for _, name, *_ in items],
        start_ns=[min(a, b) for _, _, a, b, _ in items],
        duration_ns=[abs(a - b) for _, _, a, b, _ in items],
        correlation=[correlation for *_, correlation in items],
    )
    idle = idle_by_cause(timeline, launches_of(timeline), (0, 40))
    busy = timeline.intervals(timeline.kinds(*DEVICE_KINDS)).total_ns()
    assert sum(idle.total_ns().values()) == 40 - busy
    first, second = idle.total_ns((0, 17)), idle.total_ns((17, 40))
    assert {cause: first[cause] + second[cause] for cause in CAUSES} == idle.total_ns()


def test_each_idle_instant_is_given_to_what_the_host_did_then(tmp_path):
    trace = GeneratedTrace()
    trace.launch(GEMM, 100)
    trace.synchronise()
    trace.work(1_000)  # slow after a wait: the queue ran empty by it
    trace.launch(GEMM, 100)
    with trace.scope("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
        trace.work(5_000)
    trace.launch(GEMM, 100)
    trace.work(2_000)  # slow, without having waited
    trace.launch(GEMM, 10_000)
    trace.launch(POINTWISE, 10, stream=9)
    trace.launch(GEMM, 10, stream=9, after=(7,))  # queued, and held by the other stream
    finish(trace)
    found = budget_json(view_of(trace.write(tmp_path / "trace.json")))
    causes = found["idle_by_cause_us"]
    assert causes["synchronisation"] == pytest.approx(1_000, abs=20)
    assert causes["data_wait"] == pytest.approx(4_900, abs=20)
    assert causes["host_launch"] == pytest.approx(1_900, abs=40)
    assert causes["garbage_collection"] == causes["checkpoint"] == causes["compile"] == 0
    assert sum(causes.values()) == pytest.approx(found["idle_us"])


def test_exposed_communication_is_told_by_mesh_axis(tmp_path):
    trace = GeneratedTrace()
    trace.facts["distributedInfo"]["pg_config"] = [
        {"pg_name": "3", "pg_desc": "mesh_dp_shard", "ranks": [0, 1]},
        {"pg_name": "0", "pg_desc": "default_pg"},
        {"pg_name": 7, "pg_desc": ["odd"]},
        "odder",
    ]
    trace.launch(GEMM, 100)
    trace.collective("all_gather", trace.now + 500, group="3")
    trace.collective("all_reduce", trace.now + 900, group="0")
    finish(trace)
    found = budget_json(view_of(trace.write(tmp_path / "trace.json")))["exposed_communication_by_us"]
    assert set(found) == {"dp_shard: all_gather", "group 0: all_reduce"}


def test_a_step_s_window_begins_with_its_first_kernel_and_ends_where_the_next_begins(tmp_path):
    trace = GeneratedTrace()
    for number in (3, 4, 5):
        plain_step(trace, number)
    finish(trace)
    found = budget_json(view_of(trace.write(tmp_path / "trace.json")))
    assert [step["step"] for step in found["steps"]] == [3, 4, 5]
    assert [step["window_us"] for step in found["steps"]] == pytest.approx([10_000] * 3, abs=1)
    assert sum(step["window_us"] for step in found["steps"]) == pytest.approx(found["window_us"])


def test_kernels_of_unknown_names_beside_the_main_stream_are_shown_as_unclassified(tmp_path):
    trace = GeneratedTrace()
    trace.launch(GEMM, 900)
    trace.launch("my_secret_transport", 100, stream=30)
    finish(trace)
    found = budget_json(view_of(trace.write(tmp_path / "trace.json")))["unclassified"]
    assert found["kernels"] == [{"name": "my_secret_transport", "count": 1}]
    assert found["share_of_busy"] == pytest.approx(100 / 900, rel=0.05)
    for event in trace.events:
        event["name"] = event["name"].replace("my_secret_transport", "void at::native::elementwise_kernel<128, 4>")
    named = budget_json(view_of(trace.write(tmp_path / "trace.json")))["unclassified"]
    assert named == {"share_of_busy": 0.0, "kernels": []}


def test_communication_tells_how_it_was_recognised(tmp_path):
    trace = GeneratedTrace()
    trace.launch(GEMM, 100)
    trace.collective("all_gather", trace.now + 500)
    trace.launch("opaque_kernel", 70, stream=21, operator="record_param_comms", **{"Collective name": "all_to_all"})
    trace.launch("void deep_ep::intranode::dispatch<8>(int)", 30, stream=22)
    finish(trace)
    found = budget_json(view_of(trace.write(tmp_path / "trace.json")))
    assert set(found["communication_by_us"]) == {"NCCL or RCCL", "linked to a collective", "DeepEP"}
    assert found["communication_by_us"]["linked to a collective"] == 70
    assert found["exposed_communication_by_us"]["group 0: all_gather"] > 300
    assert np.isclose(sum(found["communication_by_us"].values()), found["communication_us"], atol=400)
