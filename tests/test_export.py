"""Tile tables for other tools: nothing is lost on the way, and Triton's autotuner can prune by the model."""

import csv
import dataclasses
import functools
import io
import json
import math
import re
import sys
import types

import pytest

import npumodel as npu
from npumodel.cli import main
from npumodel.search import export
from npumodel.search.export import COLUMNS, KNOBS
from npumodel.search.perf_model import PerfModel
from npumodel.search.rules import default_tile
from npumodel.search.space import seconds_of
from npumodel.search.table import Entry, Header, TileTable, TileTableWarning
from npumodel.search.table_row import BUCKET, EXACT
from npumodel.tile import ALL_CORES, TileConfig
from npumodel.workload import AttentionShape

CHIP = npu.device("ascend910b2")
CALL = AttentionShape.parse("B2,N8,S1024,D128")
PLAIN = TileConfig(128, 256)
#: Every knob away from its default.
ODD = TileConfig(
    64, 512, buffers=3, lookahead=2, heads_packed=2, split_kv=4, core_order="contiguous", kv_pieces=2, cores=12
).replace(persistent=True)


def header(device=CHIP, created="2026-01-01T00:00:00Z", **fields) -> Header:
    made = Header.of(device, strategy="coordinate", seed=3, command="npumodel tune", **fields)
    return dataclasses.replace(made, provenance={**made.provenance, "created": created})


def entry(shape=CALL, tile=PLAIN, us=812.4, head=None, **fields) -> Entry:
    return Entry.of(head or header(), shape, tile, us * 1e-6, **fields)


def table(*entries) -> TileTable:
    return TileTable(entries)


FULL = {"default_s": 1e-3, "rule_s": 9e-4, "runner_up_s": 8.2e-4, "bound": "mte2", "evals": 64, "complete": False}
GROUPED = AttentionShape.parse("B1,N8,KV2,S4096,D128,causal,bfloat16")
TABLE = table(entry(), entry(GROUPED, ODD, 1234.5, dma_wait_s={"qk": 1e-5}, measured_us=99.0, **FULL))


# CSV


def rows_of(text: str) -> list[dict[str, str]]:
    return [*csv.DictReader(io.StringIO(text))]


def typed(text: str):
    """The value that a cell stands for."""
    if text == "":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def entry_of(row: dict[str, str]) -> Entry:
    """The row of the table that a line of the CSV came from, but for the environment and the command."""
    v = {name: typed(text) for name, text in row.items()}
    v["model_version"] = row["model_version"]
    device = {"name": v["device"], **{name: v[name] for name in ("soc", "family", "spec_hash")}}
    run = {name: v[name] for name in ("source", "created", "strategy", "seed")}
    other = v["other"] or {}
    key = {**{name: v[name] for name in EXACT + BUCKET}, **other.pop("key", {})}
    fields = ("predicted_us", "default_us", "rule_us", "runner_up_us", "bound", "evals", "complete")
    return Entry(
        Header(device, v["model_version"], v["kernel"], {}, run),
        key,
        TileConfig(**{name: v[name] for name in KNOBS}),
        **{name: v[name] for name in fields},
        dma_wait_us=v["dma_wait_us"] or {},
        extra=other,
    )


def test_csv_is_read_back_value_by_value():
    text = export.to_csv(TABLE)
    assert text.splitlines()[0] == ",".join(COLUMNS) and "\r" not in text and len(text.splitlines()) == 3
    for line, row in zip(rows_of(text), TABLE.entries, strict=True):
        back = entry_of(line)
        for name in ("key", "tile", "predicted_us", "default_us", "rule_us", "runner_up_us", "dma_wait_us"):
            assert getattr(back, name) == getattr(row, name), name
        assert (back.bound, back.evals, back.complete) == (row.bound, row.evals, row.complete)
        assert back.extra == row.extra and back.header.validity == row.header.validity
        assert back.header.provenance.items() <= row.header.provenance.items()
        assert back.identity == row.identity  # also the device's spec, the kernel and the whole key


