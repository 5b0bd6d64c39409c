"""Machines and models to simulate: the paper's, as a few effective rates, and any that `neo profile` measured.

Linear stages read the weights (`weights_ms`, flat up to `knee_tokens`) and then cost `ms_per_token`; attention reads KV
at the rate of the tier that holds it. Rates are what such hardware reaches, not what its data sheet says: the host's
are those under which the published gains can be understood at all (24 / 22 / 45 / 67 GB/s for the four instances).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from neo_compile.errors import ConfigError
from neo_compile.runtime.cost_model import AnalyticCostModel, CostModel
from neo_compile.runtime.cost_tables import TableCostModel


@dataclass(frozen=True, kw_only=True)
class Machine(ABC):
    """What a load is simulated on. `device_tokens` and `host_tokens` are the sizes of the two caches."""

    title: str
    device_tokens: int
    host_tokens: int
    block_size: int = 16

    @abstractmethod
    def cost_model(self) -> CostModel:
        """A cost model that no run has corrected yet."""

    @property
    def device_blocks(self) -> int:
        """Of the device cache."""
        return self.device_tokens // self.block_size

    @property
    def host_blocks(self) -> int:
        """Of the host cache."""
        return self.host_tokens // self.block_size


@dataclass(frozen=True, kw_only=True)
class Setup(Machine):
    """A device beside its host, serving one model.

    Attributes:
        weights_ms: an iteration's linear stages while they only read the weights.
        knee_tokens: up to how many tokens they do.
        ms_per_token: of an iteration's linear stages, for each token beyond.
        prefill_ms_per_token2: causal attention of a prompt, over all layers, times its length squared.
        kv_bytes: K and V of a token in one layer.
        device_gbps, host_gbps: at which decode attention reads KV in either tier.
        link_gbps: at which KV moves between the tiers.
        launch_ms: what a layer's host attention costs beside the attention.
    """

    num_layers: int
    weights_ms: float
    knee_tokens: int
    ms_per_token: float
    prefill_ms_per_token2: float
    kv_bytes: int
    device_gbps: float
    host_gbps: float
    link_gbps: float
    launch_ms: float

    def cost_model(self, **changes: float) -> AnalyticCostModel:
        """Costs per layer; `changes` replace parameters of `AnalyticCostModel`."""
        parameters: dict[str, float] = {
            "num_layers": self.num_layers,
            "linear_floor_ms": self.weights_ms / self.num_layers,
            "knee_tokens": self.knee_tokens,
            "linear_ms_per_token": self.ms_per_token / self.num_layers,
            "prefill_attention_ms_per_token2": self.prefill_ms_per_token2 / self.num_layers,
            "device_tokens_per_ms": self.device_gbps * 1e6 / self.kv_bytes,
            "host_tokens_per_ms": self.host_gbps * 1e6 / self.kv_bytes,
            "swap_blocks_per_ms": self.link_gbps * 1e6 / (self.kv_bytes * self.block_size),
            "launch_ms": self.launch_ms,
        }
        return AnalyticCostModel(**(parameters | changes))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class ProfiledMachine(Machine):
    """A machine and model that `neo profile` measured; `tables` is the text of its file."""

    tables: str

    def cost_model(self) -> TableCostModel:
        return TableCostModel.from_json(self.tables)


_T4 = Setup(
    title="T4 with Llama-2-7B in fp16, beside 8 cores",
    num_layers=32,
    weights_ms=42.0,  # 13.5 GB at 320 GB/s
    knee_tokens=64,
    ms_per_token=0.43,
    prefill_ms_per_token2=3.2e-5,
    kv_bytes=2 * 32 * 128 * 2,
    device_gbps=250.0,
    host_gbps=24.0,
    link_gbps=10.0,
    launch_ms=0.1,
    device_tokens=864,  # the artefact's 54 blocks
    host_tokens=38_400,  # 20 GB
)
_A10G = Setup(
    title="A10G with Llama-3-8B in bf16, beside g5.8xlarge's cores",
    num_layers=32,
    weights_ms=27.0,  # 16 GB at 600 GB/s
    knee_tokens=80,
    ms_per_token=0.33,
    prefill_ms_per_token2=6.4e-6,
    kv_bytes=2 * 8 * 128 * 2,
    device_gbps=500.0,
    host_gbps=45.0,
    link_gbps=20.0,
    launch_ms=0.1,
    device_tokens=26_400,  # 1,650 blocks
    host_tokens=960_000,  # 120 GB
)
_H100 = Setup(
    title="2 x H100 with Llama-3-70B in bf16, beside one NUMA node",
    num_layers=80,
    weights_ms=26.0,  # 141 GB at 2 x 2.7 TB/s
    knee_tokens=220,
    ms_per_token=0.12,  # 141 GFLOP at 2 x 590 TFLOPS
    prefill_ms_per_token2=1.4e-6,
    kv_bytes=2 * 8 * 128 * 2,
    device_gbps=5_000.0,
    host_gbps=90.0,
    link_gbps=50.0,
    launch_ms=0.1,
    device_tokens=18_000,  # what 2 x 80 GB leave beside the weights
    host_tokens=960_000,
)

SETUPS = {
    "t4": _T4,
    "a10g-2xlarge": replace(_A10G, title="A10G with Llama-3-8B in bf16, beside g5.2xlarge's cores", host_gbps=24.0),
    "a10g-4xlarge": replace(_A10G, title="A10G with Llama-3-8B in bf16, beside g5.4xlarge's cores", host_gbps=22.0),
    "a10g-8xlarge": _A10G,
    "a10g-16xlarge": replace(_A10G, title="A10G with Llama-3-8B in bf16, beside g5.16xlarge's cores", host_gbps=67.0),
    "h100": _H100,
}


def find_setup(name: str) -> Setup:
    """A set-up by its name. Raises ConfigError listing the names."""
    if name not in SETUPS:
        raise ConfigError.unknown("set-up", name, tuple(SETUPS))
    return SETUPS[name]


def read_profile(path: Path, *, device_tokens: int, host_tokens: int) -> ProfiledMachine:
    """The machine and model whose cost tables `path` holds, with caches of these sizes.

    Raises:
        ConfigError: the file cannot be read, or holds no cost tables of this version.
    """
    try:
        tables = path.read_text(encoding="utf-8")
        key = TableCostModel.from_json(tables).key
        cores = f"{key['device_threads']} cores as the device, {key['host_threads']} as the host"
        return ProfiledMachine(
            title=f"{key['model']}, {key['cache_dtype'].removeprefix('torch.')}, {key['cpu']}, {cores}",
            device_tokens=device_tokens,
            host_tokens=host_tokens,
            block_size=key["block_size"],
            tables=tables,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} has no cost tables that can be used ({type(error).__name__}: {error})") from error
