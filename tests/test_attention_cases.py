"""What went wrong elsewhere: public bug reports and odd cases of attention, each as the law that it broke."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import (
    assert_same,
    assert_within,
    check,
    cotangents_of,
    inputs,
    jitted,
    largest,
    mask_of,
    results,
    rounding,
)
from attention_oracle import attention

from npumodel.attention import blocked_attention, merge, reference_attention

blocked = partial(jitted, block_q=4, block_kv=3)
#: By what runs: its results alone, compiled.
FORWARD = {blocked_attention: blocked, reference_attention: jax.jit(reference_attention)}
BOTH = pytest.mark.parametrize("run", [blocked_attention, reference_attention], ids=["blocked", "reference"])
ODD = pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
GQA = dict(b=2, n=4, kv=2, sq=9, skv=11, d=24, dv=16)


# Queries without keys ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_a_query_without_keys_gives_zero_lse_minus_inf_and_gradients_zero(run, kind):
    args = inputs()
    keep = np.zeros((1, 1, 8, 8), bool)
    keep[..., :4, :4] = True
    mask = jnp.asarray(keep if kind == "bool" else np.where(keep, 0, -np.inf), kind)
    (out, lse), _, by = results(*args, attn_mask=mask, attention=run)
    assert not np.asarray(out)[:, :, 4:].any() and (np.asarray(lse)[:, :, 4:] == -np.inf).all()
    for gradient in (by.q, by.k, by.v):
        assert np.isfinite(gradient).all() and not np.asarray(gradient)[:, :, 4:].any()
    assert kind == "bool" or not np.asarray(by.attn_mask)[~keep].any()
    check(*args, attn_mask=mask, attention=run)


@BOTH
@pytest.mark.parametrize("lowest", [np.finfo(np.float32).min, -1e9])
def test_a_finite_mask_never_masks(run, lowest):
    """On every key of a query, and too large to leave anything of the scores: as if the query were 0."""
    q, k, v = inputs()
    none = jnp.zeros((1, 1, 8, 8))
    equal = q.at[:, :, 2].set(0)
    (out, _), cotangents, by = results(q, k, v, attn_mask=none.at[..., 2, :].set(lowest), attention=run)
    cotangents = cotangents[0], jnp.zeros((1, 1, 8))
    (out, _), _, by = results(q, k, v, attn_mask=none.at[..., 2, :].set(lowest), attention=run, cotangents=cotangents)
    (want, _), _, want_by = results(equal, k, v, attn_mask=none, attention=run, cotangents=cotangents)
    for got, expected in ((out, want), (by.v, want_by.v), (by.attn_mask, want_by.attn_mask)):
        assert_within(got, np.float64(expected), 1e-5)
    assert all(np.isfinite(x).all() for x in (by.q, by.k))


@BOTH
def test_two_finite_masks_never_mask(run):
    q, k, v = inputs()
    lowest = jnp.full((1, 1, 8, 8), jnp.finfo("float32").min)
    out = FORWARD[run](q, k, v, attn_mask=lowest, bias=lowest)
    assert_within(out, np.broadcast_to(np.float64(v).mean(2, keepdims=True), v.shape), 1e-6)


def test_the_lowest_number_of_a_wider_numpy_dtype_is_not_an_infinity():
    q, k, v = inputs()
    mask = np.full((8, 8), np.finfo(np.float64).min)
    for attention_ in (partial(blocked_attention, block_q=4, block_kv=3), reference_attention):
        run = jax.jit(lambda *args, run=attention_: run(*args, mask))  # the mask is known, and no JAX array
        assert_within(run(q, k, v), np.broadcast_to(np.float64(v).mean(2, keepdims=True), v.shape), 1e-6)


def test_with_a_sink_a_query_without_keys_has_the_lse_of_the_sink_and_padding_has_none():
    sinks = jnp.asarray([1.0, -jnp.inf, 3.0, -2.0])
    options = dict(sinks=sinks, q_lengths=np.array([6, 9]), kv_lengths=np.array([0, 11]))
    (out, lse), cotangents, _ = results(*inputs(**GQA), **options)
    assert not np.asarray(out)[0].any()
    np.testing.assert_array_equal(lse[0, :, :6], np.broadcast_to(np.asarray(sinks)[:, None], (4, 6)))
    assert (np.asarray(lse)[0, :, 6:] == -np.inf).all()
    check(*inputs(**GQA), **options)
    # what a query without keys is told about its output, which is a constant, reaches no gradient
    told = cotangents[0].at[0, :, 2].set(jnp.nan), cotangents[1]
    silent = told[0].at[0].set(0), told[1]
    assert_same(*(results(*inputs(**GQA), **options, cotangents=x)[2] for x in (told, silent)))


# NaN and Inf ---------------------------------------------------------------------------------------------------------


def hidden():
    """Calls with slots that nobody sees: name -> (options, key slots of example 0, query slots of example 0)."""
    mask = np.ones((2, 1, 9, 11), bool)
    mask[0, ..., [3, 10]] = False
    mask[0, :, 5] = False
    added = jnp.asarray(np.where(mask, 0.5, -np.inf), "float32")
    ids = np.zeros((2, 9), int), np.zeros((2, 11), int)
    ids[0][0, 4:6], ids[1][0, 6:9] = -1, -1
    lengths = dict(q_lengths=np.array([5, 9]), kv_lengths=np.array([7, 11]))
    return {
        "bool": (dict(attn_mask=jnp.asarray(mask)), [3, 10], [5]),
        "additive": (dict(attn_mask=added, sinks=jnp.zeros(4)), [3, 10], []),
        "lengths": (dict(**lengths, sinks=jnp.zeros(4)), [7, 10], [5, 8]),
        "causal": (dict(is_causal=True, causal_offset=-2), [7, 8, 9, 10], [0, 1]),
        "segments": (dict(q_segment_ids=ids[0], kv_segment_ids=ids[1]), [6, 8], [4, 5]),
    }


@ODD
@pytest.mark.parametrize("name", ["bool", "additive", "lengths", "causal", "segments"])
def test_what_nobody_sees_may_hold_anything(name, odd):
    """In q, k, v and in the output's cotangent: not a bit of any result differs."""
    options, keys, queries = hidden()[name]
    q, k, v = inputs(**GQA)
    d_out, d_lse = cotangents_of(q, k, v)
    clean = results(q, k, v, cotangents=(d_out, d_lse), **options)
    q, k, v, d_out = (
        x.at[0, :, jnp.asarray(at, int)].set(odd) for x, at in ((q, queries), (k, keys), (v, keys), (d_out, queries))
    )
    dirty = results(q, k, v, cotangents=(d_out, d_lse), **options)
    assert_same(dirty[::2], clean[::2])


