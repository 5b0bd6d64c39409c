"""`neo bench kernel`: decode attention on the host, ours and others', against the memory's bandwidth."""

from __future__ import annotations

import argparse
from typing import Any

from neo_compile.app.options import output_file

DEFAULTS = {
    "dtype": "bfloat16",
    "batch": "1,8,32",
    "context_len": "128,1024,4096",
    "heads": "32/8",
    "head_dim": "128",
}
QUICK = {**DEFAULTS, "batch": "2", "context_len": "512", "heads": "8/2"}

DESCRIPTION = """\
Measure decode attention over a KV cache in the host's memory: one new token per request, one layer.

Every key and value is read once and used little, so memory bandwidth is the ceiling. Each row tells the median
time of a call, the rate at which it went through keys and values, and what share that is of a plain sequential
read by the same threads, measured in the same run. Calls walk over more memory than the caches hold, so that KV
comes from memory, as it does in a model with many layers.

Implementations take turns (A B C A B C ...), after each was checked against a float64 reference:
  ispc, cpp      our ISPC kernels and their C++ twin, the best set that runs here (or the one that NEO_ISA forces).
                 One set by its own name, such as ispc-avx2 or scalar: see `neo doctor`
  sdpa           torch's scaled_dot_product_attention(enable_gqa=True) on dense, padded tensors
  sdpa-folded    the same with the query heads of a group folded into the query length
  flex           torch's flex_attention, compiled for the shape (half a minute each)
  onnxruntime    its GroupQueryAttention operator, if onnxruntime and onnx are installed
  ggml           llama.cpp's flash attention, if libggml-python or llama-cpp-python is installed
`pip install 'neo-compile[bench]'` (in a clone: pip install -e '.[bench]') adds the last two. What cannot run is
listed with the reason."""

EPILOG = """\
examples:
  neo bench kernel --quick                                    a first look, in seconds
  neo bench kernel --dtype fp16,bf16 --heads 32/32,32/8,64/8  groups of 1, 4 and 8 query heads per KV head
  neo bench kernel --impl ispc-avx512,ispc-avx2,cpp           what instruction sets and ISPC bring
  neo bench kernel --batch 8 --json kernel.json               for a plot, or to compare two machines

Let nothing else run meanwhile: the table says how busy the machine was when the run began."""


def add_parser(subparsers: Any) -> None:
    """Add the command to `neo bench`."""
    parser = subparsers.add_parser(
        "kernel",
        help="decode attention on the host, against its peers and the memory's bandwidth",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    lists = parser.add_argument_group("lists", "Each takes one value or several, such as `--batch 1,8,32`.")

    def add_list(flag: str, default: str, text: str) -> None:
        lists.add_argument(flag, nargs="+", metavar="LIST", help=f"{text} (default: {default})")

    add_list("--dtype", DEFAULTS["dtype"], "of keys and values: float32, float16, bfloat16, or fp32, fp16, bf16")
    add_list("--batch", DEFAULTS["batch"], "requests")
    add_list("--context-len", DEFAULTS["context_len"], "tokens of each request")
    add_list("--heads", DEFAULTS["heads"], "query heads/KV heads")
    add_list("--head-dim", DEFAULTS["head_dim"], "values of a head")
    add_list("--impl", "all but single kernel sets", "implementations, or 'all'")
    parser.add_argument("--block-size", default="16", metavar="N", help="tokens of a cache block (default: 16)")
    parser.add_argument("--scattered", action="store_true", help="our blocks in random order, as after long serving")
    parser.add_argument("--threads", metavar="N", help="threads of every implementation (default: all usable CPUs)")
    parser.add_argument("--rounds", metavar="N", help="turns of every implementation (default: 7; 3 with --quick)")
    parser.add_argument("--quick", action="store_true", help="one small case and few rounds: rough figures, in seconds")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write config, machine and rows to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command. Returns 1 if an implementation computed something wrong."""
    from neo_compile.app.bench.kernel_options import read_settings
    from neo_compile.app.bench.report import print_report, write_json
    from neo_compile.app.bench.session import KernelBench
    from neo_compile.app.progress import StatusLine

    settings = read_settings(args)
    with StatusLine() as status, KernelBench(settings, status) as bench:
        bench.run()
    print_report(bench)
    if settings.json_path:
        write_json(settings.json_path, bench)
    return 1 if bench.is_any_wrong else 0
