"""What a record says: operations as the Trainer counts them, memory, roles, and clear refusals."""

import json

import pytest
import torch
from diffusers import AutoencoderKL
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import rehearsed_recipes as recipes
from headway.errors import UserError
from headway.models import build_model
from headway.recipe import LatentRecipe
from headway.rehearse import dress_rehearsal, rehearse, roles
from headway.rehearse.dress_rehearsal import rehearse_whole
from headway.rehearse.model_on_meta import model_on_meta
from headway.rehearse.patches import UPDATES, recorded_streams, without_ranks
from headway.rehearse.step_sizes import step_sizes
from headway.rehearse.streams import Device
from headway.rehearse.tokens import renumbered
from headway.train.assembly import flops_of
from headway.train.unread_batches import rehearsed_batch
from soak import soak


def flops(record, *phases):
    return sum(operator.flops for operator in record.operators if operator.phase in phases)


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [
        (recipes.text(memory={"activation_checkpointing": "full"}), 1),
        (recipes.text(layout={"dp_replicate": 2}), 4),
        soak(recipes.images(), 2),
    ],
    ids=["checkpointed", "replicas", "pictures"],
)
def test_operations_are_those_that_the_trainer_counts(recipe, ranks):
    record = rehearse_whole(recipe, ranks, 0)
    assert flops(record, "forward", "backward") * ranks == record.facts.model_flops
    assert flops(record, "recompute") * ranks == record.facts.recomputed_flops
    assert record.facts.tokens > 0
    assert record.facts.samples == recipe.run.global_batch


def test_tensor_parallel_ranks_share_the_operations():
    record = rehearse_whole(recipes.text(layout={"tp": 2}), 2, 0)
    assert flops(record, "forward", "backward") * 2 == record.facts.model_flops


def test_nothing_is_recomputed_without_checkpointing():
    record = rehearse_whole(recipes.text(layout={"pp": 2}, run={"global_batch": 2}), 2, 1)
    assert {operator.phase for operator in record.operators} == {"forward", "backward", "optimizer", "other"}


def test_memory_is_named_and_adds_up():
    recipe = recipes.text(run={"global_batch": 2})
    record = rehearse_whole(recipe, 2, 0)
    module = build_model(recipe.model, recipe.precision, seed=0).module
    shard = sum(parameter.numel() for parameter in module.parameters()) // 2
    before = {}
    for allocation in record.allocations:
        if allocation.allocated_event < 0:
            before[allocation.category] = before.get(allocation.category, 0) + allocation.bytes
    assert before["parameter"] == before["ema"] == 4 * shard
    assert 8 * shard <= before["optimizer"] < 8 * shard + 4 * 200
    during = {allocation.category for allocation in record.allocations if allocation.allocated_event >= 0}
    assert {"gradient", "activation", "gathered", "communication", "temporary"} <= during
    assert all(allocation.module for allocation in record.allocations if allocation.category == "optimizer")
    for allocation in record.allocations:
        assert allocation.allocated_at <= allocation.freed_at <= len(record.operators)
        assert allocation.allocated_event < allocation.freed_event
    assert record.peak_bytes() > sum(before.values())


def test_dependencies_point_back_and_lanes_run_in_order():
    record = rehearse_whole(recipes.text(), 2, 0)
    last = {}
    for number, operator in enumerate(record.operators):
        assert all(earlier < number for earlier in operator.after)
        assert last.get(operator.lane) is None or last[operator.lane] in operator.after
        last[operator.lane] = number
    assert set(last) == {"compute", "fsdp copy-in", "fsdp all-gather", "fsdp reduce-scatter"}
    waited = record.waiters()
    gathers = [n for n, o in enumerate(record.operators) if o.collective and o.collective.kind == "all_gather"]
    assert gathers
    assert all(n in waited for n in gathers)


def test_steps_after_the_first_are_recorded():
    """Optimizer states are there when the step begins, and nothing is left that was not there before."""
    record = rehearse_whole(recipes.text(), 2, 1)
    stays = {a.category for a in record.allocations if a.stays and a.allocated_event >= 0}
    assert stays <= {"gathered", "temporary"}
    assert not any(a.category == "optimizer" for a in record.allocations if a.allocated_event >= 0)


