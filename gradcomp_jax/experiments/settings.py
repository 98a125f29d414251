"""What a run is made of, apart from its method: the numbers that methods are compared at."""

import dataclasses

import optax

from gradcomp_jax._checks import Range
from gradcomp_jax._errors import SettingError

RANGES: dict[str, Range] = {
    "workers": Range(1, 65_536),
    "epochs": Range(1, 1_000_000),
    "batch_per_worker": Range(1, 2**24),
    "learning_rate": Range(0, 1_000_000, whole=False, open_below=True),
    "momentum": Range(0, 1, whole=False, open_above=True),
    "density": Range(0, 1, whole=False, open_below=True),
    "clip_norm": Range(0, 1e30, whole=False, open_below=True),
    "warm_up_epochs": Range(0, 1_000_000, whole=False),
    # As many averages as that are kept on every device.
    "delay": Range(0, 1_024),
    "every": Range(1, 1_000_000),
}
"""Of the fields of :class:`Settings`, and of the options that set them."""

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "linear", "cosine")
WARM_UP = 0.05
"""Share of the steps over which the learning rate of ``cosine`` rises."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The hyper-parameters that every method of a comparison shares.

    Attributes:
      workers: devices on the data axis.
      epochs: passes over the training set.
      batch_per_worker: examples that one worker sees in a step.
      learning_rate: of the first step; of the schedule ``cosine`` the largest.
      momentum: of the heavy-ball kind, inside or after the exchange as the method has it; SGD's alone.
      density: the fraction of entries that a sparse method sends after its warm-up.
      clip_norm: threshold of DGC's local clipping, for the norm of the mean gradient; None for no clipping.
      warm_up_epochs: epochs over which DGC's density falls to ``density``.
      delay: steps until a delayed average arrives.
      every: steps from one exchange to the next, of methods that do not exchange in each.
      optimizer: what follows the exchange: ``sgd`` with ``momentum``, or ``adamw``.
      schedule: of the learning rate: ``constant``; ``linear``, which falls to zero at the end of the run; or ``cosine``, which
        rises from zero for a twentieth of the run, then falls to zero as a cosine.
      axis_name: name of the data axis.
    """

    workers: int = 8
    epochs: int
    batch_per_worker: int
    learning_rate: float
    momentum: float = 0.9
    density: float = 1e-3
    clip_norm: float | None
    warm_up_epochs: float
    delay: int = 4
    every: int = 4
    optimizer: str = "sgd"
    schedule: str = "constant"
    axis_name: str = "data"

    def __post_init__(self) -> None:
        """Checks every field by itself."""
        for name, allowed in RANGES.items():
            if (name, value := getattr(self, name)) != ("clip_norm", None):
                allowed.check(name, value)
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES)):
            if (value := getattr(self, name)) not in known:
                raise SettingError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    @property
    def batch(self) -> int:
        """Returns the examples that all workers together see in a step."""
        return self.workers * self.batch_per_worker

    def steps_per_epoch(self, examples: int) -> int:
        """Returns how many whole batches ``examples`` make; the rest of an epoch is left out."""
        steps = examples // self.batch
        if steps < 1:
            raise SettingError(
                f"a batch of {self.batch} ({self.workers} workers x {self.batch_per_worker}) is "
                f"larger than the training set of {examples}: use a smaller batch"
            )
        return steps

    def rate(self) -> optax.ScalarOrSchedule:
        """Returns the learning rate as optimizers take it: one for all steps, as long as nobody has counted them."""
        return self.learning_rate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CountedSettings(Settings):
    """The settings of a run whose ``steps`` are known, so that its learning rate can follow the schedule."""

    steps: int

    def rate(self) -> optax.ScalarOrSchedule:
        """Returns the learning rate as optimizers take it."""
        if self.schedule == "constant":
            return self.learning_rate
        if self.schedule == "cosine":
            rising = round(WARM_UP * self.steps)
            return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, rising, self.steps)
        return optax.linear_schedule(self.learning_rate, 0.0, self.steps)


def split_batch(batch: int, workers: int) -> int:
    """Returns the examples per worker of a global batch."""
    if workers < 1:
        raise SettingError(f"workers must be at least 1, got {workers}")
    if batch < 1 or batch % workers:
        below = max(batch // workers, 1) * workers
        raise SettingError(
            f"a batch of {batch} does not divide among {workers} workers: use {below} or {below + workers}"
        )
    return batch // workers
