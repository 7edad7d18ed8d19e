"""From the recipe to sources: what trains, what validates, and what a mistyped path or caption is told."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_files import read_all, recipe, sent, write_image_folder
from headway.data import Sample, Source, captions_of, open_sources
from headway.data.paths import expand_braces
from headway.data.split import split_records
from headway.errors import UserError


def opened(data, cache: Path = Path("unused"), seed: int = 0) -> tuple[Source, Source | None]:
    return open_sources(data, cache=cache, tokenizer=None, seed=seed)


def test_openmoji_has_every_named_picture_and_splits_by_caption():
    everything, nothing = opened(recipe("openmoji", None))
    assert nothing is None
    assert len(everything) == 3953
    training, validation = opened(
        recipe("openmoji", None, include=["heart$", "circle$"], hold_out=["green heart", "Red Circle"])
    )
    assert validation is not None
    assert captions_of(validation) == ["green heart", "red circle"]
    assert "red heart" in captions_of(training)
    assert all(caption.endswith(("heart", "circle")) for caption in captions_of(training))
    assert not set(captions_of(training)) & {"green heart", "red circle"}


def test_openmoji_pictures_are_drawn_on_white_in_their_colours():
    source, _ = opened(recipe("openmoji", None, include=["^(red|blue) circle$"], resolution=32))
    pictures = {}
    for record in [*read_all(source), *read_all(sent(source))]:
        assert isinstance(record, Sample)
        assert record.image is not None
        assert record.image.shape == (3, 32, 32)
        pictures[record.caption] = record.image.float()
    for image in pictures.values():
        assert image[:, 0, 0].tolist() == [255, 255, 255]
    assert pictures["red circle"][0, 16, 16] > 200 > pictures["red circle"][2, 16, 16] + 100
    assert pictures["blue circle"][2, 16, 16] > pictures["blue circle"][0, 16, 16] + 50


def test_openmoji_pictures_that_were_kept_cannot_be_changed_by_their_user():
    source, _ = opened(recipe("openmoji", None, include=["^red circle$"]))
    first = source.read(0, 0).image
    assert first is not None
    expected = first.clone()
    first.zero_()
    again = source.read(0, 1).image
    assert again is not None
    assert torch.equal(again, expected)


def test_a_damaged_drawing_is_named(monkeypatch, tmp_path):
    source, _ = opened(recipe("openmoji", None, include=["^red circle$"]))
    records = source.source  # type: ignore[attr-defined]
    for content in (b"", b"<svg", b"\xff\xfe", b"text"):
        name = records.names[int(source.indices[0])].as_py()  # type: ignore[attr-defined]
        (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(records, "folder", tmp_path)
        (record,) = read_all(source)
        assert str(record).startswith(f"{tmp_path / name}: not a readable SVG")


def test_openmoji_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UserError, match=r"needs resvg_py: pip install 'headway\[demo\]'"):
        opened(recipe("openmoji", None))


@settings(deadline=None, max_examples=60)
@given(size=st.integers(2, 300), fraction=st.floats(0.001, 0.4), seed=st.integers(0, 2**40))
def test_the_split_is_a_partition_of_the_asked_size_from_the_seed_alone(size, fraction, seed):
    options = {"include": [], "hold_out": [], "validation_fraction": fraction, "seed": seed}
    training, validation = split_records(size, None, **options)
    assert sorted([*training, *validation]) == list(range(size))
    assert len(validation) == max(1, round(fraction * size))
    again = split_records(size, None, **options)
    assert [part.tolist() for part in again] == [training.tolist(), validation.tolist()]


def test_a_validation_path_is_read_whole_and_what_is_held_out_joins_it(tmp_path):
    write_image_folder(tmp_path / "train", 6)
    write_image_folder(tmp_path / "test", 2)
    data = recipe("image_folder", tmp_path / "train", validation_path=tmp_path / "test", hold_out=["picture 4"])
    training, validation = opened(data)
    assert captions_of(training) == [f"picture {number}" for number in (0, 1, 2, 3, 5)]
    assert validation is not None
    assert [record.caption for record in read_all(validation) if isinstance(record, Sample)] == [
        "picture 4",
        "picture 0",
        "picture 1",
    ]
    with pytest.raises(UserError, match="exclude each other"):
        opened(data.model_copy(update={"validation_fraction": 0.1}))


def test_the_fingerprint_follows_the_selection(tmp_path):
    write_image_folder(tmp_path, 20)
    found = {
        opened(recipe("image_folder", tmp_path, **fields), seed=seed)[0].fingerprint
        for seed, fields in enumerate(
            [{}, {"include": ["1"]}, {"hold_out": ["picture 3"]}, *[{"validation_fraction": 0.3}] * 2]
        )
    }
    assert len(found) == 5


def test_mistakes_are_told_with_near_matches(tmp_path):
    write_image_folder(tmp_path / "pictures", 6)
    with pytest.raises(UserError, match=r"data\.path = .*/picturs does not exist; near ones: .*/pictures"):
        opened(recipe("image_folder", tmp_path / "picturs"))
    with pytest.raises(UserError, match=rf"does not exist \(the part that does is {tmp_path}\)"):
        opened(recipe("image_folder", tmp_path / "a/b/c"))
    with pytest.raises(UserError, match=r"is a file; name a folder"):
        opened(recipe("image_folder", tmp_path / "pictures/000.png"))
    with pytest.raises(UserError, match=r"data\.validation_path = .* does not exist"):
        opened(recipe("image_folder", tmp_path / "pictures", validation_path=tmp_path / "gone"))
    with pytest.raises(UserError, match=r"data\.hold_out: .* 'pictur 3'; near ones: 'picture 3'"):
        opened(recipe("image_folder", tmp_path / "pictures", hold_out=["pictur 3"]))
    with pytest.raises(UserError, match=r"data\.include: no caption matches '\^picure 3\$'; near ones: 'picture 3'"):
        opened(recipe("image_folder", tmp_path / "pictures", include=["^picure 3$"]))
    with pytest.raises(UserError, match=r"data\.include: '\(' is not a regular expression"):
        opened(recipe("image_folder", tmp_path / "pictures", include=["("]))
    with pytest.raises(UserError, match=r"no record is left to train on: 6 in data\.path, 6 of them held out"):
        opened(recipe("image_folder", tmp_path / "pictures", hold_out=[f"picture {number}" for number in range(6)]))
    with pytest.raises(UserError, match=r"'openmoji' reads no path"):
        opened(recipe("openmoji", tmp_path))


def test_braces_are_expanded_with_their_leading_zeros():
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]
    assert expand_braces("{plain}") == ["{plain}"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    from data_files import encoded, write_shard

    shard = write_shard(tmp_path / "a.tar", {"a.png": encoded(0), "a.txt": b"a"})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache: cannot write"):
        opened(recipe("webdataset", shard), cache=tmp_path / "file/cache")
