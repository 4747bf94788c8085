"""PyTorch: eager, through torch.compile (``compile=1``), or DistributedDataParallel over gloo (``replicas=N``).

Images are channels-last in memory, which is what PyTorch is fastest with on CPUs and what cnnjax's images are already.
With replicas, this process is rank 0 and starts the others; every rank reads the same job and takes its own rows of
each batch, ``ceil(batch_size / N)`` of them in order, as the devices of cnnjax do.
"""

import ctypes
import datetime
import inspect
import os
import signal
import socket
import subprocess
import sys

import convert
import numpy as np
import protocol
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_TIMEOUT_S = 60  # after which a rank that does not answer is lost


class Conv(nn.Conv2d):
    """A convolution with any padding; nn.Conv2d alone pads both sides alike."""

    def __init__(self, layer):
        """Takes a layer of the job."""
        (top, bottom), (left, right) = layer["pads"]
        self.uneven = (left, right, top, bottom) if (top, left) != (bottom, right) else None
        super().__init__(
            layer["input_shape"][2], layer["features"], layer["kernel"], layer["strides"],
            0 if self.uneven else (top, left), bias=layer["use_bias"],
        )  # fmt: skip

    def forward(self, x):
        """[B, C, H, W] to [B, C', H', W']."""
        return super().forward(F.pad(x, self.uneven) if self.uneven else x)


class MaxPool(nn.MaxPool2d):
    """Max pooling with any padding, which never wins."""

    def __init__(self, layer):
        """Takes a layer of the job."""
        super().__init__(layer["window"], layer["strides"])
        (top, bottom), (left, right) = layer["pads"]
        self.pads = (left, right, top, bottom)

    def forward(self, x):
        """[B, C, H, W] to [B, C, H', W']."""
        return super().forward(F.pad(x, self.pads, value=-torch.inf) if any(self.pads) else x)


class BatchNorm(nn.Module):
    """Batch norm whose running variance follows the biased variance.

    PyTorch normalises by the biased variance, but moves the running one by the unbiased; and its momentum is the share
    of the new value.
    """

    def __init__(self, layer):
        """Takes a layer of the job."""
        super().__init__()
        channels = layer["input_shape"][-1]
        for name, used, value in (("weight", layer["use_scale"], 1.0), ("bias", layer["use_bias"], 0.0)):
            tensor = torch.full((channels,), value)
            if used:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.momentum, self.epsilon = layer["momentum"], layer["epsilon"]

    def forward(self, x):
        """[B, C] or [B, C, H, W], normalised."""
        moved = self.running_var.clone()  # the backward pass keeps the array that is given
        # Not F.batch_norm, which refuses a single value a channel.
        y = torch.batch_norm(
            x, self.weight, self.bias, self.running_mean, moved, self.training, 1 - self.momentum, self.epsilon, False
        )
        if self.training:
            with torch.no_grad():
                count = x.numel() // x.shape[1]
                if count > 1:
                    biased = convert.biased_variance(moved, self.running_var, self.momentum, count)
                else:  # the unbiased variance of one value is not a number, the biased one is 0
                    biased = self.momentum * self.running_var
                self.running_var.copy_(biased)
        return y


class Residual(nn.Module):
    """body(x) + shortcut(x)."""

    def __init__(self, layer):
        """Takes a layer of the job."""
        super().__init__()
        self.body, self.shortcut = Network(layer["body"]), Network(layer["shortcut"])

    def forward(self, x):
        """[B, C, H, W] to [B, C', H', W']."""
        return self.body(x) + self.shortcut(x)


class Network(nn.Sequential):
    """The layers of a job, one after another; ``named`` has those with weights by their path."""

    named: dict

    def __init__(self, layers):
        """Takes the layers of the job."""
        self_named = {}
        modules = []
        for layer in layers:
            module = _module(layer)
            modules.append(module)
            if isinstance(module, Residual):
                self_named.update(module.body.named)
                self_named.update(module.shortcut.named)
            self_named[layer["name"]] = module
        super().__init__(*modules)
        self.named = self_named


def _module(layer):
    kind = layer["kind"]
    if kind == "Conv":
        return Conv(layer)
    if kind == "Dense":
        return nn.Linear(layer["input_shape"][0], layer["features"], bias=layer["use_bias"])
    if kind == "BatchNorm":
        return BatchNorm(layer)
    if kind == "MaxPool":
        return MaxPool(layer)
    if kind == "AvgPool":
        return nn.AvgPool2d(layer["window"], layer["strides"])
    if kind == "Relu":
        return nn.ReLU()
    if kind == "Dropout":
        return nn.Dropout(layer["rate"])
    if kind == "Flatten":
        return nn.Flatten()
    if kind == "Residual":
        return Residual(layer)
    raise ValueError(f"{layer['name']}: PyTorch's runner knows no layer {kind}")


# How cnnjax's arrays are called in a module.
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


