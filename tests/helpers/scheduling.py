"""A virtual engine with a few blocks, and requests for it."""

from neo_compile.runtime.request import Request
from neo_compile.runtime.scheduler_config import SchedulerConfig
from tests.helpers.virtual_engine import VirtualEngine, t4_llama2_7b


def engine(device_blocks: int = 8, host_blocks: int = 8, block_size: int = 4, model=None, **options) -> VirtualEngine:
    return VirtualEngine(
        SchedulerConfig(**options),
        model or t4_llama2_7b(),
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        block_size=block_size,
    )


def request(name: str, num_prompt_tokens: int, max_tokens: int = 4) -> Request:
    return Request(name, [0] * num_prompt_tokens, max_tokens)


def names(requests) -> list[str]:
    return [r.request_id for r in requests]


def step_until_running(virtual: VirtualEngine, *requests: Request) -> None:
    for _ in range(20):
        if all(not r.is_prefilling for r in requests):
            return
        virtual.step()
    raise AssertionError("prefills do not end")
