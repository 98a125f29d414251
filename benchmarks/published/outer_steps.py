"""Streaming DiLoCo's outer steps as torchft and MaxText run them.

Douillard et al., 2025, https://arxiv.org/abs/2501.18512, algorithm 2. github.com/pytorch/torchft, torchft/local_sgd.py
(`DiLoCo`), commit 73dafea4. github.com/AI-Hypercomputer/maxtext, src/maxtext/trainers/diloco/diloco.py, commit
e591f30c, whose steps are counted here with whole numbers: it counts them in uint32, where step - delay is a large
number as long as it should be negative.
"""

import numpy as np

Tree = dict[str, np.ndarray]


class OuterSteps:
    """Replicas that move by themselves, and fragments of them that now and then take an outer step together.

    Attributes:
        x: each worker's parameters, ``[N, *shape]``.
        centre: where the replicas were last together.
        departures, arrivals: ``(step, fragment)``, steps from 1 on.
    """

    def __init__(self, params: Tree, workers: int, *, rate: float, momentum: float, mix: float) -> None:
        self.centre = {name: p.astype(np.float64) for name, p in params.items()}
        self.x = {name: np.stack([p] * workers) for name, p in self.centre.items()}
        self.velocity = {name: np.zeros_like(p) for name, p in self.centre.items()}
        self.rate, self.momentum, self.mix, self.taken = rate, momentum, mix, 0
        self.departures: list[tuple[int, int]] = []
        self.arrivals: list[tuple[int, int]] = []

    def nesterov(self, name: str, gradient: np.ndarray) -> None:
        """SGD with Nesterov momentum, alike in optax and PyTorch."""
        self.velocity[name] = self.momentum * self.velocity[name] + gradient
        self.centre[name] = self.centre[name] - self.rate * (gradient + self.momentum * self.velocity[name])

    def come(self, name: str) -> np.ndarray:
        """The mean of how far replicas have come: old - new."""
        return self.centre[name] - self.x[name].mean(axis=0)

    def merge(self, name: str) -> None:
        self.x[name] = self.mix * self.x[name] + (1 - self.mix) * self.centre[name]

    def local(self, updates: Tree) -> None:
        self.x = {name: x + updates[name] for name, x in self.x.items()}
        self.taken += 1


class Torchft(OuterSteps):
    """One counter for all fragments, from 0 to ``every / P``: at ``every / P - delay`` the mean of the next departs, at
    ``every / P`` it arrives, the outer step is taken, and the counter is 0 again.

    Args:
        fragments: which tensors are in which.
        begin: where the counter begins; below 0 the first departure is later by as many steps.
    """

    def __init__(self, params, workers, *, fragments: list[set[str]], every, delay, begin=0, **options) -> None:
        super().__init__(params, workers, **options)
        self.fragments, self.delay, self.count, self.steps = fragments, delay, begin, every // len(fragments)
        self.flying: Tree = {}

    def step(self, updates: Tree) -> Tree:
        self.local(updates)
        self.count += 1
        number = len(self.arrivals) % len(self.fragments)
        if self.count == self.steps - self.delay:
            self.flying = {name: self.come(name) for name in self.fragments[number]}
            self.departures.append((self.taken, number))
        if self.count == self.steps:
            for name, gradient in self.flying.items():
                self.nesterov(name, gradient)
                self.merge(name)
            self.arrivals.append((self.taken, number))
            self.count = 0
        return self.x


class MaxText(OuterSteps):
    """At each multiple of ``every / P`` one fragment takes its outer step; replicas get it ``delay`` steps later.

    Fragment ``step % every // (every / P)``: the one that the last multiple of a period belongs to has number 0.
    """

    def __init__(self, params, workers, *, fragments: list[set[str]], every, delay, **options) -> None:
        super().__init__(params, workers, **options)
        self.fragments, self.every, self.delay, self.steps = fragments, every, delay, every // len(fragments)

    def step(self, updates: Tree) -> Tree:
        self.local(updates)
        for turn, outer in ((self.taken, True), (self.taken - self.delay, False)):
            if turn > 0 and turn % self.steps == 0:
                number = turn % self.every // self.steps
                (self.departures if outer else self.arrivals).append((self.taken, number))
                for name in self.fragments[number]:
                    if outer:
                        self.nesterov(name, self.come(name))
                    else:
                        self.merge(name)
        return self.x
