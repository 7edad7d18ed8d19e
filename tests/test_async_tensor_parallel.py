"""Asynchronous tensor parallelism: the compiler finds our gathers and scatters, and what it makes of them is right."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import init_device_mesh

from headway.errors import UserError
from headway.parallel import apply_tensor_parallel, overlap_tensor_parallel
from headway.parallel.async_tensor_parallel import enable_in_compiler
from headway.recipe import parse_recipe
from pipelined_models import language_model
from ranks import run_ranks
from rehearsed_recipes import images, text

FUSED = {"fused_all_gather_matmul", "fused_matmul_reduce_scatter"}


def passes_and_gradients(overlapped: bool) -> tuple[list[str], list[Tensor]]:
    """Fused operators of a compiled layer's graphs; its output and gradients on this rank."""
    torch.manual_seed(0)
    model = language_model("LlamaForCausalLM", num_hidden_layers=1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_tensor_parallel(model, mesh, sequence=True)
    fused: list[str] = []
    if overlapped:
        enable_in_compiler(mesh)
        torch.distributed.is_nccl_available = lambda: True  # builds without NCCL leave graphs alone
        library = torch.library.Library("symm_mem", "IMPL")
        library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
        library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")

    def rewritten(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        """As inductor rewrites graphs before it makes code of them."""
        mode = next(t.fake_mode for n in graph.graph.nodes if isinstance(t := n.meta.get("val"), FakeTensor))
        with V.set_fake_mode(mode):
            view_to_reshape(graph)
            post_grad_passes(graph, is_inference=False)
        graph.recompile()
        fused.extend(name for node in graph.graph.nodes for name in FUSED if name in str(node.target))
        return make_boxed_func(graph.forward)

    def partitioned(joint: torch.fx.GraphModule, inputs: Any, **keywords: Any) -> Any:
        return min_cut_rematerialization_partition(joint_graph_passes(joint), inputs, **keywords)

    backend = aot_autograd(
        fw_compiler=rewritten, bw_compiler=rewritten, partition_fn=partitioned, decompositions=select_decomp_table()
    )
    layer: nn.Module = model.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend=backend)
    tokens = torch.arange(16).view(2, 8)
    logits = model(input_ids=tokens, use_cache=False).logits.to_local()
    logits.square().sum().backward()
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in layer.parameters()]
    return fused, [logits.detach(), *gradients]


def test_the_compiler_overlaps_what_is_gathered_and_scattered_and_the_numbers_stay() -> None:
    """Operators for CUDA's symmetric memory run as their definition says, over gloo."""
    plain = run_ranks(2, passes_and_gradients, False)
    overlapped = run_ranks(2, passes_and_gradients, True)
    for (_, expected), (fused, found) in zip(plain, overlapped, strict=True):
        # Attention and feed-forward gather and scatter once, forward and backward. What the backward scatters is a sum
        # of several products, which no one product can be fused with.
        assert fused.count("fused_all_gather_matmul") == 4
        assert fused.count("fused_matmul_reduce_scatter") == 2
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def test_devices_without_symmetric_memory_are_refused() -> None:
    mesh: Any = None
    with pytest.raises(UserError, match=r"the run is on cpu: leave it out"):
        overlap_tensor_parallel(mesh, torch.device("cpu"))


@pytest.mark.parametrize(
    ("layout", "compiled", "lacking"),
    [
        ({"tp": 1}, True, "layout.tp > 1"),
        ({"tp": 2, "sequence_parallel": False}, True, "layout.sequence_parallel = true"),
        ({"tp": 2}, False, "run.compile = true"),
    ],
)
def test_what_it_needs_is_said(layout: dict[str, Any], compiled: bool, lacking: str) -> None:
    document = text().model_dump(mode="json")
    document["layout"] |= layout | {"async_tensor_parallel": True}
    document["run"]["compile"] = compiled
    with pytest.raises(UserError, match=f"async_tensor_parallel needs {lacking}"):
        parse_recipe(document, source="test")


def test_denoisers_have_nothing_to_overlap() -> None:
    document = images().model_dump(mode="json")
    document["layout"] |= {"tp": 2, "async_tensor_parallel": True}
    document["run"]["compile"] = True
    with pytest.raises(UserError, match="a language model"):
        parse_recipe(document, source="test")
