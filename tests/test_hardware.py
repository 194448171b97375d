"""Devices: every number has a source, every mistake has a name, and a spec is a good PyTree."""

import dataclasses
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npumodel.hardware import DeviceSpec, device, devices, provenance
from npumodel.hardware.registry import CONFIDENCE
from npumodel.hardware.spec import ARCH_PATHS, NUMBERS, OPTIONAL, RANGES, STRINGS

REAL = [name for name in devices() if name != "article"]
PLAIN = [name for name in NUMBERS if name != "macs_per_cycle"]
OVERHEADS = [name for name in PLAIN if RANGES.get(name, (0, False))[:2] == (0, True)]


def toml(name: str) -> str:
    return (pathlib.Path(__file__).parents[1] / "npumodel/hardware/devices" / f"{name}.toml").read_text()


def without_table(text: str, field: str) -> str:
    head, _, tail = text.partition(f"[{field}]\n")
    return head + "[" + tail.partition("\n[")[2]


# the files


def test_the_shipped_names():
    assert devices() == ["article", "ascend310p3", "ascend910a", "ascend910b2", "ascend950pr"]


@pytest.mark.parametrize("name", devices())
def test_every_number_has_value_source_and_confidence(name):
    spec, facts = device(name), provenance(name)
    flat = {field: getattr(spec, field) for field in PLAIN}
    flat |= {f"macs_per_cycle.{dtype}": macs for dtype, macs in spec.macs_per_cycle.items()}
    assert {field: value for field, (value, _, _) in facts.items()} == flat
    for field, (_, source, confidence) in facts.items():
        assert len(source) > 5 and confidence in CONFIDENCE, field
        assert source.startswith("assumption:") == (confidence == "A"), field
        assert "/work" not in source and "/tmp" not in source, field
    assert spec.name == name


@pytest.mark.parametrize("name", devices())
def test_specs_are_plausible(name):
    spec = device(name)
    assert spec.overflow == ("spill" if name == "article" else "strict")
    assert spec.l1_bytes == 65536 if name == "article" else spec.l1_bytes in (2**19, 2**20)
    assert spec.l0a_bytes < spec.l1_bytes and spec.l0b_bytes < spec.l1_bytes < spec.l2_bytes < spec.hbm_bytes
    assert 0 < spec.launch_per_core_s < spec.launch_base_s < 1e-5
    assert all(getattr(spec, path) for path in ARCH_PATHS[spec.arch])
    assert ("bfloat16" in spec.macs_per_cycle) == (spec.arch != "coupled")
    assert 10e12 < 2 * spec.cube_cores * spec.cube_hz * spec.macs_per_cycle["float16"] < 500e12


def test_derived_values_follow_from_their_points():
    for name, (b1, w1), (b2, w2) in (
        ("ascend910b2", (8192, 1.246), (32768, 1.456)),
        ("ascend950pr", (8192, 1.184), (42.5 * 1024, 1.454)),
    ):
        slope = (1 / w1 - 1 / w2) / (1 / b1 - 1 / b2)
        assert device(name).burst_half_bytes == pytest.approx(slope / (1 / w2 - slope / b2), rel=1e-3)
    b2 = device("910b2")
    assert b2.launch_base_s + b2.cube_cores * b2.launch_per_core_s == pytest.approx(20.5e-6, rel=1e-3)


# names and files


@pytest.mark.parametrize("text", ["ascend910b2", "Ascend910B2", "910b2 ", "ascend-910-b2", "Ascend 910_B2"])
def test_name_variants(text):
    assert device(text) == device("ascend910b2")
    assert provenance(text) == provenance("ascend910b2")


def test_a_spec_is_returned_as_it_is():
    spec = device("Article")
    assert device(spec) is spec


@pytest.mark.parametrize("text, hint", [("910b", "ascend910b2"), ("artikel", "article"), ("950-p", "ascend950pr")])
def test_unknown_name(text, hint):
    with pytest.raises(ValueError) as error:
        device(text)
    message = str(error.value)
    assert all(name in message for name in devices()) and ".toml" in message
    assert f"did you mean '{hint}'" in message


@pytest.mark.parametrize("text", ["", "h100", None, 910])
def test_names_that_are_like_nothing(text):
    with pytest.raises(ValueError, match="expected one of article, "):
        device(text)


def test_changing_a_device_does_not_change_the_next_one():
    device("910a").macs_per_cycle["float16"] = 1.0
    assert device("910a").macs_per_cycle["float16"] == 4096


