"""What operators and collectives cost on a cluster: estimates in ns with their range, from few physical numbers."""

from headway.cost.attention import attention, attention_rate, unfused_attention, visible_share
from headway.cost.collective import Collective, arrival, collective
from headway.cost.estimate import Estimate
from headway.cost.host import launch, slowed_by_communication
from headway.cost.matrix import UNALIGNED, grouped_matrix_product, matrix_product, matrix_rate
from headway.cost.memory_bound import cross_entropy, host_copy, memory_bound
from headway.cost.quantise import CAST_BYTES, QuantisationRecipe, quantise

__all__ = [
    "CAST_BYTES",
    "UNALIGNED",
    "Collective",
    "Estimate",
    "QuantisationRecipe",
    "arrival",
    "attention",
    "attention_rate",
    "collective",
    "cross_entropy",
    "grouped_matrix_product",
    "host_copy",
    "launch",
    "matrix_product",
    "matrix_rate",
    "memory_bound",
    "quantise",
    "slowed_by_communication",
    "unfused_attention",
    "visible_share",
]
