"""The parts of reports: tables, the status line, the picture of an iteration."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from neo_compile.app import timeline_plot
from neo_compile.app.progress import StatusLine
from neo_compile.app.tables import format_table
from neo_compile.errors import NeoError
from neo_compile.runtime.timeline import Timeline

MS = 1_000_000


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def make_timeline(num_layers: int = 8) -> Timeline:
    """Iteration 1 has no host attention, 2 is unsplit with some, 3 is pipelined with some."""
    timeline = Timeline()
    for iteration in (1, 2, 3):
        now = iteration * 1000 * MS
        for layer in range(num_layers):
            for batch in (0, 1) if iteration == 3 else (0,):
                timeline.add("device", "linear", now, now + 2 * MS, iteration, layer=layer, sub_batch=batch)
                now += 2 * MS
                if iteration > 1:
                    end = now + (4 - iteration) * MS
                    timeline.add("host", "host attention", now, end, iteration, layer=layer, sub_batch=batch)
            if iteration > 1:
                timeline.add("device", "wait", now, now + MS // 2, iteration, layer=layer, sub_batch=0)
                now += MS // 2
    return timeline


def test_table_is_aligned() -> None:
    assert format_table(["policy", "tokens/s"], [["neo", 123.456], ["device-only", 7]]) == (
        "policy       tokens/s\n---------------------\nneo             123.5\ndevice-only         7"
    )
    with pytest.raises(ValueError, match="1 cells under 2"):
        format_table(["a", "b"], [["only"]])


def test_status_line_rewrites_itself_on_a_terminal() -> None:
    terminal = Terminal()
    with StatusLine(terminal) as status:
        status.announce("a long first text")
        status.announce("short")
        status.update("too early to be shown")
    assert terminal.getvalue() == "\ra long first text\rshort            \r     \r"


def test_status_line_writes_few_lines_to_a_file() -> None:
    log = io.StringIO()
    with StatusLine(log) as status:
        status.announce("phase one")
        for count in range(1000):
            status.update_from(count)
        status.announce("phase two")
    assert log.getvalue() == "  ... phase one\n  ... phase two\n"


def test_the_pipelined_iteration_is_chosen() -> None:
    timeline = make_timeline()
    # Iteration 2 has more host attention in all, but only 3 has two sub-batches.
    assert timeline_plot.choose_iteration(timeline) == 3
    assert timeline_plot.describe(timeline.of_iteration(3)) == (
        "a pipelined iteration of 36.5 ms, with 16.0 ms of host attention, for which the device waited 4.0 ms"
    )
    only_device = Timeline()
    only_device.events = timeline.of_iteration(1)
    assert timeline_plot.choose_iteration(only_device) is None
    assert timeline_plot.choose_iteration(Timeline()) is None


@pytest.mark.parametrize("iteration", [1, 2, 3])
@pytest.mark.parametrize("num_layers", [1, 8])
def test_picture(tmp_path: Path, iteration: int, num_layers: int) -> None:
    path = tmp_path / "timeline.png"
    timeline_plot.plot_iteration(make_timeline(num_layers).of_iteration(iteration), path, title="an iteration")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_no_events_no_picture(tmp_path: Path) -> None:
    with pytest.raises(NeoError, match="no events"):
        timeline_plot.plot_iteration([], tmp_path / "timeline.png", title="nothing")
