"""Attention over several ranks is attention: outputs, gradients, what is sent, and what runs without values."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from headway.parallel.context_parallel import block_attention
from headway.parallel.context_parallel.attention import context_parallel_attention
from headway.parallel.context_parallel.ranks import ContextRanks
from headway.parallel.context_parallel.split import CausalSplit, StreamSplit, take
from ranks import run_ranks

SHAPES = {"ulysses 2": (1, 2), "ring 2": (2, 1), "ulysses 4": (1, 4), "ring 4": (4, 1), "both": (2, 2)}
HEADS = {"all": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}
BATCH, WIDTH = 2, 16


def context(ring: int, ulysses: int) -> ContextRanks:
    return ContextRanks.of(init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("cp_ring", "cp_ulysses")))


def inputs(heads: tuple[int, int], length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value and the output's gradient: the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, count, length, WIDTH) for count in (heads[0], heads[1], heads[1], heads[0])]
    return [2 * torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def on_one_device(tensors: list[Tensor], mask: Tensor | None = None, causal: bool = False) -> list[Tensor]:
    """Output and gradients of query, key and value."""
    query, key, value, gradient = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in leaves[1:])
    out = functional.scaled_dot_product_attention(leaves[0], key, value, attn_mask=mask, is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def on_ranks(ranks: ContextRanks, pieces: list[Tensor], steps: Any, documents: Tensor | None = None) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in pieces[:3]]
    out = context_parallel_attention(ranks, *leaves, steps, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, pieces[3])]


def errors(found: list[Tensor], expected: list[Tensor], piece: list[slice]) -> list[float]:
    """The largest of the tokens in ``piece``, relative to the largest value of all."""
    return [
        float((f.float() - take(e, piece, 2)).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True)
    ]


def squared_errors(found: list[Tensor], expected: list[Tensor], piece: list[slice]) -> Tensor:
    return torch.stack([(f.float() - take(e, piece, 2)).square().sum() for f, e in zip(found, expected, strict=True)])


def causal(
    shape: tuple[int, int], heads: tuple[int, int], packed: bool, dtype: torch.dtype, measure: Any
) -> tuple[Any, Any]:
    """This rank's tokens measured against one device in float32, and so one device in ``dtype``."""
    ranks, split = context(*shape), CausalSplit(*shape)
    length = split.padded(26)
    tensors = inputs(heads, length, dtype)
    documents = torch.rand(BATCH, length, generator=torch.Generator().manual_seed(1)).lt(0.1).cumsum(1)
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    mask = mask.tril() if packed else None
    piece = split.piece(length, ranks.ring.rank(), ranks.ulysses.rank())
    parts = [run for rank in range(shape[0]) for run in split.part(length, rank)]
    ordered = take(documents, parts, 1).unflatten(1, (shape[0], -1)) if packed else None
    found = on_ranks(ranks, [take(t, piece, 2) for t in tensors], split.steps(length, ranks.ring.rank()), ordered)
    expected = on_one_device([tensor.float() for tensor in tensors], mask, causal=not packed)
    alone = on_one_device(tensors, mask, causal=not packed)
    return measure(found, expected, piece), measure(alone, expected, [slice(None)])


