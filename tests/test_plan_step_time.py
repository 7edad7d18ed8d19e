"""The analytic model of a step: its algebra, published counts of FLOPs and parameters, memory that layouts share."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.cluster import cluster_named
from headway.cost import Estimate
from headway.errors import UserError
from headway.plan import (
    Attention,
    Block,
    Experts,
    Layouts,
    ModelShape,
    Parts,
    Settings,
    behaviour_named,
    known_model,
    layouts,
    memory,
    predict,
    step_time,
)
from headway.plan.block_time import block_time

H100 = cluster_named("dgx-h100")
LLAMA_8B = known_model("Llama 3.1 8B")
FRAMEWORKS = ["bridge", "megatron_core", "torchtitan", "llm_foundry", "nanotron", "megatron_2021"]
few = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Llama 3.1 8B", 8.03, 7.50),
        ("Llama 3.1 405B", 405.9, 403.8),
        ("Qwen3_30B_a3B", 30.5, 3.04),
        ("Qwen3_235B_a22B", 235.1, 21.6),
        ("DeepSeekV3", 671.0, 36.6),
        ("Kimi K2", 1026, 31.7),
        ("GPT OSS 120B", 116.8, 5.13),
        ("Llama 4 Maverick 400B", 400.7, 16.2),
        ("Nemotron_3_Nano", 31.6, 3.23),
        ("Nemotron V3 Ultra 550B", 549, 55.0),
        ("Nemotron4 340B", 341, 336),
        ("CogVideoX-5b", 5.57, None),
    ],
)
def test_parameters_of_published_models(name, billions, active):
    shape = known_model(name)
    assert shape.parameters() / 1e9 == pytest.approx(billions, rel=0.005)
    if active:
        assert shape.active_parameters() / 1e9 == pytest.approx(active, rel=0.005)


def test_flops_of_published_models():
    """NVIDIA counts 433 GFLOP a token of Llama-3 70B at 4,096 tokens, torchtitan's formula 58 of 8B at 8,192."""
    assert known_model("Llama 3 70B").model_flops_per_token(4096) / 1e9 == pytest.approx(433.4, rel=0.01)
    full = LLAMA_8B.model_flops_per_token(8192, causal_half=False)
    assert full / 1e9 == pytest.approx(6 * 7.50 + 12 * 32 * 4096 * 8192 / 1e9, rel=0.01)
    wan = known_model("Wan 2.1 14B").model_flops_per_token(37440, causal_half=False)
    assert wan / 1e12 == pytest.approx(0.166, rel=0.01)
    assert known_model("a model of our own") is None


def test_gpt_flops_follow_narayanan_equation_three():
    hidden, layers, sequence = 12288, 96, 2048
    block = Block(layers, attention=Attention(96, 96, 128, rotary=False), mlp_width=4 * hidden, gated=False)
    shape = ModelShape("GPT-3", hidden, (block,), vocabulary=51200, tied=True)
    published = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + 51200 / (12 * layers * hidden))
    assert shape.model_flops_per_token(sequence, causal_half=False) == pytest.approx(published, rel=0.001)


def one(**sizes) -> Layouts:
    return layouts(**({"devices": 64, "micro_batch": 1, "global_batch": 64} | sizes))


def matrix_time(layout: Layouts, shape: ModelShape = LLAMA_8B, **changes) -> float:
    run = Settings(sequence=8192, **changes)
    return float(step_time(H100, shape, layout, run, behaviour_named("maxtext")).parts.times["matrix"].value[0])


def test_pipeline_bubble_is_the_published_share_and_virtual_stages_divide_it():
    """(p - 1)/m of the work, and a v-th of that when interleaved (Narayanan et al. 2021, section 2.2)."""
    headless = ModelShape("blocks", 4096, LLAMA_8B.blocks)
    for pp, virtual, batch in ((4, 1, 16), (4, 4, 16), (8, 2, 32)):
        layout = one(devices=pp, pp=pp, virtual=virtual, global_batch=batch)
        flat = one(devices=pp, pp=pp, virtual=virtual, global_batch=1000 * batch)
        ratio = (matrix_time(layout, headless) / batch) / (matrix_time(flat, headless) / (1000 * batch))
        many = (pp - 1) / (1000 * batch * virtual)
        assert ratio == pytest.approx((1 + (pp - 1) / (batch * virtual)) / (1 + many), rel=1e-6)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"pp": 2}, {"devices": 32}, {"tp": 4, "cp": 2}])
def test_layouts_share_the_same_floating_point_work(sizes):
    """Without losses by shape, head and bubble, work per device times devices is the same for every layout."""
    document = H100.achieved.model_dump()
    document["matrix"]["bfloat16"] |= {"efficiency": 0.7, "half_depth": 0}
    document["memory"]["startup_us"] = 0
    ideal = H100.model_copy(update={"achieved": type(H100.achieved).model_validate(document)})
    run, how = Settings(sequence=8192), behaviour_named("maxtext")
    headless = ModelShape("blocks", 4096, LLAMA_8B.blocks)
    sizes = sizes | {"global_batch": 64_000}

    def work(layout: Layouts) -> float:
        parts = step_time(ideal, headless, layout, run, how).parts.times
        return float(parts["matrix"].value[0] * layout.devices[0] / layout.global_batch[0])

    assert work(one(**sizes)) == pytest.approx(work(one(global_batch=64_000)), rel=0.001)


