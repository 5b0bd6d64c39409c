"""The `neo` command. Each subcommand is a module with `add_parser(subparsers)` and `run(args) -> exit code`.

Exit codes: 0 success, 1 a check failed, 2 the request cannot be served as asked (one line says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from neo_compile import __version__
from neo_compile.errors import NeoError

logger = logging.getLogger(__name__)

COMMANDS = ("generate", "demo", "explain_command", "profile_command", "bench", "simulate", "plot", "doctor")

DESCRIPTION = """\
neo_compile serves more requests from a device whose memory is full: part of the requests keep their KV cache
and their decode attention on the host CPU, beside the device's linear work."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="neo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"neo_compile {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what is done, and errors in full")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"neo_compile.app.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Bad options and inputs, and files that cannot be read or written, are one line on standard error
    (-v: and a traceback) and exit code 2.

    Other errors are bugs and keep their traceback.
    """
    # Progress bars of weight loading would tear the status line apart.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("neo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `neo ... | head`: the reader has had enough
        _drop_output()
        return 141
    except (NeoError, ValueError, OSError) as error:
        logger.info("the error in full", exc_info=True)
        if isinstance(error, OSError) and error.filename is None:  # `neo ... > /dev/full`: what is buffered is lost
            _drop_output()
        print(f"neo: {error}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
    except SystemExit:  # --help
        _flush()
        raise
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    exit_code: int = args.run(args)
    _flush()
    return exit_code


def _flush() -> None:
    if sys.stdout is not None:  # None: closed (>&-)
        sys.stdout.flush()


def _drop_output() -> None:
    """Standard output takes nothing any more; Python would try again, and complain, when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
