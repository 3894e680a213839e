"""Run the papers' experiments here: experiments as data, one runner, records, and tables made from records."""
