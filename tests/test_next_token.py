"""Next-token prediction: documents in one sequence do not know of each other, and every token counts once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from headway.data import Batch, Loader, Sample, SampleOrder, open_sources, open_tokenizer
from headway.models import build_model, next_token_logits
from headway.recipe import DataRecipe, ModelRecipe, NextTokenRecipe, PrecisionRecipe
from headway.train.objectives.next_token import PAD_MULTIPLE, NextToken, NextTokenCollate
from tiny_models import DENSE, EXPERTS

RECIPE = NextTokenRecipe(kind="next_token")
IGNORED = RECIPE.ignore_index
PAD, END = 0, 1
MODELS = {
    "dense": ModelRecipe(class_name="LlamaForCausalLM", config=DENSE | {"vocab_size": 257}),
    "experts": ModelRecipe(class_name="Qwen3MoeForCausalLM", config=DENSE | EXPERTS | {"vocab_size": 257}),
}


def model_of(name: str) -> torch.nn.Module:
    built = build_model(MODELS[name], PrecisionRecipe(compute="float32"), seed=1)
    built.materialize(torch.device("cpu"))
    for parameter in built.module.parameters():
        parameter.data *= 3  # far enough from uniform attention for a leak to show
    return built.module


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return model_of(request.param)


def packed(documents: list[list[int]], begin: int, length: int) -> tuple[Sample, list[int]]:
    """Tokens [begin, begin + length + 1) of ``documents`` end to end, and the number of each token's document."""
    stream = [(token, number) for number, document in enumerate(documents) for token in document]
    cut = stream[begin : begin + length + 1]
    owners = [number for _, number in cut]
    starts = [place for place in range(len(cut)) if place == 0 or owners[place] != owners[place - 1]]
    return Sample(tokens=torch.tensor([t for t, _ in cut]), document_starts=torch.tensor(starts)), owners


DOCUMENTS = st.lists(st.lists(st.integers(2, 99), max_size=6).map(lambda ids: [*ids, END]), min_size=2, max_size=8)


@settings(max_examples=200, deadline=None)
@given(documents=DOCUMENTS, data=st.data())
def test_labels_and_positions_stay_within_a_document(documents: list[list[int]], data: Any) -> None:
    total = sum(map(len, documents))
    length = data.draw(st.integers(1, total - 1))
    sample, owners = packed(documents, data.draw(st.integers(0, total - 1 - length)), length)
    batch = NextTokenCollate(RECIPE, length, packing=True, pad_token=PAD)([sample], [0], 0)
    assert sample.tokens is not None
    tokens = sample.tokens.tolist()
    assert batch["input_ids"].tolist() == [tokens[:-1]]
    same = [owners[place] == owners[place + 1] for place in range(length)]
    assert batch["labels"].tolist() == [[tokens[i + 1] if same[i] else IGNORED for i in range(length)]]
    assert batch["position_ids"].tolist() == [[i - owners.index(owners[i]) for i in range(length)]]
    assert NextToken(RECIPE, packed=True).weight(Batch(batch, [0])) == sum(same)


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(st.lists(st.integers(2, 99), min_size=2, max_size=150), min_size=1, max_size=4))
def test_single_documents_are_padded_to_few_lengths(documents: list[list[int]]) -> None:
    limit = 128
    samples = [
        Sample(tokens=torch.tensor(ids[: limit + 1]), document_starts=torch.zeros(1, dtype=torch.int64))
        for ids in documents
    ]
    batch = NextTokenCollate(RECIPE, limit, packing=False, pad_token=PAD)(samples, list(range(len(samples))), 0)
    length = batch["input_ids"].shape[1]
    assert length % PAD_MULTIPLE == 0
    assert length - PAD_MULTIPLE < max(min(len(ids) - 1, limit) for ids in documents) <= length <= limit
    for row, ids in enumerate(documents):
        kept = min(len(ids) - 1, limit)
        assert batch["input_ids"][row].tolist() == ids[:kept] + [PAD] * (length - kept)
        assert batch["labels"][row].tolist() == ids[1 : kept + 1] + [IGNORED] * (length - kept)
        assert batch["position_ids"][row].tolist() == list(range(length))


