"""The command line: one clear line for a user's mistake, a traceback for ours, and instant help."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headway
from headway.cli import main as cli
from headway.cli.result import give_result
from headway.errors import RunFailed, UserError
from headway.recipe import to_toml
from tiny_recipes import text_file, text_recipe

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


@pytest.fixture
def files(tmp_path) -> Path:
    """What a newcomer may name in place of what is wanted, beside a good recipe."""
    text = text_file(tmp_path / "text.jsonl")
    (tmp_path / "good.toml").write_text(to_toml(text_recipe(text, tmp_path / "run")))
    (tmp_path / "bad.toml").write_text("[model")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "untrained").mkdir()
    shutil.copy(tmp_path / "good.toml", tmp_path / "untrained" / "recipe.toml")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train {}/folder", "is a folder; give a recipe file (.toml)"),
        ("train {}/bad.toml", "not valid TOML"),
        ("train {}/bytes.toml", "not valid TOML"),
        ("train {}/good.toml --set model.class_name=Qwen4", "class_name = 'Qwen4' is no model"),
        ("train {}/good.toml --set data.path={}/txt.jsonl", "does not exist; near ones: "),
        ("train {}/good.toml --set data.path={}/folder", "holds no file ending in .jsonl"),
        ("train {}/good.toml --set data.validation_fraction=0.001 --set data.sequence_length=200", "raise data.valida"),
        ("train {}/good.toml --set model.tokenizer={}/no", "model.tokenizer = {}/no does not exist"),
        ("train {}/good.toml --set model.tokenizer={}/folder", "holds no tokenizer transformers can load"),
        ("train {}/good.toml --set run.directory={}/bad.toml", "bad.toml: cannot be created: File exists"),
        ("train {}/good.toml --set layout.dp_shard=3", "layout.dp_shard"),
        ("train {}/good.toml --set sample.prompts=['a']", "sample.prompts are drawn by diffusion models only"),
        ("export {}/folder --to {}/out", "not a run directory"),
        ("export {}/good.toml --to {}/out", "not a run directory"),
        ("export {}/untrained --to {}/out", "holds no good checkpoint to export"),
        ("export {}/untrained --to {}/folder", "exists already"),
        ("export {}/untrained --to {}/bad.toml/out", "bad.toml is no folder that this user may write to"),
        ("export {}/untrained --to {}/out --json {}/no/such.json", "such.json can't be written: name a file"),
        ("export {}/untrained --to {}/out --json {}", "can't be written: name a file"),
        ("export {}/untrained --to {}/out --ema 0.5", "holds no good checkpoint to export"),
    ],
)
def test_what_a_newcomer_mistypes_is_told_in_one_line_and_exits_with_2(monkeypatch, capsys, files, command, message):
    code, out, err = run(monkeypatch, capsys, *command.replace("{}", str(files)).split())
    assert code == 2
    assert out == ""
    assert err.startswith("headway: error: ")
    assert message.replace("{}", str(files)) in err
    assert len(err.splitlines()) == 1


def test_a_rank_without_an_address_is_told_what_is_missing(monkeypatch, capsys, files):
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = run(monkeypatch, capsys, "train", str(files / "good.toml"))
    assert code == 2
    assert "but WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not" in err


def test_a_result_that_does_not_fit_on_the_disk_is_told_with_the_result(tmp_path):
    with pytest.raises(UserError, match=r"^exported\n--json /dev/full can't be written: No space left on device"):
        give_result({}, "exported", "/dev/full")


def test_a_wrong_command_or_option_exits_with_2(monkeypatch, capsys):
    assert run(monkeypatch, capsys, "trian")[0] == 2
    assert run(monkeypatch, capsys, "recipe", "show")[0] == 2
    assert run(monkeypatch, capsys, "train", str(EXAMPLE), "--ranks", "0")[0] == 2
    assert run(monkeypatch, capsys, "export", "run", "--to", "out", "--dtype", "float8")[0] == 2
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
