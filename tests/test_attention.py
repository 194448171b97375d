"""Blocked attention against the plain one, and both against sums written out in numpy float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from npumodel.attention import blocked_attention, check_attention, reference_attention
from npumodel.attention.masks import Visibility
from npumodel.workload import AttentionShape

blocked = jax.jit(blocked_attention, static_argnames=("is_causal", "block_q", "block_kv"))
small = partial(blocked, block_q=4, block_kv=3)
eager = partial(blocked_attention, block_q=4, block_kv=3)


def by_hand(q, k, v, mask: Any = None, causal=False, scale=None):
    """One query at a time, in float64, over a list of the keys that it sees; 0 where it sees none."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    (batch, heads, q_len, dim), (_, kv_heads, kv_len, _) = q.shape, k.shape
    scale = 1 / np.sqrt(dim) if scale is None else scale
    mask = True if mask is None else np.asarray(mask)
    mask = np.broadcast_to(mask, (batch, heads, q_len, kv_len))
    out = np.zeros((batch, heads, q_len, v.shape[3]))
    for b, n, i in np.ndindex(batch, heads, q_len):
        kv = n // (heads // kv_heads)
        row = mask[b, n, i]
        sees = row if row.dtype == bool else row != -np.inf
        keys = np.flatnonzero(sees & (np.arange(kv_len) - (kv_len - q_len) <= i) if causal else sees)
        if len(keys):
            s = scale * (k[b, kv, keys] @ q[b, n, i]) + (0 if row.dtype == bool else row[keys].astype(np.float64))
            w = np.exp(s - s.max())
            out[b, n, i] = w @ v[b, kv, keys] / w.sum()
    return out


def inputs(b=1, n=1, kv=None, sq=8, skv=None, d=8, dv=None, dtype="float32", peak=6.0, seed=0) -> tuple[Any, Any, Any]:
    """q, k, v whose scaled scores have standard deviation `peak`: a softmax close to a choice, not close to a mean."""
    rng = np.random.default_rng(seed)
    kv, skv, dv = kv or n, skv or sq, dv or d
    shapes = (b, n, sq, d), (b, kv, skv, d), (b, kv, skv, dv)
    q, k, v = (rng.normal(size=s) for s in shapes)
    return jnp.asarray(peak * q, dtype), jnp.asarray(k, dtype), jnp.asarray(v, dtype)


def tolerance(q, k, v, wide="float32"):
    """Rounding of the output, and of scores of size |s| in the wide dtype: e^(s (1 + eps)) is off by |s| eps."""
    q, k, v = (np.nan_to_num(np.asarray(x).astype(np.float64)) for x in (q, k, v))
    largest = np.abs(q).max() * np.abs(k).max() * np.sqrt(q.shape[3])
    return np.abs(v).max() * (largest + 8) * jnp.finfo(wide).eps


def assert_close(got, want, args, what=""):
    eps = float(jnp.finfo(got.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), want, rtol=eps, atol=tolerance(*args), err_msg=what, strict=True
    )


def mask_of(kind, shape, seed=1):
    """About a third masked, and the first query (or all) of the last head without any key where the shape has one."""
    keep = np.random.default_rng(seed).random(shape) > 0.35
    keep[-1, -1, 0, :] &= shape[2] == 1
    if kind == "bool":
        return jnp.asarray(keep)
    bias = np.random.default_rng(seed + 1).normal(size=shape)
    return jnp.asarray(np.where(keep, bias, -np.inf), kind)


PLAIN = [
    # shape, block_q, block_kv, causal, mask kind, mask shape
    (dict(b=2, n=2, sq=8, d=8), 4, 4, False, None, None),
    (dict(b=2, n=2, sq=8, d=8), 64, 64, True, None, None),
    (dict(n=9, kv=3, sq=5, skv=7, d=59, dv=24), 2, 3, True, "bool", (1, 9, 5, 7)),
    (dict(b=2, n=4, kv=1, sq=1, skv=17, d=80), 1, 5, False, "float32", (2, 1, 1, 17)),
    (dict(sq=5, skv=2), 2, 2, True, None, None),
    (dict(sq=2, skv=5), 2, 2, True, None, None),
]
MORE = [
    (dict(b=2, n=2, sq=16, skv=24, d=8), 16, 8, True, None, None),
    (dict(sq=17, skv=1, d=63), 8, 8, False, None, None),
    (dict(sq=1, skv=17, d=63), 8, 8, True, None, None),
    (dict(b=3, n=4, sq=49, d=32), 32, 16, False, "bool", (3, 1, 1, 49)),
    (dict(b=2, n=6, kv=2, sq=11, skv=13, d=16), 4, 5, False, "float32", (1, 6, 11, 1)),
    (dict(b=2, n=6, kv=2, sq=11, skv=13, d=16), 4, 5, True, "bfloat16", (2, 6, 1, 13)),
    (dict(b=2, n=4, kv=1, sq=33, d=16, dv=8), 7, 31, True, "bool", (1, 1, 33, 33)),
]


