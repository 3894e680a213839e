"""How the efficiencies of V100, A100 and H100 were found: `python -m research.gpus` (README.md)."""
