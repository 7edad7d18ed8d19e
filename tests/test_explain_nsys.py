"""Nsight Systems exports give the budgets that their tables add up to, in any version's schema and when damaged."""

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headway.errors import UserError
from headway.explain import Input, InputKind
from headway.explain.nsys import explain_nsys
from headway.explain.nsys_export import read_nsys
from headway.timeline import Kind
from soak import soak

EXPORT = Path(__file__).parent.parent.parent / "shared" / "traces" / "nsys" / "h100_2gpu_1s.sqlite"
needs_traces = pytest.mark.skipif(not EXPORT.is_file(), reason="the published export is not here")
PROCESS = 7 << 24
STRINGS = {1: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2: "cudaLaunchKernel_v7000"}
STRINGS |= {3: "void gemm<128>(float*)", 4: "iteration 1", 5: "cudaMemcpyAsync_v3020_ptsz"}
SCHEMA = {
    "StringIds": "id INTEGER, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, bytes, copyKind, srcKind, "
    "dstKind",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
}
ROWS = {
    "StringIds": list(STRINGS.items()),
    # A collective of 30, of which 10 are hidden; microseconds times 1000.
    "CUPTI_ACTIVITY_KIND_KERNEL": [
        (10_000, 30_000, 0, 7, 1, PROCESS, 3, 3),
        (20_000, 50_000, 0, 13, 2, PROCESS, 1, 1),
        (80_000, 90_000, 0, 7, 4, PROCESS, 3, 3),
    ],
    "CUPTI_ACTIVITY_KIND_MEMCPY": [(60_000, 65_000, 0, 7, 3, PROCESS, 4096, 1, 0, 2)],
    "CUPTI_ACTIVITY_KIND_RUNTIME": [
        (1_000, 2_000, PROCESS + 5, 1, 2),
        (2_000, 3_000, PROCESS + 5, 2, 2),
        (52_000, 66_000, PROCESS + 5, 3, 5),
        (70_000, 71_000, PROCESS + 5, 4, 2),
        (72_000, 73_000, PROCESS + 5, 5, 2),
    ],
    "NVTX_EVENTS": [
        (0, 55_000, 59, None, 4, PROCESS + 5),
        (55_000, 75_000, 59, "iteration 2", None, PROCESS + 5),
        (900, 2_100, 59, "aten::mm, op_id = 4", None, PROCESS + 5),
        (77_000, None, 34, "a mark", None, PROCESS + 5),
    ],
}


def written(path, without=(), columns_without=(), rows=ROWS):
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for table, columns in SCHEMA.items():
            if table in without:
                continue
            named = [column.split()[0] for column in columns.split(", ")]
            kept = [place for place, name in enumerate(named) if name not in columns_without]
            quoted = ", ".join(f'"{named[place]}"' for place in kept)
            database.execute(f"CREATE TABLE {table} ({quoted})")
            marks = ", ".join("?" * len(kept))
            own = [tuple(row[place] for place in kept) for row in rows[table]]
            database.executemany(f"INSERT INTO {table} VALUES ({marks})", own)
        database.commit()
    return path


def explained(path):
    return explain_nsys([Input(path, InputKind.NSYS)])


