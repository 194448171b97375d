"""Devices: every number has a source, every mistake has a name, and a spec is a good PyTree."""

import dataclasses
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npumodel.hardware import DeviceSpec, device, devices, provenance, registry
from npumodel.hardware.registry import CONFIDENCE
from npumodel.hardware.spec import ARCH_PATHS, NUMBERS, OPTIONAL, RANGES, STRINGS

REAL = [name for name in devices() if name != "article"]
PLAIN = [name for name in NUMBERS if name != "macs_per_cycle"]
OVERHEADS = [name for name in PLAIN if RANGES.get(name, (0, False))[:2] == (0, True)]

SHIPPED = """article ascend310b1 ascend310p1 ascend310p3 ascend910a ascend910b1 ascend910b2 ascend910b3 ascend910b4
ascend910b_gen1 ascend910c ascend910premiuma ascend910proa ascend910prob ascend950dt_957x ascend950dt_9581
ascend950dt_958x ascend950pr ascend950pr_957x""".split()

#: Cube and vector cores, fp16 TFLOP/s, L2 in MiB, DRAM in GiB and in TB/s (None: no figure), from the fact sheet.
FACTS = {
    "ascend910a": (32, 32, 262, 32, 32, 1.2),
    "ascend910proa": (32, 32, 288, 32, 32, None),
    "ascend910prob": (30, 30, 283, 32, 32, None),
    "ascend910premiuma": (32, 32, 320, 32, 32, None),
    "ascend910b_gen1": (30, 30, 221, 32, 32, None),
    "ascend910b1": (24, 48, 364, 192, 64, 1.8),
    "ascend910b2": (24, 48, 354, 192, 64, 1.6),
    "ascend910b3": (20, 40, 295, 192, 64, 1.6),
    "ascend910b4": (20, 40, 246, 96, 32, 0.8),
    "ascend910c": (24, 48, 354, 192, 64, 1.6),
    "ascend310p1": (10, 10, 87, 16, 24, None),
    "ascend310p3": (8, 8, 69.5, 16, 24, 0.2048),
    "ascend310b1": (1, 1, 10.0, 4, None, None),
    "ascend950pr": (32, 64, 432.5, 128, 128, 1.6),
    "ascend950pr_957x": (28, 56, 378.5, 128, 128, 1.6),
    "ascend950dt_957x": (28, 56, 378.5, 128, 96, 3.7),
    "ascend950dt_958x": (32, 64, 432.5, 128, 96, 3.22),
    "ascend950dt_9581": (32, 64, 432.5, 128, 144, 4.0),
}


def toml(name: str) -> str:
    return (pathlib.Path(__file__).parents[1] / "npumodel/hardware/devices" / f"{name}.toml").read_text()


def without_table(text: str, field: str) -> str:
    head, _, tail = text.partition(f"[{field}]\n")
    return head + "[" + tail.partition("\n[")[2]


# the files


def test_the_shipped_names():
    assert devices() == SHIPPED and set(REAL) == set(FACTS)


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


@pytest.mark.parametrize("name", REAL)
def test_numbers_are_those_of_the_fact_sheet(name):
    spec, facts = device(name), provenance(name)
    cubes, vectors, peak, l2, dram, rate = FACTS[name]
    assert (spec.cube_cores, spec.cube_cores * spec.vector_cores_per_cube) == (cubes, vectors)
    assert 2e-12 * spec.cube_cores * spec.cube_hz * spec.macs_per_cycle["float16"] == pytest.approx(peak, rel=3e-3)
    assert spec.l2_bytes == l2 * 2**20
    for field, value, unit in (("hbm_bytes", dram, 2**30), ("hbm_bytes_per_s", rate, 1e12)):
        assert facts[field][2] == "A" if value is None else getattr(spec, field) == pytest.approx(value * unit)
    assert spec.l0a_bytes == spec.l0b_bytes == 65536
    assert spec.l0c_bytes == (128 if spec.arch == "split" or name == "ascend310b1" else 256) * 1024
    assert spec.ub_bytes == {"split": 192, "direct": 248}.get(spec.arch, 248 if name == "ascend310b1" else 256) * 1024
    assert spec.macs_per_cycle["float32"] == (256 if spec.arch == "direct" else 1024)


@pytest.mark.parametrize("name", REAL)
def test_a_text_names_the_ini_of_another_chip_only_as_an_assumption(name):
    for field, (_, source, confidence) in provenance(name).items():
        inis = {ini.lower() for ini in re.findall(r"(?:Ascend)?(\w+)\.ini", source)}
        allowed = {device(name).soc.lower().removeprefix("ascend"), "a2a3", "platforminfo"}
        assert confidence == "A" or "the same on" in source or inis <= allowed, field


