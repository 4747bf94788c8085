"""The cluster of 2018 on TensorFlow 2: a parameter server and ``workers=N`` workers, real processes on loopback.

Graphs and sessions of ``tf.compat.v1``; each worker builds its own graph, whose variables live on the parameter server.
Worker i takes the i-th ``ceil(batch_size / N)`` images of a batch, in order, and normalises by their statistics alone.
The chief, worker 0, is the process that is started; it starts the others, and ends them.

``mode=sync``: workers push gradients into ConditionalAccumulators on the server. The chief takes them out as soon as
``replicas_to_aggregate=K`` (default: all) have come for the current step, its own among them, updates, and sends the
number of the next step to every worker. What comes later for a past step is dropped, and that worker goes on with the
current step. Gradients are those of the mean loss over all images that took part; moving statistics are means weighted
by images; both travel the same way. These are the parts of SyncReplicasOptimizer, but with a queue of tokens for each
worker: from its single queue a fast worker may take the token of another, so that an update is made of two gradients of
one worker, and it leaves moving statistics to whoever writes last.

``mode=async``: a worker applies the gradient of its own part as soon as it has it, to weights that others may have
changed since it read them, and likewise moving statistics. A step of the chief is done when its own part is; the other
workers go through the same steps at their own pace. At the end of each epoch the chief waits for them, and thus the
images of all the workers are counted over a time in which all were done. It waits before the epoch's last step, for all
but that step, and after it: were it after alone, the time would fall into a step that, being the first of its size, is
counted as the others are. Loss and hits are those of the chief's part, hits scaled to the whole batch.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
import time

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # processes would take the memory of a GPU from each other
os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112 (that is its name)

import convert
import numpy as np
import protocol
import run_tensorflow
from run_tensorflow import tf

v1 = tf.compat.v1
_PS = "/job:ps/task:0"
_TASK, _CLUSTER = "CNNJAX_PS_TASK", "CNNJAX_PS_CLUSTER"  # what a child is told, by its environment
_GRACE_S = 20  # for the chief to notice by itself that another process is lost


class Settings:
    """What the options say, the same in every process."""

    def __init__(self, job):
        """Checks them."""
        options = job.options
        self.mode, self.workers = options.get("mode", "sync"), int(options.get("workers", 2))
        self.needed = int(options.get("replicas_to_aggregate", self.workers))
        if self.mode not in ("sync", "async"):
            raise ValueError(f"mode is {self.mode!r}; allowed: sync, async")
        if self.workers < 1 or not 1 <= self.needed <= self.workers:
            raise ValueError(
                f"replicas_to_aggregate is {self.needed} and workers is {self.workers}; needed: 1 to workers"
            )
        self.share = -(-job.batch_size // self.workers)
        threads = max(1, len(os.sched_getaffinity(0)) // self.workers)
        self.config = v1.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads)


class Graph:
    """The graph of one worker."""

    def __init__(self, job, settings, cluster, worker):
        """Builds it.

        Args:
            job: What to train.
            settings: Of the cluster.
            cluster: Addresses by job.
            worker: Number of the worker; 0 is the chief.
        """
        self._job, self._settings, self._worker = job, settings, worker
        own = convert.to_framework(job.network, job.weights, convert.TENSORFLOW)
        self.dtype = tf.as_dtype(job.dtype)
        self.graph = tf.Graph()
        setter = v1.train.replica_device_setter(worker_device=f"/job:worker/task:{worker}", cluster=cluster)
        with self.graph.as_default(), self.graph.device(setter):
            v1.set_random_seed(job.seed + worker)  # of dropout
            self.variables = {path: self._variable(path, value) for path, value in own.items()}
            slots = run_tensorflow.SLOTS[job.optimizer["name"]]
            self.slots = {
                path: [self._variable(f"{path}/{slot}", np.zeros_like(value)) for slot in slots]
                for path, value in own.items() if run_tensorflow.is_trained(path)
            }  # fmt: skip
            self.updates = self._variable("updates", np.zeros((), job.dtype))
            self.x = v1.placeholder(self.dtype, (None, *job.input_shape))
            self.y = v1.placeholder(tf.int32, (None,))
            self.images = v1.placeholder(self.dtype, ())  # 0 where a single image only fills up
            self.rate = v1.placeholder(self.dtype, ())
            self.number = v1.placeholder(tf.int64, ())
            with tf.device(_PS):  # read there, once a step
                read = {path: tf.identity(variable.read_value()) for path, variable in self.variables.items()}
                self._queues = {}
                for name in (*(f"tokens_{i}" for i in range(settings.workers)), "nearly", "done"):
                    self._queues[name] = v1.FIFOQueue(-1, [tf.int64], [()], shared_name=name)
            moved: dict = {}
            loss, hits = run_tensorflow.sums(job.network, read, self.x, self.y, moved)
            trained = {path: read[path] for path in self.slots}
            gradients = dict(zip(trained, tf.gradients(loss, list(trained.values()))))
            if settings.mode == "sync":
                self._build_sync(loss, hits, gradients, moved)
            else:
                self._build_async(loss, hits, gradients, moved)
            self.sent = [self._queues[f"tokens_{i}"].enqueue(self.number) for i in range(1, settings.workers)]
            tokens = self._queues[f"tokens_{worker}"]
            self.token, self.waiting = tokens.dequeue(), tokens.size()
            self.tell = {name: self._queues[name].enqueue(self.number) for name in ("nearly", "done")}
            self.hear = {
                name: self._queues[name].dequeue_many(settings.workers - 1) for name in ("nearly", "done")
            }  # fmt: skip
            self.logits = run_tensorflow.forward(job.network, read, self.x, False)
        self.graph.finalize()  # an error if a step adds to it

    @staticmethod
    def _variable(name, value):
        zeros = tf.zeros(value.shape, value.dtype)
        return v1.Variable(zeros, trainable=False, name=name, use_resource=True)

    def _changed(self, gradients, moved, t):
        """Operations that update from gradients and next moving statistics; on the server."""
        return [
            *(run_tensorflow.update(self._job.optimizer, self.variables[path], self.slots[path], g, self.rate, t)
              for path, g in gradients.items()),
            *(self.variables[path].assign(value).op for path, value in moved.items()),
        ]  # fmt: skip

    def _build_sync(self, loss, hits, gradients, moved):
        pushed = {path: g * tf.cast(self.images > 0, g.dtype) for path, g in gradients.items()}
        pushed.update({path: value * self.images for path, value in moved.items()})
        pushed["sums"] = tf.stack([loss * tf.cast(self.images > 0, loss.dtype), hits, self.images])
        with tf.device(_PS):
            accumulators = {
                name: v1.ConditionalAccumulator(value.dtype, value.shape, shared_name="pushed/" + name)
                for name, value in pushed.items()
            }
            total = v1.ConditionalAccumulator(self.dtype, (), shared_name="pushed/images", reduction_type="SUM")
            pushes = [accumulators[name].apply_grad(value, self.number) for name, value in pushed.items()]
            pushes.append(total.apply_grad(self.images, self.number))
            self.push = tf.group(*pushes)
            if self._worker:
                return
            with tf.control_dependencies(pushes):
                # Each is the mean over those whose value came in time. With fewer needed than there are, a late one may
                # be among those of one array and not of another: a mean is right for either number, a sum is not.
                images_taken = total.take_grad(self._settings.needed)
                taken = {name: one.take_grad(self._settings.needed) for name, one in accumulators.items()}
            images = taken["sums"][2]
            changed = self._changed(
                {path: taken[path] / images for path in gradients}, {path: taken[path] / images for path in moved},
                tf.cast(self.number + 1, self.dtype),
            )  # fmt: skip
            with tf.control_dependencies(changed):
                next_step = self.number + 1
                told = [self._queues[f"tokens_{i}"].enqueue(next_step) for i in range(1, self._settings.workers)]
            self.step = [taken["sums"], images_taken, tf.group(*changed, *told)]

    def _build_async(self, loss, hits, gradients, moved):
        with tf.device(_PS):
            t = self.updates.assign_add(tf.ones((), self.dtype), read_value=True)
            changed = self._changed({path: g / self.images for path, g in gradients.items()}, moved, t)
        self.step = [tf.stack([loss, hits, self.images]), self.images, tf.group(*changed)]

    def feeds(self, step, x, y, learning_rate):
        """This worker's part of a batch, for `Session.run`."""
        share = self._settings.share
        part = slice(self._worker * share, (self._worker + 1) * share)
        x, y = x[part], y[part]
        images = len(y)
        if not images:  # a worker without images pushes zeros, so that the number of pushes stays the same
            x, y = np.zeros((1, *self._job.input_shape), self._job.dtype), np.zeros(1, np.int32)
        return {self.x: x, self.y: y, self.images: images, self.rate: learning_rate, self.number: step}


