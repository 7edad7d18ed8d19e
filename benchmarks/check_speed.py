"""How long ``headway check --shrink`` takes over its whole auto set of layouts, and whether every layout holds.

Each example's toy is checked by the command itself, start and imports counted, one after the other: seconds of the
command, layouts by what became of them, and the largest part of its bound that any error of any layout reaches.
Run: python benchmarks/check_speed.py --json benchmarks/results/check_speed.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = ("llama-3.1-8b", "flux-full", "wan-14b-video")
LIMIT_S = 1800.0


def check(model: str, precision: str) -> dict[str, Any]:
    """One example checked; raises RuntimeError with what the command printed when it ends in no verdict."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = ["--shrink", "--precision", precision, "--json", str(result)]
        began = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", "headway.cli.main", "check", EXAMPLES / f"{model}.toml", *options],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        seconds = time.monotonic() - began
        if ended.returncode not in (0, 1):
            raise RuntimeError(f"{model}, {precision}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
        told = json.loads(result.read_text())
    layouts = [
        {"layout": row["layout"], "ranks": row["ranks"], "status": row["status"], "seconds": row["seconds"]}
        for row in told["layouts"]
    ]
    return {
        "model": model,
        "precision": precision,
        "seconds": seconds,
        "load_before": load,
        "holds": told["holds"],
        "statuses": dict(Counter(row["status"] for row in layouts)),
        "largest_of_bound": _largest(told),
        "layouts": layouts,
    }


def _largest(told: dict[str, Any]) -> dict[str, Any]:
    """The error nearest to its bound (or farthest above), with where it is."""
    shares = [
        {"share": row[name] / bound, "error": name, "layout": row["layout"]}
        for row in told["layouts"]
        for name, bound in told["bounds"].items()
        if row.get(name) is not None
    ]
    return max(shares, key=lambda row: row["share"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="examples, by name")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    results = []
    for precision in arguments.precisions:
        for model in arguments.models:
            row = check(model, precision)
            results.append(row)
            statuses = ", ".join(f"{count} {status}" for status, count in row["statuses"].items())
            print(f"{model} {precision}: {row['seconds']:.0f} s, {statuses}, {row['largest_of_bound']}", flush=True)
            arguments.json.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
