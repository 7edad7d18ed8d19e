"""Chrome JSON of any writer is read as json.loads reads it, in pieces of any size; damage is told, not guessed at."""

import gzip
import json
import random
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.errors import UserError
from headway.timeline import Kind, Timeline, concatenate, launches_of, read_chrome_trace, trace_text, write_chrome_trace
from headway.timeline.collectives import collective_named, is_communication
from headway.timeline.decimals import thousandths

SMALL = Path(__file__).parent / "traces" / "dlrm_rank7of8.json.gz"
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
times = st.decimals(-(10**12), 10**12, places=3).map(abs)
quick = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def event(**members) -> dict:
    plain = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10, "dur": 5, "args": {}}
    return {**plain, **members}


def written(path: Path, events, **facts) -> Path:
    path.write_text(json.dumps({**facts, "traceEvents": events, "traceName": "x"}))
    return path


@pytest.fixture
def trace(tmp_path) -> Path:
    return tmp_path / "trace.json"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
events = st.lists(
    st.fixed_dictionaries(
        {"name": any_text, "ts": st.integers(0, 2**50), "dur": st.integers(0, 2**40)},
        optional={
            "ph": st.sampled_from(["X", "X", "X", "i", "s"]),
            "cat": st.sampled_from(["kernel", "cpu_op", "Memcpy", "other"]),
            "pid": st.integers(0, 5) | any_text,
            "tid": st.integers(0, 5) | any_text,
            "args": st.dictionaries(any_text | st.sampled_from(["correlation", "External id"]), values, max_size=4),
        },
    ),
    max_size=12,
)


@quick
@given(events, st.sampled_from([None, 1, "\t"]), st.integers(1, 200))
def test_every_writer_s_layout_is_read_as_json_loads_reads_it(trace, written_events, indent, piece_bytes):
    facts = {"deviceProperties": [{"id": 0}, {"id": 1}], "note": '"traceEvents": ['}
    trace.write_text(json.dumps({**facts, "traceEvents": written_events, "z": [{}, {}]}, indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_text, "PIECE_BYTES", piece_bytes)
        found = read_chrome_trace(trace)
    complete = [event for event in written_events if event.get("ph") == "X"]
    assert found.timeline.text("name") == [event["name"] for event in complete]
    assert found.timeline.start_ns.tolist() == [1000 * event["ts"] for event in complete]
    assert found.timeline.duration_ns.tolist() == [1000 * event["dur"] for event in complete]
    for key, column in (("correlation", "correlation"), ("External id", "operator")):
        expected = [event.get("args", {}).get(key, -1) for event in complete]
        read = getattr(found.timeline, column).tolist()
        assert all(a == b for a, b in zip(read, expected, strict=True) if type(b) is int)
    assert found.left_out.total() == len(written_events) - len(complete)
    assert found.facts == {**facts, "z": [{}, {}]}
    assert not found.truncated
    assert not found.mended


@quick
@given(st.lists(st.tuples(times, times), max_size=20))
def test_times_are_exact_to_the_nanosecond(trace, pairs):
    body = ",".join(f'{{"ph":"X","name":"k","cat":"kernel","ts":{a},"dur":{b}}}' for a, b in pairs)
    trace.write_text(f'{{"traceEvents":[{body}]}}')
    timeline = read_chrome_trace(trace).timeline
    assert timeline.start_ns.tolist() == [int(1000 * a) for a, _ in pairs]
    assert timeline.duration_ns.tolist() == [int(1000 * b) for _, b in pairs]


@quick
@given(st.lists(st.from_regex(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,6})?([eE][+-]?[0-9])?", fullmatch=True), max_size=8))
def test_every_way_to_write_a_number_is_read_to_the_nearest_thousandth(numbers):
    found, readable = thousandths([int(number) if number.isdigit() else number for number in numbers])
    exact = [round(1000 * Decimal(number)) for number in numbers]
    assert readable.tolist() == [-(2**63) <= value < 2**63 for value in exact]
    assert [value for value, known in zip(found.tolist(), readable, strict=True) if known] == [
        value for value in exact if -(2**63) <= value < 2**63
    ]


@pytest.mark.parametrize(
    "other",
    [None, True, [1], {"a": 1}, "", "1,2", "1-2", "1.2.3", "0x12", "1e999", "NaN", "Infinity", 2**60, "\ud800"],
)
def test_what_is_no_number_is_not_read_as_one(other):
    found, readable = thousandths(["1.5", other, 2])
    assert readable.tolist() == [True, False, True]
    assert found[[0, 2]].tolist() == [1500, 2000]


columns = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(list(Kind)),
        "start_ns": st.integers(-(10**15), 2 * 10**18),
        "duration_ns": st.integers(0, 10**15),
        "rank": st.integers(-1, 3),
        "flops": st.integers(-1, 2**62),
        "bytes": st.integers(-1, 2**50),
        "step": st.integers(-1, 2**31 - 1),
        "sequence": st.integers(-1, 9),
        "correlation": st.integers(-1, 2**40),
        "operator": st.integers(-1, 9),
        **dict.fromkeys(("lane", "name", "module", "phase", "axis", "collective", "group"), any_text),
    }
)


