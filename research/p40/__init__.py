"""How the P40's efficiencies were found: `python -m research.p40` (README.md)."""
