"""Write an HTML page that reports results, with tables and figures made from records of runs."""
