"""The cost model against public kernel measurements: error per source, as shipped and fitted without that source.

Two columns of errors. "shipped": the rates of headway.cluster as they are. "without": the few numbers of the form
fitted to all other sources of the same device and kind, and judged on the one left out: what a new stack will meet.
Run: python benchmarks/cost_model.py --data DIRECTORY --json benchmarks/results/cost_model.json
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.cluster import Cluster, cluster_named
from headway.cost import attention, collective, matrix_product, memory_bound

DATA = Path(__file__).parents[2] / "shared" / "microbench"
ACCELERATORS = {
    "A100-SXM4-80GB": "A100-SXM4-80GB",
    "A100-PCIe-80GB": "A100-PCIe-80GB",
    "H100-SXM": "H100-SXM5-80GB",
    "H200-SXM": "H200-SXM-141GB",
    "B200-SXM": "B200-SXM-180GB",
    "B300": "B300-SXM",
    "GB200": "GB200-NVL72",
    "GB300": "GB300-NVL72",
    "L40S": "L40S",
}
PRECISIONS = {"bf16": "bfloat16", "fp8": "float8", "fp8_block": "float8", "nvfp4": "float4"}
COLLECTIVES = {"alltoall": "all_to_all"}
SMALLEST = 512
"""Matrix products with a smaller dimension are serving's: not of interest here."""
FEWEST_ROWS = 12
LARGE_FLOPS = 1e11


@dataclass(frozen=True)
class Case:
    """Measurements of one device, kind and source, with the ways to predict them."""

    table: str
    device: str
    what: str
    source: str
    rows: list[dict[str, str]]

    @property
    def fitted_with(self) -> tuple[str, str, str]:
        """Cases of one key are fitted together."""
        return self.table, self.device, self.what

    def column(self, *names: str) -> list[np.ndarray]:
        return [np.array([float(row[name]) for row in self.rows]) for name in names]

    def measured_ns(self) -> np.ndarray:
        return 1e3 * self.column("latency_us")[0]


def stack(source: str, notes: str = "") -> str:
    """A short name of who measured with what."""
    owner = source.split("@")[0].split(" ")[0]
    framework = next((name for name in ("sglang", "trtllm", "vllm", "nccl") if f"/{name}/" in source), "")
    sustained = ", sustained" if "sustained" in notes else ""
    accumulating = ", weight gradient" if "accumulate=True" in notes else ""
    return f"{owner.split('/')[-1]}{' ' + framework if framework else ''}{sustained}{accumulating}"


