"""Search for the setup with the shortest predicted step, among those that fit the memory."""
