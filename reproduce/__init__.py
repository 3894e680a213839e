"""Run the papers' experiments on this machine: experiments as data, one runner, records, and tables made from records."""
