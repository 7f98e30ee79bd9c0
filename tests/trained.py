"""Trainers in the processes of one group: ``python trained.py PLAN``, with a list of command lines
as JSON, each with a port of its own. In a line "die WHERE RANK STEP" that rank is killed there, and
a word "DIR/**/*.pt" is the checkpoint that a line before it left.

Exits with the status of the last.
"""

import gc
import glob
import json
import os
import signal
import sys
import time
import unittest.mock

import torch
import torch.distributed as dist

from ampfuse.experiments import checkpoint, tasks, trainers, training
from ampfuse.experiments.distributed import World


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def fails(*_):
    raise OSError("the disk is gone")


def dies_in_backward(task, outputs, targets):
    outputs.register_hook(lambda gradient: die())
    return outputs.sum()


def dies_in_the_collective(world, values):
    """When the others are in it too."""
    dist.all_reduce(torch.tensor(values, dtype=torch.float64), group=world._host, async_op=True)
    die()


def dies_while_writing(values, file):
    file.write(b"half of it")
    file.flush()
    die()


TRAPS = {
    "forward": (tasks.Task, "loss", lambda *_: die()),
    "backward": (tasks.Task, "loss", dies_in_backward),
    "collective": (World, "sum", dies_in_the_collective),
    "saving": (checkpoint, "rng_states", lambda *_: die()),  # after the weights were gathered
    "writing": (torch, "save", dies_while_writing),
    "error": (tasks.Task, "loss", fails),
    "silence": (tasks.Task, "loss", lambda *_: stop()),
    "sleep": (tasks.Task, "loss", lambda *_: time.sleep(1000)),
}


def set_trap(where, rank, step):
    if int(os.environ["RANK"]) != int(rank):
        return
    original = training.Training.set_lr

    def set_lr(self, arm, now):
        if now == int(step):
            owner, name, end = TRAPS[where]
            setattr(owner, name, end)
        original(self, arm, now)

    training.Training.set_lr = set_lr


if __name__ == "__main__":
    torch.set_num_threads(1)
    # torchvision takes files that are not the published ones.
    with unittest.mock.patch("torchvision.datasets.cifar.check_integrity", return_value=True):
        for port, trainer, *line in json.loads(sys.argv[1]):
            os.environ["MASTER_PORT"] = str(port)
            while line[0].startswith("die "):
                set_trap(*line.pop(0).split()[1:])
            words = [(glob.glob(w, recursive=True) or [w])[0] if "*" in w else w for w in line]
            status = trainers.main(trainer, words)
            gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads now and then abort a process that ends by itself
