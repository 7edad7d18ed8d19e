"""Conversations with pictures: the model sees what the library's processor makes, and learns the answers alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_files import encoded, flip_bits, picture, write_lines
from headway.data import Batch, Conversation, Loader, Sample, SampleOrder, UnfitSample, open_sources
from headway.models import build_model
from headway.recipe import DataRecipe, ModelRecipe, PrecisionRecipe, Recipe, VisionLanguageRecipe
from headway.train.objectives.vision_language import VisionLanguage, VisionLanguageCollate, open_processor
from ranks import run_ranks
from test_layout_invariance import assert_same_run, train
from tiny_recipes import text_recipe
from tiny_weights import qwen_vl_folder

RECIPE = VisionLanguageRecipe(kind="vision_language")
IGNORED = RECIPE.ignore_index
PICTURE = {"type": "image"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_vl_folder(tmp_path_factory.mktemp("weights") / "qwen-vl")


@pytest.fixture(scope="module")
def collate(weights: Path) -> VisionLanguageCollate:
    return collate_of(weights)


def collate_of(weights: Path, sequence_length: int = 512) -> VisionLanguageCollate:
    tokenizer, image_processor = open_processor(weights)
    return VisionLanguageCollate(
        RECIPE, tokenizer, image_processor, tokenizer.convert_tokens_to_ids("<|image_pad|>"), sequence_length
    )


def turn(role: str, *parts: str | dict[str, str]) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def sample(*messages: dict[str, Any], sizes: tuple[tuple[int, int], ...] = ((24, 32), (16, 16), (40, 24))) -> Sample:
    """A conversation, with a picture of the next of ``sizes`` for each picture part."""
    count = sum(part == PICTURE for message in messages for part in message["content"])
    pictures = [picture(number, *sizes[number % len(sizes)]) for number in range(count)]
    return Sample(conversation=Conversation(list(messages), pictures, "here:1"))


def expected_ids(sample: Sample, collate: VisionLanguageCollate) -> list[int]:
    """As transformers' Qwen2_5_VLProcessor does: the text with a picture token for each merged patch, then tokens."""
    assert sample.conversation is not None
    text = collate.tokenizer.apply_chat_template(sample.conversation.messages, tokenize=False)
    for image in sample.conversation.images:
        grid = collate.image_processor(images=[image], return_tensors="pt")["image_grid_thw"]
        text = text.replace("<|image_pad|>", "<|placeholder|>" * (int(grid.prod()) // 4), 1)
    ids: list[int] = collate.tokenizer(text.replace("<|placeholder|>", "<|image_pad|>"))["input_ids"]
    return ids


def expected_labels(ids: list[int], tokenizer: Any) -> list[int]:
    """The next token where that stands after ``<|im_start|>assistant`` and a line break, up to ``<|im_end|>``."""
    header = tokenizer("<|im_start|>assistant\n")["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answered = [False] * len(ids)
    for place in range(len(ids)):
        if ids[place : place + len(header)] == header:
            stop = ids.index(end, place)
            answered[place + len(header) : stop + 1] = [True] * (stop + 1 - place - len(header))
    return [ids[i + 1] if answered[i + 1] else IGNORED for i in range(len(ids) - 1)] + [IGNORED]


TALK = sample(
    turn("system", "be brief"),
    turn("user", PICTURE, "what is it?"),
    turn("assistant", "a red circle"),
    turn("user", "and these, assistant\n?", PICTURE, PICTURE),
    turn("assistant", "a fox\nand a dog"),
)


def test_tokens_and_pictures_are_those_of_the_librarys_processor(collate: VisionLanguageCollate) -> None:
    batch = collate([TALK], [0], 0)
    ids = expected_ids(TALK, collate)
    assert batch["input_ids"][0, : len(ids)].tolist() == ids
    assert batch["attention_mask"][0].tolist() == [1] * len(ids) + [0] * (batch["input_ids"].shape[1] - len(ids))
    assert torch.equal(batch["mm_token_type_ids"] == 1, batch["input_ids"] == collate.image_token)
    assert TALK.conversation is not None
    together = collate.image_processor(images=TALK.conversation.images, return_tensors="pt")
    assert torch.equal(batch["pixel_values"], together["pixel_values"])
    assert torch.equal(batch["image_grid_thw"], together["image_grid_thw"])
    assert int(batch["mm_token_type_ids"].sum()) * 4 == len(batch["pixel_values"])


def test_the_labels_are_the_answers_and_their_closing_tokens(collate: VisionLanguageCollate) -> None:
    labels = collate([TALK], [0], 0)["labels"][0]
    learnt = collate.tokenizer.decode(labels[labels != IGNORED])
    assert learnt == "a red circle<|im_end|>a fox\nand a dog<|im_end|>"


WORDS = st.text(st.sampled_from("abc assistant\n.,:é漢<|>"), max_size=12)
PARTS = st.lists(st.one_of(WORDS, st.just(PICTURE)), max_size=3)
TURNS = st.lists(st.tuples(PARTS, WORDS), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(system=st.none() | WORDS, turns=TURNS)
def test_any_conversation_has_the_processors_tokens_and_its_answers_as_labels(
    collate: VisionLanguageCollate, system: str | None, turns: list[Any]
) -> None:
    messages = [] if system is None else [turn("system", system)]
    for asked, answer in turns:
        messages += [turn("user", *asked), turn("assistant", answer)]
    talk = sample(*messages)
    batch = collate([talk], [0], 0)
    ids = expected_ids(talk, collate)
    padding = [IGNORED] * (batch["input_ids"].shape[1] - len(ids))
    assert batch["input_ids"][0, : len(ids)].tolist() == ids
    assert batch["labels"][0].tolist() == expected_labels(ids, collate.tokenizer) + padding
    assert ("pixel_values" in batch) == any(PICTURE in asked for asked, _ in turns)


def test_a_cut_conversation_keeps_whole_pictures(weights: Path, collate: VisionLanguageCollate) -> None:
    ids = expected_ids(TALK, collate)
    whole = collate([TALK], [0], 0)
    sizes = [int(grid.prod()) // 4 for grid in whole["image_grid_thw"]]
    found = set()
    for length in range(4, len(ids)):
        batch = collate_of(weights, length)([TALK], [0], 0)
        kept = int(batch["attention_mask"].sum())
        assert kept <= batch["input_ids"].shape[1] <= length
        assert batch["input_ids"][0, :kept].tolist() == ids[:kept]
        pictures = len(batch.get("image_grid_thw", ()))
        assert int((batch["input_ids"] == collate.image_token).sum()) == sum(sizes[:pictures])
        assert len(batch.get("pixel_values", ())) == 4 * sum(sizes[:pictures])
        if kept < length:
            assert ids[kept] == collate.image_token, "a cut before the length is a cut before a picture"
        expected = [*expected_labels(ids, collate.tokenizer)[: kept - 1], IGNORED]
        assert batch["labels"][0, :kept].tolist() == expected
        found.add(pictures)
    assert found == {0, 1, 2, 3}


def test_padding_never_counts(weights: Path, collate: VisionLanguageCollate) -> None:
    built = build_model(
        ModelRecipe(class_name="Qwen2_5_VLForConditionalGeneration", path=weights),
        PrecisionRecipe(compute="float32"),
        seed=0,
    )
    built.materialize(torch.device("cpu"))
    short = sample(turn("user", "a"), turn("assistant", "b"))
    long = sample(turn("user", PICTURE), turn("assistant", "a fox over a lazy dog " * 12))
    objective = VisionLanguage(RECIPE, packed=False)

    def loss_and_weight(samples: list[Sample]) -> tuple[float, float]:
        batch = Batch(collate(samples, [0] * len(samples), 0), [0] * len(samples))
        with torch.no_grad():
            return float(objective.loss(built.module, batch)), float(objective.weight(batch))

    alone = [loss_and_weight([one]) for one in (short, long)]
    assert loss_and_weight([short, long]) == pytest.approx([sum(part) for part in zip(*alone, strict=True)], rel=1e-5)
    assert [weight for _, weight in alone] == [2.0, len(collate.tokenizer("a fox over a lazy dog " * 12).input_ids) + 1]


def write_conversations(folder: Path, lines: list[list[dict[str, Any]]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        (folder / f"{number}.png").write_bytes(encoded(number))
    (folder / "torn.png").write_bytes(flip_bits(encoded(0)[:60], [200]))
    picture(0, 1, 300).save(folder / "thin.png")
    return write_lines(folder / "talk.jsonl", [{"messages": messages} for messages in lines])


def seen(name: str) -> dict[str, str]:
    return {"type": "image", "image": f"{name}.png"}


def test_what_cannot_be_used_has_no_weight_and_a_name(collate: VisionLanguageCollate, tmp_path: Path) -> None:
    answer = turn("assistant", "yes")
    lines = [
        [turn("user", seen("0"), "?"), answer],
        [turn("user", seen("torn"), "?"), answer],
        [turn("user", seen("thin"), "?"), answer],
        [turn("user", "a picture <|image_pad|> in words"), answer],
        [answer, turn("user", "why?"), answer],
        [turn("user", "no picture"), answer],
    ]
    path = write_conversations(tmp_path, lines)
    data, _ = open_sources(DataRecipe(kind="jsonl_conversations", path=path), cache=tmp_path, tokenizer=None, seed=0)
    order = SampleOrder(len(data), 0, shuffle=False)
    ((batch,),) = Loader(data, collate, order=order, global_batch=6, micro_batch=6, steps=range(1))
    assert batch.tensors["weight"].tolist() == [1, 0, 0, 0, 0, 1]
    reasons = ("torn.png", "aspect ratio", "places for 0 pictures", "empty conversation")
    for line, reason in enumerate(reasons, start=2):
        assert len([name for name in batch.bad_records if f"talk.jsonl:{line}" in name and reason in name]) == 1
    assert len(batch.tensors["image_grid_thw"]) == 1
    assert VisionLanguage(RECIPE, packed=False).weight(batch) == 2 * (len(collate.tokenizer("yes").input_ids) + 1)


def test_a_template_that_rewrites_what_was_said_is_told(weights: Path) -> None:
    collate = collate_of(weights)
    collate.tokenizer.chat_template = "{{ messages | length }}:{{ messages[-1]['content'][0]['text'] }}"
    with pytest.raises(UnfitSample, match="does not write message 2 after the ones before it"):
        collate([sample(turn("user", "a"), turn("assistant", "b"))], [0], 0)


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight conversations: only the first four hold pictures, and answers of one to 120 tokens."""
    lines = []
    for number in range(8):
        pictures = [seen(str(number % 2))] * (1 + number % 2) if number < 4 else []
        lines.append([turn("user", *pictures, "what?"), turn("assistant", "a fox " * (1 if number % 3 else 20))])
    return write_conversations(tmp_path_factory.mktemp("talks"), lines)


def recipe_of(weights: Path, talks: Path, directory: Path, micro_batch: int) -> Recipe:
    return text_recipe(
        talks,
        directory,
        model={
            "class_name": "Qwen2_5_VLForConditionalGeneration",
            "path": str(weights),
            "config": {},
            "tokenizer": None,
        },
        objective={"kind": "vision_language"},
        data={"kind": "jsonl_conversations", "shuffle": False, "sequence_length": 256},
        run={"steps": 4, "micro_batch": micro_batch},
    )


@pytest.mark.parametrize("micro_batch", [4, 1])
def test_ranks_with_and_without_pictures_compute_what_one_rank_does(
    weights: Path, talks: Path, tmp_path: Path, micro_batch: int
) -> None:
    """With micro-batches of 4 the second of two ranks never sees a picture."""
    reference = run_ranks(1, train, recipe_of(weights, talks, tmp_path / "1", 8))[0]
    for result in run_ranks(2, train, recipe_of(weights, talks, tmp_path / "2", micro_batch), timeout_s=60):
        assert_same_run(result, reference)
