"""The wheel: what is in it, and that it works away from its source."""

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import npumodel

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = ["pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), "--quiet"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=out)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("npumodel-*.whl")))


def test_it_holds_every_file_of_the_package_and_no_other(wheel):
    source = {p for p in (ROOT / "npumodel").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {str(path.relative_to(ROOT)) for path in source}
    assert "npumodel/py.typed" in packed
    assert {f"npumodel/hardware/devices/{name}.toml" for name in npumodel.devices()} <= packed


def test_metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    about = email.message_from_bytes(wheel.read(name))
    assert (about["Name"], about["Version"]) == ("npumodel", npumodel.__version__)
    assert about["License-Expression"] == "Apache-2.0" and about["Requires-Python"] == ">=3.11"
    required = [line for line in about.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split("!")[0].split(">")[0] for line in required) == ["jax", "jaxlib", "numpy", "optax"]
    for bad in ("!=0.10.2", "!=0.11.0", "!=0.11.1"):
        assert all(bad in line for line in required if line.startswith("jax"))
    assert set(about.get_all("Provides-Extra")) == {"cli", "plot", "all", "test"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_console_script(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "npumodel = npumodel.cli:main" in wheel.read(name).decode()


def test_it_works_away_from_its_source(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import npumodel as n; print(n.__file__, *n.devices())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == [str(tmp_path / "npumodel" / "__init__.py"), *npumodel.devices()], done.stderr
