"""Which keys a query sees: causal, windows, lengths, masks and packed sequences, as public bug reports broke them."""

from functools import partial

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
    results,
    rounding,
)
from attention_oracle import attention

from npumodel.attention import blocked_attention

blocked = partial(jitted, block_q=4, block_kv=3)
GQA = dict(b=2, n=4, kv=2, sq=9, skv=11, d=24, dv=16)


def keys_seen(q_len, kv_len, **options):
    """Which keys each query has in its mean: equal scores, values one-hot."""
    q, k, v = jnp.zeros((1, 1, q_len, 4)), jnp.ones((1, 1, kv_len, 4)), jnp.eye(kv_len)[None, None]
    return np.asarray(blocked(q, k, v, **options))[0, 0] > 0


# Causal, windows, lengths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes, counts", [((2, 5), [4, 5]), ((5, 2), [0, 0, 0, 1, 2]), ((3, 128), [126, 127, 128])])
def test_causal_is_aligned_bottom_right(sizes, counts):
    q_len, kv_len = sizes
    np.testing.assert_array_equal(keys_seen(*sizes, is_causal=True), np.arange(kv_len) < np.array(counts)[:, None])
    top_left = np.arange(kv_len) <= np.arange(q_len)[:, None]
    np.testing.assert_array_equal(keys_seen(*sizes, is_causal=True, causal_offset=0), top_left)


def test_with_lengths_causal_is_aligned_to_those_of_the_example():
    q, k, v = jnp.zeros((3, 1, 4, 4)), jnp.ones((3, 1, 6, 4)), jnp.broadcast_to(jnp.eye(6), (3, 1, 6, 6))
    lengths = dict(q_lengths=np.array([4, 2, 3]), kv_lengths=np.array([6, 5, 1]))
    seen = (np.asarray(blocked(q, k, v, is_causal=True, **lengths)) > 0).sum(-1)[:, 0]
    np.testing.assert_array_equal(seen, [[3, 4, 5, 6], [4, 5, 0, 0], [0, 0, 1, 0]])


def test_a_causal_query_sees_no_later_key():
    q, k, v = inputs(n=2, sq=7, skv=9)
    run = partial(blocked, is_causal=True)
    before = np.asarray(run(q, k, v))
    for last in (3, 6):  # the last key of query i is i + 2
        late = (jnp.arange(9) > last + 2)[None, None, :, None]
        after = np.asarray(run(q, jnp.where(late, 9.0, k), jnp.where(late, jnp.nan, v)))
        np.testing.assert_array_equal(after[:, :, : last + 1], before[:, :, : last + 1])
    changed = np.asarray(run(q, k, v.at[:, :, 8].add(100.0)))
    assert (changed[:, :, 6] != before[:, :, 6]).any()


@pytest.mark.parametrize("options", [dict(), dict(attn_mask=jnp.ones((20, 24), bool))], ids=["alone", "with a mask"])
def test_a_window_does_not_count_the_place_of_the_query_itself(options):
    place, j = np.arange(20)[:, None] + 4, np.arange(24)
    for left, right in ((3, 0), (0, 3), (2, 1), (0, 0), (31, 0)):
        seen = keys_seen(20, 24, window=(left, right), **options)
        np.testing.assert_array_equal(seen, (place - left <= j) & (j <= place + right))
    for unlimited in ((-1, -1), (-5, 2**31 - 1)):
        np.testing.assert_array_equal(keys_seen(20, 24, window=unlimited, **options), True)


def test_a_window_and_causal_are_both_obeyed():
    place, j = np.arange(20)[:, None] + 4, np.arange(24)
    np.testing.assert_array_equal(keys_seen(20, 24, window=(2, 9), is_causal=True), (place - 2 <= j) & (j <= place))
    np.testing.assert_array_equal(keys_seen(20, 24, window=(None, 0)), j <= place)


def test_a_full_window_is_causal():
    args = inputs(**GQA | dict(sq=100, skv=100))
    run = partial(jitted, block_q=16, block_kv=32)
    want = run(*args, is_causal=True)
    for left in (-1, 100, 99, 2**31 - 1):
        assert_same(run(*args, window=(left, 0)), want)
    assert not np.array_equal(run(*args, window=(31, 0)), run(*args, window=(0, 0)))


def test_lengths_are_obeyed():
    lengths = np.array([24, 125, 53, 28, 77, 96, 13, 114])
    args = inputs(b=8, n=2, sq=3, skv=128, d=16)
    got = jitted(*args, kv_lengths=lengths, block_q=2, block_kv=32)
    for q, k, v, length, part in zip(*args, lengths, got, strict=True):
        short = (q[None], k[None, :, :length], v[None, :, :length])
        assert_within(part[None], attention(*short)[0], largest(v) * rounding(*short)[0])


@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (1, 4, 4, 1), (1, 1, 1, 6), (2, 4, 1, 1), (4, 6)], ids=str)
def test_every_broadcast_of_a_mask_is_the_full_mask(shape):
    args = inputs(b=2, n=4, kv=2, sq=4, skv=6, peak=2.0)
    for seed in range(3):
        mask = np.random.default_rng(seed).random(shape) > 0.3
        assert_same(blocked(*args, mask), blocked(*args, np.broadcast_to(mask, (2, 4, 4, 6))))


