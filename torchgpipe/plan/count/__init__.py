"""What layers do and hold, counted on `meta`: operators, bytes, and what an optimizer adds."""
