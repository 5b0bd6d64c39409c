"""Options that commands share: `--set`, numbers, files to write."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace

import pytest
import torch

from neo_compile.app.cli import main
from neo_compile.app.options import CONFIGS, _config_class, number_option, open_engine, output_file, parse_settings
from neo_compile.checks import COUNT, POSITIVE, Numbers
from neo_compile.errors import ConfigError


def config_of(setting):
    config = setting.split(".")[0]
    return _config_class(config)(**parse_settings([setting], CONFIGS)[config])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("scheduler.prefill_pace=4", 4),
        ("scheduler.chunked_prefill=false", False),
        ("scheduler.chunked_prefill=False", False),
        ('scheduler.strategies=["device-only","pipelined"]', ("device-only", "pipelined")),
        ("scheduler.strategies=null", None),
        ("cache.dtype=float16", torch.float16),
        ("cache.dtype=torch.bfloat16", torch.bfloat16),
        ("cache.dtype=null", None),
        ("cache.device_bytes=2GiB", "2GiB"),
        ("device.swap_gbps=None", None),
    ],
)
def test_settings(setting, value):
    config, name = setting.split("=")[0].split(".")
    assert parse_settings([setting], CONFIGS)[config] == {name: value}
    assert getattr(config_of(setting), name) == value


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("scheduler.prefill_pace=abc", "SchedulerConfig.prefill_pace='abc', must be a finite number of at least 0"),
        ("scheduler.prefill_pace=nan", "prefill_pace='nan'"),
        ("scheduler.prefill_pace=NaN", "prefill_pace=nan"),
        ("scheduler.prefill_pace=null", "prefill_pace=None"),
        ("scheduler.prefill_pace=[1]", r"prefill_pace=\(1,\)"),
        ("scheduler.swap_cooldown=1e400", "swap_cooldown=inf"),
        ("scheduler.max_num_seqs=1.5", "max_num_seqs=1.5, must be a whole number of at least 1"),
        ("scheduler.max_idle_iterations=true", "max_idle_iterations=True"),
        ("scheduler.strategies=pipelined", "strategies='pipelined', must be a tuple or list"),
        ("scheduler.policy={}", "policy={}"),
        ("cache.block_size=16.0", "CacheConfig.block_size=16.0"),
        ("cache.device_bytes=1.5", "CacheConfig.device_bytes=1.5"),
        ("cache.dtype=int8", "unknown dtype 'int8'; valid: bfloat16, float16, float32"),
        ("device.swap_gbps=abc", "DeviceConfig.swap_gbps='abc', must be a finite number above 0, or None"),
        ("device.pin_threads=maybe", "DeviceConfig.pin_threads='maybe', must be one of True, False"),
    ],
)
def test_bad_settings_are_refused_by_name(setting, message):
    with pytest.raises(ConfigError, match=message):
        config_of(setting)


def test_the_seed_of_the_sampling_is_not_the_devices(monkeypatch):
    monkeypatch.setattr("neo_compile.runtime.engine.Engine", lambda model, tokenizer, **configs: configs)
    assert open_engine(None, None, Namespace(seed=7, stages="eager"))["device"].seed == 0
    assert open_engine(None, None, Namespace(seed=7, stages="eager", set=["device.seed=3"]))["device"].seed == 3


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        (POSITIVE, ["1", "0.5", "1e-9"], ["0", "-1", "nan", "inf", "", "abc"]),
        (COUNT, ["1", "4096"], ["0", "1.5", "nan", "1e3"]),
        (Numbers(at_least=0, at_most=1), ["0", "1"], ["1.1", "-0.1"]),
    ],
)
def test_numbers(allowed, good, bad):
    parse = number_option(allowed)
    assert [parse(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(ArgumentTypeError, match=f"^'{text}', must be {allowed}"):
            parse(text)


LONG_COMMANDS = (
    *("profile --json", "doctor --json", "simulate --json", "bench kernel --json", "bench throughput --json"),
    *("bench throughput --timeline", "bench latency --json", "bench sweep --json", "bench rival --json"),
)


@pytest.mark.parametrize("command", LONG_COMMANDS)
def test_files_that_cannot_be_written_are_refused_before_the_work(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "/no/such/folder/x.json"])
    assert stop.value.code == 2
    assert f"argument {command.split()[-1]}: '/no/such/folder/x.json': its folder does not" in capsys.readouterr().err


def test_output_files(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    assert output_file(str(path)) == str(path)
    assert output_file("x.json") == "x.json"
    assert output_file(os.devnull) == os.devnull
    with pytest.raises(ArgumentTypeError, match="is a folder"):
        output_file(str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ArgumentTypeError, match="cannot be written"):
        output_file(str(path))
