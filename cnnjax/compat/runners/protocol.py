"""What every runner shares: reading a job, the loop that trains and times, and the files of the result.

A runner is a script, ``python run_x.py JOB OUT [OPTION=VALUE...]``, that calls `main` with a function from the job to a
trainer. The loop, the batches, the clock and the evaluation are here, the same for all frameworks; a trainer knows only
how its framework does one step. Runs on Python 3.7 with NumPy alone, since old frameworks need both.

A job directory holds

- ``job.json``: ``network`` (list of layers, see `cnnjax.compat.jobs.describe`), ``name``, ``dataset``, ``classes``,
  ``input_shape``, ``dtype``, ``seed``, ``optimizer``, ``epoch_ends`` (steps done at the end of each epoch),
  ``evaluate`` (whether to predict the test images after each epoch);
- ``initial_weights.npz``: arrays ``conv_1/kernel`` [H, W, in, out], ``dense_1/kernel`` [in, out], ``.../bias``,
  ``batch_norm_1/scale``, ``bias``, ``mean``, ``var`` [C], in the layout of cnnjax;
- ``images.npy`` uint8 or float [N, H, W, C], ``labels.npy`` int32 [N]; ``test_images.npy``, ``test_labels.npy``;
- ``scaling.npz``: ``factor`` and ``offset`` [C]; the network takes ``images * factor + offset``;
- ``order.npy`` int32 [T, B]: which images each step takes; -1 fills up a batch that is smaller;
- ``learning_rates.npy`` [T].

A result directory gets ``metrics.csv``, ``steps.csv``, ``predictions.csv``, ``first_weights.npz`` (after the first
step), ``final_weights.npz``, ``logits.npz`` (of the first test images) and ``environment.json``, the last one last: a
directory without it is a run that did not end.
"""

import csv
import json
import os
import platform
import sys
import time
import traceback

import numpy as np

COLUMNS = (
    "network", "dataset", "framework", "backend", "mesh", "strategy", "bn_scope", "dtype", "seed",
    "epoch", "step", "loss", "accuracy", "val_loss", "val_accuracy", "learning_rate",
    "compile_s", "train_s", "eval_s", "images_per_s",
)  # fmt: skip
EVAL_BATCH = 250
LOGITS = 100  # test images whose logits are kept


class Job:
    """A job directory in memory; attributes are the keys of ``job.json`` and the arrays, by file name.

    Attributes:
        weights: Initial weights, dict of arrays by path.
        options: What the command line adds, dict of strings.
    """

    def __init__(self, path, options=None):
        """Reads the directory; large arrays stay on disk until they are used."""
        with open(os.path.join(path, "job.json")) as file:
            values = json.load(file)
        self.name, self.dataset, self.network = values["name"], values["dataset"], values["network"]
        self.classes, self.input_shape = values["classes"], tuple(values["input_shape"])
        self.dtype, self.seed, self.optimizer = values["dtype"], values["seed"], values["optimizer"]
        self.epoch_ends, self.evaluate = values["epoch_ends"], values["evaluate"]
        self.options = options or {}
        self.path = path

        def load(name):
            return np.load(os.path.join(path, name + ".npy"), mmap_mode="r")

        with np.load(os.path.join(path, "initial_weights.npz")) as file:
            self.weights = {key: file[key].astype(self.dtype) for key in file.files}
        with np.load(os.path.join(path, "scaling.npz")) as file:
            self._factor, self._offset = file["factor"], file["offset"]
        self.images, self.labels = load("images"), load("labels")
        self.test_images, self.test_labels = load("test_images"), load("test_labels")
        self.order, self.learning_rates = load("order"), load("learning_rates")
        self.steps, self.batch_size = self.order.shape

    def scaled(self, images):
        """Pixels as the network takes them, in the type of the job."""
        # In float64 and then rounded: the same bits for every framework and NumPy.
        return np.ascontiguousarray(images * self._factor + self._offset, self.dtype)

    def batch(self, step):
        """Images [b, H, W, C], labels int32 [b], and the images' numbers int32 [b], of a step counted from 0."""
        index = np.asarray(self.order[step])
        index = index[index >= 0]
        return self.scaled(self.images[index]), np.asarray(self.labels[index], np.int32), index

    def layers(self, kind=None, layers=None):
        """Every layer, those inside a residual block included; only those of a kind if one is given."""
        for layer in self.network if layers is None else layers:
            if kind is None or layer["kind"] == kind:
                yield layer
            if layer["kind"] == "Residual":
                for part in ("body", "shortcut"):
                    yield from self.layers(kind, layer[part])