def test_derived_values_follow_from_their_points():
    for name, (b1, w1), (b2, w2) in (
        ("ascend910b2", (8192, 1.246), (32768, 1.456)),
        ("ascend950pr", (8192, 1.184), (42.5 * 1024, 1.454)),
    ):
        slope = (1 / w1 - 1 / w2) / (1 / b1 - 1 / b2)
        assert device(name).burst_half_bytes == pytest.approx(slope / (1 / w2 - slope / b2), rel=1e-3)
    b2 = device("910b2")
    assert b2.launch_base_s + b2.cube_cores * b2.launch_per_core_s == pytest.approx(20.5e-6, rel=1e-3)
    b1 = device("910b1")
    assert b1.hbm_bytes_per_s * b1.hbm_efficiency == pytest.approx(b2.hbm_bytes_per_s * b2.hbm_efficiency, rel=5e-3)
    for name, rate in (("950dt_958x", 61), ("950dt_957x", 80)):
        spec = device(name)
        assert spec.hbm_bytes_per_s == pytest.approx(rate * spec.cube_cores * spec.cube_hz, rel=2e-3)


# names and files


@pytest.mark.parametrize("text", ["ascend910b2", "Ascend910B2", "910b2 ", "ascend-910-b2", "Ascend 910_B2"])
def test_name_variants(text):
    assert device(text) == device("ascend910b2")
    assert provenance(text) == provenance("ascend910b2")


@pytest.mark.parametrize("name", devices())
def test_every_name_in_other_cases_and_with_blanks(name):
    short = name.removeprefix("ascend")
    for text in (name.upper(), f" {short}\n", f"Ascend {short}".replace("_", "-")):
        assert device(text).name == name
    if name not in ("article", "ascend910b_gen1"):
        assert device(device(name).soc).name == name


@pytest.mark.parametrize(
    "name, aliases",
    [
        ("ascend910c", ["910C", "910_93", "Ascend910_9382", "Ascend910_9392", "ascend910-9392 "]),
        ("ascend910b3", ["Ascend910B3"]),
        ("ascend310p3", ["Ascend310P3"]),
        ("ascend950pr", ["Ascend950PR", "Ascend950PR_9589", "950pr_958x"]),
        ("ascend950pr_957x", ["Ascend950PR_9579"]),
        ("ascend910b_gen1", ["910b-gen1"]),
    ],
)
def test_aliases(name, aliases):
    assert [device(alias).name for alias in aliases] == [name] * len(aliases)
    assert provenance(aliases[-1]) == provenance(name)


def test_no_two_devices_share_a_spelling():
    aliases = [alias for name in devices() for alias in tomllib.loads(toml(name)).get("aliases", [])]
    assert len(registry._spellings()) == len(devices()) + len(aliases)


def test_a_spec_is_returned_as_it_is():
    spec = device("Article")
    assert device(spec) is spec


@pytest.mark.parametrize(
    "text, hint",
    [
        ("910b", "'ascend910b1' or 'ascend910b2' or 'ascend910b3' or 'ascend910b4' or 'ascend910b_gen1'"),
        ("Ascend910B", "'ascend910b1' or 'ascend910b2' or 'ascend910b3' or 'ascend910b4' or 'ascend910b_gen1'"),
        ("910Z", "'ascend910c' or 'ascend910a'"),
        ("950 DT", "'ascend950dt_957x' or 'ascend950dt_9581' or 'ascend950dt_958x'"),
        ("ascend910_9391", "'Ascend910_9392' or 'Ascend910_93'"),
        ("artikel", "'article'"),
    ],
)
def test_unknown_name(text, hint):
    with pytest.raises(ValueError) as error:
        device(text)
    message = str(error.value)
    assert all(name in message for name in devices()) and ".toml" in message
    assert f"did you mean {hint}?" in message


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


# a base