class Trainer(protocol.Trainer):
    """One process, or rank ``rank`` of several."""

    def __init__(self, job, rank=0):
        """Builds the model from the job's weights."""
        options = job.options
        self.replicas, self.rank = int(options.get("replicas", 1)), rank
        compiled = options.get("compile") == "1"
        self.backend = "inductor" if compiled else "eager"
        self.versions = {"torch": torch.__version__}
        self._children = []
        torch.manual_seed(job.seed + rank)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.replicas))
        torch.set_default_dtype(getattr(torch, job.dtype))
        if self.replicas > 1:
            self.mesh, self.strategy, self.bn_scope = f"data={self.replicas}", "ddp", "local"
            if options.get("bn_scope", "local") != "local":
                raise ValueError("bn_scope=global needs SyncBatchNorm, which PyTorch has for GPUs only")
            self._join(rank)
        self._network, self._share = job.network, -(-job.batch_size // self.replicas)
        model = Network(job.network)
        self._named = model.named
        self._load(job.weights)
        self._model = model.to(memory_format=torch.channels_last)
        rule = job.optimizer
        if rule["name"] == "adam":
            betas = (rule["b1"], rule["b2"])
            self._optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=betas, eps=rule["eps"])
        else:
            momentum = 0.0 if rule["name"] == "sgd" else rule["momentum"]
            nesterov = rule["name"] == "nesterov" and momentum > 0
            self._optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum, nesterov=nesterov)
        run = _distributed(model) if self.replicas > 1 else model
        self._run = torch.compile(run) if compiled else run
        self._statistics = [b for m in model.modules() if isinstance(m, BatchNorm)
                            for b in (m.running_mean, m.running_var)]  # fmt: skip

    # -- one step ----------------------------------------------------------------------------------------------------

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`."""
        del index
        count = len(y)
        part = slice(self.rank * self._share, (self.rank + 1) * self._share) if self.replicas > 1 else slice(None)
        x, y = x[part], y[part]
        mine = len(y)
        if not mine:  # a replica without samples still takes part in the exchange of gradients
            x, y = (
                np.zeros((1, *self._network[0]["input_shape"]), np.dtype(str(torch.get_default_dtype())[6:])),
                np.zeros(1),
            )
        self._model.train()
        labels = torch.from_numpy(np.asarray(y, np.int64))
        logits = self._run(torch.from_numpy(x).permute(0, 3, 1, 2))
        loss = F.cross_entropy(logits, labels, reduction="sum") * (1.0 if mine else 0.0)
        hits = (logits.detach().argmax(1) == labels).sum() * bool(mine)
        self._optimizer.zero_grad(set_to_none=True)
        # DDP takes the mean over the replicas of what they have; the gradient of the mean over all samples is wanted.
        (loss * (self.replicas / count)).backward()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        if self.replicas == 1:
            return loss.item() / count, hits.item()
        return self._over_replicas(loss.detach(), hits, mine, count)

    def _over_replicas(self, loss, hits, mine, count):
        """Loss and hits of the whole batch; moving statistics become their mean, weighted by samples."""
        sums = torch.stack([loss, hits.to(loss.dtype)])
        statistics = torch.cat([sums, *(b * (mine / count) for b in self._statistics)])
        torch.distributed.all_reduce(statistics)
        sizes = [b.numel() for b in self._statistics]
        for buffer, value in zip(self._statistics, statistics[2:].split(sizes)):
            buffer.copy_(value)
        return statistics[0].item() / count, round(statistics[1].item())

    def predict(self, x):
        """See `protocol.Trainer`."""
        self._model.eval()
        with torch.no_grad():
            return self._model(torch.from_numpy(x).permute(0, 3, 1, 2)).numpy()

    # -- weights -----------------------------------------------------------------------------------------------------

    def _tensors(self, names):
        for path in names:
            name, leaf = path.rsplit("/", 1)
            yield path, getattr(self._named[name], _LEAVES[leaf])

    def _load(self, weights):
        own = convert.to_framework(self._network, weights, convert.TORCH)
        self._paths = list(own)
        with torch.no_grad():
            for path, tensor in self._tensors(own):
                tensor.copy_(torch.from_numpy(own[path]))

    def weights(self):
        """See `protocol.Trainer`."""
        own = {path: tensor.detach().numpy().copy(order="C") for path, tensor in self._tensors(self._paths)}
        return convert.from_framework(self._network, own, convert.TORCH)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _join(self, rank):
        """Meets the other ranks; rank 0 starts them first."""
        port = os.environ.get("CNNJAX_DDP_PORT")
        if rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            for other in range(1, self.replicas):
                known = dict(os.environ, CNNJAX_DDP_PORT=port, CNNJAX_DDP_RANK=str(other))
                self._children.append(subprocess.Popen([sys.executable, *sys.argv], env=known))
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=self.replicas,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
        )  # fmt: skip

    def close(self):
        """Waits for the other ranks, and ends those that do not end."""
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _distributed(model):
    """The model with its gradients averaged over the ranks, and its statistics left alone."""
    # By default every step begins with the statistics of rank 0. The switch has had two names.
    names = inspect.signature(DistributedDataParallel).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    return DistributedDataParallel(model, **{switch: False})


def follow(rank):
    """What the ranks after the first do: the same steps, and nothing else."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the first
    job = protocol.Job(sys.argv[1], dict(argument.split("=", 1) for argument in sys.argv[3:]))
    trainer = Trainer(job, rank)
    for step in range(job.steps):
        x, y, index = job.batch(step)
        trainer.train(x, y, index, float(job.learning_rates[step]))


if __name__ == "__main__":
    if "CNNJAX_DDP_RANK" in os.environ:
        follow(int(os.environ["CNNJAX_DDP_RANK"]))
    else:
        protocol.main("torch", Trainer)