class Trainer:
    """What a runner provides.

    Attributes:
        backend: What computes, such as ``cpu`` or ``tensorflow``.
        mesh: As ``--mesh``, such as ``data=2`` for two replicas.
        strategy: How replicas work together, such as ``ddp``; what the framework calls it.
        bn_scope: ``global`` or ``local``.
        versions: Of the framework and what it stands on, dict of strings.
        notes: Lines for the person who compares, such as a setting that was overruled.
    """

    backend, mesh, strategy, bn_scope = "cpu", "data=1", "none", "global"
    notes: tuple = ()

    def __init__(self):
        self.versions = {}

    def train(self, x, y, index, learning_rate):
        """One update.

        Args:
            x: Scaled images [b, H, W, C].
            y: Labels int32 [b].
            index: Numbers of the images, int32 [b].
            learning_rate: Of this step, a float.

        Returns:
            Mean loss over the batch before the update, and how many of it were right; once the new weights are there.
        """
        raise NotImplementedError

    def predict(self, x):
        """Logits [b, classes] as a NumPy array, of scaled images, with the moving statistics and without dropout."""
        raise NotImplementedError

    def weights(self):
        """Weights and moving statistics now, as in ``initial_weights.npz``."""
        raise NotImplementedError

    def finish(self, out):
        """Writes what else there is to give into the result directory, after the last step; may add to ``notes``."""

    def close(self):
        """Ends whatever still runs."""


def main(framework, make):
    """Runs the job that the command line names; exits 0, or 1 with the error as the last line of standard error.

    Args:
        framework: Name for the results.
        make: Function from a `Job` to a `Trainer`.
    """
    path, out = sys.argv[1:3]
    options = dict(argument.split("=", 1) for argument in sys.argv[3:])
    framework = options.pop("framework", framework)
    try:
        job = Job(path, options)
        start = time.perf_counter()
        trainer = make(job)
        try:
            run(job, trainer, out, framework, time.perf_counter() - start)
        finally:
            trainer.close()
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(f"error: {text}\n")
        sys.exit(1)


