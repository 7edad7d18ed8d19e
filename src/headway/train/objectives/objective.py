"""What varies from one kind of training to another."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch import Tensor, nn

from headway.data import Batch

Prepared = TypeVar("Prepared")


class Objective(ABC, Generic[Prepared]):
    """Sums, never means: the Trainer divides by the global weight.

    A loss is made in three parts, for a pipeline's stages each run the model in between, but only the last one its end.
    """

    @abstractmethod
    def weight(self, batch: Batch) -> Tensor:
        """Σ of weights of a micro-batch: float32 scalar, known before the model runs."""

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """Tokens that the model sees for a micro-batch."""

    @abstractmethod
    def prepare(self, batch: Batch) -> Prepared:
        """What the model and the loss need of a micro-batch, without gradients: frozen encoders run here."""

    @abstractmethod
    def predict(self, model: nn.Module, prepared: Prepared) -> Tensor:
        """The model's output, samples along dimension 0."""

    @abstractmethod
    def loss_of(self, prediction: Tensor, prepared: Prepared) -> Tensor:
        """Σ of weighted losses of a micro-batch: float32 scalar."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Σ of weighted losses of a micro-batch by the whole model: float32 scalar."""
        prepared = self.prepare(batch)
        return self.loss_of(self.predict(model, prepared), prepared)
