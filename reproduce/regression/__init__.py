"""Time an old and a new version of the code alternately: has a change slowed training down?"""
