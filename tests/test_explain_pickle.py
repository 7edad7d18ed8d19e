"""Pickles give plain data or a clear refusal; nothing they name is ever run."""

import functools
import os
import pickle
import random
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import UserError
from headway.explain.restricted_pickle import load_plain, loads_plain
from soak import soak

quick = settings(deadline=None, max_examples=25)
keys = st.text(max_size=8) | st.integers() | st.binary(max_size=4) | st.tuples(st.integers(), st.text(max_size=3))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.frozensets(st.integers(), max_size=4)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=8,
)


@given(data=plain, protocol=st.integers(4, 5))
@quick
def test_plain_data_comes_back_as_it_was_written(data, protocol):
    assert loads_plain(pickle.dumps([data, data], protocol), "x") == [data, data]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_gives_what_was_written(protocol):
    sizes = [0, 255, 256, 65_535, 65_536, 2**31, 2**70, -1, -(2**40)]
    data = {
        "sizes": sizes,
        "text": ["", "a" * 300, "ü\n"],
        "pair": ("0", "tp"),
        (1, 2): [None, True, 0.5, [[], {}, ()]],
    }
    assert loads_plain(pickle.dumps(data, protocol), "x") == data


def test_data_that_is_shared_stays_shared():
    shared = [1]
    first, second = loads_plain(pickle.dumps([shared, shared], 4), "x")
    assert first is second


class Planted:
    """Reduces to a call of ``function``."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (os.system, "system"),
        (eval, "eval"),
        (functools.partial, "partial"),
        (torch._utils._rebuild_tensor_v2, "_rebuild_tensor_v2"),
        (OrderedDict, "OrderedDict"),
        (Path, "Path"),
    ],
)
def test_a_planted_call_is_refused_by_name_and_never_run(function, named, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = pickle.dumps({"entries": [1, Planted(function, "touch planted")]}, protocol)
    with pytest.raises(UserError, match=named):
        loads_plain(written, "dump")
    assert list(tmp_path.iterdir()) == []


def test_an_object_and_a_persistent_id_are_refused():
    with pytest.raises(UserError, match="asks for"):
        loads_plain(pickle.dumps(Planted), "x")
    with pytest.raises(UserError, match="BINPERSID"):
        loads_plain(b"\x80\x02K\x01Q.", "x")
    with pytest.raises(UserError, match="EXT1"):
        loads_plain(b"\x80\x02\x82\x01.", "x")


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        (b"\x80\x04]r" + struct.pack("<I", 2**31) + b".", "memo"),  # would take 32 GiB
        (b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"x.", "ends in the middle"),
        (b"\x80\x04\x8b" + struct.pack("<I", 2**31) + b"x.", "ends in the middle"),
        (pickle.dumps(list(range(1000)), 4)[:-200], "damaged"),
        (b"\x80\x04", "ends in the middle"),
        (b"\x80\x04}]K\x01s.", "damaged"),  # a list as key
        (b"\x80\x04\xff.", "damaged"),
        (b"", "not a pickle"),
        (b"\x80\x09N.", "not a pickle"),
    ],
)
def test_a_damaged_pickle_is_told_in_one_line(damaged, told):
    with pytest.raises(UserError, match=told) as error:
        loads_plain(damaged, "x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mutations", [100, soak(20_000)])
def test_mutated_pickles_give_data_or_one_line(mutations):
    random_ = random.Random(5)
    whole = pickle.dumps({"entries": [{"state": "scheduled", "seq": n, "sizes": [[n, 2]]} for n in range(40)]}, 4)
    told = []
    for _ in range(mutations):
        mutated = bytearray(whole)
        for _ in range(random_.randint(1, 4)):
            mutated[random_.randrange(len(mutated))] = random_.randrange(256)
        try:
            loads_plain(bytes(mutated[: random_.choice([len(mutated), random_.randrange(len(mutated))])]), "x")
        except UserError as error:
            told.append(str(error))
    assert told
    assert not [line for line in told if "\n" in line]


MANY = 1_000_000


@pytest.mark.parametrize("nest", [b"K\x01" + b"\x85" * MANY, b"(" * MANY + b"t" * MANY], ids=["TUPLE1", "TUPLE"])
def test_a_million_tuples_in_each_other_do_not_end_the_interpreter(nest):
    """As the key of a dict, which is hashed; in a process of its own, as it would end with that."""
    code = (
        "import sys; from headway.explain.restricted_pickle import loads_plain\n"
        "print(type(loads_plain(sys.stdin.buffer.read(), 'nest')).__name__)"
    )
    pickled = b"\x80\x04}" + nest + b"K\x01s."
    done = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"dict\n", b"")


def test_more_of_them_than_a_stack_holds_are_refused():
    with pytest.raises(UserError, match="may nest 5,000,000 tuples in each other"):
        loads_plain(b"\x80\x04}K\x01" + b"\x85" * 5 * MANY + b"K\x01s.", "nest")


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_plain(tmp_path / "none")
