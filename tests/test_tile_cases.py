"""Bug reports about tiles, tuning and tables of other projects, each as a test: what must not happen here.

Numbers and lengths are those of the reports. What is not here is tested where it belongs: the winner for any order of
the candidates (b10), budgets (b12) and one search for many lengths (b6) in test_search, stale, broken and shared files
(b9) in test_table.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from npumodel import flash_attention
from npumodel.hardware import device
from npumodel.model.estimate import estimate, footprints, illegal
from npumodel.search import auto, rules, space
from npumodel.search import table as table_module
from npumodel.search.auto import resolve
from npumodel.search.table import Entry, Header, TileTable, TileTableWarning, use_table
from npumodel.search.tuner import tune
from npumodel.tile import TileConfig
from npumodel.workload import AttentionShape

B2 = device("ascend910b2")
LONG = AttentionShape(1, 8, 4096, 128)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing warned about, resolved or tuned on a miss yet."""
    monkeypatch.setattr(table_module, "_seen", set())
    monkeypatch.setattr(auto, "_resolved", {})
    monkeypatch.setattr(auto, "_learned", {})


def table_of(shape, tile, spec=B2):
    return TileTable((Entry.of(Header.of(spec), shape, tile, 1e-3),))


def need(shape, tile, buffer, spec=B2):
    return next(foot.needed for foot in footprints(shape, spec, tile) if foot.buffer == buffer)


def default_seconds(shape):
    return space.seconds_of(shape, [rules.default_tile(shape, B2)], B2)[0]


# Capacities ----------------------------------------------------------------------------------------------------------


def test_b1_every_buffer_of_a_block_is_counted():
    one, two, three = (need(LONG, TileConfig(128, 512, buffers=n), "L1") for n in (1, 2, 3))
    assert two - one == three - two == 512 * (128 + 128) * 2  # bytes of one more K and V block
    wide = TileConfig(128, 448, buffers=1)
    assert not illegal(LONG, B2, wide)
    (why,) = illegal(LONG, B2, wide.replace(buffers=2))
    assert f"L1 needs {need(LONG, wide.replace(buffers=2), 'L1'):,.0f} bytes, there are 524,288" in why


def test_b1_a_block_is_not_rounded_to_a_power_of_two():
    sizes = [need(LONG, TileConfig(128, kv), "L1") for kv in (256, 272, 288)]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] >= 16 * (128 + 128) * 2 * 2  # two of K and V; P comes on top


@pytest.mark.parametrize("dim", [256, 512])
def test_b2_no_tile_is_for_every_head_dim(dim):
    shape = AttentionShape(1, 16, 4096, dim, kv_heads=8, window=(1023, 0), causal=True)
    assert not illegal(shape, B2, resolve(shape, B2).tile)
    assert not illegal(shape, B2, rules.default_tile(shape, B2))
    assert illegal(shape, B2, TileConfig(128, 512, buffers=4))


def test_b2_capacities_are_those_of_the_device_asked_for():
    small = B2.replace(name="small", l1_bytes=2**17, ub_bytes=2**15)
    tile = resolve(LONG, small).tile
    assert not illegal(LONG, small, tile) and illegal(LONG, small, resolve(LONG, B2).tile)


def test_b3_a_row_of_a_larger_chip_is_no_answer_on_a_smaller_one():
    small = B2.replace(ub_bytes=2**15)
    best = resolve(LONG, B2).tile
    with use_table(table_of(LONG, best)), pytest.warns(TileTableWarning, match="spec_hash was .*, is .* now"):
        assert resolve(LONG, small).source == "auto: model"
    forged = table_of(LONG, best, small)  # as a table of a spec with a wrong capacity would have it
    table_module._seen.clear()
    lacks = r"passed over.*UB needs [\d,]+ bytes, there are 32,768"
    with use_table(forged), pytest.warns(TileTableWarning, match=lacks):
        found = resolve(LONG, small)
    assert found.source == "auto: model" and not illegal(LONG, small, found.tile)


# Keys ----------------------------------------------------------------------------------------------------------------


def test_b5_a_row_of_another_size_is_used_only_if_the_model_says_so():
    longer = dataclasses.replace(LONG, q_len=8192, kv_len=8192)
    chosen = auto.by_model([longer], B2)[0].tile
    for tile in (chosen, TileConfig(128, 128), TileConfig(256, 16, 1, 0)):
        table_module._seen.clear()
        loses = space.seconds_of(longer, [tile], B2)[0] > space.seconds_of(longer, [chosen], B2)[0]
        with use_table(table_of(LONG, tile)):
            if loses:
                with pytest.warns(TileTableWarning, match="no row serves q_len=8192"):
                    assert resolve(longer, B2).source == "auto: model"
            else:
                assert resolve(longer, B2) == auto.Resolved(tile, "auto: nearest")