@few
@given(st.sampled_from(FRAMEWORKS), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_every_prediction_has_a_range_around_it(framework, tp, pp, micro):
    layout = one(tp=tp, pp=pp, micro_batch=micro, global_batch=512)
    found = predict(H100, LLAMA_8B, layout, Settings(sequence=4096), behaviour_named(framework))
    for estimate in (found.step_time_s, found.peak_memory_gib):
        assert 0 < estimate.low[0] < estimate.value[0] < estimate.high[0] < np.inf
    assert sum(share[0] for share in found.breakdown().values()) == pytest.approx(1)


@few
@given(st.integers(0, 6), st.sampled_from(["torchtitan", "llm_foundry", "automodel"]))
def test_more_devices_never_raise_memory_per_device_under_fsdp(doublings, framework):
    devices = 8.0 * 2.0 ** np.array([doublings, doublings + 1])
    layout = layouts(devices, 1, devices * 4)
    run = Settings(sequence=4096, data_parallel="fsdp")
    peak = memory(LLAMA_8B, layout, run, behaviour_named(framework)).peak
    assert peak.value[1] <= peak.value[0]


@few
@given(st.sampled_from([0.0, 0.25, 0.5]), st.sampled_from(["bridge", "torchtitan", "nanotron"]))
def test_recomputation_trades_memory_for_time(share, framework):
    layout, how = one(micro_batch=2, global_batch=128), behaviour_named(framework)
    less, more = (
        predict(H100, LLAMA_8B, layout, Settings(sequence=8192, recompute_layers=layers), how)
        for layers in (share, 1.0)
    )
    assert more.peak_memory_gib.value[0] < less.peak_memory_gib.value[0]
    assert more.step_time_s.value[0] > less.step_time_s.value[0]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_sharing_a_model_lowers_memory(sizes):
    run, how = Settings(sequence=8192), behaviour_named("bridge")
    alone, shared = (memory(LLAMA_8B, layout, run, how).peak.value[0] for layout in (one(), one(**sizes)))
    assert shared < alone


def test_a_column_of_layouts_is_its_rows_one_by_one():
    tp, pp = np.array([1, 2, 4, 8.0]), np.array([4, 2, 1, 2.0])
    run, how = Settings(sequence=4096), behaviour_named("bridge")
    shape = known_model("Qwen3_30B_a3B")
    columns = dict(tp=tp, pp=pp, ep=np.array([4, 8, 8, 4.0]))
    together = predict(H100, shape, layouts(64, 1, 256, **columns), run, how)
    for row in range(4):
        alone = predict(
            H100, shape, layouts(64, 1, 256, **{key: column[row] for key, column in columns.items()}), run, how
        )
        assert alone.step_time_s.value[0] == pytest.approx(together.step_time_s.value[row])
        assert alone.peak_memory_gib.value[0] == pytest.approx(together.peak_memory_gib.value[row])


def test_experts_share_tokens_and_a_host_bound_step_names_the_host():
    shape = ModelShape("mixture", 1024, (Block(8, attention=Attention(8, 8, 128), experts=Experts(16, 2, 512)),), 1000)
    run = Settings(sequence=512)
    found = step_time(H100, shape, one(ep=8), run, behaviour_named("bridge"))
    assert found.parts.times["host"].value[0] > 0.5 * found.time.value[0]
    replayed = step_time(H100, shape, one(ep=8), run, behaviour_named("bridge", graphed=1.0))
    assert replayed.parts.times["host"].value[0] == 0
    assert found.parts.times["expert"].value[0] > 0


def test_ranges_of_parts_add_up_as_squares_and_within_a_part_end_by_end():
    part = Estimate(10.0, 9.0, 12.0)
    same = Parts({"matrix": part}) + Parts({"matrix": part})
    apart = Parts({"matrix": part}) + Parts({"memory": part})
    assert (same.ranged().low, same.ranged().high) == (18.0, 24.0)
    assert apart.ranged().high == pytest.approx(20 + np.hypot(2, 2))
    assert same.total() == apart.total() == 20


def test_selective_recomputation_costs_the_parts_it_names():
    how, layout = behaviour_named("bridge"), one()
    block = LLAMA_8B.blocks[0]

    def again(parts) -> float:
        found = block_time(H100, 4096, block, layout, Settings(sequence=8192, recompute=frozenset(parts)), how)
        return float(np.ravel(found.recomputed.total())[0]) if found.recomputed.times else 0.0

    assert again(()) == 0 < again(("core_attention",)) < again(("core_attention", "mlp"))


def test_layouts_that_do_not_divide_and_frameworks_not_known_are_refused():
    with pytest.raises(ValueError, match="does not divide the devices"):
        layouts(10, 1, 10, tp=4)
    with pytest.raises(UserError, match="framework 'megatronn' is not known"):
        behaviour_named("megatronn")
