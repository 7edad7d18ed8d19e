"""Cuts are balanced, schedules take what we say they take, and what can't work is refused with what can."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from headway.errors import UserError
from headway.parallel.pipeline import (
    SCHEDULES,
    BlockCosts,
    PipelinePlan,
    balanced_cuts,
    plan_pipeline,
    reshards_after_forward,
)
from headway.recipe import LayoutRecipe
from pipelined_models import MODELS, language_model


def slowest(costs: BlockCosts, cuts: tuple[int, ...]) -> float:
    ends = [0, *itertools.accumulate(cuts)]
    stages = [sum(costs.blocks[first:end]) for first, end in itertools.pairwise(ends)]
    stages[0] += costs.entry
    stages[-1] += costs.exit
    return max(stages)


costs = st.floats(0.0, 10.0)


@given(st.lists(costs, min_size=1, max_size=9), costs, costs, st.data())
def test_no_other_cuts_have_a_faster_slowest_stage(blocks: list[float], entry: float, exit: float, data: Any) -> None:
    stages = data.draw(st.integers(1, len(blocks)))
    at_first = data.draw(st.integers(1, len(blocks) - stages + 1))
    given_costs = BlockCosts(entry, tuple(blocks), exit)
    cuts = balanced_cuts(given_costs, stages, at_first)
    assert len(cuts) == stages
    assert min(cuts) >= 1
    assert cuts[0] >= at_first
    assert sum(cuts) == len(blocks)
    inner = itertools.combinations(range(1, len(blocks)), stages - 1)
    others = (tuple(b - a for a, b in itertools.pairwise((0, *ends, len(blocks)))) for ends in inner)
    fastest = min(slowest(given_costs, other) for other in others if other[0] >= at_first)
    assert slowest(given_costs, cuts) <= fastest * (1 + 1e-6)


def test_equal_blocks_are_cut_evenly_and_the_head_counts() -> None:
    assert sorted(balanced_cuts(BlockCosts(0.0, (1.0,) * 10, 0.0), 4)) == [2, 2, 3, 3]
    assert balanced_cuts(BlockCosts(0.0, (1.0,) * 10, 2.0), 4) == (3, 3, 3, 1)


class Stage(SimpleNamespace):
    """What torch's schedules ask of a stage before they run."""

    def __init__(self, plan: PipelinePlan, index: int, rank: int) -> None:
        super().__init__(
            stage_index=index,
            num_stages=plan.stages,
            group_size=plan.ranks,
            group_rank=rank,
            is_first=index == 0,
            is_last=index == plan.stages - 1,
            submod=nn.Identity(),
        )


