"""What a call may look like: a wrong argument is named, with what was expected, what came, and the cure."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from npumodel.attention import Arguments, blocked_attention, reference_attention
from npumodel.workload import AttentionShape

X = np.zeros((2, 4, 8, 16), np.float32)
FLAT = dict.fromkeys("qkv", np.zeros((2, 8, 64), np.float32))
TOKENS = dict.fromkeys("qkv", np.zeros((8, 4, 16), np.float32)) | dict(layout="TND")
CU = dict(cu_q_lengths=[0, 3, 8])
IDS = np.zeros((2, 8), int)
SHAPE = jax.ShapeDtypeStruct((2,), np.float32)


@pytest.mark.parametrize(
    "change, message",
    [
        # arrays
        (dict(q=[[1.0]]), "q: expected a JAX or NumPy array, got list; convert with jnp.asarray"),
        (dict(v=None), "v: expected a JAX or NumPy array, got NoneType; give one"),
        (dict(q=SHAPE), "q: expected a JAX or NumPy array, got ShapeDtypeStruct; .* call inside jax.eval_shape"),
        (dict(bias=SHAPE), "bias: expected a JAX or NumPy array, got ShapeDtypeStruct; .* call inside jax.eval_shape"),
        (dict(k=X.astype(np.float16)), "q, k, v: expected one dtype, got float32, float16, float32; cast"),
        (dict.fromkeys("qkv", X.astype(int)), "q, k, v: expected one of float32, .* got int64; cast"),
        (dict.fromkeys("qkv", np.float64(X)), "expected float32 or narrower, got float64; cast, or set jax_enable_x64"),
        (dict(k=X[0]), r"k: expected 4 axes, got shape \(4, 8, 16\); the layout is BNSD, .* x.transpose"),
        (dict(k=X[..., :8]), r"k: expected the head_dim of q, got q .* the layout is BNSD"),
        (dict.fromkeys("qk", X[..., :0]), r"q: expected a head_dim of at least 1, got \(2, 4, 8, 0\); the layout is"),
        (dict(v=X[:, :, :4]), "v: expected batch, heads and sequence of k .* got"),
        (dict(k=X[:1], v=X[:1]), "k: expected the batch of q .* got .* broadcast k and v"),
        (dict(k=X[:, :3], v=X[:, :3]), "q: expected a number of heads that is a multiple of the 3 of k, got 4"),
        (dict(k=X[:, :0], v=X[:, :0]), "q: expected a number of heads that is a multiple of the 0 of k, got 4"),
        (dict(q=X[:, :, :1].swapaxes(1, 2), k=X.swapaxes(1, 2), v=X.swapaxes(1, 2)), "from BSND use x.transpose"),
        # layouts
        (dict(layout="BSDN"), "layout: expected one of BNSD, BSND, BSH, SBH, TND, got 'BSDN'"),
        (dict(q_heads=4), "q_heads, kv_heads: expected none in layout BNSD, got .*; the arrays show their heads"),
        (FLAT | dict(layout="BSH"), r"q_heads: expected the number of heads in .*heads \* head_dim\], got none; give"),
        (FLAT | dict(layout="SBH", q_heads=True), r"q_heads: expected a positive Python integer \(static\), got True"),
        (FLAT | dict(layout="SBH", q_heads=4, kv_heads=0), r"kv_heads: expected a positive Python integer .* got 0"),
        (FLAT | dict(layout="BSH", q_heads=5), r"q: expected a last axis that 5 heads divide, got \(2, 8, 64\); see"),
        (FLAT | dict(layout="BSH", q_heads=4, kv_heads=2), "k: expected the head_dim of q"),
        (dict(layout="BSH", q_heads=4), r"q: expected 3 axes, got shape \(2, 4, 8, 16\); the layout is BSH"),
        # masks and biases
        (dict(attn_mask=[[True]]), "attn_mask: expected a JAX or NumPy array, got list"),
        (dict(attn_mask=np.ones((8, 8), int)), r"attn_mask: expected bool .* got int64; use attn_mask.astype\(bool\)"),
        (dict(attn_mask=np.ones((1, 8), bool)), r"attn_mask: expected a shape .* exactly \[8, 8\], got \(1, 8\); say"),
        (dict(attn_mask=np.ones((4, 8, 8), bool)), r"broadcasts to \[B=2, N=4, Sq=8, Skv=8\]"),
        (dict(attn_mask=np.ones((2, 2, 8, 8), bool)), r"got \(2, 2, 8, 8\)"),
        (dict(bias=np.ones((8, 8), bool)), "bias: expected floating .* got bool; a bool is an attn_mask"),
        (dict(bias=np.ones((3, 1, 8, 8))), r"bias: expected a shape that broadcasts .* got \(3, 1, 8, 8\)"),
        (dict(sinks=[0.0] * 4), "sinks: expected a JAX or NumPy array, got list"),
        (dict(sinks=np.zeros(2)), r"sinks: expected floats \[N=4\], one per query head, got .* \(2,\); give one"),
        (dict(sinks=np.zeros(4, int)), r"sinks: expected floats \[N=4\], .* got int64 \(4,\); cast with sinks"),
        (dict(sinks=np.zeros((4, 1))), r"sinks: expected .* got float64 \(4, 1\); use jnp.reshape\(sinks, \(4,\)\)"),
        # numbers
        (dict(is_causal=jnp.asarray(True)), r"is_causal: expected a Python bool \(static\), got .* pass an attn_mask"),
        (dict(return_lse=1), r"return_lse: expected a Python bool \(static\), got int; mark it static in jax.jit$"),
        (dict(scale="big"), "scale: expected None or one real number, got"),
        (dict(scale=np.ones(4)), r"scale: expected None or one real number, got .* of shape \(4,\); pass a scalar"),
        (dict(scale=1j), "scale: expected None or one real number, got complex"),
        (dict(softcap=0.0), "softcap: expected None or a finite number above 0, got 0.0"),
        (dict(softcap=np.nan), "softcap: expected None or a finite number above 0, got nan"),
        (dict(softcap=np.inf), "softcap: expected None or a finite number above 0, got inf; None is for none"),
        (dict(softcap=SHAPE), "softcap: expected None or one real number, got ShapeDtypeStruct; .* jax.eval_shape"),
        (dict(softcap=[5.0]), "softcap: expected None or one real number"),
        (dict(scale=[5.0]), "scale: expected None or one real number"),
        (dict(p_dtype="int8"), "p_dtype: expected None or one of float32, .* got 'int8'"),
        (dict(p_dtype="half a float"), "p_dtype: expected None or one of float32, .* got 'half a float'"),
        # windows and offsets
        (dict(window=3), r"window: expected \(left, right\), .* got 3; None or -1 for no limit"),
        (dict(window=(1, 2, 3)), r"window: expected \(left, right\), .* got \(1, 2, 3\)"),
        (dict(window="12"), r"window: expected \(left, right\), .* got '12'"),
        (dict(window=(1.5, 0)), r"window: expected ints of shape \(\) \(the left side; .* float64 \(\); give an int"),
        (dict(window=(0, [5])), r"window: .* \(the right side; .* got int64 \(1,\); give one int"),
        (dict(window=np.array([5, 3])), r"window: .* a tuple of two ints, .* int64 \(2,\); give tuple\(window\)"),
        (dict(causal_offset=1), "causal_offset: expected is_causal=True or a window beside it, got neither"),
        (dict(causal_offset=0.5, is_causal=True), r"causal_offset: .* \(\) .* float64 .* give an int"),
        (dict(causal_offset=[1, 2, 3], is_causal=True), r"causal_offset: expected ints of shape \(2,\) .* \(3,\)"),
        # lengths
        (dict(kv_lengths=[3]), r"kv_lengths: .* shape \(2,\) .* got int64 \(1,\); .* jnp.broadcast_to\(kv"),
        (dict(kv_lengths=[[3], [4]]), r"kv_lengths: .* got int64 \(2, 1\); use jnp.reshape\(kv_lengths, \(2,\)\)"),
        (dict(kv_lengths=[3, 4, 5]), r"kv_lengths: .* got int64 \(3,\); give one length per example"),
        (dict(q_lengths=5), r"q_lengths: .* \(one length per .*int64 \(\); .* jnp.full\(\(2,\), q_lengths\)"),
        (dict(q_lengths=[3.0, 4.0]), r"q_lengths: .* shape \(2,\) .* got float64 .* give whole numbers"),
        (dict(q_lengths=np.array([3.0, 4.0])), r"q_lengths: .* got float64 \(2,\); cast with .astype\(int\)"),
        (dict(q_lengths=np.array([True, True])), r"q_lengths: .* got bool \(2,\); cast with .astype\(int\)"),
        (dict(q_lengths=["a", "b"]), "q_lengths: expected ints .* got .*; give one length per example"),
        (dict(q_lengths=[[1], [2, 3]]), "q_lengths: expected ints .* got list; give one length per example"),
        (dict(q_lengths=SHAPE), "q_lengths: .* got ShapeDtypeStruct; .* call inside jax.eval_shape"),
        (dict(kv_lengths=[3, 9]), r"kv_lengths: expected 0 <= length <= 8, got 3 \.\. 9"),
        (dict(q_lengths=[-1, 8]), r"q_lengths: expected 0 <= length <= 8, got -1 \.\. 8"),
        (TOKENS | CU | dict(q_lengths=[3]), "q_lengths: expected none in layout TND, got one; give cu_q_lengths"),
        # cumulative lengths
        (CU, "cu_q_lengths: expected layout TND beside it, got BNSD; give q_lengths"),
        (TOKENS, "layout TND: expected cu_q_lengths, .* got no cu_q_lengths"),
        (TOKENS | CU | dict(q=TOKENS["q"][:4]), "layout TND: expected cu_q_lengths, .* got only cu_q_lengths"),
        (TOKENS | dict(cu_q_lengths=[1, 8]), "cu_q_lengths: expected to start at 0, never to fall, and to end at 8"),
        (TOKENS | dict(cu_q_lengths=[0, 5, 3]), r"cu_q_lengths: expected .* never to fall, .* got \[0 5 3\]"),
        (TOKENS | dict(cu_q_lengths=np.array([0, 5, 3], np.uint32)), r"cu_q_lengths: expected .* never to fall"),
        (TOKENS | dict(cu_q_lengths=[0, 9]), "cu_q_lengths: expected .* to end at 8 tokens at most"),
        (TOKENS | dict(cu_q_lengths=[]), r"cu_q_lengths: .* \[sequences \+ 1\], .* got shape \(0,\); give"),
        (TOKENS | dict(cu_q_lengths=[[0, 8]]), r"cu_q_lengths: .* got shape \(1, 2\); give them on one axis"),
        (TOKENS | dict(cu_q_lengths=np.array([0.0, 8.0])), r"cu_q_lengths: .* got float64 \(2,\); cast with .astype"),
        (TOKENS | CU | dict(cu_kv_lengths=[0, 8]), r"cu_kv_lengths: .* shape \(3,\) .* \(2,\); a sequence without"),
        # segments
        (dict(kv_segment_ids=IDS), "kv_segment_ids: expected q_segment_ids beside it, got none; give both"),
        (dict(q_segment_ids=IDS[:, :4]), r"q_segment_ids: .* shape \(2, 8\) .* \(2, 4\); give one id per query"),
        (dict(q_segment_ids=IDS[0]), r"q_segment_ids: .* got int64 \(8,\); .* jnp.broadcast_to\(q_segment_ids, "),
        (dict(q_segment_ids=IDS + 0.5), r"q_segment_ids: .* got float64 \(2, 8\); cast with .astype\(int\)"),
        (dict(q_segment_ids=IDS, kv_segment_ids=IDS[:1]), r"kv_segment_ids: expected ints of shape \(2, 8\) \(one id"),
        (dict(q=X[:, :, :4], q_segment_ids=IDS[:, :4]), r"kv_segment_ids: expected ints \[2, 8\], got none; only when"),
        (TOKENS | CU | dict(q_segment_ids=IDS[:1]), "q_segment_ids: expected none in layout TND, got one; cu_q"),
        # dropout
        (dict(dropout_rate=1.0), "dropout_rate: expected 0 <= rate < 1, got 1.0"),
        (dict(dropout_rate=-0.1), "dropout_rate: expected 0 <= rate < 1, got -0.1"),
        (dict(dropout_rate=np.nan), "dropout_rate: expected 0 <= rate < 1, got nan"),
        (dict(dropout_rate=np.ones(1)), "dropout_rate: expected None or one real number"),
        (dict(dropout_rate=0.1), r"dropout_key: expected a key .* got none; give jax.random.key\(seed\)"),
        (dict(dropout_rate=0.1, dropout_key=7), r"dropout_key: expected one key .* got int64 \(\); make"),
        (dict(dropout_rate=0.1, dropout_key=np.zeros(3)), r"dropout_key: expected one key .* got float64 \(3,\); make"),
        (dict(dropout_key=jax.random.split(jax.random.key(0))), r"dropout_key: .* got key.* \(2,\); take one of them"),
        (dict(dropout_key=np.zeros((3, 4), np.uint32)), r"dropout_key: .* got uint32 \(3, 4\); take one of them"),
        # tiles
        (dict(block_q=0), r"block_q: expected a positive Python integer \(static\), got 0"),
        (dict(block_kv=2.5), r"block_kv: expected a positive Python integer \(static\), got 2.5"),
        (dict(block_kv=True), r"block_kv: expected a positive Python integer \(static\), got True"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(change, message):
    call = dict(q=X, k=X, v=X, block_q=4, block_kv=4) | change
    with pytest.raises(ValueError, match=message):
        blocked_attention(**call)
    if not {"block_q", "block_kv"} & set(change):
        del call["block_q"], call["block_kv"]
        for checked in (reference_attention, lambda **call: Arguments(**call).check()):
            with pytest.raises(ValueError, match=message):
                checked(**call)


@pytest.mark.parametrize(
    "given",
    [
        dict(q_lengths=[3, 8], kv_lengths=(8, 0)),
        dict(causal_offset=[0, -1], is_causal=True),
        dict(window=[3, None]),
        dict(window=(np.int64(3), jnp.asarray(2)), causal_offset=np.int32(1)),
        dict(q_segment_ids=[[0] * 8, [1] * 8]),
        TOKENS | dict(cu_q_lengths=[0, 3, 8], causal_offset=[0, 1], is_causal=np.bool_(True)),
        TOKENS | dict(cu_q_lengths=(0, 3, 8), cu_kv_lengths=[0, 0, 5]),
        TOKENS | dict(cu_q_lengths=np.array([0, 3, 8], np.uint8)),
        TOKENS | dict(cu_q_lengths=np.array([0]), causal_offset=np.zeros(0, int), is_causal=True),
        dict(q_lengths=np.array([3, 8], np.uint64)),
        dict(scale=np.float32(2), softcap=3, dropout_rate=None),
        dict(p_dtype=jnp.bfloat16),
    ],
    ids=lambda given: "-".join(f"{name}{x}" for name, x in given.items() if name not in "qkv"),
)
def test_numbers_may_come_in_any_form(given):
    call = dict(q=X, k=X, v=X + 2) | given
    numbers = {name: x for name, x in call.items() if name not in "qkv"}  # known, while the arrays are traced
    run = partial(blocked_attention, **numbers, block_q=4, block_kv=4)
    assert jax.eval_shape(run, *(call[name] for name in "qkv")).shape == call["q"].shape


def test_numpy_arrays_are_accepted():
    np.testing.assert_array_equal(blocked_attention(X, X, X + 2, block_q=4, block_kv=3), X + 2)


def test_traced_numbers_are_not_looked_at():
    """What would be refused if it were known is taken as far as it goes: a length beyond the end is the end."""
    run = jax.jit(partial(blocked_attention, block_q=4, block_kv=3))
    x = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    np.testing.assert_array_equal(run(x, x, x, kv_lengths=np.array([99, 8])), run(x, x, x, kv_lengths=np.array([8, 8])))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda n: dict(kv_lengths=[n, n]), "kv_lengths: .* got list; join .* with jnp.asarray or"),
        (lambda n: TOKENS | dict(cu_q_lengths=[0, n]), "cu_q_lengths: expected ints .* got list; join traced numbers"),
        (lambda n: dict(causal_offset=[n, n], is_causal=True), "causal_offset: .* got list; join traced numbers"),
        (lambda n: dict(softcap=[n]), "softcap: expected None or one real number, got list; join traced numbers"),
        (lambda n: dict(window=jnp.stack([n, n])), r"window: .* got an array int32 \(2,\); give tuple\(window\)"),
        (lambda n: dict(window=(n * 1.0, 0)), r"window: .* got float32 \(\); cast with .astype\(int\)"),
    ],
    ids=["lengths", "cumulative lengths", "offset", "softcap", "window array", "window of floats"],
)
def test_a_traced_argument_of_a_wrong_kind_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda n: blocked_attention(**(dict(q=X, k=X, v=X) | arguments(n)), block_q=4, block_kv=4))(3)


def test_the_cures_of_wrong_shapes_work():
    """What the messages tell to write gives a call, and the numbers that were meant."""
    x = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
    run = partial(blocked_attention, x, x, x, block_q=4, block_kv=4)
    compiled = jax.jit(run)
    want = run(kv_lengths=[5, 5], window=(5, 3))
    lengths = jnp.full((2,), 5), jnp.broadcast_to(jnp.asarray([5]), (2,)), jnp.asarray([5.0, 5.0]).astype(int)
    for given in (*lengths, jnp.reshape(jnp.asarray([[5], [5]]), (2,))):
        options = dict(kv_lengths=given, window=tuple(jnp.array([5, 3])))
        assert jax.eval_shape(partial(blocked_attention, **options, block_q=4, block_kv=4), x, x, x).shape == X.shape
        np.testing.assert_allclose(compiled(**options), want, rtol=1e-6)
    traced = jax.jit(lambda n: run(kv_lengths=jnp.asarray([n, n]), window=tuple(jnp.stack([n, n - 2]))))(5)
    np.testing.assert_allclose(traced, want, rtol=1e-6)
    assert jax.eval_shape(run, kv_lengths=jax.ShapeDtypeStruct((2,), int)).shape == X.shape


def test_the_shape_of_a_call():
    q, k, v = (jnp.zeros((2, n, s, d), "bfloat16") for n, s, d in ((4, 3, 8), (2, 5, 8), (2, 5, 6)))
    want = AttentionShape(2, 4, 3, 8, kv_heads=2, kv_len=5, v_head_dim=6, dtype="bfloat16", causal=True, mask="bool")
    assert Arguments(q, k, v, np.ones((3, 5), bool), is_causal=True).check() == want
    numpy = Arguments(*(np.asarray(x) for x in (q, k, v)), np.ones((2, 1, 1, 5), np.float16)).check()
    assert numpy is not None and numpy.mask == "additive"
    both = Arguments(q, k, v, np.ones((3, 5), bool), bias=np.ones((3, 5), np.float32)).check()
    assert both is not None and both.mask == "additive"
    flat = (x.swapaxes(1, 2).reshape(2, x.shape[2], -1) for x in (q, k, v))
    assert Arguments(q, k, v).sizes == (2, 4, 2, 3, 5, 8, 6)
    assert Arguments(*flat, layout="BSH", q_heads=4, kv_heads=2).sizes == Arguments(q, k, v).sizes
    assert Arguments(q[:, :, :0], k, v).check() is None
    with jax.enable_x64(True):
        wide = Arguments(X.astype(np.float64), X.astype(np.float64), X.astype(np.float64)).check()
    assert wide is not None and wide.dtype == "float32"


def test_no_rank_promotion():
    q, k = (jnp.zeros((2, n, 5, 8)) for n in (4, 2))
    with jax.numpy_rank_promotion("raise"):
        for mask in (None, jnp.ones((5, 5), bool), jnp.zeros((2, 1, 1, 5))):
            for run in (partial(blocked_attention, block_q=4, block_kv=3), reference_attention):
                jax.eval_shape(partial(run, is_causal=True, window=(1, 0), kv_lengths=[5, 3]), q, k, k, mask)
