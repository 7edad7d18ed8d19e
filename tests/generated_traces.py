"""Traces as the PyTorch profiler writes them, of a host and a device that obey its rules.

For cases without a real file. The host goes through operators, calls and waits in order; a kernel begins when its
launch has reached the device and its stream is free. So what a test plants (a stall, a synchronisation, a late rank)
has its real consequences.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAUNCH_US = 5
"""Of the host for a launch call; the kernel may begin so long after the call begins."""
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array>"


class GeneratedTrace:
    """One rank's trace. Times are us; the host's clock begins at ``start``."""

    def __init__(
        self, rank: int = 0, world: int = 1, start: int = 1_000_000, device: str = "NVIDIA A100", major: int = 8
    ):
        self.facts: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": device, "computeMajor": major}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world},
        }
        self.events: list[dict[str, Any]] = []
        self.now = float(start)
        self.streams: dict[int, float] = {}
        self.correlation = 0
        self.sequence = 0
        self.held: list[dict[str, Any]] = []
        """Kernels that are in the file after all others."""

    def host(self, category: str, name: str, us: float, **args: Any) -> dict[str, Any]:
        """Add an event of the host that begins now; the clock stays."""
        event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": self.now, "dur": us, "args": args}
        self.events.append(event)
        return event

    def work(self, us: float) -> None:
        """The host does something that nobody records."""
        self.now += us

    @contextmanager
    def scope(self, name: str, category: str = "user_annotation") -> Iterator[None]:
        """A range around what the host does within."""
        event = self.host(category, name, 0)
        begin = self.now
        yield
        event["dur"] = self.now - begin

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A training step."""
        with self.scope(f"ProfilerStep#{number}"):
            yield

    def launch(
        self,
        kernel: str,
        us: float,
        stream: int = 7,
        operator: str = "aten::op",
        after: tuple[int, ...] = (),
        **args: Any,
    ) -> float:
        """Launch a kernel from an operator; when it ends. ``after``: streams whose work it waits for."""
        with self.scope(operator, "cpu_op"):
            self.work(3)
            self.correlation += 1
            name = "cudaMemcpyAsync" if kernel.startswith("Memcpy") else "cudaLaunchKernel"
            self.host("cuda_runtime", name, LAUNCH_US, correlation=self.correlation)
            begin = max(self.now + LAUNCH_US, *(self.streams.get(one, 0.0) for one in (stream, *after)))
            self.work(LAUNCH_US)
        category = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": kernel,
                "pid": 0,
                "tid": stream,
                "ts": begin,
                "dur": us,
                "args": {"correlation": self.correlation, "stream": stream, **args},
            }
        )
        self.streams[stream] = begin + us
        return begin + us

    def wait_for(self, instant: float, call: str = "cudaStreamSynchronize") -> None:
        """The host waits in ``call`` until ``instant``."""
        until = max(instant + 2, self.now + 1)
        self.host("cuda_runtime", call, until - self.now, correlation=-1)
        self.now = until

    def synchronise(self, call: str = "cudaDeviceSynchronize") -> None:
        """The host waits for all streams."""
        self.wait_for(max(self.streams.values(), default=self.now), call)

    def collective(
        self,
        kind: str,
        until: float,
        stream: int = 20,
        group: str = "0",
        elements: int = 1 << 20,
        after: tuple[int, ...] = (),
    ) -> None:
        """A collective that this rank joins now and that ends at ``until`` on every rank."""
        names = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}
        self.sequence += 1
        end = self.launch(
            f"ncclDevKernel_{names[kind]}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            0,
            stream,
            "record_param_comms",
            after,
            **{
                "Collective name": f"_{kind}_base" if kind == "all_gather" else kind,
                "Process Group Name": group,
                "dtype": "BFloat16",
                "In msg nelems": elements,
                "Seq": self.sequence,
            },
        )
        event = self.events[-1]
        event["dur"] = max(until - end, 1)
        self.streams[stream] = end + event["dur"]

    def write(self, path: Path) -> Path:
        """Write the file."""
        path.write_text(json.dumps({**self.facts, "traceEvents": self.events + self.held}))
        return path


def plain_step(trace: GeneratedTrace, number: int, kernels: int = 20, us: float = 500) -> None:
    """A healthy step: the host runs ahead of the device, and nothing waits."""
    with trace.step(number):
        for _ in range(kernels):
            trace.launch(GEMM, us, operator="aten::mm")


def finish(trace: GeneratedTrace) -> None:
    """The host waits for the device, as a profiler does at its end."""
    trace.synchronise()