def name_of(case):
    shape, block_q, block_kv, causal, kind, mask = case
    sizes = "-".join(f"{key}{value}" for key, value in shape.items())
    return f"{sizes}-{block_q}x{block_kv}" + "-causal" * causal + (f"-{kind}{mask}" if kind else "").replace(" ", "")


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_reference_is_the_sum_written_out(case):
    shape, _, _, causal, kind, mask_shape = case
    args = inputs(**shape)
    mask = mask_of(kind, mask_shape) if kind else None
    assert_close(reference_attention(*args, mask, causal), by_hand(*args, mask, causal), args)


@pytest.mark.parametrize("case", PLAIN + MORE, ids=name_of)
def test_blocked_is_the_sum_written_out(case):
    shape, block_q, block_kv, causal, kind, mask_shape = case
    args = inputs(**shape)
    mask = mask_of(kind, mask_shape) if kind else None
    got = blocked(*args, mask, is_causal=causal, block_q=block_q, block_kv=block_kv)
    assert_close(got, by_hand(*args, mask, causal), args)


@pytest.mark.parametrize("causal", [False, True])
def test_blocked_is_the_reference_at_an_odd_length(causal):
    args = inputs(sq=4097, d=8)
    got = blocked(*args, is_causal=causal, block_q=512, block_kv=512)
    assert_close(got, np.asarray(reference_attention(*args, is_causal=causal)).astype(np.float64), args)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", [None, "bool", "float16"])
def test_half_precision_rounds_only_its_output(dtype, kind):
    args = inputs(n=4, kv=2, sq=21, skv=34, d=16, dtype=dtype)
    mask = mask_of(kind, (1, 1, 21, 34)) if kind else None
    want = by_hand(*args, mask, causal=True)
    got = blocked(*args, mask, is_causal=True, block_q=8, block_kv=16)
    assert got.dtype == dtype
    assert_close(got, want, args)
    if kind is None:
        assert_close(reference_attention(*args, is_causal=True), want, args)


def test_every_broadcast_of_a_mask_is_the_full_mask():
    args = inputs(b=2, n=4, kv=2, sq=4, skv=6, peak=2.0)
    full = (2, 4, 4, 6)
    whole = partial(small, *args)
    for axes in (0b0001, 0b0110, 0b1000):  # which of B, N, Sq, Skv are not shared
        shape = tuple(size if axes >> (3 - i) & 1 else 1 for i, size in enumerate(full))
        mask = np.random.default_rng(3).random(shape) > 0.3
        np.testing.assert_array_equal(whole(mask), whole(np.broadcast_to(mask, full)), err_msg=f"{shape}")
    pair = np.random.default_rng(4).random((4, 6)) > 0.3
    np.testing.assert_array_equal(whole(pair), whole(np.broadcast_to(pair, full)))
    np.testing.assert_array_equal(reference_attention(*args, pair), reference_attention(*args, pair[None, None]))


BOTH = pytest.mark.parametrize("attention", [small, reference_attention], ids=["blocked", "reference"])


@BOTH
@pytest.mark.parametrize("kind", ["bool", "float32", "float64"])
def test_a_query_without_keys_gives_zero(attention, kind):
    args = inputs()
    keep = np.zeros((1, 1, 8, 8), bool)
    keep[..., :4, :4] = True
    mask = keep if kind == "bool" else np.where(keep, 0, -np.inf).astype(kind)
    got = np.asarray(attention(*args, mask))
    assert not got[:, :, 4:].any()
    q, k, v = (x[:, :, :4] for x in args)
    assert_close(got[:, :, :4], by_hand(q, k, v), (q, k, v))


