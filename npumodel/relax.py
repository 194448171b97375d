"""Integers that an optimiser can move: the relaxed ceiling, and choices between neighbours.

Every count that depends on a tile goes through `ceil_div` or `floor_div`. At temperature 0 they are exact; above it
they are smooth in both arguments and tend to the exact ones as the temperature falls.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

#: Most rounds of the Euclidean floor sum; enough for operands below 2**24 (Fibonacci growth: 35, tiles: under 15).
_EUCLID_ROUNDS = 24


def ceil_div(a, b, temperature=0.0):
    """ceil(a / b), for b > 0. temperature: a plain 0 gives the exact value only; an array chooses at run time.

    Smooth form: the Fourier series of the sawtooth with its harmonics damped by r = exp(-temperature),
    x + 1/2 + atan2(r sin t, 1 - r cos t) / pi with t = 2 pi (x - shift), shifted so that integers stay integers as
    r -> 1.
    """
    if isinstance(temperature, (int, float)) and temperature == 0:
        return _exact_ceil(a, b)
    cold = temperature <= 0
    warm = jnp.where(cold, 1.0, temperature)
    return jnp.where(cold, _exact_ceil(a, b), _soft_ceil(a / b, warm))


def floor_div(a, b, temperature=0.0):
    """floor(a / b), for b > 0, by the same relaxation: -ceil(-a / b)."""
    return -ceil_div(-a, b, temperature)


def _exact_ceil(a, b):
    a, b = jax.lax.stop_gradient(a), jax.lax.stop_gradient(b)
    n = jnp.ceil(a / b)  # the quotient may be one rounding off; both lines below are exact while n * b < 2**24
    n = jnp.where((n - 1) * b >= a, n - 1, n)
    return jnp.where(n * b < a, n + 1, n)


def _soft_ceil(x, temperature):
    r = jnp.exp(-jax.lax.stop_gradient(temperature))
    turn = 2 * jnp.pi * (x - jax.lax.stop_gradient(jnp.floor(x))) - jnp.arccos(r)
    return x + 0.5 + jnp.arctan2(r * jnp.sin(turn), 1 - r * jnp.cos(turn)) / jnp.pi


def tent(x):
    """max(0, 1 - |x|): the weight of a neighbour at distance x. At integers it is 1 for itself and 0 for all others."""
    return jnp.maximum(0.0, 1.0 - jnp.abs(x))


def gate(x):
    """x clipped to 0..1: how much of a step is switched on. At integers it is off or on."""
    return jnp.clip(x, 0.0, 1.0)


def floor_sum(count, slope, start, modulus, temperature=0.0):
    """Sum over i = 0 .. count-1 of floor((slope i + start) / modulus), for start >= 0, slope > 0, modulus > 0; O(log).

    Exact at temperature 0 (Euclid's algorithm on the triangle of lattice points); above it the mean of the floor,
    z - 1/2 for each term, which is what the damped sawtooth averages to.
    """
    if isinstance(temperature, (int, float)) and temperature == 0:
        return _euclid_floor_sum(count, slope, start, modulus)
    mean = count * ((start + slope * (count - 1) / 2) / modulus - 0.5)
    mean = jnp.where(count > 0, jnp.maximum(mean, 0.0), 0.0)
    return jnp.where(temperature <= 0, _euclid_floor_sum(count, slope, start, modulus), mean)


def _euclid_floor_sum(count, slope, start, modulus):
    def unfinished(carry):
        left, (n, *_) = carry
        return (left > 0) & (n > 0).any()

    def round_(carry):
        left, (n, a, b, m, total) = carry
        whole_a, whole_b = _exact_floor(a, m), _exact_floor(b, m)
        total = total + n * (n - 1) / 2 * whole_a + n * whole_b
        a, b = a - whole_a * m, b - whole_b * m
        top = _exact_floor(a * n + b, m)  # rows of lattice points left under the line: count them along the other axis
        return left - 1, (top, m, a * n + b - top * m, jnp.where(a > 0, a, 1.0), total)

    operands = [jax.lax.stop_gradient(jnp.asarray(x, jnp.result_type(float))) for x in (count, slope, start, modulus)]
    n, a, b, m = jnp.broadcast_arrays(*operands)
    start = (jnp.maximum(n, 0.0), a, b, m, jnp.zeros_like(n))
    _, (*_, total) = jax.lax.while_loop(unfinished, round_, (_EUCLID_ROUNDS, start))
    return total


def _exact_floor(a, b):
    return -_exact_ceil(-a, b)
