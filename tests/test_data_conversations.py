"""Conversations with pictures: parts in order, pictures beside the file, damage named by line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_files import encoded, flip_bits, picture, read_all, recipe, sent, write_lines
from headway.data import Sample, Source, open_sources
from headway.errors import UserError


def opened(path: Path, **fields: object) -> Source:
    source, _ = open_sources(recipe("jsonl_conversations", path, **fields), cache=path.parent, tokenizer=None, seed=0)
    return source


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def asked(*parts: Any, answer: Any = "yes") -> dict[str, Any]:
    return {"messages": [turn("user", list(parts)), turn("assistant", answer)]}


IMAGE = {"type": "image", "image": "pictures/1.png"}
TEXT = {"type": "text", "text": "what is it?"}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        (tmp_path / f"pictures/{number}.png").write_bytes(encoded(number))
    return tmp_path


def test_messages_and_pictures_come_in_order(folder):
    second = {"type": "image", "image": "pictures/2.png"}
    path = write_lines(
        folder / "a.jsonl",
        [asked(IMAGE, TEXT, second), b"", {"messages": [turn("user", "hi"), turn("assistant", "ho")]}],
    )
    first, last = read_all(sent(opened(path)))
    assert isinstance(first, Sample)
    assert isinstance(last, Sample)
    assert first.conversation is not None
    assert last.conversation is not None
    assert first.conversation.messages == [
        turn("user", [{"type": "image"}, TEXT, {"type": "image"}]),
        turn("assistant", [{"type": "text", "text": "yes"}]),
    ]
    assert [image.tobytes() for image in first.conversation.images] == [picture(1).tobytes(), picture(2).tobytes()]
    assert last.conversation.images == []


def test_damaged_conversations_are_named_by_file_and_line(folder):
    (folder / "pictures/cut.png").write_bytes(encoded(1)[:50])
    lines: list[object] = [
        b"{cut",
        {"messages": []},
        {"text": "no messages"},
        {"messages": [turn("user", "only a question")]},
        asked({"type": "audio", "audio": "a"}),
        asked({"type": "image", "image": "pictures/gone.png"}),
        asked({"type": "image", "image": "pictures/cut.png"}),
        asked({"type": "image", "image": 4}),
        asked(TEXT, answer=7),
        [],
        {"messages": [turn("user", None), 3]},
        asked(IMAGE),
    ]
    path = write_lines(folder / "a.jsonl", lines)
    records = read_all(opened(path))
    assert isinstance(records[-1], Sample)
    for line, record in enumerate(records[:-1], start=1):
        assert str(record).startswith(f"{path}:{line}")
    assert "picture" in str(records[6])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.integers(0, 2**16), min_size=1, max_size=6), kept=st.floats(0.3, 1))
def test_any_damage_gives_conversations_or_named_records(folder, places, kept):
    path = write_lines(folder / "a.jsonl", [asked(IMAGE, TEXT), asked(TEXT)])
    whole = path.read_bytes()
    path.write_bytes(flip_bits(whole, places)[: int(kept * len(whole))])
    for record in read_all(opened(path)):
        if isinstance(record, Sample):
            assert record.conversation is not None
            assert record.conversation.messages
        else:
            assert record.startswith(f"{path}:")


def test_a_blank_has_a_question_and_an_answer(folder):
    blank = opened(write_lines(folder / "a.jsonl", [asked(TEXT)])).blank().conversation
    assert blank is not None
    assert [message["role"] for message in blank.messages] == ["user", "assistant"]


def test_an_empty_file_is_refused(folder):
    (folder / "empty.jsonl").write_bytes(b"\n\n")
    with pytest.raises(UserError, match="hold no lines"):
        opened(folder / "empty.jsonl")
