"""`experiments.equivalence`: what it compares, its verdict, its command. The layouts are for test_layouts_agree."""

import dataclasses

import jax
import numpy as np
import pytest

from cnnjax.partition import Layout
from experiments import equivalence
from experiments.equivalence import Case


@pytest.fixture(autouse=True)
def eight_devices():
    """Before the backend starts, a mesh of 9 would simply be given 9 fake devices."""
    assert jax.device_count() == 8


def outcome(**changes):
    state = {"params": {"a": np.array([1.0, 2.0])}, "opt_state": {"count": np.array(3), "m": np.array([1e-12])}}
    values = {
        "losses_T": np.array([2.0, 1.0]),
        "norms_T": np.array([1.0, 1.0]),
        "evaluation": np.array([3.0, 0.0, 5.0]),
        "predicted_N": np.array([0, 1, 0, 1, 2]),
    }
    state |= {"batch_stats": {}, "ema": None, "step": np.array(2)} | changes.pop("state", {})
    return equivalence.Outcome(**values | {"state": _State(**state), "compile_s": 0, "train_s": 0} | changes)


@dataclasses.dataclass
class _State:
    params: dict
    opt_state: dict
    batch_stats: dict
    ema: None
    step: np.ndarray


@pytest.mark.parametrize(
    ("changes", "column", "size"),
    [
        ({"losses_T": np.array([2.0, 1.01])}, "loss", 0.01),
        ({"losses_T": np.array([2.0, np.nan])}, "loss", np.nan),
        ({"norms_T": np.array([1.0, 1.5])}, "grad norm", 0.5),
        ({"evaluation": np.array([3.0, 0.0, 6.0])}, "evaluation", 0.2),
        ({"predicted_N": np.array([1, 0, 0, 1, 2])}, "evaluation", 0.4),
        ({"state": {"params": {"a": np.array([1.0, 2.2])}}}, "parameters", 0.1),
        ({"state": {"params": {"a": np.array([np.nan, 2.0])}}}, "parameters", np.nan),
        ({"state": {"opt_state": {"count": np.array(4), "m": np.array([1e-12])}}}, "optimiser", np.inf),
    ],
)
def test_a_difference_is_seen_in_its_column_alone(changes, column, size):
    values = equivalence.differences(outcome(**changes), outcome())
    np.testing.assert_allclose(values.pop(column), size, rtol=1e-9)
    assert set(values.values()) == {0.0}
    assert not equivalence.agrees(values | {column: size}, True)
    assert equivalence.agrees(values | {column: 0.0}, True)


def test_states_of_other_shapes_are_not_compared():
    with pytest.raises(ValueError, match=r"arrays of shapes \(2, 1\) and \(2,\)"):
        equivalence.differences(outcome(state={"params": {"a": np.ones((2, 1))}}), outcome())
    with pytest.raises(ValueError, match="different structure"):
        equivalence.differences(outcome(state={"params": {}}), outcome())


def test_layouts_without_the_means_to_run_are_refused():
    with pytest.raises(ValueError, match=r"--mesh data=9 needs 9 devices, but there are 8"):
        Case("data=9").layout()
    assert isinstance(Case("data=2").layout(), Layout)


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = ("--network", "cnn2d_1layer_fullconnected_1layer", "--data", "digits", "--steps", "3", "--batch-size", "20")


def test_layouts_are_read():
    text = "data=8; fsdp=4/shard_map;data=2,model=2/3 ; data=4/pmap/2"
    expected = [
        Case("data=8"),
        Case("fsdp=4", "shard_map"),
        Case("data=2,model=2", "jit", 3),
        Case("data=4", "pmap", 2),
    ]
    assert equivalence.parse_cases(text) == expected
    assert equivalence.parse_cases(";".join(map(str, expected))) == expected
    assert Case("data=2,model=2").devices == 4 and Case("data=-1").devices == 1
    assert Case("data=4", "pmap", 3).one_device == Case("data=1", "jit", 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layouts", ""], "--layouts is ''; allowed: MESH[/STRATEGY][/MICROBATCHES]"),
        (["--layouts", "data=4/fast"], "'data=4/fast' is not MESH[/STRATEGY][/MICROBATCHES]"),
        (["--layouts", "data=4/0"], "'data=4/0' is not"),
        (["--layouts", "data=4/jit/pmap"], "'data=4/jit/pmap' is not"),
        (["--layouts", "rows=4"], "--mesh rows=4: unknown axis 'rows'"),
        (["--layouts", "data=9"], "--mesh data=9 needs 9 devices, but there are 8"),
        (["--layouts", "data=2;model=2/pmap"], "--strategy pmap knows the axes data"),
        (["--steps", "0"], "--steps is 0; allowed: 1 or more"),
        (["--seed", "-1"], "--seed is -1; allowed: 0 to 4294967295"),
        (["--network", "vgg"], "--network: unknown network 'vgg'"),
        (["--data", "/nowhere"], "--data /nowhere: no such file or folder"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    assert equivalence.main([*SMALL, *flags]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and message in shown.err
    assert not shown.out


def test_the_table_and_the_verdict(capsys, monkeypatch):
    """A layout whose losses are tampered with: not at all, in the last step, and in the first."""
    train = equivalence.train
    kept = {}
    factor = np.ones(3)

    def tampered(problem, case):
        if case not in kept:
            kept[case] = train(problem, case)
        return dataclasses.replace(kept[case], losses_T=kept[case].losses_T * (factor if case.mesh == "data=2" else 1))

    monkeypatch.setattr(equivalence, "train", tampered)
    flags = [*SMALL, "--layouts", "data=2"]
    for changed, code, verdict in [([1, 1, 1], 0, "pass"), ([1, 1, 1.1], 0, "pass"), ([1.001, 1, 1], 1, "FAIL")]:
        factor[:] = changed
        assert equivalence.main(flags) == code
        *_, row, one_device, summary = capsys.readouterr().out.splitlines()
        assert row.startswith("data=2") and row.endswith(verdict)
        assert f"{1 - code} of 1 layouts agree" in summary
        assert f"{kept[Case('data=1')].losses_T[0]:.4f} at step 1" in one_device
    assert len(set(kept[Case("data=2")].losses_T)) == 3


def test_float64_is_judged_by_every_column():
    good = dict.fromkeys(equivalence.COLUMNS, 1e-10)
    assert equivalence.agrees(good, True)
    for column in equivalence.COLUMNS:
        assert not equivalence.agrees(good | {column: 1e-8}, True)
        assert equivalence.agrees(good | {column: 1e-8}, False)
    assert not equivalence.agrees(good | {"first loss": 2e-5}, False)
