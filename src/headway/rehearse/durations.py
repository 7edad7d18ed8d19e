"""How long each operator of a Record takes on a cluster, with a range by the source of its error.

What is uncertain about one product is uncertain about all of them alike: errors of one source move together, and do not
average out over many operators.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from headway.cluster import Cluster
from headway.cluster import Group as GroupOnLinks
from headway.cluster import OperatorKind as MemoryBoundKind
from headway.cost import Collective as CostedAs
from headway.cost import (
    Estimate,
    attention,
    collective,
    grouped_matrix_product,
    host_copy,
    matrix_product,
    memory_bound,
)
from headway.errors import UserError
from headway.rehearse.columns import Columns, Flags, Integers
from headway.rehearse.compiled_kernels import FUSED_RANGE, Kernels
from headway.rehearse.record import Attention, Collective, Operator, Product, Record

Column = NDArray[np.float64]

PRODUCTS, ATTENTION, MEMORY, FUSION, HOST, BESIDE = (
    "matrix products",
    "attention",
    "memory-bound operators",
    "compiled kernels",
    "host",
    "compute beside communication",
)
"""Sources of errors; each level of links is one besides."""
HOST_COPIES = "copy"
"""Lanes whose names begin so move memory between device and host."""
FLOAT32_SLOWDOWN = (12.0, 3.0, 18.0)
"""Time of a float32 product without TF32 over that of a bfloat16 one, where no rate is known: 67 TFLOP/s of ordinary
units beside 989 of an H100's matrix units, 19.5 beside 312 of an A100's, 91 beside 362 of an L40S's."""
ELEMENT_BYTES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


@dataclass(frozen=True)
class Durations:
    """Times in ns, float64, each ``[operators]``; a host's launch is not in them. 0 for what is within another's
    kernel."""

    value: Column
    low: Column
    high: Column
    source: NDArray[np.int8]
    """Place in ``sources``."""
    sources: tuple[str, ...]
    bytes_moved: Integers
    """By each kernel, or contributed by this rank to a collective: int64, ``[operators]``."""
    launched: Flags
    """Which operators the host launches."""
    launch: Estimate
    """Host time of each."""
    slowdown: Estimate
    """By how much compute is slower while a collective runs beside it: 0.15 is 15 %."""
    level: NDArray[np.int8]
    """Outermost level of links that a collective crosses, -1 for what crosses none."""
    sharing: Column
    """What a collective's time grows by for each ns in which another one uses the same level: 1 is twice as long."""


def durations(record: Record, columns: Columns, kernels: Kernels, cluster: Cluster) -> Durations:
    """Time of every operator of ``record`` on ``cluster``. Raises UserError when the cluster is too small or a rate is
    not known."""
    count = len(columns)
    levels = tuple(level.name for level in cluster.levels)
    sources = (PRODUCTS, ATTENTION, MEMORY, FUSION, HOST, BESIDE, *levels)
    times = np.zeros((3, count))
    source = np.zeros(count, dtype=np.int8)
    moved = kernels.bytes_moved.copy()
    level, sharing = np.full(count, -1, dtype=np.int8), np.zeros(count)

    def put(chosen: Any, found: Estimate, name: str) -> None:
        for row, end in zip(times, (found.value, found.low, found.high), strict=True):
            row[chosen] = end
        source[chosen] = sources.index(name)

    for kind in get_args(MemoryBoundKind):
        chosen = columns.of_kind(kind) & kernels.launched
        put(chosen, memory_bound(cluster, kernels.bytes_moved[chosen], kind), MEMORY)
    fused = kernels.fused
    source[fused] = sources.index(FUSION)
    times[1, fused] *= FUSED_RANGE[0]
    times[2, fused] *= FUSED_RANGE[1]
    copies = np.isin(columns.lane, [place for text, place in columns.strings.items() if text.startswith(HOST_COPIES)])
    put(copies, host_copy(cluster, columns.bytes_moved[copies] / 2), MEMORY)
    operators = record.operators
    for product, numbers in _alike(operators, columns.of_kind("product"), lambda one: (one.work, one.dtype)).items():
        put(numbers, _product(cluster, *product), PRODUCTS)
    for pass_, numbers in _alike(operators, columns.of_kind("attention"), lambda one: one.work).items():
        put(numbers, _attention(cluster, pass_), ATTENTION)
    for call, numbers in _alike(operators, columns.communicates, lambda one: one.collective).items():
        crossed, found, shared = _communication(cluster, record, call)
        put(numbers, found, levels[crossed] if crossed >= 0 else HOST)
        level[numbers], sharing[numbers] = crossed, shared
        moved[numbers] = call.bytes // (record.groups[call.group].size if call.kind == "all_gather" else 1)
    rate = cluster.achieved.host.operator_us
    slowdown = cluster.achieved.compute_slowdown
    return Durations(
        value=times[0],
        low=times[1],
        high=times[2],
        source=source,
        sources=sources,
        bytes_moved=moved,
        launched=kernels.launched,
        launch=Estimate(1e3 * rate.value, 1e3 * rate.low, 1e3 * rate.high),
        slowdown=Estimate(slowdown.value, slowdown.low, slowdown.high),
        level=level,
        sharing=sharing,
    )