@pytest.mark.parametrize("attention", [eager, reference_attention], ids=["blocked", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_finite_mask_never_masks(attention, dtype):
    """finfo.min on a whole row is equal scores, also where it is the finfo.min of a wider NumPy dtype."""
    q, k, v = inputs()
    mask = np.zeros((1, 1, 8, 8), dtype)
    mask[..., 2, :] = np.finfo(dtype).min
    got = attention(q, k, v, mask)
    np.testing.assert_allclose(got[0, 0, 2], np.mean(v[0, 0], axis=0), rtol=0, atol=tolerance(0 * q, k, v))
    rest = np.arange(8) != 2
    assert_close(np.asarray(got)[:, :, rest], by_hand(q, k, v)[:, :, rest], (q, k, v))


@BOTH
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key", [0, 5])
def test_what_is_masked_does_not_leak(attention, odd, causal, key):
    """One key is masked for all queries but 1 and 6; it, then one column of its value, is not finite."""
    q, k, v = inputs(n=2, sq=8, peak=1.0)
    mask = np.ones((1, 1, 8, 8), bool)
    mask[..., key] = False
    mask[..., [1, 6], key] = True
    sees = np.array([6] if causal and key == 5 else [1, 6])
    clean = np.setdiff1d(np.arange(8), sees)
    want = by_hand(q, k, v, mask, causal)
    in_key = np.asarray(attention(q, k.at[0, 1, key].set(odd), v, mask, is_causal=causal))
    assert_close(in_key[:, :, clean], want[:, :, clean], (q, k, v))
    assert_close(in_key[:, :1], want[:, :1], (q, k, v))
    in_value = np.asarray(attention(q, k, v.at[0, 1, key, 3].set(odd), mask, is_causal=causal))
    np.testing.assert_array_equal(in_value[0, 1, sees, 3], odd)
    assert_close(np.delete(in_value, 3, 3)[:, :, sees], np.delete(want, 3, 3)[:, :, sees], (q, k, v))
    assert_close(in_value[:, :, clean], want[:, :, clean], (q, k, v))


@BOTH
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_a_key_masked_for_all_may_hold_anything(attention, kind):
    q, k, v = inputs(sq=8)
    keep = np.arange(8)[None, None, None] < 6
    mask = keep if kind == "bool" else np.where(keep, 0, -np.inf).astype(kind)
    got = attention(q, k.at[:, :, 6:].set(jnp.nan), v.at[:, :, 6].set(jnp.inf).at[:, :, 7].set(jnp.nan), mask)
    assert_close(got, by_hand(q, k[:, :, :6], v[:, :, :6]), (q, k, v))


def test_a_value_that_all_see_is_not_hidden():
    q, k, v = inputs(sq=8, peak=1.0)  # 8 keys in blocks of 3: the last block reaches back over key 5
    got = np.asarray(small(q, k, v.at[0, 0, 5, 2].set(jnp.nan).at[0, 0, 7, 4].set(jnp.inf)))
    assert np.isnan(got[..., 2]).all() and (got[..., 4] == np.inf).all()
    assert np.isfinite(np.delete(got, (2, 4), axis=3)).all()


@BOTH
def test_a_causal_query_sees_no_later_key(attention):
    q, k, v = inputs(n=2, sq=7, skv=9)
    before = np.asarray(attention(q, k, v, is_causal=True))
    for last in (3, 6):  # the last key of query i is i + 2
        late = (jnp.arange(9) > last + 2)[None, None, :, None]
        after = np.asarray(attention(q, jnp.where(late, 9.0, k), jnp.where(late, jnp.nan, v), is_causal=True))
        np.testing.assert_array_equal(after[:, :, : last + 1], before[:, :, : last + 1])
    changed = np.asarray(attention(q, k, v.at[:, :, 8].add(100.0), is_causal=True))
    assert (changed[:, :, 6] != before[:, :, 6]).any()


@pytest.mark.parametrize("q_len, kv_len", [(9, 9), (3, 11), (11, 3), (1, 7)])
def test_causal_visits_the_blocks_that_are_seen_and_masks_those_seen_in_part(q_len, kv_len):
    sees = Visibility(None, True, q_len, kv_len)
    allowed = np.arange(kv_len)[None] <= np.arange(q_len)[:, None] + kv_len - q_len
    for block_q, block_kv in ((1, 1), (1, 3), (min(2, q_len), 2), (min(5, q_len), 3), (q_len, kv_len)):
        for row in {*range(0, q_len - block_q, block_q), q_len - block_q}:
            rows = allowed[row : row + block_q]
            blocks = [rows[:, at : at + block_kv] for at in range(0, kv_len, block_kv)]
            whole = sum(block.all() and block.shape[1] == block_kv for block in blocks)
            full, count = sees.steps(row, block_q, block_kv)
            assert (int(full), int(count)) == (whole, sum(block.any() for block in blocks))


@BOTH
def test_half_precision_does_not_overflow(attention):
    """|q k| reaches 6.4e4 before the scale, near the largest float16 (65504) and beyond it for some pairs."""
    rng = np.random.default_rng(5)
    q, k = (jnp.asarray(rng.choice([-1.0, 1.0], (1, 1, 8, 192)) * 18.5, "float16") for _ in range(2))
    k = k.at[0, 0, 3].set(q[0, 0, 2]).at[0, 0, 5].set(-q[0, 0, 4])
    v = jnp.asarray(rng.normal(size=(1, 1, 8, 8)), "float16")
    assert abs(float(q[0, 0, 2].astype(float) @ k[0, 0, 3].astype(float))) > 65504
    assert_close(attention(q, k, v), by_hand(q, k, v), (q, k, v))


def test_a_long_sum_of_float16_does_not_overflow():
    q, k = (jnp.zeros((1, 1, length, 4), "float16") for length in (1, 65537))
    np.testing.assert_array_equal(blocked(q, k, jnp.ones_like(k), block_q=1, block_kv=4096), 1)


@pytest.mark.parametrize("attention", [small, eager, reference_attention], ids=["traced", "blocked", "reference"])
def test_the_scale_may_be_any_number(attention):
    args = inputs(peak=1.0)
    want = by_hand(*args, scale=3.0)
    for scale in (3, np.float64(3)) if attention is not eager else (3.0,):
        assert_close(attention(*args, scale=scale), want, args)


@pytest.mark.parametrize("sizes", [dict(sq=0), dict(skv=0), dict(b=0), dict(dv=0)], ids=str)
def test_an_empty_problem_gives_zeros(sizes):
    size = dict(b=2, n=2, sq=3, skv=5, d=4, dv=6) | sizes
    q, k, v = (
        jnp.ones((size["b"], size["n"], size[s], size[d])) for s, d in (("sq", "d"), ("skv", "d"), ("skv", "dv"))
    )
    assert check_attention(q, k, v) is None
    for got in (small(q, k, v, is_causal=True), reference_attention(q, k, v, is_causal=True)):
        np.testing.assert_array_equal(got, 0)
        assert got.shape == (*q.shape[:3], v.shape[3])


def test_vmap_over_a_batch_or_a_mask_alone():
    q, k, v = inputs(b=3, n=2, sq=5)
    masks = np.random.default_rng(6).random((3, 1, 1, 5, 5)) > 0.3
    masks[1, ..., 0, :] = False
    one = partial(blocked_attention, block_q=3, block_kv=2)
    got = jax.jit(jax.vmap(one, in_axes=(None, None, None, 0)))(q, k, v, masks)
    for mask, part in zip(masks, got, strict=True):
        assert_close(part, by_hand(q, k, v, mask), (q, k, v))
    odd = v.at[1, :, 3].set(jnp.nan)  # one example of the batch takes the rare path
    masks[1, ..., 3] = False
    got = jax.vmap(one)(q[:, None], k[:, None], odd[:, None], masks)[:, 0]
    assert_close(got, by_hand(q, k, v, masks[:, 0]), (q, k, v))


def test_scan_in_a_jit():
    q, k, v = inputs(n=2, sq=5, peak=1.0)

    @jax.jit
    def layers(x):
        step = partial(blocked_attention, is_causal=True, block_q=3, block_kv=2)
        return jax.lax.scan(lambda c, _: (step(c, k, v), None), x, length=2)[0]

    assert_close(layers(q), by_hand(by_hand(q, k, v, causal=True), k, v, causal=True), (q, k, v))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_with_x64(dtype):
    with jax.enable_x64(True):
        args = inputs(n=2, sq=7, skv=9, dtype=dtype)
        mask = np.where(np.random.default_rng(7).random((1, 1, 7, 9)) > 0.3, 0.5, -np.inf)
        mask[..., 4, :] = np.finfo(np.float64).min
        want = by_hand(*args, np.where(mask < -1e300, np.where(mask == -np.inf, mask, -1e38), mask), True, scale=0.5)
        for got in (
            small(*args, jnp.asarray(mask), is_causal=True, scale=np.float64(0.5)),
            reference_attention(*args, jnp.asarray(mask), is_causal=True, scale=0.5),
        ):
            assert got.dtype == dtype
            atol = tolerance(*args, wide="float64" if dtype == "float64" else "float32")
            rtol = float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(np.asarray(got).astype(np.float64), want, rtol=rtol, atol=atol)
        shape = check_attention(*args)
        assert shape is not None and shape.dtype == ("float32" if dtype == "float64" else dtype)


def test_no_rank_promotion():
    args = inputs(b=2, n=4, kv=2, sq=5)
    with jax.numpy_rank_promotion("raise"):
        for mask in (None, jnp.ones((5, 5), bool), jnp.zeros((2, 1, 1, 5))):
            for attention in (eager, reference_attention):
                jax.eval_shape(partial(attention, is_causal=True), *args, mask)


@pytest.mark.parametrize("mask", [None, (1, 1, 0, 0)], ids=["causal", "full"])
def test_memory_grows_with_the_length_not_its_square(mask):
    def temporaries(length):
        x = jnp.zeros((1, 2, length, 16))
        tensor = mask and jnp.zeros([size or length for size in mask])
        run = jax.jit(partial(blocked_attention, is_causal=mask is None, block_q=64, block_kv=64))
        analysis = run.lower(x, x, x, tensor).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    length, output = 4000, 2 * 4000 * 16 * 4
    assert temporaries(length) < 2 * output + 10 * (2 * 64 * 64 * 4)  # the scores of one head: 64e6 bytes


def test_the_shape_of_a_call():
    q, k, v = inputs(b=2, n=4, kv=2, sq=3, skv=5, d=8, dv=6, dtype="bfloat16")
    want = AttentionShape(2, 4, 3, 8, kv_heads=2, kv_len=5, v_head_dim=6, dtype="bfloat16", causal=True, mask="bool")
    assert check_attention(q, k, v, np.ones((3, 5), bool), True) == want
    numpy = check_attention(np.asarray(q), np.asarray(k), np.asarray(v), np.ones((2, 1, 1, 5), np.float16))
    assert numpy is not None and numpy.mask == "additive"


X = np.zeros((2, 4, 8, 16), np.float32)


def test_numpy_arrays_are_accepted():
    np.testing.assert_array_equal(eager(X, X, X + 2), X + 2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=[[1.0]]), "q: expected a JAX or NumPy array, got list; convert"),
        (dict(v=None), "v: expected a JAX or NumPy array, got NoneType"),
        (dict(k=X[0]), r"k: expected 4 axes, got shape \(4, 8, 16\); the layout is BNSD"),
        (dict(k=X.astype(np.float16)), "q, k, v: expected one dtype, got float32, float16, float32; cast"),
        (dict(q=X.astype(int), k=X.astype(int), v=X.astype(int)), "expected one of float32, .* got int64; cast"),
        (dict(q=np.float64(X), k=np.float64(X), v=np.float64(X)), "got float64; cast, or set jax_enable_x64"),
        (dict(k=X[..., :8]), r"k: expected the head_dim of q \(at least 1\), got q .* the layout is BNSD"),
        (dict(v=X[:, :, :4]), "v: expected batch, heads and sequence of k .* got"),
        (dict(k=X[:1], v=X[:1]), "k: expected the batch of q .* got"),
        (dict(k=X[:, :3], v=X[:, :3]), "q: expected a number of heads that is a multiple of the 3 of k, got 4"),
        (dict(q=X[:, :, :1].swapaxes(1, 2), k=X.swapaxes(1, 2), v=X.swapaxes(1, 2)), "from BSND use x.transpose"),
        (dict(attn_mask=[[True]]), "attn_mask: expected a JAX or NumPy array, got list"),
        (dict(attn_mask=np.ones((8, 8), int)), r"attn_mask: expected bool .* got int64; use mask.astype\(bool\)"),
        (dict(attn_mask=np.ones((1, 8), bool)), r"attn_mask: expected a shape .* exactly \[8, 8\], got \(1, 8\); say"),
        (dict(attn_mask=np.ones((4, 8, 8), bool)), r"broadcasts to \[B=2, N=4, Sq=8, Skv=8\]"),
        (dict(attn_mask=np.ones((2, 2, 8, 8), bool)), r"got \(2, 2, 8, 8\)"),
        (dict(is_causal=jnp.asarray(True)), r"is_causal: expected a Python bool \(static\), got .*; mark it static"),
        (dict(scale="big"), "scale: expected None or one real number, got"),
        (dict(scale=np.ones(4)), r"scale: expected None or one real number, got .* of shape \(4,\); pass a scalar"),
        (dict(scale=1j), "scale: expected None or one real number, got complex"),
        (dict(block_q=0), r"block_q: expected a positive Python integer \(static\), got 0"),
        (dict(block_kv=2.5), r"block_kv: expected a positive Python integer \(static\), got 2.5"),
    ],
)
def test_a_wrong_argument_is_named(change, message):
    call = dict(q=X, k=X, v=X, block_q=4, block_kv=4) | change
    with pytest.raises(ValueError, match=message):
        blocked_attention(**call)
    if not {"block_q", "block_kv"} & set(change):
        del call["block_q"], call["block_kv"]
        for checked in (reference_attention, check_attention):
            with pytest.raises(ValueError, match=message):
                checked(**call)
