"""The typed recipe: everything that decides what a run computes, section by section."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A section of the recipe: immutable, and closed against unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class LoraRecipe(Section):
    """Low-rank adapters (peft): only they are trained and checkpointed."""

    rank: PositiveInt = 16
    alpha: float = 16.0
    targets: list[str] = Field(default=["to_q", "to_k", "to_v", "to_out.0"], min_length=1)


class TextEncoderRecipe(Section):
    """One text encoder of a diffusion pipeline, named like the pipeline's component (text_encoder, text_encoder_2, …).

    With ``path`` it is read from there (``subfolder`` and ``tokenizer_subfolder`` as in a pipeline folder) and frozen
    unless ``trainable``. Without, it starts at random from ``config`` and is trained with the model.
    """

    class_name: str
    path: Path | None = None
    subfolder: str = ""
    config: dict[str, Any] = {}
    tokenizer: Literal["words"] | Path | None = None
    """``words``: one token a word of the training captions; a folder: a transformers tokenizer; None: ``path``'s."""
    tokenizer_subfolder: str = ""
    max_length: PositiveInt = 77
    trainable: bool = False

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.path is None and not self.config:
            raise ValueError("needs a path (pretrained) or a config (random start)")
        if self.path is None and not self.trainable:
            raise ValueError("starts at random and is not trainable: set trainable = true, or give a path")
        if self.path is None and self.tokenizer is None:
            raise ValueError('needs a tokenizer: a folder, or "words" for one made from the captions')
        return self


class LatentRecipe(Section):
    """What the diffusion model sees in place of pixels: a frozen VAE's latents, or pixels folded into channels."""

    vae_class: str | None = None
    path: Path | None = None
    subfolder: str = "vae"
    pixel_unshuffle: PositiveInt = 1
    """Without a VAE: side of the square of pixels folded into channels (1: pixels as they are)."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if (self.vae_class is None) != (self.path is None):
            raise ValueError("a VAE needs both vae_class and path")
        if self.path is not None and self.pixel_unshuffle != 1:
            raise ValueError("pixel_unshuffle stands in place of a VAE: leave one of them out")
        return self


class ModelRecipe(Section):
    """The trained model: a class of diffusers or transformers, from a folder of safetensors or from a config."""

    class_name: str
    path: Path | None = None
    """Local folder with config.json and *.safetensors (for a pipeline folder, with ``subfolder``)."""
    subfolder: str = ""
    config: dict[str, Any] = {}
    """The model's config; with ``path`` these keys override the folder's config.json."""
    load_weights: bool = True
    """False: take only the config from ``path`` and start at random."""
    tokenizer: Literal["bytes"] | Path | None = None
    """Language models: a transformers tokenizer folder (None: ``path``), or plain UTF-8 bytes."""
    processor: Path | None = None
    """Vision-language models: a transformers processor folder (None: ``path``)."""
    freeze: list[str] = []
    """Modules (by name prefix) that are not trained, e.g. ``model.visual``."""
    lora: LoraRecipe | None = None
    text_encoders: dict[str, TextEncoderRecipe] = {}
    latents: LatentRecipe = LatentRecipe()

    @model_validator(mode="after")
    def _has_a_source(self) -> Self:
        if self.path is None and not self.config:
            raise ValueError("needs a path (weights folder) or a config (random start)")
        return self


class FlowMatchingRecipe(Section):
    """Flow matching (Lipman et al. 2022; Esser et al. 2024): noisy = (1-σ)·data + σ·noise, target = noise - data."""

    kind: Literal["flow_matching"]
    timesteps: Literal["uniform", "logit_normal"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    shift: Annotated[float, Field(gt=0)] | Literal["resolution"] = 1.0
    """σ' = shift·σ / (1 + (shift-1)·σ); ``resolution``: from the number of image tokens, as FLUX.1 does."""
    weighting: Literal["none", "sigma_sqrt", "cosmap"] = "none"
    condition_dropout: Fraction = 0.1
    guidance: float = 1.0
    """Value fed to guidance-distilled models' guidance embedding during training."""


class NextTokenRecipe(Section):
    """Next-token cross-entropy over the tokens that count."""

    kind: Literal["next_token"]
    ignore_index: int = -100
    router_balance: Annotated[float, Field(ge=0)] | None = None
    """Mixtures of experts: coefficient of the balance loss, over the global batch; None: the model's own."""
    router_z: Annotated[float, Field(ge=0)] = 0.0
    """Mixtures of experts: coefficient of the squared size of the routers' logits (z loss)."""
    router_exact: bool = False
    """The balance loss uses the loads of this step, for one more forward pass; False: those of the step before."""
    expert_capacity: Annotated[float, Field(gt=0)] | None = None
    """Tokens that an expert takes of a sequence, over what equal loads would give it; None: all, nothing is dropped."""


