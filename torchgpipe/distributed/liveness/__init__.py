"""How ranks learn that another one has failed, ended or hangs."""
