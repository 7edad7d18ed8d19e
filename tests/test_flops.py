"""FLOPs counted from the real program: equal to closed formulas, on meta as in a real run."""

from functools import partial

import pytest
import torch
from diffusers import FluxTransformer2DModel, SanaTransformer2DModel, WanTransformer3DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headway.train import flops
from headway.train.flops import Flops, MicroBatchFlops, add, count_flops, on_meta, utilisation
from tiny_models import DIFFUSION

DENSE = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
}
B, L = 2, 32


def tokens() -> dict[str, Tensor]:
    position_ids = torch.arange(L).remainder(L // 2).expand(B, L)
    return {"input_ids": torch.arange(B * L).view(B, L) % 96, "position_ids": position_ids}


def count_language(model: nn.Module, inputs: dict[str, Tensor]) -> Flops:
    return count_flops(lambda: model(**inputs, use_cache=False).logits.float().sum(), model)


def llama(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**DENSE))


def test_a_language_model_costs_six_operations_a_weight_and_token_and_attention_over_the_whole_matrix():
    model = llama()
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)
    attention = 3 * 4 * B * L * L * 64
    flops = count_language(model, on_meta(tokens()))
    assert flops == Flops(2 * weights * B * L + attention, 2 * (2 * weights * B * L + attention), 0)
    assert flops.model == 6 * weights * B * L + 3 * attention


def test_a_real_run_with_fused_attention_counts_the_same_as_meta():
    assert count_language(llama("cpu"), tokens()) == count_language(llama(), on_meta(tokens()))


def test_flux_joint_attention_and_embeddings_match_the_closed_formula():
    torch.manual_seed(0)
    config = DIFFUSION["flux"].config
    with torch.device("meta"):
        model = FluxTransformer2DModel(**config)
    image, text, width, channels = 16, 8, 32, 48
    inputs = on_meta(
        {
            "hidden_states": torch.randn(B, image, channels),
            "encoder_hidden_states": torch.randn(B, text, 32),
            "pooled_projections": torch.randn(B, 32),
            "timestep": torch.rand(B),
            "img_ids": torch.zeros(image, 3),
            "txt_ids": torch.zeros(text, 3),
            "guidance": torch.ones(B),
        }
    )
    flops = count_flops(lambda: model(**inputs).sample.float().sum(), model)
    whole = image + text
    first = 2 * B * (image * channels * width + text * 32 * width + (256 + 256 + 32) * width)
    conditioning = 2 * B * (3 * width * width + 2 * 2 * 6 * width**2 + 2 * 3 * width**2 + 2 * width**2)
    double = 2 * B * whole * (4 + 8) * width**2 + 4 * B * whole**2 * width
    single = 2 * B * whole * (3 + 4 + 5) * width**2 + 4 * B * whole**2 * width
    last = 2 * B * image * width * channels
    forward = first + conditioning + 2 * double + 2 * single + last
    assert flops.forward == forward
    # No gradient flows into the data: the layers that read it have only a weight gradient.
    assert flops.backward == 2 * forward - first