@ODD
@BOTH
def test_what_some_see_reaches_only_them(run, odd):
    """Key 5 of one head is hidden from all but queries 1 and 6. In blocks of 3, the last of 8 keys has it too."""
    q, k, v = inputs(n=2, sq=8, peak=1.0)
    mask = jnp.ones((1, 1, 8, 8), bool).at[..., 5].set(False).at[..., jnp.array([1, 6]), 5].set(True)
    run = partial(results, attn_mask=mask, attention=run)
    sees = np.array([1, 6])

    def others(x):
        """All but queries 1 and 6 of head 0."""
        return np.delete(x[:, 0], sees, 1), x[:, 1]

    (want, _), _, want_by = run(q, k, v)
    (out, _), _, by = run(q, k.at[0, 0, 5].set(odd), v)
    assert_same((others(out), others(by.q)), (others(want), others(want_by.q)))
    assert_same((by.k[:, 1], by.v[:, 1]), (want_by.k[:, 1], want_by.v[:, 1]))
    assert not np.isfinite(by.q[0, 0, sees]).any()
    (out, _), _, by = run(q, k, v.at[0, 0, 5, 3].set(odd))
    np.testing.assert_array_equal(out[0, 0, sees, 3], odd)
    assert_same(np.delete(out, 3, 3), np.delete(want, 3, 3))
    assert_same((others(out), others(by.q), by.v), (others(want), others(want_by.q), want_by.v))


def test_a_value_that_all_see_is_not_hidden():
    q, k, v = inputs(sq=8, peak=1.0)
    got = np.asarray(blocked(q, k, v.at[0, 0, 5, 2].set(jnp.nan).at[0, 0, 7, 4].set(jnp.inf)))
    assert np.isnan(got[..., 2]).all() and (got[..., 4] == np.inf).all()
    assert np.isfinite(np.delete(got, (2, 4), axis=3)).all()


