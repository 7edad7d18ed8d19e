"""Every family runs under FSDP2's mixed precision: float32 shards, bfloat16 compute, float32 timesteps."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headway.models import build_model, next_token_logits, vision_language_logits
from headway.recipe import PrecisionRecipe
from ranks import run_ranks
from tiny_models import DIFFUSION, LANGUAGE, VISION_LANGUAGE, word_tokenizer


def _train_all() -> dict[str, list[str]]:
    """Family -> parameters without a float32 sharded gradient, over all families."""
    faults = {}
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for name, recipe in (DIFFUSION | LANGUAGE | VISION_LANGUAGE).items():
        tokenizers = dict.fromkeys(recipe.text_encoders, word_tokenizer())
        built = build_model(recipe, PrecisionRecipe(), seed=0, tokenizers=tokenizers)
        for _, block in built.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(built.module, mesh=mesh, mp_policy=policy)
        built.materialize(torch.device("cpu"))
        if built.frozen is not None:
            tokens = built.frozen.caption_tokens(["a red heart", "a moon"])
            noisy = torch.randn(2, *built.frozen.latent_shape(16, 5 if name == "wan" else 1))
            output = built.module(noisy, torch.rand(2), tokens, {})
        elif name in VISION_LANGUAGE:
            ids = torch.arange(12)[None]
            output = built.module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        else:
            output = next_token_logits(built.module, torch.arange(12)[None], torch.arange(12)[None])
        assert output.dtype == torch.bfloat16, name
        output.float().square().sum().backward()
        faults[name] = [
            n
            for n, p in built.module.named_parameters()
            if not (isinstance(p.grad, DTensor) and p.grad.dtype == torch.float32 and p.grad.placements == p.placements)
        ]
    return faults


def _pictures_on_one_rank() -> dict[str, torch.Tensor]:
    gradients = {}
    mesh = init_device_mesh("cpu", (2,))
    for name, recipe in VISION_LANGUAGE.items():
        built = build_model(recipe, PrecisionRecipe(compute="float32"), seed=0)
        for _, block in built.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(built.module, mesh=mesh)
        built.materialize(torch.device("cpu"))
        ids = torch.arange(12)[None].clone()
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
        if torch.distributed.get_rank() == 0:
            ids[0, 3:8] = torch.tensor([122, 120, 120, 120, 120])
            inputs["mm_token_type_ids"][0, 4:8] = 1
            inputs["pixel_values"] = torch.randn(16, 96)
            inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        vision_language_logits(built.module, inputs).square().sum().backward()
        tower = [p.grad.full_tensor().norm() for n, p in built.module.named_parameters() if ".visual." in n]
        gradients[name] = torch.stack(tower)
    return gradients


def test_a_rank_without_pictures_takes_part_in_the_vision_towers_collectives() -> None:
    first, second = run_ranks(2, _pictures_on_one_rank, timeout_s=60)
    for name in VISION_LANGUAGE:
        assert torch.equal(first[name], second[name])
        assert (first[name] > 0).all()


def test_all_families_train_in_bfloat16_on_two_ranks() -> None:
    for faults in run_ranks(2, _train_all):
        assert all(names == [] for names in faults.values()), faults
