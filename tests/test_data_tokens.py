"""Tokenizers: bytes, a folder, and one made of the captions' words that a pipeline can load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerFast

from headway.data import open_tokenizer, word_tokenizer
from headway.errors import UserError

CAPTIONS = ["red heart", "Blue circle: large", "woman’s boot", "A button (blood type)"]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_there_and_back(text):
    tokenizer = open_tokenizer("bytes")
    (ids,) = tokenizer.encode([text])
    assert all(0 <= id < tokenizer.end_of_document < tokenizer.vocab_size for id in ids)
    assert tokenizer.decode([*ids, tokenizer.end_of_document]) == text


def test_half_a_surrogate_pair_does_not_stop_tokenising():
    assert open_tokenizer("bytes").encode(["a\ud800"]) == [[97, 63]]


def as_in_a_pipeline(tokenizer, prompt: str) -> list[int]:
    ids = tokenizer(prompt, padding="max_length", max_length=8, truncation=True, return_tensors="pt").input_ids
    assert ids.shape == (1, 8)
    return ids[0].tolist()


def test_words_are_numbered_alphabetically_whatever_their_order():
    first, second = word_tokenizer(CAPTIONS, 8), word_tokenizer(reversed(CAPTIONS), 8)
    words = [
        "<pad>",
        "<unk>",
        "<bos>",
        "<eos>",
        "(",
        ")",
        ":",
        "a",
        "blood",
        "blue",
        "boot",
        "button",
        "circle",
        "heart",
    ]
    words += ["large", "red", "s", "type", "woman", "’"]
    assert first.get_vocab() == second.get_vocab() == {word: id for id, word in enumerate(words)}


def test_texts_are_framed_padded_and_cut():
    tokenizer = word_tokenizer(CAPTIONS, 8)
    words = {id: word for word, id in tokenizer.get_vocab().items()}

    def read(prompt: str) -> str:
        return " ".join(words[id] for id in as_in_a_pipeline(tokenizer, prompt))

    assert read("Red  HEART") == "<bos> red heart <eos> <pad> <pad> <pad> <pad>"
    assert read("green heart!") == "<bos> <unk> heart <unk> <eos> <pad> <pad> <pad>"
    assert read("red " * 20) == "<bos> red red red red red red <eos>"
    assert read("") == "<bos> <eos> <pad> <pad> <pad> <pad> <pad> <pad>"
    assert tokenizer("red heart").attention_mask == [1, 1, 1, 1]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (0, 3, 8)


def test_the_word_tokenizer_is_saved_and_loads_the_same(tmp_path):
    tokenizer = word_tokenizer(CAPTIONS, 8)
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        for prompt in ("a red heart: large", "woman’s", "", "x " * 30):
            assert as_in_a_pipeline(loaded, prompt) == as_in_a_pipeline(tokenizer, prompt)


def test_a_folder_gives_a_tokenizer_for_language(tmp_path):
    word_tokenizer(CAPTIONS, 8).save_pretrained(tmp_path / "one")
    word_tokenizer([*CAPTIONS, "more"], 8).save_pretrained(tmp_path / "two")
    one, two = open_tokenizer(tmp_path / "one"), open_tokenizer(tmp_path / "two")
    assert one.encode(["red heart", "blue"]) == [[15, 13], [9]]
    assert one.decode([15, 13, 3]) == "red heart"
    assert (one.end_of_document, one.padding, one.vocab_size) == (3, 0, 20)
    assert one.fingerprint == open_tokenizer(tmp_path / "one").fingerprint != two.fingerprint


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.tokenizer: .* holds no tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"model\.tokenizer"):
        open_tokenizer(tmp_path / "gone")


def test_a_tokenizer_that_cannot_end_a_document_is_refused(tmp_path):
    tokenizer = word_tokenizer(CAPTIONS, 8)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="names no eos_token"):
        open_tokenizer(tmp_path)


def test_a_clip_tokenizer_folder_loads(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a</w>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")).save_pretrained(tmp_path / "saved")
    assert open_tokenizer(tmp_path / "saved").end_of_document == 2
