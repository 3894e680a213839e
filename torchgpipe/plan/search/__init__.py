"""Search for the setup that has the shortest predicted step and fits every device's memory."""
