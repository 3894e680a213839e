"""Run tasks in the order of a schedule: with autograd's order, or in threads or processes."""