def causal_errors(shape: tuple[int, int]) -> dict[tuple[str, bool], float]:
    """The largest, by heads and whether documents are packed."""
    return {
        (name, packed): max(causal(shape, heads, packed, torch.float32, errors)[0])
        for name, heads in HEADS.items()
        for packed in (False, True)
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_attention_over_ranks_is_that_of_one_device(shape: str) -> None:
    for found in run_ranks(math.prod(SHAPES[shape]), causal_errors, SHAPES[shape]):
        assert max(found.values()) < 2e-6, found


def bfloat16_errors(shape: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    return [causal(shape, HEADS["grouped"], packed, torch.bfloat16, squared_errors) for packed in (False, True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_is_at_most_twice_as_wrong_as_on_one_device(shape: str) -> None:
    for results in zip(*run_ranks(math.prod(SHAPES[shape]), bfloat16_errors, SHAPES[shape]), strict=True):
        found, alone = sum(result[0] for result in results), results[0][1]
        assert (found.sqrt() <= 2 * alone.sqrt()).all(), (found / alone).sqrt()


def stream_errors(shape: tuple[int, int], lengths: list[int], heads: tuple[int, int]) -> list[float]:
    ranks, split = context(*shape), StreamSplit(*shape)
    streams = [inputs(heads, length) for length in lengths]
    tensors = [torch.cat(tensor, 2) for tensor in zip(*streams, strict=True)]
    pieces = [
        torch.cat([split.shard(tensor, 2, ranks.place) for tensor in tensors], 2)
        for tensors in zip(*streams, strict=True)
    ]
    found = on_ranks(ranks, pieces, split.steps(lengths))
    # Padding is a query whose output no one reads.
    valid, start = [], 0
    for length in lengths:
        size = split.local(length)
        valid.append(slice(start, start + min(max(length - ranks.place * size, 0), size)))
        start += size
    expected, start = on_one_device(tensors), 0
    own = [[] for _ in expected]
    for length in lengths:
        first = min(ranks.place * split.local(length), length)
        last = min(first + split.local(length), length)
        for place, tensor in enumerate(expected):
            own[place].append(tensor[:, :, start + first : start + last])
        start += length
    return [
        float((take(f, valid, 2) - torch.cat(o, 2)).abs().amax() / e.abs().max()) if torch.cat(o, 2).numel() else 0.0
        for f, o, e in zip(found, own, expected, strict=True)
    ]


def errors_of_streams(shape: tuple[int, int]) -> dict[str, float]:
    return {
        str(lengths): max(stream_errors(shape, lengths, HEADS["all"]))
        for lengths in ([8, 16], [7, 15], [3, 9], [1, 13], [21])
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_streams_of_any_length_attend_to_each_other_without_padding(shape: str) -> None:
    for found in run_ranks(math.prod(SHAPES[shape]), errors_of_streams, SHAPES[shape]):
        assert max(found.values()) < 2e-6, found


class Sent(TorchDispatchMode):
    """Bytes that this rank sends to others, by direction."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            tensor, _, sent, _ = args
            others = sum(sent) - sent[self._rank]
            self.bytes += tensor.numel() * tensor.element_size() * others // sum(sent)
        return func(*args, **(kwargs or {}))


def sent_bytes(shape: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype) -> tuple[int, int]:
    ranks, split = context(*shape), CausalSplit(*shape)
    length = split.padded(32)
    group = ranks.ring if shape[0] > 1 else ranks.ulysses
    pieces = [take(tensor, split.piece(length, ranks.ring.rank(), ranks.ulysses.rank()), 2).detach() for tensor in
              inputs(heads, length, dtype)]  # fmt: skip
    leaves = [tensor.requires_grad_() for tensor in pieces[:3]]
    with Sent(group.rank()) as forward:
        out = context_parallel_attention(ranks, *leaves, split.steps(length, ranks.ring.rank()))
    with Sent(group.rank()) as backward:
        torch.autograd.grad(out, leaves, pieces[3])
    return forward.bytes, backward.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "heads"), [("ring 4", (4, 2)), ("ulysses 4", (8, 4)), ("ulysses 4", (4, 1))])
def test_as_many_bytes_are_sent_as_the_formulas_say(shape: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    ranks, item = 4, dtype.itemsize
    per_head = BATCH * 32 // ranks * WIDTH
    if shape == "ring 4":
        keys = 2 * heads[1] * per_head
        expected = ((ranks - 1) * keys * item, (ranks - 1) * keys * item + ranks * keys * 4)
    else:
        there = (heads[0] + 2 * max(heads[1], ranks)) * per_head * item * (ranks - 1) // ranks
        back = heads[0] * per_head * item * (ranks - 1) // ranks
        expected = (there + back, there + back)
    assert run_ranks(4, sent_bytes, SHAPES[shape], heads, dtype) == [expected] * 4


def rehearsed(shape: tuple[int, int], packed: bool) -> list[torch.Size]:
    """Forward and backward of rank 1 of 4 without values and without other ranks."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    ranks, split = context(*shape), CausalSplit(*shape)
    steps = split.steps(32, ranks.ring.rank())
    with FakeTensorMode():
        leaves = [torch.rand(BATCH, heads, 8, WIDTH, requires_grad=True) for heads in (4, 2, 2)]
        documents = torch.zeros(BATCH, shape[0], 32 // shape[0], dtype=torch.int64) if packed else None
        out = context_parallel_attention(ranks, *leaves, steps, documents)
        return [out.shape, *(gradient.shape for gradient in torch.autograd.grad(out.sum(), leaves))]


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed documents"])
@pytest.mark.parametrize("shape", ["ulysses 4", "ring 4", "both"])
def test_it_can_be_rehearsed_without_values(shape: str, packed: bool) -> None:
    (shapes,) = run_ranks(1, rehearsed, SHAPES[shape], packed)
    assert shapes == [(BATCH, 4, 8, WIDTH), (BATCH, 4, 8, WIDTH), (BATCH, 2, 8, WIDTH), (BATCH, 2, 8, WIDTH)]


def compiled(shape: tuple[int, int]) -> list[torch.Size]:
    """The graph of rank 1 of 4, traced whole, as the libraries' blocks are compiled."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    ranks, split = context(*shape), CausalSplit(*shape)
    attention = torch.compile(context_parallel_attention, backend="eager", fullgraph=True)
    leaves = [torch.rand(BATCH, heads, 8, WIDTH, requires_grad=True) for heads in (4, 2, 2)]
    out = attention(ranks, *leaves, split.steps(32, ranks.ring.rank()))
    return [out.shape, *(gradient.shape for gradient in torch.autograd.grad(out.sum(), leaves))]


def test_it_can_be_compiled_in_one_graph() -> None:
    (shapes,) = run_ranks(1, compiled, SHAPES["both"])
    assert shapes == [(BATCH, 4, 8, WIDTH), (BATCH, 4, 8, WIDTH), (BATCH, 2, 8, WIDTH), (BATCH, 2, 8, WIDTH)]


def test_what_a_query_does_not_see_counts_nothing_even_where_it_sees_nothing() -> None:
    query, key, value, gradient = inputs((4, 2), 6)
    hidden = torch.zeros(BATCH, 1, 6, 6)
    hidden[0, :, 2] = block_attention.NEVER
    attended = block_attention.attend(query, key, value, hidden, causal=False, scale=0.25)
    assert attended.log_sum[0, :, 2].max() < 0.99 * block_attention.NEVER
    known = attended._replace(log_sum=torch.zeros_like(attended.log_sum))
    for_query, for_key, for_value = block_attention.attend_backward(
        gradient, query, key, value, known, hidden, causal=False, scale=0.25
    )
    assert not for_query[0, :, 2].any()
    assert all(tensor.isfinite().all() for tensor in (*attended[:2], for_query, for_key, for_value))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operators_of_accelerators_take_what_they_are_given(dtype: torch.dtype, masked: bool) -> None:
    """On meta tensors: signatures and shapes."""
    query, gradient = (torch.empty(BATCH, 4, 10, WIDTH, dtype=dtype, device="meta") for _ in range(2))
    key = torch.empty(BATCH, 2, 12, WIDTH, dtype=dtype, device="meta")
    bias = torch.empty(BATCH, 1, 10, 12, dtype=dtype, device="meta") if masked else None
    attended = block_attention.attend(query, key, key, bias, causal=False, scale=0.25)
    assert attended.out.shape == query.shape
    assert attended.log_sum.shape == query.shape[:3]
    gradients = block_attention.attend_backward(gradient, query, key, key, attended, bias, causal=False, scale=0.25)
    assert [tensor.shape for tensor in gradients] == [query.shape, key.shape, key.shape]
