"""One attention call in the form that is computed: layout, heads, scale and masks settled, once for all methods."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from npumodel.attention.arguments import Arguments
from npumodel.attention.layouts import Sizes, from_bnsd, to_bnsd
from npumodel.attention.masks import Visibility, padding, visibility


class Inputs(NamedTuple):
    """What has a gradient.

    q      [B, H, G, Sq, D], in the dtype of the sums ("wide": float32, or float64)
    k, v   [B, H, Skv, D] and [B, H, Skv, E], in their own dtype
    scale  [1/B], in the wide dtype
    added  biases, [1/B, 1/H, 1/G, 1/Sq, 1/Skv] each
    sinks  None, or [1/B, H, G] in the wide dtype
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    scale: jax.Array
    added: tuple[Any, ...]
    sinks: jax.Array | None


class Dropout(NamedTuple):
    """keys uint32 [1/B, H, G, 2], of threefry: one per head; keep [1/B]: probability to be kept."""

    keys: jax.Array
    keep: jax.Array


class Context(NamedTuple):
    """What has none. The biases of `sees` are those of Inputs: see `Call.sees`. softcap: None or [1/B]."""

    sees: Visibility
    softcap: jax.Array | None
    dropout: Dropout | None


class Call(NamedTuple):
    """A whole call. H kv heads, G query heads that share one, E v_head_dim; a size "1/B" is B, or 1 to share."""

    inputs: Inputs
    context: Context

    @property
    def sees(self) -> Visibility:
        return self.context.sees._replace(added=self.inputs.added)

    @property
    def wide(self) -> Any:
        """Dtype of scores and sums."""
        return self.inputs.q.dtype


def prepared(a: Arguments, size: Sizes) -> Call:
    """The call of checked arguments that have scores."""
    q, k, v = (
        to_bnsd(jnp.asarray(x), a.layout, heads)
        for x, heads in ((a.q, size.q_heads), (a.k, size.kv_heads), (a.v, size.kv_heads))
    )
    wide = _wide(q.dtype)
    scale = jnp.asarray(size.dim**-0.5 if a.scale is None else a.scale, wide).reshape(1)
    group = size.q_heads // size.kv_heads
    q = q.astype(wide).reshape(size.batch, size.kv_heads, group, size.q_len, size.dim)
    sinks = None if a.sinks is None else jnp.asarray(a.sinks, wide).reshape(1, size.kv_heads, group)
    sees = visibility(a, size)
    softcap = None if a.softcap is None else jnp.asarray(a.softcap, wide).reshape(1)
    context = Context(sees._replace(added=()), softcap, _dropout(a, size, wide) if a.drops else None)
    return _on_all_shards(Call(Inputs(q, k, v, scale, sees.added, sinks), context))


def finished(out: jax.Array, lse: jax.Array, a: Arguments, size: Sizes) -> Any:
    """Output [B, H, G, Sq, E] and LSE [B, H, G, Sq], as the arguments ask for them."""
    heads = (size.batch, size.q_heads, size.q_len)
    out, lse = out.reshape(*heads, size.v_dim), lse.reshape(heads)
    none = padding(a, size) if a.sinks is not None else None
    if none is not None:  # with a sink a query without keys has an LSE, but padding has none, and no gradient
        none = none[:, None]
        out, lse = jnp.where(none[..., None], 0, out), jnp.where(none, -jnp.inf, lse)
    out = from_bnsd(out.astype(a.q.dtype), a.layout, flat=True)
    return (out, from_bnsd(lse, a.layout, flat=False)) if a.return_lse else out


def empty(a: Arguments, size: Sizes) -> Any:
    """The result of a call without scores: no keys, queries, heads or batch."""
    wide = _wide(a.q.dtype)
    lse = jnp.full((size.batch, size.q_heads, size.q_len), -jnp.inf, wide)
    if a.sinks is not None:
        lse = jnp.broadcast_to(jnp.asarray(a.sinks, wide)[None, :, None], lse.shape)
    return finished(jnp.zeros((*lse.shape, size.v_dim), wide), lse, a, size)


def _wide(dtype: Any) -> Any:
    return jnp.dtype("float64" if dtype == "float64" else "float32")


def _dropout(a: Arguments, size: Sizes, wide: Any) -> Dropout:
    """One key per example and head, from the one of the call.

    Of a key of any generator only the words are taken, and hashed by threefry: the bits of rbg depend on how many are
    drawn at once, and under vmap on the first key alone (jax.random, "Advanced RNG configuration").
    """
    words = jnp.asarray(a.dropout_key)
    words = jax.random.key_data(words) if jnp.issubdtype(words.dtype, jax.dtypes.prng_key) else words
    key = reduce(jax.random.fold_in, words, threefry(jnp.zeros(2, "uint32")))
    heads = size.batch * size.q_heads
    keys = jax.vmap(lambda head: jax.random.key_data(jax.random.fold_in(key, head)))(jnp.arange(heads, dtype=jnp.int32))
    group = size.q_heads // size.kv_heads
    keep = jnp.asarray(1 - jnp.asarray(a.dropout_rate, wide), wide).reshape(1)
    return Dropout(keys.reshape(size.batch, size.kv_heads, group, -1), keep)


def threefry(words: jax.Array) -> jax.Array:
    """A key of two words, whatever jax_default_prng_impl is."""
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _on_all_shards(call: Call) -> Call:
    """Inside shard_map: every array marked as varying over all mesh axes over which any of them varies.

    The loops carry sums that depend on all of them, and a loop must carry one type. Autodiff adds, over the axes that
    are marked here, the gradients of what was the same on all shards.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return call
    marks = [jnp.where(False, x[(0,) * x.ndim], 0) != 0 for x in jax.tree.leaves(call)]
    mark = jnp.stack(marks).any()
    return jax.tree.map(lambda x: jnp.where(mark, jnp.zeros_like(x), x), call)
