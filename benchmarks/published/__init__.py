"""What peers publish, written by us in NumPy and float64 from their papers and from what their code does.

Each is a class whose ``step`` takes gradients ``[workers, *shape]`` of all workers and returns the update that all of
them get. Nothing here imports the library, or anything of a peer's. `comparisons` runs the library beside them.
"""
