"""Language models whose sequences several ranks share compute what one device does, to the last gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from context_parallel_runs import (
    KINDS,
    Case,
    Result,
    Sharded,
    assert_same_gradients,
    build,
    gradient_errors,
    meshes,
    parts,
)
from headway.errors import UserError
from headway.parallel.context_parallel import SequenceSplit, apply_context_parallel_language, check_context_parallel
from headway.recipe import ModelRecipe
from ranks import run_ranks
from tiny_models import DENSE, LANGUAGE, VISION_LANGUAGE

IGNORED = -100
LENGTH = 37
MODELS = {
    "llama": LANGUAGE["llama"],
    "qwen3": ModelRecipe(class_name="Qwen3ForCausalLM", config=DENSE | {"num_key_value_heads": 1}),
    "qwen3_moe": LANGUAGE["qwen3_moe"],
}
"""Grouped heads and tied embeddings, one key head, experts."""


def tokens(number: int, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """input_ids, labels, shifted, and position_ids (2, L) of micro-batch ``number``: unequally many labels count."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 128, (2, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[number % 2, 5 + 3 * number :] = IGNORED
    positions = torch.arange(LENGTH).expand(2, -1).clone()
    if packed:
        for row, starts in enumerate(([0, 9, 10, 30], [0, 20])):
            for start in starts:
                positions[row, start:] = torch.arange(LENGTH - start)
                labels[row, max(start - 1, 0)] = IGNORED
    return ids[:, :-1], labels, positions


def loss_sum(model: Any, number: int, split: SequenceSplit | None, packed: bool = True) -> Tensor:
    ids, labels, positions = tokens(number, packed)
    if split is None:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    else:
        part = split.batch(ids, labels, positions, ignore_index=IGNORED, packed=packed)
        labels = part.pop("labels")
        logits = model(**({"document_ids": None} | part), use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


LOSSES = {"packed": loss_sum, "one document": partial(loss_sum, packed=False)}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: Case(recipe) for name, recipe in MODELS.items()}


@pytest.fixture(scope="module")
def references(cases: dict[str, Case]) -> dict[tuple[str, str], Result]:
    return {(name, kind): case.reference(loss, 1) for name, case in cases.items() for kind, loss in LOSSES.items()}


def losses_add_up(results: list[Result], expected: Result) -> None:
    assert sum(result["loss"] for result in results) == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_one_sequence_have_parts_of_what_one_device_computes(
    kind: str, cases: dict[str, Case], references: dict[tuple[str, str], Result]
) -> None:
    layout = KINDS[kind]
    results = run_ranks(layout["cp"], parts, cases, LOSSES, apply_context_parallel_language, layout)
    for case, expected in references.items():
        losses_add_up([result[case] for result in results], expected)
        assert_same_gradients(results[0][case], expected, of=case)


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [("ulysses 2", "none"), ("ulysses 2", "selective"), ("ring 2", "selective"), ("ring 2", "full")],
)
def test_parameters_sharded_over_the_ranks_of_a_sequence(kind: str, checkpointing: str, cases: dict[str, Case]) -> None:
    expected = cases["qwen3"].reference(loss_sum, 2)
    layout = Sharded(apply_context_parallel_language, KINDS[kind], checkpointing)
    results = run_ranks(2, layout, cases["qwen3"], loss_sum)
    losses_add_up(results, expected)
    assert_same_gradients(results[1], expected)


@pytest.mark.parametrize("replicas", [1, 2], ids=["FSDP2", "HSDP"])
def test_two_data_ranks_of_two_context_ranks(replicas: int, cases: dict[str, Case]) -> None:
    expected = cases["llama"].reference(loss_sum, 4)
    layout = Sharded(apply_context_parallel_language, KINDS["ring 2"] | {"dp_replicate": replicas}, "full")
    results = run_ranks(4, layout, cases["llama"], loss_sum)
    losses_add_up(results, expected)
    assert_same_gradients(results[3], expected)


def test_an_average_over_the_ranks_of_a_sequence_is_found_out(cases: dict[str, Case]) -> None:
    layout = Sharded(apply_context_parallel_language, KINDS["ulysses 2"], factor=1.0)
    averaged = run_ranks(2, layout, cases["llama"], loss_sum)[0]
    assert min(gradient_errors(averaged, cases["llama"].reference(loss_sum, 2)).values()) > 0.4