def run(job, trainer, out, framework, build_s=0.0):
    """Trains, times and writes the result directory.

    The clock of a step runs from a batch in host memory to the updated weights. The first step of each batch size also
    compiles; what it takes beyond the median of the others counts as ``compile_s``, with the time to build the model.
    """
    losses, hits, sizes, seconds, evaluations = [], [], [], [], []
    logits = None
    for start, end in _epochs(job):
        for step in range(start, end):
            x, y, index = job.batch(step)
            began = time.perf_counter()
            loss, right = trainer.train(x, y, index, float(job.learning_rates[step]))
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss))
            hits.append(int(right))
            sizes.append(len(y))
            if not np.isfinite(losses[-1]):
                raise FloatingPointError(f"the loss is {losses[-1]} at step {step + 1}")
            if step == 0:
                np.savez(os.path.join(out, "first_weights.npz"), **trainer.weights())
        began = time.perf_counter()
        val_loss = val_accuracy = ""
        if job.evaluate:
            logits = _predict(job, trainer)
            val_loss, val_accuracy = _evaluation(logits, job.test_labels)
        evaluations.append((val_loss, val_accuracy, round(time.perf_counter() - began, 6)))

    clean = without_compilation(seconds, sizes)
    notes = list(trainer.notes)
    if len(set(sizes)) == len(sizes):
        notes.append("every step compiled, so that images/s are not its speed: give it more images")
    rows = []
    for epoch, ((start, end), (val_loss, val_accuracy, eval_s)) in enumerate(zip(_epochs(job), evaluations)):
        part = slice(start, end)
        count, train_s = float(sum(sizes[part])), sum(clean[part])
        compile_s = sum(seconds[part]) - train_s + (0.0 if epoch else build_s)
        rows.append({
            "network": job.name, "dataset": job.dataset, "framework": framework, "backend": trainer.backend,
            "mesh": trainer.mesh, "strategy": trainer.strategy, "bn_scope": trainer.bn_scope, "dtype": job.dtype,
            "seed": job.seed, "epoch": epoch + 1, "step": end,
            "loss": np.dot(losses[part], sizes[part]) / count, "accuracy": sum(hits[part]) / count,
            "val_loss": val_loss, "val_accuracy": val_accuracy, "learning_rate": float(job.learning_rates[end - 1]),
            "compile_s": round(compile_s, 6), "train_s": round(train_s, 6), "eval_s": eval_s,
            "images_per_s": round(count / train_s, 3),
        })  # fmt: skip

    with open(os.path.join(out, "metrics.csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    with open(os.path.join(out, "steps.csv"), "w") as file:
        file.write("step,loss,ms\n")
        for step, (loss, took) in enumerate(zip(losses, seconds), start=1):
            file.write(f"{step},{loss!r},{1000 * took:.4f}\n")
    if logits is not None:
        with open(os.path.join(out, "predictions.csv"), "w") as file:
            file.write("ImageId,Label\n")
            for number, label in enumerate(logits.argmax(1), start=1):
                file.write(f"{number},{label}\n")
        np.savez(os.path.join(out, "logits.npz"), logits=logits[:LOGITS])
    np.savez(os.path.join(out, "final_weights.npz"), **trainer.weights())
    trainer.finish(out)
    environment = {
        "framework": framework, "backend": trainer.backend, "python": platform.python_version(),
        "versions": dict(trainer.versions, numpy=np.__version__), "notes": notes,
        "options": job.options, "mesh": trainer.mesh, "strategy": trainer.strategy, "bn_scope": trainer.bn_scope,
        "cpu_count": os.cpu_count(), "platform": platform.platform(), "build_s": round(build_s, 6),
    }  # fmt: skip
    new = os.path.join(out, "environment.json.new")
    with open(new, "w") as file:
        json.dump(environment, file, indent=2)
    os.replace(new, os.path.join(out, "environment.json"))


def _epochs(job):
    return list(zip([0, *job.epoch_ends], job.epoch_ends))


def without_compilation(seconds, sizes):
    """Seconds of every step; those that compile, the first of each size, cut down to the median of the others."""
    clean = list(seconds)
    first = [sizes.index(size) for size in sorted(set(sizes))]
    others = [i for i in range(len(sizes)) if i not in first]
    for i in first:
        alike = [seconds[k] for k in others if sizes[k] == sizes[i]]
        if alike:
            usual = float(np.median(alike))
        elif others:  # a last, smaller batch that comes once
            usual = float(np.median([seconds[k] / sizes[k] for k in others])) * sizes[i]
        else:
            usual = seconds[i]
        clean[i] = min(seconds[i], usual)
    return clean


def _predict(job, trainer):
    logits = []
    for start in range(0, len(job.test_images), EVAL_BATCH):
        x = job.scaled(job.test_images[start : start + EVAL_BATCH])
        size = len(x)
        if size < EVAL_BATCH <= len(job.test_images):  # no framework should compile again for the tail
            x = np.concatenate([x, np.zeros((EVAL_BATCH - size, *x.shape[1:]), x.dtype)])
        logits.append(np.asarray(trainer.predict(x), np.float64)[:size])
    return np.concatenate(logits)


def _evaluation(logits, labels):
    """Mean cross-entropy and accuracy."""
    largest = logits.max(1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(logits - largest).sum(1))
    losses = log_sums - logits[np.arange(len(labels)), labels]
    return float(losses.mean()), float((logits.argmax(1) == labels).mean())
