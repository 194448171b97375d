"""The rules for the arguments of a call: each is checked once, before anything is traced."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from npumodel.attention.layouts import Sizes
from npumodel.workload import DTYPE_BYTES

if TYPE_CHECKING:
    from npumodel.attention.arguments import Arguments


def check_arguments(a: Arguments) -> Sizes:
    """The sizes of a call. Raises ValueError ("expected ..., got ...; cure") that names the argument."""
    for name in ("q", "k", "v"):
        _check_array(name, getattr(a, name))
        _check_sharding(name, getattr(a, name))
    _check_dtypes(a.q, a.k, a.v)
    size = a.sizes
    for name in ("is_causal", "return_lse"):
        _check_bool(name, getattr(a, name))
    for name in ("attn_mask", "bias"):
        _check_added(name, getattr(a, name), size)
    _check_real("scale", a.scale)
    _check_real("softcap", a.softcap, low=0)
    _check_sinks(a.sinks, size)
    _check_window(a.window)
    for check in (_check_offset, _check_lengths, _check_cu, _check_segments):
        check(a, size)
    _check_dropout(a)
    _check_p_dtype(a.p_dtype)
    return size


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
        cure = "give one" if x is None else _no_numbers(x) or "convert with jnp.asarray"
        raise ValueError(f"{name}: expected a JAX or NumPy array, got {type(x).__name__}; {cure}")


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
        cure = _reshaped("sinks", sinks.shape, (size.q_heads,)) or "give one number for each"
        cure = "cast with sinks.astype(q.dtype)" if sinks.shape == (size.q_heads,) else cure
        raise ValueError(
            f"sinks: expected floats [N={size.q_heads}], one per query head, got {sinks.dtype.name} {sinks.shape}; "
            f"{cure}"
        )


def _check_ints(name: str, x: Any, shape: tuple[int, ...], what: str, cure: str | None = None) -> None:
    """what: the entries in words. cure: of a wrong shape, where spreading or reshaping x would not be it."""
    found, dtype = _describe(x)
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        if found == shape:
            return
        cure = cure or _reshaped(name, found, shape) or (f"give {what}" if shape else "give one int")
    elif dtype is not None and (jnp.issubdtype(dtype, jnp.floating) or dtype == np.bool_):
        array = isinstance(x, jax.Array | np.ndarray)
        cure = "cast with .astype(int)" if array else "give an int" if not shape else "give whole numbers"
    else:
        cure = _no_numbers(x) or (f"give {what}" if shape else "give one int")
    got = type(x).__name__ if dtype is None else f"{dtype} {found}"
    raise ValueError(f"{name}: expected ints of shape {shape} ({what}), got {got}; {cure}")


def _reshaped(name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    """How numbers of the shape `found` get another, all of them kept; None if they do not fit."""
    if not shape or 0 in found:
        return None
    if found == ():
        return f"spread it with jnp.full({shape}, {name})"
    if np.prod(found) == np.prod(shape):
        return f"use jnp.reshape({name}, {shape})"
    tail = shape[len(shape) - len(found) :]
    if len(found) <= len(shape) and all(n in (1, whole) for n, whole in zip(found, tail, strict=True)):
        return f"spread it with jnp.broadcast_to({name}, {shape})"
    return None


def _no_numbers(x: Any) -> str | None:
    """The cure for what stands for numbers but has none that can be read here."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return "for shapes without numbers, call inside jax.eval_shape, which makes arrays of them"
    if isinstance(x, list | tuple) and any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
        return "join traced numbers with jnp.asarray or jnp.stack"
    return None


def _describe(x: Any) -> tuple[Any, Any]:
    """Shape and dtype of anything array-like; (None, None) for the rest."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return None, None
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
        raise ValueError(f"{name}: expected None or one real number, got {got}; {_no_numbers(x) or 'pass a scalar'}")
    value = _known(x)
    if low is not None and value is not None and not low < value < np.inf:
        raise ValueError(f"{name}: expected None or a finite number above {low}, got {x!r}; None is for none")


def _check_window(window: Any) -> None:
    if window is None:
        return
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
        got, cure = repr(window), "None or -1 for no limit"
        if isinstance(window, jax.Array | np.ndarray):
            got = f"an array {window.dtype.name} {window.shape}"
            cure = "give tuple(window)" if window.shape == (2,) else cure
        raise ValueError(
            "window: expected (left, right), a tuple of two ints, the keys seen on each side besides the query's own, "
            f"got {got}; {cure}"
        )
    for name, side in zip(("left", "right"), window, strict=True):
        if side is not None:
            _check_ints("window", side, (), f"the {name} side; None or -1 for no limit")


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
        if count is None or len(count) != 1 or not count[0]:
            cure = _no_numbers(cu) or "give them on one axis; [0] is no sequence"
            got = type(cu).__name__ if count is None else f"shape {count}"
            raise ValueError(f"{name}: expected ints [sequences + 1], the cumulative lengths, got {got}; {cure}")
        what = "cumulative lengths [sequences + 1], alike for q and kv"
        _check_ints(name, cu, count, what, "a sequence without tokens repeats the number before it")
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
    raw = dtype == np.uint32 and shape[-1:] in ((2,), (4,))  # the words of threefry, and of rbg
    if not (typed or raw) or len(shape) != (0 if typed else 1):
        got = type(a.dropout_key).__name__ if dtype is None else f"{dtype} {shape}"
        cure = "take one of them, as dropout_key[0]" if typed or raw else "make one with jax.random.key(seed)"
        cure = _no_numbers(a.dropout_key) or cure
        raise ValueError(f"dropout_key: expected one key of jax.random, got {got}; {cure}")


def _check_p_dtype(dtype: Any) -> None:
    try:
        known = dtype is None or jnp.dtype(dtype).name in (*DTYPE_BYTES, "float64")
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"p_dtype: expected None or one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
