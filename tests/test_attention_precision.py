"""How exact blocked attention is: no less than the same formula with every intermediate in the dtype of the inputs."""

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import assert_within, inputs, jitted, largest, results

from npumodel.attention import blocked_attention, reference_attention


def exact(q, k, v):
    """In NumPy float64."""
    q, k, v = (np.asarray(x).astype(np.float64)[0, 0] for x in (q, k, v))
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights @ v / weights.sum(1, keepdims=True)


@jax.jit
def naive(q, k, v):
    """Scores, softmax and weights in the dtype of the inputs; products summed in float32, as matrix units do."""

    def product(equation, x, y):
        return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)

    scores = (product("bhqd,bhkd->bhqk", q, k) * q.shape[3] ** -0.5).astype(q.dtype)
    return product("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v).astype(q.dtype)


def inputs_with_ties(length, dtype, peak, seed):
    """Logits of standard deviation `peak` in which every key has a twin, about 1 apart: the softmax is a choice between
    two, which the last digits of the logits decide, for every query and however large the logits are.
    """
    rng = np.random.default_rng(seed)
    q, k, v, twin = (rng.normal(size=(1, 1, n, 80)) for n in (16, length // 2, length, length // 2))
    k = np.concatenate([k, k + twin / peak], axis=2)
    return tuple(jnp.asarray(x, dtype) for x in (peak * q, k, v))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_blocked_attention_is_as_exact_as_naive_attention(dtype):
    """Root mean square over queries and values, for logits from 1 to 1e4; one rounding of the output is allowed on top,
    and for the sample of queries and keys 5 %.
    """
    table = []
    for length in (64, 1024, 8192, 65536):
        for peak in (1.0, 30.0, 2000.0):
            squares = []
            for seed in range(16 if length < 65536 else 4):
                args = inputs_with_ties(length, dtype, peak, seed)
                want = exact(*args)
                got = jitted(*args, block_q=16, block_kv=256), naive(*args)
                errors = [np.asarray(x).astype(np.float64)[0, 0] - want for x in got]
                squares.append([np.mean(x**2) for x in (*errors, want)])
            ours, plain, size = np.sqrt(np.mean(squares, axis=0))
            table.append((length, peak, ours, plain, ours <= 1.05 * plain + float(jnp.finfo(dtype).eps) * size))
    lines = ["  keys  peak     blocked       naive  within"]
    lines += [f"{n:6} {peak:5} {ours:11.3e} {plain:11.3e}  {within}" for n, peak, ours, plain, within in table]
    assert all(row[-1] for row in table), "\n".join(lines)  # NaN is not within either


#: The default run leaves out the rest: one compilation each, of the same passes.
RUNS = {
    "16x16": (blocked_attention, (16, 16)),
    "1x16": (blocked_attention, (1, 16)),
    "64x64": (blocked_attention, (64, 64)),
    "reference": (reference_attention, None),
}
FIRST = (("plain", "1x16"), ("biased", "16x16"), ("biased", "reference"))


@pytest.mark.parametrize(
    "kind, run, blocks",
    [
        pytest.param(kind, *run, id=f"{kind}-{name}", marks=[pytest.mark.slow] * ((kind, name) not in FIRST))
        for kind in ("plain", "biased")
        for name, run in RUNS.items()
    ],
)
@pytest.mark.usefixtures("compiled_as_for_users")
def test_logits_of_any_size_are_exact_forward_and_backward(kind, run, blocks):
    """No query has two keys so close that float32 cannot tell which is ahead: its softmax is then one key, however the
    scores are rounded, and the gradients are those of float64. In groups of 4 heads the products of the two passes
    differ in their last digits (XLA on CPU).
    """
    q, k, v = inputs(b=1, n=4, kv=1, sq=64, d=64, peak=1.0)
    for scale in (1e4, 1e6, 1e8, 1e9, 1e11):
        options = dict(scale=scale)
        if kind == "biased":
            bias = 8 * np.random.default_rng(5).normal(size=(64, 64)) * scale
            sinks = jnp.asarray([-np.inf, scale, 20 * scale, -scale], "float32")
            options |= dict(bias=jnp.asarray(bias, "float32"), sinks=sinks, is_causal=True)
        (out, _), cotangents, by = results(q, k, v, blocks=blocks, attention=run, **options)
        assert_within(out, oracle.attention(q, k, v, **options)[0], 1e-6, f"output at {scale}")
        wants, sizes = oracle.gradient(q, k, v, *cotangents, **options)
        for name, got, want, size in zip(by._fields, by, wants, sizes, strict=True):
            if got is not None:
                assert_within(got, want, 1e-5 * largest(size), f"gradient by {name} at {scale}")
