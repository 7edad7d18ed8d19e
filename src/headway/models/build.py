"""From the recipe's model section to a model on the meta device, ready to be sharded and then filled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from headway.errors import UserError
from headway.models.classes import find_class, nearest
from headway.models.component import Component, Placeholder, build_component
from headway.models.diffusion import DenoisingModel
from headway.models.families import family_of
from headway.models.frozen import FrozenParts
from headway.models.language import language_family, let_every_rank_see
from headway.models.latents import VAE_CLASSES, FoldedPixels, VaeLatents
from headway.models.lora import inject_lora
from headway.models.text import CaptionTokens
from headway.recipe import LatentRecipe, ModelRecipe, PrecisionRecipe, TextEncoderRecipe


@dataclass
class BuiltModel:
    """A trainable model whose tensors are still on the meta device."""

    module: nn.Module
    """DenoisingModel, or the transformers model itself."""
    family: str
    """flux, sd3, wan, pixart, sana, causal_lm or vision_language."""
    blocks: list[tuple[str, nn.Module]]
    """Repeated blocks in the order of the model: the unit of sharding, checkpointing and compilation."""
    frozen: FrozenParts | None
    """Of diffusion models; None for language models."""
    components: list[Component]

    def materialize(self, device: torch.device) -> None:
        """Give all tensors their values, on ``device``; after sharding, each rank gets only its own slices."""
        self.fill(device)
        if self.frozen is not None:
            self.frozen.materialize(device)

    def fill(self, device: torch.device) -> None:
        """Give the trained module's tensors alone their values."""
        for component in self.components:
            component.fill(device)
        # FSDP2 re-reads its parameters when a module is moved; without this its padding of uneven shards comes later,
        # behind the back of an optimizer that already holds them.
        self.module.to(device)

    def on_stage(self, module: nn.Module, blocks: list[tuple[str, nn.Module]]) -> "BuiltModel":
        """The same model with ``module`` in its place: a copy on meta that lacks some parts, to be filled alone."""
        paths = {id(child): path for path, child in self.module.named_modules()}
        components = [
            replace(component, module=module.get_submodule(paths[id(component.module)]))
            for component in self.components
        ]
        return replace(self, module=module, blocks=blocks, components=components)

    def bytes_read(self) -> int:
        """Bytes of trained tensors that this rank has read from safetensors."""
        return sum(c.folder.bytes_read for c in self.components if c.folder is not None)


def build_model(
    recipe: ModelRecipe,
    precision: PrecisionRecipe,
    *,
    seed: int,
    tokenizers: Mapping[str, PreTrainedTokenizerBase] | None = None,
    placeholder: Placeholder | None = None,
) -> BuiltModel:
    """Build on the meta device: parameters in ``precision.master``, frozen parts in ``precision.compute``.

    ``tokenizers`` holds those made from the captions, by text encoder, for encoders with ``tokenizer = "words"``. Equal
    seeds give equal initial values in every layout. With a ``placeholder`` folders need only have a config.json. Raises
    UserError for whatever in the recipe cannot be built.
    """
    if issubclass(find_class(recipe.class_name), PreTrainedModel):
        built = _build_language_model(recipe, precision, seed, placeholder)
    else:
        built = _build_diffusion_model(recipe, precision, seed, tokenizers or {}, placeholder)
    _refuse_dropout(built.components[0].module)
    _freeze(built.module, recipe.freeze)
    return built


def _build_language_model(
    recipe: ModelRecipe, precision: PrecisionRecipe, seed: int, placeholder: Placeholder | None
) -> BuiltModel:
    component = _trained_component(recipe, precision, seed, placeholder, attention="sdpa")
    family = language_family(component.module)
    if family == "vision_language":
        let_every_rank_see(component.module)
    return BuiltModel(component.module, family, repeated_blocks(component.module), None, [component])