def test_wan_video_attention_spans_all_frames():
    width, ffn, text_width, frequencies, channels = 32, 64, 32, 16, 12
    with torch.device("meta"):
        model = WanTransformer3DModel(**DIFFUSION["wan"].config)
    frames, side, text = 3, 8, 6
    inputs = on_meta(
        {
            "hidden_states": torch.randn(B, channels, frames, side, side),
            "encoder_hidden_states": torch.randn(B, text, text_width),
            "timestep": torch.rand(B),
        }
    )
    flops = count_flops(lambda: model(**inputs).sample.float().sum(), model)
    seen = frames * (side // 2) ** 2
    patches = 2 * B * seen * channels * 4 * width
    first = patches + 2 * B * (text * text_width + frequencies) * width
    conditioning = 2 * B * (width * width + 6 * width**2 + text * width**2)
    self_attention = 2 * B * seen * 4 * width**2 + 4 * B * seen**2 * width
    cross_attention = 2 * B * (seen * 2 + text * 2) * width**2 + 4 * B * seen * text * width
    block = self_attention + cross_attention + 2 * B * seen * 2 * width * ffn
    forward = first + conditioning + 2 * block + 2 * B * seen * width * channels * 4
    assert flops.forward == forward
    assert flops.backward == 2 * forward - first


def test_depthwise_convolutions_cost_in_the_backward_pass_what_they_cost_in_the_forward_pass():
    """torch's own formula ignores groups in the weight's gradient: 14 forward passes for this Sana."""
    config = DIFFUSION["sana"].config
    with torch.device("meta"):
        model = SanaTransformer2DModel(**config)
    inputs = on_meta(
        {
            "hidden_states": torch.randn(B, 12, 8, 8),
            "encoder_hidden_states": torch.randn(B, 8, 32),
            "timestep": torch.rand(B),
        }
    )
    flops = count_flops(lambda: model(**inputs).sample.float().sum(), model)
    assert 1.9 * flops.forward < flops.backward <= 2 * flops.forward


def test_frozen_weights_cost_no_weight_gradient():
    """LoRA: forward 1, input gradients 1, weight gradients of the adapters alone: two thirds of full training."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**DENSE | {"num_hidden_layers": 8, "hidden_size": 512}))
    whole = count_language(model, on_meta(tokens()))
    inject_adapter_in_model(LoraConfig(r=1, target_modules=["q_proj"]), model, low_cpu_mem_usage=True)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    adapted = count_language(model, on_meta(tokens()))
    assert whole.backward == 2 * whole.forward
    assert adapted.model / whole.model == pytest.approx(2 / 3, rel=0.03)


def test_a_wholly_frozen_model_has_no_backward_pass():
    model = llama().requires_grad_(False)
    assert count_language(model, on_meta(tokens())).backward == 0


def test_recomputation_is_counted_apart_and_only_for_hfu():
    plain = count_language(llama(), on_meta(tokens()))
    model = llama()
    for layer in model.model.layers:
        run = layer.forward
        layer.forward = lambda *args, run=run, **kwargs: checkpoint(run, *args, use_reentrant=False, **kwargs)
    again = count_language(model, on_meta(tokens()))
    head = 2 * B * L * 64 * 96
    assert (again.forward, again.backward) == (plain.forward, plain.backward)
    assert again.model == plain.model
    # The last product of each layer (down_proj) is not needed again: checkpointing stops early.
    assert again.recomputed == plain.forward - head - 3 * 2 * B * L * 64 * 112
    assert again.executed == again.model + again.recomputed


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_experts_cost_what_the_tokens_sent_to_them_cost(experts):
    config = Qwen3MoeConfig(**DENSE, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=32)
    config._experts_implementation = experts
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    flops = count_language(model, on_meta(tokens()))
    attention = 2 * B * L * (64 * 64 * 2 + 2 * 64 * 32) + 4 * B * L * L * 64
    experts_cost = 2 * B * L * (64 * 5 + 2 * 3 * 64 * 32)
    assert flops.forward == 3 * (attention + experts_cost) + 2 * B * L * 64 * 96
    assert flops.backward == 2 * flops.forward


def vision_language(device: str) -> nn.Module:
    image_tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    text = {k: v for k, v in DENSE.items() if k != "head_dim"}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    with torch.device(device):
        return Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text | rotary, vision_config=vision, **image_tokens)
        )


def conversation(grids: list[list[int]]) -> dict[str, Tensor]:
    image_grid_thw = torch.tensor(grids)
    patches = int(image_grid_thw.prod(1).sum())
    input_ids = torch.ones(1, L, dtype=torch.int64)
    start = 0
    for tokens_of_picture in image_grid_thw.prod(1).div(4).long().tolist():
        input_ids[0, start : start + tokens_of_picture] = 90
        start += tokens_of_picture + 1
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones(1, L, dtype=torch.int64),
        "mm_token_type_ids": (input_ids == 90).long(),
        "pixel_values": torch.randn(patches, 3 * 2 * 4 * 4),
        "image_grid_thw": image_grid_thw,
    }


def test_a_vision_tower_that_reads_sizes_from_values_counts_on_meta_as_it_runs():
    torch.manual_seed(0)
    inputs = conversation([[1, 4, 8], [1, 4, 4]])
    counted = count_language(vision_language("meta"), on_meta(inputs))
    assert counted == count_language(vision_language("cpu"), inputs)
    assert counted.backward > counted.forward > 0


class BlankPicture(nn.Module):
    """What a rank without pictures shows to the vision tower: one whose size it writes down itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, like: Tensor) -> Tensor:
        grid = torch.tensor([[1, 4, 4]], device=like.device)
        pixels = torch.zeros(16, 96, device=like.device)
        return self.model.model.get_image_features(pixels, grid, return_dict=True).pooler_output[0].sum()


def test_sizes_that_a_model_writes_down_itself_keep_their_values():
    counts = []
    for device in ("meta", "cpu"):
        model, like = BlankPicture(vision_language(device)), torch.ones(1, device=device)
        counts.append(count_flops(partial(model, like), model))
    assert counts[0] == counts[1]
    assert counts[0].forward > 0


def test_micro_batches_are_counted_once_a_shape_and_pictures_by_their_sizes():
    torch.manual_seed(0)
    model = vision_language("meta")
    runs = []

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        runs.append(tensors)
        return model(**tensors, use_cache=False).logits.sum()

    counter = MicroBatchFlops(model, loss)
    one, same, other = conversation([[1, 8, 8]]), conversation([[1, 8, 8]]), conversation([[1, 8, 4], [1, 4, 8]])
    assert counter(one) == counter(same)
    assert len(runs) == 1
    assert counter(other).model < counter(one).model, "attention stays within each picture"
    assert len(runs) == 2


def test_counting_leaves_gradients_and_values_alone():
    model = llama("cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    count_language(model, tokens())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "lm_head.weight")


def test_utilisation_needs_a_known_peak():
    flops = add([Flops(10**12, 2 * 10**12, 10**12), Flops(10**12, 2 * 10**12, 10**12)])
    assert flops == Flops(2 * 10**12, 4 * 10**12, 2 * 10**12)
    assert utilisation(flops, step_time_s=2.0, peak_tflops=None) == (3.0, None, None)
    assert utilisation(flops, step_time_s=2.0, peak_tflops=10.0) == (3.0, pytest.approx(0.3), pytest.approx(0.4))


def test_only_so_many_sets_of_shapes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "SHAPES_COUNTED", 2)
    layer = nn.Linear(4, 4, device="meta")
    count = MicroBatchFlops(layer, lambda tensors: layer(tensors["x"]).sum())
    found = [count({"x": torch.zeros(rows, 4)}) for rows in (1, 2, 3, 2)]
    assert found[2] is None
    assert found[1] == found[3]
    assert found[1] is not None
    assert found[0] is not None
    assert found[1].forward == 2 * found[0].forward