@quick
@given(st.lists(columns, max_size=6), st.sampled_from(["a.json", "a.json.gz"]))
def test_a_timeline_survives_chrome_json_unchanged(tmp_path, rows, name):
    timeline = Timeline.of(
        **{key: [row[key] for row in rows] for key in (rows[0] if rows else ["kind", "start_ns", "duration_ns"])}
    )
    write_chrome_trace(timeline, tmp_path / name)
    found = read_chrome_trace(tmp_path / name).timeline
    assert len(found) == len(rows)
    for key in rows[0] if rows else []:
        column = getattr(found, key)
        texts = key in ("lane", "name", "module", "phase", "axis", "collective", "group")
        assert (found.text(key) if texts else column.tolist()) == [row[key] for row in rows], key


def test_a_written_timeline_is_plain_json_that_perfetto_opens(trace):
    timeline = Timeline.of(
        kind=[Kind.COMPUTE, Kind.COMMUNICATION],
        start_ns=[0, 1500],
        duration_ns=[1001, 2],
        lane=["compute", "dp_shard"],
        name=['mm "big"', "all_gather"],
        rank=3,
        flops=[12, -1],
    )
    write_chrome_trace(timeline, trace)
    document = json.loads(trace.read_text())
    names = {(e["name"], e["args"]["name"]) for e in document["traceEvents"] if e["ph"] == "M"}
    assert names == {("process_name", "rank 3"), ("thread_name", "compute"), ("thread_name", "dp_shard")}
    first, second = (e for e in document["traceEvents"] if e["ph"] == "X")
    assert (first["ts"], first["dur"], first["cat"], first["name"]) == (0.0, 1.001, "compute", 'mm "big"')
    assert first["args"] == {"flops": 12}
    assert (second["ts"], second["dur"], second["args"]) == (1.5, 0.002, {})


def test_a_torn_file_gives_what_it_holds_and_says_so(trace):
    whole = json.dumps({"traceEvents": [event(ts=i) for i in range(500)]})
    for end in random.Random(0).sample(range(40, len(whole) - 2), 60):
        trace.write_text(whole[:end])
        found = read_chrome_trace(trace)
        assert found.truncated
        assert found.timeline.start_ns.tolist() == [1000 * i for i in range(len(found.timeline))]
        assert len(found.timeline) >= whole[:end].count('"args": {}}')


