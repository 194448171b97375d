"""What is executed: the numerics of attention, plain and blocked."""

from npumodel.attention.arguments import Arguments
from npumodel.attention.attend import blocked, blocked_attention
from npumodel.attention.merge import merge
from npumodel.attention.reference import reference_attention

__all__ = ["Arguments", "blocked", "blocked_attention", "merge", "reference_attention"]
