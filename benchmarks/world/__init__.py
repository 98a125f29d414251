"""Training across the world: strategies that hide a slow, late link, on real processes."""
