"""How ranks are numbered in the axes of a layout, and which layouts are refused."""

import math
from collections import Counter

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import UserError
from headway.parallel import Meshes
from headway.recipe import LayoutRecipe, sizes
from ranks import run_ranks

small = st.sampled_from([1, 2, 3, 4])


@given(pp=small, dp_replicate=small, dp_shard=small, cp=small, tp=small)
def test_auto_shards_are_what_the_other_axes_leave(pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int) -> None:
    layout = LayoutRecipe(pp=pp, dp_replicate=dp_replicate, cp=cp, tp=tp)
    world = pp * dp_replicate * dp_shard * cp * tp
    found = sizes(layout, world)
    assert found.dp_shard == dp_shard
    assert found.stage * found.pp == world
    assert found == sizes(layout.model_copy(update={"dp_shard": dp_shard}), world)


@pytest.mark.parametrize(
    ("layout", "world", "message"),
    [
        ({"tp": 3}, 4, "layout.tp = 3 does not divide the 4 ranks; it can be 1, 2, 4"),
        ({"tp": 2, "cp": 4}, 4, "layout.cp x tp = 4 x 2 = 8 does not divide the 4 ranks"),
        ({"pp": 2, "dp_shard": 4}, 4, "layout.pp x dp_shard = 2 x 4 = 8, but the run has 4 ranks: start 8 ranks"),
        ({"dp_shard": 1}, 2, "layout.dp_shard = 1, but the run has 2 ranks: start 1 ranks"),
        ({"ep": 4, "pp": 2}, 4, "layout.ep = 4 does not divide dp_shard x cp x tp = 2"),
        ({"ep": 4, "dp_replicate": 2}, 4, "layout.ep can be 1, 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_what_does(layout: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        sizes(LayoutRecipe(**layout), world)  # type: ignore[arg-type]
    assert message in str(caught.value)


def places() -> dict[str, object]:
    layout = LayoutRecipe(pp=2, dp_replicate=2, cp=2, cp_kind="ring")
    meshes = Meshes(layout, dist.get_rank(), dist.get_world_size(), "cpu")
    ranks = {name: getattr(meshes, name).mesh.flatten().tolist() for name in ("pp", "tp", "fsdp", "cp")}
    return ranks | {
        "stage": meshes.stage,
        "data_rank": meshes.data_rank,
        "first": meshes.is_first_of_data_rank,
        "firsts": list(meshes.first_ranks_of_data_ranks()),
    }


def test_stages_are_farthest_apart_and_ranks_of_one_sequence_are_neighbours() -> None:
    found = run_ranks(8, places)
    assert [place["stage"] for place in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place["data_rank"] for place in found] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [rank for rank, place in enumerate(found) if place["first"]] == [0, 2] == found[7]["firsts"]
    assert found[5]["cp"] == [4, 5]
    assert found[5]["pp"] == [1, 5]
    assert found[5]["tp"] == [5]
    assert sorted(found[5]["fsdp"]) == [4, 5, 6, 7]


def expert_places() -> dict[str, list[int]]:
    meshes = Meshes(LayoutRecipe(dp_replicate=2, tp=2, ep=2), dist.get_rank(), dist.get_world_size(), "cpu")
    return {name: meshes.expert[name].mesh.tolist() for name in ("ep", "expert_shard", "dp_replicate")}


def test_ranks_of_one_replica_share_its_experts() -> None:
    found = run_ranks(8, expert_places)
    assert found[0] == {"ep": [0, 1], "expert_shard": [0, 2], "dp_replicate": [0, 4]}
    assert found[7] == {"ep": [6, 7], "expert_shard": [5, 7], "dp_replicate": [3, 7]}


@given(pp=small, dp_shard=small, cp=small, tp=small)
def test_every_share_of_a_batch_is_worked_on_by_equally_many_ranks(pp: int, dp_shard: int, cp: int, tp: int) -> None:
    size = sizes(LayoutRecipe(pp=pp, dp_shard=dp_shard, cp=cp, tp=tp), math.prod((pp, dp_shard, cp, tp)))
    shares = Counter(rank // (size.cp * size.tp) % size.data for rank in range(size.stage * size.pp))
    assert set(shares.values()) == {pp * cp * tp}
    assert len(shares) == size.data
