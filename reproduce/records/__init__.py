"""Results on disk: measured, emulated, predicted and published ones.
It may import `machine`."""
