"""Run tasks in the order of a schedule: by autograd, in threads, or in processes."""
