"""One task (a micro-batch on a stage): its autograd graph, and guards that check its layers."""
