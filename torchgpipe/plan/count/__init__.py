"""What layers do and hold, counted on `meta`: operators, bytes, what an optimizer adds.

It may import `plan.hardware`, not what predicts or searches.
"""
