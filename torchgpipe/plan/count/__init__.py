"""What layers do and hold, counted on `meta`: operators, bytes, and what an optimizer adds.
It may import `plan.hardware`, but nothing of `plan` that predicts or searches."""
