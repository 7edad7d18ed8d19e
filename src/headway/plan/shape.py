"""The shape of a model: what its blocks hold and compute, and nothing of how it is laid out or run.

All counts are exact for the matrices; biases and norms are counted too where they matter to memory.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple


class Matrix(NamedTuple):
    """A weight matrix ``[depth, columns]``, and along what tensor-parallel ranks share it."""

    columns: int
    depth: int
    split: Literal["columns", "depth", "whole"]


@dataclass(frozen=True)
class Attention:
    """Self-attention of a block. With ``kv_rank`` it is multi-head latent attention (DeepSeek-V2)."""

    heads: int
    kv_heads: int
    head_size: int
    value_head_size: int | None = None
    """None: as ``head_size``."""
    q_rank: int = 0
    """Rank of the queries' low-rank projection; 0: one full matrix."""
    kv_rank: int = 0
    rope_head_size: int = 0
    """Part of ``head_size`` that carries positions, shared by the heads in latent attention."""
    causal: bool = True
    window: int | None = None
    """Keys that a query sees at most."""
    rotary: bool = True
    """Whether queries and keys are turned by their positions."""
    cross_tokens: int = 0
    """Text tokens that a cross-attention besides sees (as many heads of the same size)."""
    output_rank: int = 0
    """Rank of a low-rank output projection; 0: one full matrix."""

    @property
    def value_size(self) -> int:
        """Size of a head's values."""
        return self.head_size if self.value_head_size is None else self.value_head_size

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """The projections that a token passes."""
        queries, values = self.heads * self.head_size, self.heads * self.value_size
        found: list[Matrix] = []
        if self.kv_rank or self.q_rank:
            low_rank = self.kv_rank + self.rope_head_size if self.kv_rank else 2 * self.kv_heads * self.head_size
            if self.q_rank:
                found += [Matrix(self.q_rank, hidden, "whole"), Matrix(queries, self.q_rank, "columns")]
            else:
                found.append(Matrix(queries, hidden, "columns"))
            found.append(Matrix(low_rank, hidden, "whole"))
            if self.kv_rank:
                raised = self.heads * (self.head_size - self.rope_head_size) + values
                found.append(Matrix(raised, self.kv_rank, "columns"))
        else:
            found.append(Matrix(queries + self.kv_heads * (self.head_size + self.value_size), hidden, "columns"))
        if self.output_rank:  # in eight groups of heads
            found += [Matrix(self.output_rank, values // 8, "columns"), Matrix(hidden, self.output_rank, "depth")]
        else:
            found.append(Matrix(hidden, values, "depth"))
        if self.cross_tokens:
            found += [Matrix(queries, hidden, "columns"), Matrix(hidden, values, "depth")]
        return tuple(found)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, all alike."""

    count: int
    chosen: int
    """Experts that a token passes."""
    width: int
    """Of an expert's inner layer."""
    shared_width: int = 0
    """Inner width of the experts that every token passes, together."""
    most_nodes: int = 0
    """Nodes that a token's experts are on at most (DeepSeek-V3's grouped routing); 0: no limit."""
    latent: int = 0
    """Size that tokens are projected to before the experts; 0: they stay as they are."""


@dataclass(frozen=True)
class StateSpace:
    """A Mamba-2 mixer (Dao and Gu 2024)."""

    heads: int
    head_size: int
    state: int
    groups: int

    @property
    def inner(self) -> int:
        """Size of the inner channels."""
        return self.heads * self.head_size

    def columns(self) -> int:
        """Columns of the projection in: gate, channels, B and C of the groups, a step size a head."""
        return 2 * self.inner + 2 * self.groups * self.state + self.heads


@dataclass(frozen=True)
class Block:
    """``count`` alike layers. Parts that a layer does not have are None or 0."""

    count: float
    attention: Attention | None = None
    mlp_width: int = 0
    gated: bool = True
    """Whether the MLP (and the experts) have a gate besides: three matrices in place of two."""
    experts: Experts | None = None
    state_space: StateSpace | None = None
    modulation: int = 0
    """Parameters of the layer that turns a condition (time, text) into scales and shifts: used once a sample."""

    def mlp_matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """The products of the dense MLP and of the shared experts that a token passes."""
        found: list[Matrix] = []
        shared = self.experts.shared_width if self.experts else 0
        for width in (self.mlp_width, shared):
            if width:
                up = Matrix((2 if self.gated else 1) * width, hidden, "columns")
                found += [up, Matrix(hidden, width, "depth")]
        if self.experts and self.experts.latent:
            latent = self.experts.latent
            found += [Matrix(latent, hidden, "whole"), Matrix(hidden, latent, "whole")]
        return tuple(found)

    def mixer_matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """The products of attention and of the state space mixer that a token passes."""
        found = self.attention.matrices(hidden) if self.attention else ()
        if self.state_space:
            mixer = self.state_space
            found += (Matrix(mixer.columns(), hidden, "columns"), Matrix(hidden, mixer.inner, "depth"))
        return found

    def dense_parameters(self, hidden: int) -> float:
        """Parameters that every token passes, of one layer."""
        matrices = self.mixer_matrices(hidden) + self.mlp_matrices(hidden)
        found = sum(matrix.columns * matrix.depth for matrix in matrices)
        found += hidden * self.experts.count if self.experts else 0
        cross = self.attention.cross_tokens if self.attention else 0
        if self.attention and cross:  # keys and values of the text tokens
            found += hidden * self.attention.heads * (self.attention.head_size + self.attention.value_size)
        return found + self.modulation + (4 if self.attention else 2) * hidden

    def expert_parameters(self, hidden: int) -> float:
        """Parameters of all routed experts, of one layer."""
        if not self.experts:
            return 0
        size = self.experts.latent or hidden
        return self.experts.count * (3 if self.gated else 2) * size * self.experts.width

    def active_parameters(self, hidden: int) -> float:
        """Parameters of the matrices that a token passes, of one layer."""
        found = self.dense_parameters(hidden) - self.modulation
        if self.attention and self.attention.cross_tokens:  # their keys and values are of the text
            found -= hidden * self.attention.heads * (self.attention.head_size + self.attention.value_size)
        if self.experts:
            found += self.expert_parameters(hidden) * self.experts.chosen / self.experts.count
        return found


@dataclass(frozen=True)
class ModelShape:
    """A model: blocks between an embedding and a head."""

    name: str
    hidden: int
    blocks: tuple[Block, ...]
    vocabulary: int = 0
    """0: no token embedding and no logits (diffusion)."""
    tied: bool = False
    """Whether embedding and head are one matrix."""
    learned_positions: int = 0
    other_parameters: float = 0.0
    """Trained besides the blocks and the embeddings: patch and time embeddings, final layers."""
    frozen_bytes: float = 0.0
    """Held on each device besides the model: text encoders, VAE."""
    norm: Literal["rms", "layer"] = "rms"
    predicted_tokens: int = 0
    """Tokens after the next that can be predicted in training besides, each by a layer and a pass of the head."""
    heads: int = 1
    """Passes of the head for a token."""

    def is_first_kind(self, block: Block) -> bool:
        """Whether ``block`` is the few dense layers that stand before all layers with experts."""
        return block is self.blocks[0] and block.count <= 3 and not block.experts and len(self.blocks) > 1

    @property
    def layers(self) -> float:
        """Number of blocks."""
        return sum(block.count for block in self.blocks)

    def embedding_parameters(self) -> float:
        """Parameters of embedding, positions and head."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.learned_positions * self.hidden

    def parameters(self) -> float:
        """All trained parameters."""
        blocks = sum(
            block.count * (block.dense_parameters(self.hidden) + block.expert_parameters(self.hidden))
            for block in self.blocks
        )
        return blocks + self.embedding_parameters() + self.other_parameters

    def active_parameters(self) -> float:
        """Parameters that one token passes, head included and embedding not."""
        blocks = sum(block.count * block.active_parameters(self.hidden) for block in self.blocks)
        return blocks + self.heads * self.vocabulary * self.hidden

    def with_predicted_tokens(self) -> "ModelShape":
        """The model as trained on predicting several tokens: a layer of the last kind more for each."""
        *others, last = self.blocks
        more = replace(last, count=last.count + self.predicted_tokens)
        return replace(self, blocks=(*others, more), heads=1 + self.predicted_tokens)

    def model_flops_per_token(self, sequence: int, causal_half: bool = True) -> float:
        """FLOPs of forward and backward for a token, without recomputation: 6 a parameter, and attention.

        ``causal_half``: whether what a causal mask hides is left out (Dao 2023) or counted (PaLM, appendix B).
        """
        flops = 6 * self.active_parameters()
        for block in self.blocks:
            if block.attention:
                seen = float(sequence)
                if block.attention.causal and causal_half:
                    seen = seen / 2
                if block.attention.window:
                    seen = min(seen, block.attention.window)
                sizes = block.attention.heads * (block.attention.head_size + block.attention.value_size)
                flops += block.count * 6 * sizes * (seen + block.attention.cross_tokens)
        return flops

    def with_layers(self, layers: float) -> "ModelShape":
        """The same model with other ``layers``, kinds in their proportion (of dense first layers one at least)."""
        if layers == self.layers:
            return self
        share = layers / self.layers
        first = [
            replace(block, count=max(1, round(block.count * share)))
            for block in self.blocks[:1]
            if self.is_first_kind(block)
        ]
        fixed = sum(block.count for block in first)
        rest = [block for block in self.blocks if not self.is_first_kind(block)]
        scale = (layers - fixed) / sum(block.count for block in rest)
        return replace(self, blocks=(*first, *(replace(block, count=block.count * scale) for block in rest)))
