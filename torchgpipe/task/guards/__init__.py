"""Guards: what both passes of a task have to meet alike, or what must not leak from one task to another.

A guard is one class in one file, which begins with an example of what goes wrong without it. Its methods are moments of
a mini-batch; it has those that it needs:

    before_first_pass, after_first_pass     note what the layers hold, and what the pass has changed
    again                                   a context around a recomputation, in which the layers find that again
    backward_begins                         refuse what was changed between forward and backward
    backward                                a context around the layers' backward

docs/how-it-works.md has the table of guards and their moments.
"""
