"""What a call may look like: every argument is named, documented and checked here, once, before anything is traced."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from npumodel.attention.layouts import Sizes, sizes
from npumodel.workload import DTYPE_BYTES, AttentionShape

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
    q_heads, kv_heads   number of heads, for BSH and SBH (kv_heads: q_heads by default); else read from the arrays
    scale          real number, traced or not; 1 / sqrt(D) by default
    softcap        None or a positive number, traced or not; no gradient, and none by dropout_rate
    bias           floats, [1/B, 1/N, 1/Sq, 1/Skv] or [Sq, Skv] (B = 1 in TND); differentiable
    attn_mask      bool (True takes part), or floats: a second bias. Shapes as bias
    is_causal      query i sees keys j <= p_i, where p_i = i + kv length - q length (bottom-right aligned; with lengths
                   or in TND, those of its own sequence)
    causal_offset  int, traced or not, or one per sequence: p_i = i + causal_offset instead; 0 is top-left aligned, and
                   what is beyond +-2^29 is cut to that
    window         (left, right): query i sees keys p_i - left <= j <= p_i + right, the key p_i itself not counted. None
                   or a negative number: no limit on that side. Ints, traced or not.
    q_lengths, kv_lengths   ints [B]: queries and keys from there on are padding. Traced ones are cut to 0 .. S
    cu_q_lengths, cu_kv_lengths   ints [sequences + 1], for TND: sequence b has tokens cu[b] .. cu[b + 1] - 1. cu[0] is
                   0, and what follows the last is padding. cu_kv_lengths: cu_q_lengths by default
    q_segment_ids, kv_segment_ids   ints [B, Sq] and [B, Skv]: only equal ids see each other, and a negative id is
                   padding. kv_segment_ids: q_segment_ids by default
    sinks          floats [N]: a logit per head that takes part in the softmax, without a value; differentiable
    dropout_rate   0 <= rate < 1, traced or not: weights are dropped with this probability, the rest divided by
                   1 - rate. What is dropped depends on dropout_key and on the position (b, n, i, j) alone: not on the
                   tile, and not on the pass. Under vmap and shard_map, give each example or shard a key of its own.
    dropout_key    a key of jax.random
    p_dtype        dtype to which the softmax weights are rounded before they meet v: that of v by default, as the
                   matrix units have it; "float32" keeps them. Sums are always in float32 (float64 for float64).
    return_lse     also return log sum exp of the scores (with the sink): the output's shape without its last axis
                   ([B, S, N] for BSH, [S, B, N] for SBH), in float32 (float64 for float64)

    Odd cases. A query that sees no key gives exactly 0, LSE -inf (with a sink: the sink; padding: -inf), and gradients
    0; so does an empty k. An additive -inf masks the key, but a finite value never does: a row of finfo.min on every
    key is a plain softmax over equal scores, the mean of v. NaN and Inf in q, k, v reach only the queries, keys and
    gradients that see each other; a value of Inf gives Inf there, or NaN where its weight is 0.
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
        names = ("window", "causal_offset", "softcap", "sinks", "q_lengths", "kv_lengths", "q_segment_ids")
        used += [name for name in names if getattr(self, name) is not None]
        return (*used, *["dropout"] * self.drops)

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
        for name in ("q", "k", "v"):
            _check_array(name, getattr(self, name))
            _check_sharding(name, getattr(self, name))
        _check_dtypes(self.q, self.k, self.v)
        size = self.sizes
        for name in ("is_causal", "return_lse"):
            _check_bool(name, getattr(self, name))
        for name in ("attn_mask", "bias"):
            _check_added(name, getattr(self, name), size)
        _check_real("scale", self.scale)
        _check_real("softcap", self.softcap, low=0)
        _check_sinks(self.sinks, size)
        _check_window(self.window)
        _check_offset(self, size)
        _check_lengths(self, size)
        _check_cu(self, size)
        _check_segments(self, size)
        _check_dropout(self)
        _check_p_dtype(self.p_dtype)
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
        )


def check_block(name: str, size: Any) -> int:
    """The block size as an int. Raises ValueError unless it is a positive integer known at trace time."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
        raise ValueError(
            f"{name}: expected a positive Python integer (static), got {size!r}; mark it static in jax.jit"
        )
    return int(size)


# Arrays --------------------------------------------------------------------------------------------------------------


def _check_array(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name}: expected a JAX or NumPy array, got {type(x).__name__}; convert with jnp.asarray")


