"""The rules that heed the validation loss, against Keras's as its documentation and code state them."""

import json
import os

import hypothesis
import hypothesis.strategies as st
import pytest

from cnnjax.patience import EarlyStopping, Plateau, Rules

# Few values, so that equal ones and differences of exactly min_delta occur.
LOSSES = st.lists(st.sampled_from([0.5, 0.4999, 0.49985, 0.4, 0.3, 0.29995, 0.2, 1.0, float("nan")]), max_size=30)


def plateau_by_hand(losses, factor, patience, min_delta=1e-4):
    best, waited, rate, rates = float("inf"), 0, 1.0, []
    for loss in losses:
        if loss < best - min_delta:
            best, waited = loss, 0
        else:
            waited += 1
            if waited >= patience:
                rate, waited = rate * factor, 0
        rates.append(rate)
    return rates


@hypothesis.settings(max_examples=8)  # each compiles nothing, but dispatches a hundred small operations
@hypothesis.given(LOSSES, st.integers(1, 4), st.data())
def test_the_rate_falls_at_the_same_evaluations(losses, patience, data):
    """Also where the rule is saved as JSON and goes on elsewhere."""
    rule, rates, moved = Plateau(0.5, patience), [], data.draw(st.integers(0, 30))
    for number, loss in enumerate(losses):
        if number == moved:
            rule = Plateau(0.5, patience, numbers=json.loads(json.dumps(rule.numbers)))
        lowered = rule.see(loss)
        assert lowered == (rule.rate_factor < (rates[-1] if rates else 1.0))
        rates.append(rule.rate_factor)
    assert rates == plateau_by_hand(losses, 0.5, patience)


@hypothesis.given(LOSSES, st.integers(1, 4))
def test_training_ends_and_the_first_lowest_loss_is_kept(losses, patience):
    rule, waited, best = EarlyStopping(patience), 0, (float("inf"), None)
    for step, loss in enumerate(losses):
        rule = EarlyStopping(patience, json.loads(json.dumps(rule.numbers)))
        waited = 0 if loss < best[0] else waited + 1
        best = min(best, (loss, step)) if loss < best[0] else best
        assert rule.see(loss, step) == (best[1] == step)
        assert rule.over == (waited >= patience)
        if rule.over:
            break
    assert (rule.lowest, rule.best_step) == best


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own
def test_keras_lowers_its_rate_at_the_same_evaluations():
    os.environ["KERAS_BACKEND"] = "jax"
    try:
        import keras
    except ImportError:
        if os.environ.get("CNNJAX_STRICT"):
            raise
        pytest.skip("Keras is not installed")
    for losses in ([1.0, 0.9, 0.9, 0.89995, 0.91, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8], [3.0, 2, 2, 2, 2, 1, 1, 1, 1, 1]):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(optimizer=keras.optimizers.SGD(1.0))
        callback = keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=3, min_lr=0.0)
        stopper = keras.callbacks.EarlyStopping(patience=5)
        for one in (callback, stopper):
            one.set_model(model)
            one.on_train_begin()
        rule, stopping = Plateau(0.5, 3), EarlyStopping(5)
        for epoch, loss in enumerate(losses):
            for one in (callback, stopper):
                one.on_epoch_end(epoch, {"val_loss": loss})
            rule.see(loss)
            stopping.see(loss, epoch)
            assert float(model.optimizer.learning_rate) == pytest.approx(rule.rate_factor)
            assert (stopper.stopped_epoch > 0) == stopping.over
            if stopping.over:
                break


def test_one_evaluation_seen_twice_counts_once():
    rules = Rules(2, 0.5, 3)
    said = [rules.see(loss, step) for step, loss in enumerate((1.0, 2.0, 2.0), 1)]
    assert said[:2] == [[], []] and "0.5 times" in said[2][0] and not rules.over
    again = Rules(2, 0.5, 3, json.loads(json.dumps(rules.numbers)))  # a run resumed where it had ended
    assert again.see(2.0, 3) == [] and not again.over and again.best_step == 1
    assert "training ends" in again.see(2.0, 4)[-1] and again.over


def test_a_rule_added_later_starts_anew():
    before = Rules(None, 0.5, 3)
    before.see(1.0, 1)
    after = Rules(2, 0.5, 3, before.numbers)
    assert after.plateau is not None and after.plateau.rate_factor == 1 and after.best_step == 1