def union(spans):
    """Length of the time that any of the spans covers."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


@needs_traces
def test_the_published_exports_budgets_are_those_of_its_tables():
    said = explained(EXPORT)
    with closing(sqlite3.connect(f"{EXPORT.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        for rank in said.ranks:
            spans = {
                table: database.execute(
                    f'SELECT start, "end" FROM CUPTI_ACTIVITY_KIND_{table} WHERE deviceId = {rank["rank"]}'
                ).fetchall()
                for table in ("KERNEL", "MEMCPY", "MEMSET")
            }
            everything = [span for those in spans.values() for span in those]
            window = max(end for _, end in everything) - min(start for start, _ in everything)
            assert rank["window_us"] * 1000 == pytest.approx(window, abs=0.5)
            assert rank["busy_us"] * 1000 == pytest.approx(union(everything), abs=0.5)
            assert rank["compute_us"] * 1000 == pytest.approx(union(spans["KERNEL"]), abs=0.5)
            assert rank["communication_us"] == 0
            assert rank["kernels"] == len(spans["KERNEL"])
    assert [rank["rank"] for rank in said.ranks] == [0, 1]
    assert sum(rank["kernels"] for rank in said.ranks) == 3442
    traces = read_nsys(EXPORT)
    ranges = [trace.timeline.kinds(Kind.ANNOTATION, Kind.OPERATOR).sum() for trace in traces]
    assert sum(ranges) == 16782
    assert "missing-kernels" not in [message.id for message in said.health]  # the last launches' kernels come later


def test_kernels_copies_calls_and_ranges_become_one_timeline(tmp_path):
    (rank,) = explained(written(tmp_path / "a.sqlite")).ranks
    assert (rank["window_us"], rank["busy_us"], rank["compute_us"]) == (80, 55, 30)
    assert (rank["communication_us"], rank["exposed_communication_us"], rank["memory_us"]) == (30, 20, 5)
    (trace,) = read_nsys(tmp_path / "a.sqlite")
    timeline = trace.timeline
    assert "Memcpy HtoD (Pageable -> Device)" in timeline.text("name")
    assert {"cudaLaunchKernel", "cudaMemcpyAsync", "aten::mm"} <= set(timeline.text("name"))
    collectives = timeline.select(timeline.kinds(Kind.COMMUNICATION))
    assert collectives.text("collective") == ["all_reduce"]
    assert timeline.step[timeline.kinds(Kind.COMPUTE)].tolist() == [1, 2]
    assert timeline.bytes[timeline.kinds(Kind.MEMORY)].tolist() == [4096]


def test_launches_whose_kernels_come_after_the_end_are_no_missing_kernels(tmp_path):
    said = explained(written(tmp_path / "a.sqlite"))
    assert [message.id for message in said.health if "launch" in message.id] == ["launches-in-flight"]


@pytest.mark.parametrize(
    "columns", [("correlationId",), ("globalPid", "globalTid"), ("textId",), ("streamId",), ("srcKind", "bytes")]
)
def test_columns_that_a_version_lacks_are_left_out(columns, tmp_path):
    (rank,) = explained(written(tmp_path / "a.sqlite", columns_without=columns)).ranks
    assert (rank["window_us"], rank["busy_us"], rank["communication_us"]) == (80, 55, 30)


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_RUNTIME"])
def test_tables_of_what_was_not_traced_may_be_missing(table, tmp_path):
    (rank,) = explained(written(tmp_path / "a.sqlite", without=(table,))).ranks
    assert rank["communication_us"] == 30


def test_a_kernel_of_a_graph_that_was_traced_as_a_whole_is_one_span(tmp_path):
    path = written(tmp_path / "a.sqlite", without=("CUPTI_ACTIVITY_KIND_MEMCPY",))
    with closing(sqlite3.connect(path)) as database:
        table = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
        database.execute(f'CREATE TABLE {table} (start, "end", deviceId, streamId, correlationId, globalPid, graphId)')
        database.execute(f"INSERT INTO {table} VALUES (52000, 62000, 0, 7, 9, {PROCESS}, 3)")
        database.commit()
    (rank,) = explained(path).ranks
    assert rank["compute_us"] == 40


def test_devices_of_several_files_get_ranks_of_their_own(tmp_path):
    paths = [written(tmp_path / f"node{node}.sqlite") for node in range(2)]
    said = explain_nsys([Input(path, InputKind.NSYS) for path in paths])
    assert [rank["rank"] for rank in said.ranks] == [0, 1]
    named = [written(tmp_path / f"rank{rank}.sqlite") for rank in (3, 5)]
    assert [rank["rank"] for rank in explain_nsys([Input(path, InputKind.NSYS) for path in named]).ranks] == [3, 5]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"CUPTI_ACTIVITY_KIND_KERNEL": [], "CUPTI_ACTIVITY_KIND_MEMCPY": []}, "no kernel"),
        (
            {"CUPTI_ACTIVITY_KIND_KERNEL": [("x", None, 0, 7, 1, PROCESS, 3, 3)], "CUPTI_ACTIVITY_KIND_MEMCPY": []},
            "no k",
        ),
    ],
)
def test_an_export_without_device_work_is_told(rows, told, tmp_path):
    with pytest.raises(UserError, match=told):
        explained(written(tmp_path / "a.sqlite", rows=ROWS | rows))


def test_rows_without_readable_times_are_left_out_and_counted(tmp_path):
    spoiled = [*ROWS["CUPTI_ACTIVITY_KIND_KERNEL"], (5, 4, 0, 7, 9, PROCESS, 3, 3), ("x", 9, 0, 7, 9, PROCESS, 3, 3)]
    (trace,) = read_nsys(written(tmp_path / "a.sqlite", rows=ROWS | {"CUPTI_ACTIVITY_KIND_KERNEL": spoiled}))
    assert trace.malformed == 2
    assert trace.timeline.kinds(Kind.COMPUTE).sum() == 2


@pytest.mark.parametrize("mutations", [60, soak(3000)])
def test_mutated_exports_end_in_a_message_and_never_in_a_traceback(mutations, tmp_path):
    path = written(tmp_path / "a.sqlite")
    whole = path.read_bytes()
    generator = random.Random(8)
    told = []
    for _ in range(mutations):
        mutated = bytearray(whole if generator.random() < 0.8 else whole[: generator.randrange(1, len(whole))])
        for _ in range(generator.choice([1, 20, 200])):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        path.write_bytes(mutated)
        try:
            explained(path)
        except UserError as error:
            told.append(str(error))
    assert told
    assert not [line for line in told if "\n" in line]
