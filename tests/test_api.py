"""The public doors: which device, which tile, what is executed, and what listeners hear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from npumodel import api
from npumodel.attention import Arguments, reference_attention
from npumodel.hardware import device
from npumodel.search.auto import Resolved
from npumodel.search.table import TileTableWarning, use_table
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape


def qkv(batch=1, heads=4, length=70, dim=16, kv_heads=2, dtype=np.float32):
    rng = np.random.default_rng(0)
    sizes = [(batch, n, length, dim) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.standard_normal(size), dtype) for size in sizes]


reference = jax.jit(reference_attention, static_argnames="is_causal")
Q, K, V = qkv()
SHAPE = AttentionShape(1, 4, 70, 16, kv_heads=2, dtype="float32")


@pytest.fixture
def heard():
    calls = []
    api.listeners.append(calls.append)
    yield calls
    api.listeners.remove(calls.append)


# Execute -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["auto", "small", "large", 1, 6, (2, 5), "16x32", TileConfig(7, 1000)], ids=str)
def test_every_level_gives_the_same_attention(level):
    mask = jnp.asarray(np.random.default_rng(1).random((70, 70)) > 0.3)
    several = ({}, {"is_causal": True, "scale": 0.3}, {"attn_mask": mask})
    for options in several if level == "auto" else several[:1]:
        out = api.flash_attention(Q, K, V, tile_level=level, **options)
        assert out.shape == Q.shape and out.dtype == Q.dtype
        np.testing.assert_allclose(out, reference(Q, K, V, **options), atol=2e-6)


@pytest.mark.parametrize("where", [None, "ascend910a"])
def test_inside_jit_vmap_and_scan(where):
    expected = reference(Q, K, V, is_causal=True)

    def call(q, k, v):
        return api.flash_attention(q, k, v, is_causal=True, device=where)

    np.testing.assert_allclose(jax.jit(call)(Q, K, V), expected, atol=2e-6)
    batch = jax.vmap(call)(*(jnp.stack([x, 2 * x]) for x in (Q, K, V)))
    np.testing.assert_allclose(batch[0], expected, atol=2e-6)
    np.testing.assert_allclose(batch[1], reference(2 * Q, 2 * K, 2 * V, is_causal=True), atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(call))(*(x[None] for x in (Q, K, V)))[0], expected, atol=2e-6)
    last, _ = jax.lax.scan(lambda q, _: (call(q, K, V), None), Q, length=2)
    np.testing.assert_allclose(last, reference(expected, K, V, is_causal=True), atol=2e-6)


def test_the_model_runs_while_the_caller_is_traced():
    """A tile that nobody has resolved yet: pricing must not end up in the caller's program."""
    q, k, v = qkv(length=33, dim=24)
    out = jax.jit(lambda *x: api.flash_attention(*x, device="ascend910a"))(q, k, v)
    np.testing.assert_allclose(out, reference(q, k, v), atol=2e-6)
    shape = AttentionShape(1, 4, 33, 24, kv_heads=2, dtype="float32")
    assert isinstance(api.resolve(shape, "ascend910a").tile.block_q, int)


def test_numpy_half_and_empty_inputs():
    half = [np.asarray(x, np.float16) for x in (Q, K, V)]
    out = api.flash_attention(*half)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, reference(*half), atol=2e-3)
    assert api.flash_attention(Q[:, :, :0], K, V).shape == (1, 4, 0, 16)
    assert not api.flash_attention(Q, K[:, :, :0], V[:, :, :0]).any()


def test_compiles_again_only_for_another_block_size_or_shape():
    q, k, v = qkv(length=61)
    api.flash_attention(q, k, v, tile_level="small")
    before = api._blocked._cache_size()
    for scale in (0.1, 0.2):
        api.flash_attention(q, k, v, tile_level=TileConfig(32, 32, 3, 0), scale=scale)
    assert api._blocked._cache_size() == before + 1  # a scale that is given; its value is traced
    api.flash_attention(q, k, v, tile_level="large")
    api.flash_attention(q, k, v, tile_level=1)
    api.flash_attention(q, k, v)
    assert api._blocked._cache_size() == before + 2  # all three: one block


