"""How constants were found that the project commits. Research imports `reproduce`, never the reverse."""
