"""FLOPs, bytes and types of matrix products from recorded shapes; memory from the profiler's notes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generated_traces import GEMM, POINTWISE, GeneratedTrace, finish
from headway.explain import explain
from headway.timeline import Kind, read_chrome_trace
from headway.timeline.products import product_of

BFLOAT16 = ["c10::BFloat16"] * 3
size = st.integers(1, 5_000)


def product(operator: str, dimensions, types=BFLOAT16):
    return product_of(operator, json.dumps(dimensions), json.dumps(types))


@given(size, size, size, size)
def test_a_product_is_two_operations_for_each_multiply_and_add(m, k, n, batch):
    found = product("aten::mm", [[m, k], [k, n]])
    assert (found.flops, found.bytes, found.dtype) == (2 * m * k * n, 2 * (m * k + k * n + m * n), "bfloat16")
    assert product("aten::addmm", [[n], [m, k], [k, n]]) == found
    many = product("aten::bmm", [[batch, m, k], [batch, k, n]])
    assert (many.flops, many.bytes) == (batch * found.flops, batch * found.bytes)
    assert product("aten::baddbmm", [[batch, m, n], [batch, m, k], [batch, k, n]]) == many


@pytest.mark.parametrize(
    ("operator", "dimensions", "types"),
    [
        ("aten::mul", [[4, 4], [4, 4]], BFLOAT16),
        ("aten::mm", [[4, 4], [5, 4]], BFLOAT16),
        ("aten::mm", [[4, 4]], BFLOAT16),
        ("aten::mm", [[4, 4], [4, 4]], ["unknown", "unknown"]),
        ("aten::mm", [[4, 4], [4, 4]], []),
        ("aten::mm", [[4, -4], [-4, 4]], BFLOAT16),
        ("aten::mm", [[4, 2**60], [2**60, 4]], BFLOAT16),
        ("aten::mm", [[2**80, 4], [4, 0]], BFLOAT16),
        ("aten::mm", [["4", 4], [4, 4]], BFLOAT16),
        ("aten::mm", {"0": 3}, BFLOAT16),
        ("aten::mm", 7, 7),
    ],
)
def test_what_says_too_little_is_not_known(operator, dimensions, types):
    assert product(operator, dimensions, types) is None
    assert product_of(operator, "[", "") is None


def with_products(device: str, us: float) -> GeneratedTrace:
    """Products of 4096 x 4096 matrices in bfloat16, each with a small kernel of the same operator after it."""
    trace = GeneratedTrace(device=device, major=9)
    for number in range(3):
        with trace.step(number):
            for _ in range(10):
                with trace.scope("aten::addmm", "cpu_op"):
                    identity = len(trace.events)
                    dims = [[4096], [4096, 4096], [4096, 4096]]
                    trace.events[-1]["args"] = {"External id": identity, "Input Dims": dims, "Input type": BFLOAT16}
                    trace.launch(GEMM, us, **{"External id": identity})
                    trace.launch(POINTWISE, 3, **{"External id": identity})
    finish(trace)
    return trace


@pytest.mark.parametrize(("device", "peak"), [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA Unheard-of", None)])
def test_a_product_s_rate_stands_beside_what_its_shape_allows(tmp_path, device, peak):
    report = explain([with_products(device, 200).write(tmp_path / "rank0.json")]).as_json()
    kernels = {kernel["name"]: kernel for kernel in report["kernels"]}
    gemm = kernels[GEMM]
    assert gemm["tflops_per_s"] == pytest.approx(2 * 4096**3 / 200e-6 / 1e12)
    assert gemm["dtype"] == "bfloat16"
    assert gemm["roofline_tflops_per_s"] == (None if peak is None else pytest.approx(peak, rel=1e-3))
    assert kernels[POINTWISE]["tflops_per_s"] is None, "it is not the product itself"


def test_a_thin_product_is_bounded_by_memory(tmp_path):
    trace = GeneratedTrace(device="NVIDIA H100 80GB HBM3", major=9)
    with trace.step(0), trace.scope("aten::mm", "cpu_op"):
        args = {"External id": 5, "Input Dims": [[1, 8192], [8192, 8192]], "Input type": BFLOAT16[:2]}
        trace.events[-1]["args"] = args
        trace.launch(GEMM, 60, **{"External id": 5})
    finish(trace)
    (gemm,) = (k for k in explain([trace.write(tmp_path / "a.json")]).as_json()["kernels"] if k["name"] == GEMM)
    bytes_moved = 2 * (8192 + 8192 * 8192 + 8192)
    assert gemm["roofline_tflops_per_s"] == pytest.approx(2 * 8192**2 / (bytes_moved / 3.35e12) / 1e12, rel=0.01)


def allocation(at: float, total: int, device: int = 1, number: int = 0) -> dict:
    args = {"Total Allocated": total, "Bytes": 1, "Device Type": device, "Device Id": number, "Addr": 1}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": at,
        "s": "t",
        "args": args,
    }


def memory_of(events: list[dict], folder: Path):
    file = folder / "trace.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1, "dur": 1, "args": {}}
    file.write_text(json.dumps({"traceEvents": [*events, kernel]}))
    trace = read_chrome_trace(file)
    assert trace.timeline.kinds(Kind.COMPUTE).sum() == 1
    return trace.memory


def test_memory_is_of_the_device_that_is_used_most_in_order_of_time(tmp_path):
    events = [
        allocation(9, 300), allocation(5, 200), allocation(6, 7, device=0), allocation(7, 8, number=1),
        {**allocation(8, 1), "name": "other"}, {**allocation(8, 1), "args": {}}, {**allocation(8, 1), "ts": "when"},
    ]  # fmt: skip
    memory = memory_of(events, tmp_path)
    assert (memory.at_ns.tolist(), memory.allocated.tolist()) == ([5_000, 9_000], [200, 300])
    assert not memory.on_host
    host = memory_of([allocation(1, 5, device=0), allocation(2, 6, device=0)], tmp_path)
    assert (host.allocated.tolist(), host.on_host) == ([5, 6], True)
    assert len(memory_of([], tmp_path)) == 0