def test_b5_the_tile_of_an_aligned_call_gives_an_unaligned_one_its_result():
    seven, eight = AttentionShape(1, 1, 7, 126, causal=True), AttentionShape(1, 1, 8, 126, causal=True)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1, 7, 126), "float16")
    with use_table(table_of(eight, TileConfig(16, 16))):
        assert resolve(seven, B2).source == "auto: bucket"
        found = flash_attention(q, k, v, is_causal=True, device=B2)
    q, k, v = (np.asarray(x[0, 0], np.float64) for x in (q, k, v))
    scores = np.where(np.tri(7, dtype=bool), q @ k.T / np.sqrt(126), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(found[0, 0], weights / weights.sum(-1, keepdims=True) @ v, atol=2e-3)


def test_b5_head_dims_are_never_rounded():
    odd = dataclasses.replace(LONG, head_dim=126, v_head_dim=126)
    assert table_of(LONG, TileConfig(128, 256)).lookup(odd, B2) is None


@pytest.mark.parametrize("name", ["Ascend910B3", "910B3", "ascend910b3", "910b3 ", " ASCEND-910-B3"])
def test_b7_a_row_is_found_under_every_spelling_of_the_device(name):
    table = table_of(LONG, TileConfig(128, 256), device("ascend910b3"))
    assert table.lookup(LONG, device(name)).source == "exact"


def test_b7_an_unknown_device_is_an_error_that_names_what_there_is():
    with pytest.raises(ValueError, match="ascend910b2.*got '910Z'"):
        resolve(LONG, device("910Z"))


def test_b7_a_miss_warns_once_and_is_never_slower_than_the_default():
    other = dataclasses.replace(LONG, head_dim=80, v_head_dim=80)
    with use_table(table_of(LONG, TileConfig(128, 256))):
        with pytest.warns(TileTableWarning, match="no row serves .*head_dim=80.* on ascend910b2") as told:
            tiles = {resolve(other, B2).tile for _ in range(3)}
            auto._resolved.clear()
            tiles.add(resolve(other, B2).tile)
    (tile,) = tiles
    assert len(told) == 1 and not illegal(other, B2, tile)
    assert space.seconds_of(other, [tile], B2)[0] <= default_seconds(other)


def test_b9_one_folder_serves_two_specs(tmp_path, monkeypatch):
    other = B2.replace(cube_cores=5)
    table_of(LONG, TileConfig(128, 256)).save(tmp_path / "one.json")
    table_of(LONG, TileConfig(64, 128), other).save(tmp_path / "two.json")
    table_of(LONG, TileConfig(64, 64), other).save(tmp_path / "one.json")
    monkeypatch.setenv("NPUMODEL_TABLE_PATH", str(tmp_path))
    assert resolve(LONG, B2) == auto.Resolved(TileConfig(128, 256), "auto: table")
    assert resolve(LONG, other) == auto.Resolved(TileConfig(64, 64), "auto: table")


# Search --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_b10_searches_at_once_have_one_winner():
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: tune(LONG, B2), range(8)))
    assert len({(r.tile, r.seconds, r.evals) for r in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("length", [6144, 4097, 8191])
def test_b12_a_search_is_bounded_and_the_second_run_does_none(length, tmp_path):
    shape = AttentionShape(1, 8, length, 128)
    r = tune(shape, B2)
    assert r.complete and r.evals < 5000 < r.space_size
    with use_table(tmp_path / "t.json", on_miss="autotune"):
        assert resolve(shape, B2).source == "auto: tuned"
    with use_table(tmp_path / "t.json", on_miss="error"):
        assert resolve(shape, B2).source == "auto: table"


def test_b13_blocks_are_larger_than_a_short_call_and_pieces_than_none():
    shapes = [AttentionShape(1, 8, q, 128, kv_len=32768) for q in range(1, 17)]
    for shape, found in zip(shapes, auto.by_model(shapes, B2), strict=True):
        assert found.tile.block_q == 16 and not illegal(shape, B2, found.tile)
    whole, pieces = (TileConfig(16, 1024, buffers=2, kv_pieces=n) for n in (1, 8))
    assert illegal(shapes[0], B2, whole) and not illegal(shapes[0], B2, pieces)  # fetched in pieces, computed whole
    one, sixteen = (estimate(shape, B2, TileConfig(16, 256)) for shape in (shapes[0], shapes[-1]))
    assert one.by_op("busy")["qk"] == pytest.approx(sixteen.by_op("busy")["qk"])  # the padding is paid for