@pytest.mark.parametrize("mask", [None, jnp.ones((8, 8), bool)], ids=["whole", "masked"])
@BOTH
def test_a_value_of_inf_with_a_weight_of_zero_gives_nan(run, mask):
    q, k, v = jnp.full((1, 1, 8, 8), 20.0), jnp.full((1, 1, 8, 8), 20.0).at[0, 0, 2].set(-20.0), jnp.ones((1, 1, 8, 8))
    out = FORWARD[run](q, k, v.at[0, 0, 2, 1].set(jnp.inf), attn_mask=mask)
    assert np.isnan(out[..., 1]).all()
    np.testing.assert_allclose(np.delete(out, 1, 3), 1, rtol=1e-6)


# Empty parts and merge -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [dict(sq=0), dict(skv=0), dict(b=0)], ids=str)
def test_an_empty_problem_gives_zeros(sizes):
    size = dict(b=2, n=2, sq=3, skv=5, d=4, dv=6) | sizes
    q, k, v = (
        jnp.ones((size["b"], size["n"], size[s], size[d])) for s, d in (("sq", "d"), ("skv", "d"), ("skv", "dv"))
    )
    for run in (blocked_attention, reference_attention):
        (out, lse), _, by = results(q, k, v, is_causal=True, attention=run)
        assert out.shape == (*q.shape[:3], 6) and not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()
        assert not any(np.asarray(x).any() for x in by[:3])
    (_, lse), _, _ = results(q, k, v, sinks=jnp.asarray([1.0, 2.0]))
    assert size["skv"] or (np.asarray(lse) == np.array([1.0, 2.0])[:, None]).all()


def test_values_without_columns_leave_the_lse():
    q, k, v = inputs(**GQA)
    _, want = attention(q, k, v)
    for run in (blocked, jax.jit(reference_attention, static_argnames="return_lse")):
        out, lse = run(q, k, v[..., :0], return_lse=True)
        assert out.shape == (2, 4, 9, 0)
        assert_within(lse, want, rounding(q, k, v)[0])


@pytest.mark.parametrize("low", [0.0, -1000.0, 1000.0])
def test_an_empty_part_counts_nothing_in_a_merge(low):
    empty = jnp.full((1, 2, 64), jnp.nan), jnp.full((1, 2), -jnp.inf)
    some = jnp.arange(128.0).reshape(1, 2, 64), jnp.asarray([[low, low + 1]])
    run = jax.jit(merge)
    for pair in ((some, empty), (empty, some), (empty, some, empty)):
        assert_same(run(*pair), some)
    zero = jnp.zeros((1, 2, 64)), empty[1]
    assert_same(run(empty, empty), zero)
    assert_same(run(zero, zero), zero)

    def total(ours, theirs):
        return sum(jnp.where(x == -jnp.inf, 0, x).sum() for x in merge(ours, theirs))

    ours, theirs = jax.jit(jax.grad(total, argnums=(0, 1)))(some, empty)
    assert_same((ours, theirs), ((jnp.ones((1, 2, 64)), jnp.ones((1, 2))), (0 * zero[0], 0 * some[1])))


def test_parts_of_the_keys_merge_to_the_whole():
    """With the sink in one of them, one of them empty for some; in the gradient too."""
    heads = dict(layout="SBH", q_heads=4, kv_heads=2)
    args, sinks, lengths = inputs(**GQA, layout="SBH"), jnp.arange(4.0), np.array([11, 4])

    def split(q, k, v, sinks):
        parts = []
        for first, end in ((0, 5), (5, 11)):
            here = dict(kv_lengths=np.clip(lengths - first, 0, end - first), sinks=sinks if first == 5 else None)
            parts.append(blocked(q, k[first:end], v[first:end], return_lse=True, **heads, **here))
        return merge(*parts)

    whole, cotangents, by = results(*args, sinks=sinks, kv_lengths=lengths, **heads)

    @jax.jit
    def run(args, cotangents):
        got, pull = jax.vjp(split, *args)
        return *got, *pull(cotangents)

    logit = 4 * rounding(*args, sinks=sinks, q_heads=4, kv_heads=2)[0]
    for x, y in zip(run((*args, sinks), cotangents), (*whole, *by[:3], by.sinks), strict=True):
        assert_within(x, np.float64(y), logit * (1 + largest(y)))