def based(path: pathlib.Path, text: str = "", base: str = "ascend910b2") -> pathlib.Path:
    """A file with a base and its own name, and `text` below."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'base = "{base}"\ndescription = "d"\nname = "mine"\nsoc = "none"\n{text}\n')
    return path


def entry(field: str, value: object) -> str:
    return f'{field} = {{value = {value}, source = "assumption: a test", confidence = "A"}}'


def faults(path: pathlib.Path) -> str:
    with pytest.raises(ValueError) as error:
        device(path)
    return str(error.value)


def test_a_base_gives_all_that_the_file_does_not_say(tmp_path):
    path = based(tmp_path / "mine.toml")
    assert device(path) == device("910b2").replace(name="mine", soc="none")
    assert provenance(path) == provenance("910b2")
    strings = 'family = "own"\narch = "direct"\noverflow = "spill"\n'
    paths = "\n".join(entry(field, 128) for field in ARCH_PATHS["direct"])
    spec = device(based(path, strings + paths))
    assert (spec.family, spec.arch, spec.overflow, spec.ub_to_l1_bytes_per_cycle) == ("own", "direct", "spill", 128)


def test_one_number_can_be_another(tmp_path):
    path = based(tmp_path / "mine.toml", entry("l1_bytes", 2**20))
    assert device(path) == device("910b2").replace(name="mine", soc="none", l1_bytes=2**20)
    changed = provenance("910b2") | {"l1_bytes": (2**20, "assumption: a test", "A")}
    assert provenance(path) == changed and list(provenance(path)) == list(changed)


@pytest.mark.parametrize("base, dtypes", [("910b2", 3), ("910a", 2)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_dtype_can_be_another(tmp_path, base, dtypes, dtype):
    path = based(tmp_path / "mine.toml", entry(f"macs_per_cycle.{dtype}", 2048), base)
    macs = device(base).macs_per_cycle
    assert device(path).macs_per_cycle == macs | {dtype: 2048} and len(macs) == dtypes
    assert provenance(path)[f"macs_per_cycle.{dtype}"] == (2048, "assumption: a test", "A")


def test_a_base_by_its_path_from_the_file(tmp_path, monkeypatch):
    based(tmp_path / "chips" / "first.toml", entry("l1_bytes", 2**20), " Ascend910_9392 ")
    based(tmp_path / "second.toml", entry("l2_bytes", 2**28), "chips/first.toml")
    third = based(tmp_path / "chips" / "third.toml", entry("sync_cycles", 7), "../second.toml")
    expected = device("910c").replace(name="mine", soc="none", l1_bytes=2**20, l2_bytes=2**28, sync_cycles=7)
    assert device(third) == expected
    monkeypatch.chdir(tmp_path / "chips")
    assert device("third.toml") == device("../chips/third.toml") == expected
    assert device(based(tmp_path / "fourth.toml", base=str(third))) == expected


def test_the_example_of_the_module(tmp_path):
    (example,) = re.findall(r"another L1:\n\n(.*?)\n\n`base`", str(registry.__doc__), re.S)
    (tmp_path / "example.toml").write_text(textwrap.dedent(example))
    assert device(tmp_path / "example.toml").l1_bytes == 2**20


def test_the_bases_of_shipped_files_are_shipped_and_end_somewhere():
    bases = {name: tomllib.loads(toml(name)).get("base") for name in devices()}
    for name in devices():
        seen, base = [name], bases[name]
        while base is not None:
            assert base in devices() and base not in seen and device(base).arch == device(name).arch
            seen, base = [*seen, base], bases[base]


@pytest.mark.parametrize(
    "base, expected",
    [
        ("910z", ["base: expected one of article, ", "path of a .toml file, got '910z'; did you mean 'ascend910c'"]),
        ("910b", ["got '910b'; did you mean 'ascend910b1' or"]),
        ("", ["base: expected one of article, "]),
        ("absent.toml", ["base: device file", "absent.toml: expected a readable TOML file"]),
        ("mine.toml", ["expected a file that is not based on itself, got", "mine.toml -> ", "give one of them a"]),
    ],
)
def test_a_bad_base_is_one_fault(tmp_path, base, expected):
    message = faults(based(tmp_path / "mine.toml", base=base))
    assert all(part in message for part in ["mine.toml: 1 problem(s)", *expected])
    assert "missing" not in message


def test_a_base_that_is_no_text(tmp_path):
    path = based(tmp_path / "mine.toml")
    for bad in ("3", "[1]", "{a = 1}", "true"):
        path.write_text(f'base = {bad}\ndescription = "d"\nname = "mine"\nsoc = "none"\n')
        assert "1 problem(s)\n  base: expected one of article, " in faults(path)


def test_a_ring_of_bases(tmp_path):
    names = ("a.toml", "b.toml", "c.toml")
    for name, base in zip(names, (*names[1:], names[0]), strict=True):
        based(tmp_path / name, base=base)
    message = faults(tmp_path / "a.toml")
    assert " -> ".join(str(tmp_path / name) for name in (*names, "a.toml")) in message
    (tmp_path / "d.toml").write_text((tmp_path / "a.toml").read_text())
    assert "not based on itself" in faults(tmp_path / "d.toml")


def test_all_faults_of_a_file_with_a_base_at_once(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "910z"\naliases = 3\nsoc = 3\narch = "x"\nl1_byte = 1\nl2_bytes = 1\nmacs_per_cycle = {}\n'
        + entry("ub_bytes", 0)
    )
    message = faults(path)
    expected = ["base: ", "aliases: expected a list of strings, got 3", "soc: expected a string", "arch: expected one"]
    expected += ["l1_byte: unknown key", "l2_bytes: expected a table", "ub_bytes: expected a finite number > 0, got 0"]
    expected += ["macs_per_cycle: expected one table per dtype", "description: missing", "name: missing"]
    assert all(f"\n  {part}" in message for part in expected) and f"{len(expected)} problem(s)" in message


def test_the_faults_of_a_base_are_shown_with_it(tmp_path):
    based(tmp_path / "base.toml", entry("l1_bytes", -1) + "\n" + entry("cube_hz", 0))
    message = faults(based(tmp_path / "mine.toml", "l2_bytes = 1", "base.toml"))
    assert "mine.toml: 2 problem(s)" in message and "base.toml: 2 problem(s)" in message
    assert all(part in message for part in ("\n    l1_bytes: exp", "\n    cube_hz: exp", "\n  l2_bytes: exp"))


def test_another_arch_than_the_base_needs_its_paths(tmp_path):
    message = faults(based(tmp_path / "mine.toml", 'arch = "direct"'))
    assert all(f"{path}: expected" in message for path in ARCH_PATHS["direct"]) and "2 problem(s)" in message


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