def _check_sharding(name: str, x: Any) -> None:
    """Loops over blocks cannot be cut by a mesh: JAX refuses that too, in words that name no argument."""
    spec = getattr(getattr(jax.typeof(x), "sharding", None), "spec", None) or ()
    if any(axis is not None for axis in spec):
        raise ValueError(
            f"{name}: expected an array that no explicit mesh axis cuts, got {spec}; call inside jax.shard_map (over "
            "batch and heads it needs no collectives), or make the mesh with AxisType.Auto, which gathers the arrays"
        )


def _check_dtypes(q: Any, k: Any, v: Any) -> None:
    names = [x.dtype.name for x in (q, k, v)]
    if len(set(names)) > 1:
        raise ValueError(f"q, k, v: expected one dtype, got {', '.join(names)}; cast with .astype")
    if names[0] == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError("q, k, v: expected float32 or narrower, got float64; cast, or set jax_enable_x64")
    if names[0] not in (*DTYPE_BYTES, "float64"):
        raise ValueError(f"q, k, v: expected one of {', '.join(DTYPE_BYTES)}, got {names[0]}; cast with .astype")


def _check_added(name: str, x: Any, size: Sizes) -> None:
    if x is None:
        return
    _check_array(name, x)
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if name == "bias" and not floating:
        raise ValueError(f"bias: expected floating (added to the scores), got {x.dtype.name}; a bool is an attn_mask")
    if not (floating or x.dtype == np.bool_):
        raise ValueError(
            f"{name}: expected bool (True takes part) or floating (added to the scores), got {x.dtype.name}; "
            f"use {name}.astype(bool)"
        )
    full = (size.batch, size.q_heads, size.q_len, size.kv_len)
    if x.ndim == 2:
        fits = x.shape == full[2:]
    else:
        fits = x.ndim == 4 and all(n in (1, whole) for n, whole in zip(x.shape, full, strict=True))
    if not fits:
        shared = f"{name}[None] or {name}[:, None]" if x.ndim == 3 else f"{name}[:, None, None, :]"
        raise ValueError(
            f"{name}: expected a shape that broadcasts to [B={full[0]}, N={full[1]}, Sq={full[2]}, Skv={full[3]}], or "
            f"exactly [{full[2]}, {full[3]}], got {x.shape}; say which axes are shared, as in {shared}"
        )


def _check_sinks(sinks: Any, size: Sizes) -> None:
    if sinks is None:
        return
    _check_array("sinks", sinks)
    if sinks.shape != (size.q_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks: expected floats [N={size.q_heads}], one per query head, got {sinks.dtype.name} {sinks.shape}"
        )


def _check_ints(name: str, x: Any, shape: tuple[int, ...], what: str) -> None:
    found, dtype = _describe(x)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or found != shape:
        got = type(x).__name__ if dtype is None else f"{dtype} {found}"
        cure = f"as jnp.full({shape}, n)" if shape else "as an int"
        raise ValueError(f"{name}: expected ints of shape {shape} ({what}), got {got}; give it {cure}")


def _describe(x: Any) -> tuple[Any, Any]:
    """Shape and dtype of anything array-like; (None, None) for the rest."""
    try:
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        return x.shape, x.dtype
    except (TypeError, ValueError):
        return None, None


def _known(x: Any) -> np.ndarray | None:
    """The numbers, unless they are traced."""
    return None if x is None or isinstance(x, Tracer) else np.asarray(x)


# Numbers -------------------------------------------------------------------------------------------------------------


def _check_bool(name: str, x: Any) -> None:
    if not isinstance(x, bool | np.bool_):
        cure = ", or pass an attn_mask" if name == "is_causal" else ""
        raise ValueError(
            f"{name}: expected a Python bool (static), got {type(x).__name__}; mark it static in jax.jit{cure}"
        )


def _check_real(name: str, x: Any, low: float | None = None) -> None:
    if x is None:
        return
    shape, dtype = _describe(x)
    real = dtype is not None and (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))
    if shape != () or not real:
        got = type(x).__name__ if dtype is None else f"{dtype} of shape {shape}"
        raise ValueError(f"{name}: expected None or one real number, got {got}; pass a scalar")
    value = _known(x)
    if low is not None and value is not None and not low < value < np.inf:
        raise ValueError(f"{name}: expected None or a number above {low}, got {x!r}")


def _check_window(window: Any) -> None:
    if window is None:
        return
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        raise ValueError(
            f"window: expected (left, right), the keys seen on each side besides the query's own, got {window!r}; "
            "None or -1 for no limit"
        )
    for side in window:
        if side is not None:
            _check_ints("window", side, (), "one for each side; None or -1 for no limit")


def _check_offset(a: Arguments, size: Sizes) -> None:
    if a.causal_offset is None:
        return
    if not a.is_causal and a.window is None:
        raise ValueError("causal_offset: expected is_causal=True or a window beside it, got neither; it moves those")
    cu, _ = _describe(a.cu_q_lengths)
    shape = () if _describe(a.causal_offset)[0] == () else (cu[0] - 1 if cu else size.batch,)
    _check_ints("causal_offset", a.causal_offset, shape, "one number, or one per sequence")


