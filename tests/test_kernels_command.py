"""``headway kernels``: what it lists, judges and compiles, and how it fails."""

import ast
import json
from pathlib import Path

import pytest

import headway.kernels
from commands import run
from headway.kernels import OPERATORS

pytest.importorskip("triton")

from headway.kernels.proof import adaln_cases, machine_code
from headway.kernels.proof.adaln_cases import CASES


def test_importing_the_operators_needs_no_triton():
    files = [file for file in Path(headway.kernels.__file__).parent.glob("*.py") if not file.stem.endswith("_triton")]
    assert len(files) >= 4
    for file in files:
        for node in ast.parse(file.read_text()).body:
            assert not (isinstance(node, ast.Import | ast.ImportFrom) and "triton" in ast.unparse(node)), file


def test_list_names_every_operator(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "kernels", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(OPERATORS)


def test_check_judges_every_result_of_every_case(monkeypatch, capsys):
    monkeypatch.setattr(adaln_cases, "CASES", CASES[2:4])
    code, out, _ = run(monkeypatch, capsys, "kernels", "check", "adaln", "--json", "-")
    results = json.loads(out)["results"]
    assert code == 0
    assert {row["case"] for row in results} == {str(case) for case in CASES[2:4]}
    assert {row["result"] for row in results} == set(adaln_cases.RESULTS)
    assert all(row["passed"] for row in results)


def test_check_exits_with_1_for_a_kernel_that_is_less_exact(monkeypatch, capsys):
    exact = adaln_cases.kernel

    def a_little_off(*arguments, **keywords):
        return {name: value * (1 + 1e-5) for name, value in exact(*arguments, **keywords).items()}

    monkeypatch.setattr(adaln_cases, "CASES", CASES[2:3])
    monkeypatch.setattr(adaln_cases, "kernel", a_little_off)
    code, out, err = run(monkeypatch, capsys, "kernels", "check", "adaln")
    assert code == 1
    assert "output" in out
    assert len(err.splitlines()) == 1


def test_compile_writes_the_table_and_exits_with_1_when_a_promise_is_broken(monkeypatch, capsys, tmp_path):
    only = [compiled for compiled in adaln_cases.compiled() if "parts" in compiled.name]
    monkeypatch.setattr(adaln_cases, "compiled", lambda: only)
    targets = {name: machine_code.TARGETS[name] for name in ("sm_90", "gfx942")}
    monkeypatch.setattr(machine_code, "TARGETS", targets)
    page = tmp_path / "kernels.md"
    code, out, _ = run(monkeypatch, capsys, "kernels", "compile", "adaln", "--table", str(page))
    assert code == 0
    assert out.strip() in page.read_text()
    assert all(target in out for target in targets)
    monkeypatch.setattr(machine_code, "SHARED_MEMORY", dict.fromkeys(targets, 512))
    code, _, err = run(monkeypatch, capsys, "kernels", "compile", "adaln")
    assert code == 1
    assert "bytes of shared memory" in err


def test_an_operator_that_is_none_is_refused(monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "kernels", "check", "adalm")
    assert (code, out) == (2, "")
    assert err == f"headway: error: adalm: no such operator; there are {', '.join(OPERATORS)}\n"