def _build_diffusion_model(
    recipe: ModelRecipe,
    precision: PrecisionRecipe,
    seed: int,
    made: Mapping[str, PreTrainedTokenizerBase],
    placeholder: Placeholder | None,
) -> BuiltModel:
    family = family_of(recipe.class_name)
    family.check_encoders(list(recipe.text_encoders))
    tokenizers = {name: _tokenizer(name, encoder, made) for name, encoder in recipe.text_encoders.items()}
    padding = {name: tokenizer.pad_token_id for name, tokenizer in tokenizers.items()}
    transformer = _trained_component(recipe, precision, seed, placeholder)
    trained: dict[str, Component] = {}
    frozen: dict[str, Component] = {}
    for name, encoder in recipe.text_encoders.items():
        dtype = getattr(torch, precision.master if encoder.trainable else precision.compute)
        component = _text_encoder(name, encoder, tokenizers[name], dtype, seed, placeholder)
        (trained if encoder.trainable else frozen)[name] = component
    vae, latents = _latents(recipe.latents, getattr(torch, precision.compute), seed, placeholder)
    _check_channels(transformer.module, latents.grid.channels * family.patch**2)
    family.check_widths(transformer.module.config, {n: c.module.config for n, c in (trained | frozen).items()})
    lengths = {name: encoder.max_length for name, encoder in recipe.text_encoders.items()}
    captions = CaptionTokens(tokenizers, lengths, family.clean_caption)
    module = DenoisingModel(family, transformer.module, {n: c.module for n, c in trained.items()}, padding)
    blocks = repeated_blocks(module)
    parts = FrozenParts(family, captions, padding, frozen, vae, latents)
    return BuiltModel(module, family.name, blocks, parts, [transformer, *trained.values()])


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Members of module lists whose class the library names as repeated or not to be split, outermost only."""
    classes: set[str] = set()
    for child in module.modules():
        classes.update(getattr(child, "_repeated_blocks", None) or ())
        classes.update(getattr(child, "_no_split_modules", None) or ())
    lists = {name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)}
    blocks: list[tuple[str, nn.Module]] = []
    for name, child in module.named_modules():
        inside = bool(blocks) and name.startswith(f"{blocks[-1][0]}.")
        if type(child).__name__ in classes and name.rpartition(".")[0] in lists and not inside:
            blocks.append((name, child))
    return blocks


def _trained_component(
    recipe: ModelRecipe,
    precision: PrecisionRecipe,
    seed: int,
    placeholder: Placeholder | None,
    attention: str | None = None,
) -> Component:
    def prepare(module: nn.Module) -> None:
        if recipe.lora is not None:
            inject_lora(module, recipe.lora)

    return build_component(
        recipe.class_name,
        recipe.path,
        recipe.subfolder,
        recipe.config,
        dtype=getattr(torch, precision.master),
        seed=seed,
        scope="model",
        load_weights=recipe.load_weights,
        attention=attention,
        prepare=prepare,
        placeholder=placeholder,
    )


def _text_encoder(
    name: str,
    recipe: TextEncoderRecipe,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    seed: int,
    placeholder: Placeholder | None,
) -> Component:
    config = recipe.config if recipe.path is not None else _vocabulary(tokenizer, recipe) | recipe.config
    component = build_component(
        recipe.class_name,
        recipe.path,
        recipe.subfolder,
        config,
        dtype=dtype,
        seed=seed,
        scope=name,
        placeholder=placeholder,
    )
    vocabulary = component.module.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"model.text_encoders.{name}: vocab_size = {vocabulary} is less than the tokenizer's {len(tokenizer)}"
        )
    component.module.eval().requires_grad_(recipe.trainable)
    return component


def _vocabulary(tokenizer: PreTrainedTokenizerBase, recipe: TextEncoderRecipe) -> dict[str, Any]:
    """What a text encoder that starts at random must know of its tokenizer."""
    config_class = find_class(recipe.class_name).config_class  # type: ignore[attr-defined]
    facts = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": recipe.max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    known = {*config_class().to_dict(), *config_class.attribute_map}
    return {key: value for key, value in facts.items() if key in known and value is not None}


def _tokenizer(
    name: str, recipe: TextEncoderRecipe, made: Mapping[str, PreTrainedTokenizerBase]
) -> PreTrainedTokenizerBase:
    if name in made:
        return made[name]
    if recipe.tokenizer is None:
        assert recipe.path is not None
        subfolder = recipe.tokenizer_subfolder or recipe.subfolder.replace("text_encoder", "tokenizer")
        return load_tokenizer(recipe.path / subfolder)
    if recipe.tokenizer == "words":
        raise ValueError(f"no word tokenizer was given for {name}")
    return load_tokenizer(Path(recipe.tokenizer) / recipe.tokenizer_subfolder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """A transformers tokenizer from a local folder; UserError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} holds no tokenizer: {error}") from None


def _latents(
    recipe: LatentRecipe, dtype: torch.dtype, seed: int, placeholder: Placeholder | None
) -> tuple[Component | None, VaeLatents | FoldedPixels]:
    if recipe.vae_class is None:
        return None, FoldedPixels(recipe.pixel_unshuffle)
    if recipe.vae_class not in VAE_CLASSES:
        hint = nearest(recipe.vae_class, VAE_CLASSES)
        raise UserError(f"model.latents.vae_class = {recipe.vae_class!r} is none of {', '.join(VAE_CLASSES)}{hint}")
    vae = build_component(
        recipe.vae_class,
        recipe.path,
        recipe.subfolder,
        {},
        dtype=dtype,
        seed=seed,
        scope="vae",
        placeholder=placeholder,
    )
    vae.module.eval().requires_grad_(False)
    return vae, VaeLatents(vae.module)


def _check_channels(transformer: Any, channels: int) -> None:
    config = transformer.config
    made = config.get("out_channels") or config.in_channels
    if config.in_channels != channels or made not in (channels, 2 * channels):
        raise UserError(
            f"model.config in_channels = {config.in_channels} and out_channels = {made}, "
            f"but model.latents has {channels} channels a token"
        )


def _refuse_dropout(module: Any) -> None:
    """Dropout inside a model draws by rank and order, so it would make a run depend on its layout."""
    dropouts = [(n, child.p) for n, child in module.named_modules() if isinstance(child, nn.Dropout) and child.p > 0]
    config = module.config.get_text_config() if isinstance(module, PreTrainedModel) else module.config
    dropouts += [(f"config {key}", getattr(config, key)) for key in ("attention_dropout",) if getattr(config, key, 0.0)]
    if dropouts:
        where, p = dropouts[0]
        raise UserError(f"model: {where} drops out {p}: set the dropouts of model.config to 0, they are not repeatable")


def _freeze(module: nn.Module, prefixes: Iterable[str]) -> None:
    """Stop training of the parameters under each prefix; UserError when a prefix names none or nothing is left."""
    names = dict(module.named_modules())
    for prefix in prefixes:
        frozen = [p for name, p in module.named_parameters() if name == prefix or name.startswith(f"{prefix}.")]
        if not frozen:
            raise UserError(f"model.freeze = {prefix!r} is no module with parameters{nearest(prefix, names)}")
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError("model.freeze leaves nothing to train")
