"""The simulated clock against theory, and the command."""

import csv
import itertools
import json

import numpy as np
import pytest

from experiments import stragglers
from experiments.stragglers import Options, aggregate_clock, asynchronous_seconds, latencies, stale_clock

RNG = np.random.default_rng(0)


def harmonic(first, last):
    return sum(1 / i for i in range(first, last + 1))


@pytest.mark.parametrize(("replicas", "kept"), [(1, 1), (4, 4), (16, 16), (16, 12), (64, 1), (256, 250)])
def test_exponential_latencies_give_the_known_order_statistics(replicas, kept):
    """The k-th fastest of n takes 1/n + 1/(n-1) + ... + 1/(n-k+1) on average: the slowest, the harmonic number."""
    steps = 20_000
    clock_T = aggregate_clock(RNG.exponential(size=(steps, replicas)), kept)
    variance = sum(1 / i**2 for i in range(replicas - kept + 1, replicas + 1))
    error = clock_T[-1] / steps - harmonic(replicas - kept + 1, replicas)
    assert abs(error) < 5 * np.sqrt(variance / steps)


def test_latencies_have_the_stated_median_spread_and_slow_events():
    rng = np.random.default_rng(1)
    usual = latencies(Options(median=0.5, sigma=0.2, slow_probability=0.0), rng, 1000, 100)
    np.testing.assert_allclose(np.median(usual), 0.5, rtol=5e-3)
    np.testing.assert_allclose(np.log(usual).std(), 0.2, rtol=0.02)
    even = latencies(Options(median=0.5, sigma=0.0, slow_probability=0.1, slow_factor=4.0), rng, 1000, 100)
    assert set(np.unique(even)) == {0.5, 2.0}
    np.testing.assert_allclose((even == 2).mean(), 0.1, atol=0.005)


def stale_by_events(seconds, late):
    """Replica by replica in plain Python: when it is free, it waits for the update that it needs."""
    steps, replicas = seconds.shape
    free, updates = [0.0] * replicas, []
    for t in range(steps):
        for r in range(replicas):
            needed = t - 1 - late  # the newest update that the parameters of step t must have
            free[r] = max(free[r], updates[needed] if needed >= 0 else 0.0) + seconds[t, r]
        updates.append(max(free))
    return updates


@pytest.mark.parametrize("late", [0, 1, 3, 50])
def test_a_stale_clock(late):
    seconds = RNG.exponential(size=(30, 5))
    clock = stale_clock(seconds, late)
    np.testing.assert_allclose(clock, stale_by_events(seconds, late))
    if late == 0:  # then every step waits for the slowest
        np.testing.assert_allclose(clock, aggregate_clock(seconds, 5))
    if late >= 30:  # then none waits before its last gradient
        np.testing.assert_allclose(clock[-1], seconds.sum(0).max())
    assert (clock <= stale_clock(seconds, 0) + 1e-12).all()


def test_without_waiting_the_rates_of_the_replicas_add_up():
    seconds = np.array([[1.0, 4.0], [1.0, 4.0]])  # 1 and 1/4 gradients a second: 2 take 1.6 seconds
    np.testing.assert_allclose(asynchronous_seconds(seconds), 1.6)


def test_not_waiting_helps_more_the_more_replicas_there_are():
    rows = stragglers.step_times(Options(trials=300))
    assert [row["replicas"] for row in rows] == [1, 4, 16, 64, 256, 1024, 4096]
    assert [row["kept"] for row in rows] == [1, 4, 15, 60, 240, 960, 3840]
    for row in rows:
        assert row["asynchronous_s"] <= row["stale_s"] + 1e-9 and row["stale_s"] <= row["synchronous_s"] + 1e-9
        assert row["aggregate_s"] <= row["synchronous_s"] + 1e-9
    ratios = [row["synchronous_s"] / row["aggregate_s"] for row in rows]
    assert all(b > a - 1e-9 for a, b in itertools.pairwise(ratios)) and abs(ratios[0] - 1) < 1e-9 and ratios[-1] > 5


@pytest.mark.slow
def test_the_command_writes_tables_and_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    flags = ["--trials", "20", "--train-steps", "12", "--aggregate", "3/4", "--stale", "2", "--run-dir", str(folder)]
    assert stragglers.main(flags) == 0
    shown = capsys.readouterr().out
    with (folder / "training.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["update"], row["step"]) for row in rows] == [
        (update, step) for update in ("synchronous", "aggregate 3/4", "stale 2") for step in ("10", "12")
    ]
    losses = {row["update"]: float(row["test_loss"]) for row in rows}
    assert len(set(losses.values())) == 3 and max(losses.values()) < np.log(10)
    seconds = {row["update"]: float(row["seconds"]) for row in rows}
    assert seconds["synchronous"] > max(seconds["aggregate 3/4"], seconds["stale 2"])
    with (folder / "step_times.csv").open(newline="") as file:
        times = list(csv.DictReader(file))
    assert len(times) == 7 and f"{float(times[-1]['synchronous_s']):.3f}" in shown
    assert json.loads((folder / "config.json").read_text())["aggregate"] == "3/4"
    assert (folder / "stragglers.png").read_bytes().startswith(b"\x89PNG")
    assert stragglers.main(flags) == 2
    assert capsys.readouterr().err.startswith(f"error: --run-dir {folder} ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--median", "0"], "--median is 0.0; allowed: above 0"),
        (["--slow-probability", "1.5"], "--slow-probability is 1.5; allowed: 0 to 1"),
        (["--slow-factor", "0.5"], "--slow-factor is 0.5; allowed: 1 or more"),
        (["--trials", "1"], "--trials is 1; allowed: 2 or more"),
        (["--aggregate", "5/4"], "--aggregate is '5/4'; allowed: K/N"),
        (["--stale", "-1"], "--stale is -1; allowed: 0 or more"),
        (["--batch-size", "9", "--aggregate", "7/8"], "--aggregate is 7/8, but --batch-size 9 gives only 5 shares"),
        (["--sigma", "wide"], "--sigma is 'wide'; allowed: a number"),
        (["--speed", "3"], "Unrecognized options: --speed"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert stragglers.main(flags) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1 and message in shown
