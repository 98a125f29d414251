"""Programs that a TPU or GPU compiler makes for devices that nobody has to own; nothing runs."""