def read(data: Path, table: str) -> Iterator[dict[str, str]]:
    with (data / f"{table}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["gpu"] in ACCELERATORS:
                yield row


def matrix_cases(data: Path) -> list[Case]:
    groups = defaultdict(list)
    for row in read(data, "gemm"):
        grouped = any(word in row["notes"].lower() for word in ("group", "expert", "moe"))
        if grouped or row["dtype_in"] not in PRECISIONS or not row["latency_us"]:
            continue
        if min(float(row[dimension]) for dimension in "mnk") >= SMALLEST:
            groups[row["gpu"], row["dtype_in"], stack(row["source"], row["notes"])].append(row)
    return [Case("matrix", device, what, source, rows) for (device, what, source), rows in groups.items()]


def attention_cases(data: Path) -> list[Case]:
    groups = defaultdict(list)
    for row in read(data, "attention"):
        numbers = ("batch", "heads", "seq_q", "seq_k", "head_dim", "latency_us")
        if row["dtype"] != "bf16" or not all(row[name] for name in numbers) or "triton" in row["impl"]:
            continue
        if "trtllm/" in row["source"]:  # these time rotary embedding and the writing of a cache too
            continue
        if row["gpu"] == "L40S" and "sglang/" in row["source"]:  # rates of up to five times the peak
            continue
        if float(row["seq_q"]) >= 256 and row["pass"] == "fwd" and row["head_dim"] in ("64", "128", "256"):
            what = f"d{row['head_dim']}{' causal' if row['causal'] == '1' else ''}"
            groups[row["gpu"], what, stack(row["source"])].append(row)
    return [Case("attention", device, what, source, rows) for (device, what, source), rows in groups.items()]


def collective_cases(data: Path) -> list[Case]:
    groups = defaultdict(list)
    for row in read(data, "collectives"):
        kind = COLLECTIVES.get(row["collective"], row["collective"])
        if kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") or row["num_nodes"] != "1":
            continue
        if row["bytes"] and row["latency_us"] and float(row["bytes"]) >= 65536 and "off" not in row["link"]:
            groups[row["gpu"], kind, stack(row["source"])].append(row)
    return [Case("collective", device, what, source, rows) for (device, what, source), rows in groups.items()]


def memory_cases(data: Path) -> list[Case]:
    kinds = {"cast": ("quantise",), "normalisation": ("norm",), "softmax": ("softmax",), "permute": ("permute",)}
    kinds["pointwise"] = ("add", "copy", "mul")
    groups = defaultdict(list)
    for row in read(data, "memory_bound"):
        operator = row["op"].lower()
        kind = next((kind for kind, words in kinds.items() if any(word in operator for word in words)), None)
        several_passes = "torch_ops" in operator or "nvfp4" in operator
        if kind and row["bytes_moved"] and float(row["bytes_moved"]) >= 4e6 and not several_passes:
            row["latency_us"] = str(float(row["bytes_moved"]) / float(row["gbps"]) / 1e3)
            groups[row["gpu"], kind, stack(row["source"])].append(row)
    return [Case("memory-bound", device, what, source, rows) for (device, what, source), rows in groups.items()]


def predict(cluster: Cluster, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Expected, low and high time of each row in ns."""
    match case.table:
        case "matrix":
            rows, columns, depth = case.column("m", "n", "k")
            found = matrix_product(cluster, rows, columns, depth, precision=PRECISIONS[case.what])
            if PRECISIONS[case.what] != "bfloat16":  # serving frameworks cast the activations in the same call
                found = found + memory_bound(cluster, 3 * rows * depth, "cast")
        case "attention":
            head_size = int(case.rows[0]["head_dim"])
            sizes = case.column("batch", "heads", "seq_q", "seq_k")
            found = attention(cluster, *sizes, head_size, causal="causal" in case.what)
        case "collective":
            return predict_collectives(cluster, case)
        case "memory-bound":
            found = memory_bound(cluster, case.column("bytes_moved")[0], case.what)
    return found.value, found.low, found.high


def predict_collectives(cluster: Cluster, case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    size, ranks = case.column("bytes", "num_gpus")
    times = np.zeros((3, len(size)))
    for count in np.unique(ranks).astype(int).tolist():
        chosen = ranks == count
        found = collective(case.what, size[chosen], cluster.group(count))
        times[:, chosen] = found.value, found.low, found.high
    return times[0], times[1], times[2]


def one_rate(value: float) -> dict[str, float]:
    return {"value": value, "low": value, "high": value}


def variant(cluster: Cluster, case: Case, numbers: tuple[float, ...]) -> Cluster:
    """The cluster with the few numbers of a case's form replaced."""
    achieved = cluster.achieved.model_dump()
    match case.table:
        case "matrix":
            rate = achieved["matrix"][PRECISIONS[case.what]]
            rate |= {"efficiency": one_rate(numbers[0]), "half_depth": numbers[1]}
        case "attention":
            rate = achieved["attention"][cluster.achieved.attention_kernel]
            rate["forward"] = {int(case.rows[0]["head_dim"]): one_rate(numbers[0])}
            rate |= {"half_keys": numbers[1], "rows_per_processor": numbers[2]}
        case "memory-bound":
            achieved["memory"]["fraction"][case.what] = one_rate(numbers[0])
        case "collective":
            level = cluster.levels[0].model_dump()
            keys = ("startup_us", "hop_us", "ramp_us", "few_ranks")
            if case.what == "all_to_all":
                keys = ("all_to_all_startup_us", "hop_us", "ramp_us", "few_ranks")
                level["achieved"]["all_to_all_efficiency"] = one_rate(numbers[4])
            else:
                level["achieved"]["efficiency"] = one_rate(numbers[4])
            level["achieved"] |= dict(zip(keys, numbers[:4], strict=True))
            levels = (type(cluster.levels[0]).model_validate(level), *cluster.levels[1:])
            return cluster.model_copy(update={"levels": levels})
    return cluster.model_copy(update={"achieved": type(cluster.achieved).model_validate(achieved)})


def starting_point(cluster: Cluster, case: Case) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The shipped numbers of a case's form, and the largest value that each may take."""
    achieved = cluster.achieved
    match case.table:
        case "matrix":
            rate = achieved.matrix[PRECISIONS[case.what]]
            return (rate.efficiency.value, max(rate.half_depth, 8)), (1.0, 4096)
        case "attention":
            kernel = achieved.attention[achieved.attention_kernel]
            return (0.5, kernel.half_keys, kernel.rows_per_processor), (1.0, 4096, 2048)
        case "memory-bound":
            return (achieved.memory.fraction[case.what].value,), (1.0,)
    link = cluster.levels[0].achieved
    startup = link.all_to_all_startup_us if case.what == "all_to_all" else link.startup_us
    efficiency = link.all_to_all_efficiency if case.what == "all_to_all" else link.efficiency
    return (startup, link.hop_us, link.ramp_us, max(link.few_ranks, 0.05), efficiency.value), (500, 50, 900, 0.95, 1.3)


def fit(cluster: Cluster, cases: list[Case]) -> tuple[float, ...]:
    """The numbers of the form with the least mean error over ``cases``, each case counting alike: a pattern search."""
    numbers, most = starting_point(cluster, cases[0])
    measured = [case.measured_ns() for case in cases]

    def error(tried: tuple[float, ...]) -> float:
        changed = variant(cluster, cases[0], tried)
        errors = [np.abs(predict(changed, case)[0] / ns - 1).mean() for case, ns in zip(cases, measured, strict=True)]
        return float(np.mean(errors))

    best, stride = error(numbers), 1.5
    while stride > 1.01:
        moves = [
            (*numbers[:i], min(numbers[i] * step, most[i]), *numbers[i + 1 :])
            for i in range(len(numbers))
            for step in (stride, 1 / stride)
        ]
        found = min(moves, key=error)
        if (lowest := error(found)) < best - 1e-6:
            numbers, best = found, lowest
        else:
            stride = stride**0.5
    return numbers


def errors_of(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    relative = 100 * (predicted / measured - 1)
    return {
        "mape": float(np.abs(relative).mean()),
        "median": float(np.median(np.abs(relative))),
        "bias": float(relative.mean()),
        "p90": float(np.percentile(np.abs(relative), 90)),
    }


def large_products(case: Case) -> np.ndarray:
    """Which rows are matrix products of training's size."""
    if case.table != "matrix":
        return np.zeros(len(case.rows), dtype=bool)
    rows, columns, depth = case.column("m", "n", "k")
    return 2 * rows * columns * depth >= LARGE_FLOPS


def evaluate(cases: list[Case], refit: bool) -> Iterator[dict[str, Any]]:
    together = defaultdict(list)
    for case in cases:
        together[case.fitted_with].append(case)
    for case in sorted(cases, key=lambda case: (case.device, case.what, case.source)):
        cluster = cluster_named(ACCELERATORS[case.device])
        measured = case.measured_ns()
        expected, low, high = predict(cluster, case)
        inside = float(((measured >= low) & (measured <= high)).mean())
        large = large_products(case)
        row = {"table": case.table, "device": case.device, "what": case.what, "source": case.source}
        row |= {"rows": len(case.rows), "shipped": errors_of(expected, measured), "in_range": inside}
        if large.any():
            row["large"] = errors_of(expected[large], measured[large])
        others = [other for other in together[case.fitted_with] if other.source != case.source]
        if refit and others:
            row["numbers"] = fit(cluster, others)
            row["without"] = errors_of(predict(variant(cluster, case, row["numbers"]), case)[0], measured)
        yield row


def show(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        shipped, without = row["shipped"], row.get("without")
        line = f"{row['table']:12} {row['device']:15} {row['what']:14} {row['source']:34} {row['rows']:5}  "
        line += f"{shipped['mape']:5.1f} {shipped['bias']:+6.1f} {shipped['p90']:6.1f} {100 * row['in_range']:5.0f}"
        print(line + (f"   {without['mape']:5.1f} {without['bias']:+6.1f} {without['p90']:6.1f}" if without else ""))


def totals(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over sources, each counting alike, per table."""
    found = {}
    for table in dict.fromkeys(row["table"] for row in rows):
        for column in ("shipped", "large", "without"):
            chosen = [row[column] for row in rows if row["table"] == table and column in row]
            if chosen:
                keys = ("mape", "median", "bias", "p90")
                found[f"{table} {column}"] = {key: float(np.mean([entry[key] for entry in chosen])) for key in keys}
                found[f"{table} {column}"]["sources"] = len(chosen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--tables", nargs="*", default=["matrix", "attention", "memory-bound", "collective"])
    parser.add_argument("--no-refit", action="store_true", help="only the shipped rates")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    readers: dict[str, Callable[[Path], list[Case]]] = {
        "matrix": matrix_cases,
        "attention": attention_cases,
        "memory-bound": memory_cases,
        "collective": collective_cases,
    }
    print(f"{'':78} rows   shipped: mean abs %, bias, P90, in range %   without this source")
    rows = []
    for table in arguments.tables:
        cases = [case for case in readers[table](arguments.data) if len(case.rows) >= FEWEST_ROWS]
        found = list(evaluate(cases, refit=not arguments.no_refit))
        show(found)
        rows += found
    for name, total in totals(rows).items():
        print(
            f"{name:24} {total['sources']:3} sources  mean abs {total['mape']:5.1f} %  median {total['median']:5.1f} %"
            f"  bias {total['bias']:+5.1f} %  P90 {total['p90']:5.1f} %"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"benchmark": "cost_model", "totals": totals(rows), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