@pytest.mark.parametrize(
    "parts, message",
    [
        ([], r"merge: expected at least one pair \(out, lse\), got none"),
        ([((2, 3, 4), (2, 4))], "merge: expected an lse of out's shape without its last axis, got out"),
        ([((2, 3, 4), (2, 3)), ((2, 1, 4), (2, 1))], "merge: expected parts of one shape, got out"),
    ],
)
def test_a_wrong_part_is_named(parts, message):
    with pytest.raises(ValueError, match=message):
        merge(*[(jnp.zeros(out), jnp.zeros(lse)) for out, lse in parts])


# Half precision ------------------------------------------------------------------------------------------------------


@BOTH
def test_half_precision_does_not_overflow(run):
    """|q k| reaches 6.4e4 before the scale, near the largest float16 (65504) and beyond it for some pairs."""
    rng = np.random.default_rng(5)
    q, k = (jnp.asarray(rng.choice([-1.0, 1.0], (1, 1, 8, 192)) * 18.5, "float16") for _ in range(2))
    k = k.at[0, 0, 3].set(q[0, 0, 2]).at[0, 0, 5].set(-q[0, 0, 4])
    v = jnp.asarray(rng.normal(size=(1, 1, 8, 8)), "float16")
    assert abs(float(q[0, 0, 2].astype(float) @ k[0, 0, 3].astype(float))) > 65504
    check(q, k, v, attention=run)


def test_large_logits_of_bfloat16_are_finite():
    check(*inputs(n=2, sq=16, d=256, dtype="bfloat16", peak=1000.0))


@pytest.mark.parametrize("p_dtype", [None, pytest.param("float32", marks=pytest.mark.slow)])
def test_a_long_sum_of_float16_neither_overflows_nor_vanishes(p_dtype):
    """65537 keys: their weights add up beyond the largest float16, each is below its smallest normal number."""
    q, k = (jnp.zeros((1, 1, length, 4), "float16") for length in (1, 65537))
    (out, _), _, by = results(q, k, jnp.ones_like(k), blocks=(1, 4096), p_dtype=p_dtype, cotangents=(
        jnp.ones((1, 1, 1, 4), "float16"), jnp.zeros((1, 1, 1))))  # fmt: skip
    np.testing.assert_array_equal(out, 1)
    assert_within(by.v, np.full(k.shape, 1 / 65537), 2.0**-24)


def test_many_small_weights_of_float16_are_not_lost():
    """One score of 0, 4095 of -10: weights of 4.5e-5, below the smallest normal float16, 0.16 of the sum together."""
    k = jnp.full((1, 1, 4096, 1), -10.0, "float16").at[0, 0, 0].set(0)
    v = jnp.ones((1, 1, 4096, 1), "float16").at[0, 0, 0].set(0)
    out = jitted(jnp.ones((1, 1, 1, 1), "float16"), k, v, scale=1.0, block_q=1, block_kv=512)
    tail = 4095 * np.exp(-10.0)
    assert float(out[0, 0, 0, 0]) == pytest.approx(tail / (1 + tail), rel=2e-3)


