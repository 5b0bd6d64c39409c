"""Choice of kernels, usable CPUs, and number conversions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from neo_compile import _C, _native
from neo_compile.host_attention import WorkerPool, paged_decode


def test_scalar_is_always_there_and_last() -> None:
    assert _native.available_isas()[-1] == _native.built_isas()[-1] == "scalar"
    assert set(_native.available_isas()) <= set(_native.built_isas())
    assert _native.has_ispc() == any("ispc" in name for name in _native.built_isas())


def test_default_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEO_ISA", raising=False)
    assert _native.isa() == _native.available_isas()[0]


@pytest.mark.parametrize("name", _native.available_isas())
def test_every_kernel_set_can_be_forced(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    x = torch.ones(1, 1, 16, 8)
    for value in {name, name.partition("-")[2] or name}:
        monkeypatch.setenv("NEO_ISA", value)
        assert WorkerPool(0).isa == _native.isa() == _native.resolve_isa(value)
        assert _native.isa().endswith(value)
        assert bool((paged_decode(torch.ones(1, 1, 8), x, x, [[0]], [3], 1.0) == 1).all())


def test_unknown_isa_lists_the_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEO_ISA", "mmx")
    with pytest.raises(ValueError, match=r"'mmx'.*no such kernels.*scalar"):
        _native.isa()


def test_isa_of_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "_C", type("C", (), {"kernel_sets": lambda: [("cpp-avx9", False), ("scalar", True)]}))
    for name in ("cpp-avx9", "avx9"):
        with pytest.raises(ValueError, match="this CPU does not run it; available: scalar"):
            _native.resolve_isa(name)


def test_usable_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 1, 3}, raising=False)
    for quota, expected in ((None, [1, 3, 7]), (2.9, [1, 3]), (0.5, [1]), (64.0, [1, 3, 7])):
        monkeypatch.setattr(_native, "cpu_quota", lambda quota=quota: quota)
        assert _native.usable_cpus() == expected


def quota_of(tmp_path: Path, cgroup: str, files: dict[str, str]) -> float | None:
    (tmp_path / "cgroup").write_text(cgroup)
    for name, content in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(content)
    return _native.cpu_quota(str(tmp_path / "cgroup"), str(tmp_path / "fs"))


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/not/here\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "4:cpu,cpuacct:/d\n1:memory:/d\n",
            {"cpu,cpuacct/d/cpu.cfs_quota_us": "250000", "cpu,cpuacct/d/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("4:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "-1", "cpu/d/cpu.cfs_period_us": "100000"}, None),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, None),
    ],
)
def test_cpu_quota(tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None) -> None:
    assert quota_of(tmp_path, cgroup, files) == expected


def test_no_cgroup_file(tmp_path: Path) -> None:
    assert _native.cpu_quota(str(tmp_path / "absent"), str(tmp_path)) is None


CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def convert(isa: str, src: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    dst = torch.empty(len(src), dtype=dtype)
    _C.convert_row(isa, src.data_ptr(), CODES[src.dtype], dst.data_ptr(), CODES[dtype], len(src))
    return dst


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_to_fp32_and_back(isa: str, dtype: torch.dtype) -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(dtype)
    floats = convert(isa, halves, torch.float32)
    torch.testing.assert_close(floats, halves.float(), rtol=0, atol=0, equal_nan=True)
    back = convert(isa, floats, dtype)
    torch.testing.assert_close(back, halves, rtol=0, atol=0, equal_nan=True)
    numbers = ~halves.isnan()
    assert torch.equal(back.view(torch.int16)[numbers], halves.view(torch.int16)[numbers])  # the sign of zero too


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_half_is_torchs(isa: str, seed: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (100_001,), generator=rng).int().view(torch.float32)
    near_range = torch.randn(50_000, generator=rng) * 10.0 ** torch.randint(-9, 6, (50_000,), generator=rng)
    ties = (torch.arange(0, 40_000).int() * 0x1000 + 0x38000000).view(torch.float32)
    values = torch.cat([bits, near_range, ties, torch.tensor([65504.0, 65519.9, 65520.0, 3.4e38, float("inf")])])
    torch.testing.assert_close(convert(isa, values, dtype), values.to(dtype), rtol=0, atol=0, equal_nan=True)
