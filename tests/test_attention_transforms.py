"""Blocked attention under JAX's transforms; what its loops visit; what it keeps in memory."""

import json
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import npumodel as npu
from npumodel.attention import backward, blocked_attention, forward, reference_attention
from npumodel.model.estimate import tasks_and_steps
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

blocked = partial(blocked_attention, block_q=16, block_kv=8)
LENGTHS = jnp.array([20, 37, 0, 5])


def inputs(batch=4, heads=4, kv_heads=2, length=37, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [(batch, n, length, dim) for n in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(rng.normal(size=size), "float32") for size in sizes]


Q, K, V = inputs()
BIAS = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 37, 37)), "float32")
SINKS = jnp.arange(4.0)


def loss(attention, q, k, v, bias, sinks, lengths):
    options = dict(is_causal=True, bias=bias, sinks=sinks, q_lengths=lengths, return_lse=True)
    out, lse = attention(q, k, v, **options)
    return jnp.sin(out).sum() + jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)).sum()


def gradients(attention):
    return jax.grad(partial(loss, attention), argnums=(0, 1, 2, 3, 4))


def assert_same(got, want, atol=2e-5):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)


# Transforms ----------------------------------------------------------------------------------------------------------


def again(*args, **options):
    """Blocked attention that forgets its results and computes them again in the backward pass."""
    bias, sinks, lengths = (options.pop(name) for name in ("bias", "sinks", "q_lengths"))
    call = jax.checkpoint(lambda q, k, v, b, s, n: blocked(q, k, v, bias=b, sinks=s, q_lengths=n, **options))
    return call(*args, bias, sinks, lengths)


expected_gradients = jax.jit(gradients(reference_attention))
RUNS = {"jit": jax.jit(gradients(blocked)), "checkpoint": jax.jit(gradients(again)), "eager": gradients(blocked)}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_gradients(run):
    args = Q, K, V, BIAS, SINKS, LENGTHS
    assert_same(run(*args), expected_gradients(*args))


def test_scan_over_layers():
    def layers(attention, q):
        turn = jax.checkpoint(lambda x, scale: (attention(x, scale * K, V, is_causal=True), None))
        return jnp.sin(jax.lax.scan(turn, q, jnp.array([0.5, 1.0, 2.0]))[0]).sum()

    assert_same(*(jax.jit(jax.grad(partial(layers, attention)))(Q) for attention in (blocked, reference_attention)))


MAPPED = [
    # q, k, v, bias, sinks, lengths: which are mapped
    (0, 0, 0, None, None, 0),
    pytest.param((0, None, None, 0, None, None), marks=pytest.mark.slow),
    pytest.param((None, 0, None, None, 0, None), marks=pytest.mark.slow),
    (None, None, None, 0, None, 0),
]