# Sizes and layouts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, options",
    [
        pytest.param(dict(n=2, sq=5, d=192, dv=128), dict(is_causal=True), marks=pytest.mark.slow),
        (dict(b=2, n=4, kv=1, sq=1, skv=36, d=32, dv=24), {}),
        pytest.param(dict(sq=16, skv=300, d=59, dtype="float16"), dict(window=(40, 0)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_head_sizes_may_be_any_and_differ(size, options):
    check(*inputs(**size), blocks=(8, 64), **options)


def test_the_scale_by_default_is_that_of_the_head_size_of_q():
    q, k, v = inputs(d=63, dv=24, peak=1.0)
    assert_within(blocked(q, k, v), np.float64(blocked(q, k, v, scale=1 / np.sqrt(63))), 1e-5)
    for scale in (3, np.float64(3), jnp.asarray(3.0)):
        assert_within(blocked(q, k, v, scale=scale), attention(q, k, v, scale=3)[0], 10 * rounding(q, k, v, scale=3)[0])


def test_a_layout_is_the_one_that_is_declared_and_a_view_is_as_good_as_a_copy():
    """8 heads and 8 queries, whose axes nobody can guess; q, k, v are slices of one packed array, not contiguous."""
    packed = np.random.default_rng(0).normal(size=(2, 8, 8, 3, 16)).astype(np.float32)
    q, k, v = (packed[:, :, :, i] for i in range(3))
    assert not q.flags.c_contiguous
    as_bsnd, as_bnsd = (np.asarray(blocked(q, k, v, layout=x, is_causal=True)) for x in ("BSND", "BNSD"))
    turned = blocked(*(x.swapaxes(1, 2) for x in (q, k, v)), is_causal=True)
    assert_same(as_bsnd, turned.swapaxes(1, 2))
    assert not np.allclose(as_bsnd, as_bnsd)
    flat = [np.ascontiguousarray(x).reshape(2, 8, 128) for x in (q, k, v)]
    assert_same(blocked(*flat, layout="BSH", q_heads=8, is_causal=True), as_bsnd.reshape(2, 8, 128))
    sbh = blocked(*(x.swapaxes(0, 1) for x in flat), layout="SBH", q_heads=8, is_causal=True)
    assert_same(sbh, as_bsnd.reshape(2, 8, 128).swapaxes(0, 1))
    tokens = [x.reshape(16, 8, 16) for x in (q, k, v)]
    tnd = blocked(*tokens, layout="TND", cu_q_lengths=np.array([0, 8, 16]), is_causal=True)
    assert_within(tnd, np.float64(as_bsnd).reshape(16, 8, 16), 1e-5)
    assert_same(blocked(*(jnp.asarray(x.copy()) for x in (q, k, v)), layout="BSND", is_causal=True), as_bsnd)


def test_a_packed_qkv_with_one_kv_head():
    qkv = jnp.asarray(np.random.default_rng(1).normal(size=(2, 9, (4 + 1 + 1) * 16)), "float32")
    q, k, v = jnp.split(qkv, [64, 80], axis=2)
    check(q, k, v, layout="BSH", q_heads=4, kv_heads=1)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float64", marks=pytest.mark.slow)])
def test_with_x64_a_call_traces_and_keeps_its_dtype(dtype):
    with jax.enable_x64(True):
        args = inputs(b=2, n=2, sq=29, d=16, dtype=dtype)
        options = dict(is_causal=True, window=(20, 3), kv_lengths=np.array([29, 7]))
        for scale in (0.3, np.float64(0.3)):
            out, lse = blocked(*args, scale=scale, return_lse=True, **options)
            assert out.dtype == dtype and lse.dtype == jnp.promote_types(dtype, "float32")
        check(*args, scale=np.float64(0.3), **options)


# Gradients of biases, and of nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [(9, 11), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((2, 1, 1, 11), (1, 4, 9, 1)))],
    ids=str,
)
def test_the_gradient_of_a_bias_is_summed_over_the_axes_that_it_shares(shape):
    args = inputs(**GQA)
    by = results(*args, bias=jnp.zeros((2, 4, 9, 11)))[2]
    whole = np.float64(by.bias)
    assert largest(whole) > 0.1
    got = results(*args, bias=jnp.zeros(shape))[2].bias
    shared = tuple(axis for axis in range(4) if (1, 1, *shape)[-4:][axis] == 1)
    want, size = (x.sum(shared, keepdims=True).reshape(shape) for x in (whole, abs(whole)))
    assert_within(got, want, 1e-5 * size)


def test_an_additive_mask_has_the_gradient_of_a_bias():
    args, mask = inputs(**GQA), mask_of("float32", (1, 4, 9, 11))
    assert largest(results(*args, attn_mask=mask)[2].attn_mask) > 0.1
    check(*args, attn_mask=mask)


def test_zero_in_zero_out():
    options = dict(is_causal=True, sinks=jnp.arange(4.0), bias=mask_of("float32", (1, 4, 9, 11)))
    zeros = jax.tree.map(jnp.zeros_like, cotangents_of(*inputs(**GQA)))
    by = results(*inputs(**GQA), cotangents=zeros, **options)[2]
    assert not any(np.asarray(x).any() for x in by if x is not None)
