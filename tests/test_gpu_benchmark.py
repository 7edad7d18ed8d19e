"""The benchmark of one GPU runs through without one, and what fails or is late in it does not take the rest along."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import gpu
from gpu_parts.device import published, seconds_of
from gpu_parts.numerics import OnDevice
from headway.kernels import OPERATORS
from soak import soak

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def dry(folder: Path, *parts: str) -> dict[str, list]:
    """Rows by part."""
    command = [sys.executable, str(SCRIPT), "--dry", "--out", str(folder), "--parts", *parts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((folder / "gpu.json").read_text())
    assert result["versions"]["torch"] == torch.__version__
    return {name: part["rows"] for name, part in result["parts"].items()}


def test_kernels_and_shapes_run_through_on_a_cpu(tmp_path: Path) -> None:
    found = dry(tmp_path, "numerics", "speed", "shapes")
    assert {row["operator"] for row in found["numerics"]} == OPERATORS.keys()
    assert all(row["passed"] for row in found["numerics"])
    times = [row for row in found["speed"] if "way" in row]
    assert all("error" not in row and row["seconds"] > 0 for row in times)
    assert {"fused", "eager"} == {row["way"] for row in times}
    assert {row["kind"] for row in found["shapes"]} == {"product", "attention", "copy on the device"}


@pytest.mark.parametrize("part", [soak("models"), soak("cluster")])
def test_models_and_a_cluster_file_run_through_on_a_cpu(tmp_path: Path, part: str) -> None:
    rows = dry(tmp_path, part)[part]
    if part == "cluster":
        assert (tmp_path / rows[0]["cluster_file"]).stat().st_size > 0
        return
    assert [row["fused"] for row in rows] == [False, True] * 2
    assert all((tmp_path / row["trace"]).stat().st_size > 0 and row["model_tflop"] > 0 for row in rows)


def test_a_late_part_is_ended_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def slow(name: str, dry: bool, folder: Path, rows: Path) -> None:
        gpu.os.setsid()
        rows.write_text('{"found": 1}\n')
        time.sleep(60)

    monkeypatch.setattr(gpu, "_part", slow)
    monkeypatch.setitem(gpu.LIMITS_S, "speed", 0.5)
    part = gpu.run_part("speed", True, tmp_path)
    assert part["status"] == "late"
    assert part["rows"] == [{"found": 1}]


def test_a_part_that_fails_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpu_parts.device.facts", lambda device: 1 / 0)
    part = gpu.run_part("device", True, tmp_path)
    assert part["status"] == "exit code 1"
    assert "ZeroDivisionError" in part["rows"][-1]["failed"]


def test_published_peaks_are_of_the_device_that_is_named_so() -> None:
    assert published("NVIDIA H200")["memory_bandwidth_gb_per_s"] == 4800
    assert published("NVIDIA H100 80GB HBM3")["memory_bandwidth_gb_per_s"] == 3350
    assert published("a CPU") == {}


def test_launches_get_copies_at_the_same_places_of_memory_and_changes_come_back() -> None:
    class Launches:
        @staticmethod
        def doubled(tensors: list[torch.Tensor], untouched: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            assert tensors[0].stride() == (1, 6)
            tensors[0].mul_(scale)
            return tensors[0] + untouched

    whole = torch.arange(24.0).view(4, 6)
    part = whole.mT[1:5, :2]
    expected = part * 2
    result = OnDevice(Launches, torch.device("cpu")).doubled([part], torch.ones(4, 2), torch.tensor(2.0))
    assert torch.equal(part, expected)
    assert torch.equal(result, expected + 1)
    assert torch.equal(whole[0, [0, 5]], torch.tensor([0.0, 5.0]))


def test_times_are_of_one_call() -> None:
    assert 0.009 < seconds_of([lambda: time.sleep(0.01)] * 3, torch.device("cpu"), 0.1) < 0.1
