"""What runs tasks in their order: the graph engine, and programs, which are threads here and ranks in `distributed`."""
