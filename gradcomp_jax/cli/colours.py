"""Colours of lines."""

# Okabe and Ito's colours, which colour-blind readers can tell apart, and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000", "#B8A800")
