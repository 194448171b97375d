"""What a call may look like: every argument, what it means, and what the odd cases give."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from npumodel.attention.checks import check_arguments
from npumodel.attention.layouts import Sizes, sizes
from npumodel.workload import AttentionShape

#: Arguments that may be lists of ints.
_INTS = ("causal_offset", "q_lengths", "kv_lengths", "cu_q_lengths", "cu_kv_lengths", "q_segment_ids", "kv_segment_ids")

#: A distance beyond int32 is as good as the largest.
_FARTHEST = 2**31 - 1


def _static(default: Any) -> Any:
    return dataclasses.field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one attention call, as a PyTree; `check` tells whether they fit together.

    In the order in which they act on a score, with B batch, N query heads, Nkv kv heads, D and Dv head sizes:

        s = scale * q k^T;  s = softcap * tanh(s / softcap);  s += bias (and an additive attn_mask);  masks set -inf

    q, k, v        JAX or NumPy arrays of one dtype: float32, float16, bfloat16, and float64 under jax_enable_x64. Nkv
                   divides N; k and v are not copied for the query heads that share them.
    layout         BNSD [B, N, S, D], BSND [B, S, N, D], BSH [B, S, N * D], SBH [S, B, N * D], or TND [T, N, D], where
                   sequences of any lengths follow each other. q, k, v and the output have the same layout.
    q_heads, kv_heads   number of heads, for BSH and SBH alone (kv_heads: q_heads by default): the arrays of the other
                   layouts show them, and there these are refused
    scale          real number, traced or not; 1 / sqrt(D) by default
    softcap        None or a positive finite number, traced or not; no gradient, and none by dropout_rate
    bias           floats, [1/B, 1/N, 1/Sq, 1/Skv] or [Sq, Skv] (B = 1 in TND); differentiable
    attn_mask      bool (True takes part), or floats: a second bias. Shapes as bias
    is_causal      query i sees keys j <= p_i, where p_i = i + kv length - q length (bottom-right aligned; with lengths
                   or in TND, those of its own sequence)
    causal_offset  int, traced or not, or one per sequence: p_i = i + causal_offset instead; 0 is top-left aligned, and
                   what is beyond +-2^29 is cut to that. Only with is_causal or window, which it moves
    window         a tuple (left, right): query i sees keys p_i - left <= j <= p_i + right, p_i not counted. None
                   or a negative number: no limit on that side. Ints, traced or not.
    q_lengths, kv_lengths   ints [B]: queries and keys from there on are padding. Traced ones are cut to 0 .. S
    cu_q_lengths, cu_kv_lengths   ints [sequences + 1], for TND: sequence b has tokens cu[b] .. cu[b + 1] - 1. cu[0] is
                   0, and what follows the last is padding. cu_kv_lengths: cu_q_lengths by default
    q_segment_ids, kv_segment_ids   ints [B, Sq] and [B, Skv]: only equal ids see each other, and a negative id is
                   padding. kv_segment_ids: q_segment_ids by default
    sinks          floats [N]: a logit per head that takes part in the softmax, without a value; differentiable
    dropout_rate   0 <= rate < 1, traced or not: weights are dropped with this probability, the rest divided by
                   1 - rate. What is dropped depends on dropout_key and on the position (b, n, i, j) alone: not on the
                   tile, and not on the pass. Positions are those in the arrays: in TND i and j count the packed tokens
                   (b is 0), so a sequence packed elsewhere drops other weights. Under vmap and shard_map, give each
                   example or shard a key of its own.
    dropout_key    a key of jax.random, typed or raw, of any generator: only its words are used
    p_dtype        dtype to which the softmax weights are rounded before they meet v: that of v by default, as the
                   matrix units have it; "float32" keeps them. Sums are always in float32 (float64 for float64).
    return_lse     also return log sum exp of the scores (with the sink): the output's shape without its last axis
                   ([B, S, N] for BSH, [S, B, N] for SBH), in float32 (float64 for float64)

    Odd cases. A query that sees no key gives exactly 0, LSE -inf (with a sink: the sink; padding: -inf), and gradients
    0; so does an empty k. An additive -inf masks the key, but a finite value never does: a row of finfo.min on every
    key is a plain softmax over equal scores, the mean of v. NaN and Inf in q, k, v reach only the queries, keys and
    gradients that see each other; a value of Inf gives Inf there, or NaN where its weight is 0.

    Large scores. Any that are finite have a softmax whose weights add up to 1, in both passes; but which of two keys is
    ahead is known only to their rounding. The gradients by q and k, and by bias and sinks, of a query that sees almost
    one key alone are differences between dO . v and dO . o, which are almost equal there: they carry the rounding of
    the output's dtype in dO . o, as in every flash attention, and no digits of their own.
    """

    q: Any
    k: Any
    v: Any
    attn_mask: Any = None
    bias: Any = None
    is_causal: bool = _static(False)
    causal_offset: Any = None
    window: Any = None
    scale: Any = None
    softcap: Any = None
    sinks: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    cu_q_lengths: Any = None
    cu_kv_lengths: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    dropout_rate: Any = 0.0
    dropout_key: Any = None
    p_dtype: Any = _static(None)
    layout: str = _static("BNSD")
    q_heads: int | None = _static(None)
    kv_heads: int | None = _static(None)
    return_lse: bool = _static(False)

    @property
    def sizes(self) -> Sizes:
        """Of q, k, v that fit together."""
        return sizes(self.layout, self.q, self.k, self.v, self.q_heads, self.kv_heads)

    @property
    def drops(self) -> bool:
        """Whether there is dropout: a rate of 0 known now is none."""
        rate = self.dropout_rate
        return rate is not None and (isinstance(rate, Tracer) or bool(rate))

    @property
    def skips(self) -> bool:
        """Whether there may be keys that no query of a block sees, known from positions."""
        limits = (self.window, self.q_lengths, self.kv_lengths, self.cu_q_lengths, self.q_segment_ids)
        return bool(self.is_causal) or any(x is not None for x in limits)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """The arguments in use that `AttentionShape` has no word for."""
        used = [f"layout {self.layout}"] if self.layout == "TND" else []
        used += ["window"] * (self.window is not None and self._plain_window is None)
        names = ("causal_offset", "sinks", "q_lengths", "kv_lengths", "q_segment_ids")
        used += [name for name in names if getattr(self, name) is not None]
        return (*used, *["dropout"] * self.drops)

    @property
    def _plain_window(self) -> tuple[int | None, int | None] | None:
        """The window as `AttentionShape` has it; None without one, and where a side is not known yet."""
        if self.window is None or any(isinstance(side, Tracer) for side in self.window):
            return None
        left, right = (None if side is None or int(side) < 0 else int(side) for side in self.window)
        return left, right

    def plain(self) -> Arguments:
        """A checked call with arguments that jit takes: plain bools, arrays for lists, no rate where nothing drops."""
        changes: dict[str, Any] = {"is_causal": bool(self.is_causal), "return_lse": bool(self.return_lse)}
        lists = {name: getattr(self, name) for name in _INTS}
        changes |= {name: x if x is None or isinstance(x, jax.Array) else np.asarray(x) for name, x in lists.items()}
        if isinstance(changes["causal_offset"], np.ndarray):
            changes["causal_offset"] = changes["causal_offset"].clip(-_FARTHEST, _FARTHEST).astype(np.int32)
        if self.window is not None:
            sides = (side if side is None or isinstance(side, jax.Array) else int(side) for side in self.window)
            changes["window"] = tuple(min(max(x, -1), _FARTHEST) if isinstance(x, int) else x for x in sides)
        changes["p_dtype"] = None if self.p_dtype is None else jnp.dtype(self.p_dtype).name
        if not self.drops:
            changes |= {"dropout_rate": None, "dropout_key": None}
        return dataclasses.replace(self, **changes)

    def check(self) -> AttentionShape | None:
        """The shape of the call, as far as `AttentionShape` has words for it (see `unpriced`).

        None for an empty problem (no query, no key, no batch, no value column): nothing is left to price. float64
        is reported as "float32", since no NPU has an fp64 matrix unit.
        Raises ValueError ("expected ..., got ...; cure") that names the argument.
        """
        size = check_arguments(self)
        if size.empty or not size.v_dim:
            return None
        masks = [x for x in (self.attn_mask, self.bias) if x is not None]
        return AttentionShape(
            batch=size.batch,
            q_heads=size.q_heads,
            q_len=size.q_len,
            head_dim=size.dim,
            kv_heads=size.kv_heads,
            kv_len=size.kv_len,
            v_head_dim=size.v_dim,
            dtype="float32" if self.q.dtype == np.float64 else self.q.dtype.name,
            causal=bool(self.is_causal),
            mask=None if not masks else "bool" if all(x.dtype == np.bool_ for x in masks) else "additive",
            window=self._plain_window,
            softcap=self.softcap is not None,
        )
