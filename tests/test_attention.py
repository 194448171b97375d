"""Blocked attention is the sum written out: output, LSE and gradients against an oracle in NumPy float64, one query at
a time (`attention_oracle`), over shapes, layouts, dtypes, masks and tiles.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import assert_within, check, inputs, jitted, largest, mask_of, results, rounding
from attention_oracle import attention, gradient
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from npumodel.attention import Arguments, blocked_attention, reference_attention
from npumodel.attention.call import prepared
from npumodel.attention.dropout import kept

blocked = partial(jitted, block_q=4, block_kv=3)
random = partial(settings, derandomize=True, deadline=None, phases=[Phase.generate])  # a smaller example: a compilation

# Random data ---------------------------------------------------------------------------------------------------------


def drawn(draw, kind, size):
    """Options of one kind for a call of this size. All are numbers that jit traces, so none compiles again."""
    b, sq, skv = (size[name] for name in ("b", "sq", "skv"))

    def ints(low, high, *shape):
        flat = draw(st.lists(st.integers(low, high), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return np.array(flat, np.int32).reshape(shape)

    def cumulative(most):
        return np.concatenate([[0], np.sort(ints(0, most, 3))]).astype(np.int32)

    if kind == "window":
        return dict(window=(int(ints(-1, skv + 1)), int(ints(-1, skv + 1))))
    if kind == "offset":
        return dict(causal_offset=ints(-sq - 1, skv + 1))
    if kind == "offsets":
        return dict(causal_offset=ints(-sq - 1, skv + 1, size.get("sequences", b)))
    if kind == "lengths":
        return dict(q_lengths=ints(0, sq, b), kv_lengths=ints(0, skv, b))
    if kind == "kv_lengths":
        return dict(kv_lengths=ints(0, skv, b))
    if kind == "ids":
        return dict(q_segment_ids=ints(-1, 2, b, sq), kv_segment_ids=ints(-1, 2, b, skv))
    if kind == "packed":
        return dict(q_segment_ids=np.sort(ints(-1, 2, b, sq))[:, ::-1].copy())
    if kind == "cu":
        return dict(cu_q_lengths=cumulative(sq), cu_kv_lengths=cumulative(skv))
    if kind == "shared cu":
        return dict(cu_q_lengths=cumulative(sq))
    return {kind: draw(st.floats(*{"scale": (-0.5, 0.5), "softcap": (0.5, 30)}[kind]))}


def arrays(size, layout, dtype, seed, sinks=False, bias=None, mask=None):
    """q, k, v and the options that are arrays of floats or bools."""
    options = dict(sinks=jnp.asarray(np.random.default_rng(seed).normal(size=size["n"]), "float32")) if sinks else {}
    for name, given_as in (("bias", bias), ("attn_mask", mask)):
        if given_as is not None:
            options[name] = mask_of(*given_as, seed=seed + len(name))
    shape = {name: x for name, x in size.items() if name != "sequences"}
    return inputs(**shape, layout=layout, dtype=dtype, seed=seed), options


GQA = dict(b=2, n=4, kv=2, sq=9, skv=11, d=24, dv=16)
TND = dict(b=1, n=4, kv=2, sq=12, skv=14, d=80, dv=8, sequences=3)
CASES = {
    # name: (size, layout, dtype, blocks, what is drawn, static options and arrays)
    "whole": (dict(b=2, n=2, sq=8, skv=8, d=8), "BNSD", "float32", (64, 64), ["scale"], {}),
    "causal lengths": (GQA, "BNSD", "float32", (4, 3), ["lengths"], dict(is_causal=True)),
    "bool mask": (
        dict(b=1, n=9, kv=3, sq=5, skv=7, d=59, dv=24), "BSND", "float32", (2, 3), ["offset"],
        dict(is_causal=True, mask=("bool", (1, 9, 5, 7))),
    ),
    "decode": (
        dict(b=2, n=4, kv=1, sq=1, skv=17, d=80), "BNSD", "bfloat16", (1, 5), ["kv_lengths"],
        dict(bias=("float32", (2, 1, 1, 17))),
    ),
    "sliding": (
        dict(b=2, n=2, sq=13, skv=13, d=63), "BSH", "float16", (8, 8), ["window"], dict(is_causal=True, q_heads=2),
    ),
    "offsets": (
        dict(b=3, n=4, kv=2, sq=6, skv=10, d=96, dv=8), "SBH", "bfloat16", (5, 4), ["offsets", "window"],
        dict(q_heads=4, kv_heads=2),
    ),
    "sequences": (TND, "TND", "float16", (4, 5), ["cu"], dict(is_causal=True)),
    "sequences with windows": (
        TND | dict(skv=12, d=5), "TND", "float32", (3, 16), ["shared cu", "offsets", "window"], dict(sinks=True),
    ),
    "segments": (GQA | dict(d=1), "BNSD", "float32", (3, 4), ["ids"], {}),
    "packed": (GQA | dict(skv=9), "BSND", "bfloat16", (2, 2), ["packed", "window"], dict(is_causal=True, sinks=True)),
    "capped": (
        GQA, "BNSD", "float32", (9, 2), ["softcap", "lengths"], dict(sinks=True, bias=("float32", (1, 4, 9, 1))),
    ),
    "latent": (
        dict(b=1, n=4, kv=1, sq=2, skv=20, d=576, dv=512), "BNSD", "float16", (2, 16), ["scale"], dict(is_causal=True),
    ),
    "two biases": (
        dict(b=1, n=2, sq=6, skv=7, d=192, dv=128), "BNSD", "float32", (4, 4), [],
        dict(mask=("float32", (6, 7)), bias=("bfloat16", (1, 2, 1, 7))),
    ),
    "float64": (
        GQA, "BNSD", "float64", (4, 3), ["lengths", "window", "softcap"],
        dict(is_causal=True, sinks=True, bias=("float64", (2, 1, 9, 11))),
    ),
}  # fmt: skip


#: What they have is in other cases, or in the tests of masks.
SLOW = ("segments", "capped")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
@random(max_examples=4)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_output_lse_and_gradients_are_the_sums_written_out(name, data, seed):
    size, layout, dtype, blocks, kinds, static = CASES[name]
    with jax.enable_x64(dtype == "float64"):
        check_drawn(data.draw, seed, size, layout, dtype, blocks, kinds, **static)


def check_drawn(draw, seed, size, layout, dtype, blocks, kinds, sinks=False, bias=None, mask=None, **static):
    args, options = arrays(size, layout, dtype, seed, sinks, bias, mask)
    for kind in kinds:
        options |= drawn(draw, kind, size)
    check(*args, blocks=blocks, **options, layout=layout, **static)


@st.composite
def calls(draw):
    """Any call: the arguments of `check_drawn`."""
    layout = draw(st.sampled_from(["BNSD", "BSND", "BSH", "SBH", "TND"]))
    dims = st.sampled_from([1, 8, 24, 59, 63, 64, 80, 96, 128, 192, 576])
    b, kv, group, sq = draw(st.tuples(*[st.integers(1, 3)] * 3, st.integers(1, 20)))
    skv = draw(st.one_of(st.just(sq), st.integers(1, 40)))
    size = dict(b=b, n=kv * group, kv=kv, sq=sq, skv=skv, d=draw(dims), dv=draw(dims))
    static: dict = dict(is_causal=draw(st.booleans()), sinks=draw(st.booleans()))
    if layout in ("BSH", "SBH"):
        static |= dict(q_heads=size["n"], kv_heads=kv)
    if layout == "TND":
        size |= dict(b=1, sequences=3)
        ties = [["cu"]] + [["shared cu"]] * (sq == skv)
    else:
        ties = [[], ["lengths"], ["kv_lengths"], ["ids"], ["ids", "lengths"]] + [["packed"]] * (sq == skv)
    more = draw(st.lists(st.sampled_from(["scale", "softcap", "window"]), unique=True))
    kinds = [*draw(st.sampled_from(ties)), *more]
    if static["is_causal"] or "window" in kinds:
        kinds += draw(st.sampled_from([[], ["offset"], ["offsets"]]))
    full = size["b"], size["n"], sq, skv
    for name, dtypes in (("bias", ["float32", "bfloat16"]), ("mask", ["bool", "float32", "float16"])):
        if draw(st.booleans()):
            shape = draw(st.one_of(st.just(full[2:]), st.tuples(*(st.sampled_from([1, n]) for n in full))))
            static[name] = draw(st.sampled_from(dtypes)), shape
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    blocks = draw(st.tuples(st.integers(1, sq + 3), st.integers(1, skv + 3)))
    return (size, layout, dtype, blocks, kinds), static


@pytest.mark.slow
@random(max_examples=80)
@given(data=st.data(), seed=st.integers(0, 1000), call=calls())
def test_any_call_is_the_sum_written_out(data, seed, call):
    check_drawn(data.draw, seed, *call[0], **call[1])


def test_the_reference_is_the_sum_written_out():
    static = dict(sinks=jnp.arange(4.0), softcap=9.0, is_causal=True, attention=reference_attention)
    static |= dict(bias=mask_of("float32", (1, 4, 1, 11)), kv_lengths=np.array([11, 4]), window=(5, 0))
    check(*inputs(**GQA), **static)
    ids = np.random.default_rng(0).integers(-1, 2, (2, 20))
    check(*inputs(**GQA), attention=reference_attention, q_segment_ids=ids[:, :9], kv_segment_ids=ids[:, 9:])
    cu = dict(cu_q_lengths=np.array([0, 3, 3, 9]), cu_kv_lengths=np.array([0, 0, 4, 11]))
    check(*inputs(**GQA | dict(b=1), layout="TND"), attention=reference_attention, layout="TND", **cu)


def test_the_gradient_of_the_oracle_is_that_of_its_output():
    """And so is, in float64, the gradient of blocked attention that of its own: by finite differences."""
    with jax.enable_x64(True):
        args = inputs(**GQA, dtype="float64", peak=2.0)
        floats = dict(sinks=jnp.arange(4.0), bias=mask_of("float64", (1, 4, 9, 1)), attn_mask=jnp.ones((9, 11)))
        rest = dict(is_causal=True, softcap=5.0, kv_lengths=np.array([11, 9]))
        (out, lse), cotangents, blocked_gradient = results(*args, **floats, **rest)
        oracle_gradient, _ = gradient(*args, *cotangents, **floats, **rest)
        rng, finite = np.random.default_rng(3), np.isfinite(lse)

        def loss(run, moved):
            out, lse = run(*moved[:3], **dict(zip(("attn_mask", "bias", "sinks"), moved[3:], strict=True)), **rest)
            return (np.asarray(out) * cotangents[0]).sum() + (np.where(finite, lse, 0) * cotangents[1]).sum()

        point = [np.asarray(x) for x in (*args, floats["attn_mask"], floats["bias"], floats["sinks"])]
        run = partial(blocked, return_lse=True)
        for function, found in ((attention, oracle_gradient), (run, blocked_gradient)):
            for at, name in enumerate(found._fields):
                along, h = rng.normal(size=point[at].shape), 1e-5
                ends = [loss(function, [*point[:at], point[at] + step * along, *point[at + 1 :]]) for step in (h, -h)]
                slope = float((np.asarray(found[at]) * along).sum())
                assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(slope, rel=1e-6, abs=1e-6), name


# Tiles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocks",
    [(1, 1), (5, 2), *(pytest.param(blocks, marks=pytest.mark.slow) for blocks in ((9, 100), (1, 4)))],
    ids=str,
)
def test_all_tiles_agree_within_rounding(blocks):
    args = inputs(**GQA)
    options = dict(is_causal=True, kv_lengths=np.array([11, 6]), bias=mask_of("float32", (1, 4, 9, 11)))
    check(*args, blocks=blocks, **options)


def test_blocked_is_the_reference_at_an_odd_length():
    args = inputs(sq=4097, d=8)
    got = jitted(*args, is_causal=True, block_q=512, block_kv=512)
    want = np.asarray(jax.jit(partial(reference_attention, is_causal=True))(*args)).astype(np.float64)
    assert_within(got, want, 2 * largest(args[2]) * rounding(*args)[0])


def test_a_repeat_gives_the_same_bits():
    args = inputs(**GQA | dict(sq=40, skv=60))
    options = dict(is_causal=True, sinks=jnp.arange(4.0), bias=jnp.ones((1, 4, 40, 60)))
    first = results(*args, blocks=(16, 16), **options)
    for _ in range(9):
        jax.tree.map(np.testing.assert_array_equal, results(*args, blocks=(16, 16), **options), first)


# Dtypes --------------------------------------------------------------------------------------------------------------


def test_weights_are_rounded_to_the_dtype_of_v_unless_p_dtype_says_otherwise():
    """Scores 0 and log(1/3): weights 1 and 1/3, of which float16 has only 0.33325; the sum of both is not rounded."""
    q, k = jnp.ones((1, 1, 1, 1)), jnp.asarray([0.0, np.log(1 / 3)], "float32").reshape(1, 1, 2, 1)
    v = jnp.asarray([0.0, 1.0]).reshape(1, 1, 2, 1)
    run = partial(blocked, q, k, v, scale=1.0)
    third = {name: float(jnp.asarray(1 / 3, name)) for name in ("float32", "float16", "bfloat16")}
    for p_dtype, weight in (*third.items(), (None, 1 / 3), (jnp.float16, third["float16"])):
        assert float(run(p_dtype=p_dtype)[0, 0, 0, 0]) == pytest.approx(weight / (4 / 3), rel=3e-7)


def test_weights_in_float32_are_no_less_exact():
    dtype = "float16"
    args = inputs(n=4, kv=2, sq=21, skv=34, d=16, dtype=dtype, peak=1.0)
    want, _ = attention(*args)
    rounded, same, wide = (
        np.asarray(blocked(*args, p_dtype=p)).astype(np.float64) for p in (None, dtype, "float32")
    )
    np.testing.assert_array_equal(rounded, same)
    assert 0 < np.mean((wide - want) ** 2) < np.mean((rounded - want) ** 2)
    assert_within(jnp.asarray(wide, dtype), want, largest(args[2]) * rounding(*args, p_dtype="float32")[0])


# Dropout -------------------------------------------------------------------------------------------------------------


def keep_of(args, rate, key):
    """The factors of all weights of a call [B, N, Sq, Skv]."""
    arguments = Arguments(*args, dropout_rate=rate, dropout_key=key)
    size = arguments.sizes
    dropout = prepared(arguments, size).context.dropout
    full = size.batch, size.kv_heads, size.q_heads // size.kv_heads, size.q_len, size.kv_len
    return np.asarray(kept(dropout, (0,) * 5, full), np.float64).reshape(full[0], -1, *full[3:])


def test_dropout_is_that_of_the_position_in_every_tile_and_in_the_backward():
    args = inputs(**GQA, peak=1.0)
    for seed, blocks in ((0, (4, 3)), (1, (4, 3)), (1, (2, 11))):
        dropout = dict(dropout_rate=0.3, dropout_key=jax.random.key(seed))
        keep = keep_of(args, 0.3, jax.random.key(seed))
        check(*args, blocks=blocks, keep=keep, sinks=jnp.arange(4.0), **dropout)
    check(*args, attention=reference_attention, keep=keep, sinks=jnp.arange(4.0), **dropout)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_alike_nowhere(rate):
    args = inputs(b=2, n=4, kv=2, sq=64, skv=64)
    kept_at = {seed: keep_of(args, rate, jax.random.key(seed)) for seed in (0, 1)}
    x = kept_at[0]
    zero, factor = np.unique(x)
    assert zero == 0 and factor == pytest.approx(1 / (1 - rate), rel=1e-6)
    sigma = np.sqrt(rate / (1 - rate))  # of one factor, whose mean is 1
    assert abs(x.mean() - 1) < 4 * sigma / np.sqrt(x.size)
    assert (abs(x.mean((2, 3)) - 1) < 4 * sigma / 64).all()
    others = {"key": kept_at[1], "batch": x[::-1], "head": np.roll(x, 1, 1), "group": np.roll(x, 2, 1)}
    others |= {"query": np.roll(x, 1, 2), "key position": np.roll(x, 1, 3), "transpose": x.swapaxes(2, 3)}
    for name, other in others.items():
        correlation = np.corrcoef(x.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 4 * np.sqrt(2 / x.size), name


def test_dropout_of_rate_0_is_none():
    args, key = inputs(**GQA), jax.random.key(0)
    want = blocked(*args)
    static = jax.jit(lambda *args: blocked_attention(*args, block_q=4, block_kv=3, dropout_rate=0.0))
    assert not Arguments(*args, dropout_rate=0).drops
    np.testing.assert_array_equal(static(*args), want)
    np.testing.assert_array_equal(blocked(*args, dropout_rate=0.0, dropout_key=key), want)
    assert not np.array_equal(blocked(*args, dropout_rate=0.5, dropout_key=key), want)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", pytest.param("unsafe_rbg", marks=pytest.mark.slow)])
def test_a_key_of_any_generator_is_taken_raw_or_not_whatever_the_default(impl):
    args = inputs(**GQA)
    keys = jax.random.key(7, impl=impl), jax.random.PRNGKey(7, impl=impl)
    typed, raw = (blocked(*args, dropout_rate=0.4, dropout_key=key) for key in keys)
    np.testing.assert_array_equal(typed, raw)
    assert not np.array_equal(typed, blocked(*args, dropout_rate=0.4, dropout_key=jax.random.key(8, impl=impl)))
    with jax.default_prng_impl("rbg" if impl == "threefry2x32" else "threefry2x32"):
        again = jax.jit(partial(blocked_attention, block_q=4, block_kv=3))  # jit alone knows nothing of the default
        for key in keys:
            np.testing.assert_array_equal(again(*args, dropout_rate=0.4, dropout_key=key), typed)


def test_keys_of_rbg_drop_by_position_in_the_backward_and_under_vmap():
    """Where its own bits would not do: they depend on how many are drawn, and under vmap on the first key alone."""
    args, keys = inputs(**GQA, peak=1.0), jax.random.split(jax.random.key(1, impl="rbg"), 2)
    keep = [keep_of(args, 0.3, key) for key in keys]
    for blocks in ((4, 3), (2, 11)):
        check(*args, blocks=blocks, keep=keep[0], dropout_rate=0.3, dropout_key=keys[0])
    for x, other in ((keep[0], keep[1]), (keep[0], keep[0][::-1]), (keep[0], np.roll(keep[0], 1, 1))):
        assert abs(np.corrcoef(x.ravel(), other.ravel())[0, 1]) < 4 * np.sqrt(2 / x.size)

    def run(q, key):
        return blocked_attention(q, *args[1:], dropout_rate=0.3, dropout_key=key, block_q=4, block_kv=3)

    mapped = jax.jit(jax.vmap(run, in_axes=(None, 0)))(args[0], keys)
    for out, factors in zip(mapped, keep, strict=True):
        assert_within(out, attention(*args, keep=factors)[0], largest(args[2]) * 10 * rounding(*args)[0])
