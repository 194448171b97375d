"""What is executed: the numerics of attention, plain and blocked."""

from npumodel.attention.check import check_attention
from npumodel.attention.forward import blocked_attention
from npumodel.attention.reference import reference_attention

__all__ = ["blocked_attention", "check_attention", "reference_attention"]
