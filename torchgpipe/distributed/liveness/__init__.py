"""Detect that another rank has failed, has ended or hangs."""