def test_a_path_works_like_a_name(tmp_path):
    path = tmp_path / "my chip.toml"
    path.write_text(toml("ascend910a").replace('name = "ascend910a"', 'name = "mine"'))
    assert device(path) == device(str(path)) == device("910a").replace(name="mine")
    assert provenance(path) == provenance("910a")


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda t: without_table(t, "l1_bytes"), ["l1_bytes: missing"]),
        (lambda t: t.replace("[l1_bytes]", "[l1_byte]"), ["l1_byte: unknown key; did you mean 'l1_bytes'", "bytes: m"]),
        (lambda t: t.replace("source = ", "# ", 2), ["cube_cores.source: missing", "per_cube.source: missing"]),
        (lambda t: t.replace("confidence = ", "# ", 1), ["cube_cores.confidence: missing"]),
        (lambda t: t.replace('confidence = "F"', 'confidence = "sure"', 1), ["confidence: expected one of F, V, M"]),
        (lambda t: t.replace("value = 32\n", 'value = "32"\n'), ["cube_cores.value: expected a number, got '32'"]),
        (lambda t: t.replace("value = 32\n", "value = true\n"), ["cube_cores.value: expected a number, got True"]),
        (lambda t: t.replace("value = 32\n", 'value = "none"\n'), ["cube_cores.value: expected a number, got 'none'"]),
        (lambda t: t.replace("value = 32\n", "value = inf\n"), ["cube_cores: expected a finite number >= 1, got inf"]),
        (lambda t: t.replace("value = 32\n", f"value = 1{'0' * 400}\n"), ["cube_cores: expected a finite number >= 1"]),
        (lambda t: t.replace("value = 32\n", "value = 32\nunit = 1\n"), ["cube_cores.unit: unknown key"]),
        (lambda t: t.replace('arch = "coupled"', "arch = 3"), ["arch: expected one of coupled, split, direct, got 3"]),
        (lambda t: t.replace('soc = "', 'description = "', 1), ["expected TOML"]),
        (lambda t: "l2_bytes = 3\n" + without_table(t, "l2_bytes"), ["l2_bytes: expected a table with value, source"]),
        (lambda t: "macs_per_cycle = 3\n" + t.replace("[macs_per_cycle", "[x"), ["expected one table per dtype"]),
        (lambda t: t.replace("macs_per_cycle.float16", "macs_per_cycle.fp16"), ["got the key 'fp16'"]),
        (lambda t: "this is not TOML", ["expected TOML"]),
        (lambda t: "", ["name: missing", "l1_bytes: missing", "macs_per_cycle: missing"]),
    ],
)
def test_a_broken_file_is_refused_with_all_its_faults(tmp_path, change, expected):
    path = tmp_path / "broken.toml"
    path.write_text(change(toml("ascend910a")))
    with pytest.raises(ValueError) as error:
        device(path)
    assert all(part in str(error.value) for part in ["broken.toml", *expected])


