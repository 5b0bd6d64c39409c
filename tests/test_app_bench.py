"""`neo bench kernel` on tiny shapes: the table, the JSON file, reasons instead of silence, errors in one line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from neo_compile import _native
from neo_compile.app import cli
from neo_compile.app.bench import peers, session
from neo_compile.app.bench.bandwidth import huge_page_buffer
from neo_compile.app.bench.cases import KernelCase, KVArena
from neo_compile.app.bench.measure import Effort, Turn, bandwidth_share, measure_in_turns, median_us
from neo_compile.app.bench.peers import UnavailableError
from neo_compile.errors import ConfigError

SHAPE_FIELDS = ["impl", "dtype", "batch", "context_len", "num_q_heads", "num_kv_heads", "head_dim"]
ROW_FIELDS = [*SHAPE_FIELDS, "median_us", "gbps", "bandwidth_share"]
TINY = ["--quick", "--batch", "2", "--context-len", "33", "--heads", "4/2", "--head-dim", "32", "--threads", "1"]


def tiny_case(**changes: object) -> KernelCase:
    """Lengths that end inside a block."""
    shape = {"dtype": "float32", "batch": 2, "context_len": 37, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32}
    return KernelCase(**{**shape, **changes})  # type: ignore[arg-type]


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernel.json"
    impls = ["cpp", "sdpa", "sdpa-folded", "ggml", "onnxruntime"]
    arguments = [*TINY, "--dtype", "fp32", "bf16", "--impl", ",".join(impls), "--json", str(path)]
    assert cli.main(["bench", "kernel", *arguments]) == 0
    report = json.loads(path.read_text())
    assert set(report) == {"config", "machine", "rows", "skipped"}
    assert [case["dtype"] for case in report["config"]["cases"]] == ["float32", "bfloat16"]
    assert report["machine"]["threads"] == 1
    assert report["machine"]["bandwidth_gbps"] > 0
    assert report["machine"]["bandwidth_streams"] in (1, 2, 4, 8)
    for row in report["rows"]:
        assert list(row) == ROW_FIELDS
        kv_bytes = 2 * 2 * 33 * 2 * 32 * getattr(torch, row["dtype"]).itemsize
        assert row["gbps"] == pytest.approx(kv_bytes / row["median_us"] / 1e3, rel=0.01, abs=0.001)
        assert row["bandwidth_share"] > 0
    # Every implementation has a row or a reason for each case.
    missing = [(skipped["impl"], skipped["case"]["dtype"]) for skipped in report["skipped"]]
    measured = [(row["impl"], row["dtype"]) for row in report["rows"]]
    assert sorted(missing + measured) == sorted((impl, dtype) for impl in impls for dtype in ("float32", "bfloat16"))
    assert {"cpp", "sdpa", "sdpa-folded"} <= {impl for impl, _ in measured}
    out = capsys.readouterr().out
    assert "of bandwidth" in out
    for skipped in report["skipped"]:
        assert not skipped["is_wrong"]
        assert skipped["reason"] in out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--dtype=int8", "int8"),
        ("--batch=0", "--batch: '0'"),
        ("--batch=two", "--batch: 'two'"),
        ("--batch=,", "--batch is empty"),
        ("--context-len=-3", "--context-len: '-3'"),
        ("--context-len=1000000", "lower --batch or --context-len"),
        ("--heads=32", "--heads: '32'"),
        ("--heads=32/0", "--heads: '0'"),
        ("--heads=6/4", "6 query heads are not a multiple of 4"),
        ("--head-dim=1.5", "--head-dim: '1.5'"),
        ("--block-size=0", "--block-size: '0'"),
        ("--impl=fastest", "valid: all, cpp"),
        ("--threads=0", "--threads: '0'"),
        ("--rounds=0", "--rounds: '0'"),
        ("--threads=4096", "may use"),
    ],
)
def test_wrong_options_are_one_line(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--batch", "4096"] if option.startswith("--context-len=1") else []
    assert cli.main(["bench", "kernel", *large, option]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("neo: ")]
    assert message in line


@pytest.mark.parametrize("command", [["bench"], ["bench", "kernel"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage: neo bench" in capsys.readouterr().out


@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["sdpa", "sdpa-folded", "onnxruntime", "ggml", *_native.available_isas()])
def test_every_implementation_is_right(name: str, dtype: str, is_scattered: bool) -> None:
    arena = KVArena(tiny_case(dtype=dtype, is_scattered=is_scattered), min_bytes=64 * 1024)
    assert arena.num_slots > 1
    try:
        runner = session.open_checked(name, arena, 2)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    runner.close()


def test_the_bandwidth_is_told_where_nothing_can_be_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise UnavailableError("not today")

    monkeypatch.setattr(peers, "open_runner", refuse)
    path = tmp_path / "kernel.json"
    assert cli.main(["bench", "kernel", *TINY, "--impl", "cpp", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["rows"] == []
    assert report["machine"]["bandwidth_gbps"] > 0


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    attend = peers.scaled_dot_product_attention
    monkeypatch.setattr(peers, "scaled_dot_product_attention", lambda *a, **kw: attend(*a, **kw) * 1.1)
    assert cli.main(["bench", "kernel", *TINY, "--impl", "sdpa,cpp"]) == 1
    out = capsys.readouterr().out
    assert "sdpa: not measured: wrong result: off by 0.1" in out


def test_a_forced_kernel_set_is_the_one_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    available = _native.available_isas()
    twins = [isa for isa in available if not isa.startswith("ispc-")]
    monkeypatch.setenv("NEO_ISA", twins[-1])
    assert peers.resolve_kernels("cpp") == twins[-1]
    assert peers.resolve_kernels(available[0]) == available[0]
    monkeypatch.delenv("NEO_ISA")
    assert peers.resolve_kernels("cpp") == twins[0]
    with pytest.raises(UnavailableError, match="this CPU runs"):
        peers.resolve_kernels("ispc-neon" if "ispc-neon" not in available else "ispc-avx2")


def test_select() -> None:
    assert peers.select(["cpp", "sdpa", "cpp"]) == ["cpp", "sdpa"]
    assert set(peers.select(["all"])) == {*peers.DEFAULT_NAMES, *_native.available_isas()}
    with pytest.raises(ConfigError, match="sdpa-folded"):
        peers.select(["SDPA"])


def test_turns_interleave() -> None:
    order: list[str] = []
    slots: list[int] = []

    def call(name: str, slot: int) -> None:
        order.append(name)
        slots.append(slot)

    effort = Effort(rounds=2, settle_s=0.0, turn_s=0.0, min_calls=2)
    calls = {name: lambda slot, name=name: call(name, slot) for name in "ab"}
    rates = iter([10.0, 20.0, 30.0, 40.0])

    def read_gbps() -> dict[int, float]:
        order.append("r")
        return {1: next(rates)}

    turns = measure_in_turns(calls, 5, effort, read_gbps)
    assert "".join(order) == "raaarbbbraaarbbb"
    assert slots == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert {name: [len(turn.times_us) for turn in taken] for name, taken in turns.items()} == {"a": [2, 2], "b": [2, 2]}
    assert [turn.read_gbps for turn in turns["a"]] == [{1: 10.0}, {1: 30.0}]


def test_a_share_is_of_its_own_turns_read() -> None:
    # 1000 bytes at 1, 0.25 and 0.5 GB/s: a slow second that slows both changes nothing
    turns = [
        Turn(read_gbps={1: 2.0, 4: 4.0}, times_us=[1.0, 1.0, 9.0]),
        Turn(read_gbps={1: 1.0, 4: 0.1}, times_us=[4.0]),
        Turn(read_gbps={1: 1.0, 4: 1.25}, times_us=[2.0]),
    ]
    assert [bandwidth_share([turn], 1000) for turn in turns] == [0.25, 0.25, 0.4]
    assert bandwidth_share(turns, 1000) == 0.4  # four streams read fastest: the median of 0.25, 2.5 and 0.4
    assert median_us(turns) == 2.0


def test_arena_slots_do_not_overlap() -> None:
    case = tiny_case(context_len=16, head_dim=24)
    arena = KVArena(case, min_bytes=3 * case.slot_bytes)
    assert arena.num_slots == 3
    for layout in (arena.paged, arena.dense):
        ranges = []
        for slot in range(3):
            k, v = layout(slot)
            ranges.append((k.data_ptr(), v.data_ptr() + v.numel() * 4))
            assert k.std().item() == pytest.approx(1.0, rel=0.1)
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


def test_huge_page_buffer() -> None:
    buffer = huge_page_buffer(3 * 2**20)
    assert buffer.numel() == 3 * 2**20
    assert buffer.data_ptr() % 2**21 == 0
    buffer.fill_(7)
    assert buffer[-1].item() == 7
