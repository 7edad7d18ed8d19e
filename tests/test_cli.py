"""The command line: one clear line for a user's mistake, a traceback for ours, and instant help."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headway
from headway.cli import main as cli
from headway.errors import RunFailed, UserError

EXAMPLE = Path(__file__).parent.parent / "examples" / "demo.toml"


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``headway ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_recipe_show_prints_the_resolved_recipe_with_what_was_set(monkeypatch, capsys):
    code, out, _ = run(
        monkeypatch, capsys, "recipe", "show", str(EXAMPLE), "--set", "optim.lr=3e-4", "--set", "run.steps=7000"
    )
    document = tomllib.loads(out)
    assert code == 0
    assert document["optim"]["lr"] == 3e-4
    assert document["run"]["steps"] == 7000
    assert document["checkpoint"]["keep_last"] == 2, "defaults are written out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe", "show", "no/such.toml"], "headway: error: no/such.toml: no such recipe file"),
        (["recipe", "show", str(EXAMPLE), "--set", "optim.lrr=1"], "optim.lrr: unknown key; did you mean optim.lr?"),
        (["recipe", "show", str(EXAMPLE), "--set", "nonsense"], "--set nonsense: write it as section.key=value"),
        (["recipe", "show", str(EXAMPLE), "--set", "run.steps=many"], "run.steps: Input should be a valid integer"),
        (["train", "no/such.toml"], "headway: error: no/such.toml: no such recipe file"),
    ],
)
def test_a_users_mistake_is_told_in_one_line_and_exits_with_2(monkeypatch, capsys, arguments, message):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("headway: error: ")
    assert message in err


def test_a_wrong_command_or_option_exits_with_2(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "trian")[0] == 2
    assert run(monkeypatch, capsys, "recipe", "show")[0] == 2
    assert run(monkeypatch, capsys, "recipe", "show", str(EXAMPLE), "--sett", "a=b")[0] == 2


def test_version_and_help(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "--version") == (0, f"headway {headway.__version__}\n", "")
    for arguments in (["--help"], ["recipe", "show", "--help"], ["train", "--help"]):
        code, out, _ = run(monkeypatch, capsys, *arguments)
        assert code == 0
        assert "Usage" in out
    assert "headway recipe show examples/demo.toml" in run(monkeypatch, capsys, "recipe", "show", "--help")[1]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("a.toml: one\na.toml: two"), 2, "headway: error: a.toml: one\nheadway: error: a.toml: two\n"),
        (RunFailed("diverged"), 1, "headway: error: diverged\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_each_end_has_its_exit_code_and_no_traceback(monkeypatch, capsys, error, code, message):
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert run(monkeypatch, capsys) == (code, "", message)


def test_our_own_bugs_keep_their_traceback(monkeypatch):
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_the_command_line_imports_no_heavy_library_before_a_command_needs_it():
    code = "import sys, headway.cli.main; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "transformers", "diffusers", "pyarrow", "PIL", "peft"}
    assert heavy.isdisjoint(result.stdout.split())
