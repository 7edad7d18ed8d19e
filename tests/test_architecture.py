"""The house stands as ARCHITECTURE.md says: imports go down only, doors hand on names, files stay readable."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "headway"
FILES = sorted(SOURCE.rglob("*.py"))
BESIDE_THE_ROOMS = {"errors"}
LONGEST_FILE = 500


@dataclass(frozen=True)
class Room:
    """A row of ARCHITECTURE.md's table."""

    floor: int
    floors_below: frozenset[int]
    rooms: frozenset[str]
    """Rooms that may be imported besides those of ``floors_below``."""
    libraries: frozenset[str] | None
    """Only these may be imported; None: any."""


def rooms() -> dict[str, Room]:
    """The table of ARCHITECTURE.md, by room."""
    table = {}
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for floor, names, allowed in re.findall(r"^\| (\d+) \| (.+?) \| .+ \| (.+?) \|$", text, flags=re.M):
        named = frozenset(re.findall(r"`(\w+)/`", allowed))
        if allowed == "all below":
            below, libraries = frozenset(range(int(floor))), None
        elif span := re.match(r"floors? (\d+)(?:-(\d+))?", allowed):
            below, libraries = frozenset(range(int(span[1]), int(span[2] or span[1]) + 1)), None
        else:
            below = frozenset()
            listed = (name.strip() for name in allowed.split(",") if not name.strip().startswith("`"))
            libraries = frozenset(listed) - {"standard library"}
        for name in re.findall(r"`(\w+)/`", names):
            table[name] = Room(int(floor), below, named, libraries)
    return table


ROOMS = rooms()


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Dotted names of modules that ``file`` imports anywhere in it, with the line."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def room_of(file: Path) -> str | None:
    parts = file.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


def test_the_table_names_every_room_and_no_other():
    folders = {folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").exists()}
    assert set(ROOMS) == folders
    assert len(ROOMS) >= 7


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_room_imports_only_rooms_on_the_floors_it_may(file):
    room = room_of(file)
    for name, line in imported(file):
        package, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if package != "headway" or other not in ROOMS or other == room:
            continue
        where = f"{file.relative_to(ROOT)}:{line} imports {name}"
        assert room is not None, f"{where}: what stands beside the rooms imports none of them"
        allowed = ROOMS[other].floor in ROOMS[room].floors_below or other in ROOMS[room].rooms
        assert allowed, f"{where}: not among what {room}/ may import"


@pytest.mark.parametrize("file", [f for f in FILES if room_of(f) in ROOMS and ROOMS[room_of(f)].libraries is not None])
def test_the_ground_floor_needs_no_other_library(file):
    allowed = ROOMS[room_of(file)].libraries | sys.stdlib_module_names | {"headway"}
    for name, line in imported(file):
        assert name.partition(".")[0] in allowed, f"{file.relative_to(ROOT)}:{line} imports {name}"
    assert "torch" not in allowed


@pytest.mark.parametrize("file", [f for f in FILES if f.name == "__init__.py" and f.parent.parent == SOURCE])
def test_a_door_hands_on_names_and_does_nothing_else(file):
    for node in ast.parse(file.read_text()).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        own = isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"headway.{file.parent.name}.")
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert docstring or own or names, f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_a_file_has_a_subject_and_stays_readable(file):
    text = file.read_text()
    assert ast.get_docstring(ast.parse(text)), "a module says what its subject is"
    assert text.count("\n") <= LONGEST_FILE


def public_definitions(file: Path) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_every_public_name_says_what_it_is(file):
    silent = [node.name for node in public_definitions(file) if not ast.get_docstring(node)]
    assert not silent


def test_nothing_that_is_read_can_run_code():
    """Law 8: no unrestricted unpickling, no code from a model's folder, no evaluation of text."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            where = f"{file.relative_to(ROOT)}:{node.lineno}: {called}"
            assert called not in {"eval", "exec", "pickle.load", "pickle.loads", "joblib.load"}, where
            for keyword in node.keywords:
                value = getattr(keyword.value, "value", None)
                assert not (keyword.arg == "trust_remote_code" and value is not False), where
                assert not (keyword.arg == "weights_only" and value is not True), where
            if called == "torch.load":
                assert any(keyword.arg == "weights_only" for keyword in node.keywords), where
