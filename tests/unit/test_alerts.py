"""Alerts: what a condition may be, when it is told, the user's command; and the text file for Prometheus."""

import re
import time
from pathlib import Path

import pytest
import torch

from modeling_latentmoe.training import monitor, prometheus
from modeling_latentmoe.training.alerts import Alerts, check_alerts, parse_condition


def record(step: int, **figures: float) -> dict:
    return {"step": step, "loss": 1.0, "tokens_per_s": 100.0, **figures}


def watching(folder: Path, *conditions: str, command: str | None = None, records=()) -> tuple[Alerts, list[str]]:
    said: list[str] = []
    return Alerts(conditions, command, str(folder), True, said.append, records), said


def test_conditions() -> None:
    assert parse_condition(" load_imbalance > 4 ") == ("load_imbalance", True, 4.0)
    assert str(parse_condition("mfu<0.30")) == "mfu<0.3"
    for text in ("load_imbalance", "load_imbalance>=4", "loss>x", "loss>nan", "imbalance>4", "", "loss>1>2"):
        with pytest.raises(ValueError, match=rf"--alert {re.escape(repr(text))} must be .*load_imbalance, "):
            parse_condition(text)
    with pytest.raises(ValueError, match="--alert_command is empty"):
        check_alerts(["loss>1"], " ")


def test_told_when_it_begins(tmp_path: Path) -> None:
    """Not in every step of a lasting condition, and again when it comes back."""
    alerts, said = watching(tmp_path, "load_imbalance>4", "mfu<0.3")
    values = [(3.0, 0.4), (5.0, 0.4), (6.0, 0.2), (4.0, 0.2), (4.5, 0.2)]
    seen = [alerts.watch(record(i + 1, load_imbalance=load, mfu=mfu)) for i, (load, mfu) in enumerate(values)]
    found = {one["step"]: one["alerts"] for one in seen if "alerts" in one}
    assert found == {2: {"load_imbalance>4": 5.0}, 3: {"mfu<0.3": 0.2}, 5: {"load_imbalance>4": 4.5}}
    assert said[0] == "alert: load_imbalance>4 in step 2, it is 5" and len(said) == 3
    # a run that goes on after step 3 does not tell again what lasts
    resumed, said = watching(tmp_path, "load_imbalance>4", "mfu<0.3", records=seen[:3])
    assert "alerts" not in resumed.watch(record(4, load_imbalance=9.0, mfu=0.1)) and not said


def test_throughput_is_compared_with_the_median(tmp_path: Path) -> None:
    alerts, _ = watching(tmp_path, "throughput_drop>0.3")
    speeds = [10.0, 100.0, 100.0, 100.0, 120.0, 60.0, 59.0, 100.0, 50.0]
    seen = [alerts.watch({**record(i), "tokens_per_s": speed}) for i, speed in enumerate(speeds)]
    # the first steps have no median yet
    assert [one["throughput_drop"] for one in seen[:5]] == [0.0] * 5
    assert seen[5]["throughput_drop"] == pytest.approx(0.4) and seen[8]["throughput_drop"] == pytest.approx(0.5)
    assert [i for i, one in enumerate(seen) if "alerts" in one] == [5, 8]


def test_not_finite_always_is_one(tmp_path: Path) -> None:
    alerts, said = watching(tmp_path)
    assert alerts.watch({"step": 3, "nonfinite": 1})["alerts"] == {"nonfinite>0": 1}
    assert said == ["alert: nonfinite>0 in step 3, it is 1"]


def test_the_command_finds_the_alert_and_may_fail(tmp_path: Path) -> None:
    command = f'echo "$ALERT_CONDITION $ALERT_FIGURE $ALERT_VALUE $ALERT_LIMIT $ALERT_STEP" >> {tmp_path}/told; exit 3'
    alerts, said = watching(tmp_path, "dropped>2", command=command)
    with alerts:
        for step, dropped in enumerate([3, 3, 0, 5], start=1):
            alerts.watch(record(step, dropped=dropped))
            for _, process in alerts.commands:
                process.wait()
    assert sorted((tmp_path / "told").read_text().splitlines()) == [
        "dropped>2 dropped 3 2.0 1",
        "dropped>2 dropped 5 2.0 4",
    ]
    assert said.count("--alert_command for dropped>2 failed with exit code 3") == 2
    quiet = Alerts(["dropped>2"], command, str(tmp_path), False, said.append)
    with quiet:
        quiet.watch(record(1, dropped=3))
    assert len((tmp_path / "told").read_text().splitlines()) == 2


