"""Parquet pictures: both spellings of the image column, random access, damage."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data_files import check_image_or_named, encoded, flip_bits, read_all, recipe, sent
from headway.data import Sample, Source, open_sources
from headway.errors import UserError


def write(path: Path, numbers: range, as_struct: bool, **columns: list[Any]) -> Path:
    images: list[Any] = [encoded(number) for number in numbers]
    if as_struct:
        images = [{"bytes": data, "path": None} for data in images]
    table = pa.table({"image": images, "caption": [f"picture {number}" for number in numbers], **columns})
    parquet.write_table(table, path, row_group_size=3)
    return path


def opened(path: Path, **fields: object) -> Source:
    source, _ = open_sources(recipe("parquet", path, **fields), cache=path.parent, tokenizer=None, seed=0)
    return source


def captions(source: Source) -> list[str | None]:
    return [record if isinstance(record, str) else record.caption for record in read_all(source)]


@pytest.mark.parametrize("as_struct", [False, True])
def test_rows_of_all_files_are_read_at_random(tmp_path, as_struct):
    write(tmp_path / "a.parquet", range(7), as_struct)
    write(tmp_path / "b.parquet", range(7, 11), as_struct)
    source = sent(opened(tmp_path))
    assert captions(source) == [f"picture {number}" for number in range(11)]
    expected = {}
    for number, record in enumerate(read_all(source)):
        assert isinstance(record, Sample)
        expected[number] = record.image
    for number in (10, 0, 6, 7, 3, 9, 2):
        image = source.read(number, 0).image
        assert image is not None
        assert image.equal(expected[number])
    check_image_or_named(read_all(source), source.blank())


def test_rows_without_picture_or_caption_are_named(tmp_path):
    images = [encoded(0), None, b"", b"no picture", encoded(4)[:50], encoded(5)]
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": ["0", "1", "2", "3", "4", None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    found = captions(opened(tmp_path / "a.parquet"))
    assert found[0] == "0"
    reasons = ["holds no picture", "holds no picture", "not a readable", "not a readable", "no caption"]
    for row, (reason, text) in enumerate(zip(reasons, found[1:], strict=True), start=1):
        assert f"a.parquet:row group {row // 4}, row {row % 4}: " in str(text)
        assert reason in str(text)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(places=st.lists(st.integers(0, 2**20), min_size=1, max_size=6), kept=st.floats(0.2, 1))
def test_any_damage_gives_samples_named_records_or_a_refusal(tmp_path, places, kept):
    whole = write(tmp_path / "whole.parquet", range(7), False).read_bytes()
    for damaged in (flip_bits(whole, places), whole[: int(kept * len(whole))]):
        path = tmp_path / "damaged.parquet"
        path.write_bytes(damaged)
        try:
            source = opened(path)
        except UserError as error:
            assert "damaged.parquet" in str(error)  # noqa: PT017 - either outcome is right
            continue
        check_image_or_named(read_all(source), source.blank())


def test_wrong_columns_and_files_are_refused_with_what_is_there(tmp_path):
    path = write(tmp_path / "a.parquet", range(3), False, captions=["a", "b", "c"], count=[1, 2, 3])
    with pytest.raises(UserError, match=r"data\.caption_column: .* no column 'capt'; did you mean 'caption'\?"):
        opened(path, caption_column="capt")
    with pytest.raises(
        UserError, match=r"data\.image_column: .* no column 'zzz'; it has image, caption, captions, count"
    ):
        opened(path, image_column="zzz")
    with pytest.raises(UserError, match=r"data\.image_column: 'count' of .* is int64, not bytes"):
        opened(path, image_column="count")
    with pytest.raises(UserError, match=r"data\.caption_column: 'count' of .* is int64, not text"):
        opened(path, caption_column="count")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(UserError, match=r"b\.parquet is not a readable parquet file"):
        opened(tmp_path / "b.parquet")
