"""bfloat16 products on processors without bfloat16 instructions: those of float32, rounded once."""

from typing import Any

import torch
from torch.nn import functional

from headway.parallel import emulate_bfloat16_products
from ranks import run_ranks


def products() -> dict[str, torch.Tensor]:
    """Every kind of product, with its gradients, of bfloat16 and of the same numbers in float32."""
    found: dict[str, torch.Tensor] = {}
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, of: Any = (dtype, generator)) -> torch.Tensor:
            return torch.randn(shape, generator=of[1]).bfloat16().to(of[0]).requires_grad_()

        left, right, bias = draw(3, 8, 16), draw(3, 16, 8), draw(8)
        query, mask = draw(2, 2, 8, 16), draw(2, 1, 8, 8)
        results = {
            "mm": left[0] @ right[0],
            "addmm": functional.linear(left[0], right[0].T, bias),
            "bmm": left @ right,
            "baddbmm": torch.baddbmm(bias, left, right),
            "attention": functional.scaled_dot_product_attention(query, query, query),
            "masked attention": functional.scaled_dot_product_attention(query, query, query, attn_mask=mask.detach()),
        }
        for name, result in results.items():
            (gradient,) = torch.autograd.grad(result.square().sum(), query if "attention" in name else left)
            assert result.dtype == gradient.dtype == dtype
            found |= {f"{dtype} {name}": result.detach(), f"{dtype} gradient of {name}": gradient}
    return found


def emulated() -> dict[str, torch.Tensor]:
    emulate_bfloat16_products()
    emulate_bfloat16_products()
    return products()


def test_products_are_those_of_float32_rounded_once() -> None:
    (found,) = run_ranks(1, emulated)
    plain = products()
    for name in [name.removeprefix("torch.bfloat16 ") for name in found if name.startswith("torch.bfloat16")]:
        exact, result = found[f"torch.float32 {name}"], found[f"torch.bfloat16 {name}"]
        assert torch.equal(exact, plain[f"torch.float32 {name}"])
        if not name.startswith("gradient"):
            torch.testing.assert_close(result, exact.bfloat16(), rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(result.float(), exact, rtol=2**-5, atol=0.02 * float(exact.abs().max()))