def test_a_command_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alerts, "PATIENCE_S", 0.05)
    alerts, said = watching(tmp_path, "dropped>2", command="sleep 2")
    began = time.monotonic()
    with alerts:
        for step, dropped in enumerate([3, 0, 3], start=1):
            alerts.watch(record(step, dropped=dropped))
    assert time.monotonic() - began < 1.5 and "still runs, it is left alone" in said[-1]
    assert "--alert_command for dropped>2 still runs, it is not started again" in said


def test_alerts_are_marked_in_the_picture(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    metrics = monitor.Metrics(tmp_path, active=False)
    parts = {f"{part}_s": 0.25 for part in (*monitor.PARTS, *monitor.TRAVEL)}
    figures = {
        "step_s": 1.0,
        **parts,
        "tokens_per_s_per_device": 5.0,
        "mfu": 0.4,
        "memory_gib": 2.0,
        "memory_gib_min": 1.0,
    }
    for step in range(1, 5):
        metrics.add(step=step, loss=5.0 - step, **figures, **({"alerts": {"loss>1": 2.0}} if step == 3 else {}))
    metrics.add(step=5, nonfinite=1, alerts={"nonfinite>0": 1})
    figure = monitor.plot(metrics, torch.ones(2, 4), pyplot)
    marks = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_marker() == "v"}
    assert marks == {"step 3: loss>1": [[3, 2]], "step 5: nonfinite>0": [[5, 1]]}
    titles = [axis.get_title() for axis in figure.axes]
    assert {"Time of a step", "Speed", "Memory", "Expert load"} <= set(titles)
    time_axis = figure.axes[titles.index("Time of a step")]
    assert [text.get_text() for text in time_axis.get_legend().get_texts()][:4] == list(monitor.PARTS)
    pyplot.close(figure)


def test_prometheus_text(tmp_path: Path) -> None:
    """Every family has its help and type once, before its samples; processes and experts are labels."""
    one = record(7, load_imbalance=2.5, mfu=0.25, throughput_drop=0.0)
    processes = [{"step_s": 1.0, "memory_gib": 3.0, "memory_limit_gib": 8.0}, {"step_s": 2.0, "memory_gib": 4.0}]
    text = prometheus.metrics_text(one, processes, torch.tensor([[5, 0], [3, 2]]))
    lines = text.splitlines()
    assert 'latentmoe_memory_gib{rank="1"} 4.0' in lines and "latentmoe_step 7" in lines
    assert 'latentmoe_expert_rows_total{layer="1",expert="0"} 3' in lines and "latentmoe_mfu 0.25" in lines
    assert "# TYPE latentmoe_expert_rows_total counter" in lines
    described: list[str] = []
    for line in lines:
        if line.startswith("# HELP "):
            described.append(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[2] == described[-1] and line.split()[3] in ("gauge", "counter")
        else:
            assert re.fullmatch(r'latentmoe_\w+(\{\w+="\d+"(,\w+="\d+")*\})? [-\d.e+]+', line), line
            assert re.split(r"[{ ]", line)[0] == described[-1]
    assert len(described) == len(set(described)) and text.endswith("\n")


def test_prometheus_file_is_replaced_now_and_then(tmp_path: Path) -> None:
    textfile = prometheus.Textfile(str(tmp_path / "run.prom"), print)
    load = torch.zeros(0)
    textfile.write(record(1), [], load)
    textfile.write(record(2), [], load)
    assert "latentmoe_step 1\n" in (tmp_path / "run.prom").read_text()
    textfile.write(record(3), [], load, last=True)
    assert "latentmoe_step 3\n" in (tmp_path / "run.prom").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["run.prom"]
    prometheus.Textfile(None, print).write(record(1), [], load, last=True)


def test_a_prometheus_file_that_cannot_be_written(tmp_path: Path) -> None:
    """At the start it is an error that names the switch, later it is said once and the run goes on."""
    for path in (str(tmp_path), str(tmp_path / "absent" / "run.prom"), ""):
        with pytest.raises(ValueError, match=f"--prometheus {re.escape(path)} cannot be written"):
            prometheus.Textfile(path, print)
    folder, said = tmp_path / "folder", []
    folder.mkdir()
    textfile = prometheus.Textfile(str(folder / "run.prom"), said.append)
    folder.rmdir()
    for step in (1, 2):
        textfile.write(record(step), [], torch.zeros(0), last=True)
    assert len(said) == 1 and "can no longer be written, the run goes on without it" in said[0]