def test_roles_are_the_places_of_the_pipeline():
    recipe = recipes.layers(4, layout={"pp": 2, "tp": 2}, run={"global_batch": 8})
    found = roles(recipe, 8)
    assert [(role.rank, role.place, role.stages, role.ranks) for role in found] == [
        (0, 0, (0,), range(0, 4)),
        (4, 1, (1,), range(4, 8)),
    ]
    with pytest.raises(UserError, match="does not divide"):
        roles(recipe, 6)


def test_a_folder_with_a_config_alone_is_enough(tmp_path):
    recipe = recipes.text()
    (tmp_path / "config.json").write_text(json.dumps(recipe.model.config | {"architectures": ["Qwen3ForCausalLM"]}))
    folder = recipe.model.model_copy(update={"config": {}, "path": tmp_path, "tokenizer": None})
    from_folder = rehearse(recipe.model_copy(update={"model": folder}), 2)
    assert from_folder.operators == rehearse(recipe, 2).operators


def test_control_flow_that_depends_on_data_is_refused_by_name(monkeypatch):
    forward = Qwen3MLP.forward

    def looks(self, hidden):
        return forward(self, hidden) if hidden.sum() > 0 else hidden

    monkeypatch.setattr(Qwen3MLP, "forward", looks)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp looks at a value"):
        rehearse_whole(recipes.text(), 1, 0)


def test_what_is_replaced_is_put_back():
    owners = [(owner, name) for owner, name in UPDATES] + [
        (torch.nn.Module, "_apply"),
        (torch.UntypedStorage, "resize_"),
    ]
    before = [vars(owner).get(name) for owner, name in owners]
    with pytest.raises(UserError), recorded_streams(Device()), without_ranks():
        raise UserError("in the middle")
    rehearse_whole(recipes.text(), 2, 0)
    assert [vars(owner).get(name) for owner, name in owners] == before


def test_sizes_grow_with_blocks_as_the_trainer_counts_them():
    recipe = recipes.flux(4, 3, memory={"activation_checkpointing": "full"})
    copy = model_on_meta(recipe)
    batch = rehearsed_batch(recipe, copy, lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="meta"))
    counted = flops_of(recipe, copy)(batch.tensors)
    found = step_sizes(recipe)
    assert (found.model_flops, found.recomputed_flops) == (counted.model, counted.recomputed)
    assert found.parameters == sum(parameter.numel() for parameter in copy.module.parameters())


def test_frozen_encoders_run_once_and_are_written_down_for_each_micro_batch(tmp_path, monkeypatch):
    vae = {"_class_name": "AutoencoderKL", "latent_channels": 48, "block_out_channels": [8, 8, 8]}
    vae |= {"norm_num_groups": 4, "layers_per_block": 1, "down_block_types": ["DownEncoderBlock2D"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(vae | {"up_block_types": ["UpDecoderBlock2D"] * 3}))
    recipe = recipes.flux(1, 1)
    latents = LatentRecipe(vae_class="AutoencoderKL", path=tmp_path, subfolder="")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"latents": latents})})
    calls = []
    encode = AutoencoderKL.encode
    monkeypatch.setattr(AutoencoderKL, "encode", lambda *given, **named: calls.append(1) or encode(*given, **named))
    found = [renumbered(rehearse_whole(recipe, 2, rank)) for rank in (0, 1)]
    assert len(calls) == 1
    monkeypatch.setattr(dress_rehearsal, "repeat_frozen_calls", lambda *_: lambda recorder: None)
    for rank, repeated in enumerate(found):
        assert repeated == renumbered(rehearse_whole(recipe, 2, rank))
    assert len(calls) == 1 + 2 * repeated.facts.micro_batches == 5
    encoding = sum(operator.flops for operator in repeated.operators if operator.module.startswith("vae"))
    assert flops(repeated, "forward", "backward") * 2 == repeated.facts.model_flops
    assert encoding > 0