@pytest.mark.parametrize("axes", MAPPED, ids=str)
def test_vmap_is_a_loop_over_calls(axes):
    args = Q, K, V, BIAS, SINKS, LENGTHS
    args = [x if axis is None else jnp.stack([x, x[::-1], x // 2]) for x, axis in zip(args, axes, strict=True)]
    got = jax.jit(jax.vmap(gradients(blocked), in_axes=axes))(*args)
    for i in range(3):
        one = [x if axis is None else x[i] for x, axis in zip(args, axes, strict=True)]
        assert_same([x[i] for x in got], expected_gradients(*one))


def test_vmap_in_vmap_and_grad_of_vmap():
    def total(attention, k):
        twice = jax.vmap(jax.vmap(lambda q, k: attention(q, k, V, kv_lengths=LENGTHS), (0, None)), (None, 0))
        return jnp.sin(twice(jnp.stack([Q, -Q, 2 * Q]), k)).sum()

    keys = jnp.stack([K, 2 * K])
    assert_same(*(jax.jit(jax.grad(partial(total, f)))(keys) for f in (blocked, reference_attention)))


def test_vmap_joins_the_batch(monkeypatch):
    """The mapped axis becomes part of the batch: loops run as far as each example needs, not to the longest of all."""
    lengths = jnp.array([8, 37, 16, 1])
    whole = counted(monkeypatch, lambda: blocked(Q, K, V, kv_lengths=lengths))
    one = jax.vmap(lambda q, k, v, n: blocked(q[None], k[None], v[None], kv_lengths=n[None])[0])
    assert counted(monkeypatch, lambda: one(Q, K, V, lengths)) == whole


def test_jacrev():
    q, k, v = (x[:1, :, :4] for x in (Q, K, V))
    bias = BIAS[..., :4, :4]

    def part(attention, q, k, v, bias):
        return attention(q, k, v, bias=bias, kv_lengths=jnp.array([3]))[0, 1, :, :3]

    rows = (jax.jit(jax.jacrev(partial(part, f), argnums=(0, 1, 2, 3))) for f in (blocked, reference_attention))
    assert_same(*(jacobian(q, k, v, bias) for jacobian in rows))


def test_forward_mode_and_second_derivatives_are_refused():
    with pytest.raises(TypeError, match="jvp"):
        jax.jvp(lambda q: npu.flash_attention(q, K, V), (Q,), (Q,))

    def total(q):
        return jnp.sin(npu.flash_attention(q, K, V)).sum()

    for second in (jax.grad(lambda q: jax.grad(total)(q).sum()), jax.hessian(total)):
        with pytest.raises(TypeError, match="expected a first derivative .* got a second one .*reference_attention"):
            second(Q)


@pytest.mark.parametrize("name", ["softcap", "dropout_rate"])
def test_a_constant_is_not_differentiated_silently(name):
    def total(x):
        return blocked(Q, K, V, **{name: x}, dropout_key=jax.random.key(0)).sum()

    with pytest.raises(ValueError, match=f"{name}: expected a constant, got one to differentiate; use .*stop_gradient"):
        jax.grad(total)(0.5)
    assert np.isfinite(total(0.5))


def test_the_scale_and_an_additive_mask_have_gradients():
    def total(attention, scale, mask):
        return jnp.sin(attention(Q, K, V, mask, scale=scale)).sum()

    args = 0.3, BIAS[:, :1]
    both = (jax.jit(jax.grad(partial(total, f), argnums=(0, 1))) for f in (blocked, reference_attention))
    got, want = (gradient(*args) for gradient in both)
    assert_same(got, want, atol=2e-4)


def test_donated_buffers():
    def step(q, k, v):
        return jax.grad(lambda q: jnp.sin(npu.flash_attention(q, k, v)).sum())(q)

    want = step(Q, K, V)
    donated = jnp.array(Q)
    assert_same(jax.jit(step, donate_argnums=0)(donated, K, V), want)
    assert donated.is_deleted() and not K.is_deleted()
    out = jax.jit(lambda q: npu.flash_attention(q, K, V), donate_argnums=0)(jnp.array(Q))
    assert_same(out, jax.jit(reference_attention)(Q, K, V))


SHARDED = """
import json, re, jax, jax.numpy as jnp
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from npumodel.attention import blocked_attention, reference_attention

q = jax.random.normal(jax.random.key(0), (4, 4, 21, 8))
k, v, do = jax.random.normal(jax.random.key(1), (3, 4, 2, 21, 8))
do, lengths = jnp.repeat(do, 2, 1), jnp.array([20, 21, 0, 5])
sinks, bias = jnp.arange(4.0), jax.random.normal(jax.random.key(2), (1, 4, 21, 21))
blocked = partial(blocked_attention, block_q=8, block_kv=8)

def call(attention, q, k, v, bias, sinks, do, lengths):
    run = lambda *args: attention(*args[:3], bias=args[3], sinks=args[4], is_causal=True, q_lengths=lengths)
    out, back = jax.vjp(run, q, k, v, bias, sinks)
    return out, back(do)

args = q, k, v, bias, sinks, do, lengths
want = jax.jit(partial(call, reference_attention))(*args)
x = P("batch", "heads")
found = []
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(kind, kind))
    for biases in (True, False):  # a bias shared over the batch: its gradient is a sum over shards
        fixed = P(None, "heads"), P("heads")
        specs = x, x, x, *fixed, x, P("batch")
        outs = (x, (x, x, x, *fixed)) if biases else (x, (x, x, x))
        def run(q, k, v, bias, sinks, do, lengths):
            if biases:
                return call(blocked, q, k, v, bias, sinks, do, lengths)
            out, back = jax.vjp(lambda *qkv: blocked(*qkv, is_causal=True, q_lengths=lengths), q, k, v)
            return out, back(do)
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
        compiled = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=outs)).lower(*placed).compile()
        pairs = zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(want))
        error = max(float(jnp.abs(a - b).max()) for a, b in pairs)
        ops = re.findall(r"(all-[a-z]+|collective-[a-z]+|reduce-scatter)[a-z-]*[(]", compiled.as_text())
        found.append([biases, error if biases else 0.0, sorted(set(ops))])
refused = ""
try:
    jax.jit(blocked)(jax.device_put(q, NamedSharding(mesh, x)), k, v)
except ValueError as error:
    refused = str(error)
print(json.dumps([refused, found]))
"""


def test_shard_map_over_batch_and_heads_adds_no_collectives():
    """In a process of its own, with four devices. Only the gradient of what the shards share is summed over them."""
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, found = json.loads(done.stdout)
    assert "q: expected an array that no explicit mesh axis cuts, got P('batch', 'heads'" in refused
    assert len(found) == 4
    for shared, error, collectives in found:
        assert error < 2e-5
        assert collectives == (["all-reduce"] if shared else [])


# What is visited -----------------------------------------------------------------------------------------------------


def counted(monkeypatch, run, module=forward):
    """Executed steps of a pass: (all, those with a mask), counted where they run."""
    seen = {False: 0, True: 0}
    step = module.step

    def counting(*args):
        masked = args[-3]
        jax.debug.callback(lambda: seen.__setitem__(masked, seen[masked] + 1))
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "step", counting)
        jax.block_until_ready(run())
        jax.effects_barrier()
    return seen[False] + seen[True], seen[True]


def visible(q_len, kv_len, causal=False, window=(None, None), offset=None):
    """True where query i sees key j, from the definition."""
    place = np.arange(q_len)[:, None] + (kv_len - q_len if offset is None else offset)
    keys = np.arange(kv_len)[None]
    left, right = (10**9 if side is None else side for side in window)
    return (keys >= place - left) & (keys <= place + (0 if causal else right)) & (keys <= place + right)


def expected(sees, block_q, block_kv):
    """Blocks in which some query sees some key, and those of them in which one does not see all."""
    q_len, kv_len = sees.shape
    steps = edges = 0
    for row in range(0, q_len, block_q):
        row = min(row, max(q_len - block_q, 0))
        low, high = np.inf, 0  # the interval of keys that the rows see together
        for i in range(row, min(row + block_q, q_len)):
            keys = np.flatnonzero(sees[i])
            if len(keys):
                low, high = min(low, keys[0]), max(high, keys[-1] + 1)
        for column in range(0, kv_len, block_kv):
            if column < high and column + block_kv > low:
                steps += 1
                block = sees[row : row + block_q, column : column + block_kv]
                edges += not (block.all() and block.shape[1] == block_kv)
    return steps, edges


BANDS = [
    dict(q_len=64, kv_len=64),
    dict(q_len=64, kv_len=64, causal=True),
    dict(q_len=40, kv_len=70, causal=True),
    pytest.param(dict(q_len=70, kv_len=40, causal=True), marks=pytest.mark.slow),
    dict(q_len=64, kv_len=64, causal=True, window=(20, 0)),
    dict(q_len=50, kv_len=61, window=(3, 30)),
    pytest.param(dict(q_len=64, kv_len=64, causal=True, offset=-10), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_only_blocks_that_are_seen_are_visited_and_only_edges_masked(band, monkeypatch):
    sees = visible(**band)
    q, k, v = inputs(1, 1, 1, max(sees.shape), 4)
    q, k, v = q[:, :, : band["q_len"]], k[:, :, : band["kv_len"]], v[:, :, : band["kv_len"]]
    options = dict(is_causal=band.get("causal", False), window=band.get("window"), causal_offset=band.get("offset"))
    attention = partial(blocked_attention, block_q=16, block_kv=8, **options)
    result = []

    def run():
        result[:] = jax.vjp(attention, q, k, v)
        return result

    assert counted(monkeypatch, run) == expected(sees, 16, 8)
    out, back = result
    assert counted(monkeypatch, lambda: back(out), backward) == expected(sees, 16, 8)


def test_only_large_scores_are_computed_once_more_in_the_backward(monkeypatch):
    turns, online = [], backward._online

    def counting(*args):
        jax.debug.callback(lambda: turns.append(0))
        return online(*args)

    monkeypatch.setattr(backward, "_online", counting)
    q, k, v = inputs(1, 1, 1, 64, 4)
    for size, want in ((1.0, 0), (1e5, 4 * 8)):
        out, back = jax.vjp(partial(blocked_attention, block_q=16, block_kv=8, scale=size), q, k, v)
        jax.block_until_ready(back(out))
        jax.effects_barrier()
        assert len(turns) == want


def test_padding_and_other_sequences_are_not_visited(monkeypatch):
    q, k, v = inputs(1, 1, 1, 64, 4)
    one = partial(blocked_attention, q, k, v, block_q=16, block_kv=8)

    def steps(**options):
        return counted(monkeypatch, lambda: one(**options))

    assert steps(kv_lengths=jnp.array([17])) == (4 * 3, 4)  # of 8 blocks of keys, two in full and one in part
    assert steps(q_lengths=jnp.array([16])) == (8, 0)
    assert steps(q_lengths=jnp.array([0])) == (0, 0)
    ids = jnp.arange(64)[None] // 32
    assert steps(q_segment_ids=ids) == (4 * 4, 0)  # segments that lie together need no mask
    assert steps(q_segment_ids=jnp.where(ids == 1, -1, 7)) == (2 * 4, 0)  # a negative id is padding
    assert steps(q_segment_ids=jnp.arange(64)[None] % 2) == (4 * 8, 4 * 8)  # segments that lie mixed do
    q, k, v = (x[0].swapaxes(0, 1) for x in (q, k, v))
    one = partial(blocked_attention, q, k, v, layout="TND", block_q=16, block_kv=8)
    assert steps(cu_q_lengths=jnp.array([0, 16, 16, 48, 64])) == (2 + 2 * 4 + 2, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_the_executed_steps_and_flops_are_the_priced_ones(causal, monkeypatch):
    shape = AttentionShape(2, 4, 200, 16, kv_heads=2, kv_len=256, dtype="float32", causal=causal)
    q, k, v = inputs(2, 4, 2, 256, 16)
    tile = TileConfig(48, 64)
    monkeypatch.setattr("npumodel.attention.tiles.TILE_SCORES", 1)  # one head a task, as on the chip
    run = partial(blocked_attention, q[:, :, :200], k, v, is_causal=causal, block_q=48, block_kv=64)
    steps, _ = counted(monkeypatch, run)
    tasks, priced = tasks_and_steps(shape, tile)
    assert steps == priced
    assert 2 * steps * 48 * 64 * (16 + 16) >= shape.flops
    if not causal:
        assert steps == tasks * 4


# Memory and compilations ---------------------------------------------------------------------------------------------


def temporaries(length, options, backward, heads=2, dim=16):
    """Bytes that the compiled call keeps beside its arguments and results."""
    x = jax.ShapeDtypeStruct((1, heads, length, dim), "float32")

    def run(q, k, v):
        return npu.flash_attention(q, k, v, **options)

    if backward:
        run = jax.grad(lambda q, k, v: npu.flash_attention(q, k, v, **options).sum(), argnums=(0, 1, 2))
    analysis = jax.jit(run).lower(x, x, x).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.usefixtures("compiled_as_for_users")
@pytest.mark.parametrize("length", [65536, *(pytest.param(length, marks=pytest.mark.slow) for length in (4096, 16384))])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", [{}, dict(is_causal=True, window=(500, 0))], ids=["full", "window"])
def test_memory_is_linear_in_the_length(options, backward, length):
    tile = 12e6 if backward else 8e6  # scores of a tile, and what is made of them
    tensor = 4 * 2 * 16  # bytes per position of one of q, k, v: the passes keep a few such tensors
    assert temporaries(length, options, backward) <= tile + length * tensor * (6 if backward else 2.2)


@pytest.mark.usefixtures("compiled_as_for_users")
def test_memory_at_the_size_of_the_bench():
    assert temporaries(4096, {}, backward=True, heads=8, dim=64) <= 64e6


def test_numbers_do_not_compile_again():
    api_calls = jax.jit(
        lambda scale, window, offset, rate: npu.flash_attention(
            Q, K, V, is_causal=True, scale=scale, window=window, causal_offset=offset, dropout_rate=rate,
            dropout_key=jax.random.key(1),
        )
    )  # fmt: skip
    for args in ((0.5, (3, 0), 0, 0.1), (0.7, (30, 1), -5, 0.2)):
        api_calls(*args)
    assert api_calls._cache_size() == 1
