"""What is asked: the shape of one call (attention, its backward pass, a matmul, a softmax), and its exact arithmetic.

Everything here is a plain integer; nothing depends on a device or a tile.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable

#: Bytes of one element of each dtype that the numerics and the model accept.
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: How a mask tensor is stored: bytes of one element ("additive" has the dtype's own size).
MASK_KINDS = (None, "bool", "additive")

_SHORT = {
    "B": "batch",
    "N": "q_heads",
    "KV": "kv_heads",
    "S": "q_len",
    "SKV": "kv_len",
    "D": "head_dim",
    "DV": "v_head_dim",
}
#: Short forms of the two sides of a window.
_SIDES = {"WL": 0, "WR": 1}
_FLAGS = ("causal", "softcap", "v_in_k", "backward")
#: Lengths of the examples, and what each is at most.
_LENGTHS = {"q_lengths": "q_len", "kv_lengths": "kv_len"}


@dataclasses.dataclass(frozen=True)
class AttentionShape:
    """One attention call: q [batch, q_heads, q_len, head_dim], k [batch, kv_heads, kv_len, head_dim],
    v [batch, kv_heads, kv_len, v_head_dim].

    `kv_heads`, `kv_len` and `v_head_dim` default to `q_heads`, `q_len` and `head_dim`.
    `causal` is bottom-right aligned: query i sees keys j <= i + kv_len - q_len.
    `window` = (left, right): query i also sees at most `left` keys before and `right` keys after its own, which is key
    i + kv_len - q_len; None (on either side) is no limit. `softcap`: whether the scores are capped by a tanh.
    `mask` says which mask tensor is read, if any: None, "bool" or "additive".
    `v_in_k`: V is the first v_head_dim columns of K (absorbed MLA) and is not moved on its own.
    `backward`: not the call but its gradient: dq, dk and dv from q, k, v, the output, its gradient do, and the row
    maxima and sums that the forward pass kept (for the price; `flash_attention` executes both passes by itself).
    `q_lengths`, `kv_lengths` [batch]: valid positions of each example, 0 .. q_len and 0 .. kv_len (None: all of them);
    the rest is padding, and skipped. Causality and windows are those of each example on its own: query i sees key
    i + its kv length - its q length. An example without queries or without keys does nothing.

    Raises ValueError (expected, got, cure) for a size that is no positive integer, for heads that do not
    divide, for an unknown dtype or mask, and for lengths of another number or out of range.
    """

    batch: int
    q_heads: int
    q_len: int
    head_dim: int
    kv_heads: int = None  # type: ignore[assignment]
    kv_len: int = None  # type: ignore[assignment]
    v_head_dim: int = None  # type: ignore[assignment]
    dtype: str = "float16"
    causal: bool = False
    mask: str | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: bool = False
    v_in_k: bool = False
    backward: bool = False
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None

    def __post_init__(self):
        for name, other in (("kv_heads", "q_heads"), ("kv_len", "q_len"), ("v_head_dim", "head_dim")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self, other))
        for name in _SHORT.values():
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads: expected a multiple of kv_heads={self.kv_heads}, got {self.q_heads}; "
                "each kv head serves the same number of query heads"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.mask not in MASK_KINDS:
            raise ValueError(f"mask: expected None, 'bool' or 'additive', got {self.mask!r}")
        for name in _FLAGS:
            object.__setattr__(self, name, bool(getattr(self, name)))
        object.__setattr__(self, "window", _window(self.window))
        for name, most in _LENGTHS.items():
            found = _lengths(name, getattr(self, name), self.batch, getattr(self, most))
            object.__setattr__(self, name, found)
        if self.v_in_k and self.v_head_dim > self.head_dim:
            raise ValueError(
                f"v_in_k: expected v_head_dim <= head_dim={self.head_dim} (V is a part of K), got {self.v_head_dim}"
            )
        if self.v_in_k and self.backward:
            raise ValueError("backward: expected a call without v_in_k, got v_in_k=True; no stage adds dV to dK")

    @property
    def kind(self) -> str:
        """What the model prices: "attention" or "backward"."""
        return "backward" if self.backward else "attention"

    @property
    def operation(self) -> str:
        """The same in words."""
        return "flash_attention" + "_backward" * self.backward

    @classmethod
    def parse(cls, text: str, **fields) -> AttentionShape:
        """Read the short form "B4,N32,S4096,D128" (also KV8, SKV512, DV64; a dtype, "causal", "backward", "bool",
        "additive"; "kv_lengths=4096/512x3", q_lengths alike: one example of 4096 keys and three of 512).

        Raises ValueError that names the part it cannot read, and the form it expects.
        """
        found = dict(fields)
        sides: list[int | None] = [None, None]
        for part in filter(None, re.split(r"[,\s]+", text.strip())):
            match = re.fullmatch(r"([A-Za-z]+)(\d+)", part)
            runs = re.fullmatch(r"(q_lengths|kv_lengths)=(\d+(x\d+)?(/\d+(x\d+)?)*)", part)
            low = part.lower()
            if match and match[1].upper() in _SIDES:
                sides[_SIDES[match[1].upper()]] = int(match[2])
                continue
            if runs:
                name, value = runs[1], _expanded(runs[2])
            elif low in DTYPE_BYTES:
                name, value = "dtype", low
            elif low in _FLAGS:
                name, value = low, True
            elif low in MASK_KINDS:
                name, value = "mask", low
            elif match and match[1].upper() in _SHORT:
                name, value = _SHORT[match[1].upper()], int(match[2])
            else:
                raise ValueError(_form(text, f"cannot read {part!r}"))
            if name in found and name not in fields:
                raise ValueError(_form(text, f"{name} is given twice"))
            found[name] = value
        missing = [short for short in ("B", "N", "S", "D") if _SHORT[short] not in found]
        if missing:
            raise ValueError(_form(text, f"{', '.join(missing)} missing"))
        if sides != [None, None]:
            found.setdefault("window", tuple(sides))
        return cls(**found)

    @property
    def has_lengths(self) -> bool:
        """Whether some position of some example is padding."""
        return self.q_lengths is not None or self.kv_lengths is not None

    @property
    def groups(self) -> tuple[AttentionShape, ...]:
        """The examples that do something as calls without lengths: one for each pair of lengths, by q_len, kv_len."""
        if not self.has_lengths:
            return (self,)
        of_q, of_kv = self.q_lengths or (self.q_len,) * self.batch, self.kv_lengths or (self.kv_len,) * self.batch
        counts = Counter(pair for pair in zip(of_q, of_kv, strict=True) if min(pair) > 0)
        return tuple(
            dataclasses.replace(self, batch=count, q_len=q, kv_len=kv, q_lengths=None, kv_lengths=None)
            for (q, kv), count in sorted(counts.items())
        )

    @property
    def largest(self) -> AttentionShape:
        """The smallest call without lengths that has room for all examples that do something.

        Raises ValueError if there are none.
        """
        groups = self.groups
        if not groups:
            raise ValueError(
                "q_lengths, kv_lengths: expected an example that has both queries and keys, got none; such a call does "
                "nothing, and has no plan"
            )
        count, q_len, kv_len = sum(g.batch for g in groups), max(g.q_len for g in groups), max(g.kv_len for g in groups)
        return dataclasses.replace(groups[0], batch=count, q_len=q_len, kv_len=kv_len) if self.has_lengths else self

    def _without_lengths(self, what: str) -> None:
        if self.has_lengths:
            raise ValueError(
                f"{what}: expected a shape without q_lengths and kv_lengths, got {self.label}; ask each of its `groups`"
            )

    @property
    def band(self) -> tuple[int, int]:
        """(low, high): query i sees the keys i + low .. i + high that exist; -q_len, kv_len where there is no limit.

        Raises ValueError for a shape with lengths: each example has its own."""
        self._without_lengths("band")
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        offset = self.kv_len - self.q_len
        low = -self.q_len if left is None else max(-self.q_len, offset - left)
        return low, self.kv_len if right is None else min(self.kv_len, offset + right)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of q, k, v and the output."""
        return DTYPE_BYTES[self.dtype]

    @property
    def mask_bytes(self) -> int:
        """Bytes read per score for the mask tensor (0 without one)."""
        return {None: 0, "bool": 1, "additive": self.element_bytes}[self.mask]

    @property
    def valid_pairs(self) -> int:
        """(query, key) pairs of the whole call that take part: all of q_len * kv_len per head, less what causality and
        the window and the lengths cut off."""
        if self.has_lengths:
            return sum(group.valid_pairs for group in self.groups)
        low, high = self.band
        pairs = _clipped_sum(self.q_len, high + 1, self.kv_len) - _clipped_sum(self.q_len, low, self.kv_len)
        return self.batch * self.q_heads * pairs

    @property
    def seen_keys(self) -> int:
        """Keys of a head that some query sees; the others are never read.

        Raises ValueError for a shape with lengths: each example has its own."""
        self._without_lengths("seen_keys")
        return self.kv_len - min(max(self.band[0], 0), self.kv_len)

    @property
    def flops(self) -> int:
        """Multiply-adds of the products over the valid pairs, each two: Q K^T and P V; backward Q K^T again, dO V^T,
        P^T dO, dS^T Q and dS K."""
        over_head, over_v_head = (3, 2) if self.backward else (1, 1)
        return 2 * self.valid_pairs * (over_head * self.head_dim + over_v_head * self.v_head_dim)

    @property
    def min_bytes(self) -> int:
        """Bytes of q, k, v and o, each moved once: no schedule can move fewer. Backward: of do, dq, dk and dv too; for
        keys that no query sees the last two are zeros. Row maxima and sums are not counted, and no padding is."""
        if self.has_lengths:
            return sum(group.min_bytes for group in self.groups)
        if self.backward:
            rows = 2 * self.q_heads * self.q_len + self.kv_heads * (self.seen_keys + self.kv_len)
            return self.element_bytes * self.batch * rows * (self.head_dim + self.v_head_dim)
        q_side = self.batch * self.q_heads * self.q_len * (self.head_dim + self.v_head_dim)
        kv_row = self.head_dim + self.v_head_dim * (not self.v_in_k)
        kv_side = self.batch * self.kv_heads * self.seen_keys * kv_row
        return self.element_bytes * (q_side + kv_side)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of q, k, v, o (backward: and of their gradients) and the mask tensor, which all lie in the memory at
        once, padding included. Of the mask this is the least that it can be: one [q_len, kv_len] for all heads
        (assumed: a shape does not say over what it is spread)."""
        q_side = self.batch * self.q_heads * self.q_len * (self.head_dim + self.v_head_dim)
        kv_side = self.batch * self.kv_heads * self.kv_len * (self.head_dim + self.v_head_dim * (not self.v_in_k))
        mask = self.mask_bytes * self.q_len * self.kv_len
        return self.element_bytes * (1 + self.backward) * (q_side + kv_side) + mask

    @property
    def label(self) -> str:
        """The short form, as `parse` reads it but with spaces: "B4 N32 S4096 D128 float16", and with lengths
        "B4 N32 S4096 D128 float16 kv_lengths=4096/512x3"."""
        parts = [f"B{self.batch}", f"N{self.q_heads}"]
        parts += [f"KV{self.kv_heads}"] * (self.kv_heads != self.q_heads)
        parts += [f"S{self.q_len}"]
        parts += [f"SKV{self.kv_len}"] * (self.kv_len != self.q_len)
        parts += [f"D{self.head_dim}"]
        parts += [f"DV{self.v_head_dim}"] * (self.v_head_dim != self.head_dim)
        parts += [f"{n}{w}" for n, w in zip(_SIDES, self.window or (None, None), strict=True) if w is not None]
        flags = [name for name in _FLAGS if getattr(self, name)]
        lengths = [f"{name}={_runs(getattr(self, name))}" for name in _LENGTHS if getattr(self, name) is not None]
        return " ".join([*parts, self.dtype, *flags, *filter(None, [self.mask]), *lengths])


@dataclasses.dataclass(frozen=True)
class MatmulShape:
    """`batch` products C = A B of their own: A [m, k], B [k, n], C [m, n], all of one dtype.

    Raises ValueError (expected, got) for a size that is no positive integer and for an unknown dtype.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "float16"

    kind = operation = "matmul"

    def __post_init__(self):
        _check_sizes(self, ("m", "n", "k", "batch"))

    @classmethod
    def parse(cls, text: str) -> MatmulShape:
        """Read the short form "M4096,N4096,K512" (also B8 and a dtype). Raises ValueError that names what it cannot."""
        short = {"M": "m", "N": "n", "K": "k", "B": "batch"}
        return cls(**_parts(text, short, "'M4096,N4096,K512' (also B8, float32)"))

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Multiply-adds, each two."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def min_bytes(self) -> int:
        """Bytes of A, B and C, each moved once."""
        return self.element_bytes * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of A, B and C, which all lie in the memory at once."""
        return self.min_bytes

    @property
    def label(self) -> str:
        """The short form, as `parse` reads it but with spaces: "M4096 N4096 K512 float16"."""
        return " ".join([*[f"B{self.batch}"] * (self.batch > 1), f"M{self.m}", f"N{self.n}", f"K{self.k}", self.dtype])


@dataclasses.dataclass(frozen=True)
class SoftmaxShape:
    """Softmax over the last axis of x [rows, cols]; the result has x's dtype.

    Raises ValueError (expected, got) for a size that is no positive integer and for an unknown dtype.
    """

    rows: int
    cols: int
    dtype: str = "float16"

    kind = operation = "softmax"

    def __post_init__(self):
        _check_sizes(self, ("rows", "cols"))

    @classmethod
    def parse(cls, text: str) -> SoftmaxShape:
        """Read the short form "R4096,C4096" (also a dtype). Raises ValueError that names what it cannot."""
        return cls(**_parts(text, {"R": "rows", "C": "cols"}, "'R4096,C4096' (also float32)"))

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """None of a matrix unit."""
        return 0

    @property
    def min_bytes(self) -> int:
        """Bytes of x and of the result."""
        return 2 * self.element_bytes * self.rows * self.cols

    @property
    def tensor_bytes(self) -> int:
        """Bytes of x and of the result, which both lie in the memory at once."""
        return self.min_bytes

    @property
    def label(self) -> str:
        """The short form, as `parse` reads it but with a space: "R4096 C4096 float16"."""
        return f"R{self.rows} C{self.cols} {self.dtype}"


#: Anything that has a price.
Shape = AttentionShape | MatmulShape | SoftmaxShape


def parse(text: str) -> Shape:
    """Read a short form: a matmul has an M or a K, a softmax an R or a C, all others are attention.

    Raises ValueError that names the part it cannot read, and the form it expects.
    """
    names = {name.upper() for name in re.findall(r"(?<![A-Za-z])([A-Za-z]+)\d+", text)}
    if names & {"M", "K"}:
        return MatmulShape.parse(text)
    return SoftmaxShape.parse(text) if names & {"R", "C"} else AttentionShape.parse(text)


def _check_sizes(shape, names: tuple[str, ...]):
    for name in names:
        object.__setattr__(shape, name, _positive(name, getattr(shape, name)))
    if shape.dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {shape.dtype!r}")


def _parts(text: str, short: dict[str, str], form: str) -> dict:
    """The fields of a short form, by name."""
    found: dict = {}

    def refused(why: str) -> ValueError:
        return ValueError(f"shape: expected a form like {form}, got {text!r}: {why}")

    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        match = re.fullmatch(r"([A-Za-z]+)(\d+)", part)
        if part.lower() in DTYPE_BYTES:
            name, value = "dtype", part.lower()
        elif match and match[1].upper() in short:
            name, value = short[match[1].upper()], int(match[2])
        else:
            raise refused(f"cannot read {part!r}")
        if name in found:
            raise refused(f"{name} is given twice")
        found[name] = value
    missing = [letter for letter, name in short.items() if name not in found and name != "batch"]
    if missing:
        raise refused(f"{', '.join(missing)} missing")
    return found


def _positive(name: str, value) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name}: expected a positive integer, got {value!r}")
    return int(value)


def _clipped_sum(count: int, start: int, top: int) -> int:
    """Sum over i = 0 .. count-1 of start + i, clipped to 0 .. top."""
    first, last = (min(max(x - start, 0), count) for x in (0, top))
    return (last - first) * (2 * start + first + last - 1) // 2 + (count - last) * top


def _window(window) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    good = isinstance(window, tuple | list) and len(window) == 2
    if not good or not all(x is None or (not isinstance(x, bool) and int(x) == x and x >= 0) for x in window):
        raise ValueError(f"window: expected None or (left, right), each None or an integer >= 0, got {window!r}")
    sides = tuple(None if x is None else int(x) for x in window)
    return None if sides == (None, None) else sides  # type: ignore[return-value]


def _lengths(name: str, lengths: Iterable | None, batch: int, most: int) -> tuple[int, ...] | None:
    """Lengths as plain integers; None where all of them are whole."""
    if lengths is None:
        return None
    given = list(lengths) if isinstance(lengths, Iterable) else [lengths]
    good = len(given) == batch and not any(isinstance(n, bool | str) for n in given)
    if not good or not all(int(n) == n and 0 <= n <= most for n in given):
        got = given if isinstance(lengths, Iterable) else lengths
        raise ValueError(f"{name}: expected {batch} integers (one an example) of 0..{most}, got {got}")
    found = tuple(map(int, given))
    return None if min(found) == most else found


def _runs(lengths: tuple[int, ...]) -> str:
    """Lengths in the short form, equal neighbours joined: "4096/512x3"."""
    runs = [(n, len(list(equal))) for n, equal in itertools.groupby(lengths)]
    return "/".join(f"{n}" + f"x{count}" * (count > 1) for n, count in runs)


def _expanded(runs: str) -> tuple[int, ...]:
    """The lengths of a short form."""
    pairs = [map(int, run.split("x")) for run in runs.split("/")]
    return tuple(n for n, *times in pairs for n in [n] * (times[0] if times else 1))


def _form(text: str, what: str) -> str:
    forms = (
        "'B4,N32,S4096,D128' (also KV8, SKV512, DV64, WL4095, WR0, bfloat16, causal, softcap, v_in_k, backward, "
        "kv_lengths=4096/512x3)"
    )
    return f"shape: expected a form like {forms}, got {text!r}: {what}"
