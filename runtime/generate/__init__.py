r"""Hugging Face's `generate`, unchanged, on neo: `enable`, the views of its cache, and what they are served by.

custom -> enabling -> forward -> serving -> placement, strategy -> rows
              \-> calls  \-> views -> cells
"""

from neo_compile.runtime.generate.counters import GenerateStats
from neo_compile.runtime.generate.custom import generate
from neo_compile.runtime.generate.enabling import disable, enable, stats
from neo_compile.runtime.generate.views import to_dynamic_cache

__all__ = ["GenerateStats", "disable", "enable", "generate", "stats", "to_dynamic_cache"]
