"""`neo profile` on a tiny model."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from neo_compile.app import cli, doctor
from neo_compile.app.profile_command import progress_text, table_rows
from neo_compile.runtime import profiler
from tests.helpers.smollm import save_tiny_llama
from tests.runtime.test_profiler import SMALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("model")))


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NEO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("neo_compile.runtime.kernel_costs._COLD_BYTES", 2**20)
    monkeypatch.setattr(profiler, "QUICK", SMALL)
    monkeypatch.setattr(profiler, "full_grid", lambda *limits: SMALL)
    report = tmp_path / "profile.json"
    options = ["profile", folder, "--stages", "eager", "--device-threads", "1", "--host-threads", "1"]
    assert cli.main([*options, "--json", str(report)]) == 0
    printed = capsys.readouterr()
    assert "full profile at" in printed.out
    assert "host attention" in printed.out
    assert "[" in printed.err
    document = json.loads(report.read_text())
    assert document["config"]["model"] == folder
    rows = document["rows"]
    assert {k: v for k, v in rows[1].items() if k != "ms"} == {"table": "linear", "tokens": 4}
    host = [row for row in rows if row["table"] == "host_attention"]
    assert [(row["requests"], row["kv_tokens"]) for row in host] == [(1, 16), (1, 64), (4, 16), (4, 64)]
    assert all(row["ms"] >= 0 for row in rows)

    (path,) = (tmp_path / "cache" / "costs").glob("*.full.json")
    written = path.stat().st_mtime_ns
    assert cli.main(options) == 0
    assert path.stat().st_mtime_ns == written
    again = capsys.readouterr().out
    assert again.splitlines()[0].split(" (")[0] == printed.out.splitlines()[0].split(" (")[0]
    assert cli.main([*options, "--force"]) == 0
    assert path.stat().st_mtime_ns > written

    findings = [finding.text for finding in doctor._cost_tables()]
    assert any(text.endswith("full, serves") for text in findings)
    path.write_text(path.read_text().replace('"torch": "', '"torch": "0'))
    assert any("full, refused (torch '0" in finding.text for finding in doctor._cost_tables())


def test_doctor_without_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("NEO_CACHE", str(tmp_path))
    (finding,) = doctor._cost_tables()
    assert "neo profile" in finding.text
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs" / "damaged.quick.json").write_text("{")
    (finding,) = doctor._cost_tables()
    assert "damaged.quick.json: unusable" in finding.text


@pytest.mark.parametrize("name", ["tiny-1a2b-3c4d.json", "tiny-3.2-1a2b-3c4d.json", "tiny.coarse.json"])
def test_doctor_with_files_of_other_versions(name, tmp_path, monkeypatch):
    monkeypatch.setenv("NEO_CACHE", str(tmp_path))
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs" / name).write_text("{}")
    (finding,) = doctor._cost_tables()
    assert finding.text.startswith(f"{name}: unusable (an old name: ")
    assert ".full.json or .quick.json" in finding.text


@pytest.mark.parametrize("key", [[], {}, {"host_slowdown": "much"}, {"host_slowdown": 1, "cache_dtype": None}], ids=str)
def test_doctor_with_damaged_keys(key, tmp_path, monkeypatch):
    monkeypatch.setenv("NEO_CACHE", str(tmp_path))
    monkeypatch.setattr(profiler.TableCostModel, "from_json", lambda text: SimpleNamespace(key=key))
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs" / "tiny.full.json").write_text("{}")
    (finding,) = doctor._cost_tables()
    assert finding.text.startswith("tiny.full.json: unusable (")


def test_settings_of_the_scheduler_are_refused(capsys):
    assert cli.main(["profile", "/no/such/folder", "--set", "scheduler.prefill_pace=4"]) == 2
    assert "'scheduler'; valid: cache, device" in capsys.readouterr().err


def test_the_bar_fills():
    assert progress_text(0.0, "linear") == "[" + "." * 24 + "]   0% linear"
    assert progress_text(0.5, "swap") == "[" + "#" * 12 + "." * 12 + "]  50% swap"


def test_rows_of_tables_do_not_depend_on_the_order_of_their_axes():
    table = {"kv_tokens": [10, 20], "ms": [[1, 2], [3, 4]], "requests": [1, 8]}
    assert [(row["requests"], row["kv_tokens"], row["ms"]) for row in table_rows({"host_attention": table})] == [
        (1, 10, 1),
        (1, 20, 2),
        (8, 10, 3),
        (8, 20, 4),
    ]
