"""Pickles read as plain data: containers, numbers, strings. Nothing that a pickle can name is ever looked up or run.

Before anything is built, the opcodes are walked once: what is not plain is refused, and so is what would make the
interpreter allocate more than the file can hold (a place in the memo far beyond its entries, a string longer than the
file). Long runs of opcodes of fixed length, most of any dump, are skipped by one regular expression.
"""

import io
import pickle
import pickletools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.errors import UserError

LARGEST_BYTES = 4 << 30
"""Larger files are refused: a pickle is held whole in memory, several times its size."""

_NO_ARGUMENT = rb"[(012N}\])ldtaesu\x85-\x89\x8f-\x91\x94]"
_FIXED = b"|".join(
    [
        _NO_ARGUMENT,
        rb"[Khq\x80].",  # BININT1, BINGET, BINPUT, PROTO
        rb"M..",
        rb"[Jj].{4}",  # BININT, LONG_BINGET
        rb"[G\x95].{8}",  # BINFLOAT, FRAME
        *(rb"\x8a%c.{%d}" % (length, length) for length in range(9)),  # LONG1 of up to eight bytes
    ]
)
_RUN = re.compile(rb"(?s:(?:%s){1,4000})" % _FIXED)
"""Opcodes that hold nothing that must be looked at."""
_LENGTH_BYTES = {
    b"U": 1,
    b"T": 4,
    b"X": 4,
    b"\x8c": 1,
    b"\x8d": 8,
    b"B": 4,
    b"C": 1,
    b"\x8e": 8,
    b"\x8a": 1,
    b"\x8b": 4,
}
"""Strings, bytes and long integers: how many bytes say how many bytes follow."""
_HASHABLE = (b"t", b"\x85", b"\x86", b"\x87", b"\x91")
"""TUPLE, TUPLE1 to 3 and FROZENSET: hashing them as a key follows their nesting on the machine's stack, unchecked."""
STACK_BYTES_A_TUPLE = 256
"""Of the stack for each level of nesting; CPython 3.11 takes about 64."""
NESTED_ON_ANY_STACK, MOST_NESTED = 10_000, 4_000_000
_STOP = b"."
_LONG_BINPUT = b"r"
_GLOBALS = (b"c", b"i", b"\x93")
"""GLOBAL, INST and STACK_GLOBAL: the unpickler refuses them by the name they ask for."""
_OPCODE_NAMES = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}


def load_plain(path: Path) -> Any:
    """The plain data in a pickle file of protocol 2 to 5.

    Raises UserError when the file can't be read, is larger than ``LARGEST_BYTES``, is damaged, or holds anything but
    containers, numbers, strings, bytes, booleans and None.
    """
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UserError(f"{path}: larger than {LARGEST_BYTES >> 30} GiB, the most that is read of a pickle")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return loads_plain(data, str(path))


def loads_plain(data: bytes, name: str) -> Any:
    """As :func:`load_plain`, of bytes; ``name`` stands in messages."""
    if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise UserError(f"{name}: not a pickle of protocol 2 to 5")
    nested = _check_opcodes(data, name)
    if nested <= NESTED_ON_ANY_STACK:
        return _loaded(data, name)
    if nested > MOST_NESTED:
        raise UserError(f"{name}: the pickle may nest {nested:,} tuples in each other, more than is read")
    return _with_stack(nested * STACK_BYTES_A_TUPLE, lambda: _loaded(data, name))


def _loaded(data: bytes, name: str) -> Any:
    try:
        return _PlainUnpickler(data, name).load()
    except UserError:
        raise
    except Exception as error:
        # Damaged pickles end in whatever exception the operation they stumble over raises.
        told = " ".join(str(error).split())[:120]
        raise UserError(f"{name}: the pickle is damaged ({type(error).__name__}: {told})") from None


def _with_stack(size: int, load: Callable[[], Any]) -> Any:
    """What ``load`` gives in a thread whose stack has ``size`` bytes, or 1 MiB more."""
    given: list[Any] = []
    raised: list[UserError] = []

    def work() -> None:
        try:
            given.append(load())
        except UserError as error:
            raised.append(error)

    before = threading.stack_size((size >> 20) + 1 << 20)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return given[0]


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        raise UserError(
            f"{self._name}: the pickle asks for {module}.{name}; nothing of it was run: a dump or snapshot as torch "
            "writes it holds plain containers, numbers and strings, and nothing else is read"
        )


def _check_opcodes(data: bytes, name: str) -> int:
    """Walk the opcodes up to STOP or to the first name that is asked for. Raises UserError as :func:`load_plain`.

    Returns how many tuples and frozen sets may be nested at most: each takes an opcode of its own.
    """
    place, end, nested = 0, len(data), 0
    while place < end:
        if run := _RUN.match(data, place):
            nested += sum(data.count(opcode, place, run.end()) for opcode in _HASHABLE)
            place = run.end()
            continue
        opcode = data[place : place + 1]
        if opcode == _STOP or opcode in _GLOBALS:
            return nested
        if opcode == _LONG_BINPUT:
            entry = int.from_bytes(data[place + 1 : place + 5], "little")
            if entry > place:  # each entry of the memo takes more than a byte of the file
                raise UserError(f"{name}: the pickle is damaged (entry {entry} of the memo at byte {place})")
            place += 5
        elif opcode in _LENGTH_BYTES:
            text = place + 1 + _LENGTH_BYTES[opcode]
            place = text + int.from_bytes(data[place + 1 : text], "little")
        elif known := _OPCODE_NAMES.get(opcode):
            raise UserError(
                f"{name}: the pickle uses {known} at byte {place}, which plain containers, numbers and strings "
                "don't need: it was not read and nothing of it was run"
            )
        else:
            break
    raise UserError(f"{name}: the pickle is damaged or ends in the middle (at byte {min(place, end)} of {end})")
