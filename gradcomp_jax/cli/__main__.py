"""``python -m gradcomp_jax.cli`` is ``gradcomp``."""

from gradcomp_jax.cli import main

main()