def test_files_that_are_no_text_or_not_there(tmp_path):
    (tmp_path / "raw.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("raw.toml", "absent.toml"):
        with pytest.raises(ValueError, match=name):
            device(str(tmp_path / name))


# construction


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("bad", [0, -1, -1e-9, np.nan, np.inf, np.float32(np.nan), np.array([1, -1]), "3", True])
def test_a_bad_number_names_its_field(name, bad):
    spec = device("ascend950pr")
    if isinstance(bad, int) and bad == 0 and not isinstance(bad, bool) and name in OVERHEADS:
        assert getattr(spec.replace(**{name: bad}), name) == 0
        return
    with pytest.raises(ValueError, match=rf"  {name}: expected .*, got "):
        spec.replace(**{name: bad})


@given(st.sampled_from(PLAIN), st.floats(max_value=0, exclude_max=True) | st.sampled_from([np.nan, np.inf]))
def test_no_number_below_zero_passes(name, bad):
    with pytest.raises(ValueError, match=name):
        device("910b2").replace(**{name: bad})


@given(st.sampled_from([n for n in PLAIN if n not in RANGES]), st.floats(min_value=1e-300, allow_infinity=False))
def test_every_positive_number_is_kept_exactly(name, value):
    assert getattr(device("910b2").replace(**{name: value}), name) == value


@pytest.mark.parametrize(
    "changes",
    [
        {"hbm_efficiency": 1.0001},
        {"cube_cores": 0.5},
        {"vector_cores_per_cube": 0},
        {"l1_bytes": None},
        {"l1_bytes": [1]},
        {"l1_bytes": 1j},
        {"hbm_bytes": 2**53 + 1},
        {"arch": "fused"},
        {"overflow": None},
        {"name": 3},
        {"macs_per_cycle": {}},
        {"macs_per_cycle": 4096},
        {"macs_per_cycle": {"fp16": 4096}},
        {"macs_per_cycle": {"float16": 0}},
        {"macs_per_cycle": {"float16": None}},
    ],
)
def test_other_bad_values(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        device("910b2").replace(**changes)


@pytest.mark.parametrize("arch", sorted(ARCH_PATHS))
def test_an_arch_needs_its_paths_and_no_others(arch):
    nothing = dict.fromkeys(OPTIONAL)
    with pytest.raises(ValueError) as error:
        device("910b2").replace(arch=arch, **nothing)
    assert [path for path in OPTIONAL if path in str(error.value)] == sorted(ARCH_PATHS[arch], key=OPTIONAL.index)
    device("910b2").replace(arch=arch, **(nothing | dict.fromkeys(ARCH_PATHS[arch], 64)))


def test_all_faults_at_once():
    fields = dataclasses.asdict(device("910b2")) | {"l1_bytes": 0, "cube_hz": np.nan, "arch": "x", "sync_cycles": -1}
    with pytest.raises(ValueError) as error:
        DeviceSpec(**fields)
    assert all(f"  {name}: expected" in str(error.value) for name in ("l1_bytes", "cube_hz", "arch", "sync_cycles"))
    assert "4 bad field" in str(error.value)


def test_replace_with_an_unknown_field():
    with pytest.raises(ValueError, match="l1_byte: no such field; did you mean 'l1_bytes'"):
        device("910b2").replace(l1_byte=1, cube_hz=2e9)


def test_integers_become_floats_of_the_same_value():
    spec = device("910b2").replace(l1_bytes=np.int64(2**19), l2_bytes=2**53, ub_bytes=np.array([1, 2]))
    assert (spec.l1_bytes, spec.l2_bytes) == (2**19, 2**53)
    leaves = jax.tree_util.tree_leaves(spec)
    assert all(np.asarray(leaf).dtype == np.float64 for leaf in leaves)


# as a PyTree


@pytest.mark.parametrize("name", devices())
def test_round_trip(name):
    spec = device(name)
    leaves, tree = jax.tree_util.tree_flatten(spec)
    assert len(leaves) == sum(value is not None for value, _, _ in provenance(name).values())
    assert jax.tree_util.tree_unflatten(tree, leaves) == spec
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(spec)[0]]
    assert ".l1_bytes" in paths and ".macs_per_cycle['float16']" in paths


def total(spec):
    return sum(jax.tree_util.tree_leaves(spec))


def test_tree_map_may_make_anything_of_the_leaves():
    spec = device("950pr")
    for change in (lambda x: -x, lambda x: 0.0, lambda x: np.nan, lambda x: None, lambda x: "text", lambda x: object()):
        jax.tree_util.tree_map(change, spec)
    assert jax.tree_util.tree_map(lambda x: 2 * x, spec).l1_bytes == 2 * spec.l1_bytes


@pytest.mark.parametrize("name", ["ascend910a", "ascend910b2", "ascend950pr"])
def test_jit_grad_and_vmap(name):
    spec = device(name)
    assert jax.jit(total)(spec) == pytest.approx(total(spec), rel=1e-6)
    gradient = jax.jit(jax.grad(total))(spec)
    assert all(leaf == 1 for leaf in jax.tree_util.tree_leaves(gradient))
    assert isinstance(jax.device_get(jax.tree_util.tree_map(jnp.negative, gradient)), DeviceSpec)
    many = jax.tree_util.tree_map(lambda x: jnp.full(3, x), spec)
    assert jnp.shape(jax.vmap(total)(many)) == (3,)
    axes = jax.tree_util.tree_map(lambda _: 0, spec)  # a spec of axis numbers is no device, and needs to be none
    assert jnp.shape(jax.vmap(total, in_axes=(axes,))(many)) == (3,)
    sizes = jnp.array([1.0, 2.0])
    assert jax.vmap(lambda size: spec.replace(l1_bytes=size).l1_bytes)(sizes).tolist() == [1, 2]


def test_two_devices_of_one_arch_share_a_compiled_function():
    traced = []

    @jax.jit
    def price(spec):
        traced.append(spec.arch)
        return total(spec)

    for name in ("ascend910a", "ascend310p3"):
        price(device(name).anonymous())
    assert traced == ["coupled"]
    assert [getattr(device("910a").anonymous(), name) for name in STRINGS] == ["", "", "", "coupled", "strict"]


# fingerprint


def test_fingerprint_changes_with_every_number_and_not_with_the_name():
    spec = device("950pr")
    prints = [spec.fingerprint()]
    prints += [spec.replace(**{name: getattr(spec, name) * (1 - 1e-15)}).fingerprint() for name in PLAIN]
    prints += [spec.replace(macs_per_cycle=spec.macs_per_cycle | {"float16": 1}).fingerprint()]
    prints += [spec.replace(macs_per_cycle={"float16": 4096}).fingerprint()]
    prints += [spec.replace(l0c_to_gm_bytes_per_cycle=None).fingerprint()]
    prints += [spec.replace(arch="split").fingerprint(), spec.replace(overflow="spill").fingerprint()]
    assert len(set(prints)) == len(prints)
    assert spec.anonymous().fingerprint() == spec.replace(l1_bytes=np.int32(spec.l1_bytes)).fingerprint() == prints[0]
    assert spec.replace(l1_bytes=jnp.float32(spec.l1_bytes)).fingerprint() == prints[0]


def test_fingerprint_is_the_same_in_another_process():
    code = "import npumodel.hardware as h; print(h.device('910b2').fingerprint())"
    root = pathlib.Path(__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == device("910b2").fingerprint()
