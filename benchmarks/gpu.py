"""One GPU in under eight minutes: kernels' numbers, their speed, what the device reaches, and models fused and not.

Needs torch ≥ 2.11 and triton ≥ 3.6 and nothing else; models want transformers and diffusers, the cluster file all that
Headway requires (carry wheels, unpack them with pip install --target DIRECTORY, and put that on PYTHONPATH). Each part
has a process and a time of its own: one that fails or is late does not take the others with it, and keeps what it has.

Run: PYTHONPATH=src python benchmarks/gpu.py [--out DIRECTORY] [--parts numerics speed shapes cluster models]
Without a GPU: python benchmarks/gpu.py --dry --out DIRECTORY (tiny sizes on the CPU; its times say nothing)
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "src")]
LIMITS_S = {"device": 30, "numerics": 100, "speed": 130, "shapes": 30, "cluster": 60, "models": 110}
"""Seconds of each part; together they are less than eight minutes."""


def _part(name: str, dry: bool, folder: Path, rows: Path) -> None:
    """In a process of its own: append rows to a file as they are found."""
    os.setsid()  # so that what it starts ends with it
    import torch

    from gpu_parts import calibration, models, numerics, speed
    from gpu_parts.device import DRY, facts

    device = DRY if dry else torch.device("cuda")
    if dry:
        torch.set_num_threads(1)  # tensors are tiny
    with rows.open("a", buffering=1) as file:

        def add(row: dict[str, Any]) -> None:
            file.write(json.dumps(row) + "\n")

        parts: dict[str, Callable[[], None]] = {
            "device": lambda: add(facts(device)),
            "numerics": lambda: numerics.run(device, dry, add),
            "speed": lambda: speed.run(device, dry, add),
            "shapes": lambda: calibration.shapes(device, dry, add),
            "cluster": lambda: calibration.cluster(dry, add, folder / "cluster.toml"),
            "models": lambda: models.run(device, dry, add, folder),
        }
        try:
            parts[name]()
        except BaseException:
            add({"failed": traceback.format_exc()})
            raise


def run_part(name: str, dry: bool, folder: Path) -> dict[str, Any]:
    """What a part found, how long it took, and whether it came to its end."""
    rows = folder / f"{name}.jsonl"
    rows.unlink(missing_ok=True)
    # Forked, for a process that has not touched the device: torch is imported once where no GPU is.
    process = multiprocessing.get_context("fork").Process(target=_part, args=(name, dry, folder, rows))
    began = time.perf_counter()
    process.start()
    process.join(LIMITS_S[name])
    late = process.is_alive()
    if late:
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    found = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    rows.unlink(missing_ok=True)
    status = "late" if late else "done" if process.exitcode == 0 else f"exit code {process.exitcode}"
    return {"status": status, "seconds": round(time.perf_counter() - began, 1), "rows": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, help="Default: benchmarks/results/DEVICE")
    parser.add_argument("--parts", nargs="*", choices=LIMITS_S, default=[name for name in LIMITS_S if name != "device"])
    arguments = parser.parse_args()
    if arguments.dry and arguments.out is None:
        parser.error("--dry writes no results of a device: give --out")
    from gpu_parts import calibration, models, numerics, speed  # noqa: F401  (or each part would import it anew)

    folder = arguments.out or FOLDER / "results"
    folder.mkdir(parents=True, exist_ok=True)
    device = run_part("device", arguments.dry, folder)
    if device["status"] != "done":
        sys.exit(f"gpu.py: no device: {device['rows']}")
    facts = device["rows"][0]
    if arguments.out is None:
        folder = folder / facts["device"].removeprefix("NVIDIA ").replace(" ", "-").lower()
        folder.mkdir(exist_ok=True)
    result = {
        "benchmark": "gpu",
        "dry": arguments.dry,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
    }
    result["parts"] = {}
    for name in arguments.parts:
        result["parts"][name] = part = run_part(name, arguments.dry, folder)
        (folder / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"{name}: {part['status']} in {part['seconds']} s, {len(part['rows'])} rows", flush=True)
    wrong = [row for row in result["parts"].get("numerics", {"rows": []})["rows"] if not row.get("passed", True)]
    if wrong or any(part["status"] != "done" for part in result["parts"].values()):
        sys.exit(f"{len(wrong)} results of kernels are wrong; see {folder / 'gpu.json'}")


if __name__ == "__main__":
    main()
