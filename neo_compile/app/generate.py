"""`neo generate`: prompts in, answers out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from neo_compile.app.models import encode_chat, load_model, parse_dtype
from neo_compile.app.options import add_engine_options, add_model_options, open_engine
from neo_compile.app.progress import StatusLine
from neo_compile.app.serving import ServedRun, serve
from neo_compile.errors import ConfigError
from neo_compile.runtime.outputs import RequestOutput
from neo_compile.runtime.sampling_params import SamplingParams

DESCRIPTION = """\
Answer prompts: those on the command line and in --prompts FILE, or, without either, one per line from standard input.
One prompt is streamed as it grows; several are served together, and each is printed when it is finished.
Where the tokenizer has a chat template the prompt is the user's turn (--raw: no template)."""


def add_parser(subparsers: Any) -> None:
    """Add the command to the `neo` command line."""
    parser = subparsers.add_parser(
        "generate",
        help="prompts in, answers out",
        description=DESCRIPTION,
        epilog='example: neo generate "Why is the sky blue?" --max-tokens 80 --device-tokens 864',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", nargs="*", help="a prompt (quote it); several are served together")
    parser.add_argument("--prompts", metavar="FILE", help="a text file with one prompt per line; - is standard input")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without a chat template")
    add_model_options(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens of an answer (default: 128)")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="(default: %(default)s)")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all tokens (default: %(default)s)")
    sampling.add_argument("--seed", type=int, metavar="N", help="of the sampling")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns the exit code."""
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed
    )
    prompts = read_prompts(args)
    with StatusLine() as status:
        status.announce(f"loading {args.model}")
        model, tokenizer = load_model(args.model, parse_dtype(args.dtype))
        token_ids = [tokenizer.encode(p) if args.raw else encode_chat(tokenizer, p) for p in prompts]
        status.announce("preparing the engine (the first time, compiling takes a minute or two)")
        with open_engine(model, tokenizer, args) as engine:
            printer = _AnswerPrinter(prompts, status)
            # A streamed answer shows by itself how far it is, and a status line would overwrite it.
            on_progress = status.update_from if len(prompts) > 1 else None
            served = serve(engine, token_ids, params, on_output=printer.take, on_progress=on_progress)
            status.clear()
            print(_summary(served), file=sys.stderr)
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """All prompts of the command line, the file, or standard input. Raises ConfigError if there is none."""
    prompts = list(args.prompt)
    source = args.prompts or (None if prompts else "-")
    if source == "-":
        if sys.stdin is None or sys.stdin.isatty():  # None: closed (<&-)
            raise ConfigError('no prompt: write one on the command line, neo generate "Why is the sky blue?"')
        prompts += sys.stdin.read().splitlines()
    elif source is not None:
        try:
            prompts += Path(source).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --prompts {source}: {error}") from error
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise ConfigError(
            f"no prompt in {'standard input' if source == '-' else source or 'the arguments'}: all lines are empty"
        )
    for number, prompt in enumerate(prompts, 1):
        if not prompt.isprintable() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise ConfigError(f"prompt {number} is not valid UTF-8: {prompt!r}")
    return prompts


class _AnswerPrinter:
    """Streams the only answer to standard output, or prints each of several when it is finished."""

    def __init__(self, prompts: list[str], status: StatusLine) -> None:
        self._prompts = prompts
        self._status = status
        self._num_printed = 0

    def take(self, index: int, output: RequestOutput) -> None:
        if len(self._prompts) == 1:
            self._status.clear()
            print(output.text[self._num_printed :], end="\n" if output.is_finished else "", flush=True)
            self._num_printed = len(output.text)
        elif output.is_finished:
            self._status.clear()
            print(f">>> {self._prompts[index]}\n{output.text.strip()}\n", flush=True)
        if output.error is not None:
            print(f"neo: prompt {index + 1} failed: {output.error}", file=sys.stderr)


def _summary(served: ServedRun) -> str:
    counters = served.counters
    return (
        f"{served.num_output_tokens} tokens in {served.seconds:.1f} s ({served.tokens_per_second:.1f} tokens/s), "
        f"{counters['num_host_requests']} of {len(served.outputs)} requests decoded on the host, "
        f"{counters['num_swap_outs'] + counters['num_swap_ins']} swaps"
    )
