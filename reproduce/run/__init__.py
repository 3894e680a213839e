"""Run experiments: time rows (configurations) on real devices, emulate them, or measure memory."""
