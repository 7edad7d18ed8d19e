"""One stage as the schedules of torch.distributed.pipelining drive it.

torch's own PipelineStage is made for micro-batches of one shape, which it learns by running the model, and for inputs
that are tensors. Here micro-batches are any objects, each of its own shape. What is received has memory of its own, for
as long as it is needed; its shape is known beforehand and checked where it is sent.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from headway.parallel.pipeline.recipe import Edge
from headway.parallel.pipeline.split import Predict, Stage
from headway.parallel.pipeline.stand_ins import Done, own_memory


class TensorShape(NamedTuple):
    """What is sent: shape on this rank, and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def on_this_rank(edges: Sequence[Edge], dtype: torch.dtype, sequence_shards: int) -> tuple[TensorShape, ...]:
    """What travels where tokens are split evenly over ``sequence_shards`` ranks, the rest of a division padded."""
    return tuple(
        TensorShape(
            tuple(
                -(-size // sequence_shards) if dimension == edge.tokens else size
                for dimension, size in enumerate(edge.shape)
            ),
            dtype,
        )
        for edge in edges
    )


class StageRunner(_PipelineStageBase):
    """Runs a stage's forward and backward of single micro-batches, and says what is to be sent and received.

    A micro-batch reaches ``forward_one_chunk`` as the keyword ``batch``.
    """

    def __init__(self, stage: Stage, predict: Predict, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(stage.module, stage.index, stage.count, device, group)
        self.predict = predict
        self._stage = stage
        self._shapes: list[tuple[TensorShape, ...]] = []
        self._received: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor]] = {}
        self.args_recv_info[0] = ()  # read by a check of torch's, which a stage without such records passes
        if not stage.is_last:
            _end_early(stage.module)

    def expect(self, shapes: list[tuple[TensorShape, ...]]) -> None:
        """What travels for each micro-batch of the coming step; the same between any two stages."""
        self._shapes = shapes

    def clear_runtime_states(self) -> None:
        """After a step: keep no micro-batch alive."""
        for kept in (self.fwd_cache, self.bwd_cache, self.backward_state, self._received, self._gradients):
            kept.clear()
        self.output_chunks.clear()

    # --- forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive a micro-batch's activations."""
        if self.is_first:
            return []
        self._received[fwd_chunk_id] = self._empty(fwd_chunk_id)
        return self._transfers(dist.irecv, self._received[fwd_chunk_id], self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a micro-batch's activations."""
        if self.is_last:
            return []
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        return self._transfers(dist.isend, [tensor.detach() for tensor in outputs], self.stage_index + 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take a micro-batch's activations from the stage before, which is on this rank too."""
        self._received[mb_index] = [tensor.detach() for tensor in prev_stage_outputs]

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """The model's output on the last stage, else the tensors that travel on."""
        assert kwargs is not None
        received = self._received.pop(fwd_chunk_id, [])
        for tensor in received:
            tensor.requires_grad_(self._stage.gradients_in and self.has_backward)
        self._stage.passage.begin(dict(zip(self._stage.travels, received, strict=not self.is_first)))
        try:
            output: Any = self.predict(self.submod, kwargs["batch"])
        except Done as done:
            output = tuple(own_memory(tensor) for tensor in done.tensors)
            self._check_shapes(fwd_chunk_id, output)
        finally:
            self._stage.passage.end()
        if self.is_last and save_forward_output:
            self.output_chunks.append(output)
        self.fwd_cache[fwd_chunk_id] = (() if self.is_last else output, received)
        return output

    def _check_shapes(self, number: int, outputs: tuple[Tensor, ...]) -> None:
        found = tuple(TensorShape(tuple(tensor.shape), tensor.dtype) for tensor in outputs)
        if found != self._shapes[number]:
            raise RuntimeError(
                f"stage {self.stage_index} of {type(self.submod).__name__} made {found} for the next stage, which "
                f"expects {self._shapes[number]} ({', '.join(self._stage.travels)})"
            )

    # --- backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what was sent."""
        if not self.has_backward or self.is_last or not self._stage.gradients_out:
            return []
        self._gradients[bwd_chunk_id] = self._empty(bwd_chunk_id)
        return self._transfers(dist.irecv, self._gradients[bwd_chunk_id], self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what was received."""
        gradients: Any = self.bwd_cache.pop(bwd_chunk_id, ())
        return self._transfers(dist.isend, gradients, self.stage_index - 1)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients of what was received, for the stage before, which is on this rank too."""
        return self.bwd_cache.pop(mb_index, ())

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take the gradients of what was sent from the next stage, which is on this rank too."""
        self._gradients[mb_index] = list(next_stage_bwd_outputs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Gradients of a micro-batch: all, or only those of what was received while those of weights wait."""
        if not self.has_backward:
            return
        outputs, received = self.fwd_cache.pop(bwd_chunk_id)
        work = self._backward_work(bwd_chunk_id, loss, outputs, received)
        if full_backward:
            self._full_backward(work)
        elif self._stage.gradients_in:
            _, groups = self.backward_maybe_with_nosync("input", work)
            self.backward_state[bwd_chunk_id] = ({"param_groups": groups, "stage_output": work["stage_output"]},)
        else:  # there is nothing that others wait for
            self.backward_state[bwd_chunk_id] = (work,)
        if self._stage.gradients_in:
            self.bwd_cache[bwd_chunk_id] = tuple(_gradient(tensor) for tensor in received)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The gradients that ``backward_one_chunk(full_backward=False)`` left."""
        if not self.has_backward:
            return
        (work,) = self.backward_state.pop(bwd_chunk_id)
        if "param_groups" in work:
            self.backward_maybe_with_nosync("weight", work)
        else:
            self._full_backward(work)

    def _full_backward(self, work: dict[str, Any]) -> None:
        if work["stage_output"]:
            self.backward_maybe_with_nosync("full", work | {"input_values": []})

    def _backward_work(self, number: int, loss: Any, outputs: Any, received: list[Tensor]) -> dict[str, Any]:
        """Roots of the backward, their gradients, and the leaves on the other side."""
        if self.is_last:
            return {"stage_output": [loss], "output_grads": [torch.ones_like(loss)], "input_values": received}
        gradients = self._gradients.pop(number, [])
        roots = [(o, g) for o, g in zip(outputs, gradients, strict=bool(gradients)) if o.requires_grad]
        return {
            "stage_output": [output for output, _ in roots],
            "output_grads": [gradient for _, gradient in roots],
            "input_values": received,
        }

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After a stage's last backward: FSDP2 reduces what has added up, over the ranks."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    # --- transfers

    def _empty(self, number: int) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._shapes[number]]

    def _transfers(self, kind: Any, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        return [
            dist.P2POp(kind, tensor, group=self.group, group_peer=self.stage_index_to_group_rank[stage])
            for tensor in tensors
        ]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """A first exchange with the neighbours, to set connections up; none with this rank itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *arguments: Any, **keywords: Any) -> Any:
        """Nothing to prepare: shapes are known, and memory is taken when it is needed."""

    def _prepare_backward_infra(self, *arguments: Any, **keywords: Any) -> Any:
        """Nothing to prepare."""

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        """Part of torch's preparations, which are not made."""
        return ()


def _end_early(module: nn.Module) -> None:
    """Let calls of ``module`` end with Done, raised only after its hooks have seen a proper end of its forward."""
    forward = module.forward

    def forward_until_done(*arguments: Any, **keywords: Any) -> tuple[Tensor, ...]:
        try:
            forward(*arguments, **keywords)
        except Done as done:
            return done.tensors
        raise RuntimeError(f"{type(module).__name__} did not reach the block at which its stage ends")

    def leave(module: nn.Module, arguments: Any, tensors: tuple[Tensor, ...]) -> None:
        raise Done(tensors)

    module.forward = forward_until_done
    module.register_forward_hook(leave)


def _gradient(tensor: Tensor) -> Tensor:
    """The gradient of a received tensor, contiguous; zeros where the stage does not depend on it."""
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(tensor) if gradient is None else gradient.contiguous()
