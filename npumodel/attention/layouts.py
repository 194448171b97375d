"""The five layouts of Ascend's attention calls (torch_npu `npu_fusion_attention`, input_layout), and the one inside."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: Axes of each layout, in words: for messages.
LAYOUTS = {
    "BNSD": "[batch, heads, sequence, head_dim]",
    "BSND": "[batch, sequence, heads, head_dim]",
    "BSH": "[batch, sequence, heads * head_dim]",
    "SBH": "[sequence, batch, heads * head_dim]",
    "TND": "[tokens, heads, head_dim]",
}


class Sizes(NamedTuple):
    """The sizes of one call, whatever its layout; in TND batch is 1 and the lengths are numbers of tokens."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    v_dim: int

    @property
    def empty(self) -> bool:
        """Whether there is no score."""
        return 0 in self[:5]


def sizes(layout: str, q: Any, k: Any, v: Any, q_heads: int | None = None, kv_heads: int | None = None) -> Sizes:
    """The sizes of q, k and v. Raises ValueError ("expected ..., got ...; cure") if they do not fit together."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    q_heads, kv_heads = _heads(layout, q_heads, kv_heads)
    (bq, nq, sq, d), (bk, nk, sk, dk), (bv, nv, sv, dv) = (
        _bnsd(name, x.shape, layout, heads)
        for name, x, heads in (("q", q, q_heads), ("k", k, kv_heads), ("v", v, kv_heads))
    )
    about = f"; the layout is {layout}, {LAYOUTS[layout]}"
    about += ", from BSND use x.transpose(0, 2, 1, 3) or layout='BSND'" if layout == "BNSD" else ""
    if not d:
        raise ValueError(f"q: expected a head_dim of at least 1, got {q.shape}{about}")
    if d != dk:
        about += f", and k was read with kv_heads={kv_heads}" if kv_heads is not None else ""
        raise ValueError(f"k: expected the head_dim of q, got q {q.shape} and k {k.shape}{about}")
    if (bk, nk, sk) != (bv, nv, sv):
        raise ValueError(f"v: expected batch, heads and sequence of k {k.shape}, got {v.shape}{about}")
    if bq != bk:
        raise ValueError(f"k: expected the batch of q {q.shape}, got {k.shape}; broadcast k and v{about}")
    if nq % nk if nk else nq:
        raise ValueError(
            f"q: expected a number of heads that is a multiple of the {nk} of k, got {nq} "
            f"(q {q.shape}, k {k.shape}){about}"
        )
    return Sizes(bq, nq, nk, sq, sk, d, dv)


def _heads(layout: str, q_heads: Any, kv_heads: Any) -> tuple[int | None, int | None]:
    """The numbers of heads of q and kv for a layout that does not show them; None for one that does."""
    for name, n in (("q_heads", q_heads), ("kv_heads", kv_heads)):
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise ValueError(f"{name}: expected a positive Python integer (static), got {n!r}")
    if layout in ("BSH", "SBH"):
        if q_heads is None:
            raise ValueError(f"q_heads: expected the number of heads in {LAYOUTS[layout]}, got none; give q_heads")
        return q_heads, q_heads if kv_heads is None else kv_heads
    if q_heads is not None or kv_heads is not None:
        got = f"{q_heads} and {kv_heads}"
        raise ValueError(f"q_heads, kv_heads: expected none in layout {layout}, got {got}; the arrays show their heads")
    return None, None


def _bnsd(name: str, shape: tuple[int, ...], layout: str, heads: int | None) -> tuple[int, int, int, int]:
    """Batch, heads, sequence and head_dim of an array of this shape."""
    axes = {"BNSD": 4, "BSND": 4}.get(layout, 3)
    if len(shape) != axes:
        cure = "; from BSND use x.transpose(0, 2, 1, 3) or layout='BSND'" if layout == "BNSD" else ""
        raise ValueError(
            f"{name}: expected {axes} axes, got shape {shape}; the layout is {layout}, {LAYOUTS[layout]}{cure}"
        )
    if heads is not None and shape[2] % heads:
        raise ValueError(f"{name}: expected a last axis that {heads} heads divide, got {shape}; see q_heads, kv_heads")
    a, b, c, d = (*shape, 1)[:4]
    return {
        "BNSD": (a, b, c, d),
        "BSND": (a, c, b, d),
        "BSH": (a, heads or 0, b, c // (heads or 1)),
        "SBH": (b, heads or 0, a, c // (heads or 1)),
        "TND": (1, b, a, c),
    }[layout]


def to_bnsd(x: jax.Array, layout: str, heads: int) -> jax.Array:
    """An array of this layout as [B, N, S, D]."""
    if layout == "BNSD":
        return x
    if layout == "TND":
        return x.swapaxes(0, 1)[None]
    if layout != "BSND":
        x = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
    return x.transpose(1, 2, 0, 3) if layout == "SBH" else x.swapaxes(1, 2)


def from_bnsd(x: jax.Array, layout: str, flat: bool) -> jax.Array:
    """[B, N, S, ...] in this layout. flat: BSH and SBH merge their last two axes (an output, not an LSE)."""
    if layout == "BNSD":
        return x
    if layout == "TND":
        return x[0].swapaxes(0, 1)
    x = jnp.moveaxis(x, 2, 0) if layout == "SBH" else x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) if flat and layout != "BSND" else x