def test_wrong_arguments():
    with pytest.raises(ValueError, match="k: expected the head_dim of q"):
        api.flash_attention(Q, K[..., :8], V)
    with pytest.raises(ValueError, match="tile_level: expected .*got 'huge'"):
        api.flash_attention(Q, K, V, tile_level="huge")
    with pytest.raises(ValueError, match="device: expected one of .*'910z'"):
        api.flash_attention(Q, K, V, device="910z")
    with pytest.raises(ValueError, match="ascend910a multiplies"):
        api.flash_attention(*qkv(dtype=jnp.bfloat16), device="ascend910a")
    with pytest.raises(ValueError, match=r"does not fit on ascend910b2: .*UB needs"):
        api.flash_attention(*qkv(length=3000, heads=2), tile_level=1, device="ascend910b2")


def test_the_host_cuts_finer_where_blocks_can_be_skipped():
    def blocks(**options):
        arguments = Arguments(*qkv(length=1000), **options)
        return api._resolve_now(arguments.check(), None, "auto", arguments.skips).tile

    assert blocks() == TileConfig(512, 512)
    some = dict(is_causal=True), dict(window=(9, None)), dict(kv_lengths=[5]), dict(q_segment_ids=[[0] * 1000])
    for options in some:
        assert blocks(**options) == TileConfig(256, 256)


def test_a_window_beyond_every_length_is_none():
    for window in ((2**40, 0), [-(2**40), 0], (np.int64(2**40), np.int32(0))):
        out = api.flash_attention(Q, K, V, window=window)
        np.testing.assert_array_equal(out, api.flash_attention(Q, K, V, window=(None, 0)))


def test_numbers_out_of_range_mean_what_they_say():
    def same(a, b):
        np.testing.assert_allclose(api.flash_attention(Q, K, V, **a), api.flash_attention(Q, K, V, **b), atol=2e-6)

    same(dict(is_causal=True, causal_offset=2**40), {})
    same(dict(window=(2**29 + 60, 0), causal_offset=2**29 - 1), dict(window=(60, None), causal_offset=-1))
    for traced, cut in ((99, 70), (-3, 0)):
        got = jax.jit(lambda n: api.flash_attention(Q, K, V, kv_lengths=n, is_causal=True))(jnp.array([traced]))
        np.testing.assert_allclose(got, api.flash_attention(Q, K, V, kv_lengths=[cut], is_causal=True), atol=2e-6)


