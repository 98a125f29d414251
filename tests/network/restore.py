"""One of several processes that restore a checkpoint onto the devices of all of them, and save what they have.

``restore.py COORDINATOR INDEX COUNT WORKERS FROM TO``
"""

import dataclasses
import pathlib
import sys

import jax

import gradcomp_jax as gc
from gradcomp_jax.experiments import Trainer, load, task


def main(address: str, index: str, count: str, workers: str, source: str, target: str) -> None:
    jax.distributed.initialize(address, int(count), int(index))
    whole = task("digits")
    settings = dataclasses.replace(whole.settings, workers=int(workers), batch_per_worker=128 // int(workers), epochs=1)
    like = Trainer("topk-sgd", whole.on(load("digits")), settings).initial_state(0)
    gc.save_checkpoint(target, gc.restore_checkpoint(pathlib.Path(source), like))


if __name__ == "__main__":
    main(*sys.argv[1:])
