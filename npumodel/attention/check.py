"""What a call may look like: every argument is checked here, once, before anything is traced."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from npumodel.workload import DTYPE_BYTES, AttentionShape

_LAYOUT = "the layout is BNSD, [batch, heads, sequence, head_dim]; from BSND use x.transpose(0, 2, 1, 3)"


def check_attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, is_causal: bool = False, scale: Any = None
) -> AttentionShape | None:
    """Check the arguments of one attention call and return its shape.

    q [B, N, Sq, D], k [B, Nkv, Skv, D], v [B, Nkv, Skv, Dv]: JAX or NumPy arrays of one dtype, float32, float16 or
    bfloat16, and float64 under jax_enable_x64. attn_mask: bool or floating, [1/B, 1/N, 1/Sq, 1/Skv] or exactly
    [Sq, Skv]. is_causal: a Python bool. scale: None or one real number, traced or not.

    Returns None for an empty problem (no query, no key, no batch, no value column): nothing is left to compute.
    float64 is reported as "float32", since no NPU has an fp64 matrix unit.

    Raises ValueError ("expected ..., got ...; cure") that names the argument.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_array(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 axes, got shape {x.shape}; {_LAYOUT}")
    _check_dtypes(q, k, v)
    _check_sizes(q, k, v)
    if attn_mask is not None:
        _check_mask(attn_mask, (*q.shape[:3], k.shape[2]))
    _check_causal(is_causal)
    _check_scale(scale)
    if 0 in (*q.shape, *v.shape):
        return None
    return AttentionShape(
        batch=q.shape[0],
        q_heads=q.shape[1],
        q_len=q.shape[2],
        head_dim=q.shape[3],
        kv_heads=k.shape[1],
        kv_len=k.shape[2],
        v_head_dim=v.shape[3],
        dtype="float32" if q.dtype == np.float64 else q.dtype.name,
        causal=bool(is_causal),
        mask=None if attn_mask is None else "bool" if attn_mask.dtype == np.bool_ else "additive",
    )


def check_block(name: str, size: Any) -> int:
    """The block size as an int. Raises ValueError unless it is a positive integer known at trace time."""
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
        raise ValueError(
            f"{name}: expected a positive Python integer (static), got {size!r}; mark it static in jax.jit"
        )
    return int(size)


def _check_array(name: str, x: Any) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise ValueError(f"{name}: expected a JAX or NumPy array, got {type(x).__name__}; convert with jnp.asarray")


def _check_dtypes(q: Any, k: Any, v: Any) -> None:
    names = [x.dtype.name for x in (q, k, v)]
    if len(set(names)) > 1:
        raise ValueError(f"q, k, v: expected one dtype, got {', '.join(names)}; cast with .astype")
    if names[0] == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError("q, k, v: expected float32 or narrower, got float64; cast, or set jax_enable_x64")
    if names[0] not in (*DTYPE_BYTES, "float64"):
        raise ValueError(f"q, k, v: expected one of {', '.join(DTYPE_BYTES)}, got {names[0]}; cast with .astype")


def _check_sizes(q: Any, k: Any, v: Any) -> None:
    if not q.shape[3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k: expected the head_dim of q (at least 1), got q {q.shape} and k {k.shape}; {_LAYOUT}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v: expected batch, heads and sequence of k {k.shape}, got {v.shape}; {_LAYOUT}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"k: expected the batch of q {q.shape}, got {k.shape}; broadcast k and v, {_LAYOUT}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"q: expected a number of heads that is a multiple of the {kv_heads} of k, got {heads} "
            f"(q {q.shape}, k {k.shape}); {_LAYOUT}"
        )


def _check_mask(mask: Any, full: tuple[int, ...]) -> None:
    _check_array("attn_mask", mask)
    if not (mask.dtype == np.bool_ or jnp.issubdtype(mask.dtype, jnp.floating)):
        raise ValueError(
            f"attn_mask: expected bool (True takes part) or floating (added to the scores), got {mask.dtype.name}; "
            "use mask.astype(bool)"
        )
    if mask.ndim == 2:
        fits = mask.shape == full[2:]
    else:
        fits = mask.ndim == 4 and all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True))
    if not fits:
        batch, heads, q_len, kv_len = full
        raise ValueError(
            f"attn_mask: expected a shape that broadcasts to [B={batch}, N={heads}, Sq={q_len}, Skv={kv_len}], or "
            f"exactly [{q_len}, {kv_len}], got {mask.shape}; say which axes are shared, as in mask[:, None, None, :]"
        )


def _check_causal(is_causal: Any) -> None:
    if not isinstance(is_causal, bool | np.bool_):
        raise ValueError(
            f"is_causal: expected a Python bool (static), got {type(is_causal).__name__}; "
            "mark it static in jax.jit, or pass an attn_mask"
        )


def _check_scale(scale: Any) -> None:
    if scale is None:
        return
    try:
        shape, dtype = jnp.shape(scale), jnp.result_type(scale)
    except TypeError:
        shape, dtype = None, type(scale).__name__
    real = shape is not None and (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer))
    if shape != () or not real:
        raise ValueError(f"scale: expected None or one real number, got {dtype} of shape {shape}; pass a scalar")
