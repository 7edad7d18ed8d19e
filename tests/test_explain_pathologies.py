"""Each pathology is found where it is planted or really there, and not in its near miss.

A case is two builders: of a trace (or several) that has the pathology, and of one that resembles it and has it not.
Public traces stand where there are some.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from generated_traces import GEMM, POINTWISE, GeneratedTrace, finish, plain_step
from headway.explain import Finding, explain
from headway.recipe import Recipe

TRACES = Path(__file__).parents[2] / "shared" / "traces" / "kineto"
Builder = Callable[[Path], list[Path]]
STEPS = 4


def one(build: Callable[[GeneratedTrace, int], None], steps: int = STEPS, **options) -> Builder:
    """A trace whose every step is healthy work after what ``build`` adds."""

    def builder(folder: Path) -> list[Path]:
        trace = GeneratedTrace(**options)
        for number in range(steps):
            with trace.step(number):
                build(trace, number)
        finish(trace)
        return [trace.write(folder / "trace.json")]

    return builder


def public(name: str) -> Builder:
    def builder(_: Path) -> list[Path]:
        place = TRACES / name
        return sorted(place.glob("*.json.gz")) if place.is_dir() else [place]

    return builder


def work(trace: GeneratedTrace, kernels: int = 20, us: float = 500, name: str = GEMM) -> None:
    for _ in range(kernels):
        trace.launch(name, us, operator="aten::mm")


def loader(wait_us: float, drained: bool) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        with trace.scope("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
            trace.work(wait_us)
        work(trace)
        if drained:
            trace.synchronise()

    return build


def copies(kind: str, blocks: bool) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        stream = 7 if blocks else 22
        end = trace.launch(f"Memcpy HtoD ({kind} -> Device)", 2_000, stream, "aten::copy_")
        if blocks:
            call = next(event for event in reversed(trace.events) if event["name"] == "cudaMemcpyAsync")
            call["dur"] = end - call["ts"]
            trace.now = end + 1
        work(trace)

    return build


def reads(operator: str, scope: str | None, each: int, blocking: bool = True) -> Callable[[GeneratedTrace, int], None]:
    """``each`` operators a step in which the host waits for the device and then goes on with short work."""

    def read(trace: GeneratedTrace) -> None:
        with trace.scope(operator, "cpu_op"):
            trace.launch("Memcpy DtoH (Device -> Pinned)", 1, operator="aten::_local_scalar_dense")
            if blocking:
                trace.synchronise("cudaStreamSynchronize")

    def build(trace: GeneratedTrace, _: int) -> None:
        for _ in range(each):
            work(trace, kernels=2)
            if scope is None:
                read(trace)
            else:
                with trace.scope(scope):
                    read(trace)
            trace.work(300)
        work(trace, kernels=4)

    return build


def pauses(name: str, category: str, us: float, when: Callable[[int], bool]) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, number: int) -> None:
        work(trace)
        if when(number):
            with trace.scope(name, category):
                trace.work(us)

    return build


def silent(us: float, when: Callable[[int], bool]) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, number: int) -> None:
        work(trace)
        if when(number):
            trace.work(us)

    return build


def launches(host_us: float, device_us: float) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        for _ in range(50):
            trace.work(host_us)
            trace.launch(POINTWISE if device_us < 50 else GEMM, device_us, operator="aten::mm")

    return build


def warm_up(us: float) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, number: int) -> None:
        work(trace)
        if number == 0:
            trace.host("overhead", "Lazy Function Loading", 10)
            trace.launch(GEMM, us)

    return build


def attention(operator: str) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        work(trace)
        with trace.scope(operator, "cpu_op"):
            trace.launch(GEMM, 800, operator="aten::bmm")
            trace.launch("softmax_warp_forward", 800, operator="aten::softmax")
            trace.launch(GEMM, 800, operator="aten::bmm")

    return build


def products(name: str) -> Callable[[GeneratedTrace, int], None]:
    return lambda trace, _: work(trace, name=name)


def casts(us: float) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        for _ in range(20):
            trace.launch(GEMM, 300, operator="aten::mm")
            with trace.scope("aten::_to_copy", "cpu_op"):
                trace.launch("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", us)

    return build


def pointwise(name: str) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        for _ in range(20):
            trace.launch(GEMM, 300, operator="aten::mm")
            for _ in range(3):
                trace.launch(name, 100, operator="aten::add")

    return build


def backward(forward_again: bool) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        for _ in range(10):
            trace.launch(GEMM, 300, operator="aten::linear")
        with trace.scope("autograd::engine::evaluate_function: CheckpointFunctionBackward", "cpu_op"):
            for _ in range(10):
                if forward_again:
                    trace.launch(GEMM, 300, operator="aten::linear")
                trace.launch(GEMM, 600, operator="aten::mm")

    return build


def encoder(scope: str, us: float) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        with trace.scope(scope):
            trace.launch("implicit_convolve_sgemm_tf32", us, operator="aten::conv2d")
        work(trace)

    return build


def optimizer(kernels: int, drained: bool) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        work(trace, us=500)
        if drained:
            trace.synchronise()
        with trace.scope("Optimizer.step#AdamW.step"):
            for _ in range(kernels):
                trace.launch(POINTWISE, 2, operator="aten::addcmul_")

    return build


def zeros(kernels: int) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, _: int) -> None:
        with trace.scope("Optimizer.zero_grad#AdamW.zero_grad"):
            for _ in range(kernels):
                trace.launch("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", 2)
        work(trace)
        trace.synchronise()

    return build


def allocations(within: bool) -> Builder:
    def builder(folder: Path) -> list[Path]:
        trace = GeneratedTrace()
        for number in range(STEPS):
            with trace.step(number):
                work(trace)
                if within or number == STEPS:
                    trace.wait_for(max(trace.streams.values()), "cudaFree")
                    for _ in range(4):
                        trace.host("cuda_runtime", "cudaMalloc", 400)
                        trace.work(400)
        if not within:
            for name in ("cudaFree", "cudaMalloc"):
                trace.wait_for(max(trace.streams.values()), name)
        finish(trace)
        return [trace.write(folder / "trace.json")]

    return builder


def profiler(us: float) -> Callable[[GeneratedTrace, int], None]:
    def build(trace: GeneratedTrace, number: int) -> None:
        work(trace)
        trace.synchronise()
        if number == 1:
            trace.host("overhead", "Activity Buffer Request", us)
            trace.work(us)

    return build


def collectives(
    kind: str, us: float, hidden: bool, prompt: bool = True, early: bool = False, elements: int = 1 << 26, each: int = 4
) -> Builder:
    """Two ranks that arrive together; the transfer runs beside compute, or compute waits for it."""

    def rank(number: int) -> GeneratedTrace:
        trace = GeneratedTrace(rank=number, world=2)
        for step in range(STEPS):
            with trace.step(step):
                for _ in range(each):
                    late = trace.launch(GEMM, 1_000, operator="aten::mm")
                    if not prompt:
                        trace.wait_for(late - 5)
                    trace.collective(kind, 0, elements=elements, after=() if early or (prompt and hidden) else (7,))
                    trace.events[-1]["dur"] = us
                    trace.streams[20] = trace.events[-1]["ts"] + us
                    if hidden:
                        trace.launch(GEMM, 3_000, operator="aten::mm")
                    else:
                        trace.launch(GEMM, 1_000, operator="aten::mm", after=(20,))
                trace.synchronise()
        return trace

    return lambda folder: [rank(n).write(folder / f"rank{n}.json") for n in range(2)]


def ranks(
    late_us: Callable[[int, int], float],
    transfer_us: Callable[[int], float] = lambda _: 100,
    count: int = 4,
    compute_us: Callable[[int, int], float] = lambda rank, step: 2_000,
    own_kernels: bool = False,
) -> Builder:
    """Ranks that reduce together, each after ``late_us(rank, step)`` of silence; the transfer follows the last."""

    def builder(folder: Path) -> list[Path]:
        traces = [GeneratedTrace(rank=n, world=count, start=1_000_000) for n in range(count)]
        for step in range(6):
            arrivals = []
            for n, trace in enumerate(traces):
                with trace.step(step):
                    for kernel in range(6):
                        name = f"{GEMM}_{kernel}_{n}" if own_kernels else f"{GEMM}_{kernel}"
                        trace.launch(name, compute_us(n, step), operator="aten::mm")
                    trace.synchronise()
                    trace.work(late_us(n, step))
                arrivals.append(trace.now)
            end = max(arrivals) + 13 + transfer_us(step)
            for trace in traces:
                trace.collective("all_reduce", end, after=(7,))
                trace.wait_for(end)
        return [trace.write(folder / f"rank{n}.json") for n, trace in enumerate(traces)]

    return builder


def shaped(rows: int, us: float, device: str = "NVIDIA H100 80GB HBM3") -> Builder:
    """Products of ``rows`` rows with weights of 8192 x 8192 in bfloat16, whose shapes the trace has."""

    def build(trace: GeneratedTrace, _: int) -> None:
        for _ in range(20):
            with trace.scope("aten::mm", "cpu_op"):
                identity = len(trace.events)
                shapes = {"Input Dims": [[rows, 8192], [8192, 8192]], "Input type": ["c10::BFloat16"] * 2}
                trace.events[-1]["args"] = {"External id": identity, **shapes}
                trace.launch(GEMM, us, **{"External id": identity})
        trace.synchronise()

    return one(build, device=device, major=9)


def mesh(spread_elements: int, inside_elements: int) -> Builder:
    """Rank 0 of two nodes of 8: a group of ranks 0 and 8, and one of ranks 0 and 1, of which compute waits."""

    def build(trace: GeneratedTrace, _: int) -> None:
        trace.facts["deviceProperties"] = [{"id": number, "name": "NVIDIA A100"} for number in range(8)]
        groups = [{"pg_name": "10", "pg_desc": "mesh_tp", "ranks": [0, 8]}, {"pg_name": "11", "ranks": [0, 1]}]
        trace.facts["distributedInfo"]["pg_config"] = groups
        for _ in range(4):
            for group, elements in (("10", spread_elements), ("11", inside_elements)):
                trace.launch(GEMM, 1_000, operator="aten::mm", after=(20,))
                trace.collective("all_reduce", trace.now + 2_500, group=group, elements=elements, after=(7,))
        trace.synchronise()

    return one(build, world=16)


CASES: dict[str, tuple[Builder, Builder]] = {
    "data-loader-stall": (public("resnet50_dataloader_workers0.json.gz"), one(loader(1_000, drained=False))),
    "pageable-copy": (one(copies("Pageable", blocks=True)), one(copies("Pinned", blocks=False))),
    "exposed-copies": (one(copies("Pinned", blocks=True)), one(copies("Pinned", blocks=False))),
    "item-synchronisation": (public("a100_ddp_rank3of8.json.gz"), one(reads("aten::item", None, 8, blocking=False))),
    "nonzero-synchronisation": (one(reads("aten::nonzero", None, 8)), one(reads("aten::nonzero", None, 8, False))),
    "logging-synchronisation": (
        one(reads("aten::item", "## log_metrics ##", 8)),
        one(reads("aten::item", "## metrics:publish ##", 8, blocking=False)),
    ),
    "garbage-collection": (
        one(pauses("Python GC", "python_function", 30_000, lambda n: n == 2)),
        one(pauses("Python GC", "python_function", 3_000, lambda n: n == 2)),
    ),
    "recompilation": (
        one(pauses("entire_frame_compile", "cpu_op", 40_000, lambda n: n == 2)),
        one(pauses("TorchDynamo Cache Lookup", "cpu_op", 50, lambda _: True)),
    ),
    "checkpoint-stall": (
        one(pauses("Checkpointer.save", "user_annotation", 60_000, lambda n: n == 2)),
        one(pauses("CheckpointFunction.save", "user_annotation", 100, lambda _: True)),
    ),
    "host-pause": (one(silent(60_000, lambda n: n == 2)), one(silent(60_000, lambda _: True))),
    "launch-bound": (public("a100_nccl_args_rank0of2.json.gz"), public("v100_ns_resolution.json.gz")),
    "warm-up-step": (one(warm_up(20_000)), one(warm_up(1_000))),
    "attention-by-parts": (
        one(attention("aten::_scaled_dot_product_attention_math")),
        one(attention("aten::_scaled_dot_product_flash_attention")),
    ),
    "float32-products": (
        one(products("ampere_sgemm_128x64_nn")),
        one(products("volta_sgemm_128x64_nn"), device="Tesla V100-SXM2-32GB", major=7),
    ),
    "dtype-casts": (one(casts(60)), one(casts(1))),
    "unfused-pointwise": (one(pointwise(POINTWISE)), one(pointwise("triton_poi_fused_add_mul_0"))),
    "recomputation": (one(backward(forward_again=True)), one(backward(forward_again=False))),
    "inline-encoder": (one(encoder("## encode_prompt ##", 4_000)), one(encoder("## decoder_block ##", 4_000))),
    "unfused-optimizer": (one(optimizer(300, drained=True)), one(optimizer(12, drained=True))),
    "zero-grad-writes": (public("resnet50_dataloader_workers0.json.gz"), one(zeros(0))),
    "allocator-retries": (allocations(within=True), allocations(within=False)),
    "profiler-artefact": (one(profiler(9_000)), one(profiler(20))),
    "exposed-all-gather": (
        collectives("all_gather", 2_500, hidden=False, early=True),
        collectives("all_gather", 800, hidden=True),
    ),
    "late-all-gather": (
        collectives("all_gather", 800, hidden=False, prompt=False),
        collectives("all_gather", 800, hidden=True, prompt=True),
    ),
    "exposed-reduce-scatter": (
        collectives("reduce_scatter", 800, hidden=False),
        collectives("reduce_scatter", 800, hidden=True),
    ),
    "exposed-all-reduce": (collectives("all_reduce", 800, hidden=False), collectives("all_reduce", 800, hidden=True)),
    "small-messages": (
        collectives("all_reduce", 150, hidden=False, elements=1_000, each=30),
        collectives("all_reduce", 150, hidden=False, elements=1 << 24, each=30),
    ),
    "slow-link": (
        ranks(lambda rank, step: 0, transfer_us=lambda step: 9_000 if step == 3 else 800),
        ranks(lambda rank, step: 9_000 if (rank, step) == (1, 3) else 0, transfer_us=lambda _: 800),
    ),
    "thin-products": (shaped(rows=64, us=60), shaped(rows=4_096, us=700)),
    "spread-over-nodes": (mesh(1 << 26, 1 << 16), mesh(1 << 16, 1 << 26)),
    "straggler-masked-as-communication": (
        public("dlrm_8rank"),
        ranks(lambda rank, step: 20, transfer_us=lambda _: 3_000),
    ),
    "straggler": (
        ranks(lambda rank, step: 2_000 if rank == 2 else 0, transfer_us=lambda _: 3_000),
        ranks(lambda rank, step: 20 * rank, transfer_us=lambda _: 3_000),
    ),
    "unequal-compute": (
        ranks(lambda rank, step: 0, compute_us=lambda rank, step: 3_000 if rank == 1 else 2_000),
        ranks(lambda rank, step: 0, compute_us=lambda rank, _: 3_000 if rank == 1 else 2_000, own_kernels=True),
    ),
    "slow-device": (
        ranks(lambda rank, step: 0, compute_us=lambda rank, step: 2_600 if rank == 3 else 2_000),
        ranks(lambda rank, step: 0, compute_us=lambda rank, step: 2_600 if step % 4 == rank else 2_000),
    ),
}


def findings(paths: list[Path]) -> dict[str, Finding]:
    return {finding.id: finding for finding in explain(paths).explained.findings}


@cache
def findings_of(name: str) -> dict[str, Finding]:
    """What is found in the positive case of ``name``: each public trace is read once."""
    with TemporaryDirectory() as folder:
        return findings_at(tuple(CASES[name][0](Path(folder))))


@cache
def findings_at(paths: tuple[Path, ...]) -> dict[str, Finding]:
    return findings(list(paths))


@pytest.mark.parametrize("name", CASES)
def test_a_pathology_is_found_where_it_is(name):
    found = findings_of(name)
    assert name in found
    finding = found[name]
    assert finding.evidence
    assert all(evidence.file for evidence in finding.evidence)
    assert finding.claim
    assert finding.fix.text
    assert finding.verify
    assert finding.falsified_by
    if finding.recoverable is not None:
        assert 0 <= finding.recoverable.low_us <= finding.recoverable.high_us
        assert 0 <= finding.recoverable.share <= 1


@pytest.mark.parametrize("name", CASES)
def test_a_near_miss_is_no_pathology(name, tmp_path):
    assert name not in findings(CASES[name][1](tmp_path))


def test_a_healthy_run_has_no_finding(tmp_path):
    trace = GeneratedTrace()
    for number in range(5):
        plain_step(trace, number)
    finish(trace)
    assert not findings([trace.write(tmp_path / "trace.json")])


def test_the_gain_of_a_planted_stall_is_the_stall(tmp_path):
    found = findings(one(loader(7_000, drained=True))(tmp_path))["data-loader-stall"]
    assert found.recoverable.low_us == pytest.approx((STEPS - 1) * 7_000, rel=0.02)
    assert found.recoverable.high_us == pytest.approx((STEPS - 1) * 7_000, rel=0.02)


def test_overrides_of_fixes_are_keys_of_a_recipe():
    keys = {key for name in CASES for finding in findings_of(name).values() for key in finding.fix.recipe}
    assert len(keys) >= 5
    for key in keys:
        section, _, field = key.partition(".")
        assert field in Recipe.model_fields[section].annotation.model_fields, key
