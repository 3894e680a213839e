"""Count on `meta` what layers do and hold, and what an optimizer holds."""