class VisionLanguageRecipe(Section):
    """Next-token cross-entropy on the assistant's answers of conversations with images."""

    kind: Literal["vision_language"]
    ignore_index: int = -100


ObjectiveRecipe = Annotated[FlowMatchingRecipe | NextTokenRecipe | VisionLanguageRecipe, Field(discriminator="kind")]


class DataRecipe(Section):
    """Where samples come from. A sample's place is a global index, independent of ranks and workers."""

    kind: Literal[
        "openmoji", "image_folder", "video_folder", "webdataset", "parquet", "jsonl_text", "jsonl_conversations"
    ]
    path: Path | None = None
    """File, folder or glob; openmoji needs none."""
    validation_path: Path | None = None
    """A separate validation set; without it ``validation_fraction`` of the records is held out."""
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    include: list[str] = []
    """Regular expressions: keep only records whose caption matches one."""
    hold_out: list[str] = []
    """Captions that are kept out of training (and put into validation)."""
    resolution: PositiveInt | tuple[PositiveInt, PositiveInt] = 256
    """Pixels: side of a square, or (height, width). Pictures are resized to cover it and cropped at the centre."""
    frames: PositiveInt = 1
    frame_stride: PositiveInt = 1
    sequence_length: PositiveInt = 2048
    """Tokens of a language sample; conversations longer than this are cut."""
    packing: bool = True
    """Text: documents end to end in one sequence, attention and positions within each; False: one document a sample."""
    image_column: str = "image"
    caption_column: str = "caption"
    text_column: str = "text"
    shuffle: bool = True
    workers: Annotated[int, Field(ge=0)] = 0
    prefetch: PositiveInt = 2
    """Steps kept ready by each worker."""
    max_bad_records: Annotated[int, Field(ge=0)] = 0
    """Corrupt records are named and given no weight; more than this many end the run."""
    cache: Path | None = None
    """Where indexes and tokens are kept (None: in the run directory)."""

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.kind != "openmoji" and self.path is None:
            raise ValueError(f"kind {self.kind!r} needs a path")
        return self


class OptimRecipe(Section):
    """Optimizer and learning-rate schedule. Norms, biases and other vectors get no weight decay."""

    kind: Literal["adamw", "muon", "adamw_8bit"] = "adamw"
    """muon: torch's Muon for the blocks' matrices, AdamW for the rest."""
    lr: Annotated[float, Field(gt=0)] = 1e-4
    muon_lr: Annotated[float, Field(gt=0)] = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """Each after a linear warm-up; wsd: warm-up, stable, linear decay over the last ``decay_steps``."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Fraction = 0.0
    max_skipped_in_a_row: PositiveInt = 5
    """Steps with a non-finite loss or gradient are skipped; this many in a row end the run."""


class PrecisionRecipe(Section):
    """Dtypes of the weights and optimizer, of forward and backward, and of gradient reduction."""

    master: Literal["float32", "bfloat16"] = "float32"
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    reduce: Literal["float32", "bfloat16"] = "float32"
    stochastic_rounding: bool = False
    """With bfloat16 masters: AdamW rounds its updates up or down at random, so that small ones are not lost."""
    matmul: Literal["compute", "float8_tensorwise", "float8_rowwise", "mxfp8"] = "compute"
    """Products of the blocks' linear layers: in the dtype of ``compute``; or of float8 numbers, which share a scale
    with all of their tensor, with their row, or with 32 neighbours of theirs."""
    keep_high: list[str] = ["first_block", "last_block", "*norm*", "*_mod.*", "*modulation*", "*router*", "*lora_*"]
    """Layers whose products stay in ``compute``: first_block, last_block, and patterns of names, in a block or in the
    model. Embeddings, head and whatever else is outside of the blocks always stay."""
    float8_all_gather: bool = False
    """With float8_tensorwise: weights are quantised before ranks gather them, which halves what travels."""

    @property
    def products(self) -> str:
        """Precision of the blocks' matrix products, by whose dense peak MFU is measured."""
        return self.compute if self.matmul == "compute" else "float8"

    @model_validator(mode="after")
    def _rounds_bfloat16(self) -> Self:
        if self.stochastic_rounding and self.master != "bfloat16":
            raise ValueError(
                'stochastic_rounding is for master = "bfloat16": float32 weights lose no update; '
                'set master = "bfloat16", or leave it out'
            )
        return self

    @model_validator(mode="after")
    def _gathers_float8(self) -> Self:
        if self.float8_all_gather and self.matmul != "float8_tensorwise":
            raise ValueError(
                'float8_all_gather needs matmul = "float8_tensorwise": a scale of all of a weight is the only one that '
                "its shards share"
            )
        return self


