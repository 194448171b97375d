"""Blocked attention as one differentiable function: the forward and backward loops joined, under every transform.

jit, vmap, grad, jacrev, checkpoint, scan and shard_map work. The loops have dynamic bounds, so autodiff cannot look
into them: reverse mode is `backward`. Forward mode (jvp, jacfwd) and second derivatives raise TypeError; for those
there is `reference_attention`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from npumodel.attention.arguments import Arguments
from npumodel.attention.backward import Cotangents, backward
from npumodel.attention.call import Call, Context, Inputs, empty, finished, prepared
from npumodel.attention.checks import check_block
from npumodel.attention.forward import Result, forward
from npumodel.attention.tiles import Plan


def blocked_attention(q: Any, k: Any, v: Any, attn_mask: Any = None, *, block_q: int, block_kv: int, **options) -> Any:
    """softmax(scale * q k^T + masks) v in tiles of block_q x block_kv: memory O(Sq + Skv), forward and backward.

    options  the other fields of `Arguments`, which says what they all mean
    block_q, block_kv  static; they need not divide the lengths and may exceed them

    Returns the output in q's layout and dtype; with return_lse=True also the LSE.
    Query blocks and kv blocks at the end reach back rather than over the edge, so nothing is padded. Blocks that no
    query sees are never touched, and those that all see in full are not masked. Products of float32 follow
    jax_default_matmul_precision.

    Raises ValueError as `Arguments.check` does, and for a block size that is no positive integer.
    """
    return blocked(Arguments(q, k, v, attn_mask, **options), block_q=block_q, block_kv=block_kv)


def blocked(arguments: Arguments, *, block_q: int, block_kv: int) -> Any:
    """`blocked_attention` of one object."""
    arguments.check()
    size = arguments.sizes
    blocks = check_block("block_q", block_q), check_block("block_kv", block_kv)
    if size.empty:
        return empty(arguments, size)
    plan = Plan(*blocks, jnp.dtype(arguments.p_dtype or arguments.v.dtype).name)
    call = prepared(arguments, size)
    out, lse = _attend(plan, call.inputs, call.context)
    return finished(out, lse, arguments, size)


def _primal(plan: Plan, inputs: Inputs, context: Context) -> tuple[jax.Array, jax.Array]:
    result = _forward(plan, Call(inputs, context))
    return result.out, result.lse


def _forward(plan: Plan, call: Call) -> Result:
    return _once(lambda call: _folded(partial(forward, plan), call, own=_own(call)), call)


_attend: Any = jax.custom_vjp(_primal, nondiff_argnums=(0,))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Which biases need a gradient: known while tracing, so that the others are not computed."""

    added: tuple[bool, ...]


def _attend_fwd(plan: Plan, inputs: Any, context: Any) -> Any:
    wanted = _Wanted(tuple(x.perturbed for x in inputs.added))
    for name, leaf in (("softcap", context.softcap), ("dropout_rate", context.dropout and context.dropout.keep)):
        if leaf is not None and leaf.perturbed:
            raise ValueError(f"{name}: expected a constant, got one to differentiate; use jax.lax.stop_gradient")
    inputs, context = jax.tree.map(lambda x: x.value, (inputs, context), is_leaf=lambda x: hasattr(x, "perturbed"))
    call = Call(inputs, context)
    result = _forward(plan, call)
    return (result.out, result.lse), (call, result, wanted)


def _attend_bwd(plan: Plan, kept: Any, cotangents: Any) -> Any:
    call, result, wanted = kept
    cotangents = Cotangents(*(_dense(d, x) for d, x in zip(cotangents, (result.out, result.peak), strict=True)))
    own, gradients = _own(call, wanted.added, summed=True), partial(backward, plan, wanted=wanted.added)
    return _once(lambda *arrays: _folded(gradients, *arrays, own=own), call, result, cotangents), None


def _dense(cotangent: Any, x: jax.Array) -> jax.Array:
    return jnp.zeros_like(x) if isinstance(cotangent, SymbolicZero) else cotangent


def _once(function: Any, *arrays: Any) -> Any:
    """function(*arrays), which refuses to be differentiated: what is inside a derivative already."""
    guarded = jax.custom_jvp(function)
    guarded.defjvp(_refuse)
    return guarded(*arrays)


def _refuse(primals: Any, tangents: Any):
    raise TypeError(
        "flash_attention: expected a first derivative in reverse mode, got a second one (grad of grad, hessian); use "
        "npumodel.attention.reference_attention, which has all derivatives, in memory O(Sq * Skv)"
    )


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


# vmap ----------------------------------------------------------------------------------------------------------------


def _folded(function: Any, call: Call, *more: Any, own: Call) -> Any:
    """function(call, *more), whose vmap makes the mapped axis part of the batch instead of mapping over the loops.

    Mapped loops would compute a tile of every example at once, and run to the longest of all loop bounds. Each array
    has the batch first: of size B, or 1 to share. own: True for the arrays of the call that cannot stay shared when
    examples differ; those of `more` never can. Results have a batch of B, or of 1 where they are a sum over it.
    """
    leaves, tree = jax.tree.flatten((call, more))
    owns = jax.tree.leaves((own, jax.tree.map(lambda _: True, more)))
    batch = call.inputs.q.shape[0]

    @custom_vmap
    def run(*leaves):
        call, more = jax.tree.unflatten(tree, leaves)
        return function(call, *more)

    @run.def_vmap
    def rule(size, mapped, *leaves):
        joined = [_joined(x, m, size, batch, o) for x, m, o in zip(leaves, mapped, owns, strict=True)]
        call, more = jax.tree.unflatten(tree, joined)
        results = _folded(function, call, *more, own=own)
        results = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)
        single = jax.eval_shape(run, *(x[0] if m else x for x, m in zip(leaves, mapped, strict=True)))
        results = jax.tree.map(lambda x, s: x if s.shape == x.shape[1:] else x.sum(1, keepdims=True), results, single)
        return results, jax.tree.map(lambda _: True, results)

    return run(*leaves)


def _joined(x: jax.Array, mapped: bool, size: int, batch: int, own: bool) -> jax.Array:
    """An array [size, 1/B, ...] (mapped) or [1/B, ...] as [size * B, ...], or [1, ...] where it can stay shared."""
    if not mapped:
        if x.shape[0] == 1 and not own:
            return x
        x = jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])


def _own(call: Call, wanted: tuple[bool, ...] = (), summed: bool = False) -> Call:
    """Which arrays of a call each example needs for itself: q, k, v, and what it gets a gradient for."""
    own = jax.tree.map(lambda _: False, call)
    true: Any = True
    inputs = own.inputs._replace(q=true, k=true, v=true, scale=summed, added=wanted or own.inputs.added)
    return own._replace(inputs=inputs if inputs.sinks is None else inputs._replace(sinks=summed))