def test_csv_cells_are_plain():
    lines = {line["gqa_group"]: line for line in rows_of(export.to_csv(TABLE))}
    first, second = lines["1"], lines["4"]
    assert first["default_us"] == first["mask"] == first["evals"] == first["other"] == first["dma_wait_us"] == ""
    assert first["causal"] == "false" and second["causal"] == "true" and second["complete"] == "false"
    assert first["source"] == "model" and first["cores"] == str(ALL_CORES) and second["cores"] == "12"
    assert second["predicted_us"] == "1234.5" and json.loads(second["other"]) == {"measured_us": 99.0}


def test_csv_keeps_what_a_later_version_wrote_and_awkward_texts():
    odd = entry(head=dataclasses.replace(header(), device={**header().device, "name": 'a "b", c\nd'}))
    odd = dataclasses.replace(odd, key={**odd.key, "paged": "block=16", "nothing": None})
    (line,) = rows_of(export.to_csv(table(odd)))
    assert line["device"] == 'a "b", c\nd' and json.loads(line["other"]) == {"key": {"paged": "block=16"}}
    assert entry_of(line).identity == odd.identity


def test_csv_of_no_rows_is_a_header():
    assert export.to_csv(TileTable()) == ",".join(COLUMNS) + "\n"


# FAIR T4: hand-written checks of the fields that its results schema 1.0.0 names


