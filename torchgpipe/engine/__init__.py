"""What runs tasks in their order: the graph engine, and programs in threads or ranks."""
