"""How the efficiencies of the P40 were found."""