# Which tokens belong together ----------------------------------------------------------------------------------------


def _check_lengths(a: Arguments, size: Sizes) -> None:
    for name, most in (("q_lengths", size.q_len), ("kv_lengths", size.kv_len)):
        lengths = getattr(a, name)
        if lengths is None:
            continue
        if a.layout == "TND":
            raise ValueError(f"{name}: expected none in layout TND, got one; give cu_{name}, the cumulative lengths")
        _check_ints(name, lengths, (size.batch,), "one length per example")
        known = _known(lengths)
        if known is not None and known.size and not (0 <= known.min() and known.max() <= most):
            raise ValueError(f"{name}: expected 0 <= length <= {most}, got {known.min()} .. {known.max()}")


def _check_cu(a: Arguments, size: Sizes) -> None:
    pairs = (("cu_q_lengths", a.cu_q_lengths, size.q_len), ("cu_kv_lengths", a.cu_kv_lengths, size.kv_len))
    if a.layout != "TND":
        for name, cu, _ in pairs:
            if cu is not None:
                raise ValueError(f"{name}: expected layout TND beside it, got {a.layout}; give {name[3:]} [B]")
        return
    if a.cu_q_lengths is None or (a.cu_kv_lengths is None and size.q_len != size.kv_len):
        raise ValueError(
            "layout TND: expected cu_q_lengths, and cu_kv_lengths where k has another number of tokens, both ints "
            "[sequences + 1] that start at 0, got "
            f"{'only cu_q_lengths' if a.cu_q_lengths is not None else 'no cu_q_lengths'}"
        )
    count, _ = _describe(a.cu_q_lengths)
    for name, cu, most in pairs:
        if cu is None:
            continue
        shape = count if count is not None and len(count) == 1 and count[0] > 0 else (2,)
        _check_ints(name, cu, shape, "cumulative lengths [sequences + 1], alike for q and kv")
        known = _known(cu)
        known = None if known is None else known.astype(np.int64)
        if known is not None and (known[0] != 0 or (np.diff(known) < 0).any() or known[-1] > most):
            raise ValueError(
                f"{name}: expected to start at 0, never to fall, and to end at {most} tokens at most, got {known}"
            )


def _check_segments(a: Arguments, size: Sizes) -> None:
    if a.kv_segment_ids is not None and a.q_segment_ids is None:
        raise ValueError("kv_segment_ids: expected q_segment_ids beside it, got none; give both")
    if a.q_segment_ids is None:
        return
    if a.layout == "TND":
        raise ValueError("q_segment_ids: expected none in layout TND, got one; cu_q_lengths separates the sequences")
    if a.kv_segment_ids is None and size.q_len != size.kv_len:
        raise ValueError(
            f"kv_segment_ids: expected ints [{size.batch}, {size.kv_len}], got none; only when q and k have one "
            "length are those of q taken"
        )
    _check_ints("q_segment_ids", a.q_segment_ids, (size.batch, size.q_len), "one id per query")
    if a.kv_segment_ids is not None:
        _check_ints("kv_segment_ids", a.kv_segment_ids, (size.batch, size.kv_len), "one id per key")
    for name in ("q_segment_ids", "kv_segment_ids"):
        known = _known(getattr(a, name))
        if known is not None and known.size and max(-int(known.min()), int(known.max())) >= 2**31:
            raise ValueError(f"{name}: expected ids that fit in int32, got {known.min()} .. {known.max()}")


def _check_dropout(a: Arguments) -> None:
    _check_real("dropout_rate", a.dropout_rate)
    rate = _known(a.dropout_rate)
    if rate is not None and not 0 <= rate < 1:
        raise ValueError(f"dropout_rate: expected 0 <= rate < 1, got {a.dropout_rate!r}")
    if a.drops and a.dropout_key is None:
        raise ValueError("dropout_key: expected a key beside dropout_rate, got none; give jax.random.key(seed)")
    if a.dropout_key is None:
        return
    shape, dtype = _describe(a.dropout_key)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if shape != (() if typed else (2,)) or not (typed or dtype == np.uint32):
        got = type(a.dropout_key).__name__ if dtype is None else f"{dtype} {shape}"
        raise ValueError(
            f"dropout_key: expected one key of jax.random, got {got}; make one with jax.random.key(seed)"
        )


def _check_p_dtype(dtype: Any) -> None:
    try:
        known = dtype is None or jnp.dtype(dtype).name in (*DTYPE_BYTES, "float64")
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"p_dtype: expected None or one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