def check_t4(document):
    document = json.loads(json.dumps(document, allow_nan=False))
    assert re.fullmatch(r"\d+\.\d+\.\d+", document["schema_version"]) and document["schema_version"] == "1.0.0"
    assert isinstance(document["metadata"], dict) and isinstance(document["results"], list)
    number = (int, float)
    for result in document["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= set(result)
        assert isinstance(result["timestamp"], str) and isinstance(result["configuration"], dict)
        assert all(isinstance(name, str) for name in result["objectives"])
        times = result["times"]
        assert all(isinstance(time, number) for time in times["runtimes"]) and times["runtimes"]
        for name in ("compilation_time", "framework", "search_algorithm", "validation"):
            assert isinstance(times[name], number), name
        assert result["invalidity"] in ("timeout", "compile", "runtime", "correctness", "constraints", "correct")
        assert result["correctness"] in (0, 1) and not isinstance(result["correctness"], bool)
        named = {one["name"]: one for one in result["measurements"]}
        assert set(result["objectives"]) <= set(named)
        for one in named.values():
            assert isinstance(one["value"], number) and isinstance(one["unit"], str)
    return document


def test_t4_of_a_table():
    document = check_t4(export.to_t4(TABLE))
    first, second = sorted(document["results"], key=lambda result: result["times"]["runtimes"])
    assert first["configuration"] == {name: getattr(PLAIN, name) for name in KNOBS}
    assert second["configuration"] == {name: getattr(ODD, name) for name in KNOBS}
    assert first["measurements"] == [{"name": "time", "value": pytest.approx(0.8124), "unit": "ms"}]
    assert first["times"]["runtimes"] == [pytest.approx(0.8124)] and first["timestamp"] == "2026-01-01T00:00:00Z"
    about = second["npumodel"]
    assert about["device"] == "ascend910b2" and about["source"] == "model" and about["is"] == ["best"]
    assert about["key"]["gqa_group"] == 4 and about["spec_hash"] == CHIP.fingerprint()
    assert document["metadata"]["autotuner"] == "npumodel" and document["metadata"]["device"] == "ascend910b2"
    assert check_t4(export.to_t4(TileTable()))["results"] == []


@pytest.fixture(scope="module")
def searched():
    space = {"block_q": [64, 128], "block_kv": [128, 256], "buffers": [2], "lookahead": [0, 1], "cores": [ALL_CORES]}
    return npu.tune(AttentionShape.parse("B1,N4,S512,D64"), CHIP, space={**space, "split_kv": [1]})


def test_t4_of_a_search_has_its_points_once_each(searched):
    document = check_t4(export.to_t4(searched))
    results = document["results"]
    times = [result["measurements"][0]["value"] for result in results]
    assert times == sorted(times)
    roles = [role for result in results for role in result["npumodel"]["is"]]
    assert {"best", "runner_up", "default", "rule", "auto"} <= set(roles)
    assert roles.count("near_tie") == len(searched.near_ties)
    tiles = [TileConfig(**result["configuration"]) for result in results]
    assert len(set(tiles)) == len(tiles) and searched.tile in tiles and searched.default.tile in tiles
    at = tiles.index(searched.tile)
    assert "best" in results[at]["npumodel"]["is"] and times[at] == pytest.approx(searched.seconds * 1e3, rel=1e-8)
    assert times[0] == pytest.approx(min(searched.seconds, searched.auto.seconds) * 1e3)  # auto is not of this space
    about = document["metadata"]["npumodel"]
    assert about["evals"] == searched.evals and about["space_size"] == searched.space_size == 8
    many = check_t4(export.to_t4(npu.search.tuner.TuneResults((searched, searched))))
    assert len(many["results"]) == 2 * len(results) and len(many["metadata"]["npumodel"]["searches"]) == 2


# Triton


def test_triton_configs_are_distinct_and_carry_what_they_cannot_say():
    again = entry(AttentionShape.parse("B2,N8,S2048,D128"), PLAIN.replace(lookahead=3), 1000.0)
    first, second = export.triton_configs(table(*TABLE.entries, again))
    assert first["kwargs"] == {"BLOCK_M": 128, "BLOCK_N": 256, "multibuffer": True}
    assert (first["num_warps"], first["num_stages"], second["num_stages"]) == (4, 2, 3)
    assert [row["predicted_us"] for row in first["npumodel"]] == [812.4, 1000.0]
    assert [row["not_in_config"] for row in first["npumodel"]] == [{}, {"lookahead": 3}]
    (row,) = second["npumodel"]
    assert row["not_in_config"] == {
        **{"buffers": 3, "lookahead": 2, "heads_packed": 2, "split_kv": 4, "kv_pieces": 2, "cores": 12},
        **{"core_order": "contiguous", "persistent": True},
    }
    assert row["key"]["causal"] is True and row["device"] == "ascend910b2"
    assert json.loads(json.dumps([first, second])) == [first, second]
    assert export.triton_configs(TileTable()) == []


def test_triton_names_and_buffers():
    one = table(entry(tile=TileConfig(64, 128, buffers=1, split_kv=4)))
    (config,) = export.triton_configs(one, names={"split_kv": "SPLIT", "block_q": "BQ"})
    assert config["kwargs"] == {"BQ": 64, "BLOCK_N": 128, "SPLIT": 4, "multibuffer": False}
    assert config["num_stages"] == 1 and config["npumodel"][0]["not_in_config"] == {}
    (config,) = export.triton_configs(one, ascend=False)
    assert config["kwargs"] == {"BLOCK_M": 64, "BLOCK_N": 128} and config["num_stages"] == 1
    assert config["npumodel"][0]["not_in_config"] == {"split_kv": 4}


@dataclasses.dataclass(frozen=True)
class Config:
    """What a triton.Config is to its users."""

    kwargs: dict
    num_warps: int = 4
    num_stages: int = 3

    def all_kwargs(self):
        return {**self.kwargs, "num_warps": self.num_warps, "num_ctas": 1, "num_stages": self.num_stages}


def test_triton_objects(monkeypatch):
    configs = export.triton_configs(TABLE)
    with pytest.raises(ValueError, match=r"(?s)got buffers=3, lookahead=2.*names=.*ignore="):
        export.triton_objects(configs)
    with pytest.raises(ValueError, match="ignore: expected knobs out of .*, got stages"):
        export.triton_objects(configs, ignore=("stages",))
    monkeypatch.setitem(sys.modules, "triton", None)  # not installed
    with pytest.raises(ImportError, match="triton is not there .*; install"):
        export.triton_objects(configs[:1])
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(Config=Config))
    (plain,) = export.triton_objects(configs[:1])
    assert plain.all_kwargs() == {**configs[0]["kwargs"], "num_warps": 4, "num_ctas": 1, "num_stages": 2}
    assert len(export.triton_objects(configs, ignore=KNOBS)) == 2