def _session(graph, settings, server, worker):
    config = v1.ConfigProto()
    config.CopyFrom(settings.config)
    # Workers need not know each other; without this a session waits for all of them.
    config.device_filters.extend(["/job:ps", f"/job:worker/task:{worker}"])
    return v1.Session(server.target, graph=graph.graph, config=config)


class Trainer(protocol.Trainer):
    """The chief."""

    bn_scope = "local"

    def __init__(self, job):
        """Starts the others and initialises the variables."""
        super().__init__()
        settings = self._settings = Settings(job)
        self.versions = {"tensorflow": tf.__version__}
        self.mesh, self.strategy = f"data={settings.workers}", f"ps_{settings.mode}"
        self._job, self._number, self._took_part, self._images = job, 0, 0, 0
        self._children, self._lost, self._closed = {}, None, threading.Event()
        cluster = _free_addresses(settings.workers)
        try:
            for task in ("ps:0", *(f"worker:{i}" for i in range(1, settings.workers))):
                told = dict(os.environ)
                told.update({_TASK: task, _CLUSTER: json.dumps(cluster)})
                # Nothing is ever written to the pipe; its end tells the child that this process is gone.
                self._children[task] = subprocess.Popen([sys.executable, *sys.argv], env=told, stdin=subprocess.PIPE)
            threading.Thread(target=self._watch, daemon=True).start()
            spec = tf.train.ClusterSpec(cluster)
            server = tf.distribute.Server(spec, "worker", 0, config=settings.config)
            self._graph = Graph(job, settings, spec, 0)
            self._session = _session(self._graph, settings, server, 0)
            self._initialise(job)
        except BaseException:
            self.close()
            raise

    def _initialise(self, job):
        graph = self._graph
        own = convert.to_framework(job.network, job.weights, convert.TENSORFLOW)
        slots = [slot for some in graph.slots.values() for slot in some]
        self._run([variable.initializer for variable in (*slots, graph.updates)])
        feeds = {graph.variables[path].initializer.inputs[1]: value for path, value in own.items()}
        self._run([variable.initializer for variable in graph.variables.values()], feeds)
        if self._settings.mode == "sync":
            self._run(graph.sent, {graph.number: 0})

    @property
    def notes(self):  # type: ignore[override]
        """How many images took part, where gradients may be dropped."""
        if self._settings.needed == self._settings.workers:
            return []
        share = self._took_part / max(self._images, 1)
        return [
            f"updates of {self._settings.needed} of {self._settings.workers} workers: "
            f"{share:.1%} of the images took part; images_per_s counts all"
        ]

    # -- one step ----------------------------------------------------------------------------------------------------

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`."""
        del index
        step, graph, others = self._number, self._graph, self._settings.workers > 1
        self._number += 1
        feeds = graph.feeds(step, x, y, learning_rate)
        starts = [0, *self._job.epoch_ends]
        waits = self._settings.mode == "async" and others
        if waits and step in starts:
            self._run(graph.sent, {graph.number: starts[starts.index(step) + 1]})
        if waits and self._number in starts and step not in starts:
            self._run(graph.hear["nearly"])
        (loss, hits, images), total, _ = self._run(graph.step, feeds)
        if waits and self._number in starts:
            self._run(graph.hear["done"])
        self._images += len(y)
        self._took_part += round(float(total))
        return float(loss / images), round(float(hits / images) * len(y))

    def predict(self, x):
        """See `protocol.Trainer`."""
        return self._run(self._graph.logits, {self._graph.x: x})

    def weights(self):
        """See `protocol.Trainer`."""
        return convert.from_framework(self._job.network, self._run(self._graph.variables), convert.TENSORFLOW)

    # -- the other processes -----------------------------------------------------------------------------------------

    def _run(self, fetches, feeds=None):
        try:
            return self._session.run(fetches, feeds)
        except tf.errors.OpError:
            end = time.monotonic() + 2  # the cause may be seen here before `_watch` sees it
            while self._lost is None and time.monotonic() < end:
                time.sleep(0.05)
            if self._lost is None:
                raise
            # The session waits for ever for what the lost process was to answer, as soon as it is taken down.
            _kept.append(self._session)
            atexit.register(_end_at_once)
            raise RuntimeError(self._lost) from None

    def _watch(self):
        """Notices a process that ends before its time, and ends the run."""
        while not self._closed.wait(0.2):
            for task, child in self._children.items():
                code = child.poll()
                if code is not None and not self._closed.is_set():
                    job, number = task.split(":")
                    name = "the parameter server" if job == "ps" else f"worker {number}"
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    self._lost = f"{name} {how} before the training had ended"
                    # The chief may wait for this very process; without a server whatever it waits for fails.
                    self._end_children()
                    if not self._closed.wait(_GRACE_S):
                        sys.stderr.write(f"error: RuntimeError: {self._lost}\n")
                        _end_at_once()
                    return

    def _end_children(self):
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.wait()

    def close(self):
        """See `protocol.Trainer`."""
        self._closed.set()
        self._end_children()


_kept: list = []


def _end_at_once():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _free_addresses(workers):
    """Addresses of a server and the workers, on ports that are free now."""
    probes = [socket.socket() for _ in range(workers + 1)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        own, *others = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    finally:
        for probe in probes:
            probe.close()
    return {"ps": [own], "worker": others}


def follow(task):
    """What the processes after the first do: serve, or work until the chief ends them."""

    def end_with_the_chief():
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=end_with_the_chief, daemon=True).start()
    role, number = task.split(":")
    job = protocol.Job(sys.argv[1], dict(argument.split("=", 1) for argument in sys.argv[3:]))
    settings, cluster = Settings(job), tf.train.ClusterSpec(json.loads(os.environ[_CLUSTER]))
    server = tf.distribute.Server(cluster, role, int(number), config=settings.config)
    if role == "ps":
        server.join()
    graph = Graph(job, settings, cluster, int(number))
    session = _session(graph, settings, server, int(number))
    (_follow_sync if settings.mode == "sync" else _follow_async)(job, graph, session)


def _feeds(job, graph, step):
    x, y, _ = job.batch(step)
    return graph.feeds(step, x, y, float(job.learning_rates[step]))


def _follow_sync(job, graph, session):
    ready = {0: _feeds(job, graph, 0)}  # prepared while the chief computes
    while True:
        step = session.run(graph.token)
        for _ in range(session.run(graph.waiting)):  # the newest: what is past is dropped anyway
            step = session.run(graph.token)
        if step == job.steps:
            break
        session.run(graph.push, ready.get(step) or _feeds(job, graph, step))
        ready = {step + 1: _feeds(job, graph, step + 1)} if step + 1 < job.steps else {}
    _stay()


def _follow_async(job, graph, session):
    step = 0
    while step < job.steps:
        start, end = step, session.run(graph.token)
        for step in range(start, end):
            feeds = _feeds(job, graph, step)
            if feeds[graph.images]:
                session.run(graph.step, feeds)
            if step == end - 2:
                session.run(graph.tell["nearly"], feeds)
        session.run(graph.tell["done"], {graph.number: end})
        step = end
    _stay()


def _stay():
    """Until the chief has its results: it takes a process that ends for one that is lost."""
    threading.Event().wait()


if __name__ == "__main__":
    if _TASK in os.environ:
        follow(os.environ[_TASK])
    else:
        protocol.main("tensorflow_ps", Trainer)