class LayoutRecipe(Section):
    """How many ranks share what: ranks = pp x dp_replicate x dp_shard x cp x tp.

    DDP is (dp_replicate, dp_shard) = (n, 1), FSDP2 (1, n), HSDP (r, s). Neighbouring ranks are in one tensor-parallel
    group, then in one context-parallel group; pipeline stages are farthest apart.
    """

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt | Literal["auto"] = "auto"
    """auto: all ranks that the other sizes leave."""
    tp: PositiveInt = 1
    """Ranks that share each block's matrix products (tensor parallelism)."""
    sequence_parallel: bool = True
    """With tp: activations between a language model's products are split over the sequence."""
    async_tensor_parallel: bool = False
    """With tp, sequence_parallel and run.compile on CUDA: products run beside the gathers and scatters around them."""
    cp: PositiveInt = 1
    """Ranks that share each sequence, image or video (context parallelism)."""
    cp_kind: Literal["ulysses", "ring", "both"] = "ulysses"
    """ulysses: all-to-all over attention heads; ring: keys and values go round; both: rings of all-to-all groups."""
    cp_ulysses: PositiveInt | None = None
    """With cp_kind = "both": ranks of an all-to-all group, a divisor of cp."""
    pp: PositiveInt = 1
    """Ranks that share the blocks (pipeline parallelism)."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"] = "1f1b"
    pp_stages_per_rank: PositiveInt | Literal["auto"] = "auto"
    """auto: one for gpipe and 1f1b, two for the others."""
    pp_cuts: list[PositiveInt] | None = None
    """Blocks of each stage in the order of the model; None: balanced."""
    ep: PositiveInt = 1
    """Ranks that share the experts of each layer (expert parallelism), out of dp_shard x cp x tp."""
    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether gathered blocks are freed between forward and backward; auto: yes, unless the schedule forbids it."""
    blocks_kept_gathered: Annotated[int, Field(ge=0)] = 1
    """Where blocks are freed: so many of a stage's last ones are not, for the backward pass begins with them."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Blocks whose parameters are gathered ahead of the one at work, in forward and backward."""

    @model_validator(mode="after")
    def _context_parallel_kind_fits(self) -> Self:
        if (self.cp_kind == "both") != (self.cp_ulysses is not None):
            raise ValueError('cp_ulysses is for cp_kind = "both", which needs it')
        if self.cp_ulysses is not None and self.cp % self.cp_ulysses:
            raise ValueError(f"cp_ulysses = {self.cp_ulysses} does not divide cp = {self.cp}")
        return self


class MemoryRecipe(Section):
    """What is kept for the backward pass."""

    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """full: recompute each block; selective: keep matrix products and attention, recompute the rest."""
    offload_activations: bool = False
    """With full checkpointing: what blocks keep, their inputs, waits in host memory for the backward pass."""

    @model_validator(mode="after")
    def _offloads_inputs_only(self) -> Self:
        if self.offload_activations and self.activation_checkpointing != "full":
            raise ValueError('offload_activations needs activation_checkpointing = "full"')
        return self


class KernelsRecipe(Section):
    """Fused operators of our own in place of the libraries' code."""

    fuse: bool | Literal["auto"] = "auto"
    """Put them into every model of diffusers and transformers whose code is known; auto: on CUDA."""


class RunRecipe(Section):
    """Length, batch, seed and place of the run."""

    steps: PositiveInt
    global_batch: PositiveInt
    micro_batch: PositiveInt
    """Samples of one forward pass on one rank."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    directory: Path = Path("runs/run")
    compile: bool = False
    """torch.compile each repeated block."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: PositiveInt = 600
    """A collective that waits longer than this ends the run."""