def test_stale_rows_and_both_passes():
    old = entry(tile=TileConfig(16, 16), us=1.0, head=header(model_version="0"))
    with pytest.warns(TileTableWarning, match=r"1 row\(s\) of another model_version are left out"):
        assert export.triton_configs(table(*TABLE.entries, old)) == export.triton_configs(TABLE)
    assert len(rows_of(export.to_csv(table(*TABLE.entries, old)))) == 3
    both = table(entry(), entry(dataclasses.replace(CALL, backward=True)))
    for make in (export.triton_configs, export.tilelang_configs):
        with pytest.raises(ValueError, match="rows of one pass, got forward and backward"):
            make(both)


# Triton's autotuner


class Autotuner:
    """How triton.runtime.autotuner prunes, in the order of its `run` and `prune_configs`. Two ways to count a share: of
    all configs (triton-ascend and older Triton), of the survivors and at least one (new: since Triton issue 10964)."""

    def __init__(self, arg_names, configs, prune_configs_by, new):
        self.arg_names, self.configs, self.new = arg_names, configs, new
        self.early = prune_configs_by.get("early_config_prune")
        self.model = prune_configs_by.get("perf_model")
        self.top_k = prune_configs_by.get("top_k", 1.0)

    def prune(self, *args, **kwargs):
        nargs = dict(zip(self.arg_names, args, strict=False))
        left = self.early(self.configs, nargs, **kwargs) if self.early else self.configs
        if not self.model:
            return left
        count = self.top_k
        if isinstance(count, float):
            count = max(1, int(len(left) * count)) if self.new else int(len(self.configs) * count)
        if len(left) <= count:
            return left
        times = [self.model(**nargs, **kwargs, **config.all_kwargs()) for config in left]
        return [config for _, config in sorted(zip(times, left, strict=True), key=lambda pair: pair[0])][:count]


ARGUMENTS = ("q", "k", "sm_scale", "out", "Z", "H", "N_CTX")
LAUNCH = (types.SimpleNamespace(dtype="torch.bfloat16"), None, 0.1, None, 1, 8, 1024)
META = {"HEAD_DIM": 128, "STAGE": 3, "grid": None}
FIELDS = {
    **{"batch": "Z", "q_heads": "H", "q_len": "N_CTX", "head_dim": "HEAD_DIM", "dtype": "q"},
    "causal": lambda a: a["STAGE"] == 3,
}
ASKED = AttentionShape.parse("B1,N8,S1024,D128,bfloat16,causal")
BLOCKS = [(16, 16), (64, 256), (32, 32), (128, 256), (64, 128), (128, 128), (4096, 4096)]  # the last does not fit
CONFIGS = [Config({"BLOCK_M": m, "BLOCK_N": n}, warps) for m, n in BLOCKS for warps in (4, 8)]


@pytest.fixture(scope="module")
def model():
    return PerfModel(CHIP, FIELDS)


@functools.cache
def expected(blocks) -> float:
    return seconds_of(ASKED, [TileConfig(*blocks)], CHIP)[0] * 1e3


def test_the_perf_model_is_the_price_of_the_call(model):
    arguments = {**dict(zip(ARGUMENTS, LAUNCH, strict=True)), **META}
    assert model.shape(arguments) == ASKED
    times = {blocks: model(**arguments, **Config(dict(zip(("BLOCK_M", "BLOCK_N"), blocks, strict=True))).all_kwargs())
             for blocks in BLOCKS}  # fmt: skip
    assert times[(4096, 4096)] == math.inf
    for blocks in BLOCKS[:-1]:
        assert times[blocks] == expected(blocks) > 0
    assert model(**{**arguments, "Z": 64}, BLOCK_M=128, BLOCK_N=128) > 10 * times[(128, 128)]
    ranked = model.ranked(CONFIGS, arguments)
    assert [time for _, time in ranked] == sorted(time for _, time in ranked) and len(ranked) == len(CONFIGS)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("top_k", [0.15, 0.25, 2, 3, 100, 1.0])