def test_a_torn_gzip_file_gives_what_it_holds(trace):
    packed = gzip.compress(json.dumps({"traceEvents": [event(ts=i * 7919 % 5003) for i in range(5000)]}).encode())
    trace.write_bytes(packed[: len(packed) // 2])
    found = read_chrome_trace(trace)
    assert found.truncated
    assert 1000 < len(found.timeline) < 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no traceEvents"),
        (b"hello", "no traceEvents"),
        (b'{"a": 1}', "no traceEvents"),
        (b'{"traceEvents": 5}', "no traceEvents"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "not valid JSON near byte 29"),
        (b'{"traceEvents": [}, {"ph": "X"}]}', "not valid JSON near byte 17"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": "X", "ts": 1 2}]}', "not valid JSON near byte 5"),
        (b"\x1f\x8bnot gzip at all", "damaged gzip file"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(trace, text, message):
    trace.write_bytes(text)
    with pytest.raises(UserError, match=message) as error:
        read_chrome_trace(trace)
    assert str(trace) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_chrome_trace(path)


def test_mutated_files_never_end_in_another_error_or_a_made_up_time(tmp_path):
    original = gzip.decompress(SMALL.read_bytes())[:60_000]
    known = {(a, b) for a, b in _times(read_chrome_trace(_put(tmp_path / "whole.json", original)).timeline)}
    draw = random.Random(1)
    for number in range(150):
        text = bytearray(original)
        for _ in range(draw.choice([1, 1, 3])):
            place = draw.randrange(len(text))
            match draw.randrange(3):
                case 0:
                    del text[place : place + draw.choice([1, 1, 40])]
                case 1:
                    text[place] = draw.choice(b'"{}[],:\\ \n\xff')
                case 2:
                    text[place:place] = text[place : place + 30]
        path = _put(tmp_path / f"{number}.json", bytes(text))
        try:
            found = read_chrome_trace(path)
        except UserError:
            continue
        assert found.truncated
        strange = set(_times(found.timeline)) - known
        assert len(strange) <= 3, "each mutation can change the times of one event at most"


def _put(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


def _times(timeline: Timeline):
    return zip(timeline.start_ns.tolist(), timeline.duration_ns.tolist(), strict=True)


def test_events_of_wrong_types_are_counted_and_the_others_kept(trace):
    wrong = [5, [], None, event(name=7), event(ts="ten"), event(ts=None), event(dur=-1), event(args=[]), {"ph": "X"}]
    wrong += [{key: value for key, value in event().items() if key != "dur"}]
    found = read_chrome_trace(written(trace, [event(), *wrong, event(ts=99, args=None)]))
    assert found.timeline.start_ns.tolist() == [10_000, 99_000]
    assert found.left_out == {"malformed": len(wrong)}


def test_json_as_profilers_break_it_is_read_and_said(trace):
    broken = (
        rb'{"traceEvents": [{"ph":"X","name":"C:\dir\new \"q\" \u00e9","cat":"kernel","ts":1,"dur":2,"pid":0,"tid":0,'
    )
    broken += b'"args":{"occupancy": nan, "x": -inf, "s": "NaN, inf", "correlation": 4}},\n{"ph":"X","name":"a\tb\xff",'
    broken += b'"cat":"kernel","ts":3,"dur":4}]}'
    trace.write_bytes(broken)
    found = read_chrome_trace(trace)
    assert found.mended
    assert found.timeline.text("name") == ['C:\\dir\new "q" é', "a b�"]
    assert found.timeline.correlation.tolist() == [4, -1]


def test_a_bare_array_is_a_trace_too(trace):
    trace.write_text("\n [" + json.dumps(event()) + "\n]\n")
    found = read_chrome_trace(trace)
    assert (len(found.timeline), found.truncated, found.facts) == (1, False, {})
    trace.write_text("[" + json.dumps(event()) + ",\n")
    found = read_chrome_trace(trace)
    assert (len(found.timeline), found.truncated) == (1, True)


def test_an_empty_trace_has_no_spans(trace):
    found = read_chrome_trace(written(trace, [], distributedInfo={"rank": 5}))
    assert len(found.timeline) == 0
    assert found.facts["distributedInfo"] == {"rank": 5}


def test_old_and_new_spellings_give_the_same_kinds_and_lanes(trace):
    new = [
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "cpu_op",
        "cuda_runtime",
        "user_annotation",
        "cuda_sync",
        "overhead",
        "ac2g",
    ]
    old = ["Kernel", "Memcpy", "Memset", "Operator", "Runtime", "user_annotation", "cuda_sync", "overhead", "Trace"]
    modern = read_chrome_trace(written(trace, [event(cat=cat, tid=7) for cat in new])).timeline
    tids = [
        7 if kind in ("user_annotation", "overhead") else "stream 7" if i < 3 or i == 6 else "7"
        for i, kind in enumerate(new)
    ]
    ancient = read_chrome_trace(
        written(trace, [event(cat=cat, tid=tid) for cat, tid in zip(old, tids, strict=True)])
    ).timeline
    names = ["compute", "memory", "memory", "operator", "runtime", "annotation", "synchronisation", "overhead", "other"]
    assert modern.kind.tolist() == ancient.kind.tolist() == [Kind[name.upper()] for name in names]
    assert modern.text("lane") == ancient.text("lane")
    assert modern.text("lane")[0] == "stream 7"
    assert modern.text("lane")[3] == "thread 7"


def test_a_kernel_is_communication_by_its_link_whatever_its_name(trace):
    record = event(
        cat="cpu_op",
        name="record_param_comms",
        args={
            "External id": 3,
            "Collective name": "_allgather_base",
            "In msg nelems": 10,
            "dtype": "BFloat16",
            "Seq": 8,
            "Process Group Name": "dp",
        },
    )
    named = event(
        name="mystery<int>",
        args={"External id": 9, "Collective name": "allreduce", "In msg nelems": 3, "dtype": "Float"},
    )
    linked, plain = event(name="mystery", args={"External id": 3}), event(name="mystery", args={"External id": 4})
    old = [
        event(cat="cpu_op", name="record_param_comms", args={"External id": 5}),
        event(name="strange", args={"External id": 5}),
    ]
    timeline = read_chrome_trace(written(trace, [record, named, linked, plain, *old])).timeline
    talks = Kind.COMMUNICATION
    assert timeline.kind.tolist() == [Kind.OPERATOR, talks, talks, Kind.COMPUTE, Kind.OPERATOR, talks]
    assert timeline.text("collective")[:4] == ["", "all_reduce", "all_gather", ""]
    assert timeline.bytes.tolist()[1:4] == [12, 20, -1]
    assert timeline.text("group")[2] == "dp"
    assert timeline.sequence.tolist()[2] == 8


@pytest.mark.parametrize(
    ("kernel", "collective"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", "all_gather"),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs4K)", "all_reduce"),
        ("ncclDevKernel_SendRecv(ncclDevComm*)", "send_recv"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", ""),
        ("void deep_ep::internode::dispatch<false, 8, 1>(int4*, float*)", "dispatch"),
        ("void vendor::ep::internode::combine<true>(int)", "combine"),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*)", "dispatch"),
        ("multimem_all_reduce_kernel<c10::BFloat16>", "all_reduce"),
        ("void nvshmemi_proxy_rma_entrypoint", ""),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", "all_reduce"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_ag", ""),
    ],
)
def test_kernels_of_communication_libraries_are_known_by_name(kernel, collective):
    assert is_communication(kernel)
    assert collective_named(kernel) == collective


@pytest.mark.parametrize(
    "kernel",
    [
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_nn",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
        "void at::native::vectorized_gather_kernel<16, long>",
        "void deep_ep::layout::get_dispatch_layout<256>(long const*)",
        "void at::native::elementwise_kernel_with_SyncWarp",
        "void transformer_engine::dequantize_kernel",
        "void at::native::index_elementwise_kernel_broadcast",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
    ],
)
def test_compute_is_not_taken_for_communication(kernel):
    assert not is_communication(kernel)


def test_kernels_belong_to_the_step_and_the_call_that_launched_them(trace):
    host = {"pid": 100, "tid": 100}
    steps = [event(cat="user_annotation", name=f"ProfilerStep#{4 + i}", ts=100 * i, dur=100, **host) for i in range(2)]
    calls = [
        event(cat="cuda_runtime", name="cudaLaunchKernel", ts=90 + 60 * i, dur=1, args={"correlation": 1}, **host)
        for i in range(2)
    ]
    kernels = [event(ts=120 + 60 * i, args={"correlation": 1}) for i in range(2)]
    ahead = [
        event(cat="cuda_runtime", ts=190, dur=1, args={"correlation": 2}, **host),
        event(ts=189, args={"correlation": 2}),
    ]
    lost = [event(ts=150, args={"correlation": 77}), event(cat="cpu_op", ts=205, **host)]
    timeline = read_chrome_trace(written(trace, [*steps, *calls, *kernels, *ahead, *lost])).timeline
    assert launches_of(timeline).tolist() == [-1, -1, -1, -1, 2, 3, -1, 6, -1, -1]
    assert timeline.step.tolist() == [4, 5, 4, 5, 4, 5, 5, 5, -1, -1]


def test_kernels_of_several_devices_in_one_file_have_lanes_of_their_own(trace):
    lanes = read_chrome_trace(
        written(trace, [event(pid=0), event(pid=2), event(cat="cpu_op", pid=9, tid="main")])
    ).timeline
    assert lanes.text("lane") == ["device 0 stream 7", "device 2 stream 7", "thread main"]


def test_timelines_of_ranks_become_one_and_come_apart_again():
    ranks = [
        Timeline.of(kind=Kind.COMPUTE, start_ns=[i], duration_ns=[1], name=[f"k{i}"], lane="stream 7", rank=i)
        for i in (2, 0)
    ]
    both = concatenate(ranks)
    assert both.ranks() == [0, 2]
    assert both.of_rank(2).text("name") == ["k2"]
    assert both.text("lane") == ["stream 7"] * 2
    assert both.matching("name", ["k0", "absent"]).tolist() == [False, True]
    assert len(concatenate([])) == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"kind": Kind.COMPUTE, "start_ns": [1], "duration_ns": [-1]}, "negative duration"),
        ({"kind": Kind.COMPUTE, "start_ns": [1], "duration_ns": [1, 2]}, "duration_ns have another length"),
        (
            {"kind": Kind.COMPUTE, "start_ns": [1], "duration_ns": [1], "colour": ["red"]},
            "not a column of a Timeline: colour",
        ),
    ],
)
def test_columns_that_make_no_timeline_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        Timeline.of(**columns)
