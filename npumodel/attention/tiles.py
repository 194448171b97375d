"""How one call is cut into tasks and tiles, and the arithmetic of a tile that both passes share."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from npumodel.attention.call import Call
from npumodel.attention.masks import Steps, Tile, corner, cut

#: Scores held at once: several heads go through one step together until a tile has this many. On 2 cores, float32,
#: 8 heads of 4096 x 4096 in 512 x 512 blocks: 4 heads at once take 0.8 of the time of one at a time.
TILE_SCORES = 2**20


class Plan(NamedTuple):
    """What is fixed when the loops are compiled: block sizes, and the dtype that the weights are rounded to."""

    block_q: int
    block_kv: int
    p_dtype: str


class Grid(NamedTuple):
    """A task is one query block of some heads: b of the batch, h kv heads, g query heads of each, q queries; its loop
    goes over blocks of k keys. The last block of an axis reaches back over the one before rather than over the edge.
    """

    call: Call
    b: int
    h: int
    g: int
    q: int
    k: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Tasks along batch, kv heads, query heads of a group, and queries."""
        batch, heads, group, q_len, _ = self.call.inputs.q.shape
        return batch // self.b, heads // self.h, group // self.g, -(-q_len // self.q)

    @property
    def tasks(self) -> int:
        batch, heads, groups, blocks = self.shape
        return batch * heads * groups * blocks

    @property
    def size(self) -> tuple[int, int, int, int, int]:
        """Of a tile, along [B, H, G, Sq, Skv]."""
        return self.b, self.h, self.g, self.q, self.k

    def start(self, index: Any) -> tuple[tuple[Any, Any, Any, Any], Any]:
        """Where task `index` starts along [B, H, G, Sq], and the first query that no task before it has."""
        at_b, at_h, at_g, at_q = corner(jnp.unravel_index(index, self.shape))
        fresh = at_q * self.q
        row = jnp.minimum(fresh, self.call.inputs.q.shape[3] - self.q)
        return (at_b * self.b, at_h * self.h, at_g * self.g, row), fresh

    def rows(self, x: jax.Array, start: Any) -> jax.Array:
        """The part of x [B, H, G, Sq, ...] of one task."""
        rest = x.shape[4:]
        return cut(x, (*start, *[0] * len(rest)), (self.b, self.h, self.g, self.q, *rest))

    def steps(self, start: Any) -> Steps:
        return self.call.sees.steps((start[0], start[3]), (self.b, self.q), self.call.inputs.k.shape[2], self.k)

    def column(self, j: Any) -> Any:
        """The first key of block j."""
        return jnp.minimum(jnp.asarray(j, jnp.int32) * self.k, self.call.inputs.k.shape[2] - self.k)

    def keys(self, start: Any, j: Any) -> tuple[jax.Array, jax.Array]:
        """Block j of k and v, in the wide dtype: [b, h, k, d] and [b, h, k, e]."""
        at = (*start[:2], self.column(j), 0)
        key, value = (cut(x, at, (self.b, self.h, self.k, x.shape[3])) for x in self.call.inputs[1:3])
        return key.astype(self.call.wide), value.astype(self.call.wide)

    def masks(self, start: Any, j: Any, keys_first: bool = False) -> Tile:
        """The masks of block j."""
        return self.call.sees.tile((*start, self.column(j)), self.size, j * self.k, keys_first)