def test_pruning_keeps_the_fastest_and_whole_ties_in_their_order(model, top_k, new, caplog):
    caplog.set_level("INFO", "npumodel.search.perf_model")
    kept = Autotuner(ARGUMENTS, CONFIGS, model.prune_configs_by(top_k), new).prune(*LAUNCH, **META)
    pairs = sorted(expected(blocks) for blocks in BLOCKS[:-1] for _ in (4, 8))
    count = max(1, int(len(CONFIGS) * top_k)) if isinstance(top_k, float) else top_k
    cut = pairs[min(count, len(pairs)) - 1]
    assert kept == [c for c in CONFIGS if c.kwargs["BLOCK_M"] < 4096 and expected((*c.kwargs.values(),)) <= cut]
    assert len(kept) >= min(count, len(pairs)) and len(kept) % 2 == 0  # num_warps changes nothing: never cut between
    gone = [record.getMessage() for record in caplog.records]
    assert len(gone) == len(CONFIGS) - len(kept) and sum("does not fit" in text for text in gone) == 2


def test_triton_itself_prunes_as_the_stand_in(model):
    triton = pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner as Real

    def kernel():
        pass

    configs = [triton.Config(config.kwargs, num_warps=config.num_warps) for config in CONFIGS]
    for by in (model.prune_configs_by(3), model.prune_configs_by(0.25), {"perf_model": model, "top_k": 3}):
        real = Real(kernel, [*ARGUMENTS], configs, ["N_CTX"], None, None, prune_configs_by=by)
        real.nargs = dict(zip(ARGUMENTS, LAUNCH, strict=True))
        kept = [configs.index(config) for config in real.prune_configs(dict(META))]
        assert kept == [CONFIGS.index(one) for one in Autotuner(ARGUMENTS, CONFIGS, by, True).prune(*LAUNCH, **META)]


@pytest.mark.parametrize("new", [False, True])
def test_it_also_works_as_a_bare_perf_model(model, new):
    by = {"perf_model": model, "top_k": 2}
    kept = Autotuner(ARGUMENTS, CONFIGS, by, new).prune(*LAUNCH, **META)
    best = min(BLOCKS[:-1], key=expected)
    assert [(*config.kwargs.values(),) for config in kept] == [best, best]


def test_other_lengths_other_winners(model):
    tuner = Autotuner(ARGUMENTS, CONFIGS, model.prune_configs_by(1), True)
    short = tuner.prune(*LAUNCH[:-1], 16, **META)
    assert short and short != tuner.prune(*LAUNCH, **META)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"q_len": "SEQ"}, "q_len: expected an argument named 'SEQ', got BLOCK_M, "),
        ({"q_len": 0}, "q_len: expected a positive integer"),
        ({"dtype": "k"}, "dtype: expected one of"),
        ({"causal": lambda a: a["nothing"]}, "KeyError"),
    ],
)
def test_a_model_that_fails_prunes_nothing(fields, why):
    model = PerfModel("ascend910b2", {**FIELDS, **fields})
    with pytest.warns(UserWarning, match=rf"all {len(CONFIGS)} configs are measured, none is pruned: .*{why}"):
        kept = Autotuner(ARGUMENTS, CONFIGS, model.prune_configs_by(), True).prune(*LAUNCH, **META)
    assert kept == CONFIGS
    with pytest.raises((ValueError, KeyError)):
        model(**dict(zip(ARGUMENTS, LAUNCH, strict=True)), **META, BLOCK_M=128, BLOCK_N=128)


def test_configs_that_all_do_not_fit_stay(model):
    huge = CONFIGS[-2:]
    with pytest.warns(UserWarning, match="none fits on ascend910b2"):
        assert Autotuner(ARGUMENTS, huge, model.prune_configs_by(1), True).prune(*LAUNCH, **META) == huge
    with pytest.warns(UserWarning, match="configs: expected triton.Config objects or dictionaries"):
        assert model.prune_configs_by()["early_config_prune"]([1, 2], {}) == [1, 2]