def check_devices(cluster: Cluster, ranks: int) -> None:
    """Raises UserError when ``cluster`` has fewer devices than there are ranks."""
    devices = cluster.levels[-1].devices if cluster.levels else 1
    if ranks > devices:
        raise UserError(
            f"cluster {cluster.name} joins {devices} devices and {ranks} are asked for: ask for fewer, or let "
            "the outermost of its [[levels]] join more"
        )


def _alike(operators: list[Operator], flags: Flags, key: Callable[[Operator], Any]) -> dict[Any, list[int]]:
    """The chosen operators by what they cost the same for."""
    found: dict[Any, list[int]] = {}
    for number in np.flatnonzero(flags).tolist():
        found.setdefault(key(operators[number]), []).append(number)
    return found


def _product(cluster: Cluster, work: Product, dtype: str) -> Estimate:
    """Time of a product whose result is of ``dtype``."""
    precision = "float8" if work.dtype.startswith("float8") else work.dtype
    written = ELEMENT_BYTES.get(dtype, 2.0)
    known = {str(key) for key in cluster.achieved.matrix} & {str(key) for key in cluster.accelerator.dense_peak_tflops}
    slower = Estimate(1.0, 1.0, 1.0)
    if precision not in known and precision not in ("float16", "float8"):
        precision, slower = "bfloat16", Estimate(*FLOAT32_SLOWDOWN)
    if work.groups > 1:
        rows = work.m / work.groups
        groups = work.groups * work.batch
        found = grouped_matrix_product(cluster, rows, work.n, work.k, groups, precision, output_bytes=written)
    else:
        found = matrix_product(cluster, work.m, work.n, work.k, precision, work.batch, output_bytes=written)
    return Estimate(found.value * slower.value, found.low * slower.low, found.high * slower.high)


def _attention(cluster: Cluster, work: Attention) -> Estimate:
    return attention(
        cluster,
        work.batch,
        work.heads,
        work.queries,
        work.keys,
        work.head_size,
        causal=work.causal,
        skips_masked=not work.masked,
        backward=work.backward,
        value_head_size=work.value_head_size,
    )


def _communication(cluster: Cluster, record: Record, call: Collective) -> tuple[int, Estimate, float]:
    """Outermost level that a collective crosses, its time, and what it grows by when it shares that level."""
    group = group_on(cluster, record.groups[call.group].ranks if call.peer < 0 else (record.facts.rank, call.peer))
    kind: CostedAs = "send_recv" if call.kind == "send" or call.kind == "recv" else call.kind
    alone, beside = (collective(kind, call.bytes, group, sharing) for sharing in (1.0, 2.0))
    used = group.used()
    if not used:
        return -1, alone, 0.0
    growth = float(beside.value / alone.value) - 1 if alone.value else 0.0
    return [level for level, _ in group.inside].index(used[-1][0]), alone, growth


def group_on(cluster: Cluster, ranks: tuple[int, ...]) -> GroupOnLinks:
    """Where on the cluster's links ``ranks`` lie, rank r being device r."""
    inside = tuple((level, max(Counter(rank // level.devices for rank in ranks).values())) for level in cluster.levels)
    return GroupOnLinks(len(ranks), inside)
