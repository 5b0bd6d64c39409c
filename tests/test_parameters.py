"""What a program makes of its parameters: once, again after a change, and never of another layout."""

from __future__ import annotations

import pytest
import torch

from neo_compile.errors import ConfigError
from neo_compile.parameters import DerivedCall, Parameters


def doubled(calls: list[int], register: int) -> DerivedCall:
    """Register 2 (or 3) is twice register 0 (or 1); `calls` records how often it was computed."""

    def function(sources: list[torch.Tensor]) -> torch.Tensor:
        calls.append(register)
        return sources[0] * 2

    return DerivedCall(function, (register,), register + 2)


def test_derived_once_and_again_when_its_own_source_changes() -> None:
    calls: list[int] = []
    a, b = torch.ones(3), torch.ones(3)
    parameters = Parameters({0: a, 1: b}, [doubled(calls, 0), doubled(calls, 1)])
    for _ in range(2):
        registers = [a, b, None, None]
        parameters.load(registers)
        assert calls == [0, 1]
        assert torch.equal(registers[2], a * 2)
    a.add_(1)
    registers = [a, b, None, None]
    parameters.load(registers)
    assert calls == [0, 1, 0]
    assert registers[2].tolist() == [4, 4, 4]
    b.data = torch.full((3,), 5.0)
    parameters.load(registers)
    assert calls == [0, 1, 0, 1]
    assert registers[3].tolist() == [10, 10, 10]


def test_another_tensor_in_the_same_register() -> None:
    calls: list[int] = []
    parameters = Parameters({}, [doubled(calls, 0)])
    for value in (torch.ones(2), torch.zeros(2)):
        registers = [value, None, None]
        parameters.load(registers)
        assert torch.equal(registers[2], value * 2)
    assert calls == [0, 0]


def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        a = torch.ones(3)
    parameters = Parameters({0: a}, [doubled([], 0)])
    parameters.load([a, None, None])
    parameters.load([a, None, None])


@pytest.mark.parametrize("converted", [torch.ones(3, dtype=torch.float64), torch.ones(6)[::2], torch.ones(4)])
def test_a_converted_parameter_is_an_error(converted: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameters = Parameters({0: parameter}, [])
    parameters.load([parameter])
    parameter.data = converted
    with pytest.raises(ConfigError, match="capture it again"):
        parameters.load([parameter])


@pytest.mark.parametrize("shape", [(), (3,), (5, 2), (64, 96)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_write_that_neither_version_nor_address_tells(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Adapters are merged with `weight.data += delta`."""
    calls: list[int] = []
    a, b = torch.nn.Parameter(torch.randn(shape).to(dtype)), torch.randn(7, 3)
    parameters = Parameters({0: a, 1: b}, [doubled(calls, 0), doubled(calls, 1)])
    registers = [a, b, None, None]
    parameters.load(registers)
    version, address = a._version, a.data_ptr()
    a.data += torch.randn(shape).to(dtype) + 4
    assert (a._version, a.data_ptr()) == (version, address)
    parameters.load(registers)
    assert calls == [0, 1, 0]
    assert torch.equal(registers[2], a * 2)


def test_not_a_number_is_no_change() -> None:
    calls: list[int] = []
    a = torch.full((4, 4), torch.nan)
    parameters = Parameters({0: a}, [doubled(calls, 0)])
    for _ in range(2):
        parameters.load([a, None, None])
    assert calls == [0]


def test_a_write_to_a_part_is_seen_by_a_recheck() -> None:
    calls: list[int] = []
    a, b = torch.nn.Parameter(torch.randn(64, 96)), torch.randn(64, 96)
    parameters = Parameters({0: a, 1: b}, [doubled(calls, 0), doubled(calls, 1)])
    registers = [a, b, None, None]
    parameters.load(registers)
    a.data[1:3] = 0  # the elements that every run looks at are others
    parameters.recheck()
    parameters.load(registers)
    assert calls == [0, 1, 0]
    assert torch.equal(registers[2], a * 2)
    parameters.recheck()
    parameters.load(registers)
    assert calls == [0, 1, 0]


def test_parts_written_beside_a_change_that_is_noticed() -> None:
    calls: list[int] = []
    a, b = torch.nn.Parameter(torch.randn(64, 96)), torch.randn(64, 96)
    parameters = Parameters({0: a, 1: b}, [doubled(calls, 0), doubled(calls, 1)])
    registers = [a, b, None, None]
    parameters.load(registers)
    a.data[1:3] = 0
    b.add_(1)
    parameters.load(registers)
    assert torch.equal(registers[2], a * 2)
    assert torch.equal(registers[3], b * 2)


def test_converted_parameters_stay_an_error_until_they_are_back() -> None:
    a = torch.nn.Parameter(torch.ones(3))
    parameters, before = Parameters({0: a}, [doubled([], 0)]), a.data
    parameters.load([a, None, None])
    a.data = torch.ones(6)[::2]
    for _ in range(2):
        with pytest.raises(ConfigError, match="capture it again"):
            parameters.load([a, None, None])
    a.data = before
    registers = [a, None, None]
    parameters.load(registers)
    assert torch.equal(registers[2], a * 2)
