"""Explaining a large trace: headway beside HolisticTraceAnalysis, wall, processor time and memory.

Headway's side is all of ``headway explain`` (health, budgets, findings); the other loads the trace and asks for its
breakdown and its overlap. The trace is 12 copies of a public one (A100, DDP, 109 thousand events) end to end, shifted
in time: 1.31 million events. Each side runs in a process of its own, one after the other. HolisticTraceAnalysis 0.5.0
wants pandas 2: give the Python of an environment that has them with --hta-python or HTA_PYTHON; without, only headway
is measured. Run: python benchmarks/explain_speed.py --trace TRACE --hta-python ENVIRONMENT/bin/python
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "kineto" / "a100_ddp_rank3of8.json.gz"
MEASURED = """
import json, resource, sys, time
began, processor = time.perf_counter(), time.process_time()
{work}
usage = resource.getrusage(resource.RUSAGE_SELF)
children = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({{
    "wall_s": time.perf_counter() - began,
    "processor_s": time.process_time() - processor + children.ru_utime + children.ru_stime,
    "peak_mib": max(usage.ru_maxrss, children.ru_maxrss) / 1024,
    "result": result,
}}))
"""
HEADWAY = """
from pathlib import Path
from headway.explain import explain
report = explain([Path(sys.argv[1])])
(rank,) = report.explained.ranks
result = {"health": report.verdict, "findings": [finding.id for finding in report.explained.findings]}
result |= {"idle_percent": 100 * rank["idle_us"] / rank["window_us"]}
result |= {"compute_percent": 100 * rank["compute_us"] / rank["window_us"], "overlap_percent": rank["overlap_percent"]}
"""
HTA = """
import contextlib, io
from hta.trace_analysis import TraceAnalysis
with contextlib.redirect_stdout(io.StringIO()):
    analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="")
    breakdown = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
result = {"idle_percent": float(breakdown["idle_time_pctg"].iloc[0])}
result |= {"compute_percent": float(breakdown["compute_time_pctg"].iloc[0])}
result |= {"overlap_percent": float(overlap["comp_comm_overlap_pctg"].iloc[0])}
"""


def build(source: Path, copies: int, target: Path) -> None:
    """Write ``copies`` of the events of ``source`` end to end, each shifted past the one before."""
    text = gzip.decompress(source.read_bytes()).decode()
    opening = '"traceEvents": ['
    begin = text.index(opening) + len(opening)
    end = text.rindex("]")
    events = text[begin:end]
    times = [int(time) for time in re.findall(r'"ts": (\d+)', events)]
    length = max(times) - min(times) + 1_000_000
    with target.open("w") as file:
        file.write(text[:begin])
        for copy in range(copies):
            shift = copy * length
            file.write("," if copy else "")
            file.write(re.sub(r'"ts": (\d+)', lambda time, by=shift: f'"ts": {int(time[1]) + by}', events))
        file.write(text[end:])


def measure(python: str, work: str, trace: Path) -> dict[str, Any]:
    """Wall and processor seconds, peak memory and result of ``work`` on ``trace`` in a process of its own."""
    command = [python, "-W", "ignore", "-c", MEASURED.format(work=work), str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {done.stderr.strip().splitlines()[-1:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--hta-python", default=os.environ.get("HTA_PYTHON"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "long.json"
        build(arguments.trace, arguments.copies, trace)
        report: dict[str, Any] = {"benchmark": "explain_speed", "megabytes": trace.stat().st_size / 1e6}
        report["headway"] = measure(sys.executable, HEADWAY, trace)
        if arguments.hta_python:
            report["hta"] = measure(arguments.hta_python, HTA, trace)
            for key in ("wall_s", "processor_s", "peak_mib"):
                report[f"{key}_ratio"] = report["hta"][key] / report["headway"][key]
        else:
            print("HolisticTraceAnalysis is not measured: --hta-python names no environment with it", file=sys.stderr)
    print(json.dumps(report, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