def test_knobs_of_the_kernel():
    names = {"block_q": "BM", "block_kv": "BN", "split_kv": "SPLIT"}
    model = PerfModel(CHIP, ASKED, names, base=TileConfig(128, 128, lookahead=0))
    made = {"BM": 64, "BN": 256, "SPLIT": 2, "num_stages": 4}
    assert model.tile(made) == TileConfig(64, 256, lookahead=0, split_kv=2)
    assert model.tile({**made, "multibuffer": False}).buffers == 1 and model.shape({}) == ASKED
    with pytest.raises(ValueError, match=r"arguments: expected SPLIT, got BM, BN; say what the kernel calls"):
        model(BM=64, BN=256)
    exported = export.triton_configs(table(entry(ASKED), entry(dataclasses.replace(ASKED, batch=4), ODD)))
    pruned = PerfModel(CHIP, ASKED).prune_configs_by(1)["early_config_prune"](exported, {})
    assert len(pruned) == 1 and pruned[0] in exported


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda: PerfModel("910Z", FIELDS), "910Z"),
        (lambda: PerfModel(None, FIELDS), "device: expected a DeviceSpec or the name of a device, got None"),
        (lambda: PerfModel(CHIP, "B1,N8,S1024,D128"), "shape: expected an AttentionShape or a mapping"),
        (lambda: PerfModel(CHIP, {"heads": "H"}), "shape: expected fields out of .*, got heads"),
        (lambda: PerfModel(CHIP, {"batch": "Z"}), "q_heads, q_len, head_dim missing"),
        (lambda: PerfModel(CHIP, FIELDS, {"stages": "S"}), "names: expected knobs out of .*, got stages"),
        (lambda: PerfModel(CHIP, FIELDS, {"split_kv": "num_warps"}), "names: expected names that Triton does not use"),
        (lambda: PerfModel(CHIP, FIELDS).prune_configs_by(0), r"top_k: expected a share .* got 0"),
        (lambda: PerfModel(CHIP, FIELDS).prune_configs_by(1.5), r"top_k: expected a share .* got 1.5"),
        (lambda: PerfModel(CHIP, FIELDS).prune_configs_by(True), r"top_k: expected a share .* got True"),
        (lambda: PerfModel(CHIP, FIELDS).prune_configs_by(1, tie=math.nan), "tie: expected a number >= 0"),
        (lambda: export.to_csv("t.json"), "table: expected a TileTable, got 't.json'; read a file with TileTable.load"),
        (lambda: export.export(TABLE, "xml"), "to: expected one of csv, t4, triton, tilelang, vllm, got 'xml'"),
        (lambda: export.triton_configs(TABLE, {"block_q": "BLOCK_N"}), "names: expected distinct names"),
        (lambda: export.triton_configs(TABLE, {"block_q": "a b"}), "names: expected distinct names of kernel param"),
        (lambda: export.tilelang_configs(TABLE, {"x": "y"}), "names: expected knobs out of .*, got x"),
        (lambda: export.vllm_configs(TABLE, q_heads=3), "q_heads: expected a divisor of batch .* = 16, got 3"),
    ],
)
def test_mistakes_are_explained(what, message):
    with pytest.raises(ValueError, match=message):
        what()


# TileLang


def test_tilelang_parameters():
    first, second = export.tilelang_configs(TABLE)
    assert first["config"] == {"block_M": 128, "block_N": 256, "num_stages": 2}
    assert second["config"] == {"block_M": 64, "block_N": 512, "num_stages": 3}
    assert first["npumodel"][0]["not_in_config"] == {} and "buffers" not in second["npumodel"][0]["not_in_config"]
    assert second["npumodel"][0]["not_in_config"]["split_kv"] == 4
    (named,) = export.tilelang_configs(table(entry(tile=ODD)), {"split_kv": "splits", "buffers": "depth"})
    assert named["config"] == {"block_M": 64, "block_N": 512, "depth": 3, "splits": 4}
    assert "split_kv" not in named["npumodel"][0]["not_in_config"]


# vLLM


