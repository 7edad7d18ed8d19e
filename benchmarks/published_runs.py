"""Predictions of published training runs beside what they measured: time, memory, ranges, and layouts chosen.

The table of runs lies beside the repository (../shared/published/measured_runs.csv). Each row is mapped to a model, a
layout and a framework's behaviour without a look at its measurement; what was chosen for whole sources with their runs
in sight is listed in docs/published_runs.md. Other planners on the same data: calculon 15.3 % (vTrain's multi-node
runs) and 38.9 % (single-node), llm-analysis 24.4 and 57.5 %, vTrain itself with a profile of its layers 14.7 and 8.4 %,
SimuMax on its own machine 5.6 %.

Run: python benchmarks/published_runs.py [--runs RUNS.csv] [--json PATH]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from headway.plan import Summary, read_runs, validate

RUNS = Path(__file__).parents[2] / "shared" / "published" / "measured_runs.csv"


def row(summary: Summary) -> dict[str, Any]:
    """A source's errors, without its rows."""
    return summary.as_json()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    result = validate(read_runs(arguments.runs))
    seconds = time.perf_counter() - began
    found = {
        "benchmark": "published_runs",
        "seconds": seconds,
        "rows": len(result.rows),
        "not_mapped": result.reasons(),
        "sources": {name: row(summary) for name, summary in result.by_source().items()},
        "kinds": {name: row(summary) for name, summary in result.by_kind().items()},
        "overall": row(result.overall),
    }
    for name, errors in (*found["sources"].items(), *found["kinds"].items(), ("all", found["overall"])):
        if errors["rows"]:
            print(
                f"{name[:60]:60} {errors['rows']:5}  {errors['mean_absolute_percent']:5.1f} % {errors['bias']:+6.1f} %"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
