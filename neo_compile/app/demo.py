"""`neo demo`: a real model answers a dozen prompts with a device cache that is too small for them.

1. float32: the text of both policies must equal Hugging Face's own `generate`.
2. speed: device-only and neo in turn, in bfloat16 where the CPU computes in it.
3. one more short run with the timeline recorder on, drawn as a picture.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neo_compile.app.demo_prompts import PROMPTS
from neo_compile.app.demo_report import print_report, write_timeline
from neo_compile.app.doctor import has_fast_bfloat16
from neo_compile.app.models import SMOLLM2, encode_chat, load_model, parse_dtype
from neo_compile.app.options import open_engine
from neo_compile.app.progress import StatusLine
from neo_compile.app.serving import ServedRun, serve
from neo_compile.app.timeline_plot import is_pipelined
from neo_compile.errors import ConfigError
from neo_compile.runtime.outputs import RequestOutput
from neo_compile.runtime.plan import Strategy
from neo_compile.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from neo_compile.runtime.engine import Engine
    from neo_compile.runtime.timeline import Timeline

POLICIES = ("device-only", "neo")
TIMELINE_TOKENS = 32

DESCRIPTION = """\
Serve a dozen real prompts on two tiers: check in float32 that the text equals Hugging Face's, measure device-only
against neo, and draw one iteration. A few minutes on two cores, compiling included."""


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser = subparsers.add_parser(
        "demo",
        help="a dozen prompts on two tiers, measured and drawn",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=SMOLLM2, metavar="NAME", help="see `neo generate -h`")
    parser.add_argument(
        "--device-tokens", type=int, default=640, metavar="N", help="device cache, tokens (default: %(default)s)"
    )
    parser.add_argument("--host-tokens", type=int, default=8192, metavar="N", help="host cache (default: %(default)s)")
    parser.add_argument("--device-threads", type=int, metavar="N", help="cores that play the device (default: half)")
    parser.add_argument("--host-threads", type=int, metavar="N", help="cores of the host side (default: the others)")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument(
        "--check-tokens",
        type=int,
        default=24,
        metavar="N",
        help="of each answer are checked in float32 (default: 24)",
    )
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="of each policy (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS), metavar="N", help="only the first N prompts")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the measured runs (default: by the CPU)")
    parser.add_argument(
        "--stages", default="inductor", choices=["inductor", "eager", "background"], help="see `neo generate -h`"
    )
    parser.add_argument("--out", default="out", metavar="DIR", help="where picture and trace go (default: %(default)s)")
    parser.set_defaults(run=run, block_size=16, max_num_seqs=256, max_num_batched_tokens=2048)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 1 if a text differs in float32."""
    if args.runs < 1 or not 1 <= args.num_prompts <= len(PROMPTS):
        raise ConfigError(f"--runs must be at least 1, --num-prompts 1 to {len(PROMPTS)}")
    start = time.perf_counter()
    prompts = PROMPTS[: args.num_prompts]
    with StatusLine() as status:
        is_same = check_texts(prompts, args, status) if args.check_tokens else True
        dtype = args.dtype or ("bfloat16" if has_fast_bfloat16() else "float32")
        status.announce(f"loading the model in {dtype}")
        model, tokenizer = load_model(args.model, parse_dtype(dtype))
        token_ids = [encode_chat(tokenizer, prompt) for prompt in prompts]
        engines = {policy: _open_engine(policy, model, tokenizer, args, status) for policy in POLICIES}
        try:
            runs = measure(engines, prompts, token_ids, args, status)
            status.clear()
            print_report(runs, engines["neo"].stats(), token_ids, dtype)
            draw_timelines(engines["neo"], model, tokenizer, token_ids, args, status)
        finally:
            for engine in engines.values():
                engine.close()
    print(f"\nThe whole demo took {time.perf_counter() - start:.0f} s.")
    return 0 if is_same else 1


def _open_engine(policy: str, model: Any, tokenizer: Any, args: argparse.Namespace, status: StatusLine) -> Engine:
    status.announce(f"preparing the engine for {policy} (compiling takes a minute or two the first time)")
    return open_engine(model, tokenizer, args, policy=policy)


