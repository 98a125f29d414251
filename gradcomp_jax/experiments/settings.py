"""What a run is made of, apart from its method: the numbers that methods are compared at."""

import dataclasses

from gradcomp_jax._errors import SettingError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The hyper-parameters that every method of a comparison shares.

    Attributes:
      workers: devices on the data axis.
      epochs: passes over the training set.
      batch_per_worker: examples that one worker sees in a step.
      learning_rate: constant over the run.
      momentum: of the heavy-ball kind, inside or after the exchange as the method has it.
      density: the fraction of entries that a sparse method sends after its warm-up.
      clip_norm: threshold of DGC's local clipping, for the norm of the mean gradient.
      warm_up_epochs: epochs over which DGC's density falls to ``density``.
      delay: steps until a delayed average arrives.
      every: steps from one exchange to the next, of methods that do not exchange in each.
      axis_name: name of the data axis.
    """

    workers: int = 8
    epochs: int
    batch_per_worker: int
    learning_rate: float
    momentum: float = 0.9
    density: float = 1e-3
    clip_norm: float
    warm_up_epochs: float
    delay: int = 4
    every: int = 4
    axis_name: str = "data"

    def __post_init__(self) -> None:
        """Checks every field by itself.

        Raises:
          SettingError: if one is out of its range.
        """
        if self.delay < 0:
            raise SettingError(f"delay must not be negative, got {self.delay}")
        for name in ("workers", "epochs", "batch_per_worker", "every"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise SettingError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.momentum < 1:
            raise SettingError(f"momentum must be in [0, 1), got {self.momentum}")
        if not 0 < self.density <= 1:
            raise SettingError(f"density must be in (0, 1], got {self.density}")
        if self.warm_up_epochs < 0:
            raise SettingError(f"warm_up_epochs must not be negative, got {self.warm_up_epochs}")

    @property
    def batch(self) -> int:
        """Returns the examples that all workers together see in a step."""
        return self.workers * self.batch_per_worker

    def steps_per_epoch(self, examples: int) -> int:
        """Returns how many whole batches ``examples`` make; the rest of an epoch is left out.

        Raises:
          SettingError: if they do not make one.
        """
        steps = examples // self.batch
        if steps < 1:
            raise SettingError(
                f"a batch of {self.batch} ({self.workers} workers x {self.batch_per_worker}) is "
                f"larger than the training set of {examples}: use a smaller batch"
            )
        return steps


def split_batch(batch: int, workers: int) -> int:
    """Returns the examples per worker of a global batch.

    Raises:
      SettingError: if the workers cannot share the batch equally.
    """
    if workers < 1:
        raise SettingError(f"workers must be at least 1, got {workers}")
    if batch < 1 or batch % workers:
        below = max(batch // workers, 1) * workers
        raise SettingError(
            f"a batch of {batch} does not divide among {workers} workers: use {below} or {below + workers}"
        )
    return batch // workers