def grid(call: Call, plan: Plan) -> Grid:
    """Blocks cut to the lengths, and as many heads at once as `TILE_SCORES` allows."""
    (batch, heads, group, q_len, _), kv_len = call.inputs.q.shape, call.inputs.k.shape[2]
    q, k = min(plan.block_q, q_len), min(plan.block_kv, kv_len)
    g = _divisor(group, TILE_SCORES // (q * k))
    h = _divisor(heads, TILE_SCORES // (g * q * k)) if g == group else 1
    b = _divisor(batch, TILE_SCORES // (h * g * q * k)) if h == heads and g == group else 1
    return Grid(call, b, h, g, q, k)


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most` (1 if there is none)."""
    return next(d for d in range(max(1, min(n, most)), 0, -1) if n % d == 0)


def visit(steps: Steps, body: Any, state: Any) -> Any:
    """body(masked, j, state) over the blocks of a task: those seen in full, then those that need a mask.

    Two loops with dynamic bounds: blocks that no query sees cost nothing, and the mask is not computed where it
    changes nothing.
    """
    state = _loop(steps.full_first, steps.full_end, lambda j, s: body(False, j, s), state)
    return _loop(0, steps.edges, lambda turn, s: body(True, steps.edge(turn), s), state)


def _loop(first: Any, last: Any, body: Any, state: Any) -> Any:
    """fori_loop, left out where it is known to be empty."""
    if isinstance(first, int) and isinstance(last, int) and first >= last:
        return state
    return lax.fori_loop(first, last, body, state)


def scored(call: Call, at: Any, b: int, products: jax.Array) -> tuple[jax.Array, Any]:
    """The scores of the products q k^T, before biases and masks: scaled, and capped as cap * tanh(scores / cap); and
    the derivative of the second step (1 without a cap). at, b: which examples. Scaling here and not in q costs a score
    one more rounding, not one for each of its D products.
    """

    def of_examples(x):
        return cut(x, (at,), (b,)).reshape(-1, 1, 1, 1, 1)

    scores, softcap = of_examples(call.inputs.scale) * products, call.context.softcap
    if softcap is None:
        return scores, 1
    cap = of_examples(softcap)
    bent = jnp.tanh(scores / cap)
    return cap * bent, 1 - bent * bent


def below(scores: jax.Array, peak: jax.Array) -> jax.Array:
    """scores - peak, never above 0, and 0 at the peak: the exponents of the softmax weights.

    Without the minimum XLA may contract scale * products - peak to one multiply-add, whose product is not rounded while
    that in the peak was: beyond 1e9 the difference, half a last digit of the scores, makes weights of 0 or Inf. In the
    backward pass the scores come from a product of another shape, and may exceed the peak by their rounding.
    """
    return jnp.minimum(scores, peak) - peak


def like(value: float, shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    """A full array of x's dtype that varies over the mesh axes of x (under shard_map; elsewhere just full)."""
    return jnp.where(False, x[(0,) * x.ndim], jnp.full(shape, value, x.dtype))


def seen_product(product: Any, weights: jax.Array, x: jax.Array, allowed: jax.Array | None, exact: bool = True):
    """product(weights, x), a matrix product, where a NaN or Inf in x reaches only results that are allowed to see it.

    Where not allowed the weights are 0, but 0 * NaN is NaN: so the product takes finite values only, and what is odd
    is added apart. allowed: None (all), or True where a weight takes part, broadcasting to the weights. exact: the
    weights are not negative, so that Inf stays Inf (NaN where its weight is 0); else all that is odd gives NaN.
    The odd part is rare: a loop of 0 or 1 turns skips it, under vmap too, where a cond would compute both sides. The
    barrier ties the body to the turn, or XLA would hoist it out of the loop and always compute it.
    """
    if allowed is None:
        return product(weights, x)
    finite = jnp.isfinite(x)

    def odd(turn, result):
        _, values, sees = lax.optimization_barrier((turn, x, allowed))
        return with_odd(product, result, weights, values, jnp.broadcast_to(sees, weights.shape), exact)

    return lax.fori_loop(0, (~finite.all()).astype(jnp.int32), odd, product(weights, jnp.where(finite, x, 0)))


def with_odd(product: Any, result: jax.Array, weights: jax.Array, x: jax.Array, sees: jax.Array, exact: bool = True):
    """The result of the finite part of x, with what its NaN and Inf do to it: see `seen_product`."""

    def reached(by, marks):
        return product(by.astype(weights.dtype), marks.astype(weights.dtype)) > 0

    if not exact:
        return jnp.where(reached(sees, ~jnp.isfinite(x)), jnp.nan, result)
    for value in (jnp.inf, -jnp.inf):
        result = result + jnp.where(reached(sees, x == value), value, 0)
    nothing = reached(sees & (weights == 0), jnp.isinf(x))  # 0 * Inf
    return jnp.where(nothing | reached(sees, jnp.isnan(x)), jnp.nan, result)
