"""How "trains like dense AdamW" is measured: one small language model, one schedule, one tuning, for every method."""
