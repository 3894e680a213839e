"""Tables, as text and as Markdown."""