class EmaRecipe(Section):
    """Exponential moving averages of the weights, on each rank's shard, in float32."""

    decays: list[Annotated[float, Field(gt=0, lt=1)]] = []
    every: PositiveInt = 1
    warmup: bool = True
    """Decay of step t is min(decay, (1+t)/(10+t)), so that early averages forget the random start."""


class CheckpointRecipe(Section):
    """Distributed checkpoints, written beside the run and renamed when they are whole."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: PositiveInt = 2
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints at multiples of this many steps are never deleted."""
    asynchronous: bool = True
    resume: bool = True
    """Go on from the newest good checkpoint of the run directory."""


class SampleRecipe(Section):
    """Pictures or videos drawn from the model during and after training."""

    every: Annotated[int, Field(ge=0)] = 0
    """0: only at the end (when there are prompts)."""
    prompts: list[str] = []
    steps: PositiveInt = 28
    guidance: float = 2.5
    seed: Annotated[int, Field(ge=0)] = 0
    per_prompt: PositiveInt = 1
    weights: Literal["auto", "live", "ema"] = "auto"
    """auto: the slowest EMA if there is one."""


class MetricsRecipe(Section):
    """What is written down, how often, and where to."""

    every: PositiveInt = 1
    validation_every: Annotated[int, Field(ge=0)] = 0
    """0: only before the first and after the last step, when there is validation data."""
    validation_batches: PositiveInt = 8
    """Global batches of a validation; fewer when the set is smaller."""
    writers: list[Literal["tensorboard", "wandb", "mlflow"]] = ["tensorboard"]
    project: str = "headway"


class Recipe(Section):
    """A whole run."""

    model: ModelRecipe
    objective: ObjectiveRecipe
    data: DataRecipe
    run: RunRecipe
    optim: OptimRecipe = OptimRecipe()
    precision: PrecisionRecipe = PrecisionRecipe()
    layout: LayoutRecipe = LayoutRecipe()
    memory: MemoryRecipe = MemoryRecipe()
    kernels: KernelsRecipe = KernelsRecipe()
    ema: EmaRecipe = EmaRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    sample: SampleRecipe = SampleRecipe()
    metrics: MetricsRecipe = MetricsRecipe()

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        if self.run.global_batch % self.run.micro_batch:
            raise ValueError(
                f"run.global_batch = {self.run.global_batch} is not a multiple of "
                f"run.micro_batch = {self.run.micro_batch}"
            )
        return self

    @model_validator(mode="after")
    def _data_fits_objective(self) -> Self:
        fitting = {
            "flow_matching": {"openmoji", "image_folder", "video_folder", "webdataset", "parquet"},
            "next_token": {"jsonl_text", "parquet"},
            "vision_language": {"jsonl_conversations"},
        }[self.objective.kind]
        if self.data.kind not in fitting:
            raise ValueError(
                f"data.kind = {self.data.kind!r} does not hold what objective {self.objective.kind!r} needs: "
                f"use one of {', '.join(sorted(fitting))}"
            )
        return self

    @model_validator(mode="after")
    def _products_can_overlap(self) -> Self:
        if not self.layout.async_tensor_parallel:
            return self
        lacking = {
            "layout.tp > 1": self.layout.tp == 1,
            "layout.sequence_parallel = true": not self.layout.sequence_parallel,
            "run.compile = true": not self.run.compile,
            "a language model (denoisers have no sequence parallelism)": self.objective.kind == "flow_matching",
        }
        missing = ", ".join(name for name, lacks in lacking.items() if lacks)
        if missing:
            raise ValueError(f"layout.async_tensor_parallel needs {missing}")
        return self

    @model_validator(mode="after")
    def _optimizer_rounds(self) -> Self:
        if self.precision.stochastic_rounding and self.optim.kind != "adamw":
            raise ValueError(f'precision.stochastic_rounding needs optim.kind = "adamw", not {self.optim.kind!r}')
        return self

    @model_validator(mode="after")
    def _averages_are_kept(self) -> Self:
        if self.sample.weights == "ema" and not self.ema.decays:
            raise ValueError('sample.weights = "ema" needs ema.decays')
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.optim.warmup_steps + self.optim.decay_steps > self.run.steps:
            raise ValueError(
                f"optim.warmup_steps + optim.decay_steps = {self.optim.warmup_steps + self.optim.decay_steps} "
                f"exceed run.steps = {self.run.steps}"
            )
        if self.optim.schedule == "wsd" and self.optim.decay_steps == 0:
            raise ValueError('optim.schedule = "wsd" needs optim.decay_steps')
        return self
