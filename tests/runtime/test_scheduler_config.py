"""Every option is checked, and unknown ones list the valid."""

import pytest

from neo_compile.errors import ConfigError
from neo_compile.runtime.plan import Strategy
from neo_compile.runtime.scheduler_config import POLICIES, SchedulerConfig


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("policy", "fast", "'neo', 'device-only', 'host-only', 'symmetric'"),
        ("full_cache", "panic", "'swap', 'recompute', 'reserve'"),
        ("strategies", ("pipelined", "magic"), "'magic' is not one of 'device-only', 'unsplit', 'pipelined'"),
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
    ],
)
def test_bad_values_are_refused_by_name(option, value, named):
    with pytest.raises(ConfigError, match=named):
        SchedulerConfig(**{option: value})


def test_options_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        SchedulerConfig("neo")
    with pytest.raises(AttributeError):
        SchedulerConfig().policy = "symmetric"


def test_strategies_restrict_the_policy():
    assert SchedulerConfig().allowed_strategies == POLICIES["neo"].strategies
    config = SchedulerConfig(strategies=("pipelined", "device-only"))
    assert set(config.allowed_strategies) == {Strategy.DEVICE_ONLY, Strategy.PIPELINED}