def test_vllm_files_have_a_config_for_each_bucket():
    shapes = [AttentionShape.parse(f"B1,N8,S{length},D128") for length in (2048, 512, 1024)]
    decode = AttentionShape.parse("B4,N8,KV2,S1,SKV4096,D128")
    made = table(*(entry(shape, TileConfig(128, shape.q_len // 4)) for shape in shapes), entry(decode, ODD))
    files = export.vllm_configs(made, q_heads=8)
    prefill, step = sorted(files.values(), key=len, reverse=True)
    assert [*prefill] == ["512", "1024", "2048"] and [*step] == [str(4 * 4096)]
    usual = {"multibuffer": True, "num_warps": 4, "num_stages": 2}
    assert prefill["1024"] == {"BLOCK_M": 128, "BLOCK_N": 256, **usual}
    assert step["16384"] == {
        **{"BLOCK_M": 64, "BLOCK_N": 512, "multibuffer": True, "num_warps": 4, "num_stages": 3},
        **{"npumodel_buffers": 3, "npumodel_lookahead": 2, "npumodel_heads_packed": 2, "npumodel_split_kv": 4},
        **{"npumodel_core_order": "contiguous", "npumodel_kv_pieces": 2, "npumodel_cores": 12},
        **{"npumodel_persistent": True},
    }
    names = sorted(files)
    assert all(name.endswith("device_name=ascend910b2.json") and "q_heads=8" in name for name in names)
    assert names[0].startswith("q_len=1,") and names[1].startswith("q_len=kv_len,") and "gqa_group=4" in names[0]
    assert [*export.vllm_configs(made)[names[1].replace("q_heads=8,", "")]] == ["4096", "8192", "16384"]
    as_vllm_reads = {int(bucket): config for bucket, config in json.loads(json.dumps(prefill)).items()}
    assert min(as_vllm_reads, key=lambda bucket: abs(bucket - 700)) == 512


def test_vllm_buckets_are_never_settled_silently():
    long, wide = AttentionShape.parse("B1,N8,S2048,D128"), AttentionShape.parse("B2,N8,S1024,D128")
    same = table(entry(long), entry(wide))
    assert len(*export.vllm_configs(same).values()) == 1
    with pytest.raises(ValueError, match=r"expected one config a bucket, got two for 16384: .*q_len.* keep one"):
        export.vllm_configs(table(entry(long), entry(wide, TileConfig(64, 64))))
    other = entry(long, head=header(CHIP.replace(hbm_bytes=1e9)))
    with pytest.raises(ValueError, match="expected one device a name, got two"):
        export.vllm_configs(table(entry(wide), other))


# Files and the command line


def test_command_line_prints_and_saves(tmp_path, capsys):
    path = tmp_path / "t.json"
    TABLE.save(path)

    def run(*arguments):
        code = main(["table", "export", str(path), *map(str, arguments)])
        return code, capsys.readouterr()

    for to in export.FORMATS:
        code, said = run("--to", to)
        assert code == 0 and said.out == export.export(TileTable.load(path), to)
        assert to == "csv" or json.loads(said.out)
        code, said = run("--to", to, "--out", tmp_path / "out" / to)
        assert code == 0 and "saved in" in said.out
    assert (tmp_path / "out" / "csv").read_text() == export.to_csv(TileTable.load(path))
    files = sorted((tmp_path / "out" / "vllm").iterdir())
    assert [file.name for file in files] == [*export.vllm_configs(TABLE)]
    assert [json.loads(file.read_text()) for file in files] == [*export.vllm_configs(TABLE).values()]
    assert run("--to", "xml")[0] == 2
    path.write_text("{}")
    code, said = run("--to", "csv")
    assert code == 2 and "expected a tile table" in said.err
    path.unlink()
    assert run("--to", "csv")[0] == 2


def test_the_default_tile_survives_every_format():
    tile = default_tile(CALL, CHIP)
    made = table(entry(tile=tile))
    line = rows_of(export.to_csv(made))[0]
    assert TileConfig(**{name: typed(line[name]) for name in KNOBS}) == tile
    assert TileConfig(**export.to_t4(made)["results"][0]["configuration"]) == tile
    assert export.triton_configs(made)[0]["npumodel"][0]["not_in_config"] == {}
