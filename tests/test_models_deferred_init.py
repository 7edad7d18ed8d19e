"""Replayed initial values are the library's own, and depend on nothing but seed and name."""

from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn

from headway.models.classes import instantiate
from headway.models.deferred_init import record_construction
from tiny_models import DIFFUSION, LANGUAGE, VISION_LANGUAGE

MODELS = DIFFUSION | LANGUAGE | VISION_LANGUAGE
ENCODERS = {
    f"{family}-{name}": encoder
    for family, recipe in DIFFUSION.items()
    for name, encoder in recipe.text_encoders.items()
}


def constructed(class_name: str, config: dict[str, Any]) -> nn.Module:
    """As a user of the library would build it, on the CPU."""
    if hasattr(diffusers, class_name):
        model = getattr(diffusers, class_name)(**config)
    else:
        model_class = getattr(transformers, class_name)
        model = model_class(model_class.config_class(**config))
    assert isinstance(model, nn.Module)
    return model


def recorded(class_name: str, config: dict[str, Any], seed: int = 0) -> Any:
    library = diffusers if hasattr(diffusers, class_name) else transformers
    return record_construction(lambda: instantiate(getattr(library, class_name), config), seed)


@pytest.mark.parametrize("name", [*MODELS, *ENCODERS])
def test_values_are_those_of_the_library(name: str) -> None:
    recipe = (MODELS | ENCODERS)[name]
    torch.manual_seed(0)
    reference = constructed(recipe.class_name, recipe.config)
    module, initial = recorded(recipe.class_name, recipe.config)
    expected = dict(reference.named_parameters(remove_duplicate=False)) | dict(reference.named_buffers())
    trained = dict(reference.named_parameters(remove_duplicate=False))
    assert set(initial.names()) == set(expected)
    for tensor_name, tensor in expected.items():
        value, tensor = initial.value(tensor_name), tensor.detach()
        assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
        if tensor_name not in trained or tensor.std(correction=0) == 0:
            assert torch.equal(value, tensor), tensor_name
        elif tensor.numel() >= 256:
            assert value.std() / tensor.std() == pytest.approx(1, abs=0.2), tensor_name
            assert abs(value.mean() - tensor.mean()) < 0.3 * tensor.std(), tensor_name
    stray = [key for child in module.modules() for key, value in vars(child).items() if isinstance(value, torch.Tensor)]
    assert stray == []


def test_values_depend_neither_on_order_nor_on_the_callers_randomness() -> None:
    recipe = DIFFUSION["sd3"]
    _, initial = recorded(recipe.class_name, recipe.config)
    forwards = {name: initial.value(name) for name in initial.names()}
    state = torch.random.get_rng_state()
    torch.manual_seed(99)
    _, again = recorded(recipe.class_name, recipe.config)
    before = torch.random.get_rng_state()
    assert all(torch.equal(again.value(name), forwards[name]) for name in reversed(initial.names()))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.random.set_rng_state(state)


def test_values_depend_on_the_seed_and_differ_between_tensors_and_scopes() -> None:
    def construct() -> nn.Module:
        return nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    _, one = record_construction(construct, 0)
    _, two = record_construction(construct, 1)
    _, other = record_construction(construct, 0, scope="text_encoder")
    assert not torch.equal(one.value("0.weight"), two.value("0.weight"))
    assert not torch.equal(one.value("0.weight"), one.value("1.weight"))
    assert not torch.equal(one.value("0.weight"), other.value("0.weight"))


def test_tied_tensors_have_one_value() -> None:
    recipe = LANGUAGE["llama"]
    _, initial = recorded(recipe.class_name, recipe.config)
    assert torch.equal(initial.value("lm_head.weight"), initial.value("model.embed_tokens.weight"))


def test_what_is_drawn_twice_is_replayed_once() -> None:
    def construct() -> nn.Module:
        module = nn.Embedding(4, 4)  # normal_
        with torch.no_grad():
            module.weight.uniform_(5, 6)
            module.weight[0].zero_()
            module.weight.mul_(2)
        return module

    _, initial = record_construction(construct, 0)
    value = initial.value("weight")
    assert torch.equal(value[0], torch.zeros(4))
    assert ((value[1:] >= 10) & (value[1:] <= 12)).all()
    replayed = [o.function for o in initial._operations_of(initial._tensors["weight"].storage)]
    assert torch.ops.aten.normal_.default not in replayed
    assert torch.ops.aten.uniform_.default in replayed


class _Odd(nn.Module):
    """Constructions that a naive recorder loses."""

    def __init__(self) -> None:
        super().__init__()
        self.literal = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.part = nn.Parameter(torch.zeros(4, 4))
        with torch.no_grad():
            self.part[1:3].fill_(2.0)
            self.part[:, 0].add_(torch.arange(4))
        self.replaced = nn.Parameter(torch.empty(3))
        self.replaced.data = torch.full((3,), 5.0).mul_(2)
        self.register_buffer("copied", torch.from_numpy(__import__("numpy").arange(3.0)).to(torch.float32))
        self.register_buffer("transposed", torch.arange(6).reshape(2, 3).t())


def test_literals_partial_writes_replaced_data_and_views_are_kept() -> None:
    expected = _Odd()
    _, initial = record_construction(_Odd, 0)
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        assert torch.equal(initial.value(name), tensor), name
