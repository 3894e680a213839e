"""Search the setup with the shortest predicted step whose devices all have enough memory."""
