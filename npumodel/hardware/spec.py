"""DeviceSpec: every number of a chip that the model reads, in SI units or per cycle of a named clock."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from npumodel.workload import DTYPE_BYTES

ARCHS = ("coupled", "split", "direct")
OVERFLOWS = ("strict", "spill")

#: Paths that an architecture cannot do without; the others may be None.
ARCH_PATHS = {
    "coupled": ("l0c_to_ub_bytes_per_cycle", "ub_to_l1_bytes_per_cycle"),
    "split": ("l0c_to_gm_bytes_per_cycle",),
    "direct": ("l0c_to_ub_bytes_per_cycle", "ub_to_l1_bytes_per_cycle"),
}
#: The fields that may be None: the chip has no such path.
OPTIONAL = ("l0c_to_gm_bytes_per_cycle", "l0c_to_ub_bytes_per_cycle", "ub_to_l1_bytes_per_cycle")


def _static():
    return dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One chip. Reals are PyTree leaves (differentiable); names are static. None: the chip has no such path.

    Bytes per cycle are counted in cycles of the cube clock for `gm_to_l1`, `l0c_to_*` and `l1_to_*`, and in cycles
    of the vector clock for `gm_to_ub`, `ub_to_gm` and `ub_to_l1`.

    Plain and NumPy numbers are checked and kept as floats (an integer that a float cannot hold exactly is refused);
    JAX arrays and tracers are taken as they are, and so is everything that JAX puts in when it rebuilds a spec
    (gradients, axis numbers, ...). Specs are not hashable: share compiled functions through `anonymous()`.

    Raises ValueError that lists every bad field at once (expected, got).
    """

    name: str = _static()
    soc: str = _static()
    family: str = _static()
    arch: str = _static()  # "coupled" | "split" | "direct"
    overflow: str = _static()  # tile larger than L1: "strict" = illegal, "spill" = refetched every step

    cube_cores: Any  # cores with a matrix unit, >= 1
    vector_cores_per_cube: Any  # vector units that share one cube core's work (1 coupled, 2 split and direct), >= 1
    cube_hz: Any
    vector_hz: Any

    macs_per_cycle: Any  # dict dtype -> multiply-adds per cycle of one cube; a missing dtype is not supported
    mmad_head_cycles: Any  # start-up of one matrix instruction, cycles of the cube clock, >= 0

    l1_bytes: Any  # per cube core
    l0a_bytes: Any
    l0b_bytes: Any
    l0c_bytes: Any
    ub_bytes: Any  # per vector unit
    l2_bytes: Any  # whole chip
    hbm_bytes: Any  # whole chip, capacity

    hbm_bytes_per_s: Any  # whole chip, nominal
    hbm_efficiency: Any  # achieved share of nominal, 0 < x <= 1
    gm_to_l1_bytes_per_cycle: Any  # cube clock; MTE2 of the cube core, data in L2
    gm_to_ub_bytes_per_cycle: Any  # vector clock; MTE2 of one vector unit, data in L2
    ub_to_gm_bytes_per_cycle: Any  # vector clock; MTE3 of one vector unit
    l0c_to_gm_bytes_per_cycle: Any  # cube clock; fixpipe; None on coupled
    l0c_to_ub_bytes_per_cycle: Any  # cube clock; coupled: vector unit; direct: fixpipe, per vector unit; None on split
    ub_to_l1_bytes_per_cycle: Any  # vector clock; coupled, direct: MTE3 of one vector unit; None on split
    l1_to_l0a_bytes_per_cycle: Any  # cube clock; MTE1
    l1_to_l0b_bytes_per_cycle: Any  # cube clock; MTE1
    burst_half_bytes: Any  # a GM transfer of this many bytes gets half of the bandwidth: bw(b) = peak b / (b + half)

    vector_elements_per_cycle: Any  # fp32 add, multiply, cast
    exp_elements_per_cycle: Any
    reduce_elements_per_cycle: Any  # row max and row sum, fp32
    vector_instr_cycles: Any  # fixed cost of one vector instruction, cycles of the vector clock, >= 0
    vector_tile_bytes: Any  # fp32 scores that one vector pass works on

    sync_cycles: Any  # one hand-over between cube and vector unit, cycles of the cube clock, >= 0
    launch_base_s: Any  # one kernel launch, >= 0
    launch_per_core_s: Any  # added per core that takes part, >= 0
    launch_per_task_s: Any  # added per task that a core starts, >= 0

    def __post_init__(self):
        problems = check(vars(self))
        if problems:
            raise ValueError("\n".join([f"DeviceSpec {self.name!r}: {len(problems)} bad field(s)", *problems]))
        for name in NUMBERS:
            object.__setattr__(self, name, _as_float(getattr(self, name)))

    def replace(self, **changes) -> DeviceSpec:
        """A copy with some fields changed, checked again.

        Raises ValueError for a name that is no field (with the nearest ones) and for a bad value.
        """
        names = [field.name for field in dataclasses.fields(self)]
        unknown = [f"  {key}: no such field{near(key, names)}" for key in changes if key not in names]
        if unknown:
            raise ValueError("\n".join(["DeviceSpec.replace: expected fields of DeviceSpec", *unknown]))
        return dataclasses.replace(self, **changes)

    @property
    def numbers(self) -> dict[str, Any]:
        """Every number by its name; the matrix rates as "macs_per_cycle.float16" and so on."""
        found: dict[str, Any] = {}
        for name in NUMBERS:
            value = getattr(self, name)
            parts = {f"{name}.{key}": value[key] for key in sorted(value)} if isinstance(value, dict) else {name: value}
            found |= parts
        return found

    def with_numbers(self, changes: Mapping[str, Any]) -> DeviceSpec:
        """A copy with some of `numbers` changed, by the same names. Raises as `replace`."""
        fields: dict[str, Any] = {}
        for name, value in changes.items():
            field, _, key = name.partition(".")
            fields[field] = fields.get(field, getattr(self, field, {})) | {key: value} if key else value
        return self.replace(**fields)

    def anonymous(self) -> DeviceSpec:
        """A copy with empty name, soc and family: two devices of one arch then share one compiled function."""
        return self.replace(name="", soc="", family="")

    def fingerprint(self) -> str:
        """16 hex digits that change with any number, the arch or the overflow rule, and with nothing else.

        The same in every process, whatever type holds a number (3, 3.0, np.float32(3)). Numbers that went through
        a float32 computation are other numbers. Inside jit there are no numbers yet, and JAX's own error is raised.
        """
        lines = [f"arch={self.arch}", f"overflow={self.overflow}"]
        for name, value in self.numbers.items():
            lines.append(f"{name}={None if value is None else (float(value) + 0.0).hex()}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


STRINGS = tuple(field.name for field in dataclasses.fields(DeviceSpec) if field.metadata.get("static"))
NUMBERS = tuple(field.name for field in dataclasses.fields(DeviceSpec) if field.name not in STRINGS)

_NUMPY = (np.generic, np.ndarray)
_CHECKED = (int, float, *_NUMPY)
_REFUSED = (bool, complex, str, bytes, list, tuple, dict, set)

_ANY_POSITIVE = (0, False, np.inf, "a finite number > 0")
_OVERHEAD = (0, True, np.inf, "a finite number >= 0")
_COUNT = (1, True, np.inf, "a finite number >= 1")

#: Fields that count something.
COUNTS = ("cube_cores", "vector_cores_per_cube")
#: Fields whose range is not simply > 0: lowest value, whether it is allowed, highest value, the range in words.
RANGES = {
    "hbm_efficiency": (0, False, 1, "a number > 0 and <= 1"),
    **dict.fromkeys(COUNTS, _COUNT),
    **dict.fromkeys(("mmad_head_cycles", "vector_instr_cycles", "sync_cycles"), _OVERHEAD),
    **dict.fromkeys(("launch_base_s", "launch_per_core_s", "launch_per_task_s"), _OVERHEAD),
}


def check(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields of a spec, one line each: "  field: expected ..., got ...".

    Looks only at the fields that `values` has; a field that is not there is the caller's affair.
    """
    problems = [_string_problem(name, values[name]) for name in STRINGS if name in values]
    for name in NUMBERS:
        if name not in values:
            continue
        if name == "macs_per_cycle":
            problems += _macs_problems(values[name])
        else:
            problems.append(_number_problem(name, values[name], values.get("arch")))
    return [problem for problem in problems if problem]


def near(word: str, known: Iterable[str], show: Callable[[str], Any] = str) -> str:
    """ "; did you mean 'x' or 'y'?" for the known names that look like `word` (printed by `show`), or nothing."""
    found = [repr(show(name)) for name in difflib.get_close_matches(word, list(known), n=2)]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _string_problem(name: str, value: Any) -> str | None:
    allowed = {"arch": ARCHS, "overflow": OVERFLOWS}.get(name)
    if allowed is not None and not (isinstance(value, str) and value in allowed):
        return f"  {name}: expected one of {', '.join(allowed)}, got {value!r}"
    return None if isinstance(value, str) else f"  {name}: expected a string, got {value!r}"


def _macs_problems(macs: Any) -> list[str | None]:
    wanted = f"a dict of multiply-adds per cycle by dtype ({', '.join(DTYPE_BYTES)})"
    if not isinstance(macs, dict) or not macs:
        return [f"  macs_per_cycle: expected {wanted}, not empty, got {macs!r}"]
    unknown = [key for key in macs if key not in DTYPE_BYTES]
    problems: list[str | None] = [f"  macs_per_cycle: expected {wanted}, got the key {key!r}" for key in unknown]
    return problems + [_number_problem(f"macs_per_cycle.{key}", macs[key]) for key in macs if key not in unknown]


def _number_problem(name: str, value: Any, arch: Any = None) -> str | None:
    low, low_allowed, high, words = RANGES.get(name, _ANY_POSITIVE)
    if value is None:
        if name not in OPTIONAL:
            return f"  {name}: expected {words}, got None"
        needed = isinstance(arch, str) and name in ARCH_PATHS.get(arch, ())
        return f"  {name}: expected {words} (arch {arch!r} needs this path), got None" if needed else None
    if _is_no_number(value):
        return f"  {name}: expected {words}, got {value!r}"
    if not isinstance(value, _CHECKED):
        return None  # an array or a tracer of JAX, or another stand-in for a number
    if not _is_inside(value, low, low_allowed, high):
        return f"  {name}: expected {words}, got {value!r}"
    return None if _is_exact(value) else f"  {name}: expected {words} that a float holds exactly, got {value!r}"


def _is_no_number(value: Any) -> bool:
    if isinstance(value, _NUMPY):
        return value.dtype.kind in "bcOSUMm"
    return isinstance(value, _REFUSED)


def _is_inside(value: Any, low: float, low_allowed: bool, high: float) -> bool:
    above = value >= low if low_allowed else value > low
    return _all(above & (value <= high) & (value < np.inf))


def _is_exact(value: Any) -> bool:
    try:
        return _all(_as_float(value) == value)
    except OverflowError:
        return False


def _all(flags: Any) -> bool:
    return flags if isinstance(flags, bool) else bool(np.all(flags))  # np.all takes ten times as long


def _as_float(value: Any) -> Any:
    """Integers as floats (gradients need them), in a dict as well, as a copy; everything else as it is."""
    if isinstance(value, dict):
        return {key: _as_float(part) for key, part in value.items()}
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return value.astype(np.float64)
    return value


# Registered by hand, since jax.tree_util.register_dataclass rebuilds through __init__: a gradient, which may be
# zero or negative, would then be refused as a device.
def _children(spec: DeviceSpec):
    return tuple(getattr(spec, name) for name in NUMBERS), tuple(getattr(spec, name) for name in STRINGS)


def _keyed_children(spec: DeviceSpec):
    children, names = _children(spec)
    return [(jax.tree_util.GetAttrKey(n), child) for n, child in zip(NUMBERS, children, strict=True)], names


def _rebuild(names, children) -> DeviceSpec:
    spec = object.__new__(DeviceSpec)
    vars(spec).update(zip(STRINGS, names, strict=True))
    vars(spec).update(zip(NUMBERS, children, strict=True))
    return spec


jax.tree_util.register_pytree_with_keys(DeviceSpec, _keyed_children, _rebuild, _children)
