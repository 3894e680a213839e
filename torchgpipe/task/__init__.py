"""Run a task (a micro-batch on a stage): its autograd graph, and checks of what its layers do."""
