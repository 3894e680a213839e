"""Run experiments: train each row (configuration), and measure its time, memory or accuracy."""
