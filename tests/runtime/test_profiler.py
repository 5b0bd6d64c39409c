"""Cost tables: measured, kept, refused when anything they depend on has changed, superseded by a full profile."""

from __future__ import annotations

import json

import pytest

from neo_compile.runtime import profiler
from neo_compile.runtime.cost_files import cost_path, load_costs
from neo_compile.runtime.cost_grid import QUICK, Grid, full_grid
from neo_compile.runtime.cost_tables import FORMAT_VERSION, TableCostModel
from neo_compile.runtime.measurements import measure_tables
from neo_compile.runtime.profiler import cost_key, load_or_measure_costs, profile
from neo_compile.runtime.timing import increasing, lower_quartile
from tests.helpers.engines import make_engine, tiny_llama

SMALL = Grid(
    linear_tokens=(1, 4),
    logit_rows=(1, 4),
    prefill_tokens=(8, 16),
    prefill_starts=(0, 16),
    decode_requests=(1, 4),
    decode_kv_tokens=(16, 64),
    swap_blocks=(1, 4),
    num_repeats=2,
)


@pytest.fixture(scope="module")
def engine():
    with make_engine(tiny_llama()) as engine:
        yield engine


@pytest.fixture(autouse=True)
def small_grids(monkeypatch, tmp_path):
    monkeypatch.setenv("NEO_CACHE", str(tmp_path))
    monkeypatch.setattr("neo_compile.runtime.kernel_costs._COLD_BYTES", 2**20)
    monkeypatch.setattr(profiler, "QUICK", SMALL)
    monkeypatch.setattr(profiler, "full_grid", lambda *limits: SMALL)


def key_of(engine) -> dict:
    return cost_key(engine._core.executor, engine._core.info)


def quick(engine) -> TableCostModel:
    with engine._core.device.launching():
        return load_or_measure_costs(engine._core.executor, engine._core.info)


def full(engine, **options) -> TableCostModel:
    with engine._core.device.launching():
        return profile(engine._core.executor, engine._core.info, max_num_batched_tokens=64, **options)


def test_tables_are_complete_and_positive(engine):
    shares: list[tuple[float, str]] = []
    with engine._core.device.launching():
        tables = measure_tables(engine._core.executor, SMALL, lambda share, what: shares.append((share, what)))
    costs = TableCostModel(tables, num_layers=3)
    assert costs.raw_linear_ms(4) >= costs.raw_linear_ms(1) > 0
    assert costs.raw_logits_ms(1) == 0
    assert costs.raw_sampling_ms(4) > 0
    assert costs.raw_prefill_attention_ms(16, 0) > 0
    assert costs.raw_prefill_attention_ms(16, 16) > 0
    assert costs.raw_device_decode_ms(4, 400) > 0
    assert costs.raw_host_attention_ms(4, 400) > 0
    assert costs.raw_swap_ms(10) > 0
    assert costs.overhead_ms > 0
    assert costs.launch_ms > 0
    assert [share for share, _ in shares] == sorted(share for share, _ in shares)
    assert shares[0][0] == 0
    assert shares[-1][0] < 1
    assert len({what for _, what in shares}) == 7


def test_measuring_leaves_the_engine_as_it_was(engine):
    full(engine)
    assert not engine.has_unfinished
    assert engine.generate([[5, 6, 7]])[0].finish_reason == "length"


def test_quick_tables_are_kept(engine):
    costs = quick(engine)
    path = cost_path(key_of(engine), "quick")
    assert costs.source == f"quick tables at {path}"
    before = path.read_bytes()
    assert quick(engine).to_json() == costs.to_json()
    assert path.read_bytes() == before


def test_a_full_profile_supersedes_the_quick_tables(engine):
    quick(engine)
    costs = full(engine)
    assert "full profile" in costs.source
    assert quick(engine).to_json() == costs.to_json()


def test_a_full_profile_is_measured_once_unless_forced(engine):
    path = cost_path(key_of(engine), "full")
    full(engine)
    written = path.stat().st_mtime_ns
    full(engine)
    assert path.stat().st_mtime_ns == written
    full(engine, force=True)
    assert path.stat().st_mtime_ns > written


@pytest.mark.parametrize("fact", ["cpu", "isa", "torch", "neo_compile", "stages"])
def test_tables_of_another_machine_or_version_are_refused_by_name_and_measured_again(engine, caplog, fact):
    quick(engine)
    path = cost_path(key_of(engine), "quick")
    document = json.loads(path.read_text())
    document["key"][fact] = "something else"
    path.write_text(json.dumps(document))
    quick(engine)
    assert f"{fact}: 'something else'" in caplog.text
    assert "measuring again" in caplog.text
    assert json.loads(path.read_text())["key"] == key_of(engine)


def test_a_refused_full_profile_gives_way_to_quick_tables(engine, caplog):
    full(engine)
    path = cost_path(key_of(engine), "full")
    path.write_text(path.read_text().replace(f'"version": {FORMAT_VERSION}', '"version": 1'))
    assert "quick tables" in quick(engine).source
    assert "version 1" in caplog.text
    assert "neo profile" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', "not json"])
def test_damaged_files_are_refused(engine, caplog, text):
    path = cost_path(key_of(engine), "quick")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load_costs(key_of(engine)) is None
    assert "refused" in caplog.text


@pytest.mark.parametrize(
    "choice", ["model", "cache_dtype", "block_size", "device", "device_threads", "host_threads", "host_slowdown"]
)
def test_every_choice_has_a_file_of_its_own(engine, choice):
    key = key_of(engine)
    assert cost_path(key | {choice: "other"}, "full") != cost_path(key, "full")


def test_a_slowed_host_shows_in_the_tables(engine):
    """The table is of the same kernel by the same clock, so the factor is nearly exact; a lower bound is tested."""
    from neo_compile.runtime.device import DeviceConfig, open_device
    from neo_compile.runtime.executor import Executor

    device = open_device(DeviceConfig(device_threads=1, host_threads=1, host_slowdown=50.0), has_host_cache=True)
    slowed = Executor(engine._core.executor.staged, device, engine._core.executor.caches)
    try:
        with device.launching():
            tables = measure_tables(slowed, SMALL)
    finally:
        device.close()
    with engine._core.device.launching():
        plain = measure_tables(engine._core.executor, SMALL)
    assert tables["host_attention"]["ms"][1][1] > 10 * plain["host_attention"]["ms"][1][1]


def test_a_cache_that_cannot_be_written_is_a_warning(engine, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEO_CACHE", str(tmp_path / "file"))
    assert "not kept" in quick(engine).source
    assert "cannot keep" in caplog.text


def test_a_burst_of_other_work_is_taken_out():
    """It only ever adds time, so a point is worth no more than any larger one."""
    assert increasing([1.0, 5.0, 2.0, 3.0, 9.0, 4.0]) == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0]
    assert lower_quartile([5.0, 1.0, 9.0, 2.0, 3.0]) == 2.0


def test_grids_reach_the_limits_of_an_iteration():
    grid = full_grid(3000, 2048)
    assert grid.linear_tokens[-1] == 3000
    assert grid.prefill_tokens[-1] == 2048
    assert max(grid.prefill_starts) < 2048
    for axis in (grid.linear_tokens, grid.prefill_tokens, grid.prefill_starts, grid.decode_requests):
        assert list(axis) == sorted(set(axis))
    assert len(grid.linear_tokens) > 2 * len(QUICK.linear_tokens)
    tiny = full_grid(16, 8)
    assert (tiny.linear_tokens[-1], tiny.prefill_tokens[-1], tiny.prefill_starts) == (16, 8, (0,))