def document(length: int, seed: int) -> list[int]:
    return torch.randint(2, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def loss_and_weight(model: torch.nn.Module, samples: list[Sample], packing: bool) -> tuple[float, float]:
    batch = Batch(NextTokenCollate(RECIPE, 64, packing, PAD)(samples, list(range(len(samples))), 0), [])
    objective = NextToken(RECIPE, packed=True)
    with torch.no_grad():
        return float(objective.loss(model, batch)), float(objective.weight(batch))


def alone(ids: list[int]) -> Sample:
    return Sample(tokens=torch.tensor(ids), document_starts=torch.zeros(1, dtype=torch.int64))


def test_the_loss_of_a_document_is_the_librarys(model: torch.nn.Module) -> None:
    ids = document(40, 0)
    loss, weight = loss_and_weight(model, [alone(ids)], packing=False)
    tokens = torch.tensor([ids])
    with torch.no_grad():
        expected = float(model(input_ids=tokens, labels=tokens).loss)
    assert weight == len(ids) - 1
    assert loss / weight == pytest.approx(expected, rel=1e-5)


def test_the_loss_of_packed_documents_is_the_sum_of_theirs(model: torch.nn.Module) -> None:
    documents = [document(length, length) for length in (3, 30, 2, 30)]
    sample, _ = packed(documents, 0, 64)
    found = loss_and_weight(model, [sample], packing=True)
    separate = [loss_and_weight(model, [alone(ids)], packing=False) for ids in documents]
    assert found == pytest.approx([sum(part) for part in zip(*separate, strict=True)], rel=1e-5)
    together = loss_and_weight(model, [alone(ids) for ids in documents], packing=False)
    assert together == pytest.approx(found, rel=1e-5)


def test_a_document_sees_nothing_of_its_neighbours(model: torch.nn.Module) -> None:
    documents = [document(length, length) for length in (20, 24, 21)]
    collate = NextTokenCollate(RECIPE, 64, packing=True, pad_token=PAD)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            batch = collate([packed(documents, 0, 64)[0]], [0], 0)
            return next_token_logits(model, batch["input_ids"], batch["position_ids"])[0]

    before = logits()
    documents[1] = [token + 1 for token in documents[1]]
    after = logits()
    for place in (slice(0, 20), slice(44, 64)):
        torch.testing.assert_close(after[place], before[place], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after[20:44], before[20:44], atol=1e-2)


def test_a_corrupt_document_weighs_nothing(tmp_path: Path) -> None:
    texts = ["the quick brown fox", "over", "a lazy dog and seven wizards"]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "text.jsonl").write_text("\n".join([lines[0], '{"text": "torn', *lines[1:]]))
    recipe = DataRecipe(kind="jsonl_text", path=tmp_path / "text.jsonl", packing=False, sequence_length=64)
    tokenizer = open_tokenizer("bytes")
    data, _ = open_sources(recipe, cache=tmp_path, tokenizer=tokenizer, seed=0)
    collate = NextTokenCollate(RECIPE, 64, packing=False, pad_token=tokenizer.padding)
    order = SampleOrder(len(data), 0, shuffle=False)
    ((batch,),) = Loader(data, collate, order=order, global_batch=4, micro_batch=4, steps=range(1))
    assert batch.tensors["weight"].tolist() == [1, 0, 1, 1]
    assert [name for name in batch.bad_records if "text.jsonl:2" in name] == batch.bad_records != []
    objective, model = NextToken(RECIPE, packed=True), model_of("dense")
    # Each byte but the first, and the end of the document.
    assert objective.weight(batch) == sum(len(text) for text in texts)
    with torch.no_grad():
        tensors = {name: tensor[[0, 2, 3]] for name, tensor in batch.tensors.items()}
        whole = functional.cross_entropy(
            objective.predict(model, objective.prepare(Batch(tensors, []))).flatten(0, 1),
            tensors["labels"].flatten(),
            reduction="sum",
        )
        torch.testing.assert_close(objective.loss(model, batch), whole)