def test_under_strict_promotion():
    half = qkv(dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        out = jax.grad(lambda q: api.flash_attention(q, *half[1:], is_causal=True, window=(9, 0)).sum())(half[0])
    assert out.dtype == jnp.bfloat16


# Listeners -----------------------------------------------------------------------------------------------------------


def test_eager_calls_are_heard_once_each(heard):
    for _ in range(3):
        api.flash_attention(Q, K, V)
    api.flash_attention(Q, K, V, tile_level="small", device="910A")
    host = api.Call(SHAPE, Resolved(TileConfig(80, 80), "auto: host"), None)
    assert heard == [host] * 3 + [api.Call(SHAPE, Resolved(TileConfig(32, 32), "level: small"), "ascend910a")]


def test_what_has_no_price_is_heard(heard):
    api.flash_attention(Q, K, V, window=(9, 0), is_causal=True, softcap=5.0, bias=jnp.zeros((70, 70)))
    api.flash_attention(Q, K, V, dropout_rate=0.5, dropout_key=jax.random.key(0), kv_lengths=[60])
    jax.jit(lambda left: api.flash_attention(Q, K, V, window=(left, -1)))(9)
    jax.effects_barrier()
    assert [call.unpriced for call in heard] == [(), ("kv_lengths", "dropout"), ("window",)]
    seen = AttentionShape(1, 4, 70, 16, 2, dtype="float32", causal=True, mask="additive", window=(9, 0), softcap=True)
    assert heard[0].shape == seen and heard[2].shape.window is None


def test_jitted_calls_are_heard_at_every_execution(heard):
    run = jax.jit(lambda q: api.flash_attention(q, K, V))
    for _ in range(4):
        run(Q)
    jax.effects_barrier()
    assert [call.shape for call in heard] == [SHAPE] * 4
    run.lower(Q).compile()
    jax.eval_shape(run, Q)
    jax.effects_barrier()
    assert len(heard) == 4


def test_scanned_and_nested_calls_are_heard_at_every_turn(heard):
    @jax.jit
    def run(q):
        return jax.lax.scan(lambda x, _: (jax.jit(api.flash_attention)(x, K, V), None), q, length=5)[0]

    run(Q), run(Q)
    jax.effects_barrier()
    assert len(heard) == 10


def test_a_vmapped_call_is_heard_once_with_the_shape_of_one_example(heard):
    many = jnp.stack([Q, Q, Q])
    jax.vmap(lambda q: api.flash_attention(q, K, V))(many)
    jax.jit(jax.vmap(api.flash_attention, (0, None, None)))(many, K, V)
    jax.effects_barrier()
    assert [call.shape for call in heard] == [SHAPE] * 2


def test_nothing_is_left_behind_without_listeners():
    text = str(jax.make_jaxpr(lambda q: api.flash_attention(q, K, V))(Q))
    assert "callback" not in text and not api.listeners


# Which device --------------------------------------------------------------------------------------------------------


def test_target_nests_and_ends():
    assert api.current_device() is None
    with api.target("910b2") as outer:
        assert api.current_device() is outer and outer.name == "ascend910b2"
        with api.target(device("ascend910a")):
            assert api.current_device().name == "ascend910a"
            with api.target(None):
                assert api.current_device() is None
        assert api.current_device() is outer
        with pytest.raises(ZeroDivisionError), api.target("article"):
            raise ZeroDivisionError
        assert api.current_device() is outer
    assert api.current_device() is None
    with pytest.raises(ValueError, match="device: expected one of"), api.target("abacus"):
        pass


def test_the_environment_comes_last(monkeypatch, heard):
    monkeypatch.setenv("NPUMODEL_DEVICE", " Ascend910A ")
    assert api.current_device().name == "ascend910a"
    api.flash_attention(Q, K, V, tile_level=1)
    with api.target("article"):
        api.flash_attention(Q, K, V, tile_level=1)
        api.flash_attention(Q, K, V, tile_level=1, device="ascend310p3")
    assert [call.device_name for call in heard] == ["ascend910a", "article", "ascend310p3"]
    monkeypatch.setenv("NPUMODEL_DEVICE", "abacus")
    with pytest.raises(ValueError, match="NPUMODEL_DEVICE: .*got 'abacus'"):
        api.current_device()


# Price ---------------------------------------------------------------------------------------------------------------

TEXT = "B1,N2,S300,D64"


def test_estimate_takes_what_is_convenient():
    cost = api.estimate(TEXT, "ascend910a", "64x128")
    shape = AttentionShape(1, 2, 300, 64)
    assert (cost.shape, cost.device, cost.tile) == (shape, "ascend910a", TileConfig(64, 128))
    with api.target("ascend910a"):
        assert api.estimate(shape, tile=TileConfig(64, 128)) == cost
        auto = api.estimate(TEXT)
        assert auto.seconds <= api.estimate(TEXT, policy="default").seconds
        assert auto.seconds <= api.estimate(TEXT, policy="rule").seconds
        assert auto.tile == api.resolve(TEXT).tile == api.estimate(TEXT, policy="auto").tile


def test_estimate_needs_a_device_and_a_policy_that_there_is():
    with pytest.raises(ValueError, match="device: expected one, got none; .*NPUMODEL_DEVICE"):
        api.estimate(TEXT)
    with pytest.raises(ValueError, match="policy: expected one of auto, rule, cann, default, got 'best'"):
        api.estimate(TEXT, "ascend910a", policy="best")
    with pytest.raises(ValueError, match="shape: expected a form like"):
        api.estimate("B1,N2", "ascend910a")
    with pytest.raises(ValueError, match="does not fit"):
        api.estimate("B1,N2,S4096,D64", "ascend910a", 1)


def test_tune_then_auto_uses_the_table(tmp_path, monkeypatch):
    best = api.tune(TEXT, "ascend910a", strategy="exhaustive")
    results = api.tune([TEXT, "B1,N2,S20,D64"], "ascend910a", strategy="exhaustive")
    assert [r.shape.q_len for r in results] == [300, 20] and results[0].tile == best.tile
    results.table().save(tmp_path / "table.json")
    monkeypatch.setenv("NPUMODEL_TABLE_PATH", str(tmp_path / "table.json"))
    assert api.resolve(TEXT, "ascend910a") == Resolved(best.tile, "auto: table")
    with pytest.warns(TileTableWarning, match="no row serves q_len=300 .* on ascend310p3"):
        assert api.resolve(TEXT, "ascend310p3").source == "auto: model"
    monkeypatch.delenv("NPUMODEL_TABLE_PATH")
    assert api.resolve(TEXT, "ascend910a").source == "auto: model"
    with use_table(best.table()):
        assert api.resolve(TEXT, "ascend910a").source == "auto: table"


def test_trace():
    assert api.trace(TEXT, "ascend910a", "64x64") is not None
