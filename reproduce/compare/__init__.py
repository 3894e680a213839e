"""Compare results: load sides, match their rows, judge what differs for real, render the tables."""
