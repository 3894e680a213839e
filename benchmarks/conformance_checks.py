"""All checks of `benchmarks.conformance`, in the order of its table."""

from __future__ import annotations

from benchmarks import conformance_data, conformance_failures, conformance_training
from benchmarks.conformance_parts import Check

CHECKS: dict[str, Check] = {**conformance_data.CHECKS, **conformance_training.CHECKS, **conformance_failures.CHECKS}