def test_a_mask_of_keys_is_obeyed_along_all_of_a_long_cache():
    q, k, v = inputs(n=2, kv=1, sq=1, skv=4096, d=64, dtype="bfloat16")
    run = partial(jitted, block_q=1, block_kv=512)
    for length in (137, 600, 1000, 1500, 3000, 4095):
        short = q, k[:, :, :length], v[:, :, :length]
        got = run(q, k, v, (np.arange(4096) < length)[None, None, None])
        assert_within(got, attention(*short)[0], largest(v) * sum(rounding(*short)))


# Packed sequences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cu, cu_kv, heads, dtype",
    [
        ([0, 1, 1, 2], [0, 3, 3, 8], (9, 3), "float32"),
        pytest.param([0, 0, 9, 16, 16], [0, 20, 33, 40, 64], (4, 1), "float32", marks=pytest.mark.slow),
        pytest.param([0, 15, 15, 30], [0, 10, 20, 30], (2, 2), "bfloat16", marks=pytest.mark.slow),
        ([0, 0, 0], [0, 0, 0], (2, 2), "float32"),
        ([0], [0], (2, 2), "float32"),
    ],
    ids=str,
)
def test_sequences_may_be_empty(cu, cu_kv, heads, dtype):
    """Their keys get exactly no gradient, and so do the tokens after the last; all of a call may be those."""
    sizes = dict(n=heads[0], kv=heads[1], sq=max(cu[-1], 4), skv=max(cu_kv[-1], 5))
    args = inputs(**sizes, d=64, layout="TND", dtype=dtype)
    options = dict(cu_q_lengths=np.array(cu), cu_kv_lengths=np.array(cu_kv), is_causal=True, layout="TND")
    (out, lse), _, by = results(*args, blocks=(8, 16), **options)
    assert not np.asarray(out)[cu[-1] :].any() and (np.asarray(lse)[cu[-1] :] == -np.inf).all()
    lonely = np.ones(sizes["skv"], bool)
    for first, end, first_key, end_key in zip(cu[:-1], cu[1:], cu_kv[:-1], cu_kv[1:], strict=True):
        lonely[first_key:end_key] = first == end
    assert not np.asarray(by.k)[lonely].any() and not np.asarray(by.v)[lonely].any()
    check(*args, blocks=(8, 16), **options)


def test_lengths_may_all_be_zero():
    for q_lengths, kv_lengths in (([0, 0], [0, 0]), ([9, 3], [0, 0]), ([0, 0], [11, 2])):
        lengths = dict(q_lengths=np.array(q_lengths), kv_lengths=np.array(kv_lengths))
        (out, lse), _, by = results(*inputs(**GQA), is_causal=True, **lengths)
        assert not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()
        assert not any(np.asarray(x).any() for x in by[:3])


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
@pytest.mark.parametrize("change", [9.0, np.nan])
def test_segments_do_not_leak(layout, change):
    """Nothing about the first segment, NaN included, changes a bit of the second, nor the other way round."""
    args = inputs(n=2, sq=64, d=8, layout=layout)
    ids = np.repeat([7, 0, -1], [30, 24, 10])
    options = dict(cu_q_lengths=np.array([0, 30, 30, 54])) if layout == "TND" else dict(q_segment_ids=ids[None])
    options |= dict(is_causal=True, layout=layout, blocks=(16, 16))
    tokens = 0 if layout == "TND" else 2
    d_out, d_lse = cotangents_of(*args, layout=layout)
    (out, lse), _, by = results(*args, cotangents=(d_out, d_lse), **options)
    assert all(np.isfinite(x).all() for x in (out, *by[:3]))

    def part(x, of):
        return np.compress(ids == of, np.asarray(x), axis=tokens)

    where = jnp.asarray(ids).reshape(-1, 1, 1) if layout == "TND" else jnp.asarray(ids).reshape(1, 1, -1, 1)
    for changed, other in ((7, 0), (0, 7)):
        moved = [jnp.where(where == changed, change, x) for x in (*args, d_out)]
        (got, got_lse), _, got_by = results(*moved[:3], cotangents=(moved[3], d_lse), **options)
        for x, y in zip((got, got_lse, *got_by[:3]), (out, lse, *by[:3]), strict=True):
            np.testing.assert_array_equal(part(x, other), part(y, other))
        assert not np.array_equal(part(got, changed), part(out, changed))
    for x in (out, *by[:3]):
        assert not part(x, -1).any()


def test_segments_need_not_be_sorted():
    """Segments that alternate: every query has a key of its own at both ends, and in between only each second one."""
    ids = np.arange(11)[None] % 2 + np.zeros((2, 1), int)
    check(*inputs(**GQA), blocks=(3, 4), q_segment_ids=ids[:, :9], kv_segment_ids=ids)


def test_segment_ids_that_are_too_large_are_refused():
    """Ids of int64 that agree in their last 32 bits would become one segment without jax_enable_x64."""
    many = np.repeat([[5, 5 + 2**32]], 4, axis=1)
    with pytest.raises(ValueError, match="q_segment_ids: expected ids that fit in int32, got 5 .. 4294967301"):
        blocked_attention(*inputs(n=2, sq=8), q_segment_ids=many, block_q=4, block_kv=3)


@pytest.mark.slow
def test_packed_sequences_without_a_mask_have_a_softmax():
    args = inputs(n=2, sq=128, d=80, dtype="float16", layout="TND")
    check(*args, blocks=(32, 32), cu_q_lengths=np.array([0, 64, 128]), layout="TND")
