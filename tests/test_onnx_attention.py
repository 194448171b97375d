"""ONNX's published test cases for its Attention operator (opsets 23 to 25) against `flash_attention`.

Importing onnx.backend.test.case.node.attention computes them (since 1.23 the onnx wheel has no data files): a model of
one node, its inputs, and the outputs of ONNX's own reference. Every case of the installed onnx runs, so one that a
later onnx adds either passes or fails here. Left out are the variants "..._expanded", the operator written as a graph:
the same inputs and outputs.
"""

import jax.numpy as jnp
import numpy as np
import onnx.backend.test.case.node.attention  # noqa: F401, computes the cases
import pytest
from onnx import TensorProto
from onnx.backend.test.case.node import _NodeTestCases
from onnx.helper import get_attribute_value

from npumodel import flash_attention

CASES = {
    case.name: case
    for case in _NodeTestCases
    if case.model.graph.node[0].op_type == "Attention" and "_expanded" not in case.name
}

# What `flash_attention` does not do. It never holds all scores, so it has no qk_matmul_output (by its mode) to return.
SCORES = "qk_matmul_output: scores"
CAPPED = "qk_matmul_output: scores after softcap"
MASKED = "qk_matmul_output: scores after softcap, bias and masks"
WEIGHTS = "qk_matmul_output: weights"
DOUBLE = "softmax_precision: double, ours is float32 for float32 inputs"

#: All that is not covered. The other outputs of these cases are checked, and there is no case that does not run.
NOT_COVERED = {
    "test_attention_4d_with_qk_matmul": [SCORES],
    "test_attention_4d_with_qk_matmul_bias": [MASKED],
    "test_attention_4d_with_qk_matmul_softcap": [CAPPED],
    "test_attention_4d_with_qk_matmul_softmax": [WEIGHTS],
    "test_attention_4d_with_past_and_present_qk_matmul": [SCORES],
    "test_attention_4d_with_past_and_present_qk_matmul_bias": [MASKED],
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask": [MASKED],
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask": [MASKED],
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": [MASKED],
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": [MASKED],
    "test_attention_3d_with_past_and_present_qk_matmul": [SCORES],
    "test_attention_3d_with_past_and_present_qk_matmul_bias": [MASKED],
    "test_attention_3d_with_past_and_present_qk_matmul_softcap": [CAPPED],
    "test_attention_3d_with_past_and_present_qk_matmul_softmax": [WEIGHTS],
    "test_attention_23_fullymasked_qk_matmul_output_mode3_zero": [WEIGHTS],
    "test_attention_24_fullymasked_qk_matmul_output_mode3_zero": [WEIGHTS],
    "test_attention_24_qk_matmul_output_mode3_softmax_precision": [WEIGHTS],
    "test_attention_local_window_gqa_rank4_mask": [WEIGHTS, DOUBLE],
}


def attributes(node):
    return {a.name: get_attribute_value(a) for a in node.attribute}


def not_covered(node):
    given = attributes(node)
    scores = [SCORES, CAPPED, MASKED, WEIGHTS][given.get("qk_matmul_output_mode", 0)]
    double = given.get("softmax_precision") == TensorProto.DOUBLE
    return [scores] * ("qk_matmul_output" in node.output) + [DOUBLE] * double


# The operator by our function: the names are ONNX's, and one that is not here raises TypeError ------------------------


def attention(
    Q,
    K,
    V,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    is_causal=0,
    scale=None,
    softcap=0.0,
    q_num_heads=None,
    kv_num_heads=None,
    left_window_size=-1,
    right_window_size=-1,
    qk_matmul_output_mode=0,  # see NOT_COVERED
    softmax_precision=None,  # float32 whatever is asked: see NOT_COVERED
):
    flat = Q.ndim == 3
    key, value = (apart(K, kv_num_heads), apart(V, kv_num_heads)) if flat else (K, V)
    before = 0  # keys before the first query, its own not counted
    if past_key is not None:
        key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
        before = past_key.shape[2]
    elif nonpad_kv_seqlen is not None:
        before = nonpad_kv_seqlen - Q.shape[-2]
    limited = left_window_size >= 0 or right_window_size >= 0
    y = flash_attention(
        Q,
        together(key) if flat else key,
        together(value) if flat else value,
        None if attn_mask is None else whole(attn_mask, key.shape[2]),
        is_causal=bool(is_causal),
        causal_offset=before if is_causal or limited else None,
        window=(left_window_size, right_window_size) if limited else None,
        scale=scale,
        softcap=softcap or None,
        kv_lengths=nonpad_kv_seqlen,
        layout="BSH" if flat else "BNSD",
        q_heads=q_num_heads,
        kv_heads=kv_num_heads,
    )
    return {"Y": y, "present_key": key, "present_value": value}


def apart(x, heads):
    """[B, S, N * D] as [B, N, S, D]."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def together(x):
    """[B, N, S, D] as [B, S, N * D]."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def whole(mask, kv_len):
    """With four axes, and with the keys that it leaves out at the end masked."""
    missing = [(0, 0)] * (mask.ndim - 1) + [(0, kv_len - mask.shape[-1])]
    mask = np.pad(mask, missing, constant_values=False if mask.dtype == bool else -np.inf)
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


# The tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_published_case(name):
    case = CASES[name]
    (node,) = case.model.graph.node
    ((inputs, outputs),) = case.data_sets
    got = attention(**dict(zip(filter(None, node.input), inputs, strict=True)), **attributes(node))
    for output, want in zip(filter(None, node.output), outputs, strict=True):
        if output != "qk_matmul_output":
            assert_close(got[output], want, case)


def assert_close(got, want, case):
    """At the case's tolerance, or two units in the last place of a 16-bit type, in which ONNX rounds every step (its
    own test runner allows them for bfloat16)."""
    assert got.dtype == want.dtype
    rtol = max(case.rtol, 2 * float(jnp.finfo(want.dtype).eps))
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=case.atol, strict=True
    )


def test_the_list_is_exactly_what_is_not_covered():
    assert len(CASES) >= 93  # of onnx 1.23
    found = {name: not_covered(case.model.graph.node[0]) for name, case in CASES.items()}
    assert {name: reasons for name, reasons in found.items() if reasons} == NOT_COVERED