def check_texts(prompts: Sequence[str], args: argparse.Namespace, status: StatusLine) -> bool:
    """Whether, in float32, both policies give the tokens of Hugging Face's greedy decoding; says so."""
    status.announce("loading the model in float32, for comparing texts")
    model, tokenizer = load_model(args.model, parse_dtype("float32"))
    token_ids = [encode_chat(tokenizer, prompt) for prompt in prompts]
    params = SamplingParams(max_tokens=args.check_tokens, temperature=0.0)
    verified: list[list[int]] = [[] for _ in prompts]
    is_same = True
    for policy in POLICIES:
        with _open_engine(policy, model, tokenizer, args, status) as engine:
            served = serve(engine, token_ids, params, on_progress=partial(status.update_from, label=f"{policy}: "))
        status.announce("comparing with Hugging Face")
        num_same = 0
        for index, output in enumerate(served.outputs):
            if output.token_ids == verified[index] or is_greedy_continuation(model, token_ids[index], output.token_ids):
                verified[index] = output.token_ids
                num_same += 1
        is_same &= num_same == len(prompts)
        status.clear()
        print(
            f"float32, {policy}: {num_same} of {len(prompts)} texts equal Hugging Face's greedy decoding "
            f"({served.num_output_tokens} tokens; {served.counters['num_host_requests']} requests decoded on the host)",
            flush=True,
        )
    return is_same


def is_greedy_continuation(model: Any, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether transformers, decoding greedily, continues `prompt` with `output`.

    One forward pass tells: each token must be the likeliest one after all tokens before it.
    """
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return bool(output) and logits.argmax(-1).tolist() == list(output)


def measure(
    engines: dict[str, Engine],
    prompts: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    args: argparse.Namespace,
    status: StatusLine,
) -> dict[str, list[ServedRun]]:
    """Serve the prompts `args.runs` times with each policy, in turn; the first neo run prints its answers."""
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0)
    runs: dict[str, list[ServedRun]] = {policy: [] for policy in engines}

    def print_answer(index: int, output: RequestOutput) -> None:
        if output.is_finished:
            status.clear()
            print(f"\n>>> {_shorten(prompts[index])}\n{output.text.strip()}", flush=True)

    for number in range(args.runs):
        for policy in reversed(POLICIES):
            is_first = number == 0 and policy == "neo"
            served = serve(
                engines[policy],
                token_ids,
                params,
                on_output=print_answer if is_first else None,
                on_progress=partial(status.update_from, label=f"{policy}, run {number + 1}: "),
            )
            runs[policy].append(served)
    return runs


def _shorten(prompt: str, length: int = 110) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= length else line[: length - 4] + " ..."


def draw_timelines(
    engine: Engine,
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    status: StatusLine,
) -> None:
    """Draw an iteration as the scheduler chose it and, if it pipelined none, one where it had to."""
    folder = Path(args.out)
    timeline = record_timeline(engine, prompts, status)
    write_timeline(timeline, folder, "timeline")
    if any(is_pipelined(timeline.of_iteration(iteration)) for iteration in timeline.iterations()):
        return
    print("\nNo iteration was worth two sub-batches to the scheduler. The same prompts when they are its only choice:")
    with open_engine(model, tokenizer, args, policy="neo", strategies=(Strategy.PIPELINED.value,)) as pipelining:
        write_timeline(record_timeline(pipelining, prompts, status), folder, "timeline-pipelined")


def record_timeline(engine: Engine, prompts: Sequence[Sequence[int]], status: StatusLine) -> Timeline:
    """Serve the prompts once more, for a few tokens, with the recorder on."""
    params = SamplingParams(max_tokens=TIMELINE_TOKENS, temperature=0.0)
    engine.start_timeline()
    try:
        serve(engine, prompts, params, on_progress=status.update_from)
    finally:
        timeline = engine.stop_timeline()
    status.clear()
    return timeline
