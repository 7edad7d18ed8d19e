"""A cross-entropy over logits that no rank has whole, and the embedding and head that go with it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from divided_models import DECODERS, Case, assert_same, outcomes, perturbed_weights, with_config
from headway.parallel.tensor_parallel_styles import Division
from headway.parallel.vocabulary_parallel import VocabularyEmbedding, cross_entropy_sum
from headway.recipe import ModelRecipe
from ranks import run_ranks

TOKENS, VOCABULARY = 13, 24


def logits_and_labels(
    seed: int, scale: float, dtype: torch.dtype, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(1, T, V) and (1, T), with labels at the borders between ranks and two that are ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((1, TOKENS, VOCABULARY), generator=generator)
    labels = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
    labels[0, :8] = torch.tensor([0, 5, 6, 11, 12, 17, 18, 23])
    labels[0, -2:] = ignore_index
    return logits.to(dtype), labels


def reference(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient in float64."""
    wide = logits.double().requires_grad_()
    flat = wide.flatten(0, 1)
    loss = functional.cross_entropy(flat, labels.flatten(), ignore_index=ignore_index, reduction="sum")
    loss.backward()
    assert wide.grad is not None
    return loss.detach(), wide.grad


Logits = tuple[int, float, torch.dtype, int]
CASES: list[Logits] = [
    (0, 1.0, torch.float32, -100),
    (1, 300.0, torch.float32, -100),
    (2, 3.0, torch.bfloat16, -100),
    (3, 1.0, torch.float32, 6),
]


def _divided_losses(cases: list[Logits]) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """(loss, whole gradient, collectives forward, backward) of each case."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    results = []
    for seed, scale, dtype, ignore_index in cases:
        logits, labels = logits_and_labels(seed, scale, dtype, ignore_index)
        own = logits.chunk(mesh.size(), -1)[mesh.get_local_rank()].contiguous().requires_grad_()
        with CommDebugMode() as forward:
            shards = DTensor.from_local(own, mesh, [Shard(2)], run_check=False)
            loss = cross_entropy_sum(shards, labels, ignore_index)
        with CommDebugMode() as backward:
            (3 * loss).backward()
        assert own.grad is not None
        gradient = DTensor.from_local(own.grad, mesh, [Shard(2)], run_check=False).full_tensor() / 3
        results.append((loss.detach(), gradient, forward.get_total_counts(), backward.get_total_counts()))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradient_of_shards_are_those_of_the_whole(ranks: int) -> None:
    """Logits of hundreds, bfloat16, and an ignored index that is a token of the vocabulary."""
    for results in run_ranks(ranks, _divided_losses, CASES):
        for (seed, scale, dtype, ignore_index), (loss, gradient, forward, backward) in zip(CASES, results, strict=True):
            expected_loss, expected = reference(*logits_and_labels(seed, scale, dtype, ignore_index), ignore_index)
            assert loss.dtype == torch.float32
            torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
            assert gradient.dtype == dtype
            tolerance = 4e-3 if dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)
            assert (forward, backward) == (2, 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 100), st.sampled_from([-100, 0, 7]))
def test_plain_logits_give_what_pytorch_gives(seed: int, scale: float, ignore_index: int) -> None:
    logits, labels = logits_and_labels(seed, scale, torch.float32, ignore_index)
    expected, _ = reference(logits, labels, ignore_index)
    torch.testing.assert_close(cross_entropy_sum(logits, labels, ignore_index).double(), expected, rtol=1e-5, atol=0)


def test_a_micro_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    for loss, gradient in run_ranks(2, _without_labels):
        assert loss == 0
        assert not gradient.any()


def _without_labels() -> tuple[float, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    own = torch.randn(1, 3, 4, requires_grad=True)
    loss = cross_entropy_sum(DTensor.from_local(own, mesh, [Shard(2)]), torch.full((1, 3), -100), -100)
    loss.backward()
    assert own.grad is not None
    return float(loss), own.grad


def test_each_rank_looks_up_its_rows_and_the_row_of_padding_does_not_train() -> None:
    table = nn.Embedding(8, 4, padding_idx=5)
    ids = torch.tensor([[0, 3, 4], [5, 5, 7]])
    expected = table(ids)
    (expected * torch.arange(24).reshape(2, 3, 4)).sum().backward()
    assert table.weight.grad is not None
    for found, gradient in run_ranks(2, _looked_up, table.weight.detach(), ids):
        assert torch.equal(found, expected.detach())
        assert torch.equal(gradient, table.weight.grad)


def _looked_up(weight: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    table: Any = nn.Embedding(8, 4, padding_idx=5, _weight=weight.clone())
    VocabularyEmbedding().apply(table, Division(mesh))
    found = table(ids)
    (found * torch.arange(24).reshape(2, 3, 4)).sum().backward()
    return found.detach(), table.weight.grad.full_tensor()


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_does_not_divide_stays_whole(tied: bool) -> None:
    recipe: ModelRecipe = with_config(DECODERS["qwen3"], vocab_size=127, tie_word_embeddings=tied)
    weights = perturbed_weights(recipe)
    expected = outcomes(Case(recipe, tp=1), weights)[0]
    for found in outcomes(Case(recipe, tp=2, sequence=True), weights):
        assert_same(found, expected)
