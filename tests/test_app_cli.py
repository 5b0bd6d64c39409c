"""The `neo` command line: help, errors of users, answers of a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from neo_compile import _native
from neo_compile.app import cli, demo, doctor
from tests.helpers.engines import hf_greedy, tiny_llama
from tests.helpers.smollm import save_tiny_llama

ENGINE = ["--stages", "eager", "--device-tokens", "128", "--host-tokens", "1024", "--device-threads", "1"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny_llama")))


COMMAND_LINES = (
    *("", "generate", "demo", "explain", "profile", "doctor", "simulate", "plot"),
    *("bench kernel", "bench throughput", "bench latency", "bench sweep", "bench rival"),
)


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert "usage: neo" in capsys.readouterr().out


def test_help_does_not_load_torch() -> None:
    code = "import sys; from neo_compile.app import cli; cli.build_parser(); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder", "hello"], "/no/such/folder"),
        (["--policy", "fastest", "hello"], "fastest"),
        (["--device-tokens", "0", "hello"], "device_tokens"),
        (["--device-tokens", "-5", "hello"], "-5"),
        (["--max-tokens", "0", "hello"], "max_tokens"),
        (["--temperature", "-1", "hello"], "temperature"),
        (["--device-threads", "4096", "hello"], "4096"),
        (["--prompts", "/no/such/file"], "/no/such/file"),
        (["   "], "no prompt"),
        (["good", "\udcff"], "prompt 2 is not valid UTF-8"),
    ],
    ids=lambda value: value[0].strip("- ") if isinstance(value, list) else "",
)
def test_user_errors_are_one_line(
    arguments: list[str], message: str, tiny_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in arguments else ["--model", tiny_folder]
    assert cli.main(["generate", "--stages", "eager", *model, *arguments]) == 2
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("neo: ")]
    assert message in line
    assert captured.out == ""


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[doctor.Finding]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(doctor, "examine", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["doctor"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> list[doctor.Finding]:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupt)
    assert cli.main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "doctor.json"
    exit_code = cli.main(["doctor", "--json", str(path)])
    findings = {finding["topic"]: finding for finding in json.loads(path.read_text())}
    assert exit_code == any(finding["hint"] for finding in findings.values())
    topics = {"versions", "processor", "cores", "memory nodes", "memory", "read bandwidth", "host kernels"}
    assert topics <= set(findings)
    assert "C++ compiler" in findings
    assert float(findings["read bandwidth"]["text"].split(" GB/s")[0]) > 0
    assert _native.isa() in findings["host kernels"]["text"]
    assert 'backend="neo" is registered' in findings["torch.compile"]["text"]
    assert findings["host kernels"]["text"] in capsys.readouterr().out


def test_doctor_reports_missing_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "neo_compile._native", None)  # makes the import fail
    monkeypatch.delattr("neo_compile._native", raising=False)
    assert cli.main(["doctor"]) == 1
    assert "pip install" in capsys.readouterr().out


def test_doctor_reports_impossible_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NEO_ISA", "avx1024")
    assert cli.main(["doctor"]) == 1
    assert "unset NEO_ISA" in capsys.readouterr().out


def test_doctor_tells_quota_and_memory_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_native, "cpu_quota", lambda: 1.5)
    assert "cgroup quota 1.5 cores" in doctor._cores()[0].text
    for node, cpus in (("node0", "0-3"), ("node1", "4,6")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert doctor._numa(str(tmp_path)).text == "0: cores 0-3; 1: cores 4,6"
    assert doctor._numa(str(tmp_path / "absent")).text == "not told by this system"


def test_ranges() -> None:
    assert doctor.as_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_single_prompt_is_streamed(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "Once upon a time", "--model", tiny_folder, "--raw", "--max-tokens", "12", *ENGINE]
    assert cli.main(arguments) == 0
    first = capsys.readouterr()
    assert "12 tokens in" in first.err
    assert "0/1 answers" not in first.err
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == first.out


@pytest.mark.parametrize("closed", ["stdin", "stdout"])
def test_closed_standard_streams(
    closed: str, tiny_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell's <&- and >&- leave None in their place."""
    monkeypatch.setattr(sys, closed, None)
    prompts = ["--raw", "7"] if closed == "stdout" else []
    code = cli.main(["generate", "--model", tiny_folder, *ENGINE, "--max-tokens", "2", *prompts])
    assert code == (0 if closed == "stdout" else 2)
    assert "Traceback" not in capsys.readouterr().err


def test_prompts_of_a_file(tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first prompt\n\nsecond prompt\n" + "a very long third prompt " * 4 + "\n")
    assert cli.main(["generate", "--prompts", str(path), "--model", tiny_folder, "--max-tokens", "4", *ENGINE]) == 0
    out = capsys.readouterr().out
    assert out.count(">>> ") == 3
    assert ">>> second prompt\n" in out


def test_prompt_that_can_never_fit(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "x" * 1023, "--model", tiny_folder, "--device-tokens", "64", "--host-tokens", "128"]
    assert cli.main([*arguments, "--stages", "eager"]) == 2
    assert "1023" in capsys.readouterr().err


def test_explain(tiny_folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", tiny_folder]) == 0
    assert "site" in capsys.readouterr().out


def test_demo(tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-prompts", "3", "--max-tokens", "8", "--check-tokens", "4", "--runs", "1", "--stages", "eager"]
    sizes = ["--device-tokens", "1536", "--host-tokens", "4096", "--dtype", "float32"]
    # A byte is a token here, a prompt some 1000 of them: the device cache holds one.
    assert cli.main(["demo", "--model", tiny_folder, "--out", str(tmp_path), *options, *sizes]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 texts equal Hugging Face's greedy decoding" in out
    assert "neo : device-only = " in out
    assert (tmp_path / "timeline.png").exists()
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


@pytest.mark.parametrize("option", ["--num-prompts=99", "--runs=0"])
def test_demo_checks_its_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", option]) == 2
    assert option.split("=")[0] in capsys.readouterr().err


def test_greedy_continuation() -> None:
    model = tiny_llama()
    prompt = [5, 9, 11]
    output = hf_greedy(model, prompt, 6)
    assert demo.is_greedy_continuation(model, prompt, output)
    assert not demo.is_greedy_continuation(model, prompt, [*output[:3], (output[3] + 1) % 199, *output[4:]])
    assert not demo.is_greedy_continuation(model, prompt, [])
