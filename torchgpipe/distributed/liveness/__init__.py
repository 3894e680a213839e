"""How ranks learn that another rank has failed, has ended or hangs."""