def positions_restarted(model: Any, number: int, split: SequenceSplit | None) -> Tensor:
    """Rotary positions counted from 0 on each rank."""
    assert split is not None
    ids, labels, positions = tokens(number, packed=False)
    part = split.batch(ids, labels, positions, ignore_index=IGNORED, packed=False)
    part["position_ids"] = torch.arange(part["input_ids"].shape[1]).expand(2, -1)
    labels = part.pop("labels")
    logits = model(**part, document_ids=None, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def labels_shifted_in_each_part(model: Any, number: int, split: SequenceSplit | None) -> Tensor:
    """The label of a part's last token is another rank's: lost."""
    assert split is not None
    ids, labels, positions = tokens(number, packed=False)
    part = split.batch(ids, functional.pad(labels[:, :-1], (1, 0), value=IGNORED), positions,
                       ignore_index=IGNORED, packed=False)  # fmt: skip
    labels = functional.pad(part.pop("labels")[:, 1:], (0, 1), value=IGNORED)
    logits = model(**part, document_ids=None, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def documents_not_told(model: Any, number: int, split: SequenceSplit | None) -> Tensor:
    assert split is not None
    ids, labels, positions = tokens(number, packed=True)
    part = split.batch(ids, labels, positions, ignore_index=IGNORED, packed=False)
    labels = part.pop("labels")
    logits = model(**part, document_ids=None, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


FAULTS = {
    "positions restarted": (positions_restarted, "one document"),
    "labels shifted in each part": (labels_shifted_in_each_part, "one document"),
    "documents not told": (documents_not_told, "packed"),
}


@pytest.mark.parametrize("kind", ["ulysses 2", "ring 2"])
def test_a_part_that_is_told_wrong_is_found_out(
    kind: str, cases: dict[str, Case], references: dict[tuple[str, str], Result]
) -> None:
    losses = {name: loss for name, (loss, _) in FAULTS.items()}
    llama = {"llama": cases["llama"]}
    (results, _) = run_ranks(2, parts, llama, losses, apply_context_parallel_language, KINDS[kind])
    for name, (_, right) in FAULTS.items():
        assert max(gradient_errors(results["llama", name], references["llama", right]).values()) > 1e-2, name


def zig_zag_under_all_to_all(model: nn.Module, cp: DeviceMesh) -> SequenceSplit:
    split = apply_context_parallel_language(model, cp)
    rank = split.ranks.ulysses.rank()
    quarters = [slice(10 * place, 10 * place + 10) for place in (rank, 3 - rank)]
    split.shard = lambda tensor, fill, dim=1: torch.cat(  # type: ignore[method-assign]
        [functional.pad(tensor, (0, 40 - LENGTH), value=fill)[:, quarter] for quarter in quarters], 1
    )
    return split


def test_zig_zag_pieces_under_an_all_to_all_are_found_out(
    cases: dict[str, Case], references: dict[tuple[str, str], Result]
) -> None:
    losses = {"one document": LOSSES["one document"]}
    llama = {"llama": cases["llama"]}
    (results, _) = run_ranks(2, parts, llama, losses, zig_zag_under_all_to_all, KINDS["ulysses 2"])
    found, expected = (of["llama", "one document"] for of in (results, references))
    assert max(gradient_errors(found, expected).values()) > 1e-2


def refusals(case: Case) -> list[str]:
    """What a model says when it is called with a mask, and when positions or documents are missing."""
    split = apply_context_parallel_language(case.built.module, meshes(cp=2).cp)
    model = case.fill().module
    part = split.batch(*tokens(0, packed=True), ignore_index=IGNORED, packed=True)
    part.pop("labels")
    wrong = [part | {"attention_mask": torch.ones_like(part["input_ids"])}]
    wrong += [{key: value for key, value in part.items() if key != missing} for missing in list(part)[1:]]
    said = []
    for keywords in wrong:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            model(**keywords)
        said.append(str(error.value))
    return said


def test_masks_are_refused_and_positions_and_documents_asked_for(cases: dict[str, Case]) -> None:
    for said in run_ranks(2, refusals, cases["llama"]):
        assert "attention_mask" in said[0]
        assert "position_ids" in said[1]
        assert "document_ids" in said[2]


def count_labels(layout: dict[str, Any]) -> int:
    split = SequenceSplit(meshes(**layout).cp)
    part = split.batch(*tokens(1, packed=True), ignore_index=IGNORED, packed=True)
    return int((part["labels"] != IGNORED).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_every_label_counts_on_one_rank(kind: str) -> None:
    expected = int((tokens(1, packed=True)[1] != IGNORED).sum())
    assert sum(run_ranks(KINDS[kind]["cp"], count_labels, KINDS[kind])) == expected


REFUSED = {
    "a window": (ModelRecipe(class_name="MixtralForCausalLM", config=DENSE | {"sliding_window": 8}), "of a window"),
    "windows in turn": (
        ModelRecipe(
            class_name="Qwen3ForCausalLM",
            config=DENSE | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        ),
        "full_attention, sliding_attention",
    ),
    "latent attention": (ModelRecipe(class_name="DeepseekV2ForCausalLM", config=DENSE), "attention is of its own kind"),
    "pictures": (VISION_LANGUAGE["qwen3_vl"], "pictures take the place of tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_attention_of_another_kind_is_refused_with_the_reason(name: str) -> None:
    recipe, reason = REFUSED[name]
    model = build(recipe).module
    check_context_parallel(model, ring=1, ulysses=1)
    with pytest.raises(UserError, match=f"{recipe.class_name}.*{reason}"):
        check_context_parallel(model, ring=2, ulysses=1)


@pytest.mark.parametrize("name", MODELS)
def test_the_heads_that_tensor_parallelism_leaves_must_divide(name: str, cases: dict[str, Case]) -> None:
    model = cases[name].built.module
    check_context_parallel(model, ring=2, ulysses=4)
    check_context_parallel(model, ring=3, ulysses=2, tp=2)
    with pytest.raises(UserError, match="all-to-all of 4 ranks does not divide the model's 2 heads of 4"):
        check_context_parallel(model, ring=1, ulysses=4, tp=2)
