"""Find out whether a change has slowed training down: time the old and the new code alternately."""