def made_by_torch(name: str, plan: PipelinePlan, micro_batches: int) -> Any:
    stages = [Stage(plan, index, 0) for index in plan.stages_of(0)]
    schedule: Any = get_schedule_class(SCHEDULES[name].torch_name)
    single = issubclass(schedule, PipelineScheduleSingle)
    return schedule(stages[0] if single else stages, micro_batches, loss_fn=lambda: None)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_schedules_take_the_micro_batches_and_stages_that_we_say(name: str, ranks: int) -> None:
    kind = SCHEDULES[name]
    for per_rank in kind.stages_per_rank or (2, 3):
        plan = PipelinePlan(name, ranks, (1,) * ranks * per_rank)
        for micro_batches in range(1, 14):
            if not kind.takes(ranks, micro_batches):
                with pytest.raises(ValueError, match="icro"):
                    made_by_torch(name, plan, micro_batches)
                continue
            schedule = made_by_torch(name, plan, micro_batches)
            if not isinstance(schedule, PipelineScheduleSingle):
                ranks_of_stages = [schedule.stage_index_to_group_rank[stage] for stage in range(plan.stages)]
                assert ranks_of_stages == [plan.rank_of(stage) for stage in range(plan.stages)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_and_block_has_one_place(name: str) -> None:
    plan = PipelinePlan(name, 3, (2, 1, 3) if SCHEDULES[name].stages_per_rank == (1,) else (2, 1, 3, 1, 1, 2))
    stages = [stage for rank in range(3) for stage in plan.stages_of(rank)]
    assert sorted(stages) == list(range(plan.stages))
    assert [block for stage in range(plan.stages) for block in plan.blocks_of(stage)] == list(range(sum(plan.cuts)))
    assert (plan.rank_of(plan.stages - 1) == 0) == SCHEDULES[name].v_shaped


def planned(model: nn.Module, micro_batches: int = 8, compiled: bool = False, **layout: Any) -> PipelinePlan:
    checkpointing = layout.pop("checkpointing", "none")
    recipe = LayoutRecipe(**{"pp": 2} | layout)
    return plan_pipeline(recipe, model, micro_batches=micro_batches, compiled=compiled, checkpointing=checkpointing)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    with torch.device("meta"):
        return language_model("LlamaForCausalLM")


def test_the_head_makes_the_last_stage_shorter() -> None:
    with torch.device("meta"):
        model = language_model("LlamaForCausalLM", num_hidden_layers=12, vocab_size=1024)
    assert planned(model).cuts == (8, 4)
    assert planned(model, pp_cuts=[5, 7]).cuts == (5, 7)


@pytest.mark.parametrize(
    ("layout", "micro_batches", "message"),
    [
        ({"pp": 8}, 8, r"8 stages, but the 4 blocks of LlamaForCausalLM make 4 at most: set layout.pp to 4"),
        ({"pp_schedule": "zbv", "pp": 4}, 8, r"8 stages, but .* make 4 at most: set layout.pp to 2 or less"),
        ({"pp": 4}, 3, r"at least layout.pp micro-batches a rank, and run.global_batch makes 3: .* makes 4$"),
        ({"pp_schedule": "dualpipev"}, 3, r"at least 2 x layout.pp micro-batches .* makes 4$"),
        ({"pp_schedule": "interleaved_1f1b"}, 5, r"divides into rounds of at least layout.pp .* makes 4 or 6$"),
        ({"pp_schedule": "interleaved_zero_bubble"}, 7, r"rounds .* makes 6 or 8$"),
        ({"pp_schedule": "interleaved_1f1b", "pp_stages_per_rank": 1}, 8, r'set it to 2, or .* "1f1b"'),
        ({"pp_stages_per_rank": 2}, 8, r'1 stage\(s\) on each rank.* set it to 1, or .* "interleaved_1f1b"'),
        ({"pp_schedule": "zbv", "pp_stages_per_rank": 3}, 8, r"2 stage\(s\) on each rank.* set it to 2"),
        ({"pp_cuts": [1, 1, 2]}, 8, r"for 3 stages, but .* makes 2: name 2 numbers"),
        ({"pp_cuts": [1, 2]}, 8, r"adds up to 3 blocks and the model has 4"),
        ({"pp_schedule": "zbv", "reshard_after_forward": True}, 8, r"would leave weights without gradients"),
        ({"pp_schedule": "zbv", "compiled": True}, 8, r"compiled blocks can't: set run.compile = false"),
        ({"pp_schedule": "dualpipev", "checkpointing": "selective"}, 8, r'activation_checkpointing = "full" or "none"'),
    ],
)
def test_what_cannot_work_is_refused_with_what_can(
    llama: nn.Module, layout: dict[str, Any], micro_batches: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        planned(llama, micro_batches, **layout)


def test_layers_that_take_features_of_pictures_stay_with_the_vision_tower() -> None:
    model: Any = MODELS["qwen3_vl"][0]()
    model.config.vision_config.deepstack_visual_indexes = [0, 1]
    assert planned(model).cuts == (2, 2)
    assert planned(model, pp=3).cuts == (2, 1, 1)
    with pytest.raises(UserError, match=r"pp_cuts = \[1, 3\]: the first 2 blocks take .* be 2 or more"):
        planned(model, pp_cuts=[1, 3])
    with pytest.raises(UserError, match=r"4 stages, but the 4 blocks of .* make 3 at most: set layout.pp to 1 or less"):
        planned(model, pp_schedule="zbv")


def test_blocks_are_freed_after_forward_unless_the_backward_is_split() -> None:
    assert reshards_after_forward(LayoutRecipe())
    assert not reshards_after_forward(LayoutRecipe(reshard_after_forward=False))
    assert reshards_after_forward(LayoutRecipe(pp=2, reshard_after_forward=True))
    for name, kind in SCHEDULES.items():
        assert reshards_after_forward(LayoutRecipe(pp=2, pp_schedule=name)) == (not kind.splits_backward)


@pytest.mark.parametrize("class_name", ["Gemma3ForCausalLM", "GPT2LMHeadModel"])
def test_models_that_are_no_plain_sequence_are_refused_by_name(class_name: str) -> None:
    with torch.device("meta"):
        model = language_model(class_name)
    with pytest.raises(UserError, match=f"{class_name} can't be cut into stages"):
        planned(model)


def test_what_trains_outside_of_the_stages_is_refused() -> None:
    with torch.device("meta"):
        model: Any = MODELS["wan"][0]()
    model.text_encoders["text_encoder"] = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"text_encoders\.text_encoder\.weight trains outside"):
        planned(model)
    with torch.device("meta"):
        language: Any = language_model("LlamaForCausalLM")
    language.model.extra = nn.Linear(2, 2)
    with pytest.raises(
        UserError, match=r"LlamaForCausalLM has parameters that no stage is known to own \(model\.extra"
    ):
        planned(language)
