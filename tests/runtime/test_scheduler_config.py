"""Every option is checked, and unknown ones list the valid."""

import math

import pytest

from neo_compile.errors import ConfigError
from neo_compile.runtime.plan import Strategy
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("policy", "fast", "'neo', 'device-only', 'host-only', 'symmetric'"),
        ("full_cache", "panic", "'swap', 'recompute', 'reserve'"),
        (
            "strategies",
            ("pipelined", "magic"),
            "strategies='magic', must be one of 'device-only', 'unsplit', 'pipelined'",
        ),
        ("strategies", (), "at least one"),
        ("strategies", ("device-only",), "host requests could never decode"),
        ("max_num_seqs", 0, "max_num_seqs=0"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens=0"),
        ("max_idle_iterations", 0, "max_idle_iterations=0"),
        ("prefill_price", -1.0, "prefill_price=-1.0"),
        ("prefill_pace", -1.0, "prefill_pace=-1.0"),
        ("swap_cooldown", -1, "swap_cooldown=-1"),
        ("min_gain_margin", -0.1, "min_gain_margin=-0.1"),
        ("swap_in_threshold", 0.0, "swap_in_threshold=0.0"),
        ("policy", ["neo"], "policy="),
        ("strategies", "pipelined", "strategies='pipelined', must be a tuple or list of at least one of 'device-only'"),
        ("strategies", 5, "strategies=5"),
        ("chunked_prefill", "no", "chunked_prefill='no', must be one of True, False"),
    ],
)
def test_bad_values_are_refused_by_name(option, value, named):
    with pytest.raises(ConfigError, match=named):
        SchedulerConfig(**{option: value})


COUNTS = ("max_num_seqs", "max_num_batched_tokens", "max_idle_iterations", "swap_cooldown")
SHARES = ("prefill_pace", "prefill_price", "min_gain_margin", "swap_in_threshold")


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "8", None, (3,)], ids=str)
@pytest.mark.parametrize("option", COUNTS + SHARES)
def test_what_is_no_number_is_refused(option, value):
    with pytest.raises(ConfigError, match=f"SchedulerConfig.{option}=.*must be a"):
        SchedulerConfig(**{option: value})


@pytest.mark.parametrize("option", COUNTS)
def test_counts_are_whole(option):
    with pytest.raises(ConfigError, match=f"SchedulerConfig.{option}=1.5, must be a whole number"):
        SchedulerConfig(**{option: 1.5})


def test_options_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        SchedulerConfig("neo")
    with pytest.raises(AttributeError):
        SchedulerConfig().policy = "symmetric"


def test_strategies_restrict_the_policy():
    assert SchedulerConfig().allowed_strategies == POLICIES["neo"].strategies
    config = SchedulerConfig(strategies=("pipelined", "device-only"))
    assert set(config.allowed_strategies) == {Strategy.DEVICE_ONLY, Strategy.PIPELINED}
